//! WRITEs and READs of zero bytes, whose remote address and key are not checked (IBTA C9-88).

use tokio_rdma::Access;
use tokio_rdma::memory::MemoryWindow;
use tokio_rdma::types::{Imm, QpState, RemoteAddr, Rkey, SendOp, Transport, WcStatus};

use crate::common::Memory;
use crate::common::raw::{End, Options, connected, outcome};

/// Returns addresses and keys with which a byte could not be accessed. `window` is unbound.
fn unusable(
    end: &End,
    memory: &Memory,
    window: Option<&MemoryWindow>,
) -> Vec<(&'static str, RemoteAddr)> {
    let good = memory.remote(0);
    let mut all = vec![
        ("no key", RemoteAddr { rkey: Rkey(0), ..good }),
        ("behind the region", memory.remote(4096)),
        ("in front of it", RemoteAddr { addr: good.addr - 1, ..good }),
        ("end of the address space", RemoteAddr { addr: u64::MAX, ..good }),
    ];
    let dropped = Memory::new(&end.pd, 8).remote(0);
    all.push(("a registration that is gone", dropped));
    if let Some(window) = window {
        all.push(("an unbound window", RemoteAddr { rkey: window.rkey(), ..good }));
    }
    all
}

#[test]
fn remote_key_of_zero_bytes_is_not_checked() {
    for transport in [Transport::Rc, Transport::Uc] {
        let (a, b, _setup) = connected(&Options::of(transport));
        let memory = b.memory(64);
        let has_windows = b.device.attr().max_mw > 0;
        let window = has_windows.then(|| MemoryWindow::new(&b.pd).unwrap());
        for (what, remote) in unusable(&b, &memory, window.as_ref()) {
            let what = format!("{transport:?}, {what}");
            b.recv(9, &[]).unwrap();
            a.send(1, SendOp::Write(remote), &[]).unwrap();
            a.send(2, SendOp::WriteWithImm(remote, Imm(7)), &[]).unwrap();
            let mut expected = vec![(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)];
            if transport == Transport::Rc {
                a.send(3, SendOp::Read(remote), &[]).unwrap();
                expected.push((3, WcStatus::SUCCESS));
            }
            assert_eq!(outcome(&a.sent(expected.len())), expected, "{what}");
            let received = b.received(1)[0];
            assert_eq!((received.byte_len, received.imm()), (0, Some(Imm(7))), "{what}");
            assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts), "{what}");
        }
        assert_eq!(memory.all(), [0; 64]);
    }
}

// The rights of the queue pair are those of the operation, not of the memory.
#[test]
fn zero_bytes_need_the_rights_of_the_queue_pair() {
    for (op, access) in [
        (SendOp::Write as fn(RemoteAddr) -> SendOp, Access::REMOTE_READ),
        (SendOp::Read, Access::REMOTE_WRITE),
    ] {
        let (a, b, _setup) = connected(&Options { access, ..Options::default() });
        let memory = b.memory(64);
        a.send(1, op(memory.remote(0)), &[]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::REM_INV_REQ_ERR)]);
    }
}
