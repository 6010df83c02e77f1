//! A listener of servers.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use tokio::net::ToSocketAddrs;
use tokio::time::{Sleep, sleep};
#[cfg(doc)]
use tokio_rdma::ConnectionConfig;
use tokio_rdma::{Device, EstablishError, ListenerConfig, RdmaListener};

use crate::stream::HttpStream;

/// The wait after the first failure to accept. It doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(10);

const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// An [`RdmaListener`] for `axum::serve`, and a [`Stream`] of connections for
/// `tonic::transport::server::Router::serve_with_incoming`.
///
/// If the resources of a connection cannot be created, it logs a warning and accepts again after 10
/// ms to one second, because existing connections may end meanwhile. After any other error, for
/// example because the device is gone, the stream ends, and `axum::serve` accepts no more
/// connections.
///
/// # Cancel safety
///
/// Dropping a future of the stream's adapters, such as `next`, loses no connection.
#[derive(Debug)]
pub struct HttpListener {
    inner: RdmaListener,
    /// Set after a failure.
    retry: Option<Pin<Box<Sleep>>>,
    wait: Duration,
    ended: bool,
}

impl HttpListener {
    /// Listens at the first usable address with the settings of
    /// [`ConnectionConfig::for_streams`]. Port 0 selects a free port.
    ///
    /// # Errors
    ///
    /// See [`RdmaListener::bind_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops listening.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + std::fmt::Debug,
    ) -> io::Result<Self> {
        Ok(RdmaListener::bind(device, address).await?.into())
    }

    /// Listens at the first usable address. Port 0 selects a free port. `config` is a
    /// [`ListenerConfig`], or only the [`ConnectionConfig`] of the streams.
    ///
    /// # Errors
    ///
    /// See [`RdmaListener::bind_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops listening.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs + std::fmt::Debug,
        config: impl Into<ListenerConfig>,
    ) -> io::Result<Self> {
        Ok(RdmaListener::bind_with(device, address, config).await?.into())
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// See [`RdmaListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    /// Returns the listener.
    #[must_use]
    pub fn get_ref(&self) -> &RdmaListener {
        &self.inner
    }

    /// Returns the listener, for example to [shut it down](RdmaListener::shutdown).
    #[must_use]
    pub fn into_inner(self) -> RdmaListener {
        self.inner
    }
}

impl From<RdmaListener> for HttpListener {
    fn from(inner: RdmaListener) -> Self {
        Self { inner, retry: None, wait: FIRST_WAIT, ended: false }
    }
}

impl Stream for HttpListener {
    type Item = io::Result<HttpStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { inner, retry, wait, ended } = &mut *self;
        while !*ended {
            if let Some(sleep) = retry {
                ready!(sleep.as_mut().poll(context));
                *retry = None;
            }
            match ready!(Pin::new(&mut *inner).poll_next(context)) {
                Some(Err(error)) if is_temporary(&error) => {
                    tracing::warn!(%error, ?wait, "failed to accept a connection; retrying");
                    *retry = Some(Box::pin(sleep(*wait)));
                    *wait = LONGEST_WAIT.min(*wait * 2);
                }
                next => {
                    *wait = FIRST_WAIT;
                    *ended = !matches!(next, Some(Ok(_)));
                    return Poll::Ready(next.map(|accepted| accepted.map(HttpStream::from)));
                }
            }
        }
        Poll::Ready(None)
    }
}

/// Returns true if a later connection may be accepted.
fn is_temporary(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(EstablishError::Setup(_)))
}

#[cfg(feature = "axum")]
impl axum::serve::Listener for HttpListener {
    type Io = HttpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (HttpStream, SocketAddr) {
        use futures::StreamExt;
        loop {
            match self.next().await {
                Some(Ok(stream)) => match stream.peer_addr() {
                    Ok(peer) => return (stream, peer),
                    Err(error) => {
                        tracing::warn!(%error, "dropped a connection without a peer's address");
                    }
                },
                Some(Err(error)) => {
                    tracing::error!(%error, "listening has ended; accepting no more connections");
                }
                None => return std::future::pending().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// The peer's address, for `axum::Router::into_make_service_with_connect_info`.
#[cfg(feature = "axum")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerAddr(pub SocketAddr);

#[cfg(feature = "axum")]
impl axum::extract::connect_info::Connected<axum::serve::IncomingStream<'_, HttpListener>>
    for PeerAddr
{
    fn connect_info(stream: axum::serve::IncomingStream<'_, HttpListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use futures::executor::block_on;

    use super::*;

    #[test]
    fn stream_ends_after_an_error_that_is_not_temporary() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let device = Device::software().unwrap();
        let mut listener = runtime.block_on(HttpListener::bind(&device, "127.0.0.1:0")).unwrap();
        // Outside a runtime no connection can be accepted.
        assert!(block_on(listener.next()).unwrap().is_err());
        assert!(block_on(listener.next()).is_none());
        assert!(runtime.block_on(listener.next()).is_none());
    }
}
