//! RDMA for Tokio: every work request is a future.
//!
//! With remote direct memory access (RDMA), a network adapter reads and writes the memory of
//! another host without a system call. This crate is an asynchronous interface to the verbs of RDMA
//! devices:
//!
//! - Calling an operation (SEND, RECV, WRITE, READ, atomics) posts it. Awaiting the returned future
//!   waits for its completion.
//! - An operation owns its buffers until the device has finished, so dropping the future, which
//!   does not cancel it, cannot corrupt memory.
//! - Programs run unchanged on the embedded software device, which needs no hardware or privileges,
//!   and, with feature `ibverbs`, on network adapters and SoftRoCE.
//!
//! ```
//! use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device};
//! use tokio_rdma::{ExposedRegion, Pool, QueuePair};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open_default_or_software()?;
//! let pd = device.protection_domain()?;
//! let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
//! let (ours, theirs) = (QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?);
//! ours.connect(&theirs.endpoint())?;
//! theirs.connect(&ours.endpoint())?;
//!
//! let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL)?;
//! let remote = region.grant();
//! let pool = Pool::new(&pd, 4096, 16)?;
//!
//! let buffer = ours.write(pool.copy_from(b"hello")?, remote.slice(..5)?).await?;
//! let buffer = ours.read(buffer, remote.slice(..5)?).await?;
//! assert_eq!(&buffer[..], b"hello");
//! assert_eq!(ours.fetch_add(remote.slice(8..16)?, 1).await?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to start
//!
//! | Task | Types |
//! |---|---|
//! | Open a device | [`Device::open_default`], [`Device::open_default_or_software`] |
//! | Exchange messages with peers found by IP address | [`Connection`], [`Listener`] |
//! | Connect queue pairs by IP address | [`cm`] |
//! | Replace a connection when it ends | [`Reconnect`](peers::Reconnect) |
//! | Keep connections or DC peers by key | [`PeerSet`](peers::PeerSet) |
//! | Replace TCP below hyper, axum, tonic or rustls | [`RdmaStream`], [`RdmaListener`] |
//! | Read and write the memory of a peer | [`QueuePair`], [`ExposedRegion`], [`RemoteRegion`] |
//! | Reach many peers with few queue pairs | [`DcPool`](dc::DcPool) |
//! | Choose between completion events and busy polling | [`CompletionQueue`], [`CompletionMode`] |
//! | Handle errors | [`error`] |
//! | Find out what works on this machine | [`doctor`] |
//! | Call verbs directly | [`verbs`], [`types`], [`raw`](raw/index.html) |
//! | Simulate networks and faults in tests | [`software`] |
//!
//! # Features
//!
//! | Feature | Adds |
//! |---|---|
//! | none | The software device, in memory or as RoCE v2 over UDP |
//! | `ibverbs` | Devices of libibverbs, connections by librdmacm, [`raw`](raw/index.html) handles |
//! | `mlx5` | Dynamic connections (DC) of ConnectX adapters; enables `ibverbs` |
//! | `serde` | serde for [`QueuePairEndpoint`], [`DcAddress`](dc::DcAddress), [`RemoteRegion`] |

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}

    #[doc = include_str!("../docs/guide.md")]
    mod guide {}

    #[doc = include_str!("../docs/from-async-rdma.md")]
    mod from_async_rdma {}

    #[doc = include_str!("../docs/verbs.md")]
    mod verbs {}

    #[doc = include_str!("../docs/dc.md")]
    mod dc {}

    #[doc = include_str!("../docs/streams.md")]
    mod streams {}

    #[doc = include_str!("../docs/reconnect.md")]
    mod reconnect {}

    #[doc = include_str!("../docs/software-device.md")]
    mod software_device {}
}

#[cfg(not(loom))]
pub mod cm;
pub mod dc;
#[cfg(not(loom))]
pub mod doctor;
pub mod error;
pub mod memory;
// Tokio has no sockets under loom.
#[cfg(not(loom))]
pub mod connection;
pub mod op;
#[cfg(not(loom))]
pub mod peers;
#[cfg(all(feature = "ibverbs", not(loom)))]
#[cfg_attr(docsrs, doc(cfg(feature = "ibverbs")))]
pub mod raw;
pub mod software;
#[cfg(not(loom))]
pub mod stream;
pub mod verbs;

#[cfg(not(loom))]
mod blocking;
mod clock;
mod contained;
mod coop;
mod dispatch;
mod engine;
mod forked;
mod readable;
mod sync;
#[cfg(not(loom))]
mod waiters;

/// Completion queues, their modes and counters.
pub mod completion {
    pub use crate::engine::{
        BusyPoller, CompletionMode, CompletionQueue, CompletionQueueBuilder,
        CompletionQueueCounters, DeviceEvents, Drive, WorkQueueCounters,
    };
}

#[cfg(not(loom))]
pub use connection::{
    CloseReason, Connection, ConnectionConfig, ConnectionRequest, EstablishError, Listener,
    ListenerConfig, MessageError,
};
pub use engine::{CompletionMode, CompletionQueue};
pub use error::{OpError, OpErrorKind, SetupError, VerbError};
pub use memory::{Buf, BufMut, ExposedRegion, Pool, RemoteRegion};
pub use op::{Batch, PathConfig, QueuePair, QueuePairEndpoint, SharedReceiveQueue};
#[cfg(not(loom))]
pub use stream::{RdmaListener, RdmaStream};
pub use types::{Access, Imm};
pub use verbs::{Device, ProtectionDomain};

/// Values of the verbs interface: attributes, work requests and completions.
pub mod types {
    pub use rdma_provider::types::*;

    pub use crate::verbs::gid_rank::{GidReason, IpPrefix, RankedGid};
}
