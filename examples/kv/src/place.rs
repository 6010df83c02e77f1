//! Selection of the server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use kv::{ClientConfig, KvClient, Layout, ReadCounters, Server};
use tokio::sync::oneshot;
use tokio_rdma::Device;

use crate::args::Place;
use crate::{Result, device};

#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) device: Device,
    /// True if the server is in this process.
    pub(crate) here: bool,
}

impl Place {
    /// Runs `work` with the server, which shuts down afterwards if it is in this process.
    pub(crate) async fn with_server<T, F: Future<Output = Result<T>>>(
        &self,
        work: impl FnOnce(Target) -> F,
    ) -> Result<T> {
        if let Some(address) = self.connect {
            let device = device::connecting(address, self.from)?;
            return work(Target { address, device, here: false }).await;
        }
        let [servers, device] = device::both(self.udp)?;
        let (server, address) = LocalServer::start(servers, self.table.layout()?).await?;
        let done = work(Target { address, device, here: true }).await;
        let stopped = server.shut_down();
        // The error of the work is more precise.
        let done = done?;
        stopped?;
        Ok(done)
    }
}

/// Returns the settings of clients that test or measure a server, which may wait seconds for a
/// processor.
pub(crate) fn patient() -> ClientConfig {
    let limit = Duration::from_secs(60);
    ClientConfig::default().keepalive(Some((limit / 12, limit / 2))).deadline(limit)
}

/// Closes clients whose tasks have ended. Returns the sum of their counters.
pub(crate) async fn close_all(clients: Vec<Arc<KvClient>>) -> Result<ReadCounters> {
    let mut counters = ReadCounters::default();
    for client in clients {
        let seen = client.counters();
        counters.reads += seen.reads;
        counters.torn += seen.torn;
        counters.fallbacks += seen.fallbacks;
        Arc::into_inner(client).ok_or("a client is still in use")?.close().await?;
    }
    Ok(counters)
}

/// A server with its own threads and runtime, like a process of its own.
#[derive(Debug)]
struct LocalServer {
    /// Dropping the sender stops the server.
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

impl LocalServer {
    async fn start(device: Device, layout: Layout) -> Result<(Self, SocketAddr)> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (address_sender, address) = oneshot::channel();
        let thread = Builder::new().name("server".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            runtime.block_on(async {
                let server = Server::bind(&device, (device::address(&device)?, 0), layout).await?;
                address_sender.send(server.local_addr()?).ok();
                tokio::select! {
                    ended = server.run() => match ended? {},
                    _ = stopped => Ok(()),
                }
            })
        })?;
        let server = Self { stop, thread };
        match address.await {
            Ok(address) => Ok((server, address)),
            Err(_) => Err(server
                .shut_down()
                .err()
                .unwrap_or_else(|| "the server exited without an address".into())),
        }
    }

    fn shut_down(self) -> Result<()> {
        drop(self.stop);
        self.thread.join().map_err(|_| "the server's thread panicked")?
    }
}
