//! Connections that peers ask for.

use std::fmt;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::pin::pin;
use std::task::Poll;

use bytes::Bytes;
use tokio::net::ToSocketAddrs;
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinSet};

use super::config::ConnectionConfig;
use super::connection::{Connection, Prepared};
use super::error::EstablishError;
use super::hello::{Hello, Rejection};
use crate::cm;
use crate::provider::cm_contract::RESPONSE_DATA;
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
    /// Those that were begun by `accept`, whoever has called it: one caller at a time starts and collects them.
    handshakes: Mutex<JoinSet<Result<Connection, EstablishError>>>,
}

/// What an acceptor waits for.
#[allow(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
enum Next {
    Asked(Result<ConnectionRequest, EstablishError>),
    Made(Result<Result<Connection, EstablishError>, JoinError>),
}

impl Listener {
    /// Listens at the first of the addresses that can be had, with default settings for its connections.
    ///
    /// # Errors
    ///
    /// As [`bind_with`](Self::bind_with).
    ///
    /// # Cancel safety
    ///
    /// As [`bind_with`](Self::bind_with): dropping the future leaves nothing behind.
    ///
    /// # Panics
    ///
    /// As [`bind_with`](Self::bind_with).
    pub async fn bind(device: &Device, address: impl ToSocketAddrs) -> Result<Self, EstablishError> {
        Self::bind_with(device, address, &ConnectionConfig::default()).await
    }

    /// Listens at the first of the addresses that can be had. Port 0 takes one that is free.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Setup`] for settings that the device does not allow; [`EstablishError::Hello`] for more
    /// [`user_data`](ConnectionConfig::user_data) than an answer has room for; [`EstablishError::Connect`] as
    /// [`cm::Listener::bind_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O and time drivers.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs,
        config: &ConnectionConfig,
    ) -> Result<Self, EstablishError> {
        config.check(device)?;
        // What cannot be said to any peer would have all of them rejected, and nobody told why.
        config.cm_options(RESPONSE_DATA)?;
        let inner = cm::Listener::bind(device, address).await?;
        Ok(Self { inner, device: device.clone(), config: config.clone(), handshakes: Mutex::default() })
    }

    /// Address that it listens at.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr()
    }

    /// The next connection that is complete. A peer that asks for another protocol is rejected, and one that does not go
    /// through with it is passed over; neither is an error here.
    ///
    /// Up to [`handshakes`](ConnectionConfig::handshakes) are made at once, each in a task of its own, so that a peer that is
    /// slow, or does not answer at all, holds up nobody: connections come in the order in which they are complete. New ones are
    /// begun while somebody waits here only. Who wants to decide about each peer, or to bound them in another way, takes the
    /// [`request`](Self::request) and has it accepted.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] if there will be no more, [`EstablishError::Setup`] if no queue pair can be made.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no connection: handshakes that were begun go on, and whoever accepts next has them. Dropping
    /// the listener rejects their peers.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O and time drivers.
    pub async fn accept(&self) -> Result<Connection, EstablishError> {
        let mut handshakes = self.handshakes.lock().await;
        loop {
            // Dropped with each round, which loses no request.
            let mut request = pin!(self.request());
            let next = poll_fn(|context| {
                if let Poll::Ready(Some(made)) = handshakes.poll_join_next(context) {
                    return Poll::Ready(Next::Made(made));
                }
                if handshakes.len() < self.config.handshakes as usize {
                    return request.as_mut().poll(context).map(Next::Asked);
                }
                Poll::Pending
            });
            match next.await {
                Next::Asked(request) => {
                    let request = request?;
                    drop(handshakes.spawn(async move {
                        let peer = request.peer_addr();
                        let result = request.accept().await;
                        if let Err(error) = &result {
                            tracing::debug!(%peer, %error, "not accepted");
                        }
                        result
                    }));
                }
                Next::Made(Ok(Ok(connection))) => return Ok(connection),
                Next::Made(Ok(Err(EstablishError::Setup(error)))) => return Err(error.into()),
                Next::Made(Ok(Err(_))) => {}
                Next::Made(Err(error)) => match error.try_into_panic() {
                    Ok(panic) => resume_unwind(panic),
                    // The runtime of an acceptor has shut down, and rejected it.
                    Err(error) => tracing::debug!(%error, "not accepted"),
                },
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
                    if error.is_foreign() {
                        // Tells the peer's program what it has met.
                        inner.refuse(cm::FOR_MESSAGES).await;
                    }
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
        let options = config.cm_options(RESPONSE_DATA)?;
        let pd = config.domain(&self.device)?;
        let path = (self.inner.port(), self.inner.gid_index());
        // No fault of this end, so that a listener goes on.
        config.check_path(path, self.inner.source()).map_err(|error| self.inner.unprepared(error))?;
        let prepared = Prepared::new(&pd, config, |builder| self.inner.prepare(builder))?;
        let link = self.inner.accept(&prepared.qp, &options).await?;
        prepared.start(self.hello, self.user_data, Some(link))
    }

    /// Rejects the connection. The peer finds the bytes, at most 140 and with their length, in [`EstablishError::Rejected`].
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] with [`cm::ConnectError::Limit`] for more bytes (the peer is rejected without them then), else
    /// as [`cm::Request::reject`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer all the same.
    pub async fn reject(self, user_data: &[u8]) -> Result<(), EstablishError> {
        let rejection = Rejection::encode(user_data).map_err(cm::ConnectError::from)?;
        Ok(self.inner.reject(&rejection).await?)
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
