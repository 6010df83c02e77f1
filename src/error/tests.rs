//! The exact text of every public error.
//!
//! Errors of the provider crates have such tests there; the last test checks that every error type
//! of the workspace has a table.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Debug;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;

use crate::cm::{
    ConnectAttempt, ConnectError, ConnectStep, FOR_MESSAGES, FOR_STREAMS, RejectReason,
};
use crate::connection::{
    CloseReason, EstablishError, HandshakeError, MessageError, RefusalReason, TrySendError,
    Violation,
};
use crate::error::{
    CompletionError, LimitError, NoRuntime, OpError, OpErrorKind, OpenError, OutOfBounds, Outcome,
    ReceiveLengths, RemoteAccess, SetupError, TryError, UdpError, VerbError,
};
use crate::memory::PoolError;
use crate::op::{DeadlineError, EndpointError, Write};
use crate::peers::{PeerError, ReconnectCause, ReconnectError};
use crate::software::Network;
use crate::stream::{RdmaListener, RdmaStream, ReuniteError};
use crate::types::{Access, QpState, Qpn, TransitionError, WcStatus};
use crate::verbs::Device;

const VERB: VerbError = VerbError { verb: "ibv_reg_mr", errno: 22 };
const LIMIT: LimitError = LimitError { field: "max_send_wr", asked: 2, allowed: 1 };
const KIND: OpErrorKind = OpErrorKind::Post(VERB);
const TRANSITION: TransitionError =
    TransitionError::NotInState { claimed: QpState::Init, actual: QpState::Err };

/// Checks the texts of a type, at least one for each pattern. A variant without a pattern does not
/// compile.
macro_rules! texts {
    (
        $type:ty, $check:ident,
        { $($pattern:pat => [$($value:expr => $text:expr),+ $(,)?]),+ $(,)? }
    ) => {{
        let _exhaustive = |value: &$type| match value { $($pattern => {}),+ };
        $($(
            let value: $type = $value;
            assert!(matches!(value, $pattern), "{value:?} is not {}", stringify!($pattern));
            $check(&value.to_string(), value, $text);
        )+)+
    }};
}

/// Checks the text and style of an error, and that it prints its whole cause.
fn error<E: Error + Send + Sync + 'static>(text: &str, error: E, expected: &str) {
    assert!(error.source().is_none(), "{error:?} prints its cause and returns it");
    display(text, &error, expected);
    assert_eq!(io::Error::other(error).to_string(), expected);
}

/// Checks the text and style of a part of an error.
fn display(text: &str, value: impl Debug, expected: &str) {
    assert_eq!(text, expected, "{value:?}");
    assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text:?}");
    let first = text.split(' ').next().unwrap_or_default();
    let acronym = !first.contains(char::is_lowercase);
    assert!(acronym || !first.starts_with(char::is_uppercase), "{text:?} starts with a capital");
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 7471))
}

