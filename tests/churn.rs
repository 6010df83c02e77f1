//! Connections that come and go leave nothing: no queue pair, descriptor, task or byte. `TOKIO_RDMA_CYCLES` sets how many.
//!
//! A test program of its own, as all of its memory is counted.

mod connected;
#[path = "common/live.rs"]
mod live;
mod torture;

use std::process::Command;

use connected::{config, pattern, recv};
use tokio_rdma::software::Network;
use tokio_rdma::{CompletionQueue, Connection, Listener};
use torture::{Flavour, LONG, bounded, device, eventually, scaled, soon};

/// Protection domains, regions, queues and ids of rdma_cm that the kernel holds for its device; the software device has none.
fn kernel_objects() -> u64 {
    let Some(name) = torture::hardware() else { return 0 };
    let shown = Command::new("rdma").args(["resource", "show", &name]).output().expect("rdma of iproute2");
    assert!(shown.status.success(), "{shown:?}");
    // Numbers behind their names: "1: rxe0: qp 3 cq 2 pd 1 mr 0 ...".
    let shown = String::from_utf8(shown.stdout).expect("text");
    let counts: Vec<u64> = shown.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(!counts.is_empty(), "{shown}");
    counts.iter().sum()
}

#[test]
fn connections_that_come_and_go_leave_nothing_behind() {
    let cycles = std::env::var("TOKIO_RDMA_CYCLES").map_or(scaled(400), |cycles| cycles.parse().expect("a number"));
    bounded("churn", LONG * 4 + LONG * (cycles / 2000) as u32, move || {
        let runtime = Flavour::MultiThread.runtime();
        runtime.block_on(async {
            let (device, _) = device(&Network::new());
            let queue = CompletionQueue::builder(&device).capacity(1024).build().unwrap();
            let shared = config().completion_queue(&queue).receive_buffers(8).spare_buffers(4);
            let listener = Listener::bind_with(&device, connected::address(&device), &shared).await.unwrap();
            let address = listener.local_addr();
            let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
            let mut before = None;
            for cycle in 0..cycles {
                // Every other one has a completion queue of its own.
                let own = config().receive_buffers(8).spare_buffers(4);
                let config = if cycle % 2 == 0 { &shared } else { &own };
                let connecting = Connection::connect_with(&device, address, config);
                let (a, b) = soon("connect", async { tokio::try_join!(connecting, listener.accept()) }).await.unwrap();
                let len = [10, 5_000, 50_000][cycle as usize % 3];
                a.send(pattern(len, cycle)).await.unwrap();
                let message = recv(&b).await;
                b.send(message.clone()).await.unwrap();
                assert!(recv(&a).await == message);
                match cycle % 4 {
                    // In order, and in disorder.
                    0 | 1 => {
                        assert_eq!(soon("close", async { tokio::join!(a.close(), b.close()) }).await, (Ok(()), Ok(())))
                    }
                    2 => drop((a, b)),
                    _ => {
                        b.send(pattern(100_000, 1)).await.unwrap();
                        drop(b);
                        drop(soon("close", a.close()).await);
                    }
                }
                if cycle == cycles / 4 {
                    eventually("the first end", || queue.counters().reserved == 0).await;
                    before = Some((descriptors(), tasks(), live::bytes(), kernel_objects()));
                }
            }
            let (fds, alive, bytes, objects) = before.expect("a quarter is done");
            eventually("queue pairs end", || queue.counters().reserved == 0).await;
            eventually("tasks end", || tasks() <= alive).await;
            eventually("descriptors are closed", || descriptors() <= fds).await;
            eventually("the kernel's objects are destroyed", || kernel_objects() <= objects).await;
            let connection = 200_000;
            eventually("memory is free", || live::bytes() < bytes + connection).await;
            let left = live::bytes() as isize - bytes as isize;
            eprintln!(
                "{cycles} cycles: {} descriptors of {fds}, {} tasks of {alive}, {} kernel objects of {objects} after a quarter, \
                 and {left} bytes more",
                descriptors(),
                tasks(),
                kernel_objects()
            );
        });
    });
}
