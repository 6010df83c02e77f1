//! The closed set of providers: an enum with one variant each, and one branch per verb call (none
//! for a single provider).
//!
//! Public types hold these enums, so they are not generic over the provider. Mixing objects of
//! different providers fails with EINVAL, like an object of a foreign protection domain.

// Passes the obligations of the contract's `unsafe fn`s through unchanged.
#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::error::VerbError;
use crate::forked;
use crate::types::{
    Access, AddressVector, AsyncEvent, DeviceAttr, Lkey, PortAttr, PortNum, QpAttr, QpCaps,
    QpState, Qpn, RecvWr, Rkey, SendWr, SrqCaps, WorkCompletion,
};
#[cfg(feature = "ibverbs")]
use rdma_ibverbs::Ibverbs;
use rdma_provider::cm_contract::{self, Admit, CmAnswer, CmEvent, CmParams, CmRoute};
use rdma_provider::contract::{self, DctInit, DmaBufRange, PlainWr, PostError, Provider, QpInit};
use rdma_soft::Soft;
pub(crate) use rdma_soft::{CqCounters, ReceiveCounters, SendCounters, TargetCounters};

/// The provider chosen at run time.
#[derive(Debug)]
pub(crate) struct Any;

macro_rules! objects {
    ($($name:ident),*) => {
        $(
            #[derive(Debug)]
            pub(crate) enum $name {
                Soft(<Soft as Provider>::$name),
                #[cfg(feature = "ibverbs")]
                Ibverbs(<Ibverbs as Provider>::$name),
            }

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

/// The error for mixing objects of different providers.
#[cfg(feature = "ibverbs")]
const FOREIGN: VerbError = VerbError::new("mixing objects of two providers", VerbError::EINVAL);

objects!(Context, Pd, Mr, Mw, Channel, Cq, Qp, Dct, Srq, Ah, CmChannel, CmId);

/// Fails like [`forked::check`]; nothing is posted.
#[inline(always)]
fn check_post() -> Result<(), PostError> {
    forked::check().map_err(|error| PostError { posted: 0, error })
}

/// Calls the same method on the object of either provider.
macro_rules! each {
    ($object:expr, $inner:ident => $call:expr) => {
        match $object {
            Self::Soft($inner) => $call,
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs($inner) => $call,
        }
    };
}

/// Calls the same method and wraps the returned object.
macro_rules! make {
    ($object:expr, $name:ident, $inner:ident => $call:expr) => {
        match $object {
            Self::Soft($inner) => $call.map($name::Soft),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs($inner) => $call.map($name::Ibverbs),
        }
    };
}

impl Context {
    /// Returns true if the device reaches only devices of this process.
    pub(crate) fn is_in_process(&self) -> bool {
        match self {
            Self::Soft(inner) => inner.is_in_process(),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(_) => false,
        }
    }
}

impl contract::Context<Any> for Context {
    fn may_block(&self) -> bool {
        each!(self, inner => inner.may_block())
    }

    fn reports_last_receive(&self) -> bool {
        each!(self, inner => inner.reports_last_receive())
    }

    fn random(&self) -> Result<u64, VerbError> {
        each!(self, inner => inner.random())
    }

    fn attr(&self) -> &DeviceAttr {
        each!(self, inner => inner.attr())
    }

    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        each!(self, inner => inner.port(port))
    }

    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        each!(self, inner => inner.pkey_table(port))
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        forked::check()?;
        make!(self, Pd, inner => inner.create_pd())
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        make!(self, Channel, inner => inner.create_channel())
    }

    fn create_cq(
        &self,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Cq, VerbError> {
        forked::check()?;
        match self {
            Self::Soft(inner) => {
                let channel = channel.map(Channel::soft).transpose()?;
                inner.create_cq(capacity, channel, vector, cookie).map(Cq::Soft)
            }
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => {
                let channel = channel.map(Channel::ibverbs).transpose()?;
                inner.create_cq(capacity, channel, vector, cookie).map(Cq::Ibverbs)
            }
        }
    }

    fn create_cm_channel(&self) -> Result<CmChannel, VerbError> {
        forked::check()?;
        make!(self, CmChannel, inner => inner.create_cm_channel())
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        each!(self, inner => inner.event_fd())
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        each!(self, inner => inner.next_event())
    }

    fn inlet(&self) -> Option<BorrowedFd<'_>> {
        each!(self, inner => inner.inlet())
    }

    fn serve(&self) -> bool {
        each!(self, inner => inner.serve())
    }

    fn stop_serving(&self) {
        each!(self, inner => inner.stop_serving());
    }
}

impl contract::Pd<Any> for Pd {
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        access: Access,
        shared: bool,
    ) -> Result<Mr, VerbError> {
        forked::check()?;
        // SAFETY: S1, S2: the caller's promise.
        make!(self, Mr, inner => unsafe { inner.register(addr, len, access, shared) })
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Mr, VerbError> {
        forked::check()?;
        make!(self, Mr, inner => inner.register_dma_buf(fd, range, access))
    }

    fn create_qp(&self, init: &QpInit<'_, Any>) -> Result<Qp, VerbError> {
        forked::check()?;
        match self {
            Self::Soft(inner) => {
                inner.create_qp(&init.with_queues_of(Cq::soft, Srq::soft)?).map(Qp::Soft)
            }
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => {
                inner.create_qp(&init.with_queues_of(Cq::ibverbs, Srq::ibverbs)?).map(Qp::Ibverbs)
            }
        }
    }

    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, Any>) -> Result<Qp, VerbError> {
        forked::check()?;
        match self {
            Self::Soft(inner) => inner
                .create_numbered_qp(number, &init.with_queues_of(Cq::soft, Srq::soft)?)
                .map(Qp::Soft),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => inner
                .create_numbered_qp(number, &init.with_queues_of(Cq::ibverbs, Srq::ibverbs)?)
                .map(Qp::Ibverbs),
        }
    }

    fn create_dct(&self, init: &DctInit<'_, Any>) -> Result<Dct, VerbError> {
        forked::check()?;
        match self {
            Self::Soft(inner) => {
                inner.create_dct(&init.with_queues_of(Cq::soft, Srq::soft)?).map(Dct::Soft)
            }
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => {
                inner.create_dct(&init.with_queues_of(Cq::ibverbs, Srq::ibverbs)?).map(Dct::Ibverbs)
            }
        }
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        forked::check()?;
        make!(self, Mw, inner => inner.create_mw())
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        forked::check()?;
        make!(self, Srq, inner => inner.create_srq(caps))
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        forked::check()?;
        make!(self, Ah, inner => inner.create_ah(address))
    }
}

