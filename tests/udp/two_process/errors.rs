//! Failing work between two processes: statuses, events, flushed work, and unchanged memory. Both
//! processes go through a table in step.

use tokio_rdma::types::{
    Access, AddressVector, AsyncEvent, Data, Imm, Lkey, PortNum, Qkey, QpState, Qpn, RemoteAddr,
    Rkey, SendFlags, SendOp, Sge, Transport, WcStatus,
};
use tokio_rdma::{Device, ProtectionDomain};

use super::{Meeting, Role};
use crate::common::raw::{End, Options, QKEY, init, outcome, rtr_to, rts};
use crate::common::{Memory, events};

/// The effect of a request at the responder.
enum There {
    /// Receive 100 completes with this status, and the queue pair fails.
    Receive(WcStatus),
    /// The queue pair reports this event and fails.
    Event(fn(Qpn) -> AsyncEvent),
    Nothing,
}

/// Memory and protection domains that live as long as a case.
#[derive(Default)]
struct Kept(Vec<Memory>, Vec<ProtectionDomain>);

impl Kept {
    fn memory(&mut self, end: &End, len: usize, access: Access) -> &Memory {
        self.0.push(Memory::with(&end.pd, len, access));
        self.0.last().unwrap()
    }

    /// Registers memory in another protection domain of the device.
    fn foreign(&mut self, end: &End, len: usize) -> &Memory {
        let pd = end.device.protection_domain().unwrap();
        self.0.push(Memory::new(&pd, len));
        self.1.push(pd);
        self.0.last().unwrap()
    }

    fn assert_untouched(&self, name: &str) {
        for memory in &self.0 {
            assert!(memory.all().iter().all(|&byte| byte == 0), "{name}: something was written");
        }
    }
}

type Target = fn(&End, &mut Kept, Access, usize) -> RemoteAddr;
type Receive = fn(&End, &mut Kept, usize) -> Vec<Sge>;
type Op = fn(RemoteAddr) -> SendOp;

struct Case {
    name: String,
    options: Options,
    /// A function that makes the remote address, and the right that the operation needs.
    target: (Target, Access),
    /// The memory and the length of receive 100.
    receive: Option<(Receive, usize)>,
    op: Op,
    len: usize,
    here: WcStatus,
    there: There,
}

const WRITE: (&str, Op, Access) = ("WRITE", SendOp::Write, Access::REMOTE_WRITE);
const READ: (&str, Op, Access) = ("READ", SendOp::Read, Access::REMOTE_READ);
const ADD: (&str, Op, Access) =
    ("fetch-and-add", |remote| SendOp::FetchAdd { remote, add: 1 }, Access::REMOTE_ATOMIC);
const SWAP: (&str, Op, Access) = (
    "compare-and-swap",
    |remote| SendOp::CompareSwap { remote, compare: 0, swap: 1 },
    Access::REMOTE_ATOMIC,
);
const WRITE_IMM: (&str, Op, Access) =
    ("WRITE_IMM", |remote| SendOp::WriteWithImm(remote, Imm(3)), Access::REMOTE_WRITE);

/// Lengths of a short packet, a full one, two packets, and several.
const LENGTHS: [usize; 4] = [8, 1024, 1025, 5000];

/// Returns a length above `len` whose last word is incomplete.
const fn size(len: usize) -> usize {
    ((len + 63) & !7) + 4
}

/// Remote addresses that the responder refuses, aligned for atomics.
const FORBIDDEN: [(&str, Target); 10] = [
    ("a wrong key", |b, kept, _, len| {
        let right = kept.memory(b, size(len), Access::REMOTE_ALL).remote(0);
        RemoteAddr { rkey: Rkey(right.rkey.0 ^ 4), ..right }
    }),
    ("key 0", |b, kept, _, len| RemoteAddr {
        rkey: Rkey(0),
        ..kept.memory(b, size(len), Access::REMOTE_ALL).remote(0)
    }),
    ("a registration that has ended", |b, _, _, len| b.memory(size(len)).remote(0)),
    ("past the end", |b, kept, _, len| {
        let memory = kept.memory(b, size(len), Access::REMOTE_ALL);
        memory.remote(size(len) + 4)
    }),
    ("across the end", |b, kept, _, len| {
        kept.memory(b, size(len), Access::REMOTE_ALL).remote(size(len) - 4)
    }),
    ("before the start", |b, kept, _, len| {
        let start = kept.memory(b, size(len), Access::REMOTE_ALL).remote(0);
        RemoteAddr { addr: start.addr - 8, ..start }
    }),
    ("across the end of the address space", |b, kept, _, len| RemoteAddr {
        addr: u64::MAX - 7,
        ..kept.memory(b, size(len), Access::REMOTE_ALL).remote(0)
    }),
    ("address 0", |b, kept, _, len| RemoteAddr {
        addr: 0,
        ..kept.memory(b, size(len), Access::REMOTE_ALL).remote(0)
    }),
    ("all other rights", |b, kept, needed, len| {
        kept.memory(b, size(len), Access::REMOTE_ALL.difference(needed)).remote(0)
    }),
    ("another protection domain", |b, kept, _, len| kept.foreign(b, size(len)).remote(0)),
];

