//! The texts of all public errors, which a golden file has.
//!
//! Errors of the provider crates have such tests there; the last test checks that every error type
//! of the workspace has a table.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Debug;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
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

thread_local! {
    /// The texts of the errors so far, below the names of their types.
    static TEXTS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The texts of all errors. `TOKIO_RDMA_GOLDEN=write cargo test --lib golden` renews it.
const GOLDEN: &str = "src/error/texts.txt";

#[test]
fn texts_of_errors_are_those_of_the_golden_file() {
    of_all_layers();
    of_operations();
    of_connecting();
    of_handshakes();
    of_connections();
    of_connecting_again();
    of_sets_of_peers();
    of_streams();
    let texts = TEXTS.take();
    if std::env::var("TOKIO_RDMA_GOLDEN").is_ok_and(|value| value == "write") {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(GOLDEN), &texts).unwrap();
    }
    let golden = read(GOLDEN);
    let (new, old): (BTreeSet<_>, BTreeSet<_>) =
        (texts.lines().collect(), golden.lines().collect());
    let added: Vec<_> = new.difference(&old).collect();
    let removed: Vec<_> = old.difference(&new).collect();
    assert!(texts == golden, "{GOLDEN} differs: added {added:#?}, removed {removed:#?}");
}

/// Notes the texts of a type, at least one for each pattern. A variant without a pattern does not
/// compile.
macro_rules! texts {
    ($type:ty, $note:ident, { $($pattern:pat => [$($value:expr),+ $(,)?]),+ $(,)? }) => {{
        let _exhaustive = |value: &$type| match value { $($pattern => {}),+ };
        TEXTS.with_borrow_mut(|texts| texts.push_str(concat!(stringify!($type), "\n")));
        $($(
            let value: $type = $value;
            assert!(matches!(value, $pattern), "{value:?} is not {}", stringify!($pattern));
            $note(&value.to_string(), value);
        )+)+
    }};
}

/// Checks the style of an error, and that it prints its whole cause.
fn error<E: Error + Send + Sync + 'static>(text: &str, error: E) {
    assert!(error.source().is_none(), "{error:?} prints its cause and returns it");
    display(text, &error);
    assert_eq!(io::Error::other(error).to_string(), text);
}

/// Checks the style of a part of an error.
fn display(text: &str, _value: impl Debug) {
    assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text:?}");
    let first = text.split(' ').next().unwrap_or_default();
    let acronym = !first.contains(char::is_lowercase);
    assert!(acronym || !first.starts_with(char::is_uppercase), "{text:?} starts with a capital");
    TEXTS.with_borrow_mut(|texts| texts.extend(["    ", text, "\n"]));
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 7471))
}

