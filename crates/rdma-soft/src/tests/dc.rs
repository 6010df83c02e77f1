//! Dynamic connections on direct, simulated and UDP networks.

use super::*;
use rdma_provider::VerbError;
use rdma_provider::contract::{CqInit, Dct as _, DctInit, Srq as _};
use rdma_provider::types::{DcKey, DctTarget, DirectConfig, Imm, SrqCaps, WcOpcode, WcStatus};

const KEY: DcKey = DcKey(0x0123_4567_89ab_cdef);

/// A target and its objects. Fields drop in this order.
pub(super) struct TargetEnd {
    pub(super) dct: Dct,
    srq: Srq,
    cq: Cq,
    pd: Pd,
    context: Context,
}

#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) mtu: Mtu,
    pub(super) target_mtu: Mtu,
    pub(super) access: Access,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) rnr_retry: u8,
    pub(super) rnr_timer: u8,
    pub(super) rd_atomic: u8,
    pub(super) cqe: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::Mtu1024,
            target_mtu: Mtu::Mtu4096,
            access: Access::REMOTE_ALL,
            // Long enough that a busy machine does not look like an unreachable peer.
            timeout: 20,
            retries: 3,
            rnr_retry: 7,
            rnr_timer: 1,
            rd_atomic: 4,
            cqe: 1024,
        }
    }
}

impl TargetEnd {
    pub(super) fn new(network: &Network, name: &str, setup: &Setup) -> Self {
        let it = Self::reset(network, name, setup);
        it.to_rtr(setup);
        it
    }

    pub(super) fn reset(network: &Network, name: &str, setup: &Setup) -> Self {
        let context = network.open(name).unwrap();
        let pd = context.create_pd().unwrap();
        let cq = context.create_cq(&CqInit::new(setup.cqe)).unwrap();
        let srq = pd.create_srq(SrqCaps { max_wr: 256, max_sge: 2 }).unwrap();
        let dct = pd.create_dct(&DctInit { srq: &srq, recv_cq: &cq, key: KEY }).unwrap();
        Self { dct, srq, cq, pd, context }
    }

    fn to_rtr(&self, setup: &Setup) {
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            ..QpAttr::to_state(QpState::Init)
        };
        self.dct.modify(&QpAttr { access: Some(setup.access), ..init }).unwrap();
        assert_eq!(self.dct.number(), None, "no number before RTR");
        let rtr = QpAttr {
            address: Some(self.address()),
            path_mtu: Some(setup.target_mtu),
            min_rnr_timer: Some(RnrTimer::from_code(setup.rnr_timer)),
            ..QpAttr::to_state(QpState::Rtr)
        };
        self.dct.modify(&rtr).unwrap();
    }

    fn address(&self) -> AddressVector {
        AddressVector::new(PortNum(1), 0, self.context.port(PortNum(1)).unwrap().gids[0].gid)
    }

    pub(super) fn handle(&self) -> TargetHandle {
        TargetHandle { address: self.address(), number: self.dct.number().unwrap(), key: KEY }
    }

    pub(super) fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.pd, len, Access::LOCAL_WRITE | Access::REMOTE_ALL)
    }

    pub(super) fn recv(&self, wr_id: u64, sges: &[Sge]) {
        // SAFETY: buffers of a test outlive its queues.
        unsafe { self.srq.post_recv(&[RecvWr { wr_id: WrId(wr_id), sges }]) }.unwrap();
    }

    pub(super) fn poll(&self) -> Vec<WorkCompletion> {
        poll(&self.cq)
    }
}

#[derive(Clone, Copy)]
pub(super) struct TargetHandle {
    pub(super) address: AddressVector,
    pub(super) number: Qpn,
    pub(super) key: DcKey,
}

/// An initiator and its objects. Fields drop in this order.
pub(super) struct InitiatorEnd {
    pub(super) qp: Qp,
    cq: Cq,
    pd: Pd,
    network: Network,
}

