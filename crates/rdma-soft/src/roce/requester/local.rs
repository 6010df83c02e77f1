//! Work that the own device does: windows are bound and keys invalidated, and the peer is told nothing.

use rdma_provider::types::{QpState, SendOp, WcStatus};

use crate::device::keys::Keys;

use super::{Requester, SendCompletions};

impl Requester {
    /// Does the local work request at the cursor, if all before it is done and nothing holds it up; `None` if not, or if
    /// it failed.
    ///
    /// An invalidation may be asked to wait so (local invalidate fence, IBTA 10.6.7); that a binding does is one order
    /// less to think of.
    #[cold]
    pub(super) fn run_local(&mut self, keys: &Keys, out: &mut impl SendCompletions) -> Option<()> {
        if self.cursor > 0 || self.state != QpState::Rts {
            return None;
        }
        let head = self.queue.front_mut()?;
        let (qpn, pd) = (self.config.qpn, self.config.pd);
        let (done, status) = match (head.op, head.bind.take()) {
            (SendOp::LocalInvalidate(rkey), _) => {
                (keys.invalidate(rkey, qpn).is_ok(), WcStatus::LOC_QP_OP_ERR)
            }
            (_, Some(bind)) => (keys.bind_window(qpn, pd, &bind).is_ok(), WcStatus::MW_BIND_ERR),
            _ => (false, WcStatus::MW_BIND_ERR),
        };
        if done {
            self.complete_head(out);
            Some(())
        } else {
            self.fail(status, out);
            None
        }
    }
}
