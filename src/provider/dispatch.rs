//! The closed set of providers: one variant each, one branch per verb call.
//!
//! Public types hold these enums, so they are not generic over who executes them. Objects of
//! different providers never meet: whoever mixes them gets EINVAL, as from a foreign protection domain.

// Passes the obligations of the contract's `unsafe fn`s through unchanged.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use super::contract::{self, PostError, Provider, QpInit};
use super::soft::Soft;
pub(crate) use super::soft::{CqCounters, ReceiveCounters, SendCounters};
use crate::error::VerbError;
use crate::types::{
    Access, AddressVector, AsyncEvent, DeviceAttr, Lkey, PortAttr, PortNum, QpAttr, QpCaps, QpState, Qpn, RecvWr, Rkey,
    SendWr, SrqCaps, WorkCompletion,
};

/// Whichever provider was chosen at run time.
#[derive(Debug)]
pub(crate) struct Any;

macro_rules! objects {
    ($($name:ident),*) => {
        $(
            #[derive(Debug)]
            pub(crate) enum $name {
                Soft(<Soft as Provider>::$name),
            }

            impl $name {
                #[allow(dead_code, reason = "asked of those objects only that others are made from")]
                fn soft(&self) -> &<Soft as Provider>::$name {
                    let Self::Soft(inner) = self;
                    inner
                }
            }
        )*

        impl Provider for Any {
            $(type $name = $name;)*
        }
    };
}

objects!(Context, Pd, Mr, Mw, Channel, Cq, Qp, Srq, Ah);

/// Calls the same method on whichever provider's object this is.
macro_rules! each {
    ($object:expr, $inner:ident => $call:expr) => {
        match $object {
            Self::Soft($inner) => $call,
        }
    };
}

impl contract::Context<Any> for Context {
    fn random(&self) -> Result<u64, VerbError> {
        each!(self, inner => inner.random())
    }

    fn attr(&self) -> &DeviceAttr {
        each!(self, inner => inner.attr())
    }

    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        each!(self, inner => inner.port(port))
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_pd().map(Pd::Soft),
        }
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_channel().map(Channel::Soft),
        }
    }

    fn create_cq(&self, capacity: u32, channel: Option<&Channel>, vector: u32, cookie: u64) -> Result<Cq, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_cq(capacity, channel.map(Channel::soft), vector, cookie).map(Cq::Soft),
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        each!(self, inner => inner.event_fd())
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        each!(self, inner => inner.next_event())
    }
}

impl contract::Pd<Any> for Pd {
    unsafe fn register(&self, addr: NonNull<u8>, len: usize, access: Access, shared: bool) -> Result<Mr, VerbError> {
        match self {
            // SAFETY: S1, S2: the caller's promise is passed on unchanged.
            Self::Soft(inner) => unsafe { inner.register(addr, len, access, shared) }.map(Mr::Soft),
        }
    }

    fn create_qp(&self, init: &QpInit<'_, Any>) -> Result<Qp, VerbError> {
        match self {
            Self::Soft(inner) => inner
                .create_qp(&QpInit {
                    transport: init.transport,
                    send_cq: init.send_cq.soft(),
                    recv_cq: init.recv_cq.soft(),
                    srq: init.srq.map(Srq::soft),
                    caps: init.caps,
                })
                .map(Qp::Soft),
        }
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_mw().map(Mw::Soft),
        }
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_srq(caps).map(Srq::Soft),
        }
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        match self {
            Self::Soft(inner) => inner.create_ah(address).map(Ah::Soft),
        }
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
}

impl contract::Mw for Mw {
    fn rkey(&self) -> Rkey {
        each!(self, inner => inner.rkey())
    }

    fn handle(&self) -> usize {
        each!(self, inner => inner.handle())
    }
}

impl contract::Channel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        each!(self, inner => inner.fd())
    }

    fn next_event(&self) -> Result<Option<u64>, VerbError> {
        each!(self, inner => inner.next_event())
    }
}

impl Cq {
    /// Counters of the software device.
    pub(crate) fn software_counters(&self) -> Option<CqCounters> {
        match self {
            Self::Soft(inner) => Some(inner.counters()),
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

    #[inline]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        each!(self, inner => inner.poll(out))
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        each!(self, inner => inner.arm(solicited_only))
    }

    fn ack(&self, events: u32) {
        each!(self, inner => inner.ack(events));
    }
}

impl Qp {
    /// Counters of the software device.
    pub(crate) fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        match self {
            Self::Soft(inner) => Some(inner.counters()),
        }
    }
}

impl contract::Qp for Qp {
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

    #[inline]
    unsafe fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: the caller's promise is passed on unchanged.
        each!(self, inner => unsafe { inner.post_send(list) })
    }

    #[inline]
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: the caller's promise is passed on unchanged.
        each!(self, inner => unsafe { inner.post_recv(list) })
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
        // SAFETY: S1: the caller's promise is passed on unchanged.
        each!(self, inner => unsafe { inner.post_recv(list) })
    }
}

impl contract::Ah for Ah {
    fn handle(&self) -> usize {
        each!(self, inner => inner.handle())
    }
}