impl InitiatorEnd {
    pub(super) fn new(network: &Network, name: &str, setup: &Setup) -> Self {
        let context = network.open(name).unwrap();
        let pd = context.create_pd().unwrap();
        let cq = context.create_cq(&CqInit::new(setup.cqe)).unwrap();
        let caps = QpCaps {
            max_send_wr: 256,
            max_send_sge: 4,
            max_recv_wr: 0,
            max_recv_sge: 0,
            max_inline: 64,
        };
        let init = QpInit {
            transport: Transport::Dci,
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            caps,
            direct: DirectConfig::DEFAULT,
        };
        let qp = pd.create_qp(&init).unwrap();
        let it = Self { qp, cq, pd, network: network.clone() };
        it.to_rts(setup);
        it
    }

    pub(super) fn to_rts(&self, setup: &Setup) {
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            ..QpAttr::to_state(QpState::Init)
        };
        self.qp.modify(&init).unwrap();
        self.qp
            .modify(&QpAttr { path_mtu: Some(setup.mtu), ..QpAttr::to_state(QpState::Rtr) })
            .unwrap();
        let rts = QpAttr {
            sq_psn: Some(Psn::new(0)),
            timeout: Some(AckTimeout::from_code(setup.timeout)),
            retry_count: Some(setup.retries),
            rnr_retry: Some(setup.rnr_retry),
            max_rd_atomic: Some(setup.rd_atomic),
            ..QpAttr::to_state(QpState::Rts)
        };
        self.qp.modify(&rts).unwrap();
    }

    /// Resets the initiator and returns it to RTS.
    fn repair(&self, setup: &Setup) {
        self.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        self.to_rts(setup);
    }

    pub(super) fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.pd, len, Access::LOCAL_WRITE)
    }

    pub(super) fn send(
        &self,
        wr_id: u64,
        op: SendOp,
        to: &TargetHandle,
        sges: &[Sge],
    ) -> Result<(), PostError> {
        let (address, number, key) = (&to.address, to.number, to.key);
        let target = DctTarget { address, handle: 0, number, key };
        let (flags, data) = (SendFlags::SIGNALED, Data::Sges(sges));
        let wr = SendWr { wr_id: WrId(wr_id), op, flags, data, target: Some(target.into()) };
        // SAFETY: buffers of a test outlive its queues.
        unsafe { self.qp.post_send([wr]) }
    }

    pub(super) fn poll(&self) -> Vec<WorkCompletion> {
        poll(&self.cq)
    }

    /// Returns completions, driving virtual time or waiting for the network.
    pub(super) fn wait(&self, count: usize) -> Vec<WorkCompletion> {
        wait(&self.network, &self.cq, count)
    }

    fn sessions(&self) -> u64 {
        self.qp.counters().0.sessions
    }
}

fn poll(cq: &Cq) -> Vec<WorkCompletion> {
    let mut out = [WorkCompletion::default(); 256];
    let count = cq.poll(&mut out).unwrap();
    out[..count].to_vec()
}

fn wait(network: &Network, cq: &Cq, count: usize) -> Vec<WorkCompletion> {
    let mut all = poll(cq);
    let start = Instant::now();
    while all.len() < count {
        if !network.step() {
            assert!(start.elapsed() < HANG, "missing completions: {all:?}");
            std::thread::yield_now();
        }
        all.extend(poll(cq));
    }
    assert_eq!(all.len(), count, "{all:?}");
    all
}

/// Returns one network of each kind with devices `a` to `d`.
fn networks() -> Vec<(&'static str, Network)> {
    vec![
        ("direct", Network::new()),
        (
            "simulated",
            Network::simulated(
                7,
                Faults::none().delay(Duration::from_micros(1)..Duration::from_micros(5)),
            ),
        ),
        ("UDP", over_udp(&["a", "b", "c", "d"])),
    ]
}

