//! What an operation costs, for callgrind:
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*post_and_poll*' --callgrind-out-file=/dev/null \
//!     target/release/deps/rdma_soft-* --ignored --exact tests::cost::write_of_8_bytes
//! ```
//!
//! The count it collects is of 1000 operations.

use super::*;

/// Operations that are counted.
const OPERATIONS: u64 = 1000;

#[inline(never)]
fn post_and_poll(end: &End, wr: &SendWr<'_>, count: u64) {
    let mut out = [WorkCompletion::default(); 1];
    for _ in 0..count {
        // SAFETY: the buffers live on in the caller.
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
#[ignore = "measures, proves nothing"]
fn write_of_8_bytes() {
    run(|remote| SendOp::Write(remote.remote(0)));
}

#[test]
#[ignore = "measures, proves nothing"]
fn read_of_8_bytes() {
    run(|remote| SendOp::Read(remote.remote(0)));
}

#[test]
#[ignore = "measures, proves nothing"]
fn fetch_add() {
    run(|remote| SendOp::FetchAdd { remote: remote.remote(0), add: 1 });
}
