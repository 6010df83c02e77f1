//! Other modes of libmlx5: 128-byte CQEs, no BlueFlame, no scatter to CQE.

mod common;

use std::sync::OnceLock;

use common::*;
use emulated_connectx::{EmulatedConnectX, Link};
use rdma_ibverbs::ffi::*;

fn device() -> EmulatedConnectX {
    static DEVICE: OnceLock<EmulatedConnectX> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        for (name, value) in
            [("MLX5_CQE_SIZE", "128"), ("MLX5_SHUT_UP_BF", "1"), ("MLX5_SCATTER_TO_CQE", "0")]
        {
            // SAFETY: the only test of its process; libmlx5 reads the variables when it opens the
            // device.
            unsafe { std::env::set_var(name, value) };
        }
        start(|options| options.link = Link::Roce)
    })
}

#[test]
fn large_completion_entries_without_blue_flame() {
    let device = device();
    let pair = Pair::new(RC);
    let mut cq: mlx5dv_cq = zeroed();
    let mut object: mlx5dv_obj = zeroed();
    (object.cq.in_, object.cq.out) = (pair.a.queues.send.0, &mut cq);
    init_obj(&mut object, 2);
    assert_eq!(cq.cqe_size, 128);
    for round in 0..300_u64 {
        pair.b.post_recv(round, vec![pair.target.sge(0, 64)]);
        let inline = Work::write(1, vec![pair.source.sge(0, 40)], &pair.target, 100).flags(INLINE);
        let send = Work::send(2, vec![pair.source.sge(round as usize, 20)]);
        assert_eq!(pair.a.try_post(vec![inline, send]), 0);
        pair.a.queues.send.ok(2);
        assert_eq!(pair.b.queues.recv.ok(round).byte_len, 20);
        assert_eq!(
            pair.target.bytes()[..20],
            pair.source.bytes()[round as usize..round as usize + 20]
        );
        assert_eq!(pair.target.bytes()[100..140], pair.source.bytes()[..40]);
    }
    // Error CQEs too.
    pair.a.post(Work::write(3, vec![pair.source.sge(0, 8)], &pair.source, 0));
    pair.a.queues.send.fails_with(3, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    device.assert_clean();
}