#[test]
fn target_has_a_number_from_rtr_and_refuses_rts() {
    let setup = Setup::default();
    let it = TargetEnd::reset(&Network::new(), "a", &setup);
    assert_eq!((it.dct.number(), it.dct.query().unwrap().0), (None, QpState::Reset));
    assert!(it.dct.modify(&QpAttr::to_state(QpState::Rtr)).is_err());
    it.to_rtr(&setup);
    let number = it.dct.number().unwrap();
    assert_eq!(it.dct.query().unwrap().0, QpState::Rtr);
    assert_eq!(it.dct.query().unwrap().1.path_mtu, Some(Mtu::Mtu4096));
    assert!(it.dct.modify(&QpAttr::to_state(QpState::Rts)).is_err());
    assert!(it.dct.modify(&QpAttr::to_state(QpState::Reset)).is_err());
    assert_eq!(it.dct.number(), Some(number));
    let other = TargetEnd::new(&Network::new(), "a", &setup);
    assert!(other.dct.number().is_some_and(|number| number.0 > 1));
}

#[test]
fn every_operation_reaches_every_target() {
    for (kind, network) in networks() {
        let setup = Setup::default();
        let a = InitiatorEnd::new(&network, "a", &setup);
        let targets: Vec<_> =
            ["a", "b", "c"].iter().map(|name| TargetEnd::new(&network, name, &setup)).collect();
        let len = 5000;
        let source = a.buffer(len);
        source.fill((0..len).map(|at| (at * 7) as u8));
        for (index, target) in targets.iter().enumerate() {
            let handle = target.handle();
            let (memory, inbox, back) = (target.buffer(len + 8), target.buffer(len), a.buffer(len));
            let word = memory.remote(len);
            for wr_id in 0..3 {
                target.recv(wr_id, &[inbox.sge(0, len)]);
            }
            let original = a.buffer(16);
            let imm = Imm(0x1000 + index as u32);
            a.send(0, SendOp::Write(memory.remote(0)), &handle, &[source.sge(0, len)]).unwrap();
            a.send(1, SendOp::Read(memory.remote(0)), &handle, &[back.sge(0, len)]).unwrap();
            a.send(2, SendOp::Send, &handle, &[source.sge(0, len)]).unwrap();
            a.send(3, SendOp::SendWithImm(imm), &handle, &[source.sge(0, 9)]).unwrap();
            a.send(4, SendOp::WriteWithImm(memory.remote(8), imm), &handle, &[source.sge(8, 100)])
                .unwrap();
            a.send(5, SendOp::FetchAdd { remote: word, add: 41 }, &handle, &[original.sge(0, 8)])
                .unwrap();
            let swap = SendOp::CompareSwap { remote: word, compare: 41, swap: 5 };
            a.send(6, swap, &handle, &[original.sge(8, 8)]).unwrap();
            let done = a.wait(7);
            let expected: Vec<_> = (0..7).map(|wr_id| (wr_id, WcStatus::SUCCESS)).collect();
            assert_eq!(outcome(&done), expected, "{kind}");
            assert_eq!(back.bytes(0, len), source.bytes(0, len));
            assert_eq!((original.word(0), original.word(8), memory.word(len)), (0, 41, 5));
            let received = wait(&network, &target.cq, 3);
            let seen: Vec<_> =
                received.iter().map(|it| (it.wr_id.0, it.opcode, it.byte_len, it.imm())).collect();
            let expected = [
                (0, WcOpcode::RECV, len as u32, None),
                (1, WcOpcode::RECV, 9, Some(imm)),
                (2, WcOpcode::RECV_RDMA_WITH_IMM, 100, Some(imm)),
            ];
            assert_eq!(seen, expected, "{kind}");
            assert!(
                received.iter().all(|it| it.qpn == handle.number),
                "completions name the target"
            );
        }
        assert_eq!(a.sessions(), 3, "{kind}: one for each target");
        assert!(network.now() > Duration::ZERO || kind == "direct");
        network.run_until_idle(Duration::from_secs(1));
        let start = Instant::now();
        let open = || targets.iter().map(|target| target.dct.counters().open).collect::<Vec<_>>();
        while open() != [0, 0, 1] {
            assert!(start.elapsed() < HANG, "{kind}: {:?}", open());
        }
    }
}