fn of_all_layers() {
    texts!(LimitError, error, {
        LimitError { .. } => [LIMIT],
    });
    texts!(OutOfBounds, error, {
        OutOfBounds { .. } => [
            OutOfBounds { offset: 1, len: 2, size: 2 },
            OutOfBounds { offset: 3, len: u64::MAX, size: 2 },
            OutOfBounds { offset: 4, len: 8, size: 16 },
        ],
    });
    texts!(NoRuntime, error, {
        NoRuntime::Outside => [
            NoRuntime::Outside,
        ],
        NoRuntime::Io => [
            NoRuntime::Io,
        ],
        NoRuntime::Time => [
            NoRuntime::Time,
        ],
        NoRuntime::Forked => [
            NoRuntime::Forked,
        ],
    });
    texts!(EndpointError, error, {
        EndpointError { .. } => [
            EndpointError { field: "version", found: 2, allowed: "1" },
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
            not_found(&["mlx5_0", "soft0"], None),
            not_found(&["soft0"], Some("built without feature `ibverbs`")),
            not_found(&[], None),
        ],
        OpenError::Verb { .. } => [
            OpenError::of("mlx5_0")(VERB),
        ],
        OpenError::NoUsableDevice { .. } => [
            OpenError::NoUsableDevice { reason: "mlx5_0 has no active port with a GID".into() },
        ],
        OpenError::Udp(_) => [
            UdpError::NoRoute { peer, error: VERB }.into(),
        ],
    });
    texts!(SetupError, error, {
        SetupError::Verb(_) => [VERB.into()],
        SetupError::Limit(_) => [LIMIT.into()],
        SetupError::TooSmall { .. } => [
            SetupError::TooSmall { field: "max_send_wr", asked: 0, least: 1 },
        ],
        SetupError::Transition(_) => [
            TRANSITION.into(),
        ],
        SetupError::Foreign { .. } => [
            SetupError::Foreign { what: "queue pair" },
        ],
        SetupError::CompletionQueueFull { .. } => [
            SetupError::CompletionQueueFull { asked: 256, free: 12 },
        ],
        SetupError::Mismatch { .. } => [
            SetupError::Mismatch {
                what: "transports of the queue pair and its peer",
                ours: "Rc".into(),
                theirs: "Ud".into(),
            },
        ],
        SetupError::OtherCompletionQueue { .. } => [
            SetupError::OtherCompletionQueue { asked: 5, queue: 3 },
        ],
        SetupError::NoGid { .. } => [
            SetupError::NoGid { port: 1 },
        ],
        SetupError::NoPkey { .. } => [
            SetupError::NoPkey { port: 1, asked: 0x8002, table: vec![0xffff, 0, 0x8001] },
            SetupError::NoPkey { port: 1, asked: 0xffff, table: vec![0] },
        ],
        SetupError::NotMulticast { .. } => [
            SetupError::NotMulticast { group: Ipv4Addr::new(10, 9, 0, 1).into() },
        ],
        SetupError::GroupsFull { .. } => [
            SetupError::GroupsFull {
                qpn: Qpn(18),
                group: Ipv4Addr::new(239, 1, 2, 3).into(),
                groups: 64,
                queue_pairs: 256,
            },
        ],
        SetupError::Unsupported { .. } => [
            SetupError::Unsupported { what: "the device lacks on-demand paging" },
        ],
        SetupError::Closed => [
            SetupError::Closed,
        ],
    });
    texts!(PoolError, error, {
        PoolError::Empty => [
            PoolError::Empty,
        ],
        PoolError::Limit(_) => [
            PoolError::Limit(LIMIT),
        ],
        PoolError::Register(_) => [
            PoolError::Register(VERB.into()),
        ],
    });
}

fn of_operations() {
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
            plain,
            failed,
            flushed,
            short,
        ],
    });
    let refused = |state| OpErrorKind::State { qpn: Qpn(17), state, error: VERB };
    texts!(OpErrorKind, error, {
        OpErrorKind::Completion(_) => [
            OpErrorKind::Completion(plain),
        ],
        OpErrorKind::Post(_) => [
            KIND,
        ],
        OpErrorKind::State { .. } => [
            refused(QpState::Init),
            refused(QpState::Err),
        ],
        OpErrorKind::Limit(_) => [LIMIT.into()],
        OpErrorKind::Foreign { .. } => [
            OpErrorKind::Foreign { what: "buffer" },
        ],
        OpErrorKind::Rights { .. } => [
            OpErrorKind::Rights { missing: Access::MW_BIND | Access::REMOTE_READ },
        ],
        OpErrorKind::Unsupported { .. } => [
            OpErrorKind::Unsupported { what: "READ (transport RC or DC required)" },
        ],
        OpErrorKind::NotOneSided { .. } => [
            OpErrorKind::NotOneSided { index: 1, what: "SEND" },
        ],
        OpErrorKind::Misaligned { .. } => [
            OpErrorKind::Misaligned { addr: 4, len: 8 },
        ],
        OpErrorKind::Closed => [
            OpErrorKind::Closed,
        ],
        OpErrorKind::CompletionQueue(_) => [
            OpErrorKind::CompletionQueue(VERB),
        ],
        OpErrorKind::TimedOut { .. } => [
            OpErrorKind::TimedOut { outcome: Outcome::NotSent },
            OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted },
        ],
    });
    texts!(DeadlineError<Write<()>>, error, {
        DeadlineError::Ended(_) => [
            DeadlineError::Ended(OpError::new(KIND, ())),
        ],
        DeadlineError::NotRevoked(_) => [
            DeadlineError::NotRevoked(Write::refused(KIND, ())),
        ],
    });
    texts!(OpError<()>, error, {
        OpError { .. } => [
            OpError::new(KIND, ()),
            OpError::accessing(remote, OpErrorKind::Completion(plain), ()),
        ],
    });
    texts!(TryError<()>, error, {
        TryError::Full(()) => [
            TryError::Full(()),
        ],
        TryError::Refused(_) => [
            TryError::Refused(OpError::new(KIND, ())),
        ],
    });
}

