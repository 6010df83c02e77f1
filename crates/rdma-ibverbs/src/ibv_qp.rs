//! Queue pairs: create, modify, query, post.

#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use crate::ffi::*;
use rdma_provider::locks::Mutex;

use super::ibv_srq::Srq;
use super::mlx5::dc::Initiator;
use super::mlx5::direct::{QueuePair, Registers, SendQueue, Uses};
use super::owned::Owned;
use super::posting::Posting;
use super::supported::is_plain;
use super::vendor::{SIW, empty_receive};
use super::{Ibverbs, convert, ibv_mcast, ibv_post, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, PlainWr, PostError, QpInit};
use rdma_provider::types::{
    AtomicCapability, DeviceAttr, Gid, QpAttr, QpCaps, QpState, Qpn, RecvWr, SendWr, Sge, Transport,
};

/// A queue pair, `ibv_qp`.
#[derive(Debug)]
pub struct Qp {
    raw: Owned<ibv_qp>,
    /// The same queue pair, if its device posts directly.
    direct: Option<QueuePair>,
    /// The send queue in `direct`, if it takes plain requests.
    plain: Option<NonNull<SendQueue>>,
    /// The same queue pair for `ibv_wr_*`, if the driver supports it.
    extended: Option<NonNull<ibv_qp_ex>>,
    /// The same queue pair for setting the DC target, if it is an initiator.
    dc: Option<NonNull<mlx5dv_qp_ex>>,
    transport: Transport,
    caps: QpCaps,
    /// True if it has a receive queue of its own.
    receives: bool,
    /// Last state set. Drivers differ on work posted too early: some refuse it but leave it in the
    /// ring, some accept it.
    state: AtomicU8,
    /// True for siw, which does not report the state of a queue pair, does not reset it, and does
    /// not flush what is posted in the error state.
    is_siw: bool,
    /// The elements of a receive without any.
    empty: &'static [Sge],
    /// Lowest state in which a single plain request of RC is passed to libibverbs without a list;
    /// `u8::MAX`: never, as for queue pairs that post directly.
    single_from: u8,
    /// Multicast groups: the kernel destroys no queue pair that is attached to one.
    groups: Mutex<BTreeSet<(Gid, u16)>>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Qp {}
// SAFETY: S3: as above.
unsafe impl Sync for Qp {}

/// A new queue pair of libibverbs.
struct Created {
    raw: NonNull<ibv_qp>,
    extended: Option<NonNull<ibv_qp_ex>>,
    dc: Option<NonNull<mlx5dv_qp_ex>>,
    granted: ibv_qp_cap,
}

impl Created {
    /// Creates a queue pair in protection domain `pd`, for `ibv_wr_*` if it is a DC initiator, or
    /// if `extended` is true and the driver supports it. `flags`: creation flags of libmlx5, with
    /// which the queue pair is created by `mlx5dv_create_qp(3)` or not at all.
    fn new(
        pd: NonNull<ibv_pd>,
        init: &QpInit<'_, Ibverbs>,
        device: &DeviceAttr,
        extended: bool,
        flags: Option<mlx5dv_qp_create_flags>,
    ) -> Result<Self, VerbError> {
        let operations = send_operations(init.transport, device);
        if init.transport == Transport::Dci {
            if device.dc.is_none() {
                return Err(contract::NoDct::REFUSED);
            }
            let Initiator { raw, extended, dc, granted } = Initiator::new(pd, init, operations)?;
            return Ok(Self { raw, extended: Some(extended), dc: Some(dc), granted });
        }
        // SAFETY: S3: zeros are valid.
        let mut raw: ibv_qp_init_attr_ex = unsafe { mem::zeroed() };
        raw.send_cq = init.send_cq.raw();
        raw.recv_cq = init.recv_cq.raw();
        raw.srq = init.srq.map_or(ptr::null_mut(), Srq::raw);
        raw.cap = convert::caps_to(init.caps);
        raw.qp_type = convert::qp_type(init.transport);
        raw.pd = pd.as_ptr();
        if extended {
            let mut wanted = raw;
            wanted.comp_mask = (ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
                | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
                .0;
            wanted.send_ops_flags = u64::from(operations.0);
            // SAFETY: S3: domain and queues are alive, the attributes local.
            let context = unsafe { pd.as_ref().context };
            let (verb, qp) = match flags {
                // SAFETY: S3: as above.
                None => ("ibv_create_qp_ex", unsafe { ibv_create_qp_ex(context, &raw mut wanted) }),
                Some(flags) => {
                    // SAFETY: S3: zeros are valid.
                    let mut special: mlx5dv_qp_init_attr = unsafe { mem::zeroed() };
                    special.comp_mask =
                        mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS.0.into();
                    special.create_flags = flags.0;
                    // SAFETY: S3: as above.
                    let qp =
                        unsafe { mlx5dv_create_qp(context, &raw mut wanted, &raw mut special) };
                    ("mlx5dv_create_qp", qp)
                }
            };
            let qp = sys::handle(verb, qp);
            if flags.is_some() {
                // Only this call has them.
                qp?;
            }
            if let Ok(raw) = qp {
                // SAFETY: S3: just created.
                let extended = NonNull::new(unsafe { ibv_qp_to_qp_ex(raw.as_ptr()) });
                return Ok(Self { raw, extended, dc: None, granted: wanted.cap });
            }
        }
        // `ibv_qp_init_attr_ex` starts with the fields of `ibv_qp_init_attr`.
        // SAFETY: S3: domain and queues are alive, the attributes local.
        let qp = unsafe { ibv_create_qp(pd.as_ptr(), (&raw mut raw).cast()) };
        let qp = sys::handle("ibv_create_qp", qp)?;
        Ok(Self { raw: qp, extended: None, dc: None, granted: raw.cap })
    }
}

impl Qp {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither destroy nor modify it.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_qp> {
        self.raw.get()
    }

