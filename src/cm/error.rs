use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::error::{LimitError, NoRuntime, SetupError, VerbError, wraps};
use crate::types::RejectReason;
use crate::verbs::Device;

use super::inbox::EndReason;

/// An error of listening, resolving, connecting or disconnecting.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectError {
    /// The host name lookup failed, took too long, or returned no address.
    Lookup {
        /// The address as it was passed, in `Debug` format, if known.
        host: Option<String>,
        /// Kind of the error.
        kind: io::ErrorKind,
        /// Text of the resolver's error.
        message: String,
    },
    /// No RDMA device reaches the address, or no host has it.
    Resolve {
        /// Address to connect to.
        address: SocketAddr,
        /// Reason, see `errno(3)`.
        errno: i32,
        /// True if the device reaches only devices of this process.
        in_process: bool,
    },
    /// The route to the address goes through another device than the one passed.
    OtherDevice {
        /// Address to connect to.
        address: SocketAddr,
        /// Name of the device on the route.
        device: String,
    },
    /// Another listener has the address.
    AddressInUse {
        /// Address to listen at.
        address: SocketAddr,
        /// Name of that listener's device, if the listener belongs to this process.
        device: Option<String>,
    },
    /// The device does not have the address to listen at, or to connect from.
    AddressNotAvailable {
        /// Address to listen at, or to connect to.
        address: SocketAddr,
        /// The [source](super::ConnectConfig::source) address, when connecting.
        source: Option<IpAddr>,
        /// [`ConnectStep::Listen`] or [`ConnectStep::Resolve`].
        step: ConnectStep,
    },
    /// No listener has the address.
    Refused {
        /// Address to connect to.
        address: SocketAddr,
        /// True if the device reaches only devices of this process.
        in_process: bool,
    },
    /// The peer rejected the request, or withdrew its own.
    Rejected {
        /// Step and peer.
        attempt: ConnectAttempt,
        /// Reason given by the peer.
        reason: RejectReason,
        /// Private data of the rejection: empty, or padded with zeros to 148 bytes.
        private_data: Vec<u8>,
    },
    /// The peer does not answer, or its host has refused the request.
    Unreachable {
        /// Step and peer.
        attempt: ConnectAttempt,
        /// Reason, see `errno(3)`. The software device over UDP returns ECONNREFUSED if no process
        /// of the peer's host has opened a device at the address, or a firewall rejects the port.
        errno: i32,
    },
    /// The time limit of a step has passed.
    TimedOut {
        /// Address of the peer.
        address: SocketAddr,
        /// Step that took too long.
        step: ConnectStep,
        /// Time allowed.
        after: Duration,
    },
    /// The peer disconnected before the connection was complete.
    Disconnected {
        /// Step and peer.
        attempt: ConnectAttempt,
    },
    /// The local address was moved to another device or network interface during the handshake.
    AddressChanged {
        /// Step and peer.
        attempt: ConnectAttempt,
    },
    /// The device was removed.
    DeviceRemoved {
        /// Step, and listener or peer.
        attempt: ConnectAttempt,
    },
    /// The current runtime is missing, or lacks an I/O driver.
    NoRuntime(NoRuntime),
    /// A setting exceeds its limit, for example the length of the private data.
    Limit(LimitError),
    /// The queue pair does not fit the connection. A failed verb becomes [`Verb`](Self::Verb).
    Setup {
        /// Step and peer.
        attempt: Option<ConnectAttempt>,
        /// Reason.
        error: Box<SetupError>,
    },
    /// A verb failed, for example to bring the queue pair to RTS.
    Verb {
        /// Step, and listener or peer.
        attempt: Option<ConnectAttempt>,
        /// Verb and reason.
        error: VerbError,
    },
}

/// A step, and the address of the listener or the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectAttempt {
    /// Step that failed.
    pub step: ConnectStep,
    /// Address to listen at, or of the peer.
    pub address: SocketAddr,
}

/// A step of listening, connecting or disconnecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectStep {
    /// Looks up the addresses of a host name.
    Lookup,
    /// Resolves an address to a device and a route.
    Resolve,
    /// Binds an address and listens there.
    Listen,
    /// Builds a queue pair for the connection.
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
    /// Waits for the end of TIMEWAIT after a disconnect.
    Timewait,
    /// Joins a multicast group.
    Join,
}

