//! Errors of all layers.
//!
//! `{error}` prints the complete cause: what failed, on which object and with which numbers. So
//! [`source`](std::error::Error::source) returns `None`. Variants hold the cause as a value.

use std::fmt;
use std::io;
use std::ops::{Bound, RangeBounds};

pub use rdma_provider::VerbError;
pub use rdma_soft::UdpError;

use crate::types::{Access, Gid, QpState, Qpn, TransitionError, WcStatus};

mod outcome;
mod runtime;
#[cfg(all(test, not(loom)))]
mod tests;

pub use outcome::Outcome;
pub use runtime::NoRuntime;

/// A value beyond the limit of the device or the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitError {
    /// Name of the value, for example `max_send_wr`.
    pub field: &'static str,
    /// Requested value.
    pub asked: u64,
    /// Largest allowed value.
    pub allowed: u64,
}

impl LimitError {
    pub(crate) fn check(field: &'static str, asked: u64, allowed: u64) -> Result<(), Self> {
        if asked <= allowed { Ok(()) } else { Err(Self { field, asked, allowed }) }
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} requested, at most {} allowed", self.field, self.asked, self.allowed)
    }
}

impl std::error::Error for LimitError {}

/// A range that does not lie within its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBounds {
    /// First requested byte.
    pub offset: u64,
    /// Requested bytes.
    pub len: u64,
    /// Bytes of the memory.
    pub size: u64,
}

impl OutOfBounds {
    pub(crate) fn resolve(range: impl RangeBounds<u64>, size: u64) -> Result<(u64, u64), Self> {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => size,
        };
        let len = end.checked_sub(start).ok_or(Self {
            offset: start,
            len: end.wrapping_sub(start),
            size,
        })?;
        Self::check(start, len, size)?;
        Ok((start, len))
    }

    pub(crate) fn check(offset: u64, len: u64, size: u64) -> Result<(), Self> {
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Self { offset, len, size }),
        }
    }
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, len, size } = self;
        match offset.checked_add(*len) {
            Some(end) if end <= *size => write!(
                f,
                "invalid access to {len} bytes at offset {offset} of {size}: misaligned, or the \
                 addresses wrap around"
            ),
            Some(_) => write!(
                f,
                "out of bounds: {len} bytes at offset {offset} of a memory of {size} bytes"
            ),
            None => write!(
                f,
                "invalid range {offset}..{} in a memory of {size} bytes: the end precedes the \
                 start",
                offset.wrapping_add(*len)
            ),
        }
    }
}

impl std::error::Error for OutOfBounds {}

/// The reason why a device could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// No device has this name.
    NotFound {
        /// Requested name.
        name: String,
        /// Names of the existing devices.
        available: Vec<String>,
        /// Why the list is incomplete, if known.
        reason: Option<&'static str>,
    },
    /// The device exists, but a verb failed while opening it.
    Verb {
        /// Name of the device.
        device: String,
        /// Failed verb and errno.
        error: VerbError,
    },
    /// No real device is usable, and `TOKIO_RDMA_DEVICE` names none.
    NoUsableDevice {
        /// The devices that were skipped, and why; or why there is none.
        reason: String,
    },
    /// A software device could not be opened over UDP.
    Udp(UdpError),
}

impl OpenError {
    #[cfg(any(feature = "ibverbs", test))]
    pub(crate) fn of(device: &str) -> impl Fn(VerbError) -> Self {
        move |error| Self::Verb { device: device.to_owned(), error }
    }
}

impl From<rdma_soft::OpenError> for OpenError {
    fn from(error: rdma_soft::OpenError) -> Self {
        match error {
            rdma_soft::OpenError::NotFound { name, available, reason } => {
                Self::NotFound { name, available, reason }
            }
            rdma_soft::OpenError::Verb { device, error } => Self::Verb { device, error },
        }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { name, available, reason } => {
                write!(f, "device {name:?} not found")?;
                if let Some(reason) = reason {
                    write!(f, ": {reason}")?;
                }
                let available = if available.is_empty() { "none" } else { &*available.join(", ") };
                write!(f, "; available: {available}")
            }
            Self::Verb { device, error } => write!(f, "failed to open device {device:?}: {error}"),
            Self::NoUsableDevice { reason } => write!(
                f,
                "no RDMA device is usable: {reason}; without an adapter, use \
                 Device::open_default_or_software within one process, open_default_at and \
                 open_default_to between processes"
            ),
            Self::Udp(error) => error.fmt(f),
        }
    }
}

