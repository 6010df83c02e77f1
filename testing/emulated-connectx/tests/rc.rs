//! Reliable and unreliable connections on the emulated device, through libibverbs and libmlx5.

mod common;

use common::*;
use emulated_connectx::EmulatedConnectX;
use rdma_ibverbs::ffi::*;

fn device() -> EmulatedConnectX {
    start(|_| {})
}

#[test]
fn writes_and_reads() {
    let device = device();
    let pair = Pair::new(RC);
    for round in 0..200_u64 {
        let from = (round % 64) as usize;
        pair.a.post(Work::write(round, vec![pair.source.sge(from, 1000)], &pair.target, 8));
        pair.a.queues.send.ok(round);
        assert_eq!(pair.target.bytes()[8..1008], pair.source.bytes()[from..from + 1000]);
    }
    let mut into = Mr::new(&pair.pd, 4096, LOCAL);
    into.fill(|_| 0);
    pair.a.post(Work::read(7, vec![into.sge(0, 300), into.sge(1000, 708)], &pair.target, 0));
    let wc = pair.a.queues.send.ok(7);
    assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_RDMA_READ, 1008));
    let (read, target) = (into.bytes(), pair.target.bytes());
    assert_eq!((&read[..300], &read[1000..1708]), (&target[..300], &target[300..1008]));
    device.assert_clean();
}

#[test]
fn inline_data_and_lists_wrap_around_the_queue() {
    let device = device();
    let mut pair = Pair::new(RC);
    for round in 0..300_u64 {
        pair.source.fill(|at| (at as u64 + round) as u8);
        let inline = vec![pair.source.sge(3, 20), pair.source.sge(100, 30)];
        let list = (0..4).map(|part| pair.source.sge(part * 100, 50)).collect();
        let works = vec![
            Work::write(1, inline, &pair.target, 0).flags(INLINE),
            Work::write(2, list, &pair.target, 64).flags(SIGNALED),
        ];
        assert_eq!(pair.a.try_post(works), 0);
        pair.a.queues.send.ok(2);
        let (source, target) = (pair.source.bytes(), pair.target.bytes());
        assert_eq!(target[..50], [&source[3..23], &source[100..130]].concat());
        assert_eq!(
            target[64..264],
            [&source[..50], &source[100..150], &source[200..250], &source[300..350]].concat()
        );
    }
    device.assert_clean();
}

#[test]
fn sends_with_and_without_immediate_data() {
    let device = device();
    let pair = Pair::new(RC);
    for round in 0..100_u64 {
        pair.b.post_recv(round, vec![pair.target.sge(0, 100), pair.target.sge(4096, 100)]);
        pair.a.post(Work::send(round, vec![pair.source.sge(0, 150)]).immediate(9));
        pair.a.queues.send.ok(round);
        let wc = pair.b.queues.recv.ok(round);
        assert_eq!((wc.opcode, wc.byte_len, wc.wc_flags & 2), (ibv_wc_opcode::IBV_WC_RECV, 150, 0));
        assert_eq!(pair.target.bytes()[4096..4146], pair.source.bytes()[100..150]);
    }
    pair.b.post_recv(1, vec![pair.target.sge(0, 100)]);
    let send = Work::new(2, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, vec![pair.source.sge(0, 10)]);
    pair.a.post(send.immediate(0x0102_0304));
    let wc = pair.b.queues.recv.ok(1);
    // SAFETY: the flag names this variant.
    let immediate = unsafe { wc.imm_data_invalidated_rkey_union.imm_data };
    assert_eq!((wc.wc_flags & 2, u32::from_be(immediate)), (2, 0x0102_0304));
    pair.a.queues.send.ok(2);
    pair.b.post_recv(3, vec![]);
    let write =
        Work::new(4, ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, vec![pair.source.sge(8, 16)]);
    pair.a.post(write.at(pair.target.address() + 512, pair.target.key()).immediate(77));
    let wc = pair.b.queues.recv.ok(3);
    assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, 16));
    assert_eq!(pair.target.bytes()[512..528], pair.source.bytes()[8..24]);
    pair.a.queues.send.ok(4);
    device.assert_clean();
}

#[test]
fn atomics() {
    let device = device();
    let mut pair = Pair::new(RC);
    pair.target.set_word(2, 40);
    let add = Work::new(1, ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, vec![pair.source.sge(0, 8)]);
    pair.a.post(add.at(pair.target.address() + 16, pair.target.key()).operands(2, 0));
    let wc = pair.a.queues.send.ok(1);
    assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_FETCH_ADD, 8));
    assert_eq!((pair.source.word(0), pair.target.word(2)), (40, 42));
    for (compare, now) in [(41, 42), (42, 7)] {
        let swap =
            Work::new(2, ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, vec![pair.source.sge(0, 8)]);
        pair.a.post(swap.at(pair.target.address() + 16, pair.target.key()).operands(compare, 7));
        assert_eq!(pair.a.queues.send.ok(2).opcode, ibv_wc_opcode::IBV_WC_COMP_SWAP);
        assert_eq!((pair.source.word(0), pair.target.word(2)), (42, now));
    }
    device.assert_clean();
}

#[test]
fn uc_sends_without_a_receive_are_lost() {
    let device = device();
    let pair = Pair::new(UC);
    pair.a.post(Work::send(1, vec![pair.source.sge(0, 10)]));
    pair.a.queues.send.ok(1);
    pair.b.post_recv(2, vec![pair.target.sge(0, 10)]);
    pair.a.post(Work::send(3, vec![pair.source.sge(100, 10)]));
    pair.a.queues.send.ok(3);
    pair.b.queues.recv.ok(2);
    assert_eq!(pair.target.bytes()[..10], pair.source.bytes()[100..110]);
    pair.a.post(Work::write(4, vec![pair.source.sge(0, 10)], &pair.target, 99));
    pair.a.queues.send.ok(4);
    assert_eq!(pair.target.bytes()[99..109], pair.source.bytes()[..10]);
    device.assert_clean();
}