#[test]
fn errors_of_all_layers_have_their_exact_texts() {
    texts!(LimitError, error, {
        LimitError { .. } => [LIMIT => "max_send_wr: 2 requested, at most 1 allowed"],
    });
    texts!(OutOfBounds, error, {
        OutOfBounds { .. } => [
            OutOfBounds { offset: 1, len: 2, size: 2 } =>
                "out of bounds: 2 bytes at offset 1 of a memory of 2 bytes",
            OutOfBounds { offset: 3, len: u64::MAX, size: 2 } =>
                "invalid range 3..2 in a memory of 2 bytes: the end precedes the start",
            OutOfBounds { offset: 4, len: 8, size: 16 } =>
                "invalid access to 8 bytes at offset 4 of 16: misaligned, or the addresses wrap \
                 around",
        ],
    });
    texts!(NoRuntime, error, {
        NoRuntime::Outside => [
            NoRuntime::Outside =>
                "the future was polled outside a Tokio runtime; await it within \
                 `Runtime::block_on` or a task",
        ],
        NoRuntime::Io => [
            NoRuntime::Io =>
                "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`",
        ],
        NoRuntime::Time => [
            NoRuntime::Time =>
                "the Tokio runtime has no timer; build it with `enable_time` or `enable_all`",
        ],
        NoRuntime::Forked => [
            NoRuntime::Forked =>
                "use of a device that the parent process opened before fork(2): Operation not \
                 permitted (os error 1); open devices only after fork, or start the child with \
                 exec(3)",
        ],
    });
    texts!(EndpointError, error, {
        EndpointError { .. } => [
            EndpointError { field: "version", found: 2, allowed: "1" } =>
                "invalid QueuePairEndpoint or DcAddress: version is 2, allowed: 1",
        ],
    });
    let not_found = |available: &[&str], reason| OpenError::NotFound {
        name: "mlx5_9".into(),
        available: available.iter().map(|&name| name.into()).collect(),
        reason,
    };
    let peer: IpAddr = address().ip();
    texts!(OpenError, error, {
        OpenError::NotFound { .. } => [
            not_found(&["mlx5_0", "soft0"], None) =>
                "device \"mlx5_9\" not found; available: mlx5_0, soft0",
            not_found(&["soft0"], Some("built without feature `ibverbs`")) =>
                "device \"mlx5_9\" not found: built without feature `ibverbs`; available: soft0",
            not_found(&[], None) => "device \"mlx5_9\" not found; available: none",
        ],
        OpenError::Verb { .. } => [
            OpenError::of("mlx5_0")(VERB) =>
                "failed to open device \"mlx5_0\": ibv_reg_mr: Invalid argument (os error 22)",
        ],
        OpenError::NoUsableDevice { .. } => [
            OpenError::NoUsableDevice { reason: "mlx5_0 has no active port with a GID".into() } =>
                "no RDMA device is usable: mlx5_0 has no active port with a GID; without an \
                 adapter, use Device::open_default_or_software within one process, open_default_at \
                 and open_default_to between processes",
        ],
        OpenError::Udp(_) => [
            UdpError::NoRoute { peer, error: VERB }.into() =>
                "failed to find a route to 192.0.2.1: ibv_reg_mr: Invalid argument (os error 22)",
        ],
    });
    texts!(SetupError, error, {
        SetupError::Verb(_) => [VERB.into() => "ibv_reg_mr: Invalid argument (os error 22)"],
        SetupError::Limit(_) => [LIMIT.into() => "max_send_wr: 2 requested, at most 1 allowed"],
        SetupError::TooSmall { .. } => [
            SetupError::TooSmall { field: "max_send_wr", asked: 0, least: 1 } =>
                "max_send_wr: 0 requested, at least 1 required",
        ],
        SetupError::Transition(_) => [
            TRANSITION.into() => &TRANSITION.to_string(),
        ],
        SetupError::Foreign { .. } => [
            SetupError::Foreign { what: "queue pair" } =>
                "the queue pair belongs to another device or protection domain",
        ],
        SetupError::CompletionQueueFull { .. } => [
            SetupError::CompletionQueueFull { asked: 256, free: 12 } =>
                "completion queue too small: 256 more entries needed, 12 free; raise \
                 CompletionQueueBuilder::capacity, or lower max_send_wr or max_recv_wr",
        ],
        SetupError::Mismatch { .. } => [
            SetupError::Mismatch {
                what: "transports of the queue pair and its peer",
                ours: "Rc".into(),
                theirs: "Ud".into(),
            } => "transports of the queue pair and its peer do not match: Rc and Ud",
        ],
        SetupError::OtherCompletionQueue { .. } => [
            SetupError::OtherCompletionQueue { asked: 5, queue: 3 } =>
                "wrong completion queue 5 for receives: the shared receive queue completes on \
                 completion queue 3; omit QueuePairBuilder::receive_completions",
        ],
        SetupError::NoGid { .. } => [
            SetupError::NoGid { port: 1 } =>
                "port 1 is not active or lacks a suitable GID; check its link and the addresses \
                 of its network interface",
        ],
        SetupError::Unsupported { .. } => [
            SetupError::Unsupported { what: "the device lacks on-demand paging" } =>
                "unsupported: the device lacks on-demand paging",
        ],
        SetupError::Closed => [
            SetupError::Closed => "the object is closed, or its completion queue has failed",
        ],
    });
    texts!(PoolError, error, {
        PoolError::Empty => [
            PoolError::Empty =>
                "all buffers of the pool are in use; wait with Pool::alloc or enlarge the pool",
        ],
        PoolError::TooLong(_) => [
            PoolError::TooLong(LIMIT) => "max_send_wr: 2 requested, at most 1 allowed",
        ],
        PoolError::TooMany(_) => [
            PoolError::TooMany(LIMIT) => "max_send_wr: 2 requested, at most 1 allowed",
        ],
        PoolError::Register(_) => [
            PoolError::Register(VERB.into()) =>
                "failed to grow the buffer pool: ibv_reg_mr: Invalid argument (os error 22)",
        ],
    });
}