/// The reason why an object could not be created, modified or connected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SetupError {
    /// A verb failed. Every function that returns this error may fail with it.
    Verb(VerbError),
    /// A size exceeds a limit of the device.
    Limit(LimitError),
    /// A size is too small.
    TooSmall {
        /// Name of the size, for example `max_send_wr`.
        field: &'static str,
        /// Requested size.
        asked: u64,
        /// Smallest allowed size.
        least: u64,
    },
    /// The state machine of the queue pair does not allow the transition.
    Transition(TransitionError),
    /// An argument belongs to another protection domain or device.
    Foreign {
        /// The argument.
        what: &'static str,
    },
    /// The completion queue has too few free entries for another queue pair.
    CompletionQueueFull {
        /// Entries that the new queue pair needs.
        asked: u32,
        /// Entries that no queue pair has reserved.
        free: u32,
    },
    /// Two values that must be equal differ.
    Mismatch {
        /// The values, for example `transports of the queue pair and its peer`.
        what: &'static str,
        /// Value of this side or of the setting.
        ours: String,
        /// Value of the peer or of the path.
        theirs: String,
    },
    /// The completion queue is not that of the shared receive queue.
    OtherCompletionQueue {
        /// Number of the given queue.
        asked: u64,
        /// Number of the shared receive queue's.
        queue: u64,
    },
    /// The port is not active or has no GID that fits.
    NoGid {
        /// Number of the port.
        port: u8,
    },
    /// The port's table lacks the partition.
    NoPkey {
        /// Number of the port.
        port: u8,
        /// The P_Key that was asked for.
        asked: u16,
        /// The P_Keys of the port, by index.
        table: Vec<u16>,
    },
    /// The address is not that of a multicast group.
    NotMulticast {
        /// The address.
        group: Gid,
    },
    /// The device has no more multicast groups, or the group no more queue pairs.
    GroupsFull {
        /// Number of the queue pair.
        qpn: Qpn,
        /// The group.
        group: Gid,
        /// Groups that the device has, [`DeviceAttr::max_mcast_grp`](crate::types::DeviceAttr).
        groups: u32,
        /// Queue pairs that a group has, `max_mcast_qp_attach`.
        queue_pairs: u32,
    },
    /// The device or the kind of object does not support a function or setting.
    Unsupported {
        /// The reason, for example `the device lacks on-demand paging`.
        what: &'static str,
    },
    /// The object is closed, or its completion queue has failed.
    Closed,
}

impl SetupError {
    pub(crate) fn at_least(field: &'static str, asked: u64, least: u64) -> Result<(), Self> {
        if asked >= least { Ok(()) } else { Err(Self::TooSmall { field, asked, least }) }
    }

    pub(crate) fn check_same(is_same: bool, what: &'static str) -> Result<(), Self> {
        if is_same { Ok(()) } else { Err(Self::Foreign { what }) }
    }

    pub(crate) fn mismatch(what: &'static str, ours: impl ToString, theirs: impl ToString) -> Self {
        Self::Mismatch { what, ours: ours.to_string(), theirs: theirs.to_string() }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verb(error) => error.fmt(f),
            Self::Limit(error) => error.fmt(f),
            Self::TooSmall { field, asked, least } => {
                write!(f, "{field}: {asked} requested, at least {least} required")
            }
            Self::Transition(error) => error.fmt(f),
            Self::Foreign { what } => {
                write!(f, "the {what} belongs to another device or protection domain")
            }
            Self::CompletionQueueFull { asked, free } => write!(
                f,
                "completion queue too small: {asked} more entries needed, {free} free; raise \
                 CompletionQueueBuilder::capacity, or lower max_send_wr or max_recv_wr"
            ),
            Self::Mismatch { what, ours, theirs } => {
                write!(f, "{what} do not match: {ours} and {theirs}")
            }
            Self::OtherCompletionQueue { asked, queue } => write!(
                f,
                "wrong completion queue {asked} for receives: the shared receive queue completes \
                 on completion queue {queue}; omit QueuePairBuilder::receive_completions"
            ),
            Self::NoGid { port } => write!(
                f,
                "port {port} is not active or lacks a suitable GID; check its link and the \
                     addresses of its network interface"
            ),
            Self::NoPkey { port, asked, table } => {
                write!(f, "port {port} lacks the partition of P_Key {asked:#06x}; its table:")?;
                let mut entries = table.iter().filter(|&&entry| entry & 0x7fff != 0);
                match entries.next() {
                    Some(first) => write!(f, " {first:#06x}")?,
                    None => f.write_str(" empty")?,
                }
                entries.try_for_each(|entry| write!(f, ", {entry:#06x}"))?;
                f.write_str(
                    "; ask for one of these, or have the subnet manager add the port to the \
                     partition (on a software device, DeviceControl::set_pkeys)",
                )
            }
            Self::NotMulticast { group } => write!(
                f,
                "{} is no multicast group; use an address in 224.0.0.0/4 or ff00::/8",
                group.to_ip()
            ),
            Self::GroupsFull { qpn, group, groups, queue_pairs } => write!(
                f,
                "failed to attach queue pair {qpn} to multicast group {}: the device has at most \
                 {groups} groups with {queue_pairs} queue pairs each (DeviceAttr::max_mcast_grp, \
                 max_mcast_qp_attach); detach others first",
                group.to_ip()
            ),
            Self::Unsupported { what } => write!(f, "unsupported: {what}"),
            Self::Closed => f.write_str("the object is closed, or its completion queue has failed"),
        }
    }
}

