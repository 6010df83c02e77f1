//! Connections by IP address, services of datagrams that clients find by address, and multicast
//! groups.
//!
//! ```text
//!  Listener::bind ─▶ accept ─▶ ConnectionRequest ─▶ prepare a queue pair ─▶ accept ─▶ CmConnection
//!                                      └──────────▶ reject
//!  resolve ─▶ Route ─▶ prepare a queue pair ─▶ Route::connect ─▶ CmConnection
//! ```
//!
//! A [`Route`] or [`ConnectionRequest`] names the port and GID to send from, for which you build a
//! queue pair. It is ready to use when `connect` or `accept` succeeds, and in the error state if
//! the handshake fails.
//!
//! Functions that return [`ConnectError`] fail with [`ConnectError::NoRuntime`] outside of a Tokio
//! runtime with an I/O driver.
//!
//! Real devices use librdmacm. For the software device, 127.0.0.1 and ::1 lead to any device of its
//! network that listens there.
//!
//! ```
//! use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool, QueuePair, cm};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let device = Device::software()?;
//! let pd = device.protection_domain()?;
//! let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
//! let pool = Pool::new(&pd, 4096, 16)?;
//!
//! let listener = cm::Listener::bind(&device, "127.0.0.1:0").await?;
//! let address = listener.local_addr();
//! let config = cm::ConnectConfig::default().private_data(*b"v2");
//! let server = async {
//!     let request = listener.accept().await?;
//!     let qp = request.prepare(QueuePair::builder(&pd, &queue)).build()?;
//!     let received = qp.recv(pool.alloc(64).await?);
//!     let connection = request.accept(&qp, &config).await?;
//!     assert_eq!(&received.await?.buffer[..5], b"hello");
//!     Ok::<_, Box<dyn std::error::Error>>((connection, qp))
//! };
//! let client = async {
//!     let route = cm::resolve(&device, address).await?;
//!     let qp = route.prepare(QueuePair::builder(&pd, &queue)).build()?;
//!     let connection = route.connect(&qp, &config).await?;
//!     qp.send(pool.copy_from(b"hello")?).await?;
//!     Ok::<_, Box<dyn std::error::Error>>((connection, qp))
//! };
//! let ((theirs, _server), (ours, _client)) = tokio::try_join!(server, client)?;
//! ours.disconnect().await?;
//! assert_eq!(theirs.disconnected().await, cm::Disconnection::Peer);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod config;
mod connection;
mod connector;
mod datagrams;
mod disconnection;
mod disposer;
mod endpoint;
mod error;
mod event_reactor;
mod inbox;
mod keepalive;
mod listener;
mod multicast;
mod path;
mod router;

pub use config::{ConnectConfig, ListenConfig};
pub use connection::CmConnection;
pub use connector::{Route, connect, resolve, resolve_with};
pub use datagrams::{DatagramListener, DatagramPeer, DatagramRequest, resolve_datagrams};
pub use disconnection::Disconnection;
pub use error::{ConnectAttempt, ConnectError, ConnectStep};
pub(crate) use error::{FOR_MESSAGES, FOR_STREAMS};
pub(crate) use listener::PendingRequests;
pub use listener::{ConnectionRequest, Listener};
pub use multicast::MulticastGroup;

pub use crate::types::RejectReason;