    /// Creates a queue pair.
    pub(super) fn new(
        pd: NonNull<ibv_pd>,
        init: &QpInit<'_, Ibverbs>,
        device: &DeviceAttr,
        posting: Posting,
        registers: &Registers,
    ) -> Result<Self, VerbError> {
        let Some(direct) = posting.direct() else {
            let extended = matches!(posting, Posting::Extended);
            return Ok(Self::made(Created::new(pd, init, device, extended, None)?, init, device));
        };
        const OTHER_DEVICE: VerbError = VerbError::new(
            "ibv_create_qp (a completion queue or shared receive queue of another open device)",
            VerbError::EINVAL,
        );
        let queues = (init.send_cq.direct(), init.recv_cq.direct());
        let (Some(send_cq), Some(recv_cq)) = queues else { return Err(OTHER_DEVICE) };
        let srq = init.srq.map(|srq| srq.direct().ok_or(OTHER_DEVICE)).transpose()?;
        let uses = Uses { send_cq, recv_cq, srq };
        // SAFETY: S3: the domain outlives its registers.
        let domain = unsafe { registers.next(pd) }?;
        let flags = direct.create_flags(init.direct.scatter_to_cqe);
        let created = Created::new(domain.domain(), init, device, true, flags)?;
        let (raw, transport) = (created.raw, init.transport);
        // From here on, an error destroys the queue pair.
        let mut made = Self::made(created, init, device);
        // SAFETY: S3: new, and created in that domain; the layer above destroys it before its
        // queues.
        let pair = unsafe {
            direct.queue_pair(raw, transport, &made.caps, init.direct.blue_flame, uses, domain)
        }?;
        if transport == Transport::Rc {
            made.plain = pair.send().ok().map(NonNull::from);
        }
        made.direct = Some(pair);
        made.single_from = u8::MAX;
        Ok(made)
    }

    fn made(created: Created, init: &QpInit<'_, Ibverbs>, device: &DeviceAttr) -> Self {
        let Created { raw, extended, dc, granted } = created;
        let single_from =
            if init.transport == Transport::Rc { QpState::Rts as u8 } else { u8::MAX };
        Self {
            // SAFETY: S3: just created.
            raw: unsafe { Owned::new(raw) },
            direct: None,
            plain: None,
            extended,
            dc,
            transport: init.transport,
            caps: convert::caps_from(&granted),
            receives: init.srq.is_none() && init.transport != Transport::Dci,
            state: AtomicU8::new(QpState::Reset as u8),
            is_siw: device.vendor_id == SIW,
            empty: empty_receive(device),
            single_from,
            groups: Mutex::default(),
        }
    }

    #[inline]
    fn direct(&self) -> Option<&QueuePair> {
        if cfg!(feature = "mlx5") { self.direct.as_ref() } else { None }
    }

    #[inline]
    fn plain(&self) -> Option<&SendQueue> {
        // SAFETY: S3: `direct` keeps the queue, and does not move it.
        if cfg!(feature = "mlx5") { self.plain.map(|send| unsafe { send.as_ref() }) } else { None }
    }

    fn raw(&self) -> *mut ibv_qp {
        self.raw.get().as_ptr()
    }

