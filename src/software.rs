//! Control of the software device: networks within this process and over UDP, faults, clock and
//! counters.
//!
//! # Deterministic tests
//!
//! A [simulated](Network::simulated) network has virtual time and draws faults, numbers and keys
//! from a seed. [`drive`] runs a future and everything that its runtime has spawned, and advances
//! that time whenever no task can continue. Waiting for a timeout takes no real time, and each run
//! with a seed is the same.
//!
//! ```
//! use std::time::Duration;
//! use tokio_rdma::software::{self, Faults, Network};
//! use tokio_rdma::{CloseReason, Connection, Device, Listener};
//!
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! // The runtime must have one thread.
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<()> {
//!     let delay = Duration::from_micros(2)..Duration::from_micros(20);
//!     let network = Network::simulated(7, Faults::none().loss(0.05).delay(delay));
//!     let server = Device::software_in(&network, "server")?;
//!     let client = Device::software_in(&network, "client")?;
//!     let address = (server.default_path()?.1.gid.to_ip(), 0);
//!     let test = async {
//!         let listener = Listener::bind(&server, address).await?;
//!         let connecting = Connection::connect(&client, listener.local_addr());
//!         let (theirs, ours) = tokio::try_join!(listener.accept(), connecting)?;
//!         ours.send("hello").await?;
//!         assert_eq!(theirs.recv().await?.as_deref(), Some(&b"hello"[..]));
//!
//!         // Both sides notice that they are separated, after all retransmissions.
//!         network.partition("server", "client")?;
//!         ours.send("lost").await?;
//!         theirs.send("lost, too").await?;
//!         let reasons = tokio::join!(ours.closed(), theirs.closed());
//!         assert!(matches!(reasons, (CloseReason::Operation(_), CloseReason::Operation(_))));
//!         Ok::<_, Box<dyn std::error::Error>>(())
//!     };
//!     software::drive(&network, test).await?;
//!     assert!(network.now() > Duration::from_millis(100), "the time of all retries");
//!     Ok(())
//! }
//! ```

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::task::yield_now;

pub use crate::error::UdpError;
pub use rdma_soft::{
    CqCounters, DeviceControl, Faults, LinkControl, LinkCounters, Network, ReceiveCounters,
    SendCounters, TargetCounters, UdpConfig,
};

/// Rounds of the runtime in which nothing has happened at the current virtual time, before the time
/// advances. A completion takes two to reach its task: one by the reactor, one by the task that
/// waits for it.
const QUIET_ROUNDS: u32 = 4;

/// Runs `future`, and advances the time of a [simulated](Network::simulated) `network` when neither
/// the future nor another task of this runtime can continue. See the [module](self) for an example.
///
/// On a current-thread runtime a run is reproducible, if it depends on nothing else that is not:
///
/// - Real time, such as Tokio's timers, and the timeouts of connections: `keepalive`,
///   `close_timeout`, `connect_timeout`. Do not pause Tokio's clock: this future is never idle, so
///   it would not advance.
/// - Threads: [`BusyPoll`](crate::CompletionMode::BusyPoll) completion queues, and messages that
///   are fetched, for which a blocking thread registers memory: messages of more frames than the
///   receives of the moment permit, at first above 1,152 bytes. With `preallocate(true)`, messages
///   above `max_eager`.
/// - Random choices of `tokio::select!`, unless it is `biased`.
///
/// The future never sleeps while `future` is pending, even if the network is idle: wrap it in
/// [`tokio::time::timeout`] to end a test that hangs. With a network in real time it only runs
/// `future`.
///
/// # Cancel safety
///
/// Cancel safe if `future` is.
pub async fn drive<F: Future>(network: &Network, future: F) -> F::Output {
    let mut future = pin!(future);
    let mut quiet = 0;
    loop {
        let polled = poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
        if let Poll::Ready(output) = polled.await {
            return output;
        }
        if network.step_until(network.now()) {
            quiet = 0;
        } else if quiet < QUIET_ROUNDS {
            quiet += 1;
        } else {
            network.step();
            quiet = 0;
        }
        yield_now().await;
    }
}
