//! Every public error: what it prints, and that it prints nothing twice.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;

use crate::cm::{Attempt, ConnectError, FOR_MESSAGES, RejectReason, Step};
use crate::error::{
    CompletionError, LimitError, NoRuntime, OpError, OpErrorKind, OpenError, OutOfBounds,
    ReceiveLengths, SetupError, TryError, UdpError, VerbError,
};
use crate::memory::PoolError;
use crate::message::{
    CloseReason, EstablishError, HandshakeError, MessageError, Refusal, Violation,
};
use crate::op::EndpointError;
use crate::types::{Access, QpAttrMask, QpState, Qpn, TransitionError, WcStatus};
use crate::verbs::PostError;

const VERB: VerbError = VerbError { verb: "ibv_reg_mr", errno: 22 };
const LIMIT: LimitError = LimitError { field: "max_send_wr", asked: 2, allowed: 1 };
const KIND: OpErrorKind = OpErrorKind::Post(VERB);

/// Checks what every error of this crate promises: `{error}` is the whole report, and so is the chain of its causes.
fn check(error: &(dyn Error + 'static)) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text:?}");
    assert!(!text.starts_with(char::is_uppercase), "{text:?} starts with a capital");
    let mut printed = text.clone();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        let cause = cause.to_string();
        assert!(!printed.contains(&cause), "the chain repeats {cause:?} after {printed:?}");
        printed = format!("{printed}: {cause}");
    }
    assert_eq!(printed, text, "`{{error}}` does not print the whole cause");
}

/// Checks these values, of which there is at least one for each pattern; a variant without a pattern does not compile, or
/// fails where the error is of another crate (`=> _`).
macro_rules! cases {
    ($seen:ident, $type:ident $(<$of:ty>)? { $($pattern:pat),* $(,)? $(=> $other:tt)? } = [$($value:expr),* $(,)?]) => {{
        let values: Vec<$type$(<$of>)?> = vec![$($value),*];
        let mut covered = BTreeSet::new();
        for value in &values {
            covered.insert(match value {
                $($pattern => stringify!($pattern),)*
                $($other => panic!("{value:?} has no pattern"),)?
            });
            check(value);
        }
        let patterns = BTreeSet::from([$(stringify!($pattern)),*]);
        assert_eq!(covered, patterns, "{} has variants without a case", stringify!($type));
        for value in values {
            let text = value.to_string();
            let error = io::Error::other(value);
            assert_eq!(error.to_string(), text);
        }
        $seen.insert(stringify!($type).to_owned());
    }};
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 7471))
}

#[test]
fn errors_print_their_cause_and_do_not_return_it() {
    let mut seen = BTreeSet::new();
    foundations(&mut seen);
    operations(&mut seen);
    connecting(&mut seen);
    messages(&mut seen);
    assert_eq!(
        seen,
        error_types(),
        "an error type of the workspace has no case here, or the reverse"
    );
}