const ALLOWED: Target = |b, kept, _, len| kept.memory(b, size(len), Access::REMOTE_ALL).remote(0);
const COVERED: Receive = |b, kept, len| {
    if len == 0 { vec![] } else { vec![kept.memory(b, len, Access::empty()).sge(0, len)] }
};

const NOT_COVERED: [(&str, Receive); 5] = [
    ("a wrong key", |b, kept, len| {
        let right = kept.memory(b, len, Access::REMOTE_ALL).sge(0, len);
        vec![Sge { lkey: Lkey(right.lkey.0 ^ 0x10), ..right }]
    }),
    ("past the end", |b, kept, len| vec![kept.memory(b, len, Access::empty()).sge(1, len)]),
    ("another protection domain", |b, kept, len| vec![kept.foreign(b, len).sge(0, len)]),
    ("the second of two", |b, kept, len| {
        vec![kept.memory(b, 8, Access::REMOTE_ALL).sge(0, 8), kept.foreign(b, len).sge(0, len)]
    }),
    ("a registration that has ended", |b, _, len| vec![b.memory(len).sge(0, len)]),
];

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    let plain = |name: String, op: Op, len: usize, here: WcStatus, there: There| Case {
        name,
        options: Options::default(),
        target: (ALLOWED, Access::empty()),
        receive: None,
        op,
        len,
        here,
        there,
    };
    for (what, target) in FORBIDDEN {
        for (name, op, needed) in [WRITE, READ, ADD, SWAP, WRITE_IMM] {
            let atomic = needed == Access::REMOTE_ATOMIC;
            for &len in if atomic { &LENGTHS[..1] } else { &LENGTHS[..] } {
                let with_imm = name == WRITE_IMM.0;
                // Only the last packet consumes a receive.
                let there = if with_imm && len <= 1024 {
                    There::Receive(WcStatus::LOC_ACCESS_ERR)
                } else {
                    There::Event(AsyncEvent::QpAccessError)
                };
                let case = plain(
                    format!("{name} of {len}: {what}"),
                    op,
                    len,
                    WcStatus::REM_ACCESS_ERR,
                    there,
                );
                all.push(Case {
                    target: (target, needed),
                    receive: with_imm.then_some((COVERED, 0)),
                    ..case
                });
            }
        }
    }
    for (name, op, lacking) in [WRITE, READ, ADD, SWAP] {
        let options =
            Options { access: Access::REMOTE_ALL.difference(lacking), ..Options::default() };
        let there = There::Event(AsyncEvent::QpRequestError);
        let case =
            plain(format!("{name} without the right"), op, 8, WcStatus::REM_INV_REQ_ERR, there);
        all.push(Case { options, ..case });
    }
    for (name, op, _) in [READ, ADD] {
        let options = Options { dest_rd_atomic: 0, ..Options::default() };
        let there = There::Event(AsyncEvent::QpRequestError);
        let case = plain(
            format!("{name} beyond the responder resources"),
            op,
            8,
            WcStatus::REM_INV_REQ_ERR,
            there,
        );
        all.push(Case { options, ..case });
    }
    for (name, op, _) in [ADD, SWAP] {
        let there = There::Event(AsyncEvent::QpRequestError);
        let off: Target = |b, kept, _, len| kept.memory(b, size(len), Access::REMOTE_ALL).remote(4);
        let case = plain(format!("misaligned {name}"), op, 8, WcStatus::REM_INV_REQ_ERR, there);
        all.push(Case { target: (off, Access::empty()), ..case });
    }
    let sends: [(&str, Op); 2] =
        [("SEND", |_| SendOp::Send), ("SEND_IMM", |_| SendOp::SendWithImm(Imm(1)))];
    for (name, op) in sends {
        for (posted, len) in
            [(16, 17), (0, 1), (1023, 1024), (1024, 1025), (16, 5000), (4999, 5000)]
        {
            let there = There::Receive(WcStatus::LOC_LEN_ERR);
            let case = plain(
                format!("{name} of {len} into {posted}"),
                op,
                len,
                WcStatus::REM_INV_REQ_ERR,
                there,
            );
            all.push(Case { receive: Some((COVERED, posted)), ..case });
        }
        for (what, receive) in NOT_COVERED {
            for len in [16, 1025] {
                let there = There::Receive(WcStatus::LOC_PROT_ERR);
                let case =
                    plain(format!("{name} of {len}: {what}"), op, len, WcStatus::REM_OP_ERR, there);
                all.push(Case { receive: Some((receive, len)), ..case });
            }
        }
    }
    for (name, op) in [sends[0], sends[1], (WRITE_IMM.0, WRITE_IMM.1)] {
        for rnr_retry in [0, 1, 6] {
            // The first packets of a longer WRITE_IMM would write.
            for len in [8, 1024] {
                let name = format!("{name} of {len}: no receive, {rnr_retry} retries");
                let case = plain(name, op, len, WcStatus::RNR_RETRY_EXC_ERR, There::Nothing);
                all.push(Case { options: Options { rnr_retry, ..Options::default() }, ..case });
            }
        }
    }
    all
}