#[test]
fn errors_of_operations_have_their_exact_texts() {
    let failed = CompletionError {
        status: WcStatus::REM_ACCESS_ERR,
        vendor_error: 0x88,
        qpn: Qpn(17),
        lengths: None,
    };
    let plain = CompletionError { vendor_error: 0, ..failed };
    let remote = Some(RemoteAccess { operation: "WRITE", addr: 0x7f00, len: 64 });
    let flushed = CompletionError { status: WcStatus::WR_FLUSH_ERR, ..plain };
    let lengths = Some(ReceiveLengths { capacity: 16, arrived: 1024 });
    let short = CompletionError { status: WcStatus::LOC_LEN_ERR, lengths, ..plain };
    texts!(CompletionError, error, {
        CompletionError { .. } => [
            plain =>
                "work request failed on queue pair 0x11: remote access error: wrong key, range or \
                 rights",
            failed =>
                "work request failed on queue pair 0x11: remote access error: wrong key, range or \
                 rights (vendor error 0x88)",
            flushed =>
                "work request failed on queue pair 0x11: flushed: the queue pair entered the \
                 error state; look for an earlier failure or a disconnect",
            short =>
                "work request failed on queue pair 0x11: local length error: the message exceeds \
                 the receive or a limit (1024 bytes of the message had arrived, the receive holds \
                 16); post larger receives",
        ],
    });
    let refused = |state| OpErrorKind::State { qpn: Qpn(17), state, error: VERB };
    texts!(OpErrorKind, error, {
        OpErrorKind::Completion(_) => [
            OpErrorKind::Completion(plain) =>
                "work request failed on queue pair 0x11: remote access error: wrong key, range or \
                 rights",
        ],
        OpErrorKind::Post(_) => [
            KIND =>
                "failed to post the work request: ibv_reg_mr: Invalid argument (os error 22)",
        ],
        OpErrorKind::State { .. } => [
            refused(QpState::Init) =>
                "queue pair 0x11 is not connected (state Init): sends need state Rts, receives \
                 Init or later; connect it first (ibv_reg_mr: Invalid argument (os error 22))",
            refused(QpState::Err) =>
                "queue pair 0x11 has failed (state Err); create and connect a new one \
                 (ibv_reg_mr: Invalid argument (os error 22))",
        ],
        OpErrorKind::Limit(_) => [LIMIT.into() => "max_send_wr: 2 requested, at most 1 allowed"],
        OpErrorKind::Foreign { .. } => [
            OpErrorKind::Foreign { what: "buffer" } =>
                "the buffer belongs to another protection domain than the queue pair",
        ],
        OpErrorKind::Rights { .. } => [
            OpErrorKind::Rights { missing: Access::MW_BIND | Access::REMOTE_READ } =>
                "the region lacks access rights REMOTE_READ | MW_BIND; add them when the region \
                 is created",
        ],
        OpErrorKind::Unsupported { .. } => [
            OpErrorKind::Unsupported { what: "READ (transport RC or DC required)" } =>
                "the queue pair does not support READ (transport RC or DC required)",
        ],
        OpErrorKind::NotOneSided { .. } => [
            OpErrorKind::NotOneSided { index: 1, what: "SEND" } =>
                "work request 1 of the batch is a SEND, which would consume a receive that the \
                 peer's Connection reserves for messages; post only WRITE and READ",
        ],
        OpErrorKind::Misaligned { .. } => [
            OpErrorKind::Misaligned { addr: 4, len: 8 } =>
                "invalid target of an atomic, 8 bytes at 0x4: 8 bytes on an 8-byte boundary \
                 required",
        ],
        OpErrorKind::Closed => [
            OpErrorKind::Closed =>
                "the queue pair was closed before the operation completed; its outcome is unknown",
        ],
        OpErrorKind::CompletionQueue(_) => [
            OpErrorKind::CompletionQueue(VERB) =>
                "the completion queue failed, and the outcome of the operation is unknown: \
                 ibv_reg_mr: Invalid argument (os error 22)",
        ],
        OpErrorKind::TimedOut { .. } => [
            OpErrorKind::TimedOut { outcome: Outcome::NotSent } =>
                "the deadline passed before the operation was posted; nothing was sent",
            OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted } =>
                "the deadline of an operation passed; its queue pair was moved to the error \
                 state, and the peer may have executed the operation",
        ],
    });
    texts!(DeadlineError<Write<()>>, error, {
        DeadlineError::Ended(_) => [
            DeadlineError::Ended(OpError::new(KIND, ())) =>
                "failed to post the work request: ibv_reg_mr: Invalid argument (os error 22)",
        ],
        DeadlineError::NotRevoked(_) => [
            DeadlineError::NotRevoked(Write::refused(KIND, ())) =>
                "the deadline of an operation passed, but the device may still access its buffers",
        ],
    });
    texts!(OpError<()>, error, {
        OpError { .. } => [
            OpError::new(KIND, ()) =>
                "failed to post the work request: ibv_reg_mr: Invalid argument (os error 22)",
            OpError::accessing(remote, OpErrorKind::Completion(plain), ()) =>
                "WRITE of 64 bytes at remote address 0x7f00: work request failed on queue pair \
                 0x11: remote access error: wrong key, range or rights",
        ],
    });
    texts!(TryError<()>, error, {
        TryError::Full(()) => [
            TryError::Full(()) => "the work queue is full; retry after a completion",
        ],
        TryError::Refused(_) => [
            TryError::Refused(OpError::new(KIND, ())) =>
                "failed to post the work request: ibv_reg_mr: Invalid argument (os error 22)",
        ],
    });
}

