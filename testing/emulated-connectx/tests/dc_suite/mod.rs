//! DC tests for both link layers.

use std::sync::Arc;

use rdma_ibverbs::ffi::*;

use crate::common::*;
use crate::device;

/// A node with an initiator and two targets.
struct Node {
    dci: Qp,
    targets: [Qp; 2],
    srq: Arc<Srq>,
    ah: Arc<Ah>,
    source: Mr,
    memory: Mr,
    /// Completion queue of the targets.
    arrived: Arc<Cq>,
    pd: Arc<Pd>,
}

impl Node {
    fn new() -> Self {
        let context = Context::open(0);
        let pd = Pd::new(&context);
        let (sent, arrived) = (Cq::new(&context, 63), Cq::new(&context, 63));
        let srq = Srq::new(&pd, 15, 2);
        let targets = [dc_target(&pd, &arrived, &srq), dc_target(&pd, &arrived, &srq)];
        let dci = dc_initiator(&pd, &sent);
        let ah = Ah::new(&pd, &context.route());
        let (mut source, memory) = (Mr::new(&pd, 4096, LOCAL), Mr::new(&pd, 4096, ALL));
        source.fill(|at| (at * 5 + 1) as u8);
        Self { dci, targets, srq, ah, source, memory, arrived, pd }
    }

    fn to(&self, target: usize) -> To<'_> {
        (&self.ah, self.targets[target].number(), KEY)
    }

    fn cq(&self) -> &Cq {
        &self.dci.queues.send
    }

    fn works(&self) {
        post_dc(
            &self.dci,
            &[(99, Dc::Write(self.source.sge(40, 64), &self.memory, 2000), self.to(0))],
        );
        self.cq().ok(99);
        assert_eq!(self.memory.bytes()[2000..2064], self.source.bytes()[40..104]);
    }

    fn repair(&self) {
        assert_eq!(self.dci.state(), ibv_qp_state::IBV_QPS_ERR);
        assert_eq!(self.dci.to(ibv_qp_state::IBV_QPS_RESET), 0);
        dc_initiator_up(&self.dci, |_| {});
        self.works();
    }
}

#[test]
fn one_initiator_alternates_between_two_targets() {
    let device = device();
    let node = Node::new();
    assert_ne!(node.targets[0].number(), node.targets[1].number());
    for round in 0..100 {
        let write = Dc::Write(node.source.sge(round, 512), &node.memory, 0);
        post_dc(&node.dci, &[(round as u64, write, node.to(round % 2))]);
        node.cq().ok(round as u64);
        assert_eq!(node.memory.bytes()[..512], node.source.bytes()[round..round + 512]);
    }
    device.assert_clean();
}

#[test]
fn batches_to_both_targets_with_one_doorbell() {
    let device = device();
    let mut node = Node::new();
    node.memory.set_word(100, 7);
    let requests = [
        (1, Dc::WriteInline(b"a few bytes that are in the entry", &node.memory, 1), node.to(0)),
        (2, Dc::Read(node.source.sge(3000, 33), &node.memory, 1), node.to(1)),
        (3, Dc::FetchAdd(node.source.sge(0, 8), &node.memory, 800, 3), node.to(0)),
        (4, Dc::CompareSwap(node.source.sge(8, 8), &node.memory, 800, 10, 99), node.to(1)),
    ];
    post_dc(&node.dci, &requests);
    for id in 1..=4 {
        node.cq().ok(id);
    }
    assert_eq!(node.source.bytes()[3000..3033], *b"a few bytes that are in the entry");
    assert_eq!((node.source.word(0), node.source.word(1), node.memory.word(100)), (7, 10, 99));
    device.assert_clean();
}

#[test]
fn sends_use_the_shared_receives_of_the_target() {
    let device = device();
    let node = Node::new();
    for round in 0..50_usize {
        node.srq
            .post(500 + round as u64, vec![node.memory.sge(0, 100), node.memory.sge(1000, 156)]);
        post_dc(&node.dci, &[(1, Dc::Send(node.source.sge(round, 200)), node.to(round % 2))]);
        node.cq().ok(1);
        let wc = node.arrived.ok(500 + round as u64);
        assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_RECV, 200));
        let memory = node.memory.bytes();
        assert_eq!(
            [&memory[..100], &memory[1000..1100]].concat(),
            node.source.bytes()[round..round + 200]
        );
    }
    node.srq.post(1, vec![]);
    post_dc(&node.dci, &[(2, Dc::WriteImm(node.source.sge(0, 8), &node.memory, 0, 5), node.to(0))]);
    let wc = node.arrived.ok(1);
    assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, 8));
    node.cq().ok(2);
    device.assert_clean();
}

