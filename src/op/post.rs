//! The posting core: every send operation, whichever object offers it, is checked and posted here.
//!
//! ```text
//! QueuePair ──────────┐
//! DcSender ───────────┤ SendRequest            Request
//! DcPoolPeer, DcLease ┼────────────▶ Destination ────▶ WorkQueue
//! Connection ─────────┘               checks
//! ```

#![forbid(unsafe_code)]

use super::operation::{Finish, Operation, Return};
use super::queue_pair::Inner;
use crate::engine::{Key, Request, To, What};
use crate::error::{OpErrorKind, TryError};
use crate::memory::{Gather, RemoteRegion};
use crate::types::{Imm, SendFlags, SendOp, Transport, WindowBind};

/// A send operation and the length of the remote memory that it names, which its buffer must not exceed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendRequest {
    pub(super) op: SendOp,
    pub(super) remote_len: u64,
}

impl SendRequest {
    /// A request that names no remote memory and so has no limit but that of the transport.
    #[inline(always)]
    const fn message(op: SendOp) -> Self {
        Self { op, remote_len: u64::MAX }
    }

    #[inline(always)]
    pub(crate) const fn send() -> Self {
        Self::message(SendOp::Send)
    }

    #[inline(always)]
    pub(crate) const fn send_with_imm(imm: Imm) -> Self {
        Self::message(SendOp::SendWithImm(imm))
    }

    #[inline(always)]
    pub(crate) const fn send_with_invalidate(remote: RemoteRegion) -> Self {
        Self::message(SendOp::SendWithInvalidate(remote.rkey()))
    }

    #[inline(always)]
    pub(crate) const fn write(remote: RemoteRegion) -> Self {
        Self { op: SendOp::Write(remote.remote_addr()), remote_len: remote.len() }
    }

    #[inline(always)]
    pub(crate) const fn write_with_imm(remote: RemoteRegion, imm: Imm) -> Self {
        Self { op: SendOp::WriteWithImm(remote.remote_addr(), imm), remote_len: remote.len() }
    }

    #[inline(always)]
    pub(crate) const fn read(remote: RemoteRegion) -> Self {
        Self { op: SendOp::Read(remote.remote_addr()), remote_len: remote.len() }
    }
}

/// A destination of operations, or the reason why nothing can be posted to it.
#[derive(Clone, Copy)]
pub(crate) struct Destination<'a>(Result<Route<'a>, OpErrorKind>);

/// The send queue that leads to a peer, and what all work requests to that peer have in common.
#[derive(Clone, Copy)]
pub(super) struct Route<'a> {
    /// What its clones share. With a reference to one of the clones here, that clone would have to be in memory where an
    /// operation is posted, and not in registers.
    pub(super) queue_pair: &'a Inner,
    /// Modifiers of each work request, beside [`SendFlags::SIGNALED`].
    pub(super) flags: SendFlags,
    /// The receiver, unless the queue pair is connected to it.
    pub(super) to: Option<To<'a>>,
}

impl<'a> Destination<'a> {
    /// The peer that `queue_pair` is connected to, or `to` on a transport without connections.
    #[inline(always)]
    pub(crate) const fn new(queue_pair: &'a Inner, flags: SendFlags, to: Option<To<'a>>) -> Self {
        Self(Ok(Route { queue_pair, flags, to }))
    }

    /// A destination to which every operation fails with `kind`.
    pub(crate) const fn refused(kind: OpErrorKind) -> Self {
        Self(Err(kind))
    }