#[test]
fn errors_of_connecting_have_their_exact_texts() {
    let address = address();
    let at = |step| ConnectAttempt { step, address };
    texts!(ConnectStep, display, {
        ConnectStep::Lookup => [ConnectStep::Lookup => "lookup of the host name"],
        ConnectStep::Resolve => [ConnectStep::Resolve => "resolution of the route"],
        ConnectStep::Listen => [ConnectStep::Listen => "listening"],
        ConnectStep::Prepare => [ConnectStep::Prepare => "preparation of the queue pair"],
        ConnectStep::Request => [ConnectStep::Request => "connection request"],
        ConnectStep::Response => [ConnectStep::Response => "answer to the connection request"],
        ConnectStep::Confirm => [ConnectStep::Confirm => "confirmation of the answer"],
        ConnectStep::Accept => [ConnectStep::Accept => "acceptance of the request"],
        ConnectStep::Establish => [ConnectStep::Establish => "confirmation by the peer"],
        ConnectStep::Reject => [ConnectStep::Reject => "rejection of the request"],
        ConnectStep::Disconnect => [
            ConnectStep::Disconnect => "answer to the disconnect request",
        ],
        ConnectStep::Timewait => [ConnectStep::Timewait => "end of TIMEWAIT"],
    });
    texts!(ConnectAttempt, display, {
        ConnectAttempt { step: ConnectStep::Lookup, .. } => [
            at(ConnectStep::Lookup) => "looking up 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Resolve, .. } => [
            at(ConnectStep::Resolve) => "resolving a route to 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Listen, .. } => [
            at(ConnectStep::Listen) => "listening at 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Prepare, .. } => [
            at(ConnectStep::Prepare) => "preparing a queue pair for 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Request, .. } => [
            at(ConnectStep::Request) => "sending a connection request to 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Response, .. } => [
            at(ConnectStep::Response) =>
                "waiting for 192.0.2.1:7471 to answer the connection request",
        ],
        ConnectAttempt { step: ConnectStep::Confirm, .. } => [
            at(ConnectStep::Confirm) => "confirming the answer of 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Accept, .. } => [
            at(ConnectStep::Accept) => "accepting the connection request of 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Establish, .. } => [
            at(ConnectStep::Establish) =>
                "waiting for 192.0.2.1:7471 to confirm the connection",
        ],
        ConnectAttempt { step: ConnectStep::Reject, .. } => [
            at(ConnectStep::Reject) => "rejecting the connection request of 192.0.2.1:7471",
        ],
        ConnectAttempt { step: ConnectStep::Disconnect, .. } => [
            at(ConnectStep::Disconnect) =>
                "waiting for 192.0.2.1:7471 to answer the disconnect request",
        ],
        ConnectAttempt { step: ConnectStep::Timewait, .. } => [
            at(ConnectStep::Timewait) =>
                "waiting for the end of TIMEWAIT of the connection to 192.0.2.1:7471",
        ],
    });
    let attempt = at(ConnectStep::Response);
    let rejected = |private_data: &[u8]| ConnectError::Rejected {
        attempt,
        reason: RejectReason::CONSUMER,
        private_data: private_data.to_vec(),
    };
    let not_available = |source, step| ConnectError::AddressNotAvailable { address, source, step };
    let timed_out = |step| ConnectError::TimedOut { address, step, after: Duration::from_secs(5) };
    texts!(ConnectError, error, {
        ConnectError::Lookup { .. } => [
            ConnectError::Lookup {
                host: None,
                kind: io::ErrorKind::Other,
                message: "name or service not known".into(),
            } => "looking up the host name: name or service not known",
            ConnectError::Lookup {
                host: Some("\"host:7471\"".into()),
                kind: io::ErrorKind::Other,
                message: "name or service not known".into(),
            } => "looking up the host name of \"host:7471\": name or service not known",
        ],
        ConnectError::Resolve { .. } => [
            ConnectError::Resolve { address, errno: 101, in_process: false } =>
                "resolving a route to 192.0.2.1:7471: no RDMA device leads to the address: \
                 Network is unreachable (os error 101)",
            ConnectError::Resolve { address, errno: 113, in_process: true } =>
                "resolving a route to 192.0.2.1:7471: no device of this process has the address, \
                 and the device reaches no other process; to connect to another process, open the \
                 device with Device::open_default_to",
        ],
        ConnectError::OtherDevice { .. } => [
            ConnectError::OtherDevice { address, device: "rxe1".into() } =>
                "resolving a route to 192.0.2.1:7471: the route goes through device rxe1, not \
                 through the device that was passed; open rxe1",
        ],
        ConnectError::AddressInUse { .. } => [
            ConnectError::AddressInUse { address, device: None } =>
                "listening at 192.0.2.1:7471: the address is in use; choose another port or stop \
                 its listener",
            ConnectError::AddressInUse { address, device: Some("soft0".into()) } =>
                "listening at 192.0.2.1:7471: the address is in use by another listener of this \
                 process, on device soft0",
        ],
        ConnectError::AddressNotAvailable { .. } => [
            not_available(Some(address.ip()), ConnectStep::Resolve) =>
                "resolving a route to 192.0.2.1:7471: the source address 192.0.2.1 does not \
                 belong to the device",
            not_available(None, ConnectStep::Listen) =>
                "listening at 192.0.2.1:7471: the address does not belong to the device; open the \
                 device that has it, for example with Device::open_default_at",
        ],
        ConnectError::Refused { .. } => [
            ConnectError::Refused { address, in_process: false } =>
                "waiting for 192.0.2.1:7471 to answer the connection request: refused: the peer \
                 does not listen at this address and port",
            ConnectError::Refused { address, in_process: true } =>
                "waiting for 192.0.2.1:7471 to answer the connection request: refused: no listener \
                 of this process has the address and port, and the device reaches no other \
                 process; to connect to another process, open the device with \
                 Device::open_default_to",
        ],
        ConnectError::Rejected { .. } => [
            rejected(&[0; 148]) =>
                "waiting for 192.0.2.1:7471 to answer the connection request: rejected by the \
                 peer: its program refused the connection",
            rejected(FOR_MESSAGES) =>
                "waiting for 192.0.2.1:7471 to answer the connection request: rejected: the \
                 listener is a tokio_rdma::Listener for messages, and the request carries no \
                 handshake; connect with tokio_rdma::Connection",
            rejected(FOR_STREAMS) =>
                "waiting for 192.0.2.1:7471 to answer the connection request: rejected: the \
                 listener is a tokio_rdma::RdmaListener for byte streams, and the request carries \
                 no handshake; connect with tokio_rdma::RdmaStream",
        ],
        ConnectError::Unreachable { .. } => [
            ConnectError::Unreachable { attempt, errno: 110 } =>
                "waiting for 192.0.2.1:7471 to answer the connection request: the peer does not \
                 answer: Connection timed out (os error 110)",
            ConnectError::Unreachable { attempt, errno: 111 } =>
                "waiting for 192.0.2.1:7471 to answer the connection request: refused: no process \
                 of the peer's host has opened a device at the address, or a firewall rejects UDP \
                 port 4791; start the service, which opens its device with Device::open_default_at",
        ],
        ConnectError::TimedOut { .. } => [
            timed_out(ConnectStep::Response) =>
                "waiting for 192.0.2.1:7471 to answer the connection request: timed out after 5s",
        ],
        ConnectError::Disconnected { .. } => [
            ConnectError::Disconnected { attempt: at(ConnectStep::Establish) } =>
                "waiting for 192.0.2.1:7471 to confirm the connection: the peer disconnected \
                 before the connection was established",
        ],
        ConnectError::AddressChanged { .. } => [
            ConnectError::AddressChanged { attempt: at(ConnectStep::Request) } =>
                "sending a connection request to 192.0.2.1:7471: the local address was moved to \
                 another device or network interface",
        ],
        ConnectError::DeviceRemoved { .. } => [
            ConnectError::DeviceRemoved { attempt: at(ConnectStep::Accept) } =>
                "accepting the connection request of 192.0.2.1:7471: the device was removed",
        ],
        ConnectError::NoRuntime(_) => [
            NoRuntime::Io.into() =>
                "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`",
        ],
        ConnectError::Limit(_) => [LIMIT.into() => "max_send_wr: 2 requested, at most 1 allowed"],
        ConnectError::Setup { .. } => [
            ConnectError::Setup {
                attempt: Some(at(ConnectStep::Prepare)),
                error: SetupError::Verb(VERB).into(),
            } =>
                "preparing a queue pair for 192.0.2.1:7471: ibv_reg_mr: Invalid argument (os \
                 error 22)",
            SetupError::Verb(VERB).into() => "ibv_reg_mr: Invalid argument (os error 22)",
        ],
        ConnectError::Verb { .. } => [
            ConnectError::Verb { attempt: Some(at(ConnectStep::Confirm)), error: VERB } =>
                "confirming the answer of 192.0.2.1:7471: ibv_reg_mr: Invalid argument (os error \
                 22)",
            VERB.into() => "ibv_reg_mr: Invalid argument (os error 22)",
        ],
    });
}

