//! The state machine: each pair of states, each missing and each superfluous attribute.
//!
//! The expected transitions are from `ibv_modify_qp(3)` and the table that all Linux drivers share.

use tokio_rdma::SetupError;
use tokio_rdma::types::{
    Access, AckTimeout, Lkey, Mtu, PortNum, Psn, Qkey, QpAttr, QpState, Qpn, RnrTimer, SendOp, Sge,
    TransitionError, Transport, WcStatus,
};

use crate::common::raw::{End, Options, QKEY, init, outcome, rtr, rts};
use crate::common::{Setup, rxe, skip};

/// The short names of attributes in [`TABLE`].
const NAMES: [&str; 17] = [
    "cur", "notify", "access", "pkey", "port", "qkey", "av", "mtu", "timeout", "retry", "rnr",
    "rqpsn", "sqpsn", "rd", "destrd", "minrnr", "dest",
];

/// Legal transitions except to RESET and ERR, with required and optional attributes.
const TABLE: &str = "
    RC Reset Init | pkey port access                      |
    UC Reset Init | pkey port access                      |
    UD Reset Init | pkey port qkey                        |
    RC Init  Init |                                       | pkey port access
    UC Init  Init |                                       | pkey port access
    UD Init  Init |                                       | pkey port qkey
    RC Init  Rtr  | av mtu dest rqpsn destrd minrnr       | access pkey
    UC Init  Rtr  | av mtu dest rqpsn                     | access pkey
    UD Init  Rtr  |                                       | pkey qkey
    RC Rtr   Rts  | sqpsn timeout retry rnr rd            | cur access minrnr
    UC Rtr   Rts  | sqpsn                                 | cur access
    UD Rtr   Rts  | sqpsn                                 | cur qkey
    RC Rts   Rts  |                                       | cur access minrnr
    UC Rts   Rts  |                                       | cur access
    UD Rts   Rts  |                                       | cur qkey
    RC Rts   Sqd  |                                       | notify
    UC Rts   Sqd  |                                       | notify
    UD Rts   Sqd  |                                       | notify
    RC Sqd   Rts  |                                       | cur access minrnr
    UC Sqd   Rts  |                                       | cur access
    UD Sqd   Rts  |                                       | cur qkey
    RC Sqd   Sqd  | | port av timeout retry rnr rd destrd access pkey minrnr
    UC Sqd   Sqd  |                                       | av access pkey
    UD Sqd   Sqd  |                                       | pkey qkey
    UC Sqe   Rts  |                                       | cur access
    UD Sqe   Rts  |                                       | cur qkey
";

/// Returns the states of a queue pair. A local failure of an unreliable send leads to SQE.
fn states(setup: &Setup, transport: Transport) -> impl Iterator<Item = QpState> + use<> {
    let sqe = transport != Transport::Rc && has_sqe(setup);
    QpState::ALL.into_iter().filter(move |&state| state != QpState::Sqe || sqe)
}

fn has_sqe(setup: &Setup) -> bool {
    let none = setup.known(&rxe::NO_SQE);
    if none {
        skip("transitions from SQE", "the device lacks the state");
    }
    !none
}

const TRANSPORTS: [(Transport, &str); 3] =
    [(Transport::Rc, "RC"), (Transport::Uc, "UC"), (Transport::Ud, "UD")];

/// Returns the required and optional attributes of a transition, or `None` if it is illegal.
pub(super) fn row(
    transport: &str,
    from: QpState,
    to: QpState,
) -> Option<(Vec<&'static str>, Vec<&'static str>)> {
    match (from, to) {
        (_, QpState::Reset) => return Some((vec![], vec![])),
        (QpState::Reset, QpState::Err) => return None,
        (_, QpState::Err) => return Some((vec![], vec![])),
        _ => {}
    }
    TABLE.lines().find_map(|line| {
        let mut columns = line.split('|');
        let key: Vec<_> = columns.next()?.split_whitespace().collect();
        if key != [transport.to_owned(), format!("{from:?}"), format!("{to:?}")] {
            return None;
        }
        let mut names = || columns.next().unwrap_or_default().split_whitespace().collect();
        Some((names(), names()))
    })
}

