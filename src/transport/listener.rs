//! Connections that peers ask for.

use std::fmt;
use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::ToSocketAddrs;

use super::config::ConnectionConfig;
use super::connection::{Connection, Prepared};
use super::error::EstablishError;
use super::hello::Hello;
use crate::cm;
use crate::verbs::Device;

/// Takes connections that peers ask for by address.
///
/// ```
/// use tokio_rdma::{Access, Connection, Device, Listener, RemoteRegion};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let address = listener.local_addr();
/// let server = async {
///     let peer = listener.accept().await?;
///     let region = peer.expose(vec![0; 1 << 20], Access::REMOTE_ALL)?;
///     peer.send(region.grant()).await?;
///     while peer.recv().await?.is_some() {}
///     peer.close().await?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// };
/// let client = async {
///     let conn = Connection::connect(&device, address).await?;
///     let grant = conn.recv().await?.ok_or("no message")?;
///     let remote = RemoteRegion::from_bytes(&grant).ok_or("not a region")?;
///     conn.write(conn.copy_from(b"hello")?, remote.slice(..5)?).await?;
///     let buffer = conn.read(conn.alloc(5)?, remote.slice(..5)?).await?;
///     assert_eq!(&buffer[..], b"hello");
///     assert_eq!(conn.fetch_add(remote.slice(8..16)?, 1).await?, 0);
///     conn.close().await?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// };
/// tokio::try_join!(server, client)?;
/// # Ok(())
/// # }
/// ```
pub struct Listener {
    inner: cm::Listener,
    device: Device,
    config: ConnectionConfig,
}

impl Listener {
    /// Listens at the first of the addresses that can be had, with default settings for its connections.
    ///
    /// # Errors
    ///
    /// As [`bind_with`](Self::bind_with).
    pub async fn bind(device: &Device, address: impl ToSocketAddrs) -> Result<Self, EstablishError> {
        Self::bind_with(device, address, &ConnectionConfig::default()).await
    }

    /// Listens at the first of the addresses that can be had. Port 0 takes one that is free.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Setup`] for settings that the device does not allow; [`EstablishError::Connect`] as
    /// [`cm::Listener::bind_with`].
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O and time drivers.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs,
        config: &ConnectionConfig,
    ) -> Result<Self, EstablishError> {
        config.check(device.attr())?;
        let inner = cm::Listener::bind(device, address).await?;
        Ok(Self { inner, device: device.clone(), config: config.clone() })
    }

    /// Address that it listens at.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr()
    }

    /// The next connection. A peer that asks for another protocol is rejected, and one that does not go through with it is
    /// passed over; neither is an error here.
    ///
    /// Handshakes are made one after the other: where a peer that does not answer must not hold up others for
    /// [`connect_timeout`](ConnectionConfig::connect_timeout), take the [`request`](Self::request) and have another task
    /// accept it.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] if there will be no more, [`EstablishError::Setup`] if no queue pair can be made.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects a peer whose handshake is underway.
    pub async fn accept(&self) -> Result<Connection, EstablishError> {
        loop {
            let request = self.request().await?;
            let peer = request.peer_addr();
            match request.accept().await {
                Ok(connection) => return Ok(connection),
                Err(EstablishError::Setup(error)) => return Err(error.into()),
                Err(error) => tracing::debug!(%peer, %error, "not accepted"),
            }
        }
    }

    /// The next peer that asks, to be accepted or rejected. One that asks for another protocol is rejected.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] if there will be no more.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no request.
    pub async fn request(&self) -> Result<ConnectionRequest, EstablishError> {
        loop {
            let inner = self.inner.accept().await?;
            match Hello::decode(inner.private_data()) {
                Ok((hello, user_data)) => {
                    let user_data = Bytes::copy_from_slice(user_data);
                    let (device, config) = (self.device.clone(), self.config.clone());
                    return Ok(ConnectionRequest { inner, hello, user_data, device, config });
                }
                Err(error) => {
                    tracing::warn!(peer = %inner.peer_addr(), %error, "rejected");
                    // Dropping it rejects it: nobody here waits for the peer.
                    drop(inner);
                }
            }
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local", &self.local_addr()).finish_non_exhaustive()
    }
}

/// A peer that wants a connection. Dropping it rejects it.
#[must_use = "dropping it rejects it"]
pub struct ConnectionRequest {
    inner: cm::Request,
    hello: Hello,
    user_data: Bytes,
    device: Device,
    config: ConnectionConfig,
}

impl ConnectionRequest {
    /// Where it comes from.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.inner.peer_addr()
    }

    /// What the peer's service gave along.
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        &self.user_data
    }

    /// What the peer says of itself.
    #[must_use]
    pub fn peer(&self) -> Hello {
        self.hello
    }

    /// Says yes, with the settings of the listener.
    ///
    /// # Errors
    ///
    /// As [`Connection::connect_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer.
    pub async fn accept(self) -> Result<Connection, EstablishError> {
        let config = self.config.clone();
        self.accept_with(&config).await
    }

    /// Says yes, with settings of its own.
    ///
    /// # Errors
    ///
    /// As [`Connection::connect_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer.
    pub async fn accept_with(self, config: &ConnectionConfig) -> Result<Connection, EstablishError> {
        let options = config.cm_options()?;
        let pd = config.domain(&self.device)?;
        let prepared = Prepared::new(&pd, config, |builder| self.inner.prepare(builder))?;
        let link = self.inner.accept(&prepared.qp, &options).await?;
        prepared.start(self.hello, self.user_data, Some(link))
    }

    /// Says no. The peer finds the bytes, at most 148, in [`cm::ConnectError::Rejected`].
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] as [`cm::Request::reject`].
    pub async fn reject(self, user_data: &[u8]) -> Result<(), EstablishError> {
        Ok(self.inner.reject(user_data).await?)
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest")
            .field("peer", &self.peer_addr())
            .field("hello", &self.hello)
            .finish_non_exhaustive()
    }
}