struct Peer {
    address: AddressVector,
    qpn: Qpn,
}

async fn connected(device: &Device, meeting: &mut Meeting, options: &Options) -> (End, Peer) {
    let end = End::new(device, options);
    let gid = end.address().dgid;
    let ours = [&end.qp.qpn().0.to_be_bytes()[..], &gid.0[..]].concat();
    let theirs = meeting.swap(&ours).await;
    let (qpn, gid) = theirs.split_first_chunk().unwrap();
    let gid = tokio_rdma::types::Gid(gid.try_into().unwrap());
    let index = device.default_path().unwrap().1.index;
    let peer = Peer {
        address: AddressVector::new(PortNum(1), index, gid),
        qpn: Qpn(u32::from_be_bytes(*qpn)),
    };
    end.qp.modify(&init(options)).unwrap();
    end.qp.modify(&rtr_to(options, peer.address, peer.qpn)).unwrap();
    end.qp.modify(&rts(options)).unwrap();
    meeting.meet().await;
    (end, peer)
}

fn encode(remote: RemoteAddr) -> Vec<u8> {
    [&remote.addr.to_be_bytes()[..], &remote.rkey.0.to_be_bytes()].concat()
}

fn decode(bytes: &[u8]) -> RemoteAddr {
    let (addr, rkey) = bytes.split_first_chunk().unwrap();
    RemoteAddr {
        addr: u64::from_be_bytes(*addr),
        rkey: Rkey(u32::from_be_bytes(rkey.try_into().unwrap())),
    }
}

/// Asserts that work in the error state is flushed in order, even if unsignalled.
fn flushes(end: &End, name: &str) {
    end.send_with(2, SendOp::Send, SendFlags::empty(), Data::Sges(&[])).unwrap();
    end.send(3, SendOp::Send, &[]).unwrap();
    end.recv(4, &[]).unwrap();
    let flushed =
        |ids: &[u64]| ids.iter().map(|&id| (id, WcStatus::WR_FLUSH_ERR)).collect::<Vec<_>>();
    assert_eq!(outcome(&end.sent(2)), flushed(&[2, 3]), "{name}");
    assert_eq!(outcome(&end.received(1)), flushed(&[4]), "{name}");
}

