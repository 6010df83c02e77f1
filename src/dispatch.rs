//! The closed set of providers: an enum with one variant each, and one branch per verb call (none
//! for a single provider), so that public types are not generic over the provider. Mixing objects
//! of different providers fails with EINVAL, like an object of a foreign protection domain.

// Passes the obligations of the contract's `unsafe fn`s through unchanged.
#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::error::VerbError;
use crate::forked;
use crate::types::{
    Access, AddressVector, AsyncEvent, DeviceAttr, Gid, Lkey, PortAttr, PortNum, QpAttr, QpCaps,
    QpState, Qpn, RecvWr, Rkey, SendWr, SrqCaps, Timestamp, TimestampedCompletion, WorkCompletion,
};
#[cfg(feature = "ibverbs")]
use rdma_ibverbs::Ibverbs;
use rdma_provider::cm_contract::{self, Admit, CmAnswer, CmEvent, CmParams, CmRoute};
use rdma_provider::contract::{
    self, CqInit, DctInit, DmaBufRange, PlainWr, PostError, Provider, QpInit,
};
use rdma_soft::Soft;
pub(crate) use rdma_soft::{CqCounters, ReceiveCounters, SendCounters, TargetCounters};

#[derive(Debug)]
pub(crate) struct Any;

macro_rules! objects {
    ($($name:ident),*) => {
        $(
            #[derive(Debug)]
            // Each is in an `Arc`, or there are few.
            #[allow(clippy::large_enum_variant)]
            pub(crate) enum $name {
                Soft(<Soft as Provider>::$name),
                #[cfg(feature = "ibverbs")]
                Ibverbs(<Ibverbs as Provider>::$name),
            }

            const _: () = {
                const fn is_shared<T: Send + Sync>() {}
                is_shared::<<Soft as Provider>::$name>();
                #[cfg(feature = "ibverbs")]
                is_shared::<<Ibverbs as Provider>::$name>();
            };
            // Without these, each proof that a future is `Send` goes through the types of the
            // providers, so deep that compilers announce an error for programs with the default
            // `recursion_limit`.
            // SAFETY: M1: shown for each variant just above.
            unsafe impl Send for $name {}
            // SAFETY: M1: as above.
            unsafe impl Sync for $name {}

            #[allow(dead_code, reason = "called only for objects that others are created from")]
            impl $name {
                fn soft(&self) -> Result<&<Soft as Provider>::$name, VerbError> {
                    match self {
                        Self::Soft(inner) => Ok(inner),
                        #[cfg(feature = "ibverbs")]
                        Self::Ibverbs(_) => Err(FOREIGN),
                    }
                }

                #[cfg(feature = "ibverbs")]
                pub(crate) fn ibverbs(&self) -> Result<&<Ibverbs as Provider>::$name, VerbError> {
                    match self {
                        Self::Soft(_) => Err(FOREIGN),
                        Self::Ibverbs(inner) => Ok(inner),
                    }
                }
            }
        )*

        impl Provider for Any {
            $(type $name = $name;)*
        }
    };
}

#[cfg(feature = "ibverbs")]
const FOREIGN: VerbError = VerbError::new("mixing objects of two providers", VerbError::EINVAL);

objects!(Context, Pd, Mr, Mw, Channel, Cq, Qp, Dct, Srq, Ah, CmChannel, CmId);

#[inline]
fn check_post() -> Result<(), PostError> {
    forked::check().map_err(|error| PostError { posted: 0, error })
}

macro_rules! each {
    ($object:expr, $inner:ident => $call:expr) => {
        match $object {
            Self::Soft($inner) => $call,
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs($inner) => $call,
        }
    };
}

/// Calls the same method, which creates an object, and wraps that. In it, `Cq as cq` unwraps a
/// completion queue of the same provider.
macro_rules! make {
    ($object:expr, $name:ident, $inner:ident $(, $used:ident as $of:ident)* => $call:expr) => {{
        forked::check()?;
        match $object {
            Self::Soft($inner) => {
                $(let $of = $used::soft;)*
                $call.map($name::Soft)
            }
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs($inner) => {
                $(let $of = $used::ibverbs;)*
                $call.map($name::Ibverbs)
            }
        }
    }};
}

