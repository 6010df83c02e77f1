//! Resets of queue pairs while other threads take completions and queued work waits.

use std::thread;

use tokio_rdma::software::Network;
use tokio_rdma::types::{PortNum, QpAttr, QpState};
use tokio_rdma::{Access, CompletionQueue, ExposedRegion, Pool, QueuePair};

use crate::torture::{Flavour, LONG, Mode, bounded, connect, device};

const ROUNDS: usize = 200;
/// More than the send queue holds, so that completions admit queued work.
const WRITES: usize = 64;

fn init() -> QpAttr {
    QpAttr {
        pkey_index: Some(0),
        port: Some(PortNum(1)),
        access: Some(Access::REMOTE_WRITE),
        ..QpAttr::to_state(QpState::Init)
    }
}

#[test]
fn reset_ends_while_completions_admit_queued_work() {
    for mode in [Mode::BusyPoll, Mode::Event] {
        bounded("resets", LONG, move || {
            let (device, pd) = device(&Network::new());
            let queue = CompletionQueue::new(&device, mode.make()).unwrap();
            let new = || QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap();
            let (a, b) = (new(), new());
            let region = ExposedRegion::new(&pd, vec![0; 8], Access::REMOTE_ALL).unwrap();
            let pool = Pool::new(&pd, 8, WRITES).unwrap();
            for _ in 0..ROUNDS {
                connect(&a, &b);
                let writes: Vec<_> = (0..WRITES)
                    .map(|_| a.write(pool.try_alloc(8).unwrap(), region.grant()))
                    .collect();
                let waits = thread::spawn(move || {
                    Flavour::CurrentThread.runtime().block_on(async {
                        for write in writes {
                            // A write that the reset ended fails.
                            let _result = write.await;
                        }
                    });
                });
                for end in [&a, &b] {
                    end.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
                    end.modify(&init()).unwrap();
                }
                waits.join().unwrap();
                assert_eq!(pool.available(), pool.total(), "every write returned its buffer");
            }
        });
    }
}
