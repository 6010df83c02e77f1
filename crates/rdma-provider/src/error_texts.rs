//! The exact text of every public error of this crate, and of the codes that errors print.

use std::error::Error;
use std::fmt::Debug;
use std::io;

use crate::VerbError;
use crate::contract::PostError;
use crate::types::{QpAttrMask, QpState, RejectReason, TransitionError, WcStatus};

const VERB: VerbError = VerbError { verb: "ibv_post_send", errno: VerbError::ENOMEM };

/// Checks the texts of an error type, at least one for each pattern. A variant without a pattern
/// does not compile.
macro_rules! texts {
    ($type:ident { $($pattern:pat => [$($value:expr => $text:expr),+ $(,)?]),+ $(,)? }) => {{
        let _exhaustive = |error: &$type| match error { $($pattern => {}),+ };
        $($(
            let error: $type = $value;
            assert!(matches!(error, $pattern), "{error:?} is not {}", stringify!($pattern));
            check(error, $text);
        )+)+
    }};
}

/// Checks the text, its style, and that the error prints its whole cause.
fn check<E: Error + Send + Sync + 'static>(error: E, expected: &str) {
    check_text(&error, &error.to_string(), expected);
    assert!(error.source().is_none(), "{error:?} prints its cause and returns it");
    assert_eq!(io::Error::other(error).to_string(), expected);
}

fn check_text(value: &dyn Debug, text: &str, expected: &str) {
    assert_eq!(text, expected, "{value:?}");
    assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text:?}");
    assert!(!text.starts_with(char::is_uppercase), "{text:?} starts with a capital");
}

#[test]
fn every_public_error_has_its_exact_text() {
    texts!(VerbError {
        VerbError { .. } => [
            VERB => "ibv_post_send: Cannot allocate memory (os error 12)",
        ],
    });
    texts!(PostError {
        PostError { .. } => [
            PostError { posted: 3, error: VERB } =>
                "failed to post a work request (posted before it: 3): ibv_post_send: Cannot \
                 allocate memory (os error 12)",
        ],
    });
    let (reset, init) = (QpState::Reset, QpState::Init);
    let attributes = |missing, superfluous| TransitionError::Attributes {
        from: reset,
        to: init,
        missing,
        superfluous,
    };
    let none = QpAttrMask::empty();
    texts!(TransitionError {
        TransitionError::Illegal { .. } => [
            TransitionError::Illegal { from: reset, to: QpState::Rts } =>
                "invalid state transition from Reset to Rts; the order is Reset, Init, Rtr, Rts",
            TransitionError::Illegal { from: QpState::Rts, to: QpState::Rtr } =>
                "the queue pair is already connected or activated (state Rts); create and connect \
                 another one, or move this one to state Reset, then Init, before",
            TransitionError::Illegal { from: QpState::Err, to: QpState::Rtr } =>
                "the queue pair has failed (state Err); create and connect another one, or move \
                 this one to state Reset, then Init, before",
        ],
        TransitionError::Attributes { .. } => [
            attributes(QpAttrMask::PKEY_INDEX | QpAttrMask::PORT, QpAttrMask::AV) =>
                "invalid attributes for the transition from Reset to Init: missing PKEY_INDEX, \
                 PORT; not allowed AV",
            attributes(QpAttrMask::PORT, none) =>
                "invalid attributes for the transition from Reset to Init: missing PORT",
            attributes(none, QpAttrMask::AV) =>
                "invalid attributes for the transition from Reset to Init: not allowed AV",
        ],
        TransitionError::NotInState { .. } => [
            TransitionError::NotInState { claimed: init, actual: QpState::Err } =>
                "queue pair is in state Err, expected Init; create and connect another one, or \
                 move this one to state Reset, then Init, before",
        ],
    });
}

/// Checks the text of each named code. `Debug` prints a code's name, or `unnamed` and its number.
fn check_codes<T: Debug>(
    codes: impl Iterator<Item = T>,
    text: impl Fn(&T) -> String,
    unnamed: &str,
    table: &[(&str, &str)],
) {
    let named = codes.filter(|code| !format!("{code:?}").starts_with(unnamed));
    let found: Vec<_> = named.map(|code| (format!("{code:?}"), code)).collect();
    assert_eq!(
        found.iter().map(|(name, _)| &**name).collect::<Vec<_>>(),
        table.iter().map(|&(name, _)| name).collect::<Vec<_>>()
    );
    for ((_, code), (_, expected)) in found.iter().zip(table) {
        check_text(code, &text(code), expected);
    }
}