macro_rules! forward {
    ($(
        $(#[$attribute:meta])* fn $method:ident($($name:ident: $type:ty),*) $(-> $result:ty)?;
    )*) => {
        $(
            $(#[$attribute])*
            fn $method(&self, $($name: $type),*) $(-> $result)? {
                each!(self, inner => inner.$method($($name),*))
            }
        )*
    };
}

impl Context {
    pub(crate) fn is_in_process(&self) -> bool {
        self.soft().is_ok_and(|inner| inner.is_in_process())
    }
}

impl contract::Context<Any> for Context {
    forward! {
        fn may_block() -> bool;
        fn reports_last_receive() -> bool;
        fn flushes_late_work() -> bool;
        fn random() -> Result<u64, VerbError>;
        fn attr() -> &DeviceAttr;
        fn port(port: PortNum) -> Result<PortAttr, VerbError>;
        fn pkey_table(port: PortNum) -> Result<Vec<u16>, VerbError>;
        fn port_counters(port: PortNum) -> Result<BTreeMap<String, u64>, VerbError>;
        fn event_fd() -> BorrowedFd<'_>;
        fn next_event() -> Result<Option<AsyncEvent>, VerbError>;
        fn packet_fd() -> Option<BorrowedFd<'_>>;
        fn process_packets() -> bool;
        fn stop_processing();
        fn read_clock() -> Result<Timestamp, VerbError>;
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        make!(self, Pd, inner => inner.create_pd())
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        make!(self, Channel, inner => inner.create_channel())
    }

    fn create_cq(&self, init: &CqInit<'_, Any>) -> Result<Cq, VerbError> {
        make!(self, Cq, inner, Channel as of => inner.create_cq(&init.with_channel_of(of)?))
    }

    fn create_cm_channel(&self) -> Result<CmChannel, VerbError> {
        make!(self, CmChannel, inner => inner.create_cm_channel())
    }
}

impl contract::Pd<Any> for Pd {
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        iova: u64,
        access: Access,
        shared: bool,
    ) -> Result<Mr, VerbError> {
        // SAFETY: S1, S2: the caller's promise.
        make!(self, Mr, inner => unsafe { inner.register(addr, len, iova, access, shared) })
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Mr, VerbError> {
        make!(self, Mr, inner => inner.register_dma_buf(fd, range, access))
    }

    fn create_qp(&self, init: &QpInit<'_, Any>) -> Result<Qp, VerbError> {
        make!(self, Qp, inner, Cq as cq, Srq as srq => {
            inner.create_qp(&init.with_queues_of(cq, srq)?)
        })
    }

    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, Any>) -> Result<Qp, VerbError> {
        make!(self, Qp, inner, Cq as cq, Srq as srq => {
            inner.create_numbered_qp(number, &init.with_queues_of(cq, srq)?)
        })
    }

    fn create_dct(&self, init: &DctInit<'_, Any>) -> Result<Dct, VerbError> {
        make!(self, Dct, inner, Cq as cq, Srq as srq => {
            inner.create_dct(&init.with_queues_of(cq, srq)?)
        })
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        make!(self, Mw, inner => inner.create_mw())
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        make!(self, Srq, inner => inner.create_srq(caps))
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        make!(self, Ah, inner => inner.create_ah(address))
    }
}

impl contract::Mr for Mr {
    forward! {
        fn lkey() -> Lkey;
        fn rkey() -> Rkey;
        fn handle() -> usize;
    }

    fn deregister(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.deregister())
    }
}

impl contract::Mw for Mw {
    forward! {
        fn rkey() -> Rkey;
        fn handle() -> usize;
    }

    fn deallocate(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.deallocate())
    }
}

impl contract::Channel for Channel {
    forward! {
        fn fd() -> BorrowedFd<'_>;
        fn next_event() -> Result<Option<u64>, VerbError>;
        fn hold();
        fn release();
        fn add_waker(waker: &Waker) -> Option<u64>;
        fn remove_waker(key: u64);
    }
}

#[cfg(feature = "ibverbs")]
pub(crate) use rdma_ibverbs::mlx5::direct::CompletionQueue as DirectQueue;

#[cfg(not(feature = "ibverbs"))]
#[derive(Debug)]
pub(crate) enum DirectQueue {}

#[cfg(not(feature = "ibverbs"))]
impl DirectQueue {
    pub(crate) fn take_request(&self, _wr_id: crate::types::WrId) -> Option<WorkCompletion> {
        match *self {}
    }

    pub(crate) fn drain(
        &self,
        _limit: usize,
        _each: impl FnMut(&WorkCompletion),
    ) -> Result<usize, VerbError> {
        match *self {}
    }
}

impl Cq {
    pub(crate) fn direct(&self) -> Option<Arc<DirectQueue>> {
        match self {
            Self::Soft(_) => None,
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => inner.direct().cloned(),
        }
    }

    pub(crate) const fn is_software(&self) -> bool {
        matches!(self, Self::Soft(_))
    }

    pub(crate) fn software_counters(&self) -> Option<CqCounters> {
        self.soft().ok().map(|inner| inner.counters())
    }
}

impl contract::Cq for Cq {
    forward! {
        fn id() -> u64;
        fn capacity() -> u32;
        #[inline]
        fn poll(out: &mut [WorkCompletion]) -> Result<usize, VerbError>;
        fn poll_timestamped(out: &mut [TimestampedCompletion]) -> Result<usize, VerbError>;
        #[inline]
        fn is_empty() -> Option<bool>;
        fn resize(capacity: u32) -> Result<(), VerbError>;
        fn moderate(completions: u16, period: u16) -> Result<(), VerbError>;
        fn ack(events: u32);
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        forked::check()?;
        each!(self, inner => inner.arm(solicited_only))
    }
}

