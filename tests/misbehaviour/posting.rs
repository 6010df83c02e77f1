//! Drivers that refuse part of a batch, or a message of a connection.

use tokio_rdma::software::Network;
use tokio_rdma::types::{QpState, Transport};
use tokio_rdma::{Access, Batch, CloseReason, MessageError, OpErrorKind};

use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, in_every_mode, within};
use crate::connected::{config, modes, pair_in, pattern, recv, run, two};
use crate::torture::soon;

in_every_mode! {
    partly_refused_batch_fails_the_queue_pair_first,
}

// Shows S1.
async fn partly_refused_batch_fails_the_queue_pair_first(mode: &str) {
    // Posted directly, and from the wait queue behind work that fills the send queue.
    for waits in [false, true] {
        for posted in 0..6 {
            let Some((setup, control, _)) = Setup::controlled("partly_refused_batch") else {
                return;
            };
            let build = |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(8);
            let Pair { a, b, .. } =
                Pair::shaped(setup, &Shape { build: &build, ..Shape::new(Transport::Rc, mode) });
            let region = b.region(8);
            let fill = if waits { 4 } else { 0 };
            // They occupy the send queue until a receive is posted.
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
                "{case}: executed after the refused request"
            );
        }
    }
}

#[test]
fn refused_message_closes_the_connection() {
    run("refused", || async {
        let network = Network::new();
        let [(_, one_pd), (_, other_pd)] = two(&network);
        // Without keepalive, which would detect the missing message eventually.
        let config = config().keepalive(None);
        let (a, b) = pair_in(&one_pd, &other_pd, &config, &config);
        a.send("before").await.unwrap();
        assert_eq!(&recv(&b).await[..], b"before");
        network.control("one").unwrap().refuse_send(0);
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
fn partly_refused_batch_is_the_close_reason() {
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