impl contract::Mr for Mr {
    fn lkey(&self) -> Lkey {
        each!(self, inner => inner.lkey())
    }

    fn rkey(&self) -> Rkey {
        each!(self, inner => inner.rkey())
    }

    fn handle(&self) -> usize {
        each!(self, inner => inner.handle())
    }

    fn deregister(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.deregister())
    }
}

impl contract::Mw for Mw {
    fn rkey(&self) -> Rkey {
        each!(self, inner => inner.rkey())
    }

    fn handle(&self) -> usize {
        each!(self, inner => inner.handle())
    }

    fn deallocate(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.deallocate())
    }
}

impl contract::Channel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        each!(self, inner => inner.fd())
    }

    fn next_event(&self) -> Result<Option<u64>, VerbError> {
        each!(self, inner => inner.next_event())
    }

    fn hold(&self) {
        each!(self, inner => inner.hold());
    }

    fn release(&self) {
        each!(self, inner => inner.release());
    }

    fn add_waker(&self, waker: &Waker) -> Option<u64> {
        each!(self, inner => inner.add_waker(waker))
    }

    fn remove_waker(&self, key: u64) {
        each!(self, inner => inner.remove_waker(key));
    }
}

/// A completion queue whose entries are read where the device writes them.
#[cfg(feature = "ibverbs")]
pub(crate) use rdma_ibverbs::mlx5::direct::CompletionQueue as DirectQueue;

/// The software device copies completions.
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
    /// Returns the device's queue, if this crate reads it itself.
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
        match self {
            Self::Soft(inner) => Some(inner.counters()),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(_) => None,
        }
    }
}

impl contract::Cq for Cq {
    fn id(&self) -> u64 {
        each!(self, inner => inner.id())
    }

    fn capacity(&self) -> u32 {
        each!(self, inner => inner.capacity())
    }

    #[inline(always)]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        each!(self, inner => inner.poll(out))
    }

    #[inline(always)]
    fn is_empty(&self) -> Option<bool> {
        each!(self, inner => inner.is_empty())
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        forked::check()?;
        each!(self, inner => inner.arm(solicited_only))
    }

    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError> {
        each!(self, inner => inner.moderate(completions, period))
    }

    fn ack(&self, events: u32) {
        each!(self, inner => inner.ack(events));
    }
}

impl Qp {
    pub(crate) fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        match self {
            Self::Soft(inner) => Some(inner.counters()),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(_) => None,
        }
    }
}

