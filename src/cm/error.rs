//! Why two sides did not meet.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::error::{LimitError, NoRuntime, SetupError, VerbError};
use crate::types::RejectReason;

use super::router::End;

/// An attempt to listen or to connect failed, or a connection ended before it was complete.
///
/// Each variant names the address and the step of the attempt, as far as there is an address: a lookup has none yet, and
/// [`Limit`](Self::Limit) is refused before anything is attempted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectError {
    /// The lookup of the host name failed, or gave no address.
    Lookup {
        /// Kind of the error.
        kind: io::ErrorKind,
        /// Text of the resolver's error.
        message: String,
    },
    /// No device leads to the address, or no host has it.
    Resolve {
        /// Address to connect to.
        address: SocketAddr,
        /// Reason, as in `errno(3)`.
        errno: i32,
    },
    /// The address is reached over another device than the one that was asked.
    OtherDevice {
        /// Address to connect to.
        address: SocketAddr,
        /// Name of the device that leads there.
        device: String,
    },
    /// Another listener has the address.
    AddressInUse {
        /// Address to listen at.
        address: SocketAddr,
        /// Name of the device of that listener, if the listener belongs to this process.
        device: Option<String>,
    },
    /// The device does not have the address to listen at, or to connect from.
    AddressNotAvailable {
        /// Address to listen at, or to connect to.
        address: SocketAddr,
        /// The [source](super::Options::source) that the device does not have; none with [`Step::Listen`].
        source: Option<IpAddr>,
        /// [`Step::Listen`] or [`Step::Resolve`].
        step: Step,
    },
    /// No listener has the address.
    Refused {
        /// Address to connect to.
        address: SocketAddr,
    },
    /// The peer rejected the request, or gave its own request up.
    Rejected {
        /// Address of the peer, and step of the attempt.
        attempt: Attempt,
        /// Reason given by the peer.
        reason: RejectReason,
        /// Private data of the rejection. They are padded with zeros to 148 bytes, because their length does not travel; or
        /// they are empty.
        private_data: Vec<u8>,
    },
    /// The peer does not answer, and all retransmissions are used up.
    Unreachable {
        /// Address of the peer, and step of the attempt.
        attempt: Attempt,
        /// Reason, as in `errno(3)`.
        errno: i32,
    },
    /// The deadline has passed.
    TimedOut {
        /// Address of the peer; none for a lookup.
        address: Option<SocketAddr>,
        /// Step that took too long.
        step: Step,
        /// The time allowed.
        after: Duration,
    },
    /// The peer disconnected before the connection was complete.
    Disconnected {
        /// Address of the peer, and step of the attempt.
        attempt: Attempt,
    },
    /// The local address was moved to another device, or another network interface, before the connection was complete.
    AddressChanged {
        /// Address of the peer, and step of the attempt.
        attempt: Attempt,
    },
    /// The device was removed.
    DeviceRemoved {
        /// Address of the listener or the peer, and step of the attempt.
        attempt: Attempt,
    },
    /// The runtime that polls the future lacks what it needs.
    NoRuntime(NoRuntime),
    /// A setting is beyond its limit, private data for example.
    Limit(LimitError),
    /// The queue pair does not fit the connection, or cannot be made ready.
    Setup {
        /// Address of the peer, and step of the attempt.
        attempt: Option<Attempt>,
        /// Reason; boxed, to keep this type and those that hold it small.
        error: Box<SetupError>,
    },
    /// The provider refused.
    Verb {
        /// Address of the listener or the peer, and step of the attempt.
        attempt: Option<Attempt>,
        /// Verb and reason.
        error: VerbError,
    },
}

/// What an attempt was doing when it failed: its step and the address of the listener or the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// Step that failed.
    pub step: Step,
    /// Address to listen at, or of the peer.
    pub address: SocketAddr,
}

/// A step of listening, connecting or disconnecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// From a host name to addresses.
    Lookup,
    /// From an address to a device and a route.
    Resolve,
    /// Binds the address and listens there.
    Listen,
    /// Makes a queue pair for the connection.
    Prepare,
    /// Sends the connection request.
    Request,
    /// Waits for the answer to the connection request.
    Response,
    /// Brings the queue pair to RTS and confirms the answer.
    Confirm,
    /// Answers a connection request.
    Accept,
    /// Waits for the confirmation of the answer.
    Establish,
    /// Rejects a connection request.
    Reject,
    /// Waits for the answer to a disconnect request.
    Disconnect,
    /// Waits for the end of TIMEWAIT, after the end of a connection.
    Timewait,
}

