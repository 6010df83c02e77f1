//! The state machine of a queue pair.
//!
//! ```text
//!            ┌──────────────────────── any state but RESET ──────────────────┐
//!            ▼                                                               ▼
//!   RESET ──▶ INIT ──▶ RTR ──▶ RTS ◀──▶ SQD                                 ERR
//!     ▲                         ▲                                            │
//!     │                         └── SQE (UC, UD: entered by the device)      │
//!     └──────────────────────── any state ───────────────────────────────────┘
//! ```
//!
//! A table per transport lists the attributes of each transition, after `ibv_modify_qp(3)` and the
//! check of all Linux drivers (`ib_modify_qp_is_ok`). Any other attribute fails the transition.

use super::{QpAttrMask as M, QpState, Transport};

/// A transition and its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transition {
    /// Old state.
    pub from: QpState,
    /// New state.
    pub to: QpState,
    /// Required attributes, besides the state.
    pub required: M,
    /// Optional attributes.
    pub optional: M,
}

/// The error of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransitionError {
    /// The transport lacks the transition.
    Illegal {
        /// Old state.
        from: QpState,
        /// Requested state.
        to: QpState,
    },
    /// Attributes are missing or not allowed.
    Attributes {
        /// Old state.
        from: QpState,
        /// Requested state.
        to: QpState,
        /// Missing attributes.
        missing: M,
        /// Attributes that are not allowed.
        superfluous: M,
    },
    /// The queue pair is not in `current_state`.
    NotInState {
        /// State given.
        claimed: QpState,
        /// Actual state.
        actual: QpState,
    },
}

/// Returns the transition, if the transport has it.
#[must_use]
pub fn transition(transport: Transport, from: QpState, to: QpState) -> Option<Transition> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    use Transport::{Dci, Rc, Uc, Ud};

    let none = M::empty();
    let path = M::PKEY_INDEX.union(M::PORT);
    let rights = match transport {
        Rc | Uc => M::ACCESS_FLAGS,
        Ud => M::QKEY,
        // Peers access no memory through an initiator.
        Dci => none,
    };
    let connect = M::AV.union(M::PATH_MTU).union(M::DEST_QPN).union(M::RQ_PSN);
    // Optional for RTS, also from SQD and SQE.
    let running = match transport {
        Rc => M::CUR_STATE
            .union(M::ALT_PATH)
            .union(rights)
            .union(M::MIN_RNR_TIMER)
            .union(M::PATH_MIG_STATE),
        Uc => M::CUR_STATE.union(M::ALT_PATH).union(rights).union(M::PATH_MIG_STATE),
        Ud => M::CUR_STATE.union(rights),
        // As in mlx5, which has no SQD of initiators either.
        Dci => M::MIN_RNR_TIMER,
    };

    let (required, optional) = match (from, to) {
        (_, Reset) => (none, none),
        (Reset, Err) => return None,
        (_, Err) => (none, none),
        (Reset, Init) => (path.union(rights), none),
        (Init, Init) => (none, path.union(rights)),
        (Init, Rtr) => match transport {
            Rc => (
                connect.union(M::MAX_DEST_RD_ATOMIC).union(M::MIN_RNR_TIMER),
                M::ALT_PATH.union(rights).union(M::PKEY_INDEX),
            ),
            Uc => (connect, M::ALT_PATH.union(rights).union(M::PKEY_INDEX)),
            Ud => (none, M::PKEY_INDEX.union(rights)),
            Dci => (M::PATH_MTU, M::AV.union(M::PKEY_INDEX)),
        },
        (Rtr, Rts) => match transport {
            Rc | Dci => (
                M::SQ_PSN
                    .union(M::TIMEOUT)
                    .union(M::RETRY_CNT)
                    .union(M::RNR_RETRY)
                    .union(M::MAX_QP_RD_ATOMIC),
                running,
            ),
            Uc | Ud => (M::SQ_PSN, running),
        },
        (Rts, Rts) => (none, running),
        (Rts | Sqd, Sqd) | (Sqd, Rts) if transport == Dci => return None,
        (Rts, Sqd) => (none, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Rts) => (none, running),
        (Sqd, Sqd) => match transport {
            Rc => (
                none,
                M::PORT
                    .union(M::AV)
                    .union(M::TIMEOUT)
                    .union(M::RETRY_CNT)
                    .union(M::RNR_RETRY)
                    .union(M::MAX_QP_RD_ATOMIC)
                    .union(M::MAX_DEST_RD_ATOMIC)
                    .union(M::ALT_PATH)
                    .union(rights)
                    .union(M::PKEY_INDEX)
                    .union(M::MIN_RNR_TIMER)
                    .union(M::PATH_MIG_STATE),
            ),
            Uc => (
                none,
                M::AV
                    .union(M::ALT_PATH)
                    .union(rights)
                    .union(M::PKEY_INDEX)
                    .union(M::PATH_MIG_STATE),
            ),
            Ud | Dci => (none, M::PKEY_INDEX.union(rights)),
        },
        // Reliable queue pairs have no SQE.
        (Sqe, Rts) if !matches!(transport, Rc | Dci) => (none, M::CUR_STATE.union(rights)),
        _ => return None,
    };
    Some(Transition { from, to, required, optional })
}

