//! A stream with what the ecosystems ask about a connection.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rdma::RdmaStream;

/// An [`RdmaStream`] that implements the traits of hyper-util and tonic for connections.
///
/// # Cancel safety
///
/// See [`RdmaStream`].
#[derive(Debug)]
pub struct HttpStream(RdmaStream);

impl HttpStream {
    /// Returns the stream.
    #[must_use]
    pub fn get_ref(&self) -> &RdmaStream {
        &self.0
    }

    /// Returns the stream.
    #[must_use]
    pub fn into_inner(self) -> RdmaStream {
        self.0
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    ///
    /// See [`RdmaStream::peer_addr`].
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.peer_addr()
    }
}

impl From<RdmaStream> for HttpStream {
    fn from(stream: RdmaStream) -> Self {
        Self(stream)
    }
}

impl AsyncRead for HttpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for HttpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(feature = "hyper")]
impl hyper_util::client::legacy::connect::Connection for HttpStream {
    fn connected(&self) -> hyper_util::client::legacy::connect::Connected {
        hyper_util::client::legacy::connect::Connected::new()
    }
}

/// The addresses of a connection, in the extensions of a tonic request.
#[cfg(feature = "tonic")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectInfo {
    /// The local address.
    pub local_addr: Option<SocketAddr>,
    /// The peer's address.
    pub peer_addr: Option<SocketAddr>,
}

#[cfg(feature = "tonic")]
impl tonic::transport::server::Connected for HttpStream {
    type ConnectInfo = ConnectInfo;

    fn connect_info(&self) -> ConnectInfo {
        ConnectInfo { local_addr: self.0.local_addr().ok(), peer_addr: self.0.peer_addr().ok() }
    }
}