fn foundations(seen: &mut BTreeSet<String>) {
    cases!(seen, VerbError { VerbError { .. } } = [VERB]);
    cases!(seen, LimitError { LimitError { .. } } = [LIMIT]);
    cases!(seen, OutOfBounds { OutOfBounds { .. } } = [
        OutOfBounds { offset: 1, len: 2, size: 2 },
        OutOfBounds { offset: 3, len: u64::MAX, size: 2 },
    ]);
    cases!(seen, TransitionError {
        TransitionError::Illegal { .. },
        TransitionError::Attributes { .. },
        TransitionError::NotInState { .. },
        => _
    } = [
        TransitionError::Illegal { from: QpState::Reset, to: QpState::Rts },
        TransitionError::Attributes {
            from: QpState::Reset,
            to: QpState::Init,
            missing: QpAttrMask::empty(),
            superfluous: QpAttrMask::empty(),
        },
        TransitionError::NotInState { claimed: QpState::Init, actual: QpState::Err },
    ]);
    cases!(seen, SetupError {
        SetupError::Verb(_),
        SetupError::Limit(_),
        SetupError::TooSmall { .. },
        SetupError::Transition(_),
        SetupError::Foreign { .. },
        SetupError::CompletionQueueFull { .. },
        SetupError::Mismatch { .. },
        SetupError::OtherCompletionQueue { .. },
        SetupError::NoGid { .. },
        SetupError::Unsupported { .. },
        SetupError::Closed,
    } = [
        VERB.into(),
        LIMIT.into(),
        SetupError::TooSmall { field: "max_send_wr", asked: 0, least: 1 },
        TransitionError::Illegal { from: QpState::Reset, to: QpState::Rts }.into(),
        SetupError::Foreign { what: "queue pair" },
        SetupError::CompletionQueueFull { asked: 2, free: 1 },
        SetupError::Mismatch { what: "transport", ours: "RC".into(), theirs: "UD".into() },
        SetupError::OtherCompletionQueue { asked: 5, queue: 3 },
        SetupError::NoGid { port: 1 },
        SetupError::Unsupported { what: "memory windows" },
        SetupError::Closed,
    ]);
    let address: IpAddr = address().ip();
    cases!(seen, UdpError {
        UdpError::NoDevice,
        UdpError::NoPort,
        UdpError::Repeated { .. },
        UdpError::NotOneHost { .. },
        UdpError::NotLoopback { .. },
        UdpError::Prefix { .. },
        UdpError::PortTaken { .. },
        UdpError::AllTaken { .. },
        UdpError::NoRoute { .. },
        UdpError::NotLocal { .. },
        UdpError::NotLinux,
        UdpError::System { .. },
        => _
    } = [
        UdpError::NoDevice,
        UdpError::NoPort,
        UdpError::Repeated { name: "a".into(), address },
        UdpError::NotOneHost { address },
        UdpError::NotLoopback { address },
        UdpError::Prefix { address, prefix: 33, longest: 32 },
        UdpError::PortTaken { address, port: 4791, soft_roce: true, device: None },
        UdpError::PortTaken { address, port: 4791, soft_roce: false, device: None },
        UdpError::PortTaken { address, port: 4791, soft_roce: false, device: Some("127.0.0.1".into()) },
        UdpError::AllTaken { first: address, last: address, port: 4791 },
        UdpError::NoRoute { peer: address, error: VERB },
        UdpError::NotLocal { address },
        UdpError::NotLinux,
        UdpError::System { address, error: VERB },
    ]);
    cases!(seen, OpenError { OpenError::NotFound { .. }, OpenError::Verb { .. }, OpenError::Udp(_) } = [
        OpenError::NotFound { name: "mlx5_9".into(), available: vec!["soft0".into()], reason: Some("no rdma-core") },
        OpenError::NotFound { name: "mlx5_9".into(), available: vec!["soft0".into()], reason: None },
        OpenError::of("mlx5_0")(VERB),
        UdpError::NotLinux.into(),
    ]);
    cases!(seen, PoolError { PoolError::Empty, PoolError::TooLong(_), PoolError::Register(_) } = [
        PoolError::Empty,
        PoolError::TooLong(LIMIT),
        PoolError::Register(VERB.into()),
    ]);
}

fn operations(seen: &mut BTreeSet<String>) {
    let failed = CompletionError {
        status: WcStatus::REM_ACCESS_ERR,
        vendor_error: 1,
        qpn: Qpn(17),
        lengths: None,
    };
    let lengths = Some(ReceiveLengths { capacity: 16, arrived: 1024 });
    let short = CompletionError { status: WcStatus::LOC_LEN_ERR, lengths, ..failed };
    cases!(seen, CompletionError { CompletionError { .. } } = [failed, short]);
    cases!(seen, PostError { PostError { .. } } = [PostError { posted: 1, error: VERB }]);
    cases!(seen, EndpointError { EndpointError { .. } } = [
        EndpointError { field: "version", found: 2, allowed: "1" },
    ]);
    cases!(seen, OpErrorKind {
        OpErrorKind::Completion(_),
        OpErrorKind::Post(_),
        OpErrorKind::State { .. },
        OpErrorKind::Limit(_),
        OpErrorKind::Foreign { .. },
        OpErrorKind::Rights { .. },
        OpErrorKind::Unsupported { .. },
        OpErrorKind::NotOneSided { .. },
        OpErrorKind::Misaligned { .. },
        OpErrorKind::Closed,
        OpErrorKind::CompletionQueue(_),
    } = [
        OpErrorKind::Completion(failed),
        KIND,
        OpErrorKind::State { qpn: Qpn(17), state: QpState::Init, error: VERB },
        OpErrorKind::State { qpn: Qpn(17), state: QpState::Err, error: VERB },
        LIMIT.into(),
        OpErrorKind::Foreign { what: "buffer" },
        OpErrorKind::Rights { missing: Access::REMOTE_READ },
        OpErrorKind::Unsupported { what: "READ" },
        OpErrorKind::NotOneSided { index: 1, what: "SEND" },
        OpErrorKind::Misaligned { addr: 4, len: 8 },
        OpErrorKind::Closed,
        OpErrorKind::CompletionQueue(VERB),
    ]);
    cases!(seen, OpError<()> { OpError { .. } } = [OpError::new(KIND, ())]);
    cases!(seen, TryError<()> { TryError::Full(()), TryError::Refused(_) } = [
        TryError::Full(()),
        TryError::Refused(OpError::new(KIND, ())),
    ]);
}

