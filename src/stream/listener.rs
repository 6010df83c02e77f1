use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use tokio::net::ToSocketAddrs;

use super::RdmaStream;
use crate::connection::{Connection, ConnectionConfig, Listener, ListenerConfig};
use crate::connection::{ListenerStats, ShutdownReport};
use crate::verbs::Device;

/// A listener that accepts [`RdmaStream`]s, like `tokio::net::TcpListener`, and a [`Stream`] of
/// them. Limits apply to peers as in [`Listener`].
///
/// # Cancel safety
///
/// Dropping a future of `accept` or of the stream's adapters loses no stream. Dropping one of
/// `bind` stops listening.
pub struct RdmaListener {
    inner: Listener,
}

impl RdmaListener {
    /// Calls [`bind_with`](Self::bind_with) with [`ConnectionConfig::for_streams`].
    ///
    /// # Errors
    ///
    /// As for `bind_with`.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> io::Result<Self> {
        Self::listen(device, address, ConnectionConfig::for_streams().into()).await
    }

    /// Listens at the first usable address. Port 0 selects a free port. `config` is a
    /// [`ListenerConfig`], or only the [`ConnectionConfig`] of the streams.
    ///
    /// # Errors
    ///
    /// As for [`Listener::bind_with`]; the source is an [`EstablishError`](crate::EstablishError).
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: impl Into<ListenerConfig>,
    ) -> io::Result<Self> {
        Self::listen(device, address, config.into()).await
    }

    fn listen(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: ListenerConfig,
    ) -> impl Future<Output = io::Result<Self>> {
        let config = Box::new(config.with_bytes());
        async move { Ok(Self { inner: Listener::listen(device, address, config).await? }) }
    }

    /// Returns the next stream, and its peer's address.
    ///
    /// # Errors
    ///
    /// As for [`Listener::accept`].
    pub async fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        let stream = RdmaStream::new(self.inner.accept().await?);
        let peer = stream.peer_addr()?;
        Ok((stream, peer))
    }

    /// Polls for the next stream. As with `TcpListener`, only the task of the last call is woken.
    ///
    /// # Errors
    ///
    /// As for [`Listener::accept`].
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(RdmaStream, SocketAddr)>> {
        let stream = RdmaStream::new(ready!(self.inner.poll_accept(context))?);
        let peer = stream.peer_addr()?;
        Poll::Ready(Ok((stream, peer)))
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.inner.device()
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// None.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    /// Returns the counters of this listener.
    #[must_use]
    pub fn stats(&self) -> ListenerStats {
        self.inner.stats()
    }

    /// Shuts down like [`Listener::shutdown`]. Readers get the bytes that have arrived, then the
    /// end.
    ///
    /// # Cancel safety
    ///
    /// As for `Listener::shutdown`.
    pub async fn shutdown(self, limit: Duration) -> ShutdownReport {
        self.inner.shutdown(limit).await
    }
}

/// Yields accepted streams, and ends when no more requests can arrive.
impl Stream for RdmaListener {
    type Item = io::Result<RdmaStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let stream = |connection: Connection| RdmaStream::new(connection);
        Pin::new(&mut self.inner)
            .poll_next(context)
            .map(|next| next.map(|accepted| accepted.map(stream).map_err(io::Error::from)))
    }
}

impl fmt::Debug for RdmaListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaListener")
            .field("inner", &self.inner)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
