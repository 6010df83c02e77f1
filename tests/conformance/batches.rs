//! Batches: signalling intervals, mixed operations, failures, full queues.

use tokio_rdma::error::{LimitError, TryError};
use tokio_rdma::types::{Qpn, Rkey, Transport, WcStatus};
use tokio_rdma::{Batch, BufMut, Imm, OpErrorKind, RemoteRegion};

use crate::common::pair::{Pair, Shape, Side, fenced};
use crate::common::{Setup, Wire, in_every_mode, pattern, transports, within};

in_every_mode! {
    signalling_interval_does_not_change_results,
    batch_mixes_operation_kinds,
    failed_part_splits_batch_results,
    batch_is_reusable,
    full_queue_returns_or_queues_a_batch,
}

fn small(transport: Transport, mode: &str, depth: u32) -> Pair {
    let build = move |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(depth);
    Pair::shaped(Setup::new(), &Shape { build: &build, ..Shape::new(transport, mode) })
}

/// Sends a message from `a` to `b`; earlier work has then arrived.
async fn message(a: &Side, b: &Side) {
    let receive = b.qp.recv(());
    a.qp.send(()).await.unwrap();
    receive.await.unwrap();
}

async fn signalling_interval_does_not_change_results(mode: &str) {
    for transport in transports(&[Transport::Rc, Transport::Uc]) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let region = b.region(32 * 500);
        let bytes = pattern(32 * 500, 1);
        // 0 signals the last only; 100 is over the batch length.
        for every in [0, 5, 1, 100] {
            region.write(0, &vec![0; 32 * 500]).unwrap();
            let mut batch = Batch::new();
            batch.signal_every(every);
            for (at, block) in bytes.chunks(500).enumerate() {
                let start = at as u64 * 500;
                batch.write(a.buffer(block), region.grant().slice(start..start + 500).unwrap());
            }
            assert_eq!(batch.len(), 32);
            let before = a.queue.counters().completions;
            let result = within("batch", a.qp.post_batch(batch)).await;
            assert_eq!(result.results(), [Ok(()); 32]);
            assert_eq!(
                result
                    .into_buffers()
                    .unwrap()
                    .iter()
                    .flat_map(|buffer| buffer.to_vec())
                    .collect::<Vec<_>>(),
                bytes
            );
            let completions = match every {
                0 | 100 => 1,
                5 => 7,
                _ => 32,
            };
            assert_eq!(
                a.queue.counters().completions - before,
                completions,
                "signalled every {every}"
            );
            message(&a, &b).await;
            let mut there = vec![0; 32 * 500];
            region.read(0, &mut there).unwrap();
            assert!(there == bytes, "signalled every {every}");
        }
        assert_eq!(a.qp.send_counters().in_flight, 0);
    }
}

async fn batch_mixes_operation_kinds(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let region = b.region(64);
    let receives = [b.qp.recv(b.blank(8)), b.qp.recv(b.blank(8)), b.qp.recv(b.blank(8))];
    let mut batch = Batch::new();
    batch
        .write(a.buffer(b"written."), region.grant().slice(8..16).unwrap())
        .send(a.buffer(b"sent"))
        .send_with_imm(a.buffer(b"with"), Imm(1))
        .write_with_imm(a.buffer(b"noticed!"), region.grant().slice(24..32).unwrap(), Imm(2))
        .read(a.blank(24), region.grant().slice(8..32).unwrap())
        .fence()
        .write(a.buffer(b"overwrit"), region.grant().slice(8..16).unwrap());
    let posted = a.qp.post_batch(batch);
    let buffers = within("batch", fenced(&a, region.grant(), posted)).await.into_buffers().unwrap();
    assert_eq!(
        &buffers[4][..],
        b"written.\0\0\0\0\0\0\0\0noticed!",
        "READ before the fenced WRITE"
    );
    let mut received = Vec::new();
    for receive in receives {
        let received_one = receive.await.unwrap();
        received.push((received_one.buffer.to_vec(), received_one.imm, received_one.written));
    }
    let expected = [
        (b"sent".to_vec(), None, false),
        (b"with".to_vec(), Some(Imm(1)), false),
        (vec![], Some(Imm(2)), true),
    ];
    assert_eq!(received, expected);
    let mut there = [0; 8];
    region.read(8, &mut there).unwrap();
    assert_eq!(&there, b"overwrit");
    let nothing = within("empty", a.qp.post_batch(Batch::<BufMut>::new())).await;
    assert!(nothing.is_ok() && nothing.results().is_empty());
}