fn connecting(seen: &mut BTreeSet<String>) {
    let address = address();
    let attempt = Attempt { step: Step::Response, address };
    let (reason, step) = (RejectReason::CONSUMER, Step::Resolve);
    cases!(seen, ConnectError {
        ConnectError::Lookup { .. },
        ConnectError::Resolve { .. },
        ConnectError::OtherDevice { .. },
        ConnectError::AddressInUse { .. },
        ConnectError::AddressNotAvailable { .. },
        ConnectError::Refused { .. },
        ConnectError::Rejected { .. },
        ConnectError::Unreachable { .. },
        ConnectError::TimedOut { .. },
        ConnectError::Disconnected { .. },
        ConnectError::AddressChanged { .. },
        ConnectError::DeviceRemoved { .. },
        ConnectError::NoRuntime(_),
        ConnectError::Limit(_),
        ConnectError::Setup { .. },
        ConnectError::Verb { .. },
    } = [
        ConnectError::Lookup { kind: io::ErrorKind::Other, message: "name or service not known".into() },
        ConnectError::Resolve { address, errno: 101 },
        ConnectError::OtherDevice { address, device: "rxe1".into() },
        ConnectError::AddressInUse { address, device: None },
        ConnectError::AddressInUse { address, device: Some("soft0".into()) },
        ConnectError::AddressNotAvailable { address, source: Some(address.ip()), step },
        ConnectError::AddressNotAvailable { address, source: None, step: Step::Listen },
        ConnectError::Refused { address },
        ConnectError::Rejected { attempt, reason, private_data: vec![0; 148] },
        ConnectError::Rejected { attempt, reason, private_data: FOR_MESSAGES.to_vec() },
        ConnectError::Unreachable { attempt, errno: 110 },
        ConnectError::TimedOut { address: None, step: Step::Lookup, after: Duration::from_secs(5) },
        ConnectError::TimedOut { address: Some(address), step, after: Duration::from_secs(5) },
        ConnectError::Disconnected { attempt },
        ConnectError::AddressChanged { attempt },
        ConnectError::DeviceRemoved { attempt },
        NoRuntime::Io.into(),
        LIMIT.into(),
        ConnectError::Setup { attempt: Some(attempt), error: SetupError::Closed.into() },
        SetupError::Closed.into(),
        ConnectError::Verb { attempt: Some(attempt), error: VERB },
        VERB.into(),
    ]);
}

fn messages(seen: &mut BTreeSet<String>) {
    let (handshake, address) = (HandshakeError::Version { theirs: 2, ours: 1 }, address());
    cases!(seen, HandshakeError {
        HandshakeError::Truncated { .. },
        HandshakeError::Magic { .. },
        HandshakeError::Version { .. },
        HandshakeError::Reserved { .. },
        HandshakeError::Range { .. },
        HandshakeError::Trailing { .. },
        HandshakeError::UserData { .. },
    } = [
        HandshakeError::Truncated { len: 0 },
        HandshakeError::Truncated { len: 5 },
        HandshakeError::Magic { found: [0; 4] },
        HandshakeError::Magic { found: *b"HTTP" },
        handshake,
        HandshakeError::Reserved { flags: 1, zero: 0 },
        HandshakeError::Range { field: "receives", value: 0, min: 1, max: 2 },
        HandshakeError::Trailing { bytes: 1 },
        HandshakeError::UserData { len: 33, allowed: 32 },
    ]);
    cases!(seen, EstablishError {
        EstablishError::Setup(_),
        EstablishError::Connect(_),
        EstablishError::Handshake(_),
        EstablishError::OtherProtocol { .. },
        EstablishError::Rejected { .. },
        EstablishError::Refused { .. },
        EstablishError::NoRuntime(_),
    } = [
        SetupError::Closed.into(),
        ConnectError::Refused { address }.into(),
        handshake.into(),
        EstablishError::OtherProtocol { address, error: handshake },
        EstablishError::OtherProtocol { address, error: HandshakeError::Magic { found: [0; 4] } },
        EstablishError::Rejected { address, user_data: Bytes::new() },
        EstablishError::Rejected { address, user_data: Bytes::from_static(b"no") },
        EstablishError::Refused { address, refusal: Refusal::ListenerFull },
        EstablishError::Refused { address, refusal: Refusal::SourceFull },
        NoRuntime::Outside.into(),
    ]);
    cases!(seen, NoRuntime {
        NoRuntime::Outside,
        NoRuntime::Io,
    } = [NoRuntime::Outside, NoRuntime::Io]);
    cases!(seen, Violation {
        Violation::Header { .. },
        Violation::FrameLength { .. },
        Violation::Credits { .. },
        Violation::Window { .. },
        Violation::Done { .. },
        Violation::Unfetched { .. },
        Violation::Offer { .. },
        Violation::TooLong { .. },
        Violation::AfterFinish,
        Violation::NotFinished,
    } = [
        Violation::Header { header: 1 },
        Violation::FrameLength { len: 1 },
        Violation::Credits { announced: 2, in_use: 1 },
        Violation::Window { receives: 1 },
        Violation::Done { announced: 2, offered: 1 },
        Violation::Unfetched { in_use: 1, offered: 2 },
        Violation::Offer { addr: 1, len: 0 },
        Violation::TooLong { len: 2, allowed: 1 },
        Violation::AfterFinish,
        Violation::NotFinished,
    ]);
    cases!(seen, CloseReason {
        CloseReason::Clean,
        CloseReason::Local,
        CloseReason::Aborted,
        CloseReason::Dropped,
        CloseReason::Disconnected,
        CloseReason::Unconfirmed,
        CloseReason::Refused(_),
        CloseReason::Rejected,
        CloseReason::Operation(_),
        CloseReason::Violation(_),
        CloseReason::Silent,
        CloseReason::NoFirstMessage,
        CloseReason::Stalled,
        CloseReason::CloseTimeout,
        CloseReason::Memory,
        CloseReason::Runtime,
    } = [
        CloseReason::Clean,
        CloseReason::Local,
        CloseReason::Aborted,
        CloseReason::Dropped,
        CloseReason::Disconnected,
        CloseReason::Unconfirmed,
        CloseReason::Refused(Refusal::ListenerFull),
        CloseReason::Rejected,
        CloseReason::Operation(KIND),
        CloseReason::Violation(Violation::AfterFinish),
        CloseReason::Silent,
        CloseReason::NoFirstMessage,
        CloseReason::Stalled,
        CloseReason::CloseTimeout,
        CloseReason::Memory,
        CloseReason::Runtime,
    ]);
    cases!(seen, MessageError {
        MessageError::TooLong(_),
        MessageError::Finished,
        MessageError::Register(_),
        MessageError::Closed(_),
    } = [
        MessageError::TooLong(LIMIT),
        MessageError::Finished,
        MessageError::Register(VERB.into()),
        CloseReason::Violation(Violation::AfterFinish).into(),
    ]);
}