fn set(attr: &mut QpAttr, name: &str, state: QpState, peer: &End) {
    match name {
        "cur" => attr.current_state = Some(state),
        "notify" => attr.notify_drained = Some(true),
        "access" => attr.access = Some(Access::REMOTE_READ),
        "pkey" => attr.pkey_index = Some(0),
        "port" => attr.port = Some(PortNum(1)),
        "qkey" => attr.qkey = Some(Qkey(77)),
        "av" => attr.address = Some(peer.address()),
        "mtu" => attr.path_mtu = Some(Mtu::Mtu512),
        "timeout" => attr.timeout = Some(AckTimeout::from_code(9)),
        "retry" => attr.retry_count = Some(3),
        "rnr" => attr.rnr_retry = Some(2),
        "rqpsn" => attr.rq_psn = Some(Psn::new(11)),
        "sqpsn" => attr.sq_psn = Some(Psn::new(12)),
        "rd" => attr.max_rd_atomic = Some(2),
        "destrd" => attr.max_dest_rd_atomic = Some(1),
        "minrnr" => attr.min_rnr_timer = Some(RnrTimer::from_code(5)),
        "dest" => attr.dest_qpn = Some(Qpn(0x1234)),
        _ => panic!("unknown attribute: {name}"),
    }
}

pub(super) fn attributes(names: &[&str], from: QpState, to: QpState, peer: &End) -> QpAttr {
    let mut attr = QpAttr::to_state(to);
    for name in names {
        set(&mut attr, name, from, peer);
    }
    attr
}

fn end_in(setup: &Setup, transport: Transport, state: QpState, peer: &End) -> End {
    let options = Options::of(transport);
    let end = End::new(&setup.a, &options);
    let path: &[QpState] = match state {
        QpState::Reset => &[],
        QpState::Init => &[QpState::Init],
        QpState::Rtr => &[QpState::Init, QpState::Rtr],
        QpState::Rts => &[QpState::Init, QpState::Rtr, QpState::Rts],
        QpState::Sqd => &[QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd],
        QpState::Err => &[QpState::Init, QpState::Err],
        QpState::Sqe => &[QpState::Init, QpState::Rtr, QpState::Rts],
    };
    for step in path {
        let attr = match step {
            QpState::Init => init(&options),
            QpState::Rtr => rtr(&options, peer),
            QpState::Rts => rts(&options),
            other => QpAttr::to_state(*other),
        };
        end.qp.modify(&attr).unwrap();
    }
    if state == QpState::Sqe {
        let nowhere = [Sge { addr: 8, length: 8, lkey: Lkey(0) }];
        match transport {
            Transport::Ud => end.send_to(1, peer, peer.qp.qpn(), QKEY, &nowhere).unwrap(),
            _ => end.send(1, SendOp::Send, &nowhere).unwrap(),
        }
        assert_eq!(outcome(&end.sent(1)), [(1, WcStatus::LOC_PROT_ERR)]);
    }
    if state == QpState::Sqd {
        end.drained();
    }
    assert_eq!(end.state(), state);
    end
}

/// Checks that `attr` is refused and changes nothing.
fn refused(end: &End, attr: &QpAttr, what: &str) -> SetupError {
    let before = end.qp.query().unwrap();
    let Err(error) = end.qp.modify(attr) else { panic!("{what}: accepted") };
    assert_eq!(end.qp.query().unwrap(), before, "{what}: refused, but the queue pair changed");
    error
}

#[test]
fn every_state_transition_follows_the_specification() {
    let setup = Setup::new();
    for (transport, name) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        let (mut legal, mut illegal) = (0, 0);
        for from in states(&setup, transport) {
            for to in QpState::ALL {
                let end = end_in(&setup, transport, from, &peer);
                let what = format!("{name} {from:?} to {to:?}");
                match row(name, from, to) {
                    Some((required, _)) => {
                        end.qp.modify(&attributes(&required, from, to, &peer)).unwrap_or_else(
                            |error| {
                                panic!("{what}: {error}");
                            },
                        );
                        assert_eq!(end.state(), to, "{what}");
                        legal += 1;
                    }
                    None => {
                        let error = refused(&end, &QpAttr::to_state(to), &what);
                        assert_eq!(
                            error,
                            SetupError::Transition(TransitionError::Illegal { from, to }),
                            "{what}"
                        );
                        for all in [init(&Options::of(transport)), rts(&Options::of(transport))] {
                            refused(&end, &QpAttr { state: Some(to), ..all }, &what);
                        }
                        illegal += 1;
                    }
                }
            }
        }
        // RC: 6 to RESET, 5 to ERR and 8 of the table, of 6 * 7. UC and UD: 7, 6 and 9, of 7 * 7.
        let sqe = transport != Transport::Rc && has_sqe(&setup);
        assert_eq!((legal, illegal), if sqe { (22, 27) } else { (19, 23) }, "{name}");
    }
}

