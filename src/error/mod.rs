//! Errors: the side at fault, the object and the numbers.
//!
//! Every error of this crate prints its whole cause: `{error}` is complete, in a log line too. [`source`](std::error::Error::source)
//! returns `None`, so that a report which prints the chain prints nothing twice. The cause as a value is in the variant.

use std::fmt;
use std::io;
use std::ops::{Bound, RangeBounds};

pub use rdma_provider::VerbError;
pub use rdma_soft::UdpError;

use crate::types::{Access, QpState, Qpn, TransitionError, WcStatus};

mod runtime;

pub use runtime::NoRuntime;

/// A value beyond what the device or the queue allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitError {
    /// What was asked for, for example `max_send_wr`.
    pub field: &'static str,
    /// How much was asked.
    pub asked: u64,
    /// The most that is allowed.
    pub allowed: u64,
}

impl LimitError {
    /// `Ok` if `asked` is at most `allowed`.
    pub(crate) fn check(field: &'static str, asked: u64, allowed: u64) -> Result<(), Self> {
        if asked <= allowed { Ok(()) } else { Err(Self { field, asked, allowed }) }
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: asked for {}, at most {} allowed", self.field, self.asked, self.allowed)
    }
}

impl std::error::Error for LimitError {}

/// A range that leaves the memory it is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBounds {
    /// First byte asked for.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u64,
    /// Bytes there are.
    pub size: u64,
}

impl OutOfBounds {
    /// Start and length of `range` within `size`.
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

    /// `Ok` if `len` bytes from `offset` lie within `size`.
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
            Some(_) => write!(f, "{len} bytes at offset {offset} do not lie within {size} bytes"),
            None => {
                write!(f, "{offset}..{} is no range within {size} bytes", offset.wrapping_add(*len))
            }
        }
    }
}

impl std::error::Error for OutOfBounds {}

/// No device could be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// No device has this name.
    NotFound {
        /// Name asked for.
        name: String,
        /// Names there are.
        available: Vec<String>,
        /// Why there are no others, if that is known.
        reason: Option<&'static str>,
    },
    /// The device is there, and a verb of opening it failed.
    Verb {
        /// Name of the device.
        device: String,
        /// Verb and reason.
        error: VerbError,
    },
    /// A software device cannot speak over UDP here.
    Udp(UdpError),
}

impl OpenError {
    /// Names the device in the error of a verb.
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
                write!(f, "no RDMA device is called {name:?}; there is {}", available.join(", "))?;
                reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))
            }
            Self::Verb { device, error } => write!(f, "opening device {device:?}: {error}"),
            Self::Udp(error) => error.fmt(f),
        }
    }
}

/// An object could not be made, changed or connected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SetupError {
    /// The provider refused.
    Verb(VerbError),
    /// A size is beyond the device's limit.
    Limit(LimitError),
    /// A size is too small to work.
    TooSmall {
        /// What was asked for.
        field: &'static str,
        /// How much was asked.
        asked: u64,
        /// The least that works.
        least: u64,
    },
    /// The state machine of the queue pair does not allow it.
    Transition(TransitionError),
    /// An object of another protection domain or device was passed.
    Foreign {
        /// Which one.
        what: &'static str,
    },
    /// The work of all queue pairs on a completion queue must fit it, and this one's would not.
    CompletionQueueFull {
        /// Completions the new queues can produce.
        asked: u32,
        /// Completions not yet spoken for.
        free: u32,
    },
    /// The two ends do not fit together.
    Mismatch {
        /// Which property.
        what: &'static str,
        /// Ours.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// Receives of a shared receive queue complete on its own completion queue, and another one was asked for.
    OtherCompletionQueue {
        /// Number of the completion queue that was asked for.
        asked: u64,
        /// Number of that of the shared receive queue.
        queue: u64,
    },
    /// An address has no use here: this port has no such GID, or none at all.
    NoGid {
        /// The port asked.
        port: u8,
    },
    /// The device does not have it.
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// The object was closed.
    Closed,
}

