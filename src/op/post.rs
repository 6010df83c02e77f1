//! The posting core: every send operation is checked and posted here, whichever object offers it.

#![forbid(unsafe_code)]

use super::operation::{Operation, OperationKind, ReturnBuffer};
use super::queue_pair::Inner;
use crate::engine::{Receiver, ReceiverKey, Request, WorkKind};
use crate::error::{OpErrorKind, TryError};
use crate::memory::{Gather, RemoteRegion};
use crate::types::{Imm, SendFlags, SendOp, Transport, WindowBind};

pub(super) const READ: &str = "READ (transport RC or DC required)";

#[derive(Debug, Clone, Copy)]
pub(crate) struct SendRequest {
    pub(super) op: SendOp,
    pub(super) remote_len: u64,
}

impl SendRequest {
    #[inline]
    const fn message(op: SendOp) -> Self {
        Self { op, remote_len: u64::MAX }
    }

    #[inline]
    pub(crate) const fn send() -> Self {
        Self::message(SendOp::Send)
    }

    #[inline]
    pub(crate) const fn send_with_imm(imm: Imm) -> Self {
        Self::message(SendOp::SendWithImm(imm))
    }

    #[inline]
    pub(crate) const fn send_with_invalidate(remote: RemoteRegion) -> Self {
        Self::message(SendOp::SendWithInvalidate(remote.rkey()))
    }

    #[inline]
    pub(crate) const fn write(remote: RemoteRegion) -> Self {
        Self { op: SendOp::Write(remote.remote_addr()), remote_len: remote.len() }
    }

    #[inline]
    pub(crate) const fn write_with_imm(remote: RemoteRegion, imm: Imm) -> Self {
        Self { op: SendOp::WriteWithImm(remote.remote_addr(), imm), remote_len: remote.len() }
    }

    #[inline]
    pub(crate) const fn read(remote: RemoteRegion) -> Self {
        Self { op: SendOp::Read(remote.remote_addr()), remote_len: remote.len() }
    }
}

/// A send queue, and for DC the peer.
#[derive(Debug, Clone, Copy)]
pub struct Destination<'a>(Result<SendRoute<'a>, OpErrorKind>);

#[derive(Debug, Clone, Copy)]
pub(super) struct SendRoute<'a> {
    /// The state that clones of the queue pair share. A reference to a clone would force it out of
    /// registers.
    pub(super) queue_pair: &'a Inner,
    pub(super) flags: SendFlags,
    pub(super) to: Option<Receiver<'a>>,
}

impl<'a> Destination<'a> {
    #[inline(always)]
    pub(crate) const fn new(queue_pair: &'a Inner, to: Option<Receiver<'a>>) -> Self {
        Self(Ok(SendRoute { queue_pair, flags: SendFlags::empty(), to }))
    }

    pub(crate) const fn refused(kind: OpErrorKind) -> Self {
        Self(Err(kind))
    }

    #[inline(always)]
    pub(crate) fn with_flags(self, flags: SendFlags) -> Self {
        Self(self.0.map(|route| SendRoute { flags, ..route }))
    }

    pub(super) fn with_receiver<'b>(self, receiver: Receiver<'b>) -> Destination<'b>
    where
        'a: 'b,
    {
        Destination(self.0.map(|route| SendRoute { to: Some(receiver), ..route }))
    }

    /// Returns the route of a batch, whose operations the caller checks.
    pub(super) fn route(self) -> Result<SendRoute<'a>, OpErrorKind> {
        self.0
    }

    #[inline(always)]
    pub(super) fn route_for(self, op: SendOp) -> Result<SendRoute<'a>, OpErrorKind> {
        let route = self.0?;
        match route.refusal(op) {
            Some(kind) => Err(kind),
            None => Ok(route),
        }
    }

    #[inline(always)]
    pub(crate) fn post<F: OperationKind>(
        self,
        request: SendRequest,
        held: F::Held,
    ) -> Operation<F> {
        match self.route_for(request.op) {
            Ok(route) => route.post(request, held),
            Err(kind) => Operation::refused(kind, held),
        }
    }

    #[inline]
    pub(crate) fn post_inline(
        self,
        request: SendRequest,
        bytes: &[u8],
    ) -> Operation<ReturnBuffer<()>> {
        match self.route_for(request.op) {
            Ok(route) => {
                let request = Request { inline: Some(bytes), ..route.request(request) };
                Operation::post_any(&route.queue_pair.send, request, ())
            }
            Err(kind) => Operation::refused(kind, ()),
        }
    }

    #[inline]
    pub(crate) fn try_post<B: Gather>(
        self,
        request: SendRequest,
        buffer: B,
    ) -> Result<Operation<ReturnBuffer<B>>, TryError<B>> {
        match self.route_for(request.op) {
            Ok(route) => {
                Operation::try_post(&route.queue_pair.send, route.request(request), buffer)
            }
            Err(kind) => Ok(Operation::refused(kind, buffer)),
        }
    }
}

