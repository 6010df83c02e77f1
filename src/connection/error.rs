use std::fmt;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use rdma_message_proto::Violation;
use rdma_message_proto::end::{End, Reason};
use rdma_message_proto::handshake::HandshakeError;
use rdma_message_proto::lifecycle::NotOpen;
use rdma_message_proto::refusal::RefusalReason;

use crate::cm::ConnectError;
use crate::error::{LimitError, NoRuntime, OpErrorKind, SetupError};
use crate::types::WcStatus;

/// An error of sending or receiving a message. A failed send has sent nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// The message exceeds the peer's limit.
    TooLong(LimitError),
    /// This handle or another one has finished sending.
    Finished,
    /// Memory for the message could not be registered. A received message can still be received.
    Register(SetupError),
    /// The connection is closed.
    Closed(CloseReason),
}

/// An error of [`Connection::try_send`](super::Connection::try_send).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrySendError {
    /// The send would have to wait. Holds the message.
    Full(Bytes),
    /// The message cannot be sent.
    Failed(MessageError),
}

/// The reason why a connection closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// Both peers have finished, and all messages have arrived.
    Clean,
    /// This process closed or dropped it.
    Local,
    /// This process [aborted](super::Connection::abort) it.
    Aborted,
    /// The peer aborted it, or dropped it before finishing.
    Dropped,
    /// The connection manager reported a disconnect before the peer finished.
    Disconnected,
    /// The listener does not know the connection, although it had answered the request: it evicted
    /// the handshake before the confirmation arrived, which forged requests can cause, or another
    /// process has taken its place. It received no message. Connect again.
    Unconfirmed,
    /// The listener reached a connection limit after it had answered this request; its application
    /// has not seen the connection. Later requests fail with [`EstablishError::Refused`].
    Refused(RefusalReason),
    /// The peer's application [rejected](super::ConnectionRequest::reject) the request after its
    /// device had answered.
    Rejected,
    /// An operation on the connection failed. A failure at the peer is reported rather than the
    /// flush that follows it.
    Operation(OpErrorKind),
    /// The peer violated the protocol.
    Violation(Violation),
    /// The peer did not answer the [`keepalive`](super::ConnectionConfig::keepalive).
    Silent,
    /// [`first_message_timeout`](super::ListenerConfig::first_message_timeout) expired.
    NoFirstMessage,
    /// [`stall_timeout`](super::ConnectionConfig::stall_timeout) expired.
    Stalled,
    /// [`close_timeout`](super::ConnectionConfig::close_timeout) expired.
    CloseTimeout,
    /// Memory for the peer's message was unavailable, or a receive could not be posted.
    Memory,
    /// The Tokio runtime of the connection has shut down.
    Runtime,
    /// The time limit of [`Listener::shutdown`](super::Listener::shutdown) has expired.
    Shutdown,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(error) => error.fmt(f),
            Self::Finished => f.write_str("cannot send: `finish` was called on this side"),
            Self::Register(error) => {
                write!(f, "failed to register memory for the message: {error}")
            }
            Self::Closed(reason) => write!(f, "connection closed: {reason}"),
        }
    }
}

impl fmt::Display for TrySendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(message) => write!(
                f,
                "message of {} bytes not sent: the peer has no free receive, this side no send \
                 buffer, or other sends wait",
                message.len()
            ),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => f.write_str("both sides have finished"),
            Self::Local => f.write_str("closed by this side"),
            Self::Aborted => f.write_str("aborted by this side"),
            Self::Dropped => {
                f.write_str("the peer aborted or dropped the connection before it called `finish`")
            }
            Self::Disconnected => f.write_str("the peer disconnected before it called `finish`"),
            Self::Unconfirmed => f.write_str(
                "the listener does not know this connection: it discarded the handshake before \
                 this side's confirmation arrived, or another process has taken its place; connect \
                 again",
            ),
            Self::Refused(reason) => write!(f, "refused: {reason}"),
            Self::Rejected => f.write_str("rejected by the peer's service"),
            Self::Operation(kind) => kind.fmt(f),
            Self::Violation(violation) => write!(f, "protocol violation by the peer: {violation}"),
            Self::Silent => f.write_str("the peer did not answer within the keepalive timeout"),
            Self::NoFirstMessage => {
                f.write_str("the peer sent no message within first_message_timeout")
            }
            Self::Stalled => f.write_str("the peer accepted no message within stall_timeout"),
            Self::CloseTimeout => f.write_str("the peer did not finish within close_timeout"),
            Self::Memory => {
                f.write_str("failed to register memory or post a receive for messages of the peer")
            }
            Self::Runtime => f.write_str("the Tokio runtime of the connection has shut down"),
            Self::Shutdown => f.write_str("the time limit of the listener's shutdown has expired"),
        }
    }
}

impl std::error::Error for MessageError {}

impl std::error::Error for TrySendError {}

impl std::error::Error for CloseReason {}

impl From<End> for CloseReason {
    fn from(end: End) -> Self {
        match end {
            End::Clean => Self::Clean,
            End::Local => Self::Local,
            End::Dropped => Self::Dropped,
            End::Violation(violation) => Self::Violation(violation),
            End::Silent => Self::Silent,
            End::NoFirstMessage => Self::NoFirstMessage,
            End::Stalled => Self::Stalled,
        }
    }
}