#[test]
fn alternating_targets_opens_a_session_each_time_in_order() {
    for (kind, network) in networks() {
        let setup = Setup::default();
        let a = InitiatorEnd::new(&network, "a", &setup);
        let targets =
            [TargetEnd::new(&network, "b", &setup), TargetEnd::new(&network, "c", &setup)];
        let source = a.buffer(800);
        source.fill((0..800).map(|at| at as u8));
        let memories = [targets[0].buffer(800), targets[1].buffer(800)];
        for index in 0..100 {
            let (target, memory) = (&targets[index % 2], &memories[index % 2]);
            let write = SendOp::Write(memory.remote(index * 8));
            a.send(index as u64, write, &target.handle(), &[source.sge(index * 8, 8)]).unwrap();
        }
        let done = a.wait(100);
        assert!(
            done.iter()
                .enumerate()
                .all(|(at, it)| it.wr_id.0 == at as u64 && it.status == WcStatus::SUCCESS)
        );
        for index in 0..100 {
            assert_eq!(
                memories[index % 2].bytes(index * 8, 8),
                source.bytes(index * 8, 8),
                "{kind} {index}"
            );
            assert_eq!(memories[(index + 1) % 2].word(index * 8), 0);
        }
        assert_eq!(a.sessions(), 100, "{kind}");
        for wr_id in 0..10 {
            a.send(
                wr_id,
                SendOp::Write(memories[1].remote(0)),
                &targets[1].handle(),
                &[source.sge(0, 8)],
            )
            .unwrap();
        }
        a.wait(10);
        assert_eq!(a.sessions(), 100, "{kind}");
    }
}

#[test]
fn wrong_key_or_mtu_fails_only_its_initiator() {
    for (kind, network) in networks() {
        let setup = Setup::default();
        let small = Setup { target_mtu: Mtu::Mtu512, ..setup };
        let (good, bad) =
            (InitiatorEnd::new(&network, "a", &setup), InitiatorEnd::new(&network, "b", &setup));
        let (target, narrow) =
            (TargetEnd::new(&network, "c", &setup), TargetEnd::new(&network, "c", &small));
        let memory = target.buffer(8);
        let (word, other) = (good.buffer(8), bad.buffer(8));
        word.fill([1; 8]);
        other.fill([2; 8]);
        let handle = target.handle();
        good.send(0, SendOp::Write(memory.remote(0)), &handle, &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&good.wait(1)), [(0, WcStatus::SUCCESS)], "{kind}");
        let guess = TargetHandle { key: DcKey(KEY.0 ^ 1), ..handle };
        bad.send(1, SendOp::Write(memory.remote(0)), &guess, &[other.sge(0, 8)]).unwrap();
        bad.send(2, SendOp::Write(memory.remote(0)), &handle, &[other.sge(0, 8)]).unwrap();
        let done = outcome(&bad.wait(2));
        assert_eq!(done, [(1, WcStatus::REM_ACCESS_ERR), (2, WcStatus::WR_FLUSH_ERR)], "{kind}");
        assert_eq!(bad.qp.query().unwrap().0, QpState::Err);
        assert_eq!(memory.bytes(0, 8), [1; 8]);
        bad.repair(&setup);
        bad.send(3, SendOp::Write(memory.remote(0)), &narrow.handle(), &[other.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&bad.wait(1)), [(3, WcStatus::REM_INV_REQ_ERR)], "{kind}");
        good.send(4, SendOp::Read(memory.remote(0)), &handle, &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&good.wait(1)), [(4, WcStatus::SUCCESS)], "{kind}");
        assert_eq!((target.dct.counters().refused, narrow.dct.counters().refused), (1, 1));
    }
}