    /// Posts a list of any length and any operations.
    ///
    /// # Safety
    ///
    /// See [`post_send`](contract::Qp::post_send).
    #[inline(never)]
    unsafe fn post_list<'a>(
        &self,
        list: impl Iterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        self.check("ibv_post_send", QpState::Rts as u8)?;
        if let Some(direct) = self.direct() {
            let send = direct.send().map_err(refused)?;
            // SAFETY: S1: the caller's promise.
            return unsafe { send.post_list(list) };
        }
        match self.extended {
            // SAFETY: S1: the caller's promise; S3: the queue pair is alive.
            Some(qp) => unsafe { ibv_post::extended(qp.as_ptr(), self.dc, self.transport, list) },
            None => ibv_post::sends(self.transport, list, |first, refused| {
                // SAFETY: S1: the caller's promise; S3: the queue pair is alive, the chain local.
                sys::status("ibv_post_send", unsafe { ibv_post_send(self.raw(), first, refused) })
            }),
        }
    }

    /// Returns true if work that is posted now would never complete.
    #[inline]
    fn is_closed(&self, state: u8) -> bool {
        self.is_siw && state == QpState::Err as u8
    }

    /// Refuses work in states below `first`.
    #[inline]
    fn check(&self, verb: &'static str, first: u8) -> Result<(), PostError> {
        let state = self.state.load(Ordering::Acquire);
        if state >= first && !self.is_closed(state) {
            return Ok(());
        }
        Err(PostError { posted: 0, error: VerbError::new(verb, VerbError::EINVAL) })
    }
}

/// Returns the error of a list whose first request is refused.
fn refused(error: VerbError) -> PostError {
    PostError { posted: 0, error }
}

/// Returns the `ibv_wr_*` operations for a queue pair of `transport`.
fn send_operations(transport: Transport, device: &DeviceAttr) -> ibv_qp_create_send_ops_flags {
    use ibv_qp_create_send_ops_flags as op;
    let send = op::IBV_QP_EX_WITH_SEND | op::IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = op::IBV_QP_EX_WITH_RDMA_WRITE | op::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let windows = if device.max_mw > 0 {
        op::IBV_QP_EX_WITH_LOCAL_INV | op::IBV_QP_EX_WITH_BIND_MW
    } else {
        op(0)
    };
    match transport {
        Transport::Ud => send,
        // Drivers size the entries of the send queue by these.
        Transport::Uc => send | write | windows,
        Transport::Rc | Transport::Dci => {
            let mut all = send | write | op::IBV_QP_EX_WITH_RDMA_READ;
            if device.atomic != AtomicCapability::None {
                all = all
                    | op::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
                    | op::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
            }
            if transport == Transport::Rc {
                all = all | op::IBV_QP_EX_WITH_SEND_WITH_INV | windows;
            }
            all
        }
    }
}

impl contract::Qp for Qp {
    fn qpn(&self) -> Qpn {
        // SAFETY: S3: the queue pair is alive.
        Qpn(unsafe { self.raw.get().as_ref().qp_num })
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        if !convert::fits(attr) {
            return Err(VerbError::new("ibv_modify_qp", VerbError::EINVAL));
        }
        // siw says that it has done so, but leaves the queue pair in the error state.
        if self.is_siw && attr.state == Some(QpState::Reset) {
            let verb = "ibv_modify_qp (siw cannot reset a queue pair; create another one)";
            return Err(VerbError::new(verb, VerbError::EOPNOTSUPP));
        }
        let mut raw = convert::qp_attr_to(attr);
        // An earlier state refuses work from now on, a later one accepts it once the device has
        // agreed.
        let before = self.state.load(Ordering::Acquire);
        if let Some(lower) = attr.state.map(|state| state as u8).filter(|&state| state < before) {
            self.state.store(lower, Ordering::Release);
        }
        let mut modify = || {
            let mask = attr.mask().bits() as i32;
            // SAFETY: S3: the queue pair is alive, the attributes local.
            sys::status("ibv_modify_qp", unsafe { ibv_modify_qp(self.raw(), &raw mut raw, mask) })
        };
        let result = match self.direct() {
            Some(direct) if attr.state == Some(QpState::Reset) => direct.reset(&mut modify),
            _ => modify(),
        };
        if let (Ok(()), Some(QpState::Rts), Some(send)) = (&result, attr.state, self.plain()) {
            send.open();
        }
        self.state.store(
            match (&result, attr.state) {
                (Ok(()), Some(state)) => state as u8,
                _ => before,
            },
            Ordering::Release,
        );
        result
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        // SAFETY: S3: zeros are valid.
        let (mut raw, mut init) =
            unsafe { (mem::zeroed::<ibv_qp_attr>(), mem::zeroed::<ibv_qp_init_attr>()) };
        // All attributes of `ibv_query_qp(3)`.
        let mask = (1 << 21) - 1;
        // SAFETY: S3: the queue pair is alive, both structures are local.
        sys::status("ibv_query_qp", unsafe {
            ibv_query_qp(self.raw(), &raw mut raw, mask, &raw mut init)
        })?;
        if self.is_siw {
            raw.qp_state = self.state.load(Ordering::Acquire).into();
        }
        Ok(convert::qp_attr_from(&raw, self.transport))
    }

