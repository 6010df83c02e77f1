//! Reliable connections without faults, on a direct and on a simulated network.

use super::*;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Body, Packet, Part, Tail};
use rdma_provider::types::{Imm, WcFlags, WcOpcode, WcStatus};

fn networks() -> [Network; 2] {
    [
        Network::new(),
        Network::simulated(
            7,
            Faults::none().delay(Duration::from_micros(1)..Duration::from_micros(3)),
        ),
    ]
}

const LENGTHS: [usize; 8] = [0, 1, 8, 1023, 1024, 1025, 5001, 300_000];

#[test]
fn write_changes_remote_memory_and_completes() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        for len in LENGTHS {
            let (from, to) = (a.buffer(len), b.buffer(len + 8));
            from.fill((0..len).map(|at| at as u8 ^ 0x5a));
            a.send(1, SendOp::Write(to.remote(3)), &[from.sge(0, len)]).unwrap();
            let done = a.wait(1)[0];
            assert_eq!((done.status, done.opcode), (WcStatus::SUCCESS, WcOpcode::RDMA_WRITE));
            assert_eq!(to.bytes(3, len), from.bytes(0, len));
            assert_eq!(to.bytes(0, 3), [0; 3]);
            assert_eq!(to.bytes(3 + len, 5), [0; 5]);
        }
    }
}

#[test]
fn read_copies_remote_memory() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        for len in LENGTHS {
            let (to, from) = (a.buffer(len + 1), b.buffer(len + 1));
            from.fill((0..=len).map(|at| (at * 7) as u8));
            a.send(
                1,
                SendOp::Read(from.remote(1)),
                &[to.sge(0, len / 2), to.sge(len / 2, len - len / 2)],
            )
            .unwrap();
            let done = a.wait(1)[0];
            assert_eq!((done.status, done.byte_len), (WcStatus::SUCCESS, len as u32));
            assert_eq!(to.bytes(0, len), from.bytes(1, len));
        }
    }
}

#[test]
fn send_fills_a_receive_with_its_scatter_list() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        for len in LENGTHS {
            let (from, to) = (a.buffer(len), b.buffer(len));
            from.fill((0..len).map(|at| (at * 3) as u8));
            let third = len / 3;
            b.recv(9, &[to.sge(0, third), to.sge(third, len - third)]).unwrap();
            let op = SendOp::SendWithImm(Imm(0x1122_3344));
            a.send(1, op, &[from.sge(0, len - third), from.sge(len - third, third)]).unwrap();
            assert_eq!(a.wait(1)[0].status, WcStatus::SUCCESS);
            let received = b.wait(1)[0];
            assert_eq!(outcome(&[received]), [(9, WcStatus::SUCCESS)]);
            assert_eq!((received.byte_len, received.opcode), (len as u32, WcOpcode::RECV));
            assert_eq!(
                (received.imm(), received.flags),
                (Some(Imm(0x1122_3344)), WcFlags::WITH_IMM)
            );
            assert_eq!(to.bytes(0, len), from.bytes(0, len));
        }
    }
}

#[test]
fn write_with_imm_consumes_a_receive_but_not_its_memory() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let (from, to, unused) = (a.buffer(3000), b.buffer(3000), b.buffer(16));
        from.fill(std::iter::repeat(7));
        b.recv(4, &[unused.sge(0, 16)]).unwrap();
        a.send(1, SendOp::WriteWithImm(to.remote(0), Imm(5)), &[from.sge(0, 3000)]).unwrap();
        assert_eq!(a.wait(1)[0].status, WcStatus::SUCCESS);
        let received = b.wait(1)[0];
        assert_eq!((received.opcode, received.byte_len), (WcOpcode::RECV_RDMA_WITH_IMM, 3000));
        assert_eq!(received.imm(), Some(Imm(5)));
        assert_eq!(to.bytes(0, 3000), [7; 3000]);
        assert_eq!(unused.bytes(0, 16), [0; 16]);
    }
}