#[test]
fn errors_of_handshakes_have_their_exact_texts() {
    let (handshake, address) = (HandshakeError::Version { theirs: 2, ours: 1 }, address());
    let rejected =
        |user_data| EstablishError::Rejected { address, user_data: Bytes::from_static(user_data) };
    let setup = ConnectError::Setup {
        attempt: Some(ConnectAttempt { step: ConnectStep::Prepare, address }),
        error: SetupError::Verb(VERB).into(),
    };
    texts!(EstablishError, error, {
        EstablishError::Setup(_) => [
            SetupError::Verb(VERB).into() => "ibv_reg_mr: Invalid argument (os error 22)",
        ],
        EstablishError::Connect(_) => [
            setup.into() =>
                "preparing a queue pair for 192.0.2.1:7471: ibv_reg_mr: Invalid argument (os \
                 error 22)",
        ],
        EstablishError::Handshake(_) => [
            HandshakeError::Truncated { len: 5 }.into() =>
                "the peer's handshake is truncated to 5 bytes",
        ],
        EstablishError::OtherProtocol { .. } => [
            EstablishError::OtherProtocol { address, error: handshake } =>
                "192.0.2.1:7471 accepted the connection request with an invalid handshake: \
                 handshake versions do not match: 1 here, 2 at the peer; use the same release of \
                 tokio-rdma on both sides",
            EstablishError::OtherProtocol {
                address,
                error: HandshakeError::Magic { found: [0; 4] },
            } =>
                "192.0.2.1:7471 accepted the connection request but is not a tokio_rdma::Listener \
                 or RdmaListener: the peer sent no handshake; connect with \
                 tokio_rdma::cm::connect, or listen with one of these on the peer",
        ],
        EstablishError::Rejected { .. } => [
            rejected(b"") => "connecting to 192.0.2.1:7471: rejected by the peer's service",
            rejected(b"no") =>
                "connecting to 192.0.2.1:7471: rejected by the peer's service (2 bytes of user \
                 data)",
        ],
        EstablishError::Refused { .. } => [
            EstablishError::Refused { address, reason: RefusalReason::ListenerFull } =>
                "connection with 192.0.2.1:7471 refused: the listener has reached its limit \
                 ConnectionConfig::max_connections",
        ],
        EstablishError::NoRuntime(_) => [
            ConnectError::NoRuntime(NoRuntime::Io).into() =>
                "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`",
        ],
    });
}