impl SetupError {
    /// `Ok` if it is large enough to work.
    pub(crate) fn at_least(field: &'static str, asked: u64, least: u64) -> Result<(), Self> {
        if asked >= least { Ok(()) } else { Err(Self::TooSmall { field, asked, least }) }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verb(error) => error.fmt(f),
            Self::Limit(error) => error.fmt(f),
            Self::TooSmall { field, asked, least } => {
                write!(f, "{field}: asked for {asked}, at least {least} needed")
            }
            Self::Transition(error) => error.fmt(f),
            Self::Foreign { what } => {
                write!(f, "{what} belongs to another protection domain or device")
            }
            Self::CompletionQueueFull { asked, free } => write!(
                f,
                "completion queue too small: {asked} more entries needed, {free} free; raise \
                 CompletionQueueBuilder::capacity, or lower max_send_wr or max_recv_wr"
            ),
            Self::Mismatch { what, ours, theirs } => {
                write!(f, "mismatch in {what}: ours is {ours}, the peer's is {theirs}")
            }
            Self::OtherCompletionQueue { asked, queue } => write!(
                f,
                "asked for completion queue {asked}; receives of this shared receive queue complete on completion queue {queue}"
            ),
            Self::NoGid { port } => {
                write!(f, "port {port} is not active, or has no such GID to send from")
            }
            Self::Unsupported { what } => write!(f, "the device has no {what}"),
            Self::Closed => f.write_str("the object is closed"),
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

impl std::error::Error for OpenError {}

impl std::error::Error for SetupError {}

wraps!(OpenError: Udp(UdpError));
wraps!(SetupError: Verb(VerbError), Limit(LimitError), Transition(TransitionError));

impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> Self {
        let kind = match &error {
            OpenError::NotFound { .. } => io::ErrorKind::NotFound,
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
            SetupError::NoGid { .. } => io::ErrorKind::AddrNotAvailable,
            SetupError::Unsupported { .. } => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

/// A work request that failed: what its completion says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionError {
    /// What went wrong.
    pub status: WcStatus,
    /// The device's own code, for its vendor's tables.
    pub vendor_error: u32,
    /// Queue pair.
    pub qpn: Qpn,
    /// Lengths of a message and the receive that is too small for it, with [`LOC_LEN_ERR`](WcStatus::LOC_LEN_ERR), on the
    /// software device. Adapters report none.
    pub lengths: Option<ReceiveLengths>,
}

/// Lengths of a message and of the receive that is too small for it. Those of datagrams have 40 bytes for the routing header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveLengths {
    /// Bytes that the receive has room for.
    pub capacity: u32,
    /// Bytes of the message when it was refused: all of them if it takes one packet, fewer if more were to follow.
    pub arrived: u32,
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, vendor_error, qpn, lengths } = self;
        if let Some(ReceiveLengths { capacity, arrived }) = lengths {
            return write!(
                f,
                "{status} (queue pair {qpn}: {arrived} bytes of the message had arrived, the receive holds {capacity}; post \
                 larger receives)"
            );
        }
        write!(f, "{status} (queue pair {qpn}, vendor error {vendor_error:#x})")
    }
}

impl std::error::Error for CompletionError {}

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// The device tried and reports a failure.
    Completion(CompletionError),
    /// The device refused the work request, or something that it needs; nothing was sent.
    Post(VerbError),
    /// The device refused the work request because the queue pair is not connected, or not any more; nothing was sent.
    State {
        /// Queue pair.
        qpn: Qpn,
        /// State it was found in, after the refusal.
        state: QpState,
        /// Verb and reason.
        error: VerbError,
    },
    /// The work request is beyond a limit of the queue pair; nothing was sent.
    Limit(LimitError),
    /// A buffer, region or address handle belongs to another protection domain; nothing was sent.
    Foreign {
        /// Which one.
        what: &'static str,
    },
    /// The region was not exposed with rights that the operation needs; nothing was sent.
    Rights {
        /// Those it lacks.
        missing: Access,
    },
    /// The operation does not exist on this transport; nothing was sent.
    Unsupported {
        /// Which one.
        what: &'static str,
    },
    /// It would consume a receive of the peer, and those are for the messages of its [`Connection`](crate::Connection);
    /// nothing of its batch was sent.
    NotOneSided {
        /// Its place in the batch.
        index: usize,
        /// What it is.
        what: &'static str,
    },
    /// An atomic's target is not 8 bytes on an 8-byte boundary; nothing was sent.
    Misaligned {
        /// Address of the target.
        addr: u64,
        /// Its bytes.
        len: u64,
    },
    /// The queue pair was closed or dropped first. Whether a peer saw the operation is unknown.
    Closed,
    /// The completion queue failed, so the outcome is unknown.
    CompletionQueue(VerbError),
}