#[test]
fn atomics_return_the_original_value() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let (result, target) = (a.buffer(8), b.buffer(16));
        target.fill([0, 0, 0, 0, 0, 0, 0, 0].into_iter().chain(40_u64.to_ne_bytes()));
        let remote = target.remote(8);
        a.send(1, SendOp::FetchAdd { remote, add: 2 }, &[result.sge(0, 8)]).unwrap();
        assert_eq!(a.wait(1)[0].opcode, WcOpcode::FETCH_ADD);
        assert_eq!((result.word(0), target.word(8)), (40, 42));
        a.send(2, SendOp::CompareSwap { remote, compare: 41, swap: 1 }, &[result.sge(0, 8)])
            .unwrap();
        assert_eq!(a.wait(1)[0].status, WcStatus::SUCCESS);
        assert_eq!((result.word(0), target.word(8)), (42, 42));
        a.send(3, SendOp::CompareSwap { remote, compare: 42, swap: 1 }, &[result.sge(0, 8)])
            .unwrap();
        assert_eq!(a.wait(1)[0].status, WcStatus::SUCCESS);
        assert_eq!((result.word(0), target.word(8)), (42, 1));
    }
}

#[test]
fn inline_data_are_copied_at_the_post() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let to = b.buffer(128);
        let mut data = [3_u8; 128];
        let data_of = Data::Inline(&data);
        a.send_with(1, SendOp::Write(to.remote(0)), SendFlags::SIGNALED, data_of).unwrap();
        data.fill(9);
        assert_eq!(a.wait(1)[0].status, WcStatus::SUCCESS);
        assert_eq!(to.bytes(0, 128), [3; 128]);
        let too_long = a.send_with(2, SendOp::Send, SendFlags::SIGNALED, Data::Inline(&[0; 129]));
        assert_eq!(too_long.unwrap_err().error.errno, rdma_provider::VerbError::EINVAL);
    }
}

#[test]
fn timers_do_not_accumulate_while_the_peer_is_not_ready() {
    let network = Network::simulated(3, Faults::none());
    let (a, b) = connected(&network, &Options::default());
    let (from, to) = (a.buffer(8), b.buffer(8));
    a.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
    // Each attempt is refused and sets a short timer before a long one.
    for _ in 0..10_000 {
        assert!(network.step());
    }
    let pending = network.0.scheduler.pending();
    assert!(pending <= 4, "{pending}");
    b.recv(2, &[to.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&b.wait(1)), [(2, WcStatus::SUCCESS)]);
}

/// Packets that arrive together are acknowledged together, after their completions.
#[test]
fn completed_receive_is_acknowledged_although_its_queue_pair_is_dropped() {
    let network = Network::simulated(3, Faults::none());
    let options = Options::default();
    let (a, b) = connected(&network, &options);
    b.recv(1, &[]).unwrap();
    a.send(1, SendOp::Send, &[]).unwrap();
    let packet = Packet {
        transport: Transport::Rc,
        pkey: DEFAULT_PKEY,
        dest: b.qp.qpn(),
        psn: Psn::new(options.psn),
        solicited: false,
        ack_request: true,
        body: Body::Send { part: Part::Only, tail: Tail::None },
    };
    let origin = Origin { gid: a.address().dgid, ..Origin::default() };
    b.qp.0.on_packet(&packet, origin, &[]);
    assert_eq!(outcome(&b.poll()), [(1, WcStatus::SUCCESS)]);
    drop(b.qp);
    assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
}

