//! Tests of data in CQEs, for both sizes of CQE.

use rdma_ibverbs::ffi::*;

use crate::common::*;
use crate::{LIMIT, device};

/// Returns a pair whose `a` signals all requests if `all`.
fn pair(all: bool, srq: bool) -> Pair {
    let mut pair = Pair::with(RC, srq.then_some((31, 2)), |_| {});
    let cq = Cq::new(&pair.context, 127);
    pair.a = Qp::with_signals(&pair.pd, RC, Queues::one(&cq), all);
    assert_eq!(pair.b.to(ibv_qp_state::IBV_QPS_RESET), 0);
    let route = pair.context.route();
    pair.a.connect(pair.b.number(), route, |_| {});
    pair.b.connect(pair.a.number(), route, |_| {});
    pair
}

#[test]
fn short_receives_are_in_the_completion() {
    let device = device();
    for shared in [false, true] {
        let pair = pair(false, shared);
        for len in [1, 31, 32, 33, 63, 64, 65, 200] {
            let list = vec![pair.target.sge(0, 20), pair.target.sge(1000, 300)];
            match shared {
                true => pair.srq().post(1, list),
                false => pair.b.post_recv(1, list),
            }
            let before = pair.target.bytes();
            pair.a.post(Work::send(2, vec![pair.source.sge(len, len)]));
            pair.a.queues.send.ok(2);
            let untouched = pair.target.bytes() == before;
            assert_eq!(untouched, len <= LIMIT, "{len} bytes, before the completion is polled");
            assert_eq!(pair.b.queues.recv.ok(1).byte_len as usize, len);
            let memory = pair.target.bytes();
            let first = len.min(20);
            let got = [&memory[..first], &memory[1000..1000 + len - first]].concat();
            assert_eq!(got, pair.source.bytes()[len..2 * len]);
        }
    }
    device.assert_clean();
}

#[test]
fn short_reads_and_atomics_are_in_the_completion_if_all_are_signaled() {
    let device = device();
    for all in [false, true] {
        let mut pair = pair(all, false);
        if all && LIMIT == 64 {
            // libmlx5 44 copies from one byte before the entry, later versions from its start.
            assert_long_read_is_before_the_cqe(&device, &mut pair);
            continue;
        }
        pair.target.fill(|at| (at * 3 + 1) as u8);
        let local = Mr::new(&pair.pd, 4096, ALL);
        for len in [1, 8, 32, 33, 64, 65] {
            let list = vec![local.sge(0, len.min(10)), local.sge(500, len - len.min(10))];
            let list = if len > 10 { list } else { vec![list[0]] };
            let before = (local.bytes(), device.counters().completions);
            pair.a.post(Work::read(1, list, &pair.target, len as u64));
            until("the completion", || device.counters().completions > before.1);
            let untouched = local.bytes() == before.0;
            assert_eq!(untouched, all && len <= LIMIT, "{len} bytes, all {all}");
            assert_eq!(pair.a.queues.send.ok(1).byte_len as usize, len);
            let memory = local.bytes();
            let first = len.min(10);
            let got = [&memory[..first], &memory[500..500 + len - first]].concat();
            assert_eq!(got, pair.target.bytes()[len..2 * len]);
        }
        let (old, before) = (pair.target.word(100), device.counters().completions);
        let add =
            Work::new(2, ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, vec![local.sge(2000, 8)]);
        let add = add.at(pair.target.address() + 800, pair.target.key()).operands(5, 0);
        pair.a.post(add);
        until("the completion", || device.counters().completions > before);
        assert_eq!(local.word(250), if all { 0 } else { old });
        pair.a.queues.send.ok(2);
        assert_eq!((local.word(250), pair.target.word(100)), (old, old.wrapping_add(5)));
    }
    device.assert_clean();
}

fn assert_long_read_is_before_the_cqe(
    device: &emulated_connectx::EmulatedConnectX,
    pair: &mut Pair,
) {
    pair.target.fill(|at| (at * 3 + 1) as u8);
    let mut cq: mlx5dv_cq = zeroed();
    let mut object: mlx5dv_obj = zeroed();
    (object.cq.in_, object.cq.out) = (pair.a.queues.send.0, &mut cq);
    init_obj(&mut object, 2);
    assert_eq!(cq.cqe_size, 128);
    let before = device.counters().completions;
    pair.a.post(Work::read(1, vec![pair.source.sge(0, 64)], &pair.target, 5));
    until("the completion", || device.counters().completions > before);
    let byte = |at| {
        // SAFETY: the first entry of the queue.
        unsafe { cq.buf.cast::<u8>().add(at).read_volatile() }
    };
    let data: Vec<_> = (0..64).map(byte).collect();
    assert_eq!(data, pair.target.bytes()[5..69]);
    assert_eq!(byte(127), 8, "a request, 64 bytes of data, first pass");
}
