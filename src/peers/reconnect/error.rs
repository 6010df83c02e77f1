use std::fmt;
use std::io;
use std::time::Duration;

use crate::cm::ConnectError;
use crate::connection::{CloseReason, EstablishError};
use crate::error::{OpenError, SetupError, VerbError};
use crate::types::RejectReason;

/// The reason why a [`Reconnect`](super::Reconnect) makes another attempt or none.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReconnectCause {
    /// An attempt failed.
    Attempt(EstablishError),
    /// An attempt exceeded [`attempt_timeout`](super::ReconnectPolicy::attempt_timeout) or the
    /// deadline.
    AttemptTimedOut {
        /// Time allowed.
        after: Duration,
    },
    /// No port of the device is active.
    PortDown {
        /// Name of the device.
        device: String,
    },
    /// The device was removed.
    DeviceRemoved {
        /// Name of the device.
        device: String,
    },
    /// The device could not be opened.
    Open(OpenError),
    /// A connection has ended.
    Lost {
        /// Number of the connection.
        generation: u64,
        /// Reason of its end.
        reason: CloseReason,
    },
}

/// The reason why a [`Reconnect`](super::Reconnect) makes no further attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReconnectError {
    /// The [deadline](super::ReconnectPolicy::deadline) has passed.
    TimedOut {
        /// Time allowed.
        after: Duration,
        /// Attempts since the start, or since the end of the last connection.
        attempts: u32,
        /// Failure of the last attempt.
        cause: ReconnectCause,
    },
    /// Another attempt would also fail.
    Permanent {
        /// The failure.
        cause: ReconnectCause,
        /// As for [`TimedOut`](Self::TimedOut).
        attempts: u32,
    },
    /// The handle was [closed](super::Reconnect::close).
    Closed,
    /// The Tokio runtime has shut down.
    Runtime,
    /// The connector, or a function of the policy or for opening the device, has panicked.
    Panicked {
        /// Message of the panic; empty if it is not text.
        message: String,
    },
}

impl fmt::Display for ReconnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attempt(error) => error.fmt(f),
            Self::AttemptTimedOut { after } => write!(f, "the attempt timed out after {after:?}"),
            Self::PortDown { device } => write!(f, "device {device} has no active port"),
            Self::DeviceRemoved { device } => write!(f, "device {device} was removed"),
            Self::Open(error) => error.fmt(f),
            Self::Lost { generation, reason } => {
                write!(f, "connection {generation} has closed: {reason}")
            }
        }
    }
}

impl fmt::Display for ReconnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut { after, attempts, cause } => write!(
                f,
                "failed to connect within {after:?} (ReconnectPolicy::deadline), {attempts} \
                 attempts: {cause}"
            ),
            Self::Permanent { cause, attempts: 0 } => {
                write!(f, "stopped connecting before the next attempt: {cause}")
            }
            Self::Permanent { cause, attempts } => {
                write!(f, "stopped connecting after attempt {attempts}: {cause}")
            }
            Self::Closed => f.write_str("the Reconnect handle was closed"),
            Self::Runtime => f.write_str("the Tokio runtime of the Reconnect handle has shut down"),
            Self::Panicked { message } if message.is_empty() => {
                f.write_str("stopped connecting: the connector or the policy panicked")
            }
            Self::Panicked { message } => {
                write!(f, "stopped connecting: the connector or the policy panicked: {message}")
            }
        }
    }
}

impl std::error::Error for ReconnectCause {}

impl std::error::Error for ReconnectError {}

impl From<ReconnectError> for io::Error {
    fn from(error: ReconnectError) -> Self {
        let kind = match &error {
            ReconnectError::TimedOut { .. } => io::ErrorKind::TimedOut,
            ReconnectError::Permanent { cause: ReconnectCause::Attempt(cause), .. } => {
                Self::from(cause.clone()).kind()
            }
            ReconnectError::Permanent { .. } | ReconnectError::Runtime => {
                io::ErrorKind::ConnectionAborted
            }
            ReconnectError::Panicked { .. } => io::ErrorKind::Other,
            ReconnectError::Closed => io::ErrorKind::NotConnected,
        };
        Self::new(kind, error)
    }
}

impl EstablishError {
    /// Returns true if a later attempt with the same settings may succeed, by the table of
    /// [`Reconnect`](super::Reconnect).
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Setup(error) => is_temporary_setup(error),
            Self::Connect(error) => is_temporary_connect(error),
            Self::Refused { reason, .. } => reason.is_temporary(),
            _ => false,
        }
    }
}

