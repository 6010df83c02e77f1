//! Which server: one that is there, or one of this process; and taking leave of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use kv::{KvClient, Layout, ReadCounters, Server};
use tokio::sync::oneshot;
use tokio_rdma::Device;

use crate::args::Place;
use crate::{Result, device};

/// Where the server is, and the device to reach it with.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) device: Device,
    /// The server is in this process.
    pub(crate) here: bool,
}

impl Place {
    /// Does `work` with the server, which, if it is of this process, ends with it.
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
        let ended = server.end();
        // Of two errors that of the work says more.
        let done = done?;
        ended?;
        Ok(done)
    }
}

/// Clients whose tasks have all ended take leave; what they have met, together.
pub(crate) async fn part(clients: Vec<Arc<KvClient>>) -> Result<ReadCounters> {
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

/// A server with threads and a runtime of its own, as if it were another process.
#[derive(Debug)]
struct LocalServer {
    /// Dropping it ends the server.
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

impl LocalServer {
    async fn start(device: Device, layout: Layout) -> Result<(Self, SocketAddr)> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = oneshot::channel();
        let thread = Builder::new().name("server".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            runtime.block_on(async {
                let server = Server::bind(&device, (device::address(&device)?, 0), layout).await?;
                // Whoever has started it waits for this.
                tell.send(server.local_addr()).ok();
                tokio::select! {
                    ended = server.run() => match ended? {},
                    _ = stopped => Ok(()),
                }
            })
        })?;
        let server = Self { stop, thread };
        match told.await {
            Ok(address) => Ok((server, address)),
            Err(_) => Err(server
                .end()
                .err()
                .unwrap_or_else(|| "the server does not say where it is".into())),
        }
    }

    fn end(self) -> Result<()> {
        drop(self.stop);
        self.thread.join().map_err(|_| "the server's thread panicked")?
    }
}