#[test]
fn errors_of_connections_have_their_exact_texts() {
    texts!(CloseReason, error, {
        CloseReason::Clean => [CloseReason::Clean => "both sides have finished"],
        CloseReason::Local => [CloseReason::Local => "closed by this side"],
        CloseReason::Aborted => [CloseReason::Aborted => "aborted by this side"],
        CloseReason::Dropped => [
            CloseReason::Dropped =>
                "the peer aborted or dropped the connection before it called `finish`",
        ],
        CloseReason::Disconnected => [
            CloseReason::Disconnected => "the peer disconnected before it called `finish`",
        ],
        CloseReason::Unconfirmed => [
            CloseReason::Unconfirmed =>
                "the listener does not know this connection: it discarded the handshake before \
                 this side's confirmation arrived, or another process has taken its place; connect \
                 again",
        ],
        CloseReason::Refused(_) => [
            CloseReason::Refused(RefusalReason::ListenerFull) =>
                "refused: the listener has reached its limit ConnectionConfig::max_connections",
        ],
        CloseReason::Rejected => [CloseReason::Rejected => "rejected by the peer's service"],
        CloseReason::Operation(_) => [
            CloseReason::Operation(KIND) =>
                "failed to post the work request: ibv_reg_mr: Invalid argument (os error 22)",
        ],
        CloseReason::Violation(_) => [
            CloseReason::Violation(Violation::AfterFinish) =>
                "protocol violation by the peer: message sent after Fin",
        ],
        CloseReason::Silent => [
            CloseReason::Silent => "the peer did not answer within the keepalive timeout",
        ],
        CloseReason::NoFirstMessage => [
            CloseReason::NoFirstMessage =>
                "the peer sent no message within first_message_timeout",
        ],
        CloseReason::Stalled => [
            CloseReason::Stalled => "the peer accepted no message within stall_timeout",
        ],
        CloseReason::CloseTimeout => [
            CloseReason::CloseTimeout => "the peer did not finish within close_timeout",
        ],
        CloseReason::Memory => [
            CloseReason::Memory =>
                "failed to register memory or post a receive for messages of the peer",
        ],
        CloseReason::Runtime => [
            CloseReason::Runtime => "the Tokio runtime of the connection has shut down",
        ],
        CloseReason::Shutdown => [
            CloseReason::Shutdown => "the time limit of the listener's shutdown has expired",
        ],
    });
    texts!(TrySendError, error, {
        TrySendError::Full(_) => [
            TrySendError::Full(Bytes::from_static(b"12345")) =>
                "message of 5 bytes not sent: the peer has no free receive, this side no send \
                 buffer, or other sends wait",
        ],
        TrySendError::Failed(_) => [
            TrySendError::Failed(MessageError::Finished) =>
                "cannot send: `finish` was called on this side",
        ],
    });
    texts!(MessageError, error, {
        MessageError::TooLong(_) => [
            MessageError::TooLong(LIMIT) => "max_send_wr: 2 requested, at most 1 allowed",
        ],
        MessageError::Finished => [
            MessageError::Finished => "cannot send: `finish` was called on this side",
        ],
        MessageError::Register(_) => [
            MessageError::Register(VERB.into()) =>
                "failed to register memory for the message: ibv_reg_mr: Invalid argument (os error \
                 22)",
        ],
        MessageError::Closed(_) => [
            MessageError::Closed(CloseReason::Operation(KIND)) =>
                "connection closed: failed to post the work request: ibv_reg_mr: Invalid argument \
                 (os error 22)",
            CloseReason::Clean.into() => "connection closed: both sides have finished",
        ],
    });
}