macro_rules! wraps {
    ($outer:ident: $($variant:ident($inner:ty)),*) => {
        $(impl From<$inner> for $outer {
            fn from(error: $inner) -> Self {
                Self::$variant(error)
            }
        })*
    };
}

pub(crate) use wraps;

impl std::error::Error for OpenError {}

impl std::error::Error for SetupError {}

wraps!(OpenError: Udp(UdpError));
wraps!(SetupError: Verb(VerbError), Limit(LimitError), Transition(TransitionError));

impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> Self {
        let kind = match &error {
            OpenError::NotFound { .. } | OpenError::NoUsableDevice { .. } => {
                io::ErrorKind::NotFound
            }
            OpenError::Verb { error, .. } => Self::from(*error).kind(),
            OpenError::Udp(udp) => Self::from(udp.clone()).kind(),
        };
        Self::new(kind, error)
    }
}

impl From<SetupError> for io::Error {
    fn from(error: SetupError) -> Self {
        let kind = match &error {
            SetupError::Verb(verb) => Self::from(*verb).kind(),
            SetupError::Closed => io::ErrorKind::NotConnected,
            SetupError::NoGid { .. } | SetupError::NoPkey { .. } => io::ErrorKind::AddrNotAvailable,
            SetupError::Unsupported { .. } => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

/// The failed completion of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionError {
    /// Status of the completion.
    pub status: WcStatus,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Queue pair number.
    pub qpn: Qpn,
    /// The software device reports them with [`LOC_LEN_ERR`](WcStatus::LOC_LEN_ERR), adapters
    /// never.
    pub lengths: Option<ReceiveLengths>,
}

/// Lengths of a message and of the receive that is too small for it, for a datagram with the 40
/// bytes of the routing header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveLengths {
    /// Bytes that the receive holds.
    pub capacity: u32,
    /// Bytes that had arrived when the message was refused: the whole message if it is one packet,
    /// else a part of it.
    pub arrived: u32,
}

impl CompletionError {
    /// The error of work behind a failure on the queue pair.
    pub(crate) fn flushed(qpn: Qpn) -> Self {
        Self { status: WcStatus::WR_FLUSH_ERR, vendor_error: 0, qpn, lengths: None }
    }
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, vendor_error, qpn, lengths } = self;
        if let Some(ReceiveLengths { capacity, arrived }) = lengths {
            return write!(
                f,
                "work request failed on queue pair {qpn}: {status} ({arrived} bytes of the message \
                 had arrived, the receive holds {capacity}); post larger receives"
            );
        }
        write!(f, "work request failed on queue pair {qpn}: {status}")?;
        if *status == WcStatus::WR_FLUSH_ERR {
            f.write_str("; look for an earlier failure or a disconnect")?;
        }
        if *vendor_error == 0 { Ok(()) } else { write!(f, " (vendor error {vendor_error:#x})") }
    }
}

impl std::error::Error for CompletionError {}

