//! Measures the cost of 1000 operations with callgrind:
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*post_and_poll*' --callgrind-out-file=/dev/null \
//!     target/release/deps/rdma_soft-* --ignored --exact tests::cost::write_of_8_bytes
//! ```

use super::*;

const OPERATIONS: u64 = 1000;

#[inline(never)]
fn post_and_poll(end: &End, wr: &SendWr<'_>, count: u64) {
    let mut out = [WorkCompletion::default(); 1];
    for _ in 0..count {
        // SAFETY: S1: the caller's buffers outlive the loop.
        unsafe { end.qp.post_send(std::slice::from_ref(wr)) }.unwrap();
        assert_eq!(end.cq.poll(&mut out).unwrap(), 1);
        assert!(out[0].status.is_success());
    }
}

fn run(op: impl FnOnce(&Buffer) -> SendOp) {
    let (a, b) = connected(&Network::new(), &Options::default());
    let (local, remote) = (a.buffer(64), b.buffer(64));
    let sges = [local.sge(0, 8)];
    let wr = SendWr {
        wr_id: WrId(1),
        op: op(&remote),
        flags: SendFlags::SIGNALED,
        data: Data::Sges(&sges),
        target: None,
    };
    post_and_poll(&a, &wr, OPERATIONS);
}

#[test]
#[ignore = "measures only"]
fn write_of_8_bytes() {
    run(|remote| SendOp::Write(remote.remote(0)));
}

#[test]
#[ignore = "measures only"]
fn read_of_8_bytes() {
    run(|remote| SendOp::Read(remote.remote(0)));
}

#[test]
#[ignore = "measures only"]
fn fetch_add() {
    run(|remote| SendOp::FetchAdd { remote: remote.remote(0), add: 1 });
}
