//! DC targets.

use std::sync::{Arc, OnceLock};

use rdma_provider::VerbError;
use rdma_provider::contract::{self, DctInit};
use rdma_provider::locks::Mutex;
use rdma_provider::types::{Access, Gid, Mtu, Qkey, QpAttr, QpState, Qpn, RnrTimer, Transport};

use crate::Soft;
use crate::dc::{MAX_SESSIONS, Target, TargetCounters};
use crate::device::DeviceInner;
use crate::device::dct::{DctInner, State};
use crate::device::deferred::Deferred;
use crate::device::events::Events;
use crate::roce::partition::DEFAULT_PKEY;
use crate::roce::responder::ReceiveConfig;

pub(crate) fn create(
    (device, events): (&Arc<DeviceInner>, &Arc<Events>),
    pd: u32,
    init: &DctInit<'_, Soft>,
) -> Result<Dct, VerbError> {
    let foreign = [&init.recv_cq.device, &init.srq.device];
    if foreign.into_iter().any(|other| !Arc::ptr_eq(other, device)) {
        return Err(VerbError::new("mlx5dv_create_qp", VerbError::EINVAL));
    }
    let config = ReceiveConfig {
        transport: Transport::Rc,
        qpn: Qpn(0),
        gid: device.gid,
        pd,
        shared: true,
        receive_pd: init.srq.queue.pd(),
        access: Access::empty(),
        mtu: Mtu::Mtu4096,
        peer: Qpn(0),
        peer_gid: Gid::default(),
        qkey: Qkey(0),
        pkey: DEFAULT_PKEY,
        min_rnr_timer: RnrTimer::from_code(0),
        max_dest_rd_atomic: device.attr().dc.map_or(0, |dc| dc.max_rd_atomic),
    };
    let machine = Target::new(config, init.key, MAX_SESSIONS);
    Ok(Dct(Arc::new(DctInner {
        device: Arc::clone(device),
        events: Arc::clone(events),
        srq: Arc::clone(&init.srq.queue),
        cq: Arc::clone(&init.recv_cq.queue),
        attachment: OnceLock::new(),
        state: Mutex::new(State { machine, attr: QpAttr::default(), replying: false }),
    })))
}

/// A target of dynamic connections, see [`contract::Dct`].
///
/// - Statuses at the initiator: `REM_ACCESS_ERR` for a wrong key, `REM_INV_REQ_ERR` for an MTU
///   larger than the target's, `RETRY_EXC_ERR` for an unknown number.
/// - An initiator whose session was evicted with work in flight gets `REM_OP_ERR`.
/// - When a target is destroyed or its completion queue fails, the receive of a partly received
///   message returns to the shared receive queue.
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Context as _, CqInit, Dct as _, DctInit, Pd as _};
/// use rdma_soft::types::{DcKey, SrqCaps};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let (pd, cq) = (context.create_pd()?, context.create_cq(&CqInit::new(16))?);
/// let srq = pd.create_srq(SrqCaps { max_wr: 16, max_sge: 1 })?;
/// let target = pd.create_dct(&DctInit { srq: &srq, recv_cq: &cq, key: DcKey(0x5eed) })?;
/// // The number exists from RTR on.
/// assert_eq!(target.number(), None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Dct(Arc<DctInner>);

impl Dct {
    /// Returns its counters.
    pub fn counters(&self) -> TargetCounters {
        self.0.state.lock().machine.counters()
    }
}

impl contract::Dct for Dct {
    fn number(&self) -> Option<Qpn> {
        self.0.number()
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        self.0.device.check_alive("ibv_modify_qp")?;
        let deferred = Deferred::new();
        let result = self.0.modify(attr, &deferred);
        deferred.run();
        result
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        let state = self.0.state.lock();
        let now = state.machine.state();
        Ok((now, QpAttr { state: Some(now), ..state.attr }))
    }

    fn quiesce(&self) {
        let deferred = Deferred::new();
        self.0.fail(None, &deferred);
        deferred.run();
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        // `drop` destroys it.
        self.0.device.check_destroy("ibv_destroy_qp")
    }
}

impl Drop for Dct {
    fn drop(&mut self) {
        contract::Dct::quiesce(self);
        let dct = &self.0;
        if let Some(attachment) = dct.attachment.get() {
            dct.device.remove_target(attachment.number);
            dct.cq.detach(attachment.owner);
        }
    }
}