/// The reason why an operation failed. Nothing was sent, except perhaps after
/// [`Completion`](Self::Completion), [`Closed`](Self::Closed),
/// [`CompletionQueue`](Self::CompletionQueue) and [`TimedOut`](Self::TimedOut).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// The device reported the failure of the work request. An RC connection has failed then.
    Completion(CompletionError),
    /// The device refused the work request or a resource that it needs.
    Post(VerbError),
    /// The device refused the work request because the queue pair is not connected.
    State {
        /// Queue pair number.
        qpn: Qpn,
        /// State of the queue pair after the refusal.
        state: QpState,
        /// Failed verb and errno.
        error: VerbError,
    },
    /// The work request exceeds a limit of the queue pair.
    Limit(LimitError),
    /// A buffer, region or address handle belongs to another protection domain.
    Foreign {
        /// The argument.
        what: &'static str,
    },
    /// The region was exposed without access rights that the operation needs.
    Rights {
        /// The missing rights.
        missing: Access,
    },
    /// The queue pair does not support the operation.
    Unsupported {
        /// The operation and its requirement, for example `READ (transport RC or DC required)`.
        what: &'static str,
    },
    /// An operation of the batch would consume a receive of the peer, which a
    /// [`Connection`](crate::Connection) reserves for messages.
    NotOneSided {
        /// Index in the batch.
        index: usize,
        /// The operation.
        what: &'static str,
    },
    /// The target of an atomic is not 8 bytes on an 8-byte boundary.
    Misaligned {
        /// Address of the target.
        addr: u64,
        /// Length of the target in bytes.
        len: u64,
    },
    /// The queue pair was closed or dropped before the completion.
    Closed,
    /// The completion queue failed.
    CompletionQueue(VerbError),
    /// The deadline passed, see [`Operation::within`](crate::op::Operation::within). The device no
    /// longer accesses the buffers of an [`OpError`] with this kind.
    TimedOut {
        /// [`NotSent`](Outcome::NotSent) if the work request was still queued, which leaves the
        /// queue pair unharmed. Otherwise, the queue pair was moved to the error state.
        outcome: Outcome,
    },
}

impl OpErrorKind {
    /// Returns the status of the completion, if there was one.
    #[must_use]
    pub const fn status(&self) -> Option<WcStatus> {
        match self {
            Self::Completion(error) => Some(error.status),
            _ => None,
        }
    }

    /// Returns the closest kind of I/O error.
    #[must_use]
    pub fn io_kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            Self::Completion(error) => match error.status {
                WcStatus::RETRY_EXC_ERR
                | WcStatus::RNR_RETRY_EXC_ERR
                | WcStatus::RESP_TIMEOUT_ERR => ErrorKind::TimedOut,
                WcStatus::WR_FLUSH_ERR => ErrorKind::ConnectionAborted,
                WcStatus::REM_ACCESS_ERR => ErrorKind::PermissionDenied,
                WcStatus::LOC_LEN_ERR | WcStatus::LOC_PROT_ERR | WcStatus::REM_INV_REQ_ERR => {
                    ErrorKind::InvalidInput
                }
                _ => ErrorKind::Other,
            },
            Self::Post(verb) | Self::CompletionQueue(verb) => io::Error::from(*verb).kind(),
            Self::State { .. } => ErrorKind::NotConnected,
            Self::Limit(_)
            | Self::Foreign { .. }
            | Self::Rights { .. }
            | Self::NotOneSided { .. }
            | Self::Misaligned { .. } => ErrorKind::InvalidInput,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Closed => ErrorKind::NotConnected,
            Self::TimedOut { .. } => ErrorKind::TimedOut,
        }
    }
}

impl fmt::Display for OpErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion(error) => error.fmt(f),
            Self::Post(error) => write!(f, "failed to post the work request: {error}"),
            Self::State { qpn, state: state @ (QpState::Err | QpState::Sqe), error } => write!(
                f,
                "queue pair {qpn} has failed (state {state:?}); create and connect a new one \
                     ({error})"
            ),
            Self::State { qpn, state, error } => write!(
                f,
                "queue pair {qpn} is not connected (state {state:?}): sends need state Rts, \
                 receives Init or later; connect it first ({error})"
            ),
            Self::Limit(error) => error.fmt(f),
            Self::Foreign { what } => {
                write!(f, "the {what} belongs to another protection domain than the queue pair")
            }
            Self::Rights { missing } => {
                let names: Vec<_> = missing.iter_names().map(|(name, _)| name).collect();
                write!(
                    f,
                    "the region lacks access rights {}; add them when the region is created",
                    names.join(" | ")
                )
            }
            Self::Unsupported { what } => write!(f, "the queue pair does not support {what}"),
            Self::NotOneSided { index, what } => write!(
                f,
                "work request {index} of the batch is a {what}, which would consume a receive \
                     that the peer's Connection reserves for messages; post only WRITE and READ"
            ),
            Self::Misaligned { addr, len } => write!(
                f,
                "invalid target of an atomic, {len} bytes at {addr:#x}: 8 bytes on an 8-byte \
                     boundary required"
            ),
            Self::Closed => f.write_str(
                "the queue pair was closed before the operation completed; its outcome is unknown",
            ),
            Self::CompletionQueue(error) => write!(
                f,
                "the completion queue failed, and the outcome of the operation is unknown: \
                     {error}"
            ),
            Self::TimedOut { outcome: Outcome::NotSent } => {
                f.write_str("the deadline passed before the operation was posted; nothing was sent")
            }
            Self::TimedOut { .. } => f.write_str(
                "the deadline of an operation passed; its queue pair was moved to the error state, \
                 and the peer may have executed the operation",
            ),
        }
    }
}

