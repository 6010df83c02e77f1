//! The server.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::ToSocketAddrs;
use tokio::task::JoinSet;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::{Connection, ConnectionConfig, Device, EstablishError, Listener, SetupError};

use crate::client::ACK_TIMEOUT;
use crate::error::KvError;
use crate::layout::Layout;
use crate::protocol::{OVERHEAD, Request};
use crate::table::Table;

/// A server: a table and a listener for clients.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    table: Arc<Table>,
}

/// Further clients wait until one disconnects.
const MAX_CLIENTS: usize = 256;

/// Bytes of long requests in flight. A client occupies less than 4 MiB, whatever it sends.
const REQUEST_MEMORY: u64 = 1 << 20;

/// A client that accepts no answers for this long is disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

impl Server {
    /// Creates an empty table, and listens at the first available address. Port 0 selects a free
    /// port.
    ///
    /// # Errors
    ///
    /// [`KvError::Setup`] if the table cannot be registered, [`KvError::Establish`] if no address
    /// is available.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + std::fmt::Debug,
        layout: Layout,
    ) -> Result<Self, KvError> {
        // All clients share the domain and the table. It contains no other exposed memory.
        let pd = device.protection_domain().map_err(SetupError::from)?;
        let table = Arc::new(Table::new(&pd, layout)?);
        let config = ConnectionConfig::default()
            .protection_domain(&pd)
            .retries(RetryConfig { timeout: ACK_TIMEOUT, ..RetryConfig::default() })
            .stall_timeout(Some(STALL_TIMEOUT))
            .receive_memory(REQUEST_MEMORY)
            .max_message((OVERHEAD + layout.max_key() + layout.max_value()) as u64)
            .user_data(layout.encode(&table.grant()));
        Ok(Self { listener: Listener::bind_with(device, address, &config).await?, table })
    }

    /// Returns the address of the listener.
    ///
    /// # Errors
    ///
    /// See [`Listener::local_addr`].
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the table.
    #[must_use]
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Serves each client in a task until the future is dropped. A client that fails or violates
    /// the protocol is disconnected; the others continue.
    ///
    /// # Errors
    ///
    /// [`KvError::Establish`] if the listener fails.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes all connections, of which the clients are notified, and drops the
    /// table.
    pub async fn run(self) -> Result<Infallible, KvError> {
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                client = self.listener.accept(), if clients.len() < MAX_CLIENTS => match client {
                    Ok(client) => drop(clients.spawn(serve(client, self.table.clone()))),
                    // The listener continues.
                    Err(EstablishError::Setup(error)) => {
                        tracing::warn!(%error, "failed to set up a connection; client refused");
                    }
                    Err(error) => return Err(error.into()),
                },
                Some(left) = clients.join_next() => match left {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::warn!(%error, "connection failed; dropping the client");
                    }
                    Err(error) => tracing::error!(%error, "task of a client panicked"),
                },
            }
        }
    }
}

/// Answers requests one at a time. A PUT is in the table before its answer is sent, so a READ that
/// starts after the answer arrived sees this PUT or a later one, on any connection.
async fn serve(client: Connection, table: Arc<Table>) -> Result<(), KvError> {
    while let Some(message) = client.recv().await? {
        let (number, request) = Request::decode(&message)?;
        client.send(table.answer(&request).encode(number)).await?;
    }
    Ok(client.close().await?)
}