#[test]
fn emulated_wrong_key_breaks_the_initiator_until_repaired() {
    let device = device();
    let node = Node::new();
    let (ah, number, key) = node.to(0);
    let write = Dc::Write(node.source.sge(0, 64), &node.memory, 0);
    post_dc(
        &node.dci,
        &[(6, write, (ah, number, key + 1)), (7, write, node.to(0)), (8, write, node.to(1))],
    );
    node.cq().fails_with(6, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    node.cq().fails_with(7, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    node.cq().fails_with(8, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    node.repair();
    device.assert_clean();
}

#[test]
fn emulated_unknown_target_breaks_the_initiator_until_repaired() {
    let device = device();
    let node = Node::new();
    let write = Dc::Write(node.source.sge(0, 64), &node.memory, 0);
    // An unused number, and the number of a queue pair that is no target.
    for number in [0xff_fff0, node.dci.number()] {
        post_dc(&node.dci, &[(6, write, (&node.ah, number, KEY))]);
        node.cq().fails_with(6, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        node.repair();
    }
    device.assert_clean();
}

#[test]
fn emulated_target_destroyed_under_load_fails_its_initiator() {
    let device = device();
    let node = Node::new();
    let gone = dc_target(&node.pd, &node.arrived, &node.srq);
    let number = gone.number();
    let write = Dc::Write(node.source.sge(0, 64), &node.memory, 0);
    let mut gone = Some(gone);
    let (mut posted, mut failed, mut flushed) = (0, 0, 0);
    for round in 0..40 {
        if round == 10 {
            gone = None;
        }
        post_dc(&node.dci, &[(round, write, (&node.ah, number, KEY)), (round, write, node.to(1))]);
        posted += 2;
        for _ in 0..2 {
            posted -= 1;
            match node.cq().next().status {
                ibv_wc_status::IBV_WC_SUCCESS => assert!(gone.is_some(), "round {round}"),
                ibv_wc_status::IBV_WC_RETRY_EXC_ERR => failed += 1,
                ibv_wc_status::IBV_WC_WR_FLUSH_ERR => flushed += 1,
                other => panic!("status {other}"),
            }
        }
        if failed > 0 {
            break;
        }
    }
    assert_eq!((posted, failed, flushed), (0, 1, 1));
    node.repair();
    device.assert_clean();
}

#[test]
fn access_violation_breaks_the_initiator_and_not_the_target() {
    let device = device();
    let node = Node::new();
    let other = dc_initiator(&node.pd, &Cq::new(&node.pd.1, 15));
    // Memory without remote write access.
    post_dc(&node.dci, &[(1, Dc::Write(node.source.sge(0, 8), &node.source, 0), node.to(0))]);
    node.cq().fails_with(1, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    post_dc(&other, &[(2, Dc::Write(node.source.sge(0, 8), &node.memory, 0), node.to(0))]);
    other.queues.send.ok(2);
    node.srq.post(3, vec![node.memory.sge(0, 8)]);
    post_dc(&other, &[(4, Dc::Send(node.source.sge(0, 9)), node.to(0))]);
    node.arrived.fails_with(3, ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    other.queues.send.fails_with(4, ibv_wc_status::IBV_WC_REM_INV_REQ_ERR);
    node.repair();
    assert!(!node.pd.1.has_event());
    device.assert_clean();
}

#[test]
fn empty_shared_queue_is_retried_and_then_an_error() {
    let device = device();
    let node = Node::new();
    let before = device.counters().rnr_naks;
    post_dc(&node.dci, &[(1, Dc::Send(node.source.sge(0, 8)), node.to(0))]);
    node.cq().fails_with(1, ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR);
    // The first attempt, and the initiator's retries.
    assert!(device.counters().rnr_naks >= before + 4);
    node.repair();
    device.assert_clean();
}

#[test]
fn states_of_targets_and_initiators() {
    let device = device();
    let node = Node::new();
    assert_eq!(node.targets[0].to(ibv_qp_state::IBV_QPS_RTS), libc::EINVAL);
    assert_eq!(node.dci.to(ibv_qp_state::IBV_QPS_INIT), libc::EINVAL);
    assert_eq!(node.dci.state(), ibv_qp_state::IBV_QPS_RTS);
    let target = dc_target_at_reset(&node.pd, &node.arrived, &node.srq);
    let mut attr: ibv_qp_attr = zeroed();
    attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
    attr.port_num = 1;
    let mask = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_PORT;
    assert_ne!(target.modify(&attr, mask), 0, "access flags and P_Key are missing");
    dc_target_up(&target, node.pd.1.route());
    device.assert_clean();
}

#[test]
fn several_threads_write_to_each_other_through_one_initiator_each() {
    let device = device();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(1);
    let nodes: Vec<_> = (0..4).map(|_| Node::new()).collect();
    let peers: Vec<_> =
        nodes.iter().map(|node| (node.targets[0].number(), node.targets[1].number())).collect();
    let memories: Vec<_> = nodes.iter().map(|node| &node.memory).collect();
    std::thread::scope(|scope| {
        for (own, node) in nodes.iter().enumerate() {
            let (peers, memories) = (&peers, &memories);
            // Each node writes to its own place in every memory.
            let memories: Vec<_> =
                memories.iter().map(|memory| (memory.address(), memory.key())).collect();
            let node = Shared(node);
            scope.spawn(move || {
                let node = node.get();
                for round in 0.. {
                    let mut posted = 0;
                    for (to, &(first, second)) in peers.iter().enumerate() {
                        let number = if round % 2 == 0 { first } else { second };
                        let from = node.source.sge((round + to) % 1000, 64);
                        let place = Place {
                            address: memories[to].0 + 64 * own as u64,
                            key: memories[to].1,
                        };
                        write_to(&node.dci, to as u64, from, place, (&node.ah, number, KEY));
                        posted += 1;
                    }
                    for _ in 0..posted {
                        assert_eq!(node.cq().next().status, ibv_wc_status::IBV_WC_SUCCESS);
                    }
                    if std::time::Instant::now() >= deadline {
                        return;
                    }
                }
            });
        }
    });
    device.assert_clean();
}

#[test]
fn ten_thousand_targets_through_eight_initiators() {
    const TARGETS: usize = 10_000;
    let device = device();
    let node = Node::new();
    let targets: Vec<_> =
        (0..TARGETS).map(|_| dc_target(&node.pd, &node.arrived, &node.srq)).collect();
    let numbers: std::collections::HashSet<_> = targets.iter().map(Qp::number).collect();
    assert_eq!(numbers.len(), TARGETS);
    let initiators: Vec<_> =
        (0..8).map(|_| dc_initiator(&node.pd, &Cq::new(&node.pd.1, 31))).collect();
    for (batch, chunk) in targets.chunks(8).enumerate() {
        let initiator = &initiators[batch % 8];
        let add = |target: &Qp| {
            let add = Dc::FetchAdd(node.source.sge(0, 8), &node.memory, 64, 1);
            (1, add, (&*node.ah, target.number(), KEY))
        };
        post_dc(initiator, &chunk.iter().map(add).collect::<Vec<_>>());
        chunk.iter().for_each(|_| assert_eq!(initiator.queues.send.ok(1).byte_len, 8));
    }
    assert_eq!(node.memory.word(8), TARGETS as u64);
    device.assert_clean();
}

/// A node shared by threads that use different parts of it.
struct Shared<'a>(&'a Node);
// SAFETY: verbs are thread-safe; one thread only uses the other parts.
unsafe impl Send for Shared<'_> {}

impl<'a> Shared<'a> {
    fn get(&self) -> &'a Node {
        self.0
    }
}

#[derive(Clone, Copy)]
struct Place {
    address: u64,
    key: u32,
}

fn write_to(qp: &Qp, id: u64, from: ibv_sge, place: Place, (ah, number, key): To<'_>) {
    // SAFETY: the queue pair has extended operations, and all objects are alive.
    unsafe {
        let x = ibv_qp_to_qp_ex(qp.raw);
        ibv_wr_start(x);
        ((*x).wr_id, (*x).wr_flags) = (id, SIGNALED);
        ibv_wr_rdma_write(x, place.key, place.address);
        ibv_wr_set_sge(x, from.lkey, from.addr, from.length);
        mlx5dv_wr_set_dc_addr(mlx5dv_qp_ex_from_ibv_qp_ex(x), ah.0, number, key);
        assert_eq!(ibv_wr_complete(x), 0);
    }
}
