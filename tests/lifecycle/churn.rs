//! Closed connections leak no queue pair, descriptor, task or memory.
//!
//! `TOKIO_RDMA_CYCLES` sets the number of connections. Each test is alone in a process, because it
//! counts all memory of the process.

use std::process::Command;

use crate::alone::alone;
use crate::connected::{self, config, pair, pattern, recv};
use crate::torture::{self, Flavour, LONG, bounded, device, eventually, scaled, soon};
use futures::future::join_all;
use tokio_rdma::software::Network;
use tokio_rdma::{CompletionQueue, Connection, Listener};

/// Returns the number of kernel objects of the device under test, 0 for the software device.
fn kernel_objects() -> u64 {
    let Some(name) = torture::hardware() else { return 0 };
    let shown =
        Command::new("rdma").args(["resource", "show", &name]).output().expect("rdma of iproute2");
    assert!(shown.status.success(), "{shown:?}");
    // "1: rxe0: qp 3 cq 2 pd 1 mr 0 ..."
    let shown = String::from_utf8(shown.stdout).expect("text");
    let counts: Vec<u64> = shown.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(!counts.is_empty(), "{shown}");
    counts.iter().sum()
}

#[test]
fn closed_connections_leak_nothing() {
    if !alone("churn::closed_connections_leak_nothing") {
        return;
    }
    // The software device's events have a task for each completion queue: the test's queue, and a
    // few queues of closed connections, whose tasks end at a later connection.
    const TASKS: usize = 4;
    let cycles = std::env::var("TOKIO_RDMA_CYCLES")
        .map_or(scaled(400), |cycles| cycles.parse().expect("a number"));
    bounded("churn", LONG * 4 + LONG * (cycles / 2000) as u32, move || {
        let runtime = Flavour::MultiThread.runtime();
        runtime.block_on(async {
            let (device, _) = device(&Network::new());
            let queue = CompletionQueue::builder(&device).capacity(1024).build().unwrap();
            let shared = config().completion_queue(&queue).receive_buffers(8).spare_buffers(4);
            let local = connected::address(&device);
            let mut listener = Listener::bind_with(&device, local, &shared).await.unwrap();
            let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
            let mut before = None;
            for cycle in 0..cycles {
                let own = config().receive_buffers(8).spare_buffers(4);
                let config = if cycle % 2 == 0 { &shared } else { &own };
                let address = listener.local_addr().unwrap();
                let connecting = Connection::connect_with(&device, address, config);
                let both = async { tokio::try_join!(connecting, listener.accept()) };
                let (a, b) = soon("connect", both).await.unwrap();
                let len = [10, 5_000, 50_000][cycle as usize % 3];
                a.send(pattern(len, cycle)).await.unwrap();
                let message = recv(&b).await;
                b.send(message.clone()).await.unwrap();
                assert!(recv(&a).await == message);
                match cycle % 4 {
                    0 | 1 => {
                        let both = async { tokio::join!(a.close(), b.close()) };
                        assert_eq!(soon("close", both).await, (Ok(()), Ok(())))
                    }
                    2 => drop((a, b)),
                    _ => {
                        b.send(pattern(100_000, 1)).await.unwrap();
                        drop(b);
                        drop(soon("close", a.close()).await);
                    }
                }
                if cycle == cycles / 4 {
                    // The last connection and listener free the resources that are kept for reuse.
                    drop(listener);
                    eventually("destroyed queue pairs", || queue.counters().reserved == 0).await;
                    eventually("tasks end", || tasks() <= TASKS).await;
                    before = Some((descriptors(), tasks(), crate::live::bytes(), kernel_objects()));
                    listener = Listener::bind_with(&device, local, &shared).await.unwrap();
                }
            }
            drop(listener);
            let (fds, alive, bytes, objects) = before.expect("a quarter of the cycles ran");
            eventually("destroyed queue pairs", || queue.counters().reserved == 0).await;
            eventually("tasks end", || tasks() <= alive.max(TASKS)).await;
            eventually("descriptors are closed", || descriptors() <= fds).await;
            eventually("the kernel's objects are destroyed", || kernel_objects() <= objects).await;
            let connection = 200_000;
            eventually("memory is free", || crate::live::bytes() < bytes + connection).await;
            let left = crate::live::bytes() as isize - bytes as isize;
            eprintln!(
                "{cycles} cycles; after a quarter and now: {fds} and {} descriptors, {alive} and \
                 {} tasks, {objects} and {} kernel objects, {left} bytes more",
                descriptors(),
                tasks(),
                kernel_objects()
            );
        });
    });
}