/// Checks the success of earlier work, the failure, and the flush of later work.
async fn fails_there(device: &Device, meeting: &mut Meeting, active: bool, case: &Case) {
    let name = &case.name;
    let (end, _) = connected(device, meeting, &case.options).await;
    // The memory of a receive may hold a part of a failed message.
    let (mut kept, mut receives) = (Kept::default(), Kept::default());
    assert_eq!(events(device), [], "{name}: left by an earlier case");
    if active {
        let remote = decode(&meeting.swap(&[]).await);
        let local = Memory::patterned(&end.pd, case.len, 1);
        end.send(0, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&end.sent(1)), [(0, WcStatus::SUCCESS)], "{name}");
        end.send(1, (case.op)(remote), &[local.sge(0, case.len)]).unwrap();
        assert_eq!(outcome(&end.sent(1)), [(1, case.here)], "{name}");
        assert_eq!(end.state(), QpState::Err, "{name}");
        flushes(&end, name);
        assert_eq!(
            local.all(),
            crate::common::pattern(case.len, 1),
            "{name}: the requester's memory changed"
        );
        meeting.meet().await;
    } else {
        let (target, needed) = case.target;
        let remote = target(&end, &mut kept, needed, case.len);
        end.recv(99, &[]).unwrap();
        if let Some((receive, len)) = case.receive {
            let sges = receive(&end, &mut receives, len);
            end.recv(100, &sges).unwrap();
        }
        meeting.swap(&encode(remote)).await;
        meeting.meet().await;
        let mut expected = vec![(99, WcStatus::SUCCESS)];
        let mut event = vec![];
        match case.there {
            There::Receive(status) => expected.push((100, status)),
            There::Event(of) => {
                event.push(of(end.qp.qpn()));
                expected.extend(case.receive.map(|_| (100, WcStatus::WR_FLUSH_ERR)));
            }
            There::Nothing => {}
        }
        assert_eq!(outcome(&end.received(expected.len())), expected, "{name}");
        assert_eq!(events(device), event, "{name}");
        if matches!(case.there, There::Nothing) {
            assert_eq!(end.state(), QpState::Rts, "{name}");
            end.recv(5, &[]).unwrap();
            assert_eq!(outcome(&end.received(0)), [], "{name}: the receive was consumed");
        } else {
            assert_eq!(end.state(), QpState::Err, "{name}");
            flushes(&end, name);
        }
        kept.assert_untouched(name);
    }
    assert_eq!(events(device), [], "{name}");
    meeting.meet().await;
}

/// Sends requests to a queue pair in RESET, in the error state, or destroyed.
async fn retries_are_exceeded(device: &Device, meeting: &mut Meeting, active: bool) {
    let ops: [Op; 4] = [|_| SendOp::Send, WRITE.1, READ.1, ADD.1];
    let options = Options { retry_count: 2, timeout: 8, ..Options::default() };
    for state in [Some(QpState::Reset), Some(QpState::Err), None] {
        for op in ops {
            let (end, _) = connected(device, meeting, &options).await;
            let memory = end.memory(8);
            let remote = decode(&meeting.swap(&encode(memory.remote(0))).await);
            if active {
                meeting.meet().await;
                end.recv(9, &[]).unwrap();
                end.send(1, op(remote), &[memory.sge(0, 8)]).unwrap();
                end.send(2, SendOp::Send, &[]).unwrap();
                let expected = [(1, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)];
                assert_eq!(outcome(&end.sent(2)), expected, "{state:?}");
                assert_eq!(outcome(&end.received(1)), [(9, WcStatus::WR_FLUSH_ERR)], "{state:?}");
                assert_eq!(end.state(), QpState::Err);
                meeting.meet().await;
            } else {
                match state {
                    Some(state) => end.to(state),
                    None => drop(end.qp),
                }
                meeting.meet().await;
                meeting.meet().await;
                assert_eq!(memory.all(), [0; 8], "{state:?}");
            }
        }
    }
}

/// Sends a key that belongs to no window. The responder has no NAK for that.
async fn invalidation_fails(device: &Device, meeting: &mut Meeting, active: bool) {
    let options = Options { retry_count: 1, timeout: 8, ..Options::default() };
    let (end, _) = connected(device, meeting, &options).await;
    let memory = end.memory(8);
    if !active {
        end.recv(5, &[memory.sge(0, 8)]).unwrap();
        end.recv(6, &[memory.sge(0, 8)]).unwrap();
    }
    let remote = decode(&meeting.swap(&encode(memory.remote(0))).await);
    if active {
        end.send(1, SendOp::SendWithInvalidate(remote.rkey), &[]).unwrap();
        assert_eq!(outcome(&end.sent(1)), [(1, WcStatus::RETRY_EXC_ERR)]);
    } else {
        let expected = [(5, WcStatus::REM_INV_REQ_ERR), (6, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&end.received(2)), expected);
        assert_eq!(end.state(), QpState::Err);
        // The responder may report an event.
        events(device);
    }
    meeting.meet().await;
}

