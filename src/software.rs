//! Control of the software device: networks within this process and over UDP, faults, clock and
//! counters.
//!
//! # Deterministic tests
//!
//! A [simulated](Network::simulated) network has virtual time and draws faults, numbers and keys
//! from a seed. [`drive`] runs a future and the tasks of its runtime, and advances that time
//! whenever none can continue. Waiting takes no real time, and each run with a seed is the same.
//!
//! ```
//! use std::time::Duration;
//! use tokio_rdma::software::{self, Faults, Network};
//! use tokio_rdma::{Connection, Device, Listener};
//!
//! // The runtime must have one thread.
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let delay = Duration::from_micros(2)..Duration::from_micros(20);
//!     let network = Network::simulated(7, Faults::none().loss(0.05).delay(delay));
//!     let server = Device::software_in(&network, "server")?;
//!     let client = Device::software_in(&network, "client")?;
//!     let address = (server.default_path()?.1.gid.to_ip(), 0);
//!     software::drive(&network, async {
//!         let listener = Listener::bind(&server, address).await?;
//!         let connecting = Connection::connect(&client, listener.local_addr()?);
//!         let (theirs, ours) = tokio::try_join!(listener.accept(), connecting)?;
//!         ours.send("hello").await?;
//!         assert_eq!(theirs.recv().await?.as_deref(), Some(&b"hello"[..]));
//!
//!         // Both sides notice that they are separated: one by the retransmissions of its message,
//!         // the other by `keepalive`.
//!         network.partition("server", "client")?;
//!         ours.send("lost").await?;
//!         tokio::join!(ours.closed(), theirs.closed());
//!         assert!(network.now() > Duration::from_secs(5), "the interval of `keepalive`");
//!         Ok(())
//!     })
//!     .await
//! }
//! ```

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::yield_now;

use crate::clock;
pub use crate::error::UdpError;
pub use rdma_soft::{
    Bottleneck, CqCounters, DeviceControl, Faults, LinkControl, LinkCounters, Network,
    ReceiveCounters, SendCounters, TargetCounters, UdpConfig,
};

/// Rounds of the runtime without progress, before the time advances. A completion takes two to
/// reach its task: one by the reactor, one by the task that waits for it.
const QUIET_ROUNDS: u32 = 4;

/// Runs `future`, and advances the time of a [simulated](Network::simulated) `network` when no task
/// of this runtime can continue. See the [module](self) for an example.
///
/// On a current-thread runtime, connections and operations use the time of the network for their
/// deadlines meanwhile; [`now`] returns it. On a runtime of several threads, only the network
/// itself has virtual time. Drive one network at a time. Connections that outlive the call continue
/// in the next one.
///
/// # Tokio's clock
///
/// If Tokio's clock is paused before the call, for example by `start_paused`, both clocks advance
/// together, in steps of 1 ms: then `tokio::time::sleep` and the delays of
/// [`Reconnect`](crate::peers::Reconnect) and [`PeerSet`](crate::peers::PeerSet) take virtual time.
/// Otherwise that clock shows real time, and this future never sleeps while `future` is pending.
/// Tasks that never sleep, as in [`Cooperative`](crate::CompletionMode::Cooperative) mode, keep a
/// paused clock from advancing.
///
/// # Reproducibility
///
/// A run is reproducible unless it depends on Tokio's clock, if it is not paused, on
/// [`Instant::now`], which [`now`] replaces, on threads
/// ([`BusyPoll`](crate::CompletionMode::BusyPoll)), or on random choices of a `tokio::select!` that
/// is not `biased`.
///
/// Wrap the call in [`tokio::time::timeout`] to end a test that hangs. With a network in real time
/// it only runs `future`.
///
/// # Cancel safety
///
/// Cancel safe if `future` is.
pub async fn drive<F: Future>(network: &Network, future: F) -> F::Output {
    if !network.is_simulated() {
        return future.await;
    }
    let time = VirtualTime::begin(network);
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
            time.advance().await;
            quiet = 0;
        }
        yield_now().await;
    }
}

/// Returns the time of the simulated network that [`drive`] runs on this thread, otherwise
/// [`Instant::now`]. Deadlines of operations and leases are instants of this clock.
#[must_use]
pub fn now() -> Instant {
    clock::now()
}

const TICK: Duration = Duration::from_millis(1);

/// Keeps the time of this thread, together with Tokio's clock if that is paused.
struct VirtualTime<'a> {
    network: &'a Network,
    before: Option<Network>,
    /// The instant of Tokio's paused clock at which the network had the age 0.
    paused: Option<tokio::time::Instant>,
}

impl<'a> VirtualTime<'a> {
    fn begin(network: &'a Network) -> Self {
        if Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread {
            return Self { network, before: None, paused: None };
        }
        let paused = is_paused().then(|| tokio::time::Instant::now() - network.now());
        if let Some(start) = paused {
            network.follow(Some(Box::new(move || start.elapsed())));
        }
        Self { network, before: clock::simulate(Some(network.clone())), paused }
    }

    async fn advance(&self) {
        let Some(start) = self.paused else {
            self.network.step();
            return;
        };
        let next = poll_fn(|context| Poll::Ready(self.network.poll_next(context))).await;
        let next = match next {
            Poll::Ready(age) if age < start.elapsed() + TICK => {
                self.network.step();
                return;
            }
            Poll::Ready(age) => start.checked_add(age),
            Poll::Pending => None,
        };
        // Tokio advances its clock once no task can continue. Whatever wakes this task ends the
        // wait: the clock, a packet or timer that was added, or what the driven future awaits.
        let mut sleep = pin!(next.map(tokio::time::sleep_until));
        let mut woken = false;
        poll_fn(|context| {
            let is_due = sleep.as_mut().as_pin_mut().is_some_and(|at| at.poll(context).is_ready());
            if is_due || std::mem::replace(&mut woken, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

impl Drop for VirtualTime<'_> {
    fn drop(&mut self) {
        if self.paused.is_some() {
            self.network.follow(None);
        }
        clock::simulate(self.before.take());
    }
}

/// Returns true if Tokio's clock stands still, which is unknown without feature `test-util`.
fn is_paused() -> bool {
    let (start, real) = (tokio::time::Instant::now(), Instant::now());
    while real.elapsed() < Duration::from_micros(1) {
        std::hint::spin_loop();
    }
    tokio::time::Instant::now() == start
}
