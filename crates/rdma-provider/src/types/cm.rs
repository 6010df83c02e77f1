//! Connection manager values.

use std::fmt;

/// The reason of a rejected connection: codes of the REJ message (IBTA 12.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u16);

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl RejectReason {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            const fn name(self) -> Option<(&'static str, &'static str)> {
                match self.0 {
                    $($code => Some((stringify!($name), $text)),)*
                    _ => None,
                }
            }
        }
    };
}

reasons! {
    /// The peer has no free queue pair.
    NO_QP = 1, "no queue pair available";
    /// The peer is out of resources.
    NO_RESOURCES = 3, "no resources available";
    /// The peer timed out waiting for this side.
    TIMEOUT = 4, "timeout: the peer waited too long for this side";
    /// The peer does not support the request.
    UNSUPPORTED = 5, "unsupported request";
    /// The peer does not know the communication ID.
    INVALID_COMM_ID = 6, "invalid communication ID";
    /// The communication IDs belong to different connections.
    INVALID_COMM_INSTANCE = 7, "invalid communication instance";
    /// The peer has no listener at this port.
    INVALID_SERVICE_ID = 8, "invalid service ID: no listener at this port";
    /// The peer lacks the transport.
    INVALID_TRANSPORT = 9, "invalid transport service type";
    /// The peer considers the queue pair part of an earlier connection.
    STALE_CONNECTION = 10, "stale connection: the queue pair belongs to an earlier connection";
    /// The peer does not have this GID.
    INVALID_GID = 12, "invalid primary remote port GID";
    /// The peer does not have this LID.
    INVALID_LID = 13, "invalid primary remote port LID";
    /// The peer cannot use this service level.
    INVALID_SERVICE_LEVEL = 14, "invalid primary service level";
    /// The peer cannot use this traffic class.
    INVALID_TRAFFIC_CLASS = 15, "invalid primary traffic class";
    /// The peer cannot use this hop limit.
    INVALID_HOP_LIMIT = 16, "invalid primary hop limit";
    /// The peer cannot send, or receive, at this rate.
    INVALID_PACKET_RATE = 17, "invalid primary packet rate";
    /// The peer's connection manager is at another port.
    MANAGER_REDIRECT = 24, "the connection manager is at another port";
    /// The service is at another port.
    PORT_REDIRECT = 25, "the service is at another port";
    /// The peer cannot use this path MTU.
    INVALID_MTU = 26, "invalid path MTU";
    /// The peer cannot serve as many READs and atomics.
    INSUFFICIENT_RESPONDER_RESOURCES = 27, "insufficient responder resources";
    /// The peer's program rejected the connection.
    CONSUMER = 28, "its program refused the connection";
    /// The peer does not support the RNR retry count.
    INVALID_RNR_RETRY = 29, "invalid count of RNR retries";
    /// The communication ID is in use by another connection.
    DUPLICATE_COMM_ID = 30, "duplicate local communication ID";
    /// The peer's manager has another class version.
    INVALID_CLASS_VERSION = 31, "invalid class version";
    /// The peer cannot use this flow label.
    INVALID_FLOW_LABEL = 32, "invalid primary flow label";
}

impl RejectReason {
    /// Returns the reason that corresponds to a failed status of SIDR (IBTA 12.11.2).
    #[doc(hidden)]
    #[must_use]
    pub const fn of_sidr(status: u8) -> Self {
        match status {
            1 => Self::INVALID_SERVICE_ID,
            2 => Self::CONSUMER,
            3 => Self::NO_QP,
            4 => Self::PORT_REDIRECT,
            5 => Self::INVALID_CLASS_VERSION,
            _ => Self::UNSUPPORTED,
        }
    }
}

impl fmt::Debug for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "RejectReason({})", self.0),
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((_, text)) => f.write_str(text),
            None => write!(f, "unknown reason {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_reasons_are_kept_and_printed() {
        assert_eq!(
            format!("{:?} {:?}", RejectReason::CONSUMER, RejectReason(999)),
            "CONSUMER RejectReason(999)"
        );
        assert_eq!(RejectReason(999).to_string(), "unknown reason 999");
    }
}