#[test]
fn every_completion_status_has_its_exact_text() {
    check_codes(
        (0..256).map(WcStatus),
        WcStatus::to_string,
        "WcStatus(",
        &[
            ("SUCCESS", "success"),
            ("LOC_LEN_ERR", "local length error: the message exceeds the receive or a limit"),
            ("LOC_QP_OP_ERR", "local queue pair operation error: the work request is inconsistent"),
            ("LOC_EEC_OP_ERR", "local end-to-end context operation error"),
            (
                "LOC_PROT_ERR",
                "local protection error: a local buffer is not covered by its registration",
            ),
            ("WR_FLUSH_ERR", "flushed: the queue pair entered the error state"),
            ("MW_BIND_ERR", "memory window bind error: wrong key, range or rights"),
            ("BAD_RESP_ERR", "bad response: the peer's response is malformed"),
            ("LOC_ACCESS_ERR", "local access error: the peer lacked rights to a local buffer"),
            (
                "REM_INV_REQ_ERR",
                "remote invalid request: too long, misaligned or not enabled at the peer",
            ),
            ("REM_ACCESS_ERR", "remote access error: wrong key, range or rights"),
            ("REM_OP_ERR", "remote operation error: the peer failed to complete the request"),
            ("RETRY_EXC_ERR", "transport retries exceeded: the peer does not answer"),
            (
                "RNR_RETRY_EXC_ERR",
                "receiver-not-ready retries exceeded: the peer has no receive posted",
            ),
            ("LOC_RDD_VIOL_ERR", "local reliable datagram domain violation"),
            ("REM_INV_RD_REQ_ERR", "remote invalid reliable datagram request"),
            ("REM_ABORT_ERR", "remote abort: the peer aborted the request"),
            ("INV_EECN_ERR", "invalid end-to-end context number"),
            ("INV_EEC_STATE_ERR", "invalid end-to-end context state"),
            ("FATAL_ERR", "fatal device error"),
            ("RESP_TIMEOUT_ERR", "response timeout: the peer did not respond in time"),
            ("GENERAL_ERR", "general error: the device gave no reason"),
        ],
    );
    assert_eq!(WcStatus(99).to_string(), "unknown completion status 99");
}

#[test]
fn every_reject_reason_has_its_exact_text() {
    check_codes(
        (0..256).map(RejectReason),
        RejectReason::to_string,
        "RejectReason(",
        &[
            ("NO_QP", "no queue pair available"),
            ("NO_RESOURCES", "no resources available"),
            ("TIMEOUT", "timeout: the peer waited too long for this side"),
            ("UNSUPPORTED", "unsupported request"),
            ("INVALID_COMM_ID", "invalid communication ID"),
            ("INVALID_COMM_INSTANCE", "invalid communication instance"),
            ("INVALID_SERVICE_ID", "invalid service ID: no listener at this port"),
            ("INVALID_TRANSPORT", "invalid transport service type"),
            (
                "STALE_CONNECTION",
                "stale connection: the queue pair belongs to an earlier connection",
            ),
            ("INVALID_GID", "invalid primary remote port GID"),
            ("INVALID_LID", "invalid primary remote port LID"),
            ("INVALID_SERVICE_LEVEL", "invalid primary service level"),
            ("INVALID_TRAFFIC_CLASS", "invalid primary traffic class"),
            ("INVALID_HOP_LIMIT", "invalid primary hop limit"),
            ("INVALID_PACKET_RATE", "invalid primary packet rate"),
            ("MANAGER_REDIRECT", "the connection manager is at another port"),
            ("PORT_REDIRECT", "the service is at another port"),
            ("INVALID_MTU", "invalid path MTU"),
            ("INSUFFICIENT_RESPONDER_RESOURCES", "insufficient responder resources"),
            ("CONSUMER", "its program refused the connection"),
            ("INVALID_RNR_RETRY", "invalid count of RNR retries"),
            ("DUPLICATE_COMM_ID", "duplicate local communication ID"),
            ("INVALID_CLASS_VERSION", "invalid class version"),
            ("INVALID_FLOW_LABEL", "invalid primary flow label"),
        ],
    );
    assert_eq!(RejectReason(999).to_string(), "unknown reason 999");
}