impl std::error::Error for OpErrorKind {}

/// A failed operation with its buffers.
///
/// Conversion into another error, for example by `?`, drops the buffers.
pub struct OpError<B> {
    // Boxed: otherwise every result, success included, would be as large as the error.
    failure: Box<(OpErrorKind, Option<RemoteAccess>, B)>,
}

/// The remote memory that a failed operation accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RemoteAccess {
    /// The operation, for example `WRITE`.
    pub operation: &'static str,
    /// First remote address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

impl<B> OpError<B> {
    #[cold]
    pub(crate) fn new(kind: OpErrorKind, buffer: B) -> Self {
        Self::accessing(None, kind, buffer)
    }

    #[cold]
    pub(crate) fn accessing(remote: Option<RemoteAccess>, kind: OpErrorKind, buffer: B) -> Self {
        Self { failure: Box::new((kind, remote, buffer)) }
    }

    /// Returns the reason.
    #[must_use]
    pub fn kind(&self) -> OpErrorKind {
        self.failure.0
    }

    /// Returns the status of the completion, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<WcStatus> {
        self.kind().status()
    }

    /// Returns the remote memory of a WRITE, READ or atomic. `None` for a batch, and for an
    /// operation that was refused before it was posted.
    #[must_use]
    pub fn remote(&self) -> Option<RemoteAccess> {
        self.failure.1
    }

    /// Returns the buffers. The content of a buffer that the operation was to fill is unspecified.
    #[must_use]
    pub fn into_buffer(self) -> B {
        self.failure.2
    }
}

impl<B> fmt::Debug for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OpError").field(&self.kind()).finish()
    }
}

impl<B> fmt::Display for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(RemoteAccess { operation, addr, len }) = self.remote() {
            write!(f, "{operation} of {len} bytes at remote address {addr:#x}: ")?;
        }
        self.kind().fmt(f)
    }
}

impl<B> std::error::Error for OpError<B> {}

impl<B> From<OpError<B>> for OpErrorKind {
    fn from(error: OpError<B>) -> Self {
        error.kind()
    }
}

impl<B> From<OpError<B>> for io::Error {
    fn from(error: OpError<B>) -> Self {
        Self::new(error.kind().io_kind(), error.kind())
    }
}

/// The reason why a `try_` operation posted nothing.
pub enum TryError<B> {
    /// The work queue has no free slot, or the DC pool no available initiator. Holds the buffers.
    Full(B),
    /// The work request was refused for another reason.
    Refused(OpError<B>),
}

impl<B> TryError<B> {
    /// Returns the buffers.
    #[must_use]
    pub fn into_buffer(self) -> B {
        match self {
            Self::Full(buffer) => buffer,
            Self::Refused(error) => error.into_buffer(),
        }
    }

    /// Returns true if a later attempt may succeed.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

const FULL: &str = "the work queue is full; retry after a completion";

impl<B> fmt::Debug for TryError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(_) => f.write_str("Full"),
            Self::Refused(error) => f.debug_tuple("Refused").field(error).finish(),
        }
    }
}

impl<B> fmt::Display for TryError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(_) => f.write_str(FULL),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl<B> std::error::Error for TryError<B> {}

impl<B> From<TryError<B>> for io::Error {
    fn from(error: TryError<B>) -> Self {
        match error {
            TryError::Full(_) => Self::new(io::ErrorKind::WouldBlock, FULL),
            TryError::Refused(error) => error.into(),
        }
    }
}