impl From<Violation> for CloseReason {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl From<OpErrorKind> for CloseReason {
    fn from(kind: OpErrorKind) -> Self {
        Self::Operation(kind)
    }
}

impl Reason for CloseReason {
    fn is_flush(&self) -> bool {
        matches!(self, Self::Operation(kind)
            if kind.status() == Some(WcStatus::WR_FLUSH_ERR) || *kind == OpErrorKind::Closed)
    }
}

impl From<NotOpen<CloseReason>> for MessageError {
    fn from(not_open: NotOpen<CloseReason>) -> Self {
        match not_open {
            NotOpen::Finished => Self::Finished,
            NotOpen::Ended(reason) => Self::Closed(reason),
        }
    }
}

impl From<CloseReason> for MessageError {
    fn from(reason: CloseReason) -> Self {
        Self::Closed(reason)
    }
}

impl MessageError {
    /// Returns the nearest kind of I/O error.
    #[must_use]
    pub fn io_kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            Self::TooLong(_) => ErrorKind::InvalidInput,
            Self::Finished => ErrorKind::BrokenPipe,
            Self::Register(setup) => io::Error::from(setup.clone()).kind(),
            Self::Closed(reason) => match reason {
                CloseReason::Clean | CloseReason::Local => ErrorKind::NotConnected,
                CloseReason::Dropped | CloseReason::Disconnected => ErrorKind::ConnectionReset,
                CloseReason::Unconfirmed | CloseReason::Refused(_) | CloseReason::Rejected => {
                    ErrorKind::ConnectionRefused
                }
                CloseReason::Operation(kind) => kind.io_kind(),
                CloseReason::Violation(_) => ErrorKind::InvalidData,
                CloseReason::Silent
                | CloseReason::NoFirstMessage
                | CloseReason::Stalled
                | CloseReason::CloseTimeout => ErrorKind::TimedOut,
                CloseReason::Memory => ErrorKind::OutOfMemory,
                CloseReason::Aborted | CloseReason::Runtime | CloseReason::Shutdown => {
                    ErrorKind::ConnectionAborted
                }
            },
        }
    }
}

impl From<TrySendError> for io::Error {
    fn from(error: TrySendError) -> Self {
        let kind = match &error {
            TrySendError::Full(_) => io::ErrorKind::WouldBlock,
            TrySendError::Failed(failed) => failed.io_kind(),
        };
        Self::new(kind, error)
    }
}

impl From<MessageError> for io::Error {
    fn from(error: MessageError) -> Self {
        Self::new(error.io_kind(), error)
    }
}

/// An error of establishing a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EstablishError {
    /// The queue pair could not be created or connected.
    Setup(SetupError),
    /// The connection manager failed to connect or accept.
    Connect(ConnectError),
    /// The peer's handshake is invalid, or [`user_data`](super::ConnectionConfig::user_data) is too
    /// long.
    Handshake(HandshakeError),
    /// The listener accepted but is not a [`Listener`](super::Listener) of this version, for
    /// example a plain [`cm::Listener`](crate::cm::Listener).
    OtherProtocol {
        /// Address of the listener.
        address: SocketAddr,
        /// Defect of its handshake.
        error: HandshakeError,
    },
    /// The peer's application [rejected](super::ConnectionRequest::reject) the request.
    Rejected {
        /// Address of the listener.
        address: SocketAddr,
        /// Data passed to `reject`.
        user_data: Bytes,
    },
    /// A listener, of the peer or this one, has reached a connection limit or shuts down.
    Refused {
        /// Peer's address.
        address: SocketAddr,
        /// Limit.
        reason: RefusalReason,
    },
    /// The current Tokio runtime lacks a driver that a connection needs.
    NoRuntime(NoRuntime),
}

impl fmt::Display for EstablishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setup(error) => error.fmt(f),
            Self::Connect(error) => error.fmt(f),
            Self::Handshake(error) => error.fmt(f),
            Self::OtherProtocol { address, error } if error.is_foreign() => write!(
                f,
                "{address} accepted the connection request but is not a tokio_rdma::Listener \
                 or RdmaListener: {error}; connect with tokio_rdma::cm::connect, or listen with \
                 one of these on the peer"
            ),
            Self::OtherProtocol { address, error } => {
                write!(
                    f,
                    "{address} accepted the connection request with an invalid handshake: {error}"
                )
            }
            Self::Rejected { address, user_data } => {
                write!(f, "connecting to {address}: rejected by the peer's service")?;
                if user_data.is_empty() {
                    Ok(())
                } else {
                    write!(f, " ({} bytes of user data)", user_data.len())
                }
            }
            Self::Refused { address, reason } => {
                write!(f, "connection with {address} refused: {reason}")
            }
            Self::NoRuntime(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for EstablishError {}

impl From<SetupError> for EstablishError {
    fn from(error: SetupError) -> Self {
        Self::Setup(error)
    }
}

impl From<ConnectError> for EstablishError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::NoRuntime(error) => Self::NoRuntime(error),
            error => Self::Connect(error),
        }
    }
}

impl From<NoRuntime> for EstablishError {
    fn from(error: NoRuntime) -> Self {
        Self::NoRuntime(error)
    }
}

impl From<HandshakeError> for EstablishError {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}

impl From<EstablishError> for io::Error {
    fn from(error: EstablishError) -> Self {
        let kind = match &error {
            EstablishError::Setup(setup) => Self::from(setup.clone()).kind(),
            EstablishError::Connect(connect) => connect.io_kind(),
            EstablishError::Handshake(handshake)
            | EstablishError::OtherProtocol { error: handshake, .. } => {
                Self::from(*handshake).kind()
            }
            EstablishError::Rejected { .. } | EstablishError::Refused { .. } => {
                io::ErrorKind::ConnectionRefused
            }
            EstablishError::NoRuntime(_) => io::ErrorKind::Unsupported,
        };
        Self::new(kind, error)
    }
}
