//! Attributes that a queue pair's change of state requires and permits: `ibv_modify_qp(3)`; for DC,
//! `mlx5dv_create_qp(3)` and the examples of rdma-core.

use crate::abi::{EINVAL, mask, state};
use crate::objects::Kind;
use crate::uverbs::Reply;

pub(super) fn check(kind: Kind, from: u8, to: u8, given: u32) -> Reply {
    let Some((required, optional)) = attributes(kind, from, to) else { return Err(EINVAL) };
    let given = given & !mask::STATE;
    // Only changes to RTS may name the current state.
    let current = if to == state::RTS { mask::CUR_STATE } else { 0 };
    let complete = given & required == required;
    let nothing_else = given & !(required | optional | current) == 0;
    if complete && nothing_else { Ok(()) } else { Err(EINVAL) }
}

/// Returns required and optional attributes, or `None` if the change does not exist.
fn attributes(kind: Kind, from: u8, to: u8) -> Option<(u32, u32)> {
    use mask::*;
    match kind {
        Kind::Dct => match (from, to) {
            (state::RESET, state::INIT) => Some((ACCESS_FLAGS | PKEY_INDEX | PORT, 0)),
            (state::INIT, state::RTR) => Some((MIN_RNR_TIMER | AV | PATH_MTU, 0)),
            // A DC target leaves RTR only by being destroyed.
            _ => None,
        },
        Kind::Dci => match (from, to) {
            (_, state::RESET) => Some((0, 0)),
            (from, state::ERR) if from != state::RESET => Some((0, 0)),
            (state::RESET, state::INIT) => Some((PKEY_INDEX | PORT, 0)),
            (state::INIT, state::INIT) => Some((0, PKEY_INDEX | PORT)),
            (state::INIT, state::RTR) => Some((PATH_MTU, PKEY_INDEX | AV)),
            (state::RTR, state::RTS) => {
                Some((TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC | SQ_PSN, MIN_RNR_TIMER))
            }
            (state::RTS, state::RTS) => Some((0, MIN_RNR_TIMER)),
            _ => None,
        },
        Kind::Rc | Kind::Uc | Kind::Ud => connected(kind, from, to),
    }
}

fn connected(kind: Kind, from: u8, to: u8) -> Option<(u32, u32)> {
    use mask::*;
    let of = |rc, uc, ud| match kind {
        Kind::Rc => rc,
        Kind::Uc => uc,
        _ => ud,
    };
    match (from, to) {
        (state::RESET, state::ERR) => None,
        (_, state::RESET | state::ERR) => Some((0, 0)),
        (state::RESET, state::INIT) => {
            let common = PKEY_INDEX | PORT;
            Some((common | of(ACCESS_FLAGS, ACCESS_FLAGS, QKEY), 0))
        }
        (state::INIT, state::INIT) => {
            Some((0, PKEY_INDEX | PORT | of(ACCESS_FLAGS, ACCESS_FLAGS, QKEY)))
        }
        (state::INIT, state::RTR) => {
            let path = AV | PATH_MTU | DEST_QPN | RQ_PSN;
            Some((
                of(path | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER, path, 0),
                PKEY_INDEX | of(ACCESS_FLAGS | ALT_PATH, ACCESS_FLAGS | ALT_PATH, QKEY),
            ))
        }
        (state::RTR, state::RTS) => Some((
            SQ_PSN | of(TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC, 0, 0),
            of(
                ACCESS_FLAGS | MIN_RNR_TIMER | ALT_PATH | PATH_MIG_STATE,
                ACCESS_FLAGS | ALT_PATH | PATH_MIG_STATE,
                QKEY,
            ),
        )),
        (state::RTS, state::SQD) => Some((0, EN_SQD_ASYNC_NOTIFY)),
        (state::SQD, state::SQD) => {
            let path = ACCESS_FLAGS | ALT_PATH | PKEY_INDEX | PATH_MIG_STATE;
            let retries = TIMEOUT
                | RETRY_CNT
                | RNR_RETRY
                | MAX_QP_RD_ATOMIC
                | MAX_DEST_RD_ATOMIC
                | MIN_RNR_TIMER;
            // The kernel sets the port together with the address vector. UC permits no port here,
            // hence no address vector either.
            Some((0, of(path | retries | PORT | AV, path, PKEY_INDEX | QKEY)))
        }
        (state::SQE, state::RTS) if kind != Kind::Rc => Some((0, of(0, ACCESS_FLAGS, QKEY))),
        (state::RTS | state::SQD, state::RTS) => Some((
            0,
            of(
                ACCESS_FLAGS | MIN_RNR_TIMER | ALT_PATH | PATH_MIG_STATE,
                ACCESS_FLAGS | ALT_PATH | PATH_MIG_STATE,
                QKEY,
            ),
        )),
        _ => None,
    }
}