    /// The route of a batch, whose operations the caller checks.
    pub(super) fn route(self) -> Result<Route<'a>, OpErrorKind> {
        self.0
    }

    /// The route, if `op` may be posted to it.
    #[inline(always)]
    pub(super) fn route_for(self, op: SendOp) -> Result<Route<'a>, OpErrorKind> {
        let route = self.0?;
        match route.refusal(op) {
            Some(kind) => Err(kind),
            None => Ok(route),
        }
    }

    /// Posts `request` for the data of `held`, or queues it behind requests that wait for free slots.
    #[inline(always)]
    pub(crate) fn post<F: Finish>(self, request: SendRequest, held: F::Held) -> Operation<F> {
        match self.route_for(request.op) {
            Ok(route) => route.post(request, held),
            Err(kind) => Operation::refused(kind, held),
        }
    }

    /// Posts `request` for `bytes`, which are copied by this call.
    #[inline(always)]
    pub(crate) fn post_inline(self, request: SendRequest, bytes: &[u8]) -> Operation<Return<()>> {
        match self.route_for(request.op) {
            Ok(route) => {
                let request = Request { inline: Some(bytes), ..route.request(request) };
                Operation::post_any(&route.queue_pair.send, request, ())
            }
            Err(kind) => Operation::refused(kind, ()),
        }
    }

    /// Posts `request` if the send queue has a free slot.
    #[inline(always)]
    pub(crate) fn try_post<B: Gather>(
        self,
        request: SendRequest,
        buffer: B,
    ) -> Result<Operation<Return<B>>, TryError<B>> {
        match self.route_for(request.op) {
            Ok(route) => {
                Operation::try_post(&route.queue_pair.send, route.request(request), buffer)
            }
            Err(kind) => Ok(Operation::refused(kind, buffer)),
        }
    }
}

impl<'a> Route<'a> {
    #[inline(always)]
    pub(super) fn request(self, SendRequest { op, remote_len }: SendRequest) -> Request<'a> {
        Request { to: self.to, ..Request::new(What::Send(op), self.signaled(), remote_len) }
    }

    #[inline(always)]
    fn signaled(self) -> SendFlags {
        self.flags | SendFlags::SIGNALED
    }

    /// Posts `request`, whose operation the caller has [checked](Destination::route_for).
    #[inline(always)]
    pub(super) fn post<F: Finish>(self, request: SendRequest, held: F::Held) -> Operation<F> {
        let queue = &self.queue_pair.send;
        match self.to {
            None => Operation::post(
                queue,
                What::Send(request.op),
                self.signaled(),
                request.remote_len,
                held,
            ),
            Some(_) => Operation::post_any(queue, self.request(request), held),
        }
    }

    /// Posts the binding of a window, which `held` keeps.
    pub(super) fn post_binding<F: Finish>(self, bind: &WindowBind, held: F::Held) -> Operation<F> {
        let request = Request {
            window: Some(bind),
            ..self.request(SendRequest::message(SendOp::BindWindow))
        };
        Operation::post_any(&self.queue_pair.send, request, held)
    }

    /// Why `op` does not exist on the transport. The compiler decides all of it but the comparison of the transport.
    #[inline(always)]
    fn refusal(self, op: SendOp) -> Option<OpErrorKind> {
        use Transport::{Rc, Uc, Ud};
        match self.to {
            Some(To { key: Key::Datagram(_), handle, .. }) => {
                let foreign = !handle.protection_domain().same(&self.queue_pair.pd);
                let foreign = foreign.then_some(OpErrorKind::Foreign { what: "address handle" });
                return self.unsupported("a datagram", &[Ud]).or(foreign);
            }
            // A dynamic connection is a reliable one, which has all operations.
            Some(To { key: Key::Dc(_), .. }) => return None,
            None => {}
        }
        match op {
            SendOp::Send | SendOp::SendWithImm(_) => {
                self.unsupported("SEND to a connected peer", &[Rc, Uc])
            }
            SendOp::SendWithInvalidate(_) => self.unsupported("SEND with invalidate", &[Rc]),
            SendOp::Write(_) | SendOp::WriteWithImm(..) => self.unsupported("WRITE", &[Rc, Uc]),
            SendOp::Read(_) => self.unsupported("READ", &[Rc]),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                self.unsupported("an atomic", &[Rc])
            }
            SendOp::BindWindow | SendOp::LocalInvalidate(_) => {
                self.unsupported("a lease", &[Rc, Uc])
            }
        }
    }

    /// Why `what` cannot be posted, if the transport is none of `on`.
    #[inline(always)]
    pub(super) fn unsupported(self, what: &'static str, on: &[Transport]) -> Option<OpErrorKind> {
        (!on.contains(&self.queue_pair.transport)).then_some(OpErrorKind::Unsupported { what })
    }
}
