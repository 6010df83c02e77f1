//! Virtual and real time.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::peers::ReconnectPolicy;
use tokio_rdma::software::{self, Faults, Network};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{CompletionMode, ConnectionConfig};

use crate::torture::{HANG, LONG};

pub(crate) const MS: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    Virtual,
    Real,
    /// Real time, and servers that are processes, over UDP.
    Processes,
}

impl Pace {
    /// Returns the names of the clients' devices.
    pub(crate) fn clients(self) -> Vec<String> {
        // Each takes a thread and a socket over UDP.
        let number = if self == Self::Processes { 12 } else { 50 };
        (0..number).map(|number| format!("client-{number}")).collect()
    }

    /// Returns the number of servers.
    pub(crate) fn servers(self) -> usize {
        5
    }

    /// Returns true if WRITEs to a server's memory are known after its end. Its clients then wait
    /// for a grant before they send. Others send at once, so that a server may execute a request
    /// before the client's confirmation of the connection arrives.
    pub(crate) fn keeps_memory(self) -> bool {
        self != Self::Processes
    }

    /// Returns the time in which each request ends.
    pub(crate) fn request_deadline(self) -> Duration {
        match self {
            // All retransmissions to a lost peer take at most 67 ms.
            Self::Virtual => 400 * MS,
            Self::Real | Self::Processes => HANG,
        }
    }

    /// Returns the time in which a client reaches a server after the last fault: it notices that
    /// its connection is lost, and the last attempt times out.
    pub(crate) fn recovery(self) -> Duration {
        match self {
            // A listener whose port was down rejects a request after 0.1 s, in real time.
            Self::Virtual => self.request_deadline() + ATTEMPT + GREATEST_DELAY + 2000 * MS,
            Self::Real | Self::Processes => HANG,
        }
    }

    /// Returns the settings of the connections of a client or server.
    pub(crate) fn config(self, number: usize, budget: &BufferBudget) -> ConnectionConfig {
        // A process may wait for a processor.
        let timeout = AckTimeout::from_code(if self == Self::Processes { 13 } else { 10 });
        let patient = self == Self::Processes && number % 4 < 2;
        let retry_count = if patient { 7 } else { 3 };
        let options = RetryConfig { timeout, retry_count, ..Default::default() };
        let config = ConnectionConfig::default().retries(options).budget(budget);
        let config = config.mode(self.mode(number));
        match self {
            Self::Virtual => config
                .keepalive(Some((50 * MS, 300 * MS)))
                .close_timeout(1000 * MS)
                .preallocate(true)
                .receive_buffers(8)
                .spare_buffers(2)
                .send_buffers(2)
                .receive_buffer_size(384),
            Self::Real => config
                .keepalive(Some((50 * MS, 300 * MS)))
                .close_timeout(300 * MS)
                .shrink_after(100 * MS),
            // Long enough that a process that was started again answers instead of the lost one.
            Self::Processes if patient => config
                .keepalive(Some((300 * MS, 1500 * MS)))
                .close_timeout(500 * MS)
                .shrink_after(100 * MS),
            Self::Processes => config
                .keepalive(Some((100 * MS, 300 * MS)))
                .close_timeout(500 * MS)
                .shrink_after(100 * MS),
        }
    }

    /// Returns the completion mode of a client or server.
    fn mode(self, number: usize) -> CompletionMode {
        match (self, number % 8) {
            // A cooperative task never sleeps, so Tokio's clock would stand still.
            (Self::Virtual, _) => CompletionMode::Event,
            (_, 1) => CompletionMode::Cooperative,
            (_, 2 | 3) => CompletionMode::Hybrid,
            _ => CompletionMode::Event,
        }
    }

    pub(crate) fn policy(self) -> ReconnectPolicy {
        ReconnectPolicy::default()
            .first_delay(2 * MS)
            .greatest_delay(GREATEST_DELAY)
            .attempt_timeout(LONG)
    }
}

pub(crate) const GREATEST_DELAY: Duration = Duration::from_millis(40);
/// The limit of an attempt to connect: the connection manager has repeated a lost request once.
pub(crate) const ATTEMPT: Duration = Duration::from_millis(350);

/// Returns the delays of a network without faults.
pub(crate) fn delays() -> Faults {
    Faults::none().delay(Duration::from_micros(5)..Duration::from_micros(50))
}

/// Runs a test on one thread in virtual time.
pub(crate) fn in_virtual_time<F: Future>(
    seed: u64,
    test: impl FnOnce(Pace, Network) -> F,
) -> F::Output {
    let network = Network::simulated(seed, delays());
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime
        .expect("a runtime")
        .block_on(async { software::drive(&network, test(Pace::Virtual, network.clone())).await })
}

/// Runs a test on two threads in real time.
pub(crate) fn in_real_time<F: Future>(
    seed: u64,
    test: impl FnOnce(Pace, Network) -> F,
) -> F::Output {
    on_threads(test(Pace::Real, Network::with_faults(seed, delays())))
}

/// Runs a future on two threads.
pub(crate) fn on_threads<F: Future>(future: F) -> F::Output {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(future)
}