/// Posts work that fails before a packet is sent.
async fn fails_here(device: &Device, meeting: &mut Meeting, active: bool) {
    type Bad = fn(&End, &mut Kept) -> Sge;
    let not_covered: [(&str, Bad); 5] = [
        ("a wrong key", |a, kept| {
            let right = kept.memory(a, 16, Access::REMOTE_ALL).sge(0, 8);
            Sge { lkey: Lkey(right.lkey.0 ^ 0x10), ..right }
        }),
        ("key 0", |a, kept| Sge {
            lkey: Lkey(0),
            ..kept.memory(a, 16, Access::REMOTE_ALL).sge(0, 8)
        }),
        ("past the end", |a, kept| kept.memory(a, 16, Access::REMOTE_ALL).sge(12, 8)),
        ("another protection domain", |a, kept| kept.foreign(a, 16).sge(0, 8)),
        ("a registration that has ended", |a, _| a.memory(16).sge(0, 8)),
    ];
    let ops: [Op; 6] = [|_| SendOp::Send, WRITE.1, READ.1, ADD.1, SWAP.1, WRITE_IMM.1];
    let mut cases: Vec<(String, Options, Op, Bad, WcStatus)> = Vec::new();
    for (what, bad) in not_covered {
        for op in ops {
            cases.push((what.to_owned(), Options::default(), op, bad, WcStatus::LOC_PROT_ERR));
        }
    }
    let short: Bad =
        |a, kept| Sge { length: 4, ..kept.memory(a, 16, Access::REMOTE_ALL).sge(0, 8) };
    cases.push((
        "buffer shorter than a word".into(),
        Options::default(),
        ADD.1,
        short,
        WcStatus::LOC_LEN_ERR,
    ));
    let good: Bad = |a, kept| kept.memory(a, 16, Access::REMOTE_ALL).sge(0, 8);
    let none = Options { rd_atomic: 0, ..Options::default() };
    cases.push(("no READ credits".into(), none.clone(), READ.1, good, WcStatus::LOC_QP_OP_ERR));
    cases.push(("no atomic credits".into(), none, ADD.1, good, WcStatus::LOC_QP_OP_ERR));
    for (name, options, op, bad, status) in cases {
        let (end, _) = connected(device, meeting, &options).await;
        let memory = end.memory(16);
        if !active {
            end.recv(100, &[]).unwrap();
        }
        let remote = decode(&meeting.swap(&encode(memory.remote(0))).await);
        if active {
            let mut kept = Kept::default();
            let sge = bad(&end, &mut kept);
            end.send(0, SendOp::Write(remote), &[memory.sge(0, 8)]).unwrap();
            end.send(1, op(remote), &[sge]).unwrap();
            let expected = [(0, WcStatus::SUCCESS), (1, status)];
            assert_eq!(outcome(&end.sent(2)), expected, "{name}, {:?}", op(remote));
            assert_eq!(end.state(), QpState::Err);
            flushes(&end, &name);
            meeting.meet().await;
        } else {
            meeting.meet().await;
            assert_eq!((outcome(&end.received(0)), end.state()), (vec![], QpState::Rts), "{name}");
            assert_eq!(memory.all(), [0; 16], "{name}");
        }
        assert_eq!(events(device), [], "{name}");
        meeting.meet().await;
    }
}

