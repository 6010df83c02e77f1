#![forbid(unsafe_code)]

use std::sync::Arc;

use super::operation::{Operation, OperationKind, ReturnBuffer};
use super::queue_pair::Inner;
use crate::engine::{Receiver, ReceiverKey, WorkKind, WorkQueue, WorkRequest};
use crate::error::{OpErrorKind, TryError};
use crate::memory::Gather;
use crate::types::{SendOp, Transport};

pub(super) const READ: &str = "READ (transport RC or DC required)";
const IMMEDIATE: &str = "immediate data, because its device lacks it (DeviceAttr::immediate); send \
                         the number in a message";
const ATOMICS: &str = "atomics, because its device lacks them (DeviceAttr::atomic); let the peer's \
                       program change the value";

/// A send queue, and for UD and DC the receiver; or why neither can be used.
#[derive(Debug, Clone, Copy)]
pub struct Destination<'a>(Result<SendRoute<'a>, OpErrorKind>);

#[derive(Debug, Clone, Copy)]
pub(super) struct SendRoute<'a> {
    /// The state that clones of the queue pair share. A reference to a clone would force it out of
    /// registers.
    pub(super) queue_pair: &'a Inner,
    pub(super) to: Option<Receiver<'a>>,
}

impl<'a> Destination<'a> {
    #[inline(always)]
    pub(crate) const fn new(queue_pair: &'a Inner, to: Option<Receiver<'a>>) -> Self {
        Self(Ok(SendRoute { queue_pair, to }))
    }

    pub(crate) const fn refused(kind: OpErrorKind) -> Self {
        Self(Err(kind))
    }

    pub(super) fn with_receiver<'b>(self, receiver: Receiver<'b>) -> Destination<'b>
    where
        'a: 'b,
    {
        Destination(self.0.map(|route| SendRoute { to: Some(receiver), ..route }))
    }

    /// The caller checks the operations of the batch.
    pub(super) fn route(self) -> Result<SendRoute<'a>, OpErrorKind> {
        self.0
    }

    /// Adds the receiver to `request`, and returns the queue to post it to, unless the transport
    /// lacks the operation.
    #[inline(always)]
    pub(super) fn address(
        self,
        request: WorkRequest<'a>,
    ) -> Result<(&'a Arc<WorkQueue>, WorkRequest<'a>), OpErrorKind> {
        let route = self.0?;
        match route.refusal(request.kind) {
            Some(kind) => Err(kind),
            None => Ok((&route.queue_pair.send, WorkRequest { to: route.to, ..request })),
        }
    }

    #[inline(always)]
    pub(crate) fn post<F: OperationKind>(
        self,
        request: WorkRequest<'a>,
        held: F::Held,
    ) -> Operation<F> {
        match self.address(request) {
            Ok((queue, request)) => Operation::post(queue, request, held),
            Err(kind) => Operation::refused(kind, held),
        }
    }

    #[inline]
    pub(crate) fn try_post<B: Gather>(
        self,
        request: WorkRequest<'a>,
        buffer: B,
    ) -> Result<Operation<ReturnBuffer<B>>, TryError<B>> {
        match self.address(request) {
            Ok((queue, request)) => Operation::try_post(queue, request, buffer),
            Err(kind) => Ok(Operation::refused(kind, buffer)),
        }
    }
}

impl SendRoute<'_> {
    /// The result is constant in every caller, except for the comparison of the transport.
    #[inline]
    fn refusal(self, kind: WorkKind) -> Option<OpErrorKind> {
        use Transport::{Rc, Uc, Ud};
        let WorkKind::Send(op) = kind else { unreachable!("a send queue posts no receives") };
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
        let by_transport = match op {
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
        };
        by_transport.or_else(|| self.missing(op))
    }

    /// If so, each operation must be checked.
    #[inline]
    pub(super) const fn lacks_any(self) -> bool {
        !(self.queue_pair.immediate && self.queue_pair.atomics)
    }

    #[inline]
    pub(super) fn missing(self, op: SendOp) -> Option<OpErrorKind> {
        let (has, what) = match op {
            SendOp::SendWithImm(_) | SendOp::WriteWithImm(..) => {
                (self.queue_pair.immediate, IMMEDIATE)
            }
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                (self.queue_pair.atomics, ATOMICS)
            }
            _ => return None,
        };
        (!has).then_some(OpErrorKind::Unsupported { what })
    }

    #[inline]
    pub(super) fn unsupported(self, what: &'static str, on: &[Transport]) -> Option<OpErrorKind> {
        (!on.contains(&self.queue_pair.transport)).then_some(OpErrorKind::Unsupported { what })
    }
}