#[test]
fn tables_of_simultaneous_connections_are_freed() {
    /// Bytes left of all connections: of 150 pairs, less than their records in the device's
    /// connection manager, which take more than 60,000. What a device keeps for later connections
    /// takes up to 30,500, depending on the order in which they close.
    const LEFT: usize = 45_000;
    /// Closed connections whose resources a device keeps.
    const KEPT: usize = 8;
    let many = scaled(150);
    if !alone("churn::tables_of_simultaneous_connections_are_freed") {
        return;
    }
    bounded("simultaneous", LONG * 2, move || {
        Flavour::MultiThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let config = config()
                .receive_buffers(4)
                .spare_buffers(0)
                .send_buffers(1)
                .receive_buffer_size(1024);
            let local = connected::address(&device);
            let listener = Listener::bind_with(&device, local, &config).await.unwrap();
            let address = listener.local_addr().unwrap();
            let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
            // The software device keeps a slot of 64 bytes for each registration at the maximum.
            let registered: Vec<_> = (0..many * 4 + 64).map(|_| pd.register(vec![0; 8])).collect();
            drop(registered);
            let mut before = None;
            // The first pairs leave as many resources to later ones as are kept.
            for pairs in [4, many] {
                let mut ends = Vec::new();
                for _ in 0..pairs {
                    let connecting = Connection::connect_with(&device, address, &config);
                    let both = async { tokio::try_join!(connecting, listener.accept()) };
                    ends.extend(<[_; 2]>::from(soon("connect", both).await.unwrap()));
                }
                soon("close", join_all(ends.iter().map(|end| end.close()))).await;
                drop(ends);
                // The software device's events have a task for each completion queue that is kept.
                eventually("tasks end", || tasks() <= KEPT).await;
                let before = *before.get_or_insert_with(crate::live::bytes);
                eventually("memory is free", || crate::live::bytes() <= before + LEFT).await;
                eprintln!(
                    "{pairs} pairs: {} bytes more",
                    crate::live::bytes() as isize - before as isize
                );
            }
        });
    });
}

#[test]
fn memory_of_closed_connections_is_returned_to_the_system() {
    const PAIRS: usize = 100;
    // The second length needs memory for long messages.
    const LENGTHS: [usize; 2] = [8192, 100_000];
    if !alone("churn::memory_of_closed_connections_is_returned_to_the_system") {
        return;
    }
    bounded("memory", LONG, || {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        Flavour::MultiThread.runtime().block_on(async {
            // Buffers of at least 128 KiB at once, which the allocator maps.
            let config = config().preallocate(true);
            // Allocates what the process and its first connection need once.
            let (a, b) = pair(&config);
            drop(soon("close", async { tokio::join!(a.close(), b.close()) }).await);
            drop((a, b));
            let before = resident();
            let pairs: Vec<_> = (0..PAIRS).map(|_| pair(&config)).collect();
            for (a, b) in &pairs {
                for (from, to) in [(a, b), (b, a)] {
                    for len in LENGTHS {
                        let count = if len == 8192 { 64 } else { 8 };
                        let sending = async {
                            for number in 0..count {
                                from.send(pattern(len, number)).await.unwrap();
                            }
                        };
                        let receiving = async {
                            let mut received = Vec::new();
                            for _ in 0..count {
                                received.push(recv(to).await);
                            }
                        };
                        tokio::join!(sending, receiving);
                    }
                }
            }
            let peak = resident() - before;
            // Memory of both halves is interleaved: freeing one half must not keep the pages.
            let (firsts, seconds): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let ends = firsts.iter().chain(&seconds).map(|end| end.close());
            soon("close", join_all(ends)).await.into_iter().for_each(|end| end.unwrap());
            drop(firsts);
            drop(seconds);
            let left = || resident().saturating_sub(before);
            eprintln!("{PAIRS} pairs: {} KiB at the peak", peak / 1024);
            eventually("memory is returned to the system", || left() <= peak / 5).await;
            eprintln!("{} KiB are still resident", left() / 1024);
        });
    });
}