/// Checks that the responder silently drops refused requests and serves later ones.
async fn dropped_on_a_connection(device: &Device, meeting: &mut Meeting, active: bool) {
    for len in LENGTHS {
        let (end, _) = connected(device, meeting, &Options::of(Transport::Uc)).await;
        if active {
            let from = Memory::patterned(&end.pd, len, 2);
            let remote = decode(&meeting.swap(&[]).await);
            let bad = RemoteAddr { rkey: Rkey(0), ..remote };
            // Without a receive, the first packets of a long WRITE_IMM would write.
            let imm = SendOp::WriteWithImm(if len > 1024 { bad } else { remote }, Imm(1));
            let ops = [SendOp::Send, SendOp::Write(bad), imm];
            for (id, op) in (1..).zip(ops) {
                end.send(id, op, &[from.sge(0, len)]).unwrap();
                assert_eq!(outcome(&end.sent(1)), [(id, WcStatus::SUCCESS)], "{op:?} of {len}");
            }
            // Once this write has arrived, the earlier requests have.
            end.send(
                4,
                SendOp::Write(RemoteAddr { addr: remote.addr + len as u64, ..remote }),
                &[from.sge(0, 1)],
            )
            .unwrap();
            assert_eq!(outcome(&end.sent(1)), [(4, WcStatus::SUCCESS)]);
            meeting.meet().await;
            end.send(5, SendOp::Send, &[from.sge(0, len)]).unwrap();
            assert_eq!(outcome(&end.sent(1)), [(5, WcStatus::SUCCESS)]);
        } else {
            let to = end.memory(len + 1);
            meeting.swap(&encode(to.remote(0))).await;
            crate::common::eventually("the last write", || (to.bytes(len, 1) != [0]).then_some(()));
            assert!(
                to.bytes(0, len).iter().all(|&byte| byte == 0),
                "a dropped request of {len} bytes wrote"
            );
            end.recv(7, &[to.sge(0, len)]).unwrap();
            meeting.meet().await;
            let received = end.received(1);
            assert_eq!(
                (outcome(&received), received[0].byte_len),
                (vec![(7, WcStatus::SUCCESS)], len as u32)
            );
            assert_eq!(to.bytes(0, len), crate::common::pattern(len, 2));
        }
        assert_eq!((end.state(), events(device)), (QpState::Rts, vec![]));
        meeting.meet().await;
    }
}

/// Checks that misaddressed datagrams are lost, and that one too long fails only its receive.
async fn lost_datagrams(device: &Device, meeting: &mut Meeting, active: bool) {
    for len in [0, 8, 1024, 4096] {
        let (end, peer) = connected(device, meeting, &Options::of(Transport::Ud)).await;
        let memory = Memory::patterned(&end.pd, 40 + len.max(8), 3);
        if active {
            let sges = [memory.sge(0, len)];
            meeting.meet().await;
            let wrong =
                [(peer.qpn, Qkey(QKEY.0 + 1)), (peer.qpn, Qkey(0)), (Qpn(peer.qpn.0 ^ 1), QKEY)];
            for (qpn, qkey) in wrong.into_iter().chain([(peer.qpn, QKEY)]) {
                end.send_at(5, &peer.address, qpn, qkey, &sges).unwrap();
                assert_eq!(outcome(&end.sent(1)), [(5, WcStatus::SUCCESS)]);
            }
            meeting.meet().await;
            // The first datagram is one byte too long for its receive.
            end.send_at(6, &peer.address, peer.qpn, QKEY, &sges).unwrap();
            end.send_at(7, &peer.address, peer.qpn, QKEY, &sges).unwrap();
            assert_eq!(outcome(&end.sent(2)), [(6, WcStatus::SUCCESS), (7, WcStatus::SUCCESS)]);
        } else {
            end.recv(1, &[memory.sge(0, 40 + len)]).unwrap();
            meeting.meet().await;
            let received = end.received(1);
            assert_eq!(
                (outcome(&received), received[0].src_qpn),
                (vec![(1, WcStatus::SUCCESS)], peer.qpn)
            );
            assert_eq!(memory.bytes(40, len), crate::common::pattern(40 + len.max(8), 3)[..len]);
            end.recv(2, &[memory.sge(0, 39 + len)]).unwrap();
            end.recv(3, &[memory.sge(0, 40 + len)]).unwrap();
            meeting.meet().await;
            let expected = [(2, WcStatus::LOC_LEN_ERR), (3, WcStatus::SUCCESS)];
            assert_eq!(outcome(&end.received(2)), expected);
        }
        assert_eq!((end.state(), events(device)), (QpState::Rts, vec![]));
        meeting.meet().await;
    }
}

/// Runs all cases, with each process as the requester.
pub(super) async fn every_error(device: &Device, meeting: &mut Meeting, role: Role) {
    let cases = cases();
    for requester in [Role::Client, Role::Server] {
        let active = role == requester;
        for case in &cases {
            fails_there(device, meeting, active, case).await;
        }
        retries_are_exceeded(device, meeting, active).await;
        invalidation_fails(device, meeting, active).await;
        fails_here(device, meeting, active).await;
        dropped_on_a_connection(device, meeting, active).await;
        lost_datagrams(device, meeting, active).await;
    }
}
