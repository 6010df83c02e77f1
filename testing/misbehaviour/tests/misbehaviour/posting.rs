//! Drivers that refuse a post: a batch, and a connection, of which a part is not posted.

use tokio_rdma::software::Network;
use tokio_rdma::types::{QpState, Transport};
use tokio_rdma::{Access, Batch, CloseReason, MessageError, OpErrorKind};

use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, in_every_mode, within};
use crate::connected::{config, modes, pair_in, pattern, recv, run, two};
use crate::torture::soon;

in_every_mode! {
    part_that_is_refused_ends_the_queue_pair_before_the_batch,
}

async fn part_that_is_refused_ends_the_queue_pair_before_the_batch(mode: &str) {
    // Posted at once, and from the line, behind work that leaves no room.
    for waits in [false, true] {
        for posted in 0..6 {
            let Some((setup, control, _)) = Setup::controlled("part_that_is_refused") else {
                return;
            };
            let build = |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(8);
            let Pair { a, b, .. } =
                Pair::shaped(setup, &Shape { build: &build, ..Shape::new(Transport::Rc, mode) });
            let region = b.region(8);
            let fill = if waits { 4 } else { 0 };
            // They wait for a receive, and so hold their places.
            let before: Vec<_> = (0..fill).map(|_| a.qp.send(())).collect();
            control.refuse_send(posted);
            let mut batch = Batch::new();
            for at in 0..6_u8 {
                batch.write(
                    a.buffer(&[1]),
                    region.grant().slice(u64::from(at)..u64::from(at) + 1).unwrap(),
                );
            }
            let batch = a.qp.post_batch(batch);
            let _receives: Vec<_> = (0..fill).map(|_| b.qp.recv(())).collect();
            let result = within("batch", batch).await;
            for send in before {
                // Done, or flushed with the rest.
                drop(within("send", send).await);
            }
            let (posted, case) =
                (posted as usize, format!("waits: {waits}, refused after {posted}"));
            assert!(
                result.results()[posted..].iter().all(Result::is_err),
                "{case}: {:?}",
                result.results()
            );
            assert_eq!(result.buffers().len(), 6, "{case}");
            assert_eq!(a.state(), if posted > 0 { QpState::Err } else { QpState::Rts }, "{case}");
            let mut there = [0; 8];
            region.read(0, &mut there).unwrap();
            assert_eq!(
                there[posted..],
                [0; 8][posted..],
                "{case}: nothing behind the refused one was done"
            );
        }
    }
}

#[test]
fn message_that_the_driver_refuses_ends_the_connection_though_nobody_asks_for_it() {
    run("refused", || async {
        let network = Network::new();
        let [(_, one_pd), (_, other_pd)] = two(&network);
        // No keepalive, which would find out by and by that the peer misses a message.
        let config = config().keepalive(None);
        let (a, b) = pair_in(&one_pd, &other_pd, &config, &config);
        a.send("before").await.unwrap();
        assert_eq!(&recv(&b).await[..], b"before");
        network.control("one").unwrap().refuse_send(0);
        // Taken, and never posted.
        a.send("lost").await.unwrap();
        let ended = soon("the end", a.recv()).await;
        let by_post = matches!(
            ended,
            Err(MessageError::Closed(CloseReason::Operation(OpErrorKind::Post(_))))
        );
        assert!(by_post, "{ended:?}");
    });
}

#[test]
fn batch_that_the_driver_refuses_part_way_is_why_the_connection_ends() {
    modes("driver", || async {
        let network = Network::new();
        let [(_one, a_pd), (_two, b_pd)] = two(&network);
        let (a, b) = pair_in(&a_pd, &b_pd, &config(), &config());
        let region = b.expose(vec![0; 40], Access::REMOTE_ALL).unwrap();
        let mut batch = Batch::new();
        for (block, bytes) in pattern(40, 1).chunks(8).enumerate() {
            let start = 8 * block as u64;
            batch.write(
                a.copy_from(bytes).unwrap(),
                region.grant().slice(start..start + 8).unwrap(),
            );
        }
        network.control("one").unwrap().refuse_send(2);
        let result = soon("batch", a.post_batch(batch)).await;
        assert!(result.results().iter().any(|result| matches!(result, Err(OpErrorKind::Post(_)))));
        assert_eq!(result.buffers().len(), 5);
        match soon("the end", a.recv()).await {
            Err(MessageError::Closed(CloseReason::Operation(OpErrorKind::Post(_)))) => {}
            other => panic!("{other:?}"),
        }
    });
}
