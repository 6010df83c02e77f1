//! What is asked of a work queue, and what it counts.

use crate::error::{LimitError, OpErrorKind};
use crate::memory::PdKey;
use crate::types::{Data, DcKey, Qkey, Qpn, SendFlags, SendOp, SendTarget, Sge, WindowBind};
use crate::verbs::AddressHandle;

/// Limits that are checked before the device is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Work requests the device holds.
    pub(crate) depth: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    /// Bytes of a message.
    pub(crate) max_message: u64,
    /// Where buffers must be registered.
    pub(crate) pd: PdKey,
}

/// What to do when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Wait in line.
    Queue,
    /// Give the buffer back.
    Try,
}

/// Which kind of work.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    Send(SendOp),
    Receive,
}

/// What a receiver demands of whoever sends to it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Key {
    /// Of datagrams.
    Datagram(Qkey),
    /// Of dynamic connections.
    Dc(DcKey),
}

/// Receiver of work on a transport without connections: a number at the end of a route.
#[derive(Debug, Clone, Copy)]
pub(crate) struct To<'a> {
    pub(crate) handle: &'a AddressHandle,
    pub(crate) number: Qpn,
    pub(crate) key: Key,
}

impl<'a> To<'a> {
    pub(super) fn target(self) -> SendTarget<'a> {
        match self.key {
            Key::Datagram(qkey) => self.handle.target(self.number, qkey).into(),
            Key::Dc(key) => self.handle.dct(self.number, key).into(),
        }
    }

    pub(super) fn keep(self) -> Kept {
        Kept { handle: self.handle.clone(), number: self.number, key: self.key }
    }
}

/// The same, kept until it is posted.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    handle: AddressHandle,
    number: Qpn,
    key: Key,
}

impl Kept {
    pub(super) fn target(&self) -> SendTarget<'_> {
        To { handle: &self.handle, number: self.number, key: self.key }.target()
    }
}

/// A work request without its buffers.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) what: What,
    pub(crate) flags: SendFlags,
    /// Data that is copied while posting, instead of a buffer.
    pub(crate) inline: Option<&'a [u8]>,
    /// What a binding binds, which its buffer keeps.
    pub(crate) window: Option<&'a WindowBind>,
    /// Receiver, of a datagram or by a dynamic connection.
    pub(crate) to: Option<To<'a>>,
    /// Bytes at the remote end, if it is memory.
    pub(crate) room: u64,
}

impl Request<'_> {
    /// A request for the bytes of a buffer, to the connected peer if it is a send.
    #[inline(always)]
    pub(crate) const fn new(what: What, flags: SendFlags, room: u64) -> Self {
        Self { what, flags, inline: None, window: None, to: None, room }
    }
}

/// Why nothing was posted.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No room, and no patience.
    Full,
    /// It cannot be done.
    Error(OpErrorKind),
}

impl From<OpErrorKind> for Refusal {
    fn from(kind: OpErrorKind) -> Self {
        Self::Error(kind)
    }
}

pub(super) fn data_of<'a>(
    sges: &'a [Sge],
    inline: Option<&'a [u8]>,
    window: Option<&'a WindowBind>,
) -> Data<'a> {
    match (window, inline) {
        (Some(bind), _) => Data::Window(bind),
        (None, Some(bytes)) => Data::Inline(bytes),
        (None, None) => Data::Sges(sges),
    }
}

impl From<LimitError> for OpErrorKind {
    fn from(error: LimitError) -> Self {
        Self::Limit(error)
    }
}

/// What a send or receive queue has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WorkQueueCounters {
    /// Work requests given to the device.
    pub posted: u64,
    /// Work requests the device holds.
    pub in_flight: u32,
    /// Operations that wait for room now.
    pub waiting: usize,
    /// Operations that had to wait for room.
    pub waited: u64,
    /// Completions that were errors.
    pub failed: u32,
    /// Errors that were flushes.
    pub flushed: u32,
}