fn is_temporary_connect(error: &ConnectError) -> bool {
    match error {
        // Routes and addresses of a host change, for example when a port goes down.
        ConnectError::Lookup { .. }
        | ConnectError::Resolve { .. }
        | ConnectError::OtherDevice { .. }
        | ConnectError::AddressNotAvailable { .. }
        | ConnectError::AddressChanged { .. }
        | ConnectError::Refused { .. }
        | ConnectError::Unreachable { .. }
        | ConnectError::TimedOut { .. }
        | ConnectError::Disconnected { .. } => true,
        ConnectError::Rejected { reason, private_data, .. } => {
            // Connection managers pad with zeros.
            let no_data = private_data.iter().all(|&byte| byte == 0);
            match *reason {
                RejectReason::CONSUMER => no_data,
                RejectReason::NO_QP
                | RejectReason::NO_RESOURCES
                | RejectReason::TIMEOUT
                | RejectReason::INVALID_COMM_ID
                | RejectReason::INVALID_COMM_INSTANCE
                | RejectReason::INVALID_SERVICE_ID
                | RejectReason::STALE_CONNECTION
                | RejectReason::INVALID_GID
                | RejectReason::INVALID_LID
                | RejectReason::DUPLICATE_COMM_ID => true,
                _ => false,
            }
        }
        ConnectError::Setup { error, .. } => is_temporary_setup(error),
        ConnectError::Verb { error, .. } => is_temporary_verb(error),
        _ => false,
    }
}

fn is_temporary_setup(error: &SetupError) -> bool {
    match error {
        SetupError::Verb(error) => is_temporary_verb(error),
        // The port is down, or other connections use the entries.
        SetupError::NoGid { .. } | SetupError::CompletionQueueFull { .. } => true,
        // A shared completion queue has failed. The next attempt uses another one.
        SetupError::Closed => true,
        _ => false,
    }
}

fn is_temporary_verb(error: &VerbError) -> bool {
    const EINTR: i32 = 4;
    const EAGAIN: i32 = 11;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOSPC: i32 = 28;
    const ETIMEDOUT: i32 = 110;
    [
        EINTR,
        EAGAIN,
        VerbError::ENOMEM,
        VerbError::EBUSY,
        ENFILE,
        EMFILE,
        ENOSPC,
        VerbError::EADDRNOTAVAIL,
        ETIMEDOUT,
    ]
    .contains(&error.errno)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::net::SocketAddr;

    use bytes::Bytes;

    use super::*;
    use crate::cm::{ConnectAttempt, ConnectStep};
    use crate::connection::RefusalReason;
    use crate::connection::{HandshakeError, Service};
    use crate::error::{LimitError, NoRuntime};

    #[test]
    fn errors_are_temporary_if_the_peer_or_the_network_can_change_them() {
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let attempt = ConnectAttempt { step: ConnectStep::Request, address };
        let rejected = |reason, private_data: &[u8]| ConnectError::Rejected {
            attempt,
            reason,
            private_data: private_data.to_vec(),
        };
        let refused = |reason| EstablishError::Refused { address, reason };
        let verb = |errno| SetupError::Verb(VerbError::new("ibv_create_qp", errno));
        let limit = LimitError { field: "max_send_wr", asked: 2, allowed: 1 };
        let version = HandshakeError::Version { theirs: 2, ours: 1 };
        let temporary: [EstablishError; 21] = [
            ConnectError::lookup(None, &io::ErrorKind::NotFound.into()).into(),
            ConnectError::Resolve { address, errno: 113, in_process: false }.into(),
            ConnectError::OtherDevice { address, device: String::new() }.into(),
            ConnectError::AddressNotAvailable { address, source: None, step: attempt.step }.into(),
            ConnectError::AddressChanged { attempt }.into(),
            ConnectError::Refused { address, in_process: false }.into(),
            ConnectError::Unreachable { attempt, errno: 110 }.into(),
            ConnectError::TimedOut { address, step: attempt.step, after: Duration::ZERO }.into(),
            ConnectError::Disconnected { attempt }.into(),
            rejected(RejectReason::CONSUMER, &[]).into(),
            rejected(RejectReason::CONSUMER, &[0; 148]).into(),
            rejected(RejectReason::STALE_CONNECTION, &[]).into(),
            rejected(RejectReason::NO_RESOURCES, b"any").into(),
            refused(RefusalReason::ListenerFull),
            refused(RefusalReason::SourceFull),
            refused(RefusalReason::ShuttingDown),
            SetupError::NoGid { port: 1 }.into(),
            SetupError::CompletionQueueFull { asked: 2, free: 1 }.into(),
            SetupError::Closed.into(),
            verb(VerbError::ENOMEM).into(),
            ConnectError::from(verb(VerbError::EBUSY)).into(),
        ];
        let permanent: [EstablishError; 14] = [
            rejected(RejectReason::CONSUMER, b"go away").into(),
            rejected(RejectReason::INVALID_CLASS_VERSION, &[]).into(),
            rejected(RejectReason::UNSUPPORTED, &[]).into(),
            refused(RefusalReason::OtherService(Service::Bytes)),
            EstablishError::Rejected { address, user_data: Bytes::new() },
            EstablishError::Handshake(version),
            EstablishError::OtherProtocol { address, error: version },
            EstablishError::NoRuntime(NoRuntime::Io),
            ConnectError::DeviceRemoved { attempt }.into(),
            ConnectError::AddressInUse { address, device: None }.into(),
            ConnectError::Limit(limit).into(),
            SetupError::Limit(limit).into(),
            SetupError::Unsupported { what: "RC" }.into(),
            verb(VerbError::EINVAL).into(),
        ];
        temporary.iter().for_each(|error| assert!(error.is_temporary(), "{error:?}"));
        permanent.iter().for_each(|error| assert!(!error.is_temporary(), "{error:?}"));
    }
}
