//! Over UDP, the packets of many queue pairs in flight to one peer are bounded by its socket
//! buffer.

use super::*;
use rdma_provider::types::WcStatus;

/// One packet of each exceeds the peer's socket buffer many times.
const MANY: usize = 1000;
/// Two packets, and the responses of two requests.
const WRITTEN: usize = 8 << 10;
const READ: usize = 40 << 10;

fn crowd(count: usize, options: &Options) -> Vec<(End, End)> {
    let network = over_udp(&["a", "b"]);
    let ends: Vec<_> = (0..count).map(|_| connected(&network, options)).collect();
    for end in [&ends[0].0, &ends[0].1] {
        end.qp.0.device.endpoint().unwrap().limit_receive_buffer();
    }
    ends
}

fn options() -> Options {
    let caps =
        QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    Options { mtu: Mtu::Mtu4096, timeout: 14, caps, cqe: 8, ..Options::default() }
}

/// Returns the packets, retransmissions and timeouts of all senders.
fn totals(ends: &[(End, End)]) -> (u64, u64, u64) {
    let all = ends.iter().map(|(a, _)| a.qp.counters().0);
    all.fold((0, 0, 0), |(packets, again, timeouts), it| {
        (packets + it.packets, again + it.retransmitted, timeouts + it.timeouts)
    })
}

#[test]
fn thousand_concurrent_queue_pairs_retransmit_less_than_half() {
    let ends = crowd(MANY, &options());
    let pattern = |index: usize, at: usize| (index * 7 + at / 4096 + at) as u8;
    let buffers: Vec<_> = ends
        .iter()
        .enumerate()
        .map(|(index, (a, b))| {
            let (here, there) = (a.buffer(WRITTEN + READ), b.buffer(WRITTEN + READ));
            here.fill((0..WRITTEN).map(|at| pattern(index, at)));
            there.fill_at(WRITTEN, (WRITTEN..WRITTEN + READ).map(|at| pattern(index, at)));
            (here, there)
        })
        .collect();
    let begin = Instant::now();
    for ((a, _), (here, there)) in ends.iter().zip(&buffers) {
        a.send(1, SendOp::Write(there.remote(0)), &[here.sge(0, WRITTEN)]).unwrap();
        a.send(2, SendOp::Read(there.remote(WRITTEN)), &[here.sge(WRITTEN, READ)]).unwrap();
    }
    let outcomes: Vec<_> = ends.iter().map(|(a, _)| outcome(&a.wait(2))).collect();
    let took = begin.elapsed();
    let failed = outcomes
        .iter()
        .filter(|it| **it != [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)])
        .count();
    let (packets, again, timeouts) = totals(&ends);
    println!(
        "{failed} failed, {packets} packets, {again} retransmitted, {timeouts} timeouts, {took:?}"
    );
    assert_eq!(failed, 0);
    // Without the wait queue, more than all packets are retransmitted. Some are lost when the
    // receiver is not scheduled for long.
    assert!(
        again < packets / 2,
        "{again} of {packets} packets were retransmitted, {timeouts} timeouts"
    );
    for (index, (here, there)) in buffers.iter().enumerate() {
        let expected: Vec<u8> = (0..WRITTEN + READ).map(|at| pattern(index, at)).collect();
        assert!(
            here.bytes(0, expected.len()) == expected && there.bytes(0, expected.len()) == expected,
            "{index}"
        );
    }
}

#[test]
fn queue_pairs_without_peer_do_not_block_others() {
    // The first never time out, so their packets stay in flight. The others retry and fail.
    let (endless, short) =
        (Options { timeout: 0, ..options() }, Options { timeout: 10, ..options() });
    let live = crowd(100, &options());
    let network = &live[0].0.network;
    let gone = |options| (0..50).map(|_| connected(network, options).0).collect::<Vec<_>>();
    let (endless, short) = (gone(&endless), gone(&short));
    let nowhere = RemoteAddr { addr: 0x1000, rkey: Rkey(1) };
    let sources: Vec<_> =
        endless.iter().chain(&short).map(|end| (end, end.buffer(WRITTEN))).collect();
    for (end, source) in &sources {
        end.send(1, SendOp::Write(nowhere), &[source.sge(0, WRITTEN)]).unwrap();
    }
    let buffers: Vec<_> =
        live.iter().map(|(a, b)| (a.buffer(WRITTEN), b.buffer(WRITTEN))).collect();
    for round in 0..10 {
        for ((a, _), (from, to)) in live.iter().zip(&buffers) {
            a.send(round, SendOp::Write(to.remote(0)), &[from.sge(0, WRITTEN)]).unwrap();
        }
        for (a, _) in &live {
            assert_eq!(outcome(&a.wait(1)), [(round, WcStatus::SUCCESS)]);
        }
    }
    for end in &short {
        assert_eq!(outcome(&end.wait(1)), [(1, WcStatus::RETRY_EXC_ERR)]);
    }
    assert!(
        endless.iter().all(|end| end.poll().is_empty() && end.state() == QpState::Rts),
        "they keep waiting"
    );
}

#[test]
fn queue_pairs_that_end_while_queued_admit_the_next() {
    let ends = crowd(120, &options());
    let from: Vec<_> = ends.iter().map(|(a, _)| a.buffer(WRITTEN)).collect();
    let to: Vec<_> = ends.iter().map(|(_, b)| b.buffer(WRITTEN)).collect();
    for round in 0..10 {
        for ((a, _), (from, to)) in ends.iter().zip(from.iter().zip(&to)) {
            a.send(round, SendOp::Write(to.remote(0)), &[from.sge(0, WRITTEN)]).unwrap();
        }
        for (index, (a, b)) in ends.iter().enumerate() {
            match (index as u64 + round) % 4 {
                0 => {
                    a.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
                    assert_eq!(a.wait(1).len(), 1);
                }
                1 => {}
                _ => {
                    assert_eq!(outcome(&a.wait(1)), [(round, WcStatus::SUCCESS)]);
                    continue;
                }
            }
            for end in [a, b] {
                end.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            }
            assert!(a.poll().is_empty());
            connect(a, b, &options());
        }
    }
}
