use smallvec::SmallVec;

use crate::error::{LimitError, OpErrorKind, RemoteAccess};
use crate::memory::{PdKey, RemoteRegion, SgeList};
use crate::types::{
    Data, DcKey, Imm, Qkey, Qpn, SendFlags, SendOp, SendTarget, SendWr, Sge, WindowBind, WrId,
};
use crate::verbs::AddressHandle;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) depth: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_read_sge: u32,
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
}

/// A work request without its buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkRequest<'a> {
    pub(crate) kind: WorkKind,
    pub(crate) flags: SendFlags,
    /// Bytes of the remote region; `u64::MAX` if the request names none.
    pub(crate) remote_len: u64,
    pub(crate) inline: Option<&'a [u8]>,
    /// Memory that a window is bound to; the buffer of the request keeps it alive.
    pub(crate) window: Option<&'a WindowBind>,
    pub(crate) to: Option<Receiver<'a>>,
}

impl<'a> WorkRequest<'a> {
    #[inline]
    const fn new(kind: WorkKind, flags: SendFlags, remote_len: u64) -> Self {
        Self { kind, flags, remote_len, inline: None, window: None, to: None }
    }

    #[inline]
    pub(crate) const fn receive() -> Self {
        Self::new(WorkKind::Receive, SendFlags::empty(), u64::MAX)
    }

    #[inline]
    pub(crate) const fn local(op: SendOp) -> Self {
        Self::new(WorkKind::Send(op), SendFlags::SIGNALED, u64::MAX)
    }

    #[inline]
    pub(crate) const fn send() -> Self {
        Self::local(SendOp::Send)
    }

    #[inline]
    pub(crate) const fn send_with_imm(imm: Imm) -> Self {
        Self::local(SendOp::SendWithImm(imm))
    }

    #[inline]
    pub(crate) const fn send_with_invalidate(remote: RemoteRegion) -> Self {
        Self::local(SendOp::SendWithInvalidate(remote.rkey()))
    }

    #[inline]
    pub(crate) const fn remote(op: SendOp, remote: RemoteRegion) -> Self {
        Self::new(WorkKind::Send(op), SendFlags::SIGNALED, remote.len())
    }

    #[inline]
    pub(crate) const fn write(remote: RemoteRegion) -> Self {
        Self::remote(SendOp::Write(remote.remote_addr()), remote)
    }

    #[inline]
    pub(crate) const fn write_with_imm(remote: RemoteRegion, imm: Imm) -> Self {
        Self::remote(SendOp::WriteWithImm(remote.remote_addr(), imm), remote)
    }

    #[inline]
    pub(crate) const fn read(remote: RemoteRegion) -> Self {
        Self::remote(SendOp::Read(remote.remote_addr()), remote)
    }

    #[inline]
    pub(crate) const fn compare_swap(remote: RemoteRegion, compare: u64, swap: u64) -> Self {
        Self::remote(SendOp::CompareSwap { remote: remote.remote_addr(), compare, swap }, remote)
    }

    #[inline]
    pub(crate) const fn fetch_add(remote: RemoteRegion, add: u64) -> Self {
        Self::remote(SendOp::FetchAdd { remote: remote.remote_addr(), add }, remote)
    }

    #[inline]
    pub(crate) fn with_flags(self, flags: SendFlags) -> Self {
        Self { flags: self.flags | flags, ..self }
    }

    /// The call that posts copies `bytes`.
    #[inline]
    pub(crate) const fn inline(self, bytes: &'a [u8]) -> Self {
        Self { inline: Some(bytes), ..self }
    }

    /// It then consists of a kind, flags and buffers.
    #[inline]
    pub(super) const fn may_be_plain(&self) -> bool {
        self.inline.is_none() && self.window.is_none() && self.to.is_none()
    }

    #[inline]
    pub(super) fn target(&self) -> Option<SendTarget<'a>> {
        self.to.map(Receiver::target)
    }

    #[inline]
    pub(super) fn send_wr<'b>(&self, wr_id: WrId, op: SendOp, sges: &'b [Sge]) -> SendWr<'b>
    where
        'a: 'b,
    {
        let data = match (self.window, self.inline) {
            (Some(bind), _) => Data::Window(bind),
            (None, Some(bytes)) => Data::Inline(bytes),
            (None, None) => Data::Sges(sges),
        };
        SendWr { wr_id, op, flags: self.flags, data, target: self.target() }
    }

    #[inline]
    pub(crate) const fn accessed(&self) -> Option<RemoteAccess> {
        let len = match self.inline {
            Some(bytes) => bytes.len() as u64,
            None => 0,
        };
        self.kind.accessed(len)
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

/// A work request that waits for capacity.
pub(super) struct Queued {
    pub(super) id: WrId,
    kind: WorkKind,
    flags: SendFlags,
    pub(super) sges: SgeList,
    inline: Option<SmallVec<[u8; 64]>>,
    window: Option<Box<WindowBind>>,
    to: Option<(AddressHandle, Qpn, ReceiverKey)>,
    /// If a part of a batch is refused, so are the following parts.
    pub(super) is_part: bool,
}

impl Queued {
    pub(super) fn new(id: WrId, request: &WorkRequest<'_>, sges: SgeList) -> Self {
        Self {
            id,
            kind: request.kind,
            flags: request.flags,
            sges,
            inline: request.inline.map(SmallVec::from_slice),
            window: request.window.map(|bind| Box::new(*bind)),
            to: request.to.map(|to| (to.handle.clone(), to.number, to.key)),
            is_part: false,
        }
    }

    /// The remote length was checked.
    pub(super) fn request(&self) -> WorkRequest<'_> {
        WorkRequest {
            kind: self.kind,
            flags: self.flags,
            remote_len: u64::MAX,
            inline: self.inline.as_deref(),
            window: self.window.as_deref(),
            to: self.to.as_ref().map(|(handle, number, key)| Receiver {
                handle,
                number: *number,
                key: *key,
            }),
        }
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