async fn failed_part_splits_batch_results(mode: &str) {
    for every in [0, 1, 2] {
        let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
        let region = b.region(64);
        let bad = RemoteRegion::new(region.grant().addr(), 64, Rkey(0));
        let mut batch = Batch::new();
        batch.signal_every(every);
        for at in 0..8 {
            batch.write(a.buffer(&[at; 8]), if at == 5 { bad } else { region.grant() });
        }
        let result = within("batch", a.qp.post_batch(batch)).await;
        let statuses: Vec<_> =
            result.results().iter().map(|result| result.map_err(|kind| kind.status())).collect();
        // The negative acknowledgement and acknowledgements before it can be lost, and the peer in
        // the error state retransmits neither. The oldest unacknowledged work request then fails.
        let failed = statuses.iter().position(Result::is_err).unwrap();
        let lost =
            crate::wire() == Wire::Faults && statuses[failed] == Err(Some(WcStatus::RETRY_EXC_ERR));
        let (failed, reason) = if lost {
            (failed.min(5), WcStatus::RETRY_EXC_ERR)
        } else {
            (5, WcStatus::REM_ACCESS_ERR)
        };
        let mut expected = [Err(Some(WcStatus::WR_FLUSH_ERR)); 8];
        expected[..failed].fill(Ok(()));
        expected[failed] = Err(Some(reason));
        assert_eq!(statuses, expected, "signalled every {every}");
        assert_eq!(result.buffers().len(), 8, "all buffers are returned");
        let first = result.into_buffers().unwrap_err();
        assert_eq!(first.status(), Some(reason));
        let mut there = [0; 8];
        region.read(0, &mut there).unwrap();
        assert_eq!(there, [4; 8], "work before the failure is done, work after it is not");
        assert_eq!(a.pool.available(), a.pool.total());
    }
}

async fn batch_is_reusable(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let region = b.region(8);
    let mut batch = Batch::new();
    for round in 0..5_u8 {
        for _ in 0..4 {
            batch.write(a.buffer(&[round; 8]), region.grant());
        }
        let mut result = within("batch", a.qp.post_batch(batch)).await;
        assert!(result.is_ok());
        assert_eq!(result.drain().count(), 4);
        batch = result.into_batch();
        assert!(batch.is_empty());
        let mut there = [0; 8];
        region.read(0, &mut there).unwrap();
        assert_eq!(there, [round; 8]);
    }
}

async fn full_queue_returns_or_queues_a_batch(mode: &str) {
    let Pair { a, b, .. } = small(Transport::Rc, mode, 8);
    let held = a.qp.send(());
    let fill = |count: u8| {
        let mut batch = Batch::new();
        for at in 0..count {
            batch.send(a.buffer(&[at]));
        }
        batch
    };
    let batch = match a.qp.try_post_batch(fill(8)) {
        Err(TryError::Full(batch)) => batch,
        other => panic!("{other:?}"),
    };
    assert_eq!(batch.len(), 8, "the whole batch is returned");
    let first = a.qp.try_post_batch(fill(7)).unwrap();
    let second = a.qp.post_batch(batch);
    let third = a.qp.post_batch(fill(3));
    assert!(matches!(a.qp.try_post_batch(fill(1)), Err(TryError::Full(_))));
    assert_eq!(a.qp.send_counters().waiting, 11);
    let receives: Vec<_> = (0..19).map(|_| b.qp.recv(b.blank(1))).collect();
    within("the first", held).await.unwrap();
    for batch in [first, second, third] {
        assert!(within("a batch", batch).await.is_ok());
    }
    let mut received = Vec::new();
    for receive in receives {
        received.extend_from_slice(&within("receive", receive).await.unwrap().buffer);
    }
    assert_eq!(received, [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]);

    let result = within("too many", a.qp.post_batch(fill(9))).await;
    let limit = OpErrorKind::Limit(LimitError {
        field: "work requests of a batch (max_send_wr)",
        asked: 9,
        allowed: 8,
    });
    assert_eq!(result.results(), [Err(limit); 9]);
    assert_eq!(result.buffers().len(), 9);
}