impl ConnectError {
    /// From the end of a handshake with the peer at `address`, which came in `step`.
    pub(super) fn ended(end: &End, step: Step, address: SocketAddr) -> Self {
        let attempt = Attempt { step, address };
        match end {
            End::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } => {
                Self::Refused { address }
            }
            End::Rejected { reason, private_data } => {
                Self::Rejected { attempt, reason: *reason, private_data: private_data.clone() }
            }
            End::Unreachable(errno) | End::Error(errno) => {
                Self::Unreachable { attempt, errno: *errno }
            }
            End::Disconnected | End::TimewaitExit | End::Keepalive(_) => {
                Self::Disconnected { attempt }
            }
            End::AddressChange => Self::AddressChanged { attempt },
            End::DeviceRemoval => Self::DeviceRemoved { attempt },
        }
    }

    /// Names the attempt in an error that does not name one yet.
    pub(super) fn during(mut self, step: Step, address: SocketAddr) -> Self {
        match &mut self {
            Self::Setup { attempt, .. } | Self::Verb { attempt, .. } => {
                attempt.get_or_insert(Attempt { step, address });
            }
            Self::TimedOut { address: unknown, .. } => {
                unknown.get_or_insert(address);
            }
            _ => {}
        }
        self
    }

    /// Step that failed; none for a [`Limit`](Self::Limit) or without a [runtime](Self::NoRuntime).
    #[must_use]
    pub const fn step(&self) -> Option<Step> {
        match self.attempt() {
            Some((step, _)) => Some(step),
            None => None,
        }
    }

    /// Address of the listener or the peer, if the attempt had one.
    #[must_use]
    pub const fn address(&self) -> Option<SocketAddr> {
        match self.attempt() {
            Some((_, address)) => address,
            None => None,
        }
    }

    /// Step that failed, and the address of the listener or the peer.
    const fn attempt(&self) -> Option<(Step, Option<SocketAddr>)> {
        match self {
            Self::Lookup { .. } => Some((Step::Lookup, None)),
            Self::Resolve { address, .. } | Self::OtherDevice { address, .. } => {
                Some((Step::Resolve, Some(*address)))
            }
            Self::AddressInUse { address, .. } => Some((Step::Listen, Some(*address))),
            Self::Refused { address } => Some((Step::Response, Some(*address))),
            Self::AddressNotAvailable { address, step, .. } => Some((*step, Some(*address))),
            Self::TimedOut { address, step, .. } => Some((*step, *address)),
            Self::Rejected { attempt, .. }
            | Self::Unreachable { attempt, .. }
            | Self::Disconnected { attempt }
            | Self::AddressChanged { attempt }
            | Self::DeviceRemoved { attempt }
            | Self::Setup { attempt: Some(attempt), .. }
            | Self::Verb { attempt: Some(attempt), .. } => {
                Some((attempt.step, Some(attempt.address)))
            }
            Self::Setup { attempt: None, .. }
            | Self::Verb { attempt: None, .. }
            | Self::Limit(_)
            | Self::NoRuntime(_) => None,
        }
    }

    pub(super) fn lookup(error: &io::Error) -> Self {
        Self::Lookup { kind: error.kind(), message: error.to_string() }
    }

    /// Nearest kind of I/O error.
    #[must_use]
    pub fn io_kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            Self::Lookup { kind, .. } => *kind,
            Self::Resolve { errno, .. } | Self::Unreachable { errno, .. } => {
                io::Error::from_raw_os_error(*errno).kind()
            }
            Self::OtherDevice { .. } | Self::AddressNotAvailable { .. } => {
                ErrorKind::AddrNotAvailable
            }
            Self::AddressInUse { .. } => ErrorKind::AddrInUse,
            Self::Refused { .. } | Self::Rejected { .. } => ErrorKind::ConnectionRefused,
            Self::TimedOut { .. } => ErrorKind::TimedOut,
            Self::Disconnected { .. } | Self::AddressChanged { .. } => ErrorKind::ConnectionAborted,
            Self::DeviceRemoved { .. } => ErrorKind::NotConnected,
            Self::NoRuntime(_) => ErrorKind::Unsupported,
            Self::Limit(_) => ErrorKind::InvalidInput,
            Self::Setup { error, .. } => io::Error::from(SetupError::clone(error)).kind(),
            Self::Verb { error, .. } => io::Error::from(*error).kind(),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(step) = self.step() {
            match self.address() {
                Some(address) => Attempt { step, address }.fmt(f)?,
                None => f.write_str("looking up the host name")?,
            }
            f.write_str(": ")?;
        }
        let reason = |errno: i32| io::Error::from_raw_os_error(errno);
        match self {
            Self::Lookup { message, .. } => f.write_str(message),
            Self::Resolve { errno, .. } => write!(f, "no RDMA device leads there: {}", reason(*errno)),
            Self::OtherDevice { device, .. } => {
                write!(f, "the route leaves by device {device}, not by the device that was passed; open {device}")
            }
            Self::AddressInUse { device: Some(device), .. } => {
                write!(f, "another listener of this process, on device {device}, has the address")
            }
            Self::AddressInUse { device: None, .. } => f.write_str("the address is in use"),
            Self::AddressNotAvailable { source: Some(source), .. } => {
                write!(f, "the device does not have the source address {source}")
            }
            Self::AddressNotAvailable { source: None, .. } => f.write_str("the device does not have the address"),
            Self::Refused { .. } => f.write_str("refused: no listener has the address"),
            Self::Rejected { private_data, .. } if is_for_messages(private_data) => f.write_str(
                "rejected: the listener is a tokio_rdma::Listener for messages, and the request carries no handshake; \
                 connect with tokio_rdma::Connection",
            ),
            Self::Rejected { reason, .. } => write!(f, "rejected: {reason}"),
            Self::Unreachable { errno, .. } => write!(f, "the peer does not answer: {}", reason(*errno)),
            Self::TimedOut { after, .. } => write!(f, "took longer than {after:?}"),
            Self::Disconnected { .. } => f.write_str("the peer disconnected before the connection was complete"),
            Self::AddressChanged { .. } => {
                f.write_str("the local address was moved to another device or network interface")
            }
            Self::DeviceRemoved { .. } => f.write_str("the device was removed"),
            Self::NoRuntime(error) => error.fmt(f),
            Self::Limit(error) => error.fmt(f),
            Self::Setup { error, .. } => error.fmt(f),
            Self::Verb { error, .. } => error.fmt(f),
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, address } = self;
        match step {
            Step::Lookup => write!(f, "looking up {address}"),
            Step::Resolve => write!(f, "resolving a route to {address}"),
            Step::Listen => write!(f, "listening at {address}"),
            Step::Prepare => write!(f, "preparing a queue pair for {address}"),
            Step::Request => write!(f, "sending a connection request to {address}"),
            Step::Response => write!(f, "waiting for {address} to answer the connection request"),
            Step::Confirm => write!(f, "confirming the answer of {address}"),
            Step::Accept => write!(f, "accepting the connection request of {address}"),
            Step::Establish => write!(f, "waiting for {address} to confirm the connection"),
            Step::Reject => write!(f, "rejecting the connection request of {address}"),
            Step::Disconnect => write!(f, "waiting for {address} to answer the disconnect request"),
            Step::Timewait => {
                write!(f, "waiting for the end of TIMEWAIT of the connection to {address}")
            }
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lookup => "lookup of the host name",
            Self::Resolve => "resolution of the route",
            Self::Listen => "listening",
            Self::Prepare => "preparation of the queue pair",
            Self::Request => "connection request",
            Self::Response => "answer to the connection request",
            Self::Confirm => "confirmation of the answer",
            Self::Accept => "acceptance of the request",
            Self::Establish => "confirmation by the peer",
            Self::Reject => "rejection of the request",
            Self::Disconnect => "answer to the disconnect request",
            Self::Timewait => "end of TIMEWAIT",
        })
    }
}