#[test]
fn each_missing_attribute_is_refused_by_name() {
    let setup = Setup::new();
    let mut cases = 0;
    for (transport, name) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        for from in states(&setup, transport) {
            for to in QpState::ALL {
                let Some((required, _)) = row(name, from, to) else { continue };
                let end = end_in(&setup, transport, from, &peer);
                for missing in &required {
                    let what = format!("{name} {from:?} to {to:?} without {missing}");
                    let given: Vec<_> =
                        required.iter().copied().filter(|name| name != missing).collect();
                    let mut only = QpAttr::default();
                    set(&mut only, missing, from, &peer);
                    let error = refused(&end, &attributes(&given, from, to, &peer), &what);
                    let superfluous = tokio_rdma::types::QpAttrMask::empty();
                    let expected =
                        TransitionError::Attributes { from, to, missing: only.mask(), superfluous };
                    assert_eq!(error, SetupError::Transition(expected), "{what}");
                    cases += 1;
                }
            }
        }
    }
    // RC 3 + 6 + 5, UC 3 + 4 + 1, UD 3 + 0 + 1.
    assert_eq!(cases, 26);
}

#[test]
fn each_superfluous_attribute_is_refused_by_name() {
    let setup = Setup::new();
    let mut cases = 0;
    for (transport, name) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        for from in states(&setup, transport) {
            for to in QpState::ALL {
                let Some((required, optional)) = row(name, from, to) else { continue };
                let end = end_in(&setup, transport, from, &peer);
                for extra in NAMES {
                    if required.contains(&extra) || optional.contains(&extra) {
                        continue;
                    }
                    let what = format!("{name} {from:?} to {to:?} with {extra}");
                    let given: Vec<_> = required.iter().copied().chain([extra]).collect();
                    let mut only = QpAttr::default();
                    set(&mut only, extra, from, &peer);
                    let error = refused(&end, &attributes(&given, from, to, &peer), &what);
                    let missing = tokio_rdma::types::QpAttrMask::empty();
                    let expected =
                        TransitionError::Attributes { from, to, missing, superfluous: only.mask() };
                    assert_eq!(error, SetupError::Transition(expected), "{what}");
                    cases += 1;
                }
            }
        }
    }
    // 17 attributes of each legal transition, minus required (26) and optional ones (25 + 17 + 16).
    let expected = 17 * (19 + 22 + 22) - 26 - 58;
    // Two transports have three transitions from SQE each, one with two optional attributes.
    assert_eq!(cases, if has_sqe(&setup) { expected } else { expected - 17 * 6 + 4 });
}

