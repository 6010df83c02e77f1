//! Work requests without packets: binding windows and invalidating keys.

use rdma_provider::types::{QpState, SendOp, WcStatus};

use crate::memory::keys::Keys;

use super::{Requester, SendCompletions};

impl Requester {
    /// Executes the local work request at the cursor once all earlier ones are complete, or returns
    /// `None`.
    ///
    /// An invalidation may require this order (local invalidate fence, IBTA 10.6.7); binds use it
    /// for simplicity.
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