/// Checks the [given](super::QpAttr::mask) attributes.
///
/// # Errors
///
/// [`TransitionError`], with all missing and superfluous attributes.
pub fn check_transition(
    transport: Transport,
    from: QpState,
    to: QpState,
    given: M,
) -> Result<(), TransitionError> {
    check(transition(transport, from, to), from, to, given)
}

/// Returns the transition of a DC target, if it exists. RTR is the last state: targets only
/// receive.
#[must_use]
pub fn dct_transition(from: QpState, to: QpState) -> Option<Transition> {
    let required = match (from, to) {
        (QpState::Reset, QpState::Init) => M::PKEY_INDEX.union(M::PORT).union(M::ACCESS_FLAGS),
        (QpState::Init, QpState::Rtr) => M::AV.union(M::PATH_MTU).union(M::MIN_RNR_TIMER),
        _ => return None,
    };
    Some(Transition { from, to, required, optional: M::empty() })
}

/// Checks the attributes of a DC target's transition.
///
/// # Errors
///
/// [`TransitionError`], see [`check_transition`].
pub fn check_dct_transition(from: QpState, to: QpState, given: M) -> Result<(), TransitionError> {
    check(dct_transition(from, to), from, to, given)
}

fn check(
    row: Option<Transition>,
    from: QpState,
    to: QpState,
    given: M,
) -> Result<(), TransitionError> {
    let row = row.ok_or(TransitionError::Illegal { from, to })?;
    let missing = row.required.difference(given);
    let superfluous = given.difference(row.required.union(row.optional).union(M::STATE));
    if missing.is_empty() && superfluous.is_empty() {
        Ok(())
    } else {
        Err(TransitionError::Attributes { from, to, missing, superfluous })
    }
}

impl std::fmt::Display for TransitionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Illegal { from: from @ (QpState::Rtr | QpState::Rts), to: QpState::Rtr } => {
                write!(f, "the queue pair is already connected or activated (state {from:?})")?;
                f.write_str(ANOTHER)
            }
            Self::Illegal { from: from @ (QpState::Err | QpState::Sqe), to: QpState::Rtr } => {
                write!(f, "the queue pair has failed (state {from:?})")?;
                f.write_str(ANOTHER)
            }
            Self::Illegal { from, to } => write!(
                f,
                "invalid state transition from {from:?} to {to:?}; the order is Reset, Init, Rtr, \
                 Rts"
            ),
            Self::Attributes { from, to, missing, superfluous } => {
                write!(f, "invalid attributes for the transition from {from:?} to {to:?}:")?;
                let missing = (!missing.is_empty()).then(|| ("missing", names(*missing)));
                let forbidden =
                    (!superfluous.is_empty()).then(|| ("not allowed", names(*superfluous)));
                let mut separator = "";
                for (kind, names) in missing.into_iter().chain(forbidden) {
                    write!(f, "{separator} {kind} {names}")?;
                    separator = ";";
                }
                Ok(())
            }
            Self::NotInState { claimed, actual } => {
                write!(f, "queue pair is in state {actual:?}, expected {claimed:?}")?;
                match (claimed, actual) {
                    (QpState::Init, QpState::Rtr | QpState::Rts | QpState::Sqe | QpState::Err) => {
                        f.write_str(ANOTHER)
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Remedy for a queue pair that cannot be connected again.
const ANOTHER: &str =
    "; create and connect another one, or move this one to state Reset, then Init, before";

fn names(attributes: M) -> String {
    attributes.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

impl std::error::Error for TransitionError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_but_reset_can_be_sent_to_error() {
        for transport in [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Dci] {
            for from in QpState::ALL {
                assert!(transition(transport, from, QpState::Reset).is_some());
                assert_eq!(
                    transition(transport, from, QpState::Err).is_some(),
                    from != QpState::Reset
                );
            }
        }
    }

    #[test]
    fn target_goes_to_rtr_and_no_further() {
        for from in QpState::ALL {
            for to in QpState::ALL {
                let there = matches!(
                    (from, to),
                    (QpState::Reset, QpState::Init) | (QpState::Init, QpState::Rtr)
                );
                assert_eq!(dct_transition(from, to).is_some(), there, "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn initiator_takes_no_rights_and_is_not_drained() {
        let all =
            |from, to| transition(Transport::Dci, from, to).map(|row| row.required | row.optional);
        for (from, to) in [
            (QpState::Reset, QpState::Init),
            (QpState::Init, QpState::Rtr),
            (QpState::Rtr, QpState::Rts),
        ] {
            let attributes = all(from, to).unwrap();
            assert!(
                !attributes.intersects(M::ACCESS_FLAGS | M::QKEY | M::DEST_QPN | M::RQ_PSN),
                "{attributes:?}"
            );
        }
        for state in QpState::ALL {
            let left = if matches!(state, QpState::Reset | QpState::Err) {
                None
            } else {
                all(QpState::Sqd, state)
            };
            assert_eq!((all(state, QpState::Sqd), left), (None, None), "{state:?}");
        }
    }

    // Shows E1.
    #[test]
    fn a_missing_and_a_superfluous_attribute_are_both_named() {
        let error = check_transition(Transport::Rc, QpState::Reset, QpState::Init, M::PORT | M::AV)
            .unwrap_err();
        assert_eq!(
            error,
            TransitionError::Attributes {
                from: QpState::Reset,
                to: QpState::Init,
                missing: M::PKEY_INDEX | M::ACCESS_FLAGS,
                superfluous: M::AV,
            }
        );
    }
}