#[test]
fn unknown_and_destroyed_targets_do_not_answer() {
    for (kind, network) in networks() {
        let setup = Setup::default();
        let hasty = Setup { timeout: 8, retries: 1, ..setup };
        let a = InitiatorEnd::new(&network, "a", &hasty);
        let target = TargetEnd::new(&network, "b", &setup);
        let memory = target.buffer(8);
        let word = a.buffer(8);
        let (handle, write) = (target.handle(), SendOp::Write(memory.remote(0)));
        let missing = TargetHandle { number: Qpn(handle.number.0 ^ 0x10), ..handle };
        a.send(0, write, &missing, &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(0, WcStatus::RETRY_EXC_ERR)], "{kind}");
        a.repair(&setup);
        a.send(1, write, &handle, &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)], "{kind}");
        a.repair(&hasty);
        drop(target);
        a.send(2, write, &handle, &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(2, WcStatus::RETRY_EXC_ERR)], "{kind}");
        let target = TargetEnd::new(&network, "b", &setup);
        let memory = target.buffer(8);
        a.repair(&setup);
        a.send(3, SendOp::Write(memory.remote(0)), &target.handle(), &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(3, WcStatus::SUCCESS)], "{kind}");
    }
}

#[test]
fn target_access_and_bounds_are_enforced() {
    for (kind, network) in networks() {
        let setup = Setup { access: Access::REMOTE_WRITE, ..Setup::default() };
        let a = InitiatorEnd::new(&network, "a", &setup);
        let b = InitiatorEnd::new(&network, "b", &setup);
        let target = TargetEnd::new(&network, "c", &setup);
        let memory = target.buffer(64);
        let elsewhere = TargetEnd::new(&network, "c", &setup);
        let foreign = elsewhere.buffer(64);
        let word = a.buffer(64);
        let handle = target.handle();
        let other = b.buffer(8);
        b.send(0, SendOp::Write(memory.remote(0)), &handle, &[other.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(0, WcStatus::SUCCESS)]);
        let cases = [
            (SendOp::Read(memory.remote(0)), 8, WcStatus::REM_INV_REQ_ERR),
            (SendOp::FetchAdd { remote: memory.remote(0), add: 1 }, 8, WcStatus::REM_INV_REQ_ERR),
            (SendOp::Write(memory.remote(60)), 8, WcStatus::REM_ACCESS_ERR),
            (SendOp::Write(foreign.remote(0)), 8, WcStatus::REM_ACCESS_ERR),
        ];
        for (op, len, status) in cases {
            a.send(1, op, &handle, &[word.sge(0, len)]).unwrap();
            assert_eq!(outcome(&a.wait(1)), [(1, status)], "{kind} {op:?}");
            a.repair(&setup);
        }
        b.send(2, SendOp::Write(memory.remote(8)), &handle, &[other.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(2, WcStatus::SUCCESS)], "{kind}");
        assert_eq!(b.sessions(), 1);
        assert_eq!(target.dct.query().unwrap().0, QpState::Rtr);
    }
}

#[test]
fn empty_receive_queue_delays_the_initiator() {
    for (kind, network) in networks() {
        let setup = Setup { rnr_retry: 2, ..Setup::default() };
        let a = InitiatorEnd::new(&network, "a", &setup);
        let target = TargetEnd::new(&network, "b", &setup);
        let (word, inbox) = (a.buffer(8), target.buffer(64));
        a.send(0, SendOp::Send, &target.handle(), &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(0, WcStatus::RNR_RETRY_EXC_ERR)], "{kind}");
        a.repair(&Setup { rnr_retry: 7, ..setup });
        a.send(1, SendOp::Send, &target.handle(), &[word.sge(0, 8)]).unwrap();
        assert_eq!(a.poll().len(), 0);
        target.recv(7, &[inbox.sge(0, 64)]);
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)], "{kind}");
        assert_eq!(outcome(&wait(&network, &target.cq, 1)), [(7, WcStatus::SUCCESS)]);
        // The message is too long for its receive: both ends fail it.
        target.recv(8, &[inbox.sge(0, 4)]);
        a.send(2, SendOp::Send, &target.handle(), &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(2, WcStatus::REM_INV_REQ_ERR)], "{kind}");
        assert_eq!(outcome(&wait(&network, &target.cq, 1)), [(8, WcStatus::LOC_LEN_ERR)]);
    }
}