#[test]
fn texts_of_connecting_again() {
    let attempt = || {
        let refused = ConnectError::Refused { address: address(), in_process: false };
        ReconnectCause::Attempt(refused.into())
    };
    texts!(ReconnectCause, error, {
        ReconnectCause::Attempt(_) => [
            attempt() =>
                "waiting for 192.0.2.1:7471 to answer the connection request: refused: the peer \
                 does not listen at this address and port",
        ],
        ReconnectCause::AttemptTimedOut { .. } => [
            ReconnectCause::AttemptTimedOut { after: Duration::from_secs(2) } =>
                "the attempt timed out after 2s",
        ],
        ReconnectCause::PortDown { .. } => [
            ReconnectCause::PortDown { device: "mlx5_0".to_owned() } =>
                "device mlx5_0 has no active port",
        ],
        ReconnectCause::DeviceRemoved { .. } => [
            ReconnectCause::DeviceRemoved { device: "mlx5_0".to_owned() } =>
                "device mlx5_0 was removed",
        ],
        ReconnectCause::Open(_) => [
            ReconnectCause::Open(OpenError::NotFound {
                name: "mlx5_0".to_owned(), available: Vec::new(), reason: None,
            }) => &OpenError::NotFound {
                name: "mlx5_0".to_owned(), available: Vec::new(), reason: None,
            }.to_string(),
        ],
        ReconnectCause::Lost { .. } => [
            ReconnectCause::Lost { generation: 3, reason: CloseReason::Silent } =>
                "connection 3 has closed: the peer did not answer within the keepalive timeout",
        ],
    });
    texts!(ReconnectError, error, {
        ReconnectError::TimedOut { .. } => [
            ReconnectError::TimedOut {
                after: Duration::from_secs(9), attempts: 4, cause: attempt(),
            } =>
                "failed to connect within 9s (ReconnectPolicy::deadline), 4 attempts: waiting for \
                 192.0.2.1:7471 to answer the connection request: refused: the peer does not \
                 listen at this address and port",
        ],
        ReconnectError::Permanent { .. } => [
            ReconnectError::Permanent {
                cause: ReconnectCause::Attempt(NoRuntime::Time.into()), attempts: 2,
            } =>
                "stopped connecting after attempt 2: the Tokio runtime has no timer; build it with \
                 `enable_time` or `enable_all`",
            ReconnectError::Permanent {
                cause: ReconnectCause::DeviceRemoved { device: "mlx5_0".to_owned() }, attempts: 0,
            } => "stopped connecting before the next attempt: device mlx5_0 was removed",
        ],
        ReconnectError::Closed => [
            ReconnectError::Closed => "the Reconnect handle was closed",
        ],
        ReconnectError::Panicked { .. } => [
            ReconnectError::Panicked { message: "no route".to_owned() } =>
                "stopped connecting: the connector or the policy panicked: no route",
            ReconnectError::Panicked { message: String::new() } =>
                "stopped connecting: the connector or the policy panicked",
        ],
        ReconnectError::Runtime => [
            ReconnectError::Runtime =>
                "the Tokio runtime of the Reconnect handle has shut down",
        ],
    });
}

