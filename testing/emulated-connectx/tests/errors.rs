//! Errors, flushing, RNR and ACK retries, and shared receive queues.

mod common;

use common::*;
use emulated_connectx::EmulatedConnectX;
use rdma_ibverbs::ffi::*;

fn device() -> EmulatedConnectX {
    start(|_| {})
}

#[test]
fn failed_request_breaks_the_queue_pair_and_flushes_later_requests() {
    let device = device();
    let pair = Pair::new(RC);
    (10..14).for_each(|id| pair.a.post_recv(id, vec![]));
    let list = || vec![pair.source.sge(0, 8)];
    let bad = Work::write(2, list(), &pair.target, 0)
        .at(pair.target.address(), pair.target.key() ^ 0x100);
    let works = vec![
        Work::write(1, list(), &pair.target, 0),
        bad.flags(0),
        // Unsignaled, and two blocks long.
        Work::write(3, (0..4).map(|part| pair.source.sge(part, 1)).collect(), &pair.target, 0)
            .flags(0),
        Work::send(4, list()),
    ];
    assert_eq!(pair.a.try_post(works), 0);
    let cq = &pair.a.queues.send;
    cq.ok(1);
    cq.fails_with(2, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    let flushed: Vec<_> = (0..6).map(|_| cq.next()).map(|wc| (wc.status, wc.wr_id)).collect();
    assert_eq!(flushed, [3, 4, 10, 11, 12, 13].map(|id| (ibv_wc_status::IBV_WC_WR_FLUSH_ERR, id)));
    // Later posts are flushed too; a receive needs no doorbell.
    pair.a.post(Work::send(5, list()).flags(0));
    cq.fails_with(5, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    pair.a.post_recv(6, vec![]);
    cq.fails_with(6, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    assert_eq!(
        (pair.a.state(), pair.b.state()),
        (ibv_qp_state::IBV_QPS_ERR, ibv_qp_state::IBV_QPS_ERR)
    );
    device.assert_clean();
}

#[test]
fn queue_pair_can_be_reset_and_connected_again() {
    let device = device();
    let pair = Pair::new(RC);
    for round in 0..3 {
        pair.b.post_recv(1, vec![]);
        pair.a.post(Work::send(round, vec![]));
        pair.a.queues.send.ok(round);
        pair.b.queues.recv.ok(1);
        for (qp, peer) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            assert_eq!(qp.to(ibv_qp_state::IBV_QPS_ERR), 0);
            assert_eq!(qp.to(ibv_qp_state::IBV_QPS_RESET), 0);
            assert_eq!(qp.state(), ibv_qp_state::IBV_QPS_RESET);
            qp.connect(peer.number(), pair.context.route(), |_| {});
        }
    }
    device.assert_clean();
}

#[test]
fn receive_that_is_too_short_fails_at_both_ends() {
    let device = device();
    let pair = Pair::new(RC);
    pair.b.post_recv(1, vec![pair.target.sge(0, 10)]);
    pair.a.post(Work::send(2, vec![pair.source.sge(0, 11)]));
    pair.b.queues.recv.fails_with(1, ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    pair.a.queues.send.fails_with(2, ibv_wc_status::IBV_WC_REM_INV_REQ_ERR);
    device.assert_clean();
}

#[test]
fn shared_receives_and_the_event_when_they_run_low() {
    let device = device();
    let pair = Pair::with(RC, Some((15, 3)), |_| {});
    let srq = pair.srq();
    for round in 0..100_u64 {
        srq.post(
            round,
            vec![pair.target.sge(0, 10), pair.target.sge(100, 10), pair.target.sge(200, 10)],
        );
        pair.a.post(Work::send(round, vec![pair.source.sge(0, 25)]));
        pair.a.queues.send.ok(round);
        assert_eq!(pair.b.queues.recv.ok(round).byte_len, 25);
    }
    (0..4).for_each(|id| srq.post(id, vec![]));
    assert_ne!(srq.limit(10_000), 0, "more than it holds");
    assert_eq!(srq.limit(3), 0);
    assert_eq!(srq.query().srq_limit, 3);
    let send = |id| {
        pair.a.post(Work::send(id, vec![]));
        pair.a.queues.send.ok(id);
    };
    send(1);
    assert!(!pair.context.has_event(), "three are left");
    send(2);
    assert_eq!(pair.context.event(), ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED);
    assert_eq!(srq.query().srq_limit, 0, "once");
    send(3);
    assert!(!pair.context.has_event());
    assert_eq!(pair.b.to(ibv_qp_state::IBV_QPS_ERR), 0);
    assert_eq!(pair.context.event(), ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED);
    device.assert_clean();
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let _device = device();
    let pair = Pair::new(RC);
    // SAFETY: the objects are alive and stay so, since the calls fail.
    unsafe {
        assert_eq!(ibv_destroy_cq(pair.a.queues.send.0), libc::EBUSY);
        assert_eq!(ibv_dealloc_pd(pair.pd.0), libc::EBUSY);
    }
    pair.a.post(Work::write(1, vec![pair.source.sge(0, 8)], &pair.target, 0));
    pair.a.queues.send.ok(1);
}

#[test]
fn unmapped_or_read_only_memory_is_not_registered() {
    let _device = device();
    let pd = Pd::new(&Context::open(0));
    // SAFETY: the kernel chooses the mapping, which is unmapped once; the calls only inspect it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        assert!(ibv_reg_mr(pd.0, page, 4096, LOCAL as i32).is_null());
        let mr = ibv_reg_mr(pd.0, page, 4096, 0);
        assert!(!mr.is_null());
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(libc::munmap(page, 4096), 0);
        assert!(ibv_reg_mr(pd.0, page, 4096, 0).is_null());
        // Remote write access requires local write access.
        let mut word = 0_u64;
        assert!(ibv_reg_mr(pd.0, (&raw mut word).cast(), 8, 2).is_null());
    }
}