#[test]
fn unsupported_initiator_work_is_refused_when_posted() {
    let network = Network::new();
    let setup = Setup::default();
    let a = InitiatorEnd::new(&network, "a", &setup);
    let target = TargetEnd::new(&network, "b", &setup);
    let word = a.buffer(8);
    let refused =
        |result: Result<(), PostError>| result.unwrap_err().error.errno == VerbError::EINVAL;
    let handle = target.handle();
    assert!(refused(a.send(0, SendOp::SendWithInvalidate(Rkey(1)), &handle, &[word.sge(0, 8)])));
    assert!(refused(a.send(0, SendOp::LocalInvalidate(Rkey(1)), &handle, &[])));
    let far = AddressVector::new(PortNum(2), 0, handle.address.dgid);
    assert!(refused(a.send(
        0,
        SendOp::Send,
        &TargetHandle { address: far, ..handle },
        &[word.sge(0, 8)]
    )));
    let wr = SendWr {
        wr_id: WrId(0),
        op: SendOp::Send,
        flags: SendFlags::empty(),
        data: Data::Inline(&[]),
        target: None,
    };
    // SAFETY: it names no memory.
    assert!(refused(unsafe { a.qp.post_send([wr]) }));
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let init = QpInit {
        transport: Transport::Dci,
        send_cq: &a.cq,
        recv_cq: &a.cq,
        srq: None,
        caps,
        direct: DirectConfig::DEFAULT,
    };
    assert!(a.pd.create_qp(&init).is_err(), "an initiator has no receive queue");
    let caps = QpCaps { max_recv_wr: 0, ..caps };
    let init = QpInit {
        transport: Transport::Dci,
        send_cq: &a.cq,
        recv_cq: &a.cq,
        srq: Some(&target.srq),
        caps,
        direct: DirectConfig::DEFAULT,
    };
    assert!(a.pd.create_qp(&init).is_err());
    assert!(
        a.pd.create_dct(&DctInit { srq: &target.srq, recv_cq: &a.cq, key: KEY }).is_err(),
        "shared receive queue of another device"
    );
}

#[test]
fn receive_of_incomplete_message_returns_to_the_queue() {
    let network = Network::simulated(
        3,
        Faults::none().delay(Duration::from_micros(5)..Duration::from_micros(6)),
    );
    let setup = Setup { mtu: Mtu::Mtu256, ..Setup::default() };
    for case in 0..3 {
        let target = TargetEnd::new(&network, "b", &setup);
        let inbox = target.buffer(100_000);
        target.recv(1, &[inbox.sge(0, 100_000)]);
        let a = InitiatorEnd::new(&network, "a", &setup);
        let source = a.buffer(100_000);
        a.send(0, SendOp::Send, &target.handle(), &[source.sge(0, 100_000)]).unwrap();
        while target.dct.counters().packets < 40 {
            assert!(network.step());
        }
        let b = InitiatorEnd::new(&network, "c", &setup);
        match case {
            0 => drop(a),
            1 => a.repair(&setup),
            _ => {
                // All packets are lost, and the initiator returns with another session.
                let loss = Faults::none().loss(1.0);
                network.set_faults(loss);
                a.repair(&setup);
                network.set_faults(Faults::none());
                let word = a.buffer(8);
                a.send(1, SendOp::Write(inbox.remote(0)), &target.handle(), &[word.sge(0, 8)])
                    .unwrap();
                assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
            }
        }
        network.run_until_idle(Duration::from_millis(1));
        let word = b.buffer(8);
        b.send(2, SendOp::Send, &target.handle(), &[word.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(2, WcStatus::SUCCESS)], "case {case}");
        assert_eq!(outcome(&target.poll()), [(1, WcStatus::SUCCESS)], "case {case}");
        network.run_until_idle(Duration::from_secs(1));
    }
}