impl Qp {
    pub(crate) fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.soft().ok().map(|inner| inner.counters())
    }
}

impl contract::Qp for Qp {
    forward! {
        fn qpn() -> Qpn;
        fn caps() -> QpCaps;
        fn modify(attr: &QpAttr) -> Result<(), VerbError>;
        fn query() -> Result<(QpState, QpAttr), VerbError>;
        fn connected();
        fn post_state() -> Option<*const ()>;
        fn peer_post_state() -> Option<*const ()>;
        fn has_plain() -> bool;
        fn attach_multicast(group: Gid, lid: u16) -> Result<(), VerbError>;
        fn detach_multicast(group: Gid, lid: u16) -> Result<(), VerbError>;
    }

    #[inline]
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        check_post()?;
        // SAFETY: S1: the caller's promise.
        each!(self, inner => unsafe { inner.post_send(list) })
    }

    // A call hides the single request from the provider: 64 instructions of a WRITE.
    #[inline(always)]
    unsafe fn post_plain(&self, list: impl ExactSizeIterator<Item = PlainWr>) -> bool {
        if forked::is_child() {
            return false;
        }
        // SAFETY: S1: the caller's promise.
        each!(self, inner => unsafe { inner.post_plain(list) })
    }

    #[inline]
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        check_post()?;
        // SAFETY: S1: the caller's promise.
        each!(self, inner => unsafe { inner.post_recv(list) })
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.destroy())
    }
}

impl Dct {
    pub(crate) fn software_counters(&self) -> Option<TargetCounters> {
        self.soft().ok().map(|inner| inner.counters())
    }
}

impl contract::Dct for Dct {
    forward! {
        fn quiesce();
        fn number() -> Option<Qpn>;
        fn modify(attr: &QpAttr) -> Result<(), VerbError>;
        fn query() -> Result<(QpState, QpAttr), VerbError>;
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.destroy())
    }
}

impl contract::Srq for Srq {
    forward! {
        fn id() -> u64;
        fn caps() -> SrqCaps;
        fn set_limit(limit: u32) -> Result<(), VerbError>;
        fn limit() -> Result<u32, VerbError>;
    }

    #[inline]
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        check_post()?;
        // SAFETY: S1: the caller's promise.
        each!(self, inner => unsafe { inner.post_recv(list) })
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.destroy())
    }
}

impl contract::Ah for Ah {
    forward! {
        fn handle() -> usize;
    }
}

impl cm_contract::CmChannel<Any> for CmChannel {
    forward! {
        fn fd() -> BorrowedFd<'_>;
        fn may_block() -> bool;
        fn port_space() -> usize;
        fn is_empty() -> bool;
    }

    fn take_event(&self) -> Result<Option<CmEvent<Any>>, VerbError> {
        match self {
            Self::Soft(inner) => Ok(inner.take_event()?.map(|event| event.map(CmId::Soft))),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => Ok(inner.take_event()?.map(|event| event.map(CmId::Ibverbs))),
        }
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        make!(self, CmId, inner => inner.create_id())
    }

    fn create_datagram_id(&self) -> Result<CmId, VerbError> {
        make!(self, CmId, inner => inner.create_datagram_id())
    }
}

impl cm_contract::CmId for CmId {
    forward! {
        fn key() -> u64;
        fn bind(address: SocketAddr) -> Result<(), VerbError>;
        fn listen(backlog: u32) -> Result<(), VerbError>;
        fn answer(admit: Arc<dyn Admit>) -> bool;
        fn answer_late(answer: &CmAnswer) -> bool;
        fn reserved() -> Option<Qpn>;
        fn resolve_addr(
            source: Option<SocketAddr>,
            destination: SocketAddr,
            timeout: Duration
        ) -> Result<(), VerbError>;
        fn resolve_route(timeout: Duration) -> Result<(), VerbError>;
        fn route_may_block() -> bool;
        fn connect_may_block() -> bool;
        fn connect(params: &CmParams<'_>) -> Result<(), VerbError>;
        fn accept(params: &CmParams<'_>) -> Result<(), VerbError>;
        fn reject(private_data: &[u8]) -> Result<(), VerbError>;
        fn establish() -> Result<(), VerbError>;
        fn disconnect() -> Result<(), VerbError>;
        fn join_multicast(group: IpAddr) -> Result<(), VerbError>;
        fn qp_attr(state: QpState) -> Result<QpAttr, VerbError>;
        fn local_addr() -> Option<SocketAddr>;
        fn peer_addr() -> Option<SocketAddr>;
        fn route() -> Option<CmRoute<'_>>;
    }
}