#[test]
fn each_optional_attribute_is_applied() {
    let setup = Setup::new();
    for (transport, name) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        for from in states(&setup, transport) {
            for to in QpState::ALL {
                let Some((required, optional)) = row(name, from, to) else { continue };
                for extra in optional {
                    let what = format!("{name} {from:?} to {to:?} with {extra}");
                    let end = end_in(&setup, transport, from, &peer);
                    let (_, before) = end.qp.query().unwrap();
                    let given: Vec<_> = required.iter().copied().chain([extra]).collect();
                    let attr = attributes(&given, from, to, &peer);
                    if (transport, from, extra) == (Transport::Uc, QpState::Sqd, "av")
                        && !setup.is_software()
                    {
                        // With a new address the kernel also sets the port (`modify_qp` of uverbs),
                        // which is illegal for UC.
                        skip(&what, "the kernel's table refuses it");
                        refused(&end, &attr, &what);
                        continue;
                    }
                    end.qp.modify(&attr).unwrap_or_else(|error| panic!("{what}: {error}"));
                    let (state, after) = end.qp.query().unwrap();
                    assert_eq!(state, to, "{what}");
                    let expected = QpAttr {
                        state: Some(to),
                        current_state: after.current_state,
                        notify_drained: after.notify_drained,
                        access: attr.access.or(before.access),
                        pkey_index: attr.pkey_index.or(before.pkey_index),
                        port: attr.port.or(before.port),
                        qkey: attr.qkey.or(before.qkey),
                        address: attr.address.or(before.address),
                        path_mtu: attr.path_mtu.or(before.path_mtu),
                        timeout: attr.timeout.or(before.timeout),
                        retry_count: attr.retry_count.or(before.retry_count),
                        rnr_retry: attr.rnr_retry.or(before.rnr_retry),
                        rq_psn: attr.rq_psn.or(before.rq_psn),
                        sq_psn: attr.sq_psn.or(before.sq_psn),
                        max_rd_atomic: attr.max_rd_atomic.or(before.max_rd_atomic),
                        max_dest_rd_atomic: attr.max_dest_rd_atomic.or(before.max_dest_rd_atomic),
                        min_rnr_timer: attr.min_rnr_timer.or(before.min_rnr_timer),
                        dest_qpn: attr.dest_qpn.or(before.dest_qpn),
                    };
                    assert_eq!(after, expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn wrong_current_state_is_refused() {
    let setup = Setup::new();
    for (transport, name) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        for actual in [QpState::Rts, QpState::Sqd, QpState::Sqe] {
            if !states(&setup, transport).any(|state| state == actual) {
                continue;
            }
            let end = end_in(&setup, transport, actual, &peer);
            for claimed in QpState::ALL.into_iter().filter(|&state| state != actual) {
                let attr =
                    QpAttr { current_state: Some(claimed), ..QpAttr::to_state(QpState::Rts) };
                let error = refused(&end, &attr, name);
                assert_eq!(
                    error,
                    SetupError::Transition(TransitionError::NotInState { claimed, actual })
                );
            }
        }
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let setup = Setup::new();
    let options = Options::of(Transport::Rc);
    let peer = End::new(&setup.b, &options);
    let limits = setup.a.attr();
    let refuse = |state: QpState, attr: QpAttr| {
        let end = end_in(&setup, Transport::Rc, state, &peer);
        let unchecked = attr.pkey_index == Some(u16::MAX)
            || attr.max_dest_rd_atomic == Some(limits.max_qp_rd_atom + 1);
        if unchecked && setup.known(&rxe::TAKES_ANY_VALUE) {
            return end.qp.modify(&attr).unwrap();
        }
        // The kernel returns ENODATA for an unused entry of the GID table.
        let errno = if attr.address.is_some_and(|address| address.sgid_index == 255)
            && !setup.is_software()
        {
            61
        } else {
            22
        };
        match refused(&end, &attr, &format!("{attr:?}")) {
            SetupError::Verb(error) => {
                assert_eq!((error.verb, error.errno), ("ibv_modify_qp", errno))
            }
            other => panic!("{other:?}"),
        }
    };
    for port in [0, limits.ports + 1] {
        refuse(QpState::Reset, QpAttr { port: Some(PortNum(port)), ..init(&options) });
    }
    refuse(QpState::Reset, QpAttr { pkey_index: Some(u16::MAX), ..init(&options) });
    refuse(QpState::Init, QpAttr { dest_qpn: Some(Qpn(1 << 24)), ..rtr(&options, &peer) });
    refuse(
        QpState::Init,
        QpAttr { max_dest_rd_atomic: Some(limits.max_qp_rd_atom + 1), ..rtr(&options, &peer) },
    );
    let mut address = peer.address();
    address.sgid_index = 255;
    // With a LID, the GID index would not be used.
    address.dlid = 0;
    refuse(QpState::Init, QpAttr { address: Some(address), ..rtr(&options, &peer) });
    refuse(QpState::Rtr, QpAttr { retry_count: Some(8), ..rts(&options) });
    refuse(QpState::Rtr, QpAttr { rnr_retry: Some(8), ..rts(&options) });
    refuse(
        QpState::Rtr,
        QpAttr { max_rd_atomic: Some(limits.max_qp_init_rd_atom + 1), ..rts(&options) },
    );
}

#[test]
fn reset_clears_every_attribute() {
    let setup = Setup::new();
    for (transport, _) in TRANSPORTS {
        let peer = End::new(&setup.b, &Options::of(transport));
        for from in states(&setup, transport) {
            let end = end_in(&setup, transport, from, &peer);
            end.to(QpState::Reset);
            assert_eq!(end.qp.query().unwrap(), (QpState::Reset, QpAttr::to_state(QpState::Reset)));
        }
    }
}