#[test]
fn completion_queue_overrun_and_device_loss_fail_the_target() {
    let network = Network::new();
    let setup = Setup { timeout: 8, retries: 1, ..Setup::default() };
    let a = InitiatorEnd::new(&network, "a", &setup);
    let target = TargetEnd::new(&network, "b", &Setup { cqe: 1, ..setup });
    let word = a.buffer(8);
    target.recv(1, &[]);
    target.recv(2, &[]);
    let handle = target.handle();
    for wr_id in 0..2 {
        a.send(wr_id, SendOp::Send, &handle, &[]).unwrap();
    }
    a.wait(2);
    assert_eq!(target.dct.query().unwrap().0, QpState::Err);
    let events: Vec<_> = std::iter::from_fn(|| target.context.next_event().unwrap()).collect();
    assert!(events.contains(&AsyncEvent::QpFatal(handle.number)), "{events:?}");
    let other = TargetEnd::new(&network, "c", &setup);
    let memory = other.buffer(8);
    let handle = other.handle();
    a.repair(&setup);
    a.send(3, SendOp::Write(memory.remote(0)), &handle, &[word.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(3, WcStatus::SUCCESS)]);
    network.control("c").unwrap().kill();
    assert_eq!(other.dct.query().unwrap().0, QpState::Err);
    a.send(4, SendOp::Write(memory.remote(0)), &handle, &[word.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(4, WcStatus::RETRY_EXC_ERR)]);
}

#[test]
fn large_dc_messages_arrive_in_both_directions() {
    for (kind, network) in networks() {
        let setup = Setup { mtu: Mtu::Mtu4096, timeout: 16, retries: 7, ..Setup::default() };
        let a = InitiatorEnd::new(&network, "a", &setup);
        let target = TargetEnd::new(&network, "b", &setup);
        let len = 2 << 20;
        let (source, memory, back) = (a.buffer(len), target.buffer(len), a.buffer(len));
        source.fill((0..len).map(|at| (at % 251) as u8));
        a.send(0, SendOp::Write(memory.remote(0)), &target.handle(), &[source.sge(0, len)])
            .unwrap();
        a.send(1, SendOp::Read(memory.remote(0)), &target.handle(), &[back.sge(0, len)]).unwrap();
        assert_eq!(outcome(&a.wait(2)), [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)], "{kind}");
        assert_eq!(back.bytes(0, len), source.bytes(0, len), "{kind}");
    }
}

#[test]
fn many_initiators_share_the_window_of_their_targets() {
    const CROWD: u64 = 200;
    let network = over_udp(&["a", "b", "c"]);
    // Some packets do not fit the receive buffers of UDP.
    let setup = Setup { mtu: Mtu::Mtu4096, cqe: 8, timeout: 16, retries: 7, ..Setup::default() };
    let targets = ["b", "c"].map(|name| TargetEnd::new(&network, name, &setup));
    let initiators: Vec<_> = (0..CROWD).map(|_| InitiatorEnd::new(&network, "a", &setup)).collect();
    let device = &initiators[0].qp.0.device;
    device.endpoint().unwrap().limit_receive_buffer();
    let len = 24 << 10;
    let memory = targets.each_ref().map(|target| target.buffer(len));
    memory[0].fill((0..len).map(|at| at as u8));
    let back: Vec<_> = initiators.iter().map(|it| it.buffer(len)).collect();
    for (it, back) in initiators.iter().zip(&back) {
        for wr_id in 0..4 {
            let to = wr_id as usize % 2;
            let op = [SendOp::Read(memory[0].remote(0)), SendOp::Write(memory[1].remote(0))][to];
            it.send(wr_id, op, &targets[to].handle(), &[back.sge(0, len)]).unwrap();
        }
    }
    let expected: Vec<_> = (0..4).map(|wr_id| (wr_id, WcStatus::SUCCESS)).collect();
    for (it, back) in initiators.iter().zip(&back) {
        assert_eq!(outcome(&it.wait(4)), expected);
        assert_eq!(back.bytes(0, len), memory[0].bytes(0, len));
    }
    assert_eq!(memory[1].bytes(0, len), memory[0].bytes(0, len));
    let idle = |it: &InitiatorEnd| !it.qp.0.sender.lock().holds_window();
    assert!(initiators.iter().all(idle), "nothing is in flight");
}