#[test]
fn batch_mixes_shapes_of_buffers() {
    crate::common::run(1, "shapes", async {
        let Pair { a, b, .. } = Pair::new(Transport::Rc, "event");
        let region = b.region(24);
        let at = |range| region.grant().slice(range).unwrap();
        for empty_at in 0..4 {
            region.write(0, &[0; 24]).unwrap();
            // Lengths rise and fall. The empty buffer may be at any position.
            let mut batch = Batch::new();
            for (position, (bytes, to)) in
                [(&b"ab"[..], 0..8), (b"cdefgh", 8..16), (b"i", 16..24)].into_iter().enumerate()
            {
                if position == empty_at {
                    batch.write(a.blank(0), at(0..8));
                }
                batch.write(a.buffer(bytes), at(to));
            }
            if empty_at == 3 {
                batch.write(a.blank(0), at(0..8));
            }
            let result = within("batch", a.qp.post_batch(batch)).await;
            assert_eq!(result.results(), [Ok(()); 4], "empty buffer at {empty_at}");
            let mut there = [0; 24];
            region.read(0, &mut there).unwrap();
            assert_eq!(&there, b"ab\0\0\0\0\0\0cdefgh\0\0i\0\0\0\0\0\0\0", "empty at {empty_at}");
        }
        // Lists of several, one and no buffers.
        let mut batch = Batch::new();
        batch
            .write(vec![a.buffer(b"12"), a.buffer(b"34")], at(0..8))
            .write(vec![a.buffer(b"5")], at(8..16))
            .write(vec![], at(16..24));
        let result = within("lists", a.qp.post_batch(batch)).await;
        assert_eq!(result.results(), [Ok(()); 3]);
        let mut there = [0; 24];
        region.read(0, &mut there).unwrap();
        assert_eq!(&there, b"1234\0\0\0\x005defgh\0\0i\0\0\0\0\0\0\0");
    });
}

#[test]
fn batch_with_one_invalid_part_is_not_posted() {
    crate::common::run(1, "wrong batch", async {
        let Pair { a, b, setup } = Pair::new(Transport::Rc, "event");
        let region = b.region(8);
        let other = setup.a.protection_domain().unwrap();
        let foreign = || other.register(vec![0; 8]).unwrap();
        type Case<'a> = (OpErrorKind, &'a dyn Fn(&mut Batch<BufMut>));
        let long = LimitError { field: "bytes for the remote region", asked: 9, allowed: 8 };
        let cases: [Case<'_>; 2] = [
            (OpErrorKind::Foreign { what: "buffer" }, &|batch| _ = batch.send(foreign())),
            (OpErrorKind::Limit(long), &|batch| _ = batch.write(a.blank(9), region.grant())),
        ];
        for ((expected, spoil), position) in
            cases.iter().flat_map(|case| [0, 1, 2].map(|at| (case, at)))
        {
            let mut batch = Batch::new();
            for at in 0..3 {
                if at == position {
                    spoil(&mut batch);
                } else {
                    batch.write(a.buffer(&[1; 8]), region.grant());
                }
            }
            let posted = a.qp.send_counters().posted;
            let result = within("refused", a.qp.post_batch(batch)).await;
            assert_eq!(result.results(), [Err(*expected); 3], "wrong part {position}");
            assert_eq!(result.buffers().len(), 3);
            assert_eq!(a.qp.send_counters().posted, posted);
            // The next batch does not depend on the refused one.
            let mut batch = result.into_batch();
            batch.send(a.blank(1));
            let empty = within("one", b.qp.recv(b.blank(1)));
            let (sent, received) = tokio::join!(a.qp.post_batch(batch), empty);
            assert!(sent.is_ok());
            received.unwrap();
        }
        let mut there = [0; 8];
        region.read(0, &mut there).unwrap();
        assert_eq!(there, [0; 8]);
    });
}

#[test]
fn batch_with_unsupported_operation_is_refused() {
    crate::common::run(1, "unsupported batch", async {
        let Pair { a, b, .. } = Pair::new(Transport::Uc, "event");
        let mut batch = Batch::new();
        batch.send(a.blank(1)).read(a.blank(8), b.region(8).grant());
        let result = within("READ on UC", a.qp.post_batch(batch)).await;
        assert_eq!(
            result.results(),
            [Err(OpErrorKind::Unsupported { what: "READ (transport RC or DC required)" }); 2]
        );
        let Pair { a, .. } = Pair::new(Transport::Ud, "event");
        let mut batch = Batch::new();
        batch.send(a.blank(1));
        let result = within("SEND on UD", a.qp.post_batch(batch)).await;
        assert_eq!(
            result.results(),
            [Err(OpErrorKind::Unsupported { what: "batches (transport RC, UC or DC required)" })]
        );
        assert_ne!(a.qp.qpn(), Qpn(0));
    });
}