impl contract::Qp for Qp {
    fn reset_stream(&self, stream: u16) -> Result<(), VerbError> {
        each!(self, inner => inner.reset_stream(stream))
    }

    fn qpn(&self) -> Qpn {
        each!(self, inner => inner.qpn())
    }

    fn caps(&self) -> QpCaps {
        each!(self, inner => inner.caps())
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        each!(self, inner => inner.modify(attr))
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        each!(self, inner => inner.query())
    }

    #[inline(always)]
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        check_post()?;
        // SAFETY: S1: the caller's promise.
        each!(self, inner => unsafe { inner.post_send(list) })
    }

    fn post_state(&self) -> Option<*const ()> {
        each!(self, inner => inner.post_state())
    }

    fn peer_post_state(&self) -> Option<*const ()> {
        each!(self, inner => inner.peer_post_state())
    }

    fn has_plain(&self) -> bool {
        each!(self, inner => inner.has_plain())
    }

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
        match self {
            Self::Soft(inner) => Some(inner.counters()),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(_) => None,
        }
    }
}

impl contract::Dct for Dct {
    fn quiesce(&self) {
        each!(self, inner => inner.quiesce())
    }

    fn number(&self) -> Option<Qpn> {
        each!(self, inner => inner.number())
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        each!(self, inner => inner.modify(attr))
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        each!(self, inner => inner.query())
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        each!(self, inner => inner.destroy())
    }
}

impl contract::Srq for Srq {
    fn id(&self) -> u64 {
        each!(self, inner => inner.id())
    }

    fn caps(&self) -> SrqCaps {
        each!(self, inner => inner.caps())
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbError> {
        each!(self, inner => inner.set_limit(limit))
    }

    fn limit(&self) -> Result<u32, VerbError> {
        each!(self, inner => inner.limit())
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
    fn handle(&self) -> usize {
        each!(self, inner => inner.handle())
    }
}

impl cm_contract::CmChannel<Any> for CmChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        each!(self, inner => inner.fd())
    }

    fn may_block(&self) -> bool {
        each!(self, inner => inner.may_block())
    }

    fn port_space(&self) -> usize {
        each!(self, inner => inner.port_space())
    }

    fn take_event(&self) -> Result<Option<CmEvent<Any>>, VerbError> {
        match self {
            Self::Soft(inner) => Ok(inner.take_event()?.map(|event| event.map(CmId::Soft))),
            #[cfg(feature = "ibverbs")]
            Self::Ibverbs(inner) => Ok(inner.take_event()?.map(|event| event.map(CmId::Ibverbs))),
        }
    }

    fn is_empty(&self) -> bool {
        each!(self, inner => inner.is_empty())
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        forked::check()?;
        make!(self, CmId, inner => inner.create_id())
    }
}

impl cm_contract::CmId for CmId {
    fn key(&self) -> u64 {
        each!(self, inner => inner.key())
    }

    fn bind(&self, address: SocketAddr) -> Result<(), VerbError> {
        each!(self, inner => inner.bind(address))
    }

    fn listen(&self, backlog: u32) -> Result<(), VerbError> {
        each!(self, inner => inner.listen(backlog))
    }

    fn answer(&self, admit: Arc<dyn Admit>) -> bool {
        each!(self, inner => inner.answer(admit))
    }

    fn answer_late(&self, answer: &CmAnswer) -> bool {
        each!(self, inner => inner.answer_late(answer))
    }

    fn reserved(&self) -> Option<Qpn> {
        each!(self, inner => inner.reserved())
    }

    fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbError> {
        each!(self, inner => inner.resolve_addr(source, destination, timeout))
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), VerbError> {
        each!(self, inner => inner.resolve_route(timeout))
    }

    fn route_may_block(&self) -> bool {
        each!(self, inner => inner.route_may_block())
    }

    fn connect(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        each!(self, inner => inner.connect(params))
    }

    fn accept(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        each!(self, inner => inner.accept(params))
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), VerbError> {
        each!(self, inner => inner.reject(private_data))
    }

    fn establish(&self) -> Result<(), VerbError> {
        each!(self, inner => inner.establish())
    }

    fn disconnect(&self) -> Result<(), VerbError> {
        each!(self, inner => inner.disconnect())
    }

    fn qp_attr(&self, state: QpState) -> Result<QpAttr, VerbError> {
        each!(self, inner => inner.qp_attr(state))
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        each!(self, inner => inner.local_addr())
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        each!(self, inner => inner.peer_addr())
    }

    fn route(&self) -> Option<CmRoute<'_>> {
        each!(self, inner => inner.route())
    }
}
