//! Why a message did not go, and why a connection ended.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;

use super::admission::Refusal;
use super::handshake::HandshakeError;
use crate::cm::ConnectError;
use crate::error::{LimitError, NoRuntime, OpErrorKind, SetupError};

/// Why a message was not sent or received.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// It is longer than the peer takes; nothing was sent.
    TooLong(LimitError),
    /// This end has finished sending; nothing was sent.
    Finished,
    /// Its memory could not be registered; nothing was sent.
    Register(SetupError),
    /// The connection has ended.
    Closed(CloseReason),
}

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// Both ends have finished, and all messages have arrived.
    Clean,
    /// It was closed or dropped here.
    Local,
    /// It was [aborted](super::Connection::abort) here.
    Aborted,
    /// The peer dropped it without having finished, or aborted it.
    Dropped,
    /// The connection manager says that the peer has disconnected, without having finished.
    Disconnected,
    /// The listener had given the connection up, or let it give way to others, before it heard that this end had confirmed. Its
    /// service has seen nothing of the connection, and no message: connect again. A listener beset by forged requests does this.
    Unconfirmed,
    /// The listener has as many connections as it may have. Other peers asked at the same time, so this connection was answered
    /// before the limit was reached; the listener's service has seen nothing of it. A peer that asks later is refused when it
    /// connects, with [`EstablishError::Refused`].
    Refused(Refusal),
    /// The listener's service rejected the connection by [`ConnectionRequest::reject`](super::ConnectionRequest::reject) after its
    /// device had answered the request.
    Rejected,
    /// An operation failed: of this crate, or another on the same connection. If work of this end has failed at the peer, this is
    /// that, and not the flush of all else which follows it.
    Operation(OpErrorKind),
    /// The peer did what no peer does.
    Violation(Violation),
    /// Nothing was heard of the peer, though it was asked.
    Silent,
    /// No message of the peer arrived in time, see
    /// [`ConnectionConfig::first_message_timeout`](super::ConnectionConfig::first_message_timeout).
    NoFirstMessage,
    /// The peer took nothing for too long, see [`ConnectionConfig::stall_timeout`](super::ConnectionConfig::stall_timeout).
    Stalled,
    /// The peer did not finish in time after this end had been closed.
    CloseTimeout,
    /// No memory for a message of the peer, or no receive could be posted.
    Memory,
    /// The runtime that the connection was made on has shut down.
    Runtime,
}

