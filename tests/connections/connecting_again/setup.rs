//! A server that can be restarted, and a client on a device of its own.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_rdma::peers::{Reconnect, ReconnectPolicy, ReconnectState};
use tokio_rdma::software::Network;
use tokio_rdma::{Connection, ConnectionConfig, Device, Listener};

use crate::connected::{brief, patient};
use crate::torture::{Flavour, HANG, LONG, bounded, eventually, soon};

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn run<F: Future<Output = ()>>(
    what: &'static str,
    test: impl Fn() -> F + Send + Copy + 'static,
) {
    for flavour in Flavour::ALL {
        bounded(what, 2 * LONG, move || flavour.runtime().block_on(test()));
    }
}

/// Runs `test` with Tokio's clock paused: it advances only while no task can run.
pub(crate) fn paused<F: Future<Output = ()>>(
    what: &'static str,
    test: impl FnOnce() -> F + Send + 'static,
) {
    bounded(what, 2 * LONG, move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap().block_on(test());
    });
}

pub(crate) fn config() -> ConnectionConfig {
    ConnectionConfig::default().retries(patient())
}

/// Returns the settings of a client that sends nothing before it probes a peer that is gone. A
/// pause of a thread cannot look like a lost peer, and the probe fails within tens of milliseconds.
pub(crate) fn config_of_silent_client() -> ConnectionConfig {
    ConnectionConfig::default().retries(brief()).keepalive(Some((HOUR, HOUR)))
}

/// Returns a policy that connects again within milliseconds.
pub(crate) fn eager() -> ReconnectPolicy {
    ReconnectPolicy::default().first_delay(MS).greatest_delay(8 * MS).attempt_timeout(HANG)
}

/// A client's and a server's device, and the server's address.
pub(crate) struct Hosts {
    pub(crate) network: Network,
    pub(crate) client: Device,
    pub(crate) server: Device,
    pub(crate) address: SocketAddr,
    pub(crate) config: ConnectionConfig,
}

impl Hosts {
    pub(crate) async fn new() -> Self {
        Self::on(Network::new(), config()).await
    }

    pub(crate) async fn on(network: Network, config: ConnectionConfig) -> Self {
        let [client, server] =
            ["client", "server"].map(|name| Device::software_in(&network, name).unwrap());
        let ip = server.default_path().unwrap().1.gid.to_ip();
        let bound = Listener::bind_with(&server, (ip, 0), &config).await.unwrap();
        let address = bound.local_addr().unwrap();
        drop(bound);
        Self { network, client, server, address, config }
    }

    pub(crate) async fn listen(&self) -> Listener {
        soon("bind", Listener::bind_with(&self.server, self.address, &self.config)).await.unwrap()
    }

    pub(crate) fn reconnect(&self, policy: ReconnectPolicy) -> Reconnect {
        Reconnect::new(&self.client, self.address, &self.config, policy).unwrap()
    }

    /// Returns the client's generation and connection, and the server's end.
    pub(crate) async fn next(
        client: &Reconnect,
        listener: &Listener,
    ) -> (u64, Connection, Connection) {
        let both = async { tokio::join!(client.connected(), listener.accept()) };
        let (connected, accepted) = soon("connection", both).await;
        let (generation, connection) = connected.unwrap();
        (generation, connection, accepted.unwrap())
    }

    /// Waits until the client's device has no queue pair and no connection of its manager.
    pub(crate) async fn assert_clean(&self) {
        for name in ["client", "server"] {
            let control = self.network.control(name).unwrap();
            eventually("release of all queue pairs", || control.queue_pairs() == 0).await;
        }
    }
}

/// The request that [`serve`] answers by an abort of the connection.
pub(crate) const END: &str = "end";

/// Accepts connections and answers each request, until it is aborted.
pub(crate) fn serve(listener: Listener) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok(connection) = listener.accept().await {
            connections.spawn(async move {
                while let Ok(Some(request)) = connection.recv().await {
                    if request == END {
                        connection.abort();
                        break;
                    }
                    if connection.send(request).await.is_err() {
                        break;
                    }
                }
            });
        }
    })
}

pub(crate) fn is_waiting(state: &ReconnectState) -> bool {
    matches!(state, ReconnectState::Waiting { .. })
}
