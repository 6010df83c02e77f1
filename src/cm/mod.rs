//! How two sides meet: listen, connect, say goodbye, by IP address.
//!
//! ```text
//!  Listener::bind ─▶ accept ─▶ Request ─▶ prepare a queue pair ─▶ Request::accept ─▶ Link
//!                                  └────▶ Request::reject
//!  resolve ─▶ Route ─▶ prepare a queue pair ─▶ Route::connect ─▶ Link
//! ```
//!
//! The manager signals and does not own queue pairs: a route, or a request, says from which port and GID a queue pair
//! has to send; the caller makes it there, with whatever queues it likes, and it is ready to use when it comes back
//! connected. If it does not, it is in the error state: nothing is ever half connected.
//!
//! On the software device the manager is the device's own; 127.0.0.1 and ::1 lead to whichever device of its network
//! listens there. On real devices it is librdmacm.
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
//! let server = async {
//!     let request = listener.accept().await?;
//!     let qp = request.prepare(QueuePair::builder(&pd, &queue)).build()?;
//!     let received = qp.recv(pool.alloc(64).await?);
//!     let link = request.accept(&qp, &cm::Options::default()).await?;
//!     assert_eq!(&received.await?.buffer[..5], b"hello");
//!     Ok::<_, Box<dyn std::error::Error>>((link, qp))
//! };
//! let client = async {
//!     let route = cm::resolve(&device, address).await?;
//!     let qp = route.prepare(QueuePair::builder(&pd, &queue)).build()?;
//!     let link = route.connect(&qp, &cm::Options::default()).await?;
//!     qp.send(pool.copy_from(b"hello")?).await?;
//!     Ok::<_, Box<dyn std::error::Error>>((link, qp))
//! };
//! let ((theirs, _server), (ours, _client)) = tokio::try_join!(server, client)?;
//! ours.disconnect().await?;
//! assert_eq!(theirs.disconnected().await, cm::Disconnection::Peer);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub(crate) mod clock;
mod connector;
mod disposer;
mod endpoint;
mod error;
mod event_reactor;
mod keepalive;
mod link;
mod listener;
mod options;
mod path;
mod router;

pub use connector::{Route, connect, resolve, resolve_with};
pub(crate) use error::FOR_MESSAGES;
pub use error::{Attempt, ConnectError, Step};
pub use link::{Disconnection, Link};
pub(crate) use listener::Waiting;
pub use listener::{Listener, Request};
pub use options::{ListenOptions, Options};

pub use crate::types::RejectReason;