/// Private data with which a message [`Listener`](crate::Listener) rejects a request without a handshake: what it is, in words for
/// programs in C, too.
pub(crate) const FOR_MESSAGES: &[u8] =
    b"tRDM: this is a tokio-rdma listener for messages; the request has no handshake";

fn is_for_messages(private_data: &[u8]) -> bool {
    private_data.starts_with(FOR_MESSAGES)
}

impl std::error::Error for ConnectError {}

/// Half of what clippy allows for an error (`result_large_err`): errors of programs hold this one beside fields of their own.
const _: () = assert!(size_of::<ConnectError>() <= 64);

impl From<NoRuntime> for ConnectError {
    fn from(error: NoRuntime) -> Self {
        Self::NoRuntime(error)
    }
}

impl From<LimitError> for ConnectError {
    fn from(error: LimitError) -> Self {
        Self::Limit(error)
    }
}

impl From<SetupError> for ConnectError {
    fn from(error: SetupError) -> Self {
        Self::Setup { attempt: None, error: Box::new(error) }
    }
}

impl From<VerbError> for ConnectError {
    fn from(error: VerbError) -> Self {
        Self::Verb { attempt: None, error }
    }
}

impl From<ConnectError> for io::Error {
    fn from(error: ConnectError) -> Self {
        Self::new(error.io_kind(), error)
    }
}