impl<'a> SendRoute<'a> {
    #[inline]
    pub(super) fn request(self, SendRequest { op, remote_len }: SendRequest) -> Request<'a> {
        Request { to: self.to, ..Request::new(WorkKind::Send(op), self.signaled(), remote_len) }
    }

    #[inline]
    fn signaled(self) -> SendFlags {
        self.flags | SendFlags::SIGNALED
    }

    /// Posts `request`. The caller has [checked](Destination::route_for) the operation.
    #[inline(always)]
    pub(super) fn post<F: OperationKind>(
        self,
        request: SendRequest,
        held: F::Held,
    ) -> Operation<F> {
        let queue = &self.queue_pair.send;
        match self.to {
            None => Operation::post(
                queue,
                WorkKind::Send(request.op),
                self.signaled(),
                request.remote_len,
                held,
            ),
            Some(_) => Operation::post_any(queue, self.request(request), held),
        }
    }

    pub(super) fn post_binding<F: OperationKind>(
        self,
        bind: &WindowBind,
        held: F::Held,
    ) -> Operation<F> {
        let request = Request {
            window: Some(bind),
            ..self.request(SendRequest::message(SendOp::BindWindow))
        };
        Operation::post_any(&self.queue_pair.send, request, held)
    }

    /// Returns why the transport lacks `op`, if it does. `op` is a constant in every caller, so
    /// only the comparison of the transport remains at run time.
    #[inline]
    fn refusal(self, op: SendOp) -> Option<OpErrorKind> {
        use Transport::{Rc, Uc, Ud};
        match self.to {
            Some(Receiver { key: ReceiverKey::Datagram(_), handle, .. }) => {
                let foreign = !handle.protection_domain().same(&self.queue_pair.pd);
                let foreign = foreign.then_some(OpErrorKind::Foreign { what: "address handle" });
                return self.unsupported("datagrams (transport UD required)", &[Ud]).or(foreign);
            }
            // DC is a reliable transport with all operations.
            Some(Receiver { key: ReceiverKey::Dc(..), .. }) => return None,
            None => {}
        }
        match op {
            SendOp::Send | SendOp::SendWithImm(_) => {
                self.unsupported("SEND without a destination; use send_to", &[Rc, Uc])
            }
            SendOp::SendWithInvalidate(_) => {
                self.unsupported("SEND with invalidate (transport RC or DC required)", &[Rc])
            }
            SendOp::Write(_) | SendOp::WriteWithImm(..) => {
                self.unsupported("WRITE (transport RC, UC or DC required)", &[Rc, Uc])
            }
            SendOp::Read(_) => self.unsupported(READ, &[Rc]),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                self.unsupported("atomics (transport RC or DC required)", &[Rc])
            }
            SendOp::BindWindow | SendOp::LocalInvalidate(_) => {
                self.unsupported("leases (transport RC or UC required)", &[Rc, Uc])
            }
        }
    }

    #[inline]
    pub(super) fn unsupported(self, what: &'static str, on: &[Transport]) -> Option<OpErrorKind> {
        (!on.contains(&self.queue_pair.transport)).then_some(OpErrorKind::Unsupported { what })
    }
}