fn of_connecting() {
    let address = address();
    let at = |step| ConnectAttempt { step, address };
    texts!(ConnectStep, display, {
        ConnectStep::Lookup => [ConnectStep::Lookup],
        ConnectStep::Resolve => [ConnectStep::Resolve],
        ConnectStep::Listen => [ConnectStep::Listen],
        ConnectStep::Prepare => [ConnectStep::Prepare],
        ConnectStep::Request => [ConnectStep::Request],
        ConnectStep::Response => [ConnectStep::Response],
        ConnectStep::Confirm => [ConnectStep::Confirm],
        ConnectStep::Accept => [ConnectStep::Accept],
        ConnectStep::Establish => [ConnectStep::Establish],
        ConnectStep::Reject => [ConnectStep::Reject],
        ConnectStep::Disconnect => [
            ConnectStep::Disconnect,
        ],
        ConnectStep::Timewait => [ConnectStep::Timewait],
        ConnectStep::Join => [ConnectStep::Join],
    });
    texts!(ConnectAttempt, display, {
        ConnectAttempt { step: ConnectStep::Lookup, .. } => [
            at(ConnectStep::Lookup),
        ],
        ConnectAttempt { step: ConnectStep::Resolve, .. } => [
            at(ConnectStep::Resolve),
        ],
        ConnectAttempt { step: ConnectStep::Listen, .. } => [
            at(ConnectStep::Listen),
        ],
        ConnectAttempt { step: ConnectStep::Prepare, .. } => [
            at(ConnectStep::Prepare),
        ],
        ConnectAttempt { step: ConnectStep::Request, .. } => [
            at(ConnectStep::Request),
        ],
        ConnectAttempt { step: ConnectStep::Response, .. } => [
            at(ConnectStep::Response),
        ],
        ConnectAttempt { step: ConnectStep::Confirm, .. } => [
            at(ConnectStep::Confirm),
        ],
        ConnectAttempt { step: ConnectStep::Accept, .. } => [
            at(ConnectStep::Accept),
        ],
        ConnectAttempt { step: ConnectStep::Establish, .. } => [
            at(ConnectStep::Establish),
        ],
        ConnectAttempt { step: ConnectStep::Reject, .. } => [
            at(ConnectStep::Reject),
        ],
        ConnectAttempt { step: ConnectStep::Disconnect, .. } => [
            at(ConnectStep::Disconnect),
        ],
        ConnectAttempt { step: ConnectStep::Timewait, .. } => [
            at(ConnectStep::Timewait),
        ],
        ConnectAttempt { step: ConnectStep::Join, .. } => [
            at(ConnectStep::Join),
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
            },
            ConnectError::Lookup {
                host: Some("\"host:7471\"".into()),
                kind: io::ErrorKind::Other,
                message: "name or service not known".into(),
            },
        ],
        ConnectError::Resolve { .. } => [
            ConnectError::Resolve { address, errno: 101, in_process: false },
            ConnectError::Resolve { address, errno: 113, in_process: true },
        ],
        ConnectError::OtherDevice { .. } => [
            ConnectError::OtherDevice { address, device: "rxe1".into() },
        ],
        ConnectError::AddressInUse { .. } => [
            ConnectError::AddressInUse { address, device: None },
            ConnectError::AddressInUse { address, device: Some("soft0".into()) },
        ],
        ConnectError::AddressNotAvailable { .. } => [
            not_available(Some(address.ip()), ConnectStep::Resolve),
            not_available(None, ConnectStep::Listen),
        ],
        ConnectError::Refused { .. } => [
            ConnectError::Refused { address, in_process: false },
            ConnectError::Refused { address, in_process: true },
        ],
        ConnectError::Rejected { .. } => [
            rejected(&[0; 148]),
            rejected(FOR_MESSAGES),
            rejected(FOR_STREAMS),
        ],
        ConnectError::Unreachable { .. } => [
            ConnectError::Unreachable { attempt, errno: 110 },
            ConnectError::Unreachable { attempt, errno: 111 },
        ],
        ConnectError::TimedOut { .. } => [
            timed_out(ConnectStep::Response),
        ],
        ConnectError::Disconnected { .. } => [
            ConnectError::Disconnected { attempt: at(ConnectStep::Establish) },
        ],
        ConnectError::AddressChanged { .. } => [
            ConnectError::AddressChanged { attempt: at(ConnectStep::Request) },
        ],
        ConnectError::DeviceRemoved { .. } => [
            ConnectError::DeviceRemoved { attempt: at(ConnectStep::Accept) },
        ],
        ConnectError::NoRuntime(_) => [
            NoRuntime::Io.into(),
        ],
        ConnectError::Limit(_) => [LIMIT.into()],
        ConnectError::Setup { .. } => [
            ConnectError::Setup {
                attempt: Some(at(ConnectStep::Prepare)),
                error: SetupError::Closed.into(),
            },
            SetupError::Closed.into(),
        ],
        ConnectError::Verb { .. } => [
            ConnectError::Verb { attempt: Some(at(ConnectStep::Confirm)), error: VERB },
            SetupError::Verb(VERB).into(),
        ],
    });
}

