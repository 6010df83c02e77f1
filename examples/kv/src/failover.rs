//! A client that goes on with another server when its server fails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::timeout;
use tokio_rdma::peers::{Reconnect, ReconnectPolicy};
use tokio_rdma::{Connection, Device, EstablishError};

use crate::client::{ClientConfig, KvClient};
use crate::error::KvError;
use crate::table::Versioned;

/// The limit of an attempt to connect to one server.
const ATTEMPT: Duration = Duration::from_secs(1);

/// A client of servers that stand in for each other. Tasks can share it in an `Arc`.
///
/// It uses one server at a time, and the next one in turn when that fails: the service is a cache.
/// Each server has its own table, which is lost with it. So a key may be absent after a failure,
/// and versions of different [generations](Self::generation) must not be compared. Clients that
/// are separated from a server at different times use different tables meanwhile.
///
/// A failed server is known within the sum of the times of [`ClientConfig::keepalive`], or, if it
/// has just answered messages, one interval later.
///
/// ```
/// # use kv::{ClientConfig, FailoverClient, Layout, Server};
/// # use tokio_rdma::Device;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let layout = Layout::new(64, 4, 32, 64)?;
/// # let (first, second) = (
/// #     Server::bind(&device, "127.0.0.1:0", layout).await?,
/// #     Server::bind(&device, "127.0.0.1:0", layout).await?,
/// # );
/// let servers = [first.local_addr()?, second.local_addr()?];
/// let running = tokio::spawn(first.run());
/// tokio::spawn(second.run());
///
/// let client = FailoverClient::new(&device, servers, ClientConfig::default())?;
/// client.put(b"colour", b"red").await?;
/// assert_eq!(client.generation().await?, 1);
/// running.abort();
/// while client.get(b"colour").await?.is_some() {}
/// assert_eq!(client.generation().await?, 2);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FailoverClient {
    reconnect: Reconnect,
    config: ClientConfig,
    /// The client of the latest generation.
    current: Mutex<Option<(u64, Arc<KvClient>)>>,
}

impl FailoverClient {
    /// Creates a client, which connects to the first of `servers` in the background.
    ///
    /// # Errors
    ///
    /// [`KvError::NoServers`] without any, [`KvError::Establish`] without a Tokio runtime.
    pub fn new(
        device: &Device,
        servers: impl IntoIterator<Item = SocketAddr>,
        config: ClientConfig,
    ) -> Result<Self, KvError> {
        let servers: Vec<_> = servers.into_iter().collect();
        if servers.is_empty() {
            return Err(KvError::NoServers);
        }
        // Another server may be up, whatever the error of this one.
        let policy = ReconnectPolicy::default()
            .first_delay(Duration::from_millis(10))
            .greatest_delay(ATTEMPT)
            .attempt_timeout(ATTEMPT)
            .retry_when(|_| true);
        let (device, settings) = (device.clone(), config.connection());
        let mut turns = servers.into_iter().cycle();
        let connector = move || {
            let (device, settings, server) = (device.clone(), settings.clone(), turns.next());
            async move {
                match server {
                    Some(server) => Connection::connect_with(&device, server, &settings).await,
                    None => unreachable!("there are servers"),
                }
            }
        };
        let reconnect =
            Reconnect::with_connector(policy, connector).map_err(EstablishError::from)?;
        Ok(Self { reconnect, config, current: Mutex::new(None) })
    }

    /// Returns the number of the current connection, and waits while there is none. It grows with
    /// each failure.
    ///
    /// # Errors
    ///
    /// [`KvError::Deadline`]; [`KvError::Reconnect`] after [`close`](Self::close).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn generation(&self) -> Result<u64, KvError> {
        self.in_time(async { Ok(self.reconnect.connected().await?.0) }).await
    }

    /// Returns the value of a key, from the next server if the current one fails.
    ///
    /// # Errors
    ///
    /// [`KvError::Deadline`] if no server answers in time; others of [`KvClient::get`], except the
    /// failures of connections.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        self.in_time(async {
            loop {
                let client = self.client().await?;
                match client.get(key).await {
                    Err(error) if error.is_failure_of_server() => client.abort().await,
                    result => return result,
                }
            }
        })
        .await
    }

    /// Sets the value of a key, see [`KvClient::put`]. Not repeated if the server fails: the error
    /// tells the caller, whose next call uses the next server.
    ///
    /// # Errors
    ///
    /// See [`KvClient::put`]; [`KvError::Deadline`] if no server answers in time.
    ///
    /// # Cancel safety
    ///
    /// See [`KvClient::put`].
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
        let client = self.in_time(self.client()).await?;
        Self::leave_failed(&client, client.put(key, value).await).await
    }

    /// Deletes a key, see [`KvClient::delete`] and [`put`](Self::put).
    ///
    /// # Errors
    ///
    /// See [`put`](Self::put).
    ///
    /// # Cancel safety
    ///
    /// See [`KvClient::put`].
    pub async fn delete(&self, key: &[u8]) -> Result<Option<u64>, KvError> {
        let client = self.in_time(self.client()).await?;
        Self::leave_failed(&client, client.delete(key).await).await
    }

    /// Closes the connection. Later calls fail.
    ///
    /// # Errors
    ///
    /// The connection has failed, or the server does not close within the deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the connection to the drop of this client.
    pub async fn close(&self) -> Result<(), KvError> {
        Ok(self.reconnect.close().await?)
    }

    async fn client(&self) -> Result<Arc<KvClient>, KvError> {
        let (generation, connection) = self.reconnect.connected().await?;
        let mut current = self.current.lock();
        match &*current {
            // Another task may know a later generation.
            Some((known, client)) if *known >= generation => Ok(client.clone()),
            _ => {
                let client = Arc::new(KvClient::over(connection, self.config.clone())?);
                let before = current.replace((generation, client.clone()));
                drop(current);
                drop(before);
                Ok(client)
            }
        }
    }

    async fn leave_failed<T>(client: &KvClient, result: Result<T, KvError>) -> Result<T, KvError> {
        if matches!(&result, Err(error) if error.is_failure_of_server()) {
            client.abort().await;
        }
        result
    }

    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, KvError>>,
    ) -> Result<T, KvError> {
        let deadline = self.config.call_deadline();
        timeout(deadline, call).await.unwrap_or(Err(KvError::Deadline(deadline)))
    }
}
