//! Queue pairs: create, modify, query, post.

#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use rdma_sys::*;

use super::ibv_srq::Srq;
use super::mlx5::dc::Initiator;
use super::owned::Owned;
use super::{Ibverbs, convert, ibv_post, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError, QpInit};
use rdma_provider::types::{
    AtomicCapability, DeviceAttr, QpAttr, QpCaps, QpState, Qpn, RecvWr, SendWr, Transport,
};

/// A queue pair, `ibv_qp`.
#[derive(Debug)]
pub struct Qp {
    raw: Owned<ibv_qp>,
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
    /// Lowest state in which plain requests are posted in place: RTS, or none.
    in_place: u8,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Qp {}
// SAFETY: S3: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// Returns the C library's handle.
    ///
    /// # Safety
    ///
    /// Valid while this object lives. The caller must neither destroy nor modify it.
    #[must_use]
    pub const unsafe fn as_raw(&self) -> NonNull<ibv_qp> {
        self.raw.get()
    }

    /// Creates a queue pair. It posts through `ibv_wr_*` if it is a DC initiator, or if `extended`
    /// is true and the driver supports it.
    pub(super) fn new(
        pd: NonNull<ibv_pd>,
        init: &QpInit<'_, Ibverbs>,
        device: &DeviceAttr,
        extended: bool,
    ) -> Result<Self, VerbError> {
        if init.transport == Transport::Dci {
            if device.dc.is_none() {
                return Err(contract::NoDct::REFUSED);
            }
            let Initiator { raw, extended, dc, granted } =
                Initiator::new(pd, init, send_operations(init.transport, device))?;
            return Ok(Self {
                dc: Some(dc),
                receives: false,
                ..Self::made(raw, Some(extended), init.transport, &granted)
            });
        }
        let receives = init.srq.is_none();
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
            wanted.send_ops_flags = u64::from(send_operations(init.transport, device).0);
            // SAFETY: S3: domain and queues are alive, the attributes local.
            let qp = unsafe { ibv_create_qp_ex(pd.as_ref().context, &raw mut wanted) };
            if let Ok(qp) = sys::handle("ibv_create_qp_ex", qp) {
                // SAFETY: S3: just created.
                let extended = NonNull::new(unsafe { ibv_qp_to_qp_ex(qp.as_ptr()) });
                return Ok(Self {
                    receives,
                    ..Self::made(qp, extended, init.transport, &wanted.cap)
                });
            }
        }
        // `ibv_qp_init_attr_ex` starts with the fields of `ibv_qp_init_attr`.
        // SAFETY: S3: domain and queues are alive, the attributes local.
        let qp = unsafe { ibv_create_qp(pd.as_ptr(), (&raw mut raw).cast()) };
        let qp = sys::handle("ibv_create_qp", qp)?;
        Ok(Self { receives, ..Self::made(qp, None, init.transport, &raw.cap) })
    }

    fn made(
        raw: NonNull<ibv_qp>,
        extended: Option<NonNull<ibv_qp_ex>>,
        transport: Transport,
        granted: &ibv_qp_cap,
    ) -> Self {
        let state = AtomicU8::new(QpState::Reset as u8);
        let in_place = if transport == Transport::Rc { QpState::Rts as u8 } else { u8::MAX };
        // SAFETY: S3: just created.
        let raw = unsafe { Owned::new(raw) };
        Self {
            raw,
            extended,
            dc: None,
            receives: true,
            transport,
            caps: convert::caps_from(granted),
            state,
            in_place,
        }
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
        match self.extended {
            // SAFETY: S1: the caller's promise; S3: the queue pair is alive.
            Some(qp) => unsafe { ibv_post::extended(qp.as_ptr(), self.dc, self.transport, list) },
            None => ibv_post::sends(self.transport, list, |first, refused| {
                // SAFETY: S1: the caller's promise; S3: the queue pair is alive, the chain local.
                sys::status("ibv_post_send", unsafe { ibv_post_send(self.raw(), first, refused) })
            }),
        }
    }

    /// Refuses work in states below `first`.
    #[inline]
    fn check(&self, verb: &'static str, first: u8) -> Result<(), PostError> {
        if self.state.load(Ordering::Acquire) >= first {
            return Ok(());
        }
        Err(PostError { posted: 0, error: VerbError::new(verb, VerbError::EINVAL) })
    }
}

/// Returns the `ibv_wr_*` operations for a queue pair of `transport`.
fn send_operations(transport: Transport, device: &DeviceAttr) -> ibv_qp_create_send_ops_flags {
    use ibv_qp_create_send_ops_flags as op;
    let send = op::IBV_QP_EX_WITH_SEND | op::IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = op::IBV_QP_EX_WITH_RDMA_WRITE | op::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    match transport {
        Transport::Ud => send,
        Transport::Uc => send | write,
        Transport::Rc | Transport::Dci => {
            let mut all = send | write | op::IBV_QP_EX_WITH_RDMA_READ;
            if transport == Transport::Rc {
                all |= op::IBV_QP_EX_WITH_SEND_WITH_INV;
            }
            if device.atomic != AtomicCapability::None {
                all = all
                    | op::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
                    | op::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
            }
            if device.max_mw > 0 && transport == Transport::Rc {
                all = all
                    | op::IBV_QP_EX_WITH_SEND_WITH_INV
                    | op::IBV_QP_EX_WITH_LOCAL_INV
                    | op::IBV_QP_EX_WITH_BIND_MW;
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
        let mut raw = convert::qp_attr_to(attr);
        // An earlier state refuses work from now on, a later one accepts it once the device has
        // agreed.
        let before = self.state.load(Ordering::Acquire);
        if let Some(lower) = attr.state.map(|state| state as u8).filter(|&state| state < before) {
            self.state.store(lower, Ordering::Release);
        }
        // SAFETY: S3: the queue pair is alive, the attributes local.
        let result = unsafe { ibv_modify_qp(self.raw(), &raw mut raw, attr.mask().bits() as i32) };
        let result = sys::status("ibv_modify_qp", result);
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
        Ok(convert::qp_attr_from(&raw, self.transport))
    }

    #[inline(always)]
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
        let posted =
            if self.state.load(Ordering::Acquire) >= self.in_place && ibv_post::is_plain(&wr) {
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
        posted.map_err(|error| PostError { posted: 0, error })
    }

    #[inline]
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // Without a receive queue, drivers return EINVAL or report a full queue.
        let first = if self.receives { QpState::Init as u8 } else { u8::MAX };
        self.check("ibv_post_recv", first)?;
        ibv_post::receives(list, |first, refused| {
            // SAFETY: S1: the caller's promise; S3: the queue pair is alive, the chain local.
            sys::status("ibv_post_recv", unsafe { ibv_post_recv(self.raw(), first, refused) })
        })
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        self.raw.destroy()
    }
}
