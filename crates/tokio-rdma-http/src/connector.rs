//! A connector of clients.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::Scheme;
use hyper_util::rt::TokioIo;
use tokio_rdma::{ConnectionConfig, Device, RdmaStream};
use tower_service::Service;

use crate::stream::HttpStream;

/// A connector for clients of hyper-util, and with feature `tonic` for
/// `tonic::transport::Endpoint::connect_with_connector`.
///
/// It connects to the host and port of the URI, by default port 80, or 443 for `https`. It does not
/// encrypt: wrap it, as a connector of TCP, to add TLS.
#[derive(Clone)]
pub struct RdmaConnector {
    device: Device,
    config: ConnectionConfig,
}

impl RdmaConnector {
    /// Creates a connector on a device with the settings of [`ConnectionConfig::for_streams`].
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self::with_config(device, &ConnectionConfig::for_streams())
    }

    /// Creates a connector on a device.
    #[must_use]
    pub fn with_config(device: &Device, config: &ConnectionConfig) -> Self {
        Self { device: device.clone(), config: config.clone() }
    }
}

impl Service<Uri> for RdmaConnector {
    type Response = TokioIo<HttpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { device, config } = self.clone();
        Box::pin(async move {
            let (host, port) = target(&uri)?;
            let stream = RdmaStream::connect_with(&device, (host, port), &config).await?;
            Ok(TokioIo::new(HttpStream::from(stream)))
        })
    }
}

/// Returns the host and port of a URI.
fn target(uri: &Uri) -> io::Result<(&str, u16)> {
    let host = uri.host().ok_or_else(|| {
        let text = format!("cannot connect to {uri}: the URI names no host");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    // An IPv6 address has brackets in a URI.
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let https = uri.scheme() == Some(&Scheme::HTTPS);
    Ok((host, uri.port_u16().unwrap_or(if https { 443 } else { 80 })))
}

impl fmt::Debug for RdmaConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaConnector").field("device", &self.device).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_of_a_uri_are_the_target() {
        let target = |uri: &str| {
            let uri: Uri = uri.parse().unwrap();
            target(&uri).map(|(host, port)| (host.to_owned(), port)).map_err(|error| error.kind())
        };
        assert_eq!(target("http://example.org/path"), Ok(("example.org".to_owned(), 80)));
        assert_eq!(target("https://example.org"), Ok(("example.org".to_owned(), 443)));
        assert_eq!(target("http://10.0.0.1:7471"), Ok(("10.0.0.1".to_owned(), 7471)));
        assert_eq!(target("http://[::1]:7471/"), Ok(("::1".to_owned(), 7471)));
        assert_eq!(target("/path"), Err(io::ErrorKind::InvalidInput));
    }
}