    fn connected(&self) {
        self.state.store(QpState::Rts as u8, Ordering::Release);
    }

    #[inline]
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        let mut list = list.into_iter();
        if list.size_hint().1 != Some(1) {
            // SAFETY: S1: the caller's promise.
            return unsafe { self.post_list(list) };
        }
        let Some(wr) = list.next() else { return Ok(()) };
        // Copied so that its fields stay in registers; only `post_list` needs it in memory.
        let wr = *wr.borrow();
        let state = self.state.load(Ordering::Acquire);
        let posted = if state >= self.single_from && is_plain(&wr) && !self.is_closed(state) {
            match self.extended {
                // SAFETY: S1: the caller's promise; S3: the queue pair is alive.
                Some(qp) => unsafe { ibv_post::extended_in_place(qp.as_ptr(), &wr) },
                // SAFETY: S1, S3: as above.
                None => unsafe { ibv_post::send_in_place(self.raw(), &wr) },
            }
        } else {
            // SAFETY: S1: as above.
            unsafe { self.post_list([wr].iter()) }.map_err(|refused| refused.error)
        };
        posted.map_err(refused)
    }

    fn has_plain(&self) -> bool {
        self.plain().is_some()
    }

    // Calls here and below, and to `take_request`, cost 134 instructions of a WRITE.
    #[inline(always)]
    unsafe fn post_plain(&self, list: impl ExactSizeIterator<Item = PlainWr>) -> bool {
        match self.plain() {
            // SAFETY: S1, S3: the caller's promise.
            Some(send) => unsafe { send.post_plain(list) },
            None => false,
        }
    }

    #[inline]
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // Without a receive queue, drivers return EINVAL or report a full queue.
        let first = if self.receives { QpState::Init as u8 } else { u8::MAX };
        self.check("ibv_post_recv", first)?;
        if let Some(direct) = self.direct() {
            let receive = direct.receive().map_err(refused)?;
            // SAFETY: S1: the caller's promise.
            return unsafe { receive.post(list) };
        }
        ibv_post::receives(list, self.empty, |first, refused| {
            // SAFETY: S1: the caller's promise; S3: the queue pair is alive, the chain local.
            sys::status("ibv_post_recv", unsafe { ibv_post_recv(self.raw(), first, refused) })
        })
    }

    fn attach_multicast(&self, group: Gid, lid: u16) -> Result<(), VerbError> {
        let mut groups = self.groups.lock();
        // SAFETY: S3: the queue pair is alive.
        unsafe { ibv_mcast::attach(self.raw(), group, lid) }?;
        groups.insert((group, lid));
        Ok(())
    }

    fn detach_multicast(&self, group: Gid, lid: u16) -> Result<(), VerbError> {
        let mut groups = self.groups.lock();
        // SAFETY: S3: the queue pair is alive.
        unsafe { ibv_mcast::detach(self.raw(), group, lid) }?;
        groups.remove(&(group, lid));
        Ok(())
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        let groups: Vec<_> = self.groups.lock().iter().copied().collect();
        for (group, lid) in groups {
            // If this fails, the destruction does, too.
            if let Err(error) = self.detach_multicast(group, lid) {
                let qpn = contract::Qp::qpn(self);
                rdma_provider::warn!(%qpn, %group, %error, "failed to leave a multicast group");
            }
        }
        let Self { raw, direct, .. } = self;
        match direct {
            Some(direct) if !raw.is_destroyed() => direct.destroy(|| raw.destroy()),
            _ => raw.destroy(),
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if let Err(error) = contract::Qp::destroy(self) {
            let qpn = contract::Qp::qpn(self);
            rdma_provider::error!(%qpn, %error, "failed to destroy queue pair; leaking it");
            self.raw.leak();
        }
    }
}
