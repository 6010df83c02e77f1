//! Clients come, ask and go.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::ToSocketAddrs;
use tokio::task::JoinSet;
use tokio_rdma::{Connection, ConnectionConfig, Device, EstablishError, Listener, SetupError};

use crate::client::patient;
use crate::error::KvError;
use crate::layout::Layout;
use crate::protocol::{OVERHEAD, Request};
use crate::table::Table;

/// A table, and those who use it.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    table: Arc<Table>,
}

/// Clients at once. Others wait until one leaves.
const CLIENTS: usize = 256;

/// Bytes of long requests that a client may have on their way. With its other buffers it takes less than 4 MiB here, whatever
/// it does.
const REQUESTS: u64 = 1 << 20;

/// A client that takes none of its answers for so long is dropped.
const STALLED: Duration = Duration::from_secs(30);

impl Server {
    /// Makes an empty table, and listens at the first of the addresses that can be had. Port 0 takes one that is free.
    ///
    /// # Errors
    ///
    /// [`KvError::Setup`] if the memory of the table cannot be registered, [`KvError::Establish`] if nobody can listen there.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs,
        layout: Layout,
    ) -> Result<Self, KvError> {
        // One domain for all clients, as they read the same memory. It has nothing else that a peer may reach.
        let pd = device.protection_domain().map_err(SetupError::from)?;
        let table = Arc::new(Table::new(&pd, layout)?);
        let config = ConnectionConfig::default()
            .protection_domain(&pd)
            .options(patient())
            .stall_timeout(Some(STALLED))
            .receive_memory(REQUESTS)
            .max_message((OVERHEAD + layout.max_key() + layout.max_value()) as u64)
            .user_data(layout.encode(&table.grant()));
        Ok(Self { listener: Listener::bind_with(device, address, &config).await?, table })
    }

    /// Where clients find it.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Its table.
    #[must_use]
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Serves clients, each in a task of its own, until the future is dropped. A client that breaks the protocol, or leaves
    /// without a word, is dropped; the others go on.
    ///
    /// # Errors
    ///
    /// [`KvError::Establish`] if no more clients can come.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops all connections, which their clients are told, and the table.
    pub async fn run(self) -> Result<Infallible, KvError> {
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                client = self.listener.accept(), if clients.len() < CLIENTS => match client {
                    Ok(client) => drop(clients.spawn(serve(client, self.table.clone()))),
                    // For this one.
                    Err(EstablishError::Setup(error)) => tracing::warn!(%error, "no room for a client"),
                    Err(error) => return Err(error.into()),
                },
                Some(left) = clients.join_next() => match left {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(%error, "a client is dropped"),
                    Err(error) => tracing::error!(%error, "serving a client"),
                },
            }
        }
    }
}

/// Answers one request after the other. A PUT is in the table before its answer leaves: whoever has seen the answer, or
/// was told by one who has, reads what was put or something later.
async fn serve(client: Connection, table: Arc<Table>) -> Result<(), KvError> {
    while let Some(message) = client.recv().await? {
        let (number, request) = Request::decode(&message)?;
        client.send(table.answer(&request).encode(number)).await?;
    }
    Ok(client.close().await?)
}
