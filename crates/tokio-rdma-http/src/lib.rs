//! HTTP and gRPC over RDMA, with hyper, axum and tonic.
//!
//! [`RdmaStream`] implements Tokio's traits, so servers and clients of hyper and rustls use it as
//! it is. This crate adds what their ecosystems connect and accept with:
//!
//! | Feature | Type | For |
//! |---|---|---|
//! | `hyper` | `RdmaConnector` | clients of hyper-util |
//! | `axum` | [`HttpListener`] | `axum::serve` |
//! | `tonic` | `RdmaConnector` | channels of tonic |
//! | `tonic` | [`HttpListener`] | servers of tonic |
//! | `ibverbs` | | network adapters and SoftRoCE |
//!
//! A service of axum, called by a client of hyper:
//!
//! ```
//! # #[cfg(all(feature = "hyper", feature = "axum"))]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use axum::{Router, routing::get};
//! use http_body_util::{BodyExt, Empty};
//! use hyper_util::client::legacy::Client;
//! use hyper_util::rt::TokioExecutor;
//! use tokio_rdma::Device;
//! use tokio_rdma_http::{HttpListener, RdmaConnector};
//!
//! let device = Device::software()?;
//! let listener = HttpListener::bind(&device, "127.0.0.1:0").await?;
//! let address = listener.local_addr()?;
//! let service = Router::new().route("/", get(async || "hello"));
//! tokio::spawn(async { axum::serve(listener, service).await });
//!
//! let connector = RdmaConnector::new(&device);
//! let client = Client::builder(TokioExecutor::new()).build::<_, Empty<&[u8]>>(connector);
//! let response = client.get(format!("http://{address}/").parse()?).await?;
//! assert_eq!(response.into_body().collect().await?.to_bytes(), "hello");
//! # Ok(())
//! # }
//! # #[cfg(not(all(feature = "hyper", feature = "axum")))]
//! # fn main() {}
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "hyper")]
mod connector;
mod listener;
mod stream;

#[cfg(feature = "hyper")]
pub use connector::RdmaConnector;
pub use listener::HttpListener;
#[cfg(feature = "axum")]
pub use listener::PeerAddr;
#[cfg(feature = "tonic")]
pub use stream::ConnectInfo;
pub use stream::HttpStream;
#[cfg(doc)]
use tokio_rdma::RdmaStream;
