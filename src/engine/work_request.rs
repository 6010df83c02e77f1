use crate::error::{LimitError, OpErrorKind, RemoteAccess};
use crate::memory::PdKey;
use crate::types::{Data, DcKey, Qkey, Qpn, SendFlags, SendOp, SendTarget, Sge, WindowBind};
use crate::verbs::AddressHandle;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) depth: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) max_message: u64,
    pub(crate) pd: PdKey,
    /// The peer solicits all messages, so operations that wait need no other completion.
    pub(crate) solicited: bool,
    pub(crate) notifies: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnFull {
    Queue,
    Try,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum WorkKind {
    Send(SendOp),
    Receive,
}

impl WorkKind {
    #[inline]
    pub(crate) const fn accessed(&self, len: u64) -> Option<RemoteAccess> {
        let Self::Send(op) = self else { return None };
        let (operation, at) = match op {
            SendOp::Write(at) | SendOp::WriteWithImm(at, _) => ("WRITE", at),
            SendOp::Read(at) => ("READ", at),
            SendOp::CompareSwap { remote, .. } => ("compare-and-swap", remote),
            SendOp::FetchAdd { remote, .. } => ("fetch-and-add", remote),
            _ => return None,
        };
        Some(RemoteAccess { operation, addr: at.addr, len })
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum ReceiverKey {
    Datagram(Qkey),
    Dc(DcKey),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Receiver<'a> {
    pub(crate) handle: &'a AddressHandle,
    pub(crate) number: Qpn,
    pub(crate) key: ReceiverKey,
}

impl<'a> Receiver<'a> {
    pub(super) fn target(self) -> SendTarget<'a> {
        match self.key {
            ReceiverKey::Datagram(qkey) => self.handle.target(self.number, qkey).into(),
            ReceiverKey::Dc(key) => self.handle.dct(self.number, key).into(),
        }
    }

    pub(super) fn into_owned(self) -> OwnedReceiver {
        OwnedReceiver { handle: self.handle.clone(), number: self.number, key: self.key }
    }
}

#[derive(Debug, Clone)]
pub(super) struct OwnedReceiver {
    handle: AddressHandle,
    number: Qpn,
    key: ReceiverKey,
}

impl OwnedReceiver {
    pub(super) fn borrowed(&self) -> Receiver<'_> {
        Receiver { handle: &self.handle, number: self.number, key: self.key }
    }
}

#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) kind: WorkKind,
    pub(crate) flags: SendFlags,
    pub(crate) inline: Option<&'a [u8]>,
    /// Memory that a window is bound to; the buffer of the request keeps it alive.
    pub(crate) window: Option<&'a WindowBind>,
    pub(crate) to: Option<Receiver<'a>>,
    pub(crate) remote_len: u64,
}

impl Request<'_> {
    #[inline]
    pub(crate) const fn new(kind: WorkKind, flags: SendFlags, remote_len: u64) -> Self {
        Self { kind, flags, inline: None, window: None, to: None, remote_len }
    }

    pub(crate) fn accessed(&self) -> Option<RemoteAccess> {
        self.kind.accessed(self.inline.map_or(0, |bytes| bytes.len() as u64))
    }
}

#[derive(Debug)]
pub(crate) enum Refusal {
    Full,
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

/// Counters of a send or receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WorkQueueCounters {
    /// Work requests given to the device.
    pub posted: u64,
    /// Work requests that the device holds.
    pub in_flight: u32,
    /// Work requests that are queued for a free entry now.
    pub waiting: usize,
    /// Work requests that were queued for a free entry.
    pub waited: u64,
    /// Completions that were errors.
    pub failed: u32,
    /// Errors that were flushes.
    pub flushed: u32,
}