fn of_handshakes() {
    let (handshake, address) = (HandshakeError::Version { theirs: 2, ours: 1 }, address());
    let rejected =
        |user_data| EstablishError::Rejected { address, user_data: Bytes::from_static(user_data) };
    let setup = ConnectError::Setup {
        attempt: Some(ConnectAttempt { step: ConnectStep::Prepare, address }),
        error: SetupError::Closed.into(),
    };
    texts!(EstablishError, error, {
        EstablishError::Setup(_) => [
            SetupError::Verb(VERB).into(),
        ],
        EstablishError::Connect(_) => [
            setup.into(),
        ],
        EstablishError::Handshake(_) => [
            HandshakeError::Truncated { len: 5 }.into(),
        ],
        EstablishError::OtherProtocol { .. } => [
            EstablishError::OtherProtocol { address, error: handshake },
            EstablishError::OtherProtocol {
                address,
                error: HandshakeError::Magic { found: [0; 4] },
            },
        ],
        EstablishError::Rejected { .. } => [
            rejected(b""),
            rejected(b"no"),
        ],
        EstablishError::Refused { .. } => [
            EstablishError::Refused { address, reason: RefusalReason::ListenerFull },
        ],
        EstablishError::NoRuntime(_) => [
            ConnectError::NoRuntime(NoRuntime::Io).into(),
        ],
    });
}

fn of_connections() {
    texts!(CloseReason, error, {
        CloseReason::Clean => [CloseReason::Clean],
        CloseReason::Local => [CloseReason::Local],
        CloseReason::Aborted => [CloseReason::Aborted],
        CloseReason::Dropped => [
            CloseReason::Dropped,
        ],
        CloseReason::Disconnected => [
            CloseReason::Disconnected,
        ],
        CloseReason::Unconfirmed => [
            CloseReason::Unconfirmed,
        ],
        CloseReason::Refused(_) => [
            CloseReason::Refused(RefusalReason::ListenerFull),
        ],
        CloseReason::Rejected => [CloseReason::Rejected],
        CloseReason::Operation(_) => [
            CloseReason::Operation(KIND),
        ],
        CloseReason::Violation(_) => [
            CloseReason::Violation(Violation::AfterFinish),
        ],
        CloseReason::Silent => [
            CloseReason::Silent,
        ],
        CloseReason::NoFirstMessage => [
            CloseReason::NoFirstMessage,
        ],
        CloseReason::Stalled => [
            CloseReason::Stalled,
        ],
        CloseReason::CloseTimeout => [
            CloseReason::CloseTimeout,
        ],
        CloseReason::Memory => [
            CloseReason::Memory,
        ],
        CloseReason::Runtime => [
            CloseReason::Runtime,
        ],
        CloseReason::Shutdown => [
            CloseReason::Shutdown,
        ],
    });
    texts!(TrySendError, error, {
        TrySendError::Full(_) => [
            TrySendError::Full(Bytes::from_static(b"12345")),
        ],
        TrySendError::Failed(_) => [
            TrySendError::Failed(MessageError::Finished),
        ],
    });
    texts!(MessageError, error, {
        MessageError::TooLong(_) => [
            MessageError::TooLong(LIMIT),
        ],
        MessageError::Finished => [
            MessageError::Finished,
        ],
        MessageError::Register(_) => [
            MessageError::Register(VERB.into()),
        ],
        MessageError::Closed(_) => [
            MessageError::Closed(CloseReason::Operation(KIND)),
            CloseReason::Clean.into(),
        ],
    });
}

