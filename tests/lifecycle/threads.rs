//! Programs in which no thread can be started, or which occupy the runtime's blocking pool.

use std::sync::mpsc;
use std::thread;

use tokio_rdma::software::Network;
use tokio_rdma::{Connection, Device, Listener};

use crate::alone::alone;
use crate::connected::{pattern, recv};
use crate::torture::{Flavour, LONG, bounded, soon};

/// Longer than what a side keeps memory for.
const LENGTH: usize = 8 << 20;

/// An unprivileged user: the limit does not apply to root.
const UNPRIVILEGED: u32 = 65_534;

/// Sets the limit of processes and threads of this user.
#[allow(unsafe_code, reason = "a call of the C library")]
fn limit_threads(limit: Option<u64>) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: S3: the calls read and write `limits` only.
    let results = unsafe {
        let read = libc::getrlimit(libc::RLIMIT_NPROC, &raw mut limits);
        limits.rlim_cur = limit.unwrap_or(limits.rlim_max);
        (read, libc::setrlimit(libc::RLIMIT_NPROC, &raw const limits))
    };
    assert_eq!(results, (0, 0));
}

#[allow(unsafe_code, reason = "a call of the C library")]
fn leave_root() {
    // SAFETY: S3: the calls take no pointers.
    if unsafe { libc::geteuid() } == 0 {
        // SAFETY: S3: as above.
        assert_eq!(unsafe { libc::setuid(UNPRIVILEGED) }, 0);
    }
}

/// Listens, connects, sends messages that are fetched in both directions, and closes.
async fn connect_and_exchange(device: &Device) {
    let bound = soon("a listener", Listener::bind(device, "127.0.0.1:0")).await.unwrap();
    let both = async {
        tokio::join!(bound.accept(), Connection::connect(device, bound.local_addr().unwrap()))
    };
    let (accepted, connected) = soon("a connection", both).await;
    let (ours, theirs) = (accepted.unwrap(), connected.unwrap());
    exchange(&ours, &theirs).await;
    let closed = soon("the end", async { tokio::join!(ours.close(), theirs.close()) }).await;
    assert_eq!(closed, (Ok(()), Ok(())));
}

async fn exchange(one: &Connection, other: &Connection) {
    for (from, to) in [(one, other), (other, one)] {
        for seed in 0..2 {
            let message = pattern(LENGTH, seed);
            let sent = async {
                from.send(message.clone()).await.unwrap();
                from.flush().await.unwrap();
            };
            let (_, received) = soon("a message", async { tokio::join!(sent, recv(to)) }).await;
            assert!(received == message);
        }
    }
}

// Shows F3.
#[test]
fn connections_work_while_no_thread_can_be_started() {
    // The limit and the user belong to the process.
    if !alone("threads::connections_work_while_no_thread_can_be_started") {
        return;
    }
    bounded("threads", LONG, || {
        leave_root();
        Flavour::CurrentThread.runtime().block_on(async {
            let device = Device::software_in(&Network::new(), "a").unwrap();
            let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (ours, theirs) =
                tokio::join!(listener.accept(), Connection::connect(&device, address));
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            limit_threads(Some(1));
            assert!(thread::Builder::new().spawn(|| ()).is_err(), "the limit has an effect");
            exchange(&ours, &theirs).await;
            connect_and_exchange(&device).await;

            // What needs a thread names the limit.
            let refused = Device::software_in(&Network::new(), "b").unwrap_err().to_string();
            assert!(refused.contains("pthread_create") && refused.contains("RLIMIT_NPROC"));
            let refused = Device::open_default_at([127, 91, 73, 11].into()).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains("pthread_create") && refused.contains("RLIMIT_NPROC"));

            limit_threads(None);
            let other = Device::software_in(&Network::new(), "b").unwrap();
            connect_and_exchange(&other).await;
            exchange(&ours, &theirs).await;
        });
    });
}

// Shows F3.
#[test]
fn connections_work_while_the_blocking_pool_is_occupied() {
    bounded("blocking pool", LONG, || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().max_blocking_threads(1).build().unwrap();
        let (release, released) = mpsc::channel::<()>();
        let job = runtime.spawn_blocking(move || released.recv());
        runtime.block_on(async {
            let device = Device::software_in(&Network::new(), "a").unwrap();
            connect_and_exchange(&device).await;
        });
        assert!(!job.is_finished(), "the pool is occupied");
        drop(release);
    });
}