#[test]
fn whole_messages_and_packets_alternate_on_a_connection() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let mut packets = 0;
        for len in LENGTHS {
            let (here, there) = (a.buffer(len), b.buffer(len));
            there.fill((0..len).map(|at| (at * 11) as u8));
            a.send(1, SendOp::Read(there.remote(0)), &[here.sge(0, len)]).unwrap();
            assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
            assert_eq!(here.bytes(0, len), there.bytes(0, len), "READ of {len}");

            here.fill((0..len).map(|at| (at * 13) as u8));
            // One element or two, in which only packets go.
            for split in [0, len / 2] {
                let elements = [here.sge(0, split), here.sge(split, len - split)];
                let elements = if split == 0 { &elements[1..] } else { &elements[..] };
                there.fill(std::iter::repeat_n(0, len));
                b.recv(2, &[there.sge(0, len)]).unwrap();
                a.send(3, SendOp::Send, elements).unwrap();
                assert_eq!(outcome(&a.wait(1)), [(3, WcStatus::SUCCESS)]);
                let received = b.wait(1)[0];
                assert_eq!((received.wr_id, received.byte_len), (WrId(2), len as u32));
                assert_eq!(there.bytes(0, len), here.bytes(0, len), "SEND of {len}");
            }
            packets += 1 + 2 * len.div_ceil(1024).max(1) as u64;
        }
        let (sent, _) = a.qp.counters();
        assert_eq!((sent.packets, sent.retransmitted), (packets, 0));
        let (_, received) = b.qp.counters();
        assert_eq!((received.packets, received.duplicates), (packets, 0));
    }
}

#[test]
fn long_send_waits_for_a_receive() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let (from, to) = (a.buffer(5000), b.buffer(5000));
        from.fill((0..5000).map(|at| (at * 3) as u8));
        a.send(1, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
        b.recv(2, &[to.sge(0, 5000)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&b.wait(1)), [(2, WcStatus::SUCCESS)]);
        assert_eq!(to.bytes(0, 5000), from.bytes(0, 5000));
    }
}

#[test]
fn long_send_to_a_short_receive_fails_after_the_packets_that_fit() {
    for network in networks() {
        let (a, b) = connected(&network, &Options::default());
        let (from, to) = (a.buffer(5000), b.buffer(5000));
        from.fill(std::iter::repeat(7));
        b.recv(2, &[to.sge(0, 4999)]).unwrap();
        a.send(1, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::REM_INV_REQ_ERR)]);
        let received = b.wait(1)[0];
        assert_eq!((received.status, received.byte_len), (WcStatus::LOC_LEN_ERR, 5000));
        assert_eq!(to.bytes(0, 4096), [7; 4096]);
        assert_eq!(to.bytes(4096, 904), [0; 904]);
    }
}

#[test]
fn long_messages_are_refused_if_the_ends_have_different_mtus() {
    for network in networks() {
        let options = Options::default();
        let (a, b) = (End::new(&network, "a", &options), End::new(&network, "b", &options));
        a.to_init(&options);
        b.to_init(&options);
        a.to_rtr(&Options { mtu: Mtu::Mtu2048, ..options }, &b);
        b.to_rtr(&options, &a);
        a.to_rts(&options);
        b.to_rts(&options);
        let (from, to) = (a.buffer(8192), b.buffer(8192));
        from.fill(std::iter::repeat(7));
        a.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 8192)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::REM_INV_REQ_ERR)]);
        assert_eq!(to.bytes(0, 8192), [0; 8192]);
    }
}

#[test]
fn list_moves_at_most_one_slice() {
    const SLICE: u64 = 64;
    let network = Network::new();
    let caps = QpCaps { max_send_wr: 256, ..Options::default().caps };
    let (a, b) = connected(&network, &Options { caps, ..Options::default() });
    let (from, to) = (a.buffer(8), b.buffer(8));
    let write = |sges| SendWr {
        wr_id: WrId(0),
        op: SendOp::Write(to.remote(0)),
        flags: SendFlags::empty(),
        data: Data::Sges(sges),
        target: None,
    };
    // The first post finds the peer.
    a.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.poll()), [(1, WcStatus::SUCCESS)]);
    // No further slice runs.
    network.0.scheduler.stop();
    let (one, two) = ([from.sge(0, 8)], [from.sge(0, 4), from.sge(4, 4)]);
    // The 41st message goes by the send queue, and so do those after it.
    let list: Vec<_> = (0..200).map(|at| write(if at == 40 { &two[..] } else { &one })).collect();
    // SAFETY: as in `send_with`.
    unsafe { a.qp.post_send(&list) }.unwrap();
    assert_eq!(b.qp.counters().1.packets - 1, SLICE);
    assert_eq!(a.qp.0.sender.lock().machine.position(), 201, "all are posted");
}
