//! The exact texts of all errors.

use crate::Violation;
use crate::handshake::{HandshakeError, Service};
use crate::refusal::RefusalReason;

/// Checks the texts of a type, at least one for each pattern. A variant without a pattern does not
/// compile.
macro_rules! texts {
    ($type:ty, { $($pattern:pat => [$($value:expr => $text:expr),+ $(,)?]),+ $(,)? }) => {{
        let _exhaustive = |value: &$type| match value { $($pattern => {}),+ };
        $($(
            let value: $type = $value;
            assert!(matches!(value, $pattern), "{value:?} is not {}", stringify!($pattern));
            assert_eq!(value.to_string(), $text, "{value:?}");
        )+)+
    }};
}

#[test]
fn errors_have_their_exact_texts() {
    texts!(HandshakeError, {
        HandshakeError::Truncated { .. } => [
            HandshakeError::Truncated { len: 0 } => "the peer sent no handshake",
            HandshakeError::Truncated { len: 5 } =>
                "the peer's handshake is truncated to 5 bytes",
        ],
        HandshakeError::Magic { .. } => [
            HandshakeError::Magic { found: [0; 4] } => "the peer sent no handshake",
            HandshakeError::Magic { found: *b"HTTP" } =>
                "the peer's private data is not a handshake: it starts with \"HTTP\"",
        ],
        HandshakeError::Version { .. } => [
            HandshakeError::Version { theirs: 2, ours: 1 } =>
                "handshake versions do not match: 1 here, 2 at the peer; use the same release of \
                 tokio-rdma on both sides",
        ],
        HandshakeError::Service { .. } => [
            HandshakeError::Service { theirs: Service::Bytes, ours: Service::Messages } =>
                "the peer's connection carries byte streams, this side's messages; use Connection \
                 and Listener, or RdmaStream and RdmaListener, on both sides",
        ],
        HandshakeError::Reserved { .. } => [
            HandshakeError::Reserved { flags: 2, zero: 0 } =>
                "the peer's handshake sets reserved bits: flags 0x2, reserved byte 0x0",
        ],
        HandshakeError::Range { .. } => [
            HandshakeError::Range { field: "receives", value: 0, min: 1, max: 2 } =>
                "invalid value in the peer's handshake: receives is 0, allowed: 1 to 2",
        ],
        HandshakeError::Trailing { .. } => [
            HandshakeError::Trailing { bytes: 9 } =>
                "the peer's handshake is followed by 9 bytes that are not all zero",
        ],
        HandshakeError::UserData { .. } => [
            HandshakeError::UserData { len: 33, allowed: 32 } =>
                "user_data too long: 33 bytes, at most 32 fit in the handshake",
        ],
    });
    texts!(RefusalReason, {
        RefusalReason::ListenerFull => [
            RefusalReason::ListenerFull =>
                "the listener has reached its limit ListenerConfig::max_connections",
        ],
        RefusalReason::SourceFull => [
            RefusalReason::SourceFull =>
                "the listener has reached its limit \
                 ListenerConfig::max_connections_per_source for this address",
        ],
        RefusalReason::ShuttingDown => [
            RefusalReason::ShuttingDown => "the listener shuts down",
        ],
        RefusalReason::OutOfBuffers => [
            RefusalReason::OutOfBuffers =>
                "the listener's buffer budget is used up (ConnectionConfig::budget)",
        ],
        RefusalReason::OtherService(_) => [
            RefusalReason::OtherService(Service::Messages) =>
                "the listener carries messages; connect with Connection",
            RefusalReason::OtherService(Service::Bytes) =>
                "the listener carries byte streams; connect with RdmaStream",
        ],
    });
    texts!(Violation, {
        Violation::Header { .. } => [
            Violation::Header { header: 1 } => "invalid frame header 0x00000001",
        ],
        Violation::FrameLength { .. } => [
            Violation::FrameLength { len: 9 } =>
                "invalid payload length of 9 bytes for the kind of frame",
        ],
        Violation::Credits { .. } => [
            Violation::Credits { announced: 2, in_use: 1 } =>
                "2 receives announced as free, only 1 in use",
        ],
        Violation::Window { .. } => [
            Violation::Window { receives: 64 } => "more frames sent than receives posted (64)",
        ],
        Violation::Done { .. } => [
            Violation::Done { announced: 2, offered: 1 } =>
                "2 messages reported fetched, only 1 offered",
        ],
        Violation::Unfetched { .. } => [
            Violation::Unfetched { in_use: 1, offered: 2 } =>
                "receives announced as free that hold offered messages: 2 not fetched, 1 in use",
        ],
        Violation::Offer { .. } => [
            Violation::Offer { addr: 1, len: 0 } => "invalid offer of 0 bytes at 0x1",
        ],
        Violation::TooLong { .. } => [
            Violation::TooLong { len: 2, allowed: 1 } =>
                "message of 2 bytes, at most 1 allowed (max_message)",
        ],
        Violation::Incomplete { .. } => [Violation::Incomplete { len: 8192 } =>
            "another frame within a message, of which 8192 bytes have arrived"],
        Violation::Frames { .. } => [
            Violation::Frames { allowed: 49 } => "message of more than 49 frames",
        ],
        Violation::Resize { .. } => [
            Violation::Resize { receives: 4, size: 512 } =>
                "invalid change to 4 receives of 512 bytes",
        ],
        Violation::Skip => [Violation::Skip => "receive skipped that the peer must use"],
        Violation::AfterFinish => [Violation::AfterFinish => "message sent after Fin"],
        Violation::NotFinished => [
            Violation::NotFinished => "acknowledgement of a Fin that was not sent",
        ],
    });
}