/// What a peer did against the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A frame without a header, or with one that means nothing.
    Header {
        /// The header; 0 if there was none.
        header: u32,
    },
    /// A frame of a length that its kind does not have.
    FrameLength {
        /// Bytes of its payload.
        len: usize,
    },
    /// It announces more receives than were used.
    Credits {
        /// Receives announced.
        announced: u32,
        /// Receives in use.
        in_use: u32,
    },
    /// It has sent more than there were receives.
    Window {
        /// Receives there are.
        receives: u32,
    },
    /// It is done with more messages than were offered.
    Done {
        /// Messages it says to be done with.
        announced: u32,
        /// Messages offered.
        offered: u32,
    },
    /// It announces the receives of messages that it has not fetched.
    Unfetched {
        /// Receives that would still be in use.
        in_use: u32,
        /// Messages offered that it is not done with.
        offered: u32,
    },
    /// It has offered memory that cannot be.
    Offer {
        /// Its address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A message longer than it was told to be possible.
    TooLong {
        /// Bytes.
        len: u64,
        /// Most that is allowed.
        allowed: u64,
    },
    /// A message after it had finished.
    AfterFinish,
    /// It says to know that this end has finished, which it has not.
    NotFinished,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(error) => error.fmt(f),
            Self::Finished => f.write_str("this end has finished sending"),
            Self::Register(error) => write!(f, "the message cannot be registered: {error}"),
            Self::Closed(reason) => write!(f, "the connection has ended: {reason}"),
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => f.write_str("both ends have finished"),
            Self::Local => f.write_str("it was closed here"),
            Self::Aborted => f.write_str("it was aborted here"),
            Self::Dropped => f.write_str("the peer dropped it without having finished, or aborted it"),
            Self::Disconnected => f.write_str("the peer has disconnected without having finished"),
            Self::Unconfirmed => f.write_str(
                "the listener gave the connection up before it heard the confirmation, and delivered nothing; connect again",
            ),
            Self::Refused(refusal) => write!(f, "the connection was refused: {refusal}"),
            Self::Rejected => f.write_str("the peer's service rejected the connection"),
            Self::Operation(kind) => kind.fmt(f),
            Self::Violation(violation) => write!(f, "the peer broke the protocol: {violation}"),
            Self::Silent => f.write_str("nothing was heard of the peer"),
            Self::NoFirstMessage => f.write_str("the peer sent no first message in time"),
            Self::Stalled => f.write_str("the peer took nothing for too long"),
            Self::CloseTimeout => f.write_str("the peer did not finish in time"),
            Self::Memory => f.write_str("no memory for a message of the peer"),
            Self::Runtime => f.write_str("its runtime has shut down"),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Header { header } => write!(f, "header {header:#010x}"),
            Self::FrameLength { len } => {
                write!(f, "a frame of {len} bytes, which its kind does not have")
            }
            Self::Credits { announced, in_use } => {
                write!(f, "{announced} receives announced, {in_use} were in use")
            }
            Self::Window { receives } => {
                write!(f, "more sent than the {receives} receives there were")
            }
            Self::Done { announced, offered } => {
                write!(f, "done with {announced} messages, {offered} were offered")
            }
            Self::Unfetched { in_use, offered } => {
                write!(
                    f,
                    "{offered} offered messages are not fetched, and only {in_use} receives in use"
                )
            }
            Self::Offer { addr, len } => write!(f, "an offer of {len} bytes at {addr:#x}"),
            Self::TooLong { len, allowed } => {
                write!(f, "a message of {len} bytes, at most {allowed} are allowed (max_message)")
            }
            Self::AfterFinish => f.write_str("a message after it had finished"),
            Self::NotFinished => f.write_str("it knows of an end that was not reached"),
        }
    }
}

impl std::error::Error for MessageError {}

impl std::error::Error for CloseReason {}

impl std::error::Error for Violation {}

impl From<CloseReason> for MessageError {
    fn from(reason: CloseReason) -> Self {
        Self::Closed(reason)
    }
}

impl MessageError {
    /// Nearest kind of I/O error.
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
                CloseReason::Aborted | CloseReason::Runtime => ErrorKind::ConnectionAborted,
            },
        }
    }
}

impl From<MessageError> for io::Error {
    fn from(error: MessageError) -> Self {
        Self::new(error.io_kind(), error)
    }
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EstablishError {
    /// The queue pair could not be made or connected.
    Setup(SetupError),
    /// The two sides did not meet.
    Connect(ConnectError),
    /// The peer's handshake was refused, or there is too much [`user_data`](super::ConnectionConfig::user_data) for one.
    Handshake(HandshakeError),
    /// The listener accepted, but not as a [`Listener`](super::Listener) for messages does: a plain
    /// [`cm::Listener`](crate::cm::Listener), a program of another kind, or another version of this crate.
    OtherProtocol {
        /// Address of the listener.
        address: SocketAddr,
        /// What is wrong with its handshake.
        error: HandshakeError,
    },
    /// The service at the other end rejected the connection by
    /// [`ConnectionRequest::reject`](super::ConnectionRequest::reject).
    Rejected {
        /// Address of the listener.
        address: SocketAddr,
        /// What the service passed to `reject`, with its length.
        user_data: Bytes,
    },
    /// The listener has as many connections as it may have: the peer's listener, or this one.
    Refused {
        /// Address of the other side.
        address: SocketAddr,
        /// The limit that was reached.
        refusal: Refusal,
    },
    /// The runtime that polls the future lacks what a connection needs: its tasks run there.
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
                "{address} accepted the connection request but is no tokio_rdma::Listener for messages: {error}; connect \
                 with tokio_rdma::cm::connect, or have the peer listen with tokio_rdma::Listener"
            ),
            Self::OtherProtocol { address, error } => {
                write!(
                    f,
                    "{address} accepted the connection request with an unusable handshake: {error}"
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
            Self::Refused { address, refusal } => {
                write!(f, "connection with {address} refused: {refusal}")
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