#[test]
fn texts_of_sets_of_peers() {
    let busy = |waited| PeerError::Busy { field: "max_peers", limit: 8, waited };
    texts!(PeerError, error, {
        PeerError::Connect(_) => [
            PeerError::Connect(NoRuntime::Time.into()) =>
                "the Tokio runtime has no timer; build it with `enable_time` or `enable_all`",
        ],
        PeerError::ConnectTimedOut { .. } => [
            PeerError::ConnectTimedOut { after: Duration::from_secs(2) } =>
                "resolving and connecting the peer timed out after 2s \
                 (PeerSetConfig::attempt_timeout)",
        ],
        PeerError::Busy { .. } => [
            busy(None) =>
                "set of peers is busy: limit max_peers of 8 reached; raise it, or set \
                 PeerSetConfig::wait",
            busy(Some(Duration::from_secs(3))) =>
                "set of peers is busy: limit max_peers of 8 reached for 3s (PeerSetConfig::wait)",
        ],
    });
}

#[test]
fn halves_of_different_streams_are_returned_with_a_text() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = Device::software_in(&Network::new(), "halves").unwrap();
        let listener = RdmaListener::bind(&device, "127.0.0.1:0").await.unwrap();
        let connecting = RdmaStream::connect(&device, listener.local_addr().unwrap());
        let ((server, _), client) = tokio::try_join!(listener.accept(), connecting).unwrap();
        let ((read, _), (_, write)) = (client.into_split(), server.into_split());
        texts!(ReuniteError, error, {
            ReuniteError(..) => [
                read.reunite(write).unwrap_err() =>
                    "failed to reunite halves: they belong to different streams",
            ],
        });
    });
}

#[test]
fn every_error_type_of_the_workspace_has_a_table() {
    let tables: BTreeSet<String> = [
        "src/error/tests.rs",
        "crates/rdma-provider/src/error_texts.rs",
        "crates/rdma-soft/src/tests/error_texts.rs",
    ]
    .into_iter()
    .flat_map(|page| names_after(&read(page), "texts!(", ""))
    .collect();
    let mut types = BTreeSet::new();
    for folder in
        ["src", "crates/rdma-provider/src", "crates/rdma-soft/src", "crates/rdma-ibverbs/src"]
    {
        collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut types);
    }
    let missing: Vec<_> = types.difference(&tables).collect();
    assert!(!types.is_empty() && missing.is_empty(), "without a table: {missing:?}");
}

/// Adds the types of `folder` that implement `Error`.
fn collect(folder: &Path, types: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, types);
        } else {
            types.extend(names_after(
                &fs::read_to_string(&path).unwrap(),
                "error::Error for ",
                "impl",
            ));
        }
    }
}

/// Returns the names that follow `marker` in lines that start with `start`.
fn names_after(text: &str, marker: &str, start: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim_start).filter(|line| line.starts_with(start));
    let names = lines.filter_map(|line| line.split_once(marker)).map(|(_, name)| {
        name.chars().take_while(|character| character.is_alphanumeric()).collect()
    });
    names.filter(|name: &String| !name.is_empty()).collect()
}

fn read(page: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap()
}
