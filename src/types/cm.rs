//! Values of the connection manager.

use std::fmt;

/// Why a peer, or the connection manager of its device, refused a connection: reason codes of REJ (IBTA 12.6.7.2).
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
    /// The peer has no queue pair left.
    NO_QP = 1, "no queue pair available";
    /// The peer is out of resources.
    NO_RESOURCES = 3, "no resources available";
    /// The peer waited long enough for us.
    TIMEOUT = 4, "timeout";
    /// The peer cannot do what was asked.
    UNSUPPORTED = 5, "unsupported request";
    /// The peer knows no connection of this number.
    INVALID_COMM_ID = 6, "invalid communication ID";
    /// The numbers of a connection do not belong together.
    INVALID_COMM_INSTANCE = 7, "invalid communication instance";
    /// Nobody listens there.
    INVALID_SERVICE_ID = 8, "invalid service ID: nobody listens there";
    /// The peer has no such transport.
    INVALID_TRANSPORT = 9, "invalid transport service type";
    /// To the peer this queue pair is part of a connection already.
    STALE_CONNECTION = 10, "stale connection: the queue pair was part of one";
    /// The peer does not have this GID.
    INVALID_GID = 12, "invalid primary remote port GID";
    /// The peer cannot use this path MTU.
    INVALID_MTU = 26, "invalid path MTU";
    /// The program at the other end said no.
    CONSUMER = 28, "refused by the peer's program";
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
            None => write!(f, "reason {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_reasons_are_kept_and_printed() {
        assert_eq!(format!("{:?} {:?}", RejectReason::CONSUMER, RejectReason(999)), "CONSUMER RejectReason(999)");
        assert_eq!(RejectReason(999).to_string(), "reason 999");
    }
}