#[test]
fn errors_that_hold_another_one_print_all_of_it() {
    let (address, handshake) = (address(), HandshakeError::Version { theirs: 2, ours: 1 });
    let attempt = Some(Attempt { step: Step::Response, address });
    let setup = SetupError::Verb(VERB);
    let wrapped: [(String, String); 14] = [
        (setup.to_string(), VERB.to_string()),
        (OpenError::of("mlx5_0")(VERB).to_string(), VERB.to_string()),
        (OpenError::of("mlx5_0")(VERB).to_string(), "mlx5_0".to_owned()),
        (
            OpenError::Udp(UdpError::NoRoute { peer: address.ip(), error: VERB }).to_string(),
            VERB.to_string(),
        ),
        (PoolError::Register(setup.clone()).to_string(), VERB.to_string()),
        (OpErrorKind::CompletionQueue(VERB).to_string(), VERB.to_string()),
        (
            OpErrorKind::State { qpn: Qpn(17), state: QpState::Init, error: VERB }.to_string(),
            VERB.to_string(),
        ),
        (TryError::Refused(OpError::new(KIND, ())).to_string(), VERB.to_string()),
        (
            ConnectError::Setup { attempt, error: setup.clone().into() }.to_string(),
            VERB.to_string(),
        ),
        (
            EstablishError::Connect(ConnectError::Setup { attempt, error: setup.clone().into() })
                .to_string(),
            address.to_string(),
        ),
        (
            EstablishError::OtherProtocol { address, error: handshake }.to_string(),
            handshake.to_string(),
        ),
        (MessageError::Register(setup).to_string(), VERB.to_string()),
        (MessageError::Closed(CloseReason::Operation(KIND)).to_string(), VERB.to_string()),
        (
            CloseReason::Violation(Violation::AfterFinish).to_string(),
            Violation::AfterFinish.to_string(),
        ),
    ];
    for (text, cause) in wrapped {
        assert_eq!(text.matches(&cause).count(), 1, "{text:?} prints {cause:?} once");
    }
}

/// Names of all types of the workspace that are errors.
fn error_types() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for source in
        ["src", "crates/rdma-provider/src", "crates/rdma-soft/src", "crates/rdma-ibverbs/src"]
    {
        collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(source), &mut found);
    }
    found
}

fn collect(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
            continue;
        }
        for line in fs::read_to_string(&path).unwrap().lines() {
            let Some((implementing, name)) = line.split_once("Error for ") else { continue };
            if implementing.starts_with("impl") && implementing.ends_with("error::") {
                found.insert(
                    name.chars().take_while(|character| character.is_alphanumeric()).collect(),
                );
            }
        }
    }
}