impl OpErrorKind {
    /// Status of the completion, if there was one.
    #[must_use]
    pub const fn status(&self) -> Option<WcStatus> {
        match self {
            Self::Completion(error) => Some(error.status),
            _ => None,
        }
    }

    /// Nearest kind of I/O error.
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
        }
    }
}

impl fmt::Display for OpErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion(error) => error.fmt(f),
            Self::Post(error) => error.fmt(f),
            Self::State { qpn, state: state @ (QpState::Err | QpState::Sqe), error } => {
                write!(
                    f,
                    "queue pair {qpn} has failed (state {state:?}); make a new one and connect it ({error})"
                )
            }
            Self::State { qpn, state, error } => write!(
                f,
                "queue pair {qpn} is not connected (state {state:?}): sends need state Rts, receives Init or later; connect it \
                 first ({error})"
            ),
            Self::Limit(error) => error.fmt(f),
            Self::Foreign { what } => write!(f, "{what} belongs to another protection domain"),
            Self::Rights { missing } => write!(f, "the region lacks the access rights {missing:?}"),
            Self::Unsupported { what } => write!(f, "unsupported on this transport: {what}"),
            Self::NotOneSided { index, what } => {
                write!(
                    f,
                    "work request {index} of the batch is a {what}, which takes a receive of the peer's messages"
                )
            }
            Self::Misaligned { addr, len } => {
                write!(f, "an atomic needs 8 bytes on an 8-byte boundary, not {len} at {addr:#x}")
            }
            Self::Closed => f.write_str("the queue pair was closed before the operation was done"),
            Self::CompletionQueue(error) => write!(f, "completion queue failed: {error}"),
        }
    }
}

impl std::error::Error for OpErrorKind {}

/// An operation that failed, with the buffers it was given.
///
/// Turning it into another error (`?` does) drops the buffers, which go back to where they came from.
pub struct OpError<B> {
    // Boxed, so that the result of an operation is no larger than its buffer: it is moved with every success.
    failure: Box<(OpErrorKind, B)>,
}

impl<B> OpError<B> {
    #[cold]
    pub(crate) fn new(kind: OpErrorKind, buffer: B) -> Self {
        Self { failure: Box::new((kind, buffer)) }
    }

    /// Why it failed.
    #[must_use]
    pub fn kind(&self) -> OpErrorKind {
        self.failure.0
    }

    /// Status of the completion, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<WcStatus> {
        self.kind().status()
    }

    /// The buffers back. After a failure the content of a buffer that was to be filled is arbitrary.
    #[must_use]
    pub fn into_buffer(self) -> B {
        self.failure.1
    }
}

impl<B> fmt::Debug for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OpError").field(&self.kind()).finish()
    }
}

impl<B> fmt::Display for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// What a `try_` form answers when it posted nothing.
pub enum TryError<B> {
    /// The queue holds as much work as it can; the buffers come back.
    Full(B),
    /// The operation was refused.
    Refused(OpError<B>),
}

impl<B> TryError<B> {
    /// The buffers back.
    #[must_use]
    pub fn into_buffer(self) -> B {
        match self {
            Self::Full(buffer) => buffer,
            Self::Refused(error) => error.into_buffer(),
        }
    }

    /// True if trying again later may succeed.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

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
            Self::Full(_) => f.write_str("the work queue is full"),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl<B> std::error::Error for TryError<B> {}

impl<B> From<TryError<B>> for io::Error {
    fn from(error: TryError<B>) -> Self {
        match error {
            TryError::Full(_) => Self::new(io::ErrorKind::WouldBlock, "the work queue is full"),
            TryError::Refused(error) => error.into(),
        }
    }
}
