//! Why two sides did not meet.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::error::{LimitError, SetupError, VerbError};
use crate::types::RejectReason;

use super::router::End;

/// No connection, or no listener.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectError {
    /// The host name means nothing, or its lookup failed.
    Lookup {
        /// Kind of the error.
        kind: io::ErrorKind,
        /// What the resolver says.
        message: String,
    },
    /// No device leads to the address, or nobody has it.
    Resolve {
        /// The address.
        address: SocketAddr,
        /// Reason, as in `errno(3)`.
        errno: i32,
    },
    /// The address is reached over another device than the one that was asked.
    OtherDevice {
        /// The address.
        address: SocketAddr,
        /// Name of the device that leads there.
        device: String,
    },
    /// Somebody listens there already.
    AddressInUse {
        /// The address.
        address: SocketAddr,
    },
    /// Not an address of ours.
    AddressNotAvailable {
        /// The address.
        address: SocketAddr,
    },
    /// Nobody listens there.
    Refused {
        /// The address.
        address: SocketAddr,
    },
    /// The other side said no.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What it has to say, filled up with zeros to 148 bytes; or nothing.
        private_data: Vec<u8>,
    },
    /// The other side does not answer, whatever is repeated.
    Unreachable {
        /// Reason, as in `errno(3)`.
        errno: i32,
    },
    /// The deadline has passed.
    TimedOut {
        /// What was waited for.
        step: Step,
        /// The time allowed.
        after: Duration,
    },
    /// The other side said goodbye before the connection was complete.
    Disconnected,
    /// Our address was moved to another device, or another network interface of it, before the connection was complete.
    AddressChanged,
    /// The device was taken away.
    DeviceRemoved,
    /// More than fits, private data for example.
    Limit(LimitError),
    /// The queue pair does not fit the connection, or cannot be made ready.
    Setup(SetupError),
    /// The provider refused.
    Verb(VerbError),
}

/// A part of the way to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// From a host name to addresses.
    Lookup,
    /// From an address to a device and a route.
    Resolve,
    /// The answer to a request.
    Response,
    /// The confirmation of our answer.
    Establish,
    /// The answer to a goodbye.
    Disconnect,
    /// The end of TIMEWAIT, after the end of a connection.
    Timewait,
}

impl ConnectError {
    /// From the end of a handshake with the peer at `address`.
    pub(super) fn ended(end: &End, address: SocketAddr) -> Self {
        match end {
            End::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. } => Self::Refused { address },
            End::Rejected { reason, private_data } => {
                Self::Rejected { reason: *reason, private_data: private_data.clone() }
            }
            End::Unreachable(errno) | End::Error(errno) => Self::Unreachable { errno: *errno },
            End::Disconnected | End::TimewaitExit => Self::Disconnected,
            End::AddressChange => Self::AddressChanged,
            End::DeviceRemoval => Self::DeviceRemoved,
        }
    }

    pub(super) fn lookup(error: &io::Error) -> Self {
        Self::Lookup { kind: error.kind(), message: error.to_string() }
    }

    /// From a verb about the address of a listener or a source.
    pub(super) fn at(address: SocketAddr) -> impl Fn(VerbError) -> Self {
        move |error| match error.errno {
            VerbError::EADDRINUSE => Self::AddressInUse { address },
            VerbError::EADDRNOTAVAIL => Self::AddressNotAvailable { address },
            _ => Self::Verb(error),
        }
    }

    /// Nearest kind of I/O error.
    #[must_use]
    pub fn io_kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            Self::Lookup { kind, .. } => *kind,
            Self::Resolve { errno, .. } | Self::Unreachable { errno } => io::Error::from_raw_os_error(*errno).kind(),
            Self::OtherDevice { .. } | Self::AddressNotAvailable { .. } => ErrorKind::AddrNotAvailable,
            Self::AddressInUse { .. } => ErrorKind::AddrInUse,
            Self::Refused { .. } | Self::Rejected { .. } => ErrorKind::ConnectionRefused,
            Self::TimedOut { .. } => ErrorKind::TimedOut,
            Self::Disconnected | Self::AddressChanged => ErrorKind::ConnectionAborted,
            Self::DeviceRemoved => ErrorKind::NotConnected,
            Self::Limit(_) => ErrorKind::InvalidInput,
            Self::Setup(error) => io::Error::from(error.clone()).kind(),
            Self::Verb(error) => io::Error::from(*error).kind(),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = |errno: i32| io::Error::from_raw_os_error(errno);
        match self {
            Self::Lookup { message, .. } => write!(f, "lookup: {message}"),
            Self::Resolve { address, errno } => write!(f, "no RDMA device leads to {address}: {}", reason(*errno)),
            Self::OtherDevice { address, device } => {
                write!(f, "{address} is reached over {device}, which was not asked")
            }
            Self::AddressInUse { address } => write!(f, "{address} is in use"),
            Self::AddressNotAvailable { address } => write!(f, "{address} is not an address of this device"),
            Self::Refused { address } => write!(f, "nobody listens at {address}"),
            Self::Rejected { reason, .. } => write!(f, "rejected: {reason}"),
            Self::Unreachable { errno } => write!(f, "the peer does not answer: {}", reason(*errno)),
            Self::TimedOut { step, after } => write!(f, "{step} took longer than {after:?}"),
            Self::Disconnected => f.write_str("the peer left before the connection was complete"),
            Self::AddressChanged => f.write_str("our address was moved before the connection was complete"),
            Self::DeviceRemoved => f.write_str("the device was taken away"),
            Self::Limit(error) => error.fmt(f),
            Self::Setup(error) => error.fmt(f),
            Self::Verb(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lookup => "the lookup of the host",
            Self::Resolve => "the resolution of the route",
            Self::Response => "the answer to the request",
            Self::Establish => "the confirmation of the answer",
            Self::Disconnect => "the answer to the goodbye",
            Self::Timewait => "the end of TIMEWAIT",
        })
    }
}

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Limit(error) => Some(error),
            Self::Setup(error) => Some(error),
            Self::Verb(error) => Some(error),
            _ => None,
        }
    }
}

impl From<LimitError> for ConnectError {
    fn from(error: LimitError) -> Self {
        Self::Limit(error)
    }
}

impl From<SetupError> for ConnectError {
    fn from(error: SetupError) -> Self {
        Self::Setup(error)
    }
}

impl From<VerbError> for ConnectError {
    fn from(error: VerbError) -> Self {
        Self::Verb(error)
    }
}

impl From<ConnectError> for io::Error {
    fn from(error: ConnectError) -> Self {
        Self::new(error.io_kind(), error)
    }
}