fn of_connecting_again() {
    let attempt = || {
        let refused = ConnectError::Refused { address: address(), in_process: false };
        ReconnectCause::Attempt(refused.into())
    };
    texts!(ReconnectCause, error, {
        ReconnectCause::Attempt(_) => [
            attempt(),
        ],
        ReconnectCause::AttemptTimedOut { .. } => [
            ReconnectCause::AttemptTimedOut { after: Duration::from_secs(2) },
        ],
        ReconnectCause::PortDown { .. } => [
            ReconnectCause::PortDown { device: "mlx5_0".to_owned() },
        ],
        ReconnectCause::DeviceRemoved { .. } => [
            ReconnectCause::DeviceRemoved { device: "mlx5_0".to_owned() },
        ],
        ReconnectCause::Open(_) => [
            ReconnectCause::Open(OpenError::NotFound {
                name: "mlx5_0".to_owned(), available: Vec::new(), reason: None,
            }),
        ],
        ReconnectCause::Lost { .. } => [
            ReconnectCause::Lost { generation: 3, reason: CloseReason::Silent },
        ],
    });
    texts!(ReconnectError, error, {
        ReconnectError::TimedOut { .. } => [
            ReconnectError::TimedOut {
                after: Duration::from_secs(9), attempts: 4, cause: attempt(),
            },
        ],
        ReconnectError::Permanent { .. } => [
            ReconnectError::Permanent {
                cause: ReconnectCause::Attempt(NoRuntime::Time.into()), attempts: 2,
            },
            ReconnectError::Permanent {
                cause: ReconnectCause::DeviceRemoved { device: "mlx5_0".to_owned() }, attempts: 0,
            },
        ],
        ReconnectError::Closed => [
            ReconnectError::Closed,
        ],
        ReconnectError::Panicked { .. } => [
            ReconnectError::Panicked { message: "no route".to_owned() },
            ReconnectError::Panicked { message: String::new() },
        ],
        ReconnectError::Runtime => [
            ReconnectError::Runtime,
        ],
    });
}

fn of_sets_of_peers() {
    let busy = |waited| PeerError::Busy { field: "max_peers", limit: 8, waited };
    texts!(PeerError, error, {
        PeerError::Connect(_) => [
            PeerError::Connect(NoRuntime::Time.into()),
        ],
        PeerError::ConnectTimedOut { .. } => [
            PeerError::ConnectTimedOut { after: Duration::from_secs(2) },
        ],
        PeerError::Busy { .. } => [
            busy(None),
            busy(Some(Duration::from_secs(3))),
        ],
    });
}

fn of_streams() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = Device::software_in(&Network::new(), "halves").unwrap();
        let listener = RdmaListener::bind(&device, "127.0.0.1:0").await.unwrap();
        let connecting = RdmaStream::connect(&device, listener.local_addr().unwrap());
        let ((server, _), client) = tokio::try_join!(listener.accept(), connecting).unwrap();
        let ((read, _), (_, write)) = (client.into_split(), server.into_split());
        texts!(ReuniteError, error, {
            ReuniteError(..) => [
                read.reunite(write).unwrap_err(),
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