impl ConnectError {
    pub(super) fn from_end(end: &EndReason, step: ConnectStep, address: SocketAddr) -> Self {
        let attempt = ConnectAttempt { step, address };
        match end {
            EndReason::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } => {
                Self::Refused { address, in_process: false }
            }
            EndReason::Rejected { reason, private_data } => {
                Self::Rejected { attempt, reason: *reason, private_data: private_data.clone() }
            }
            EndReason::Unreachable(errno) | EndReason::Error(errno) => {
                Self::Unreachable { attempt, errno: *errno }
            }
            EndReason::Disconnected | EndReason::TimewaitExit | EndReason::Keepalive(_) => {
                Self::Disconnected { attempt }
            }
            EndReason::AddressChange => Self::AddressChanged { attempt },
            EndReason::DeviceRemoval => Self::DeviceRemoved { attempt },
        }
    }

    /// On an iWARP device, the request opens a TCP connection, which fails like `connect(2)`.
    pub(super) fn of_request(self, address: SocketAddr) -> Self {
        const ECONNREFUSED: i32 = 111;
        const UNREACHABLE: [i32; 4] = [101, 104, 110, 113];
        let attempt = ConnectAttempt { step: ConnectStep::Request, address };
        match self {
            Self::Verb { error, .. } if error.errno == ECONNREFUSED => {
                Self::Refused { address, in_process: false }
            }
            Self::Verb { error, .. } if UNREACHABLE.contains(&error.errno) => {
                Self::Unreachable { attempt, errno: error.errno }
            }
            other => other.during(ConnectStep::Request, address),
        }
    }

    pub(super) fn during(mut self, step: ConnectStep, address: SocketAddr) -> Self {
        match &mut self {
            Self::Setup { attempt, .. } | Self::Verb { attempt, .. } => {
                attempt.get_or_insert(ConnectAttempt { step, address });
            }
            _ => {}
        }
        self
    }

    pub(super) fn through(mut self, device: &Device) -> Self {
        if let Self::Resolve { in_process, .. } | Self::Refused { in_process, .. } = &mut self {
            *in_process = device.context().is_in_process();
        }
        self
    }

    /// Returns the step that failed, if known.
    #[must_use]
    pub const fn step(&self) -> Option<ConnectStep> {
        match (self, self.attempt()) {
            (_, Some(attempt)) => Some(attempt.step),
            (Self::Lookup { .. }, None) => Some(ConnectStep::Lookup),
            (_, None) => None,
        }
    }

    /// Returns the address of the listener or the peer, if known.
    #[must_use]
    pub const fn address(&self) -> Option<SocketAddr> {
        match self.attempt() {
            Some(attempt) => Some(attempt.address),
            None => None,
        }
    }

    const fn attempt(&self) -> Option<ConnectAttempt> {
        let (step, address) = match *self {
            Self::Resolve { address, .. } | Self::OtherDevice { address, .. } => {
                (ConnectStep::Resolve, address)
            }
            Self::AddressInUse { address, .. } => (ConnectStep::Listen, address),
            Self::Refused { address, .. } => (ConnectStep::Response, address),
            Self::AddressNotAvailable { address, step, .. }
            | Self::TimedOut { address, step, .. } => (step, address),
            Self::Rejected { attempt, .. }
            | Self::Unreachable { attempt, .. }
            | Self::Disconnected { attempt }
            | Self::AddressChanged { attempt }
            | Self::DeviceRemoved { attempt } => return Some(attempt),
            Self::Setup { attempt, .. } | Self::Verb { attempt, .. } => return attempt,
            Self::Lookup { .. } | Self::Limit(_) | Self::NoRuntime(_) => return None,
        };
        Some(ConnectAttempt { step, address })
    }

    pub(crate) fn lookup(host: Option<String>, error: &io::Error) -> Self {
        Self::Lookup { host, kind: error.kind(), message: error.to_string() }
    }

    /// Returns the nearest kind of I/O error.
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
        if let Some(attempt) = self.attempt() {
            write!(f, "{attempt}: ")?;
        }
        let reason = |errno: i32| io::Error::from_raw_os_error(errno);
        match self {
            Self::Lookup { host: Some(host), message, .. } => {
                write!(f, "looking up the host name of {host}: {message}")
            }
            Self::Lookup { host: None, message, .. } => {
                write!(f, "looking up the host name: {message}")
            }
            Self::Resolve { in_process: true, .. } => {
                write!(f, "no device of this process has the address, and {ONLY_IN_PROCESS}")
            }
            Self::Resolve { errno, .. } => {
                write!(f, "no RDMA device leads to the address: {}", reason(*errno))
            }
            Self::OtherDevice { device, .. } => write!(
                f,
                "the route goes through device {device}, not through the device that was passed; \
                 open {device}"
            ),
            Self::AddressInUse { device: Some(device), .. } => write!(
                f,
                "the address is in use by another listener of this process, on device {device}"
            ),
            Self::AddressInUse { device: None, .. } => {
                f.write_str("the address is in use; choose another port or stop its listener")
            }
            Self::AddressNotAvailable { source: Some(source), .. } => {
                write!(f, "the source address {source} does not belong to the device")
            }
            Self::AddressNotAvailable { source: None, .. } => f.write_str(
                "the address does not belong to the device; open the device that has it, for \
                 example with Device::open_default_at",
            ),
            Self::Refused { in_process: true, .. } => write!(
                f,
                "refused: no listener of this process has the address and port, and \
                 {ONLY_IN_PROCESS}"
            ),
            Self::Refused { .. } => {
                f.write_str("refused: the peer does not listen at this address and port")
            }
            Self::Rejected { private_data, .. } if private_data.starts_with(FOR_MESSAGES) => f
                .write_str(
                    "rejected: the listener is a tokio_rdma::Listener for messages, and the \
                     request carries no handshake; connect with tokio_rdma::Connection",
                ),
            Self::Rejected { private_data, .. } if private_data.starts_with(FOR_STREAMS) => f
                .write_str(
                    "rejected: the listener is a tokio_rdma::RdmaListener for byte streams, and \
                     the request carries no handshake; connect with tokio_rdma::RdmaStream",
                ),
            Self::Rejected { reason, .. } => write!(f, "rejected by the peer: {reason}"),
            Self::Unreachable { errno: ECONNREFUSED, .. } => f.write_str(
                "refused: no process of the peer's host has opened a device at the address, or a \
                 firewall rejects UDP port 4791; start the service, which opens its device with \
                 Device::open_default_at",
            ),
            Self::Unreachable { errno, .. } => {
                write!(f, "the peer does not answer: {}", reason(*errno))
            }
            Self::TimedOut { after, .. } => write!(f, "timed out after {after:?}"),
            Self::Disconnected { .. } => {
                f.write_str("the peer disconnected before the connection was established")
            }
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

impl fmt::Display for ConnectAttempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, address } = self;
        match step {
            ConnectStep::Lookup => write!(f, "looking up {address}"),
            ConnectStep::Resolve => write!(f, "resolving a route to {address}"),
            ConnectStep::Listen => write!(f, "listening at {address}"),
            ConnectStep::Prepare => write!(f, "preparing a queue pair for {address}"),
            ConnectStep::Request => write!(f, "sending a connection request to {address}"),
            ConnectStep::Response => {
                write!(f, "waiting for {address} to answer the connection request")
            }
            ConnectStep::Confirm => write!(f, "confirming the answer of {address}"),
            ConnectStep::Accept => write!(f, "accepting the connection request of {address}"),
            ConnectStep::Establish => write!(f, "waiting for {address} to confirm the connection"),
            ConnectStep::Reject => write!(f, "rejecting the connection request of {address}"),
            ConnectStep::Disconnect => {
                write!(f, "waiting for {address} to answer the disconnect request")
            }
            ConnectStep::Timewait => {
                write!(f, "waiting for the end of TIMEWAIT of the connection to {address}")
            }
            ConnectStep::Join => write!(f, "joining multicast group {}", address.ip()),
        }
    }
}

impl fmt::Display for ConnectStep {
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
            Self::Join => "joining of a multicast group",
        })
    }
}

const ECONNREFUSED: i32 = 111;

const ONLY_IN_PROCESS: &str = "the device reaches no other process; to connect to another process, \
                               open the device with Device::open_default_to";

/// Private data with which a message [`Listener`](crate::Listener) rejects a request without a
/// handshake, readable for peers in C, too.
pub(crate) const FOR_MESSAGES: &[u8] =
    b"tRDM: this is a tokio-rdma listener for messages; the request has no handshake";

pub(crate) const FOR_STREAMS: &[u8] =
    b"tRDM: this is a tokio-rdma listener for byte streams; the request has no handshake";

impl std::error::Error for ConnectError {}

/// Errors of programs can contain this one, so it has half of clippy's `result_large_err`.
const _: () = assert!(size_of::<ConnectError>() <= 64);

wraps!(ConnectError: NoRuntime(NoRuntime), Limit(LimitError));

impl From<SetupError> for ConnectError {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Verb(error) => error.into(),
            error => Self::Setup { attempt: None, error: Box::new(error) },
        }
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
