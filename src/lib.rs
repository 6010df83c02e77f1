//! RDMA that you await: every work request is a future on Tokio.
//!
//! Remote direct memory access (RDMA) lets a network adapter read and write the memory of another host without a system call
//! on either side. A program registers memory with its device, connects a queue pair to that of a peer, and posts work
//! requests: SEND, RECV, WRITE, READ and atomics. The device executes them and puts a completion for each into a completion
//! queue. This crate makes a future of each work request: calling posts it, awaiting waits for its completion.
//!
//! Start with [`Device::open_default`]; with [`Connection`] and [`Listener`] if peers exchange messages. The same program
//! runs on a software device inside the process, with no hardware, no kernel module and no root, and with feature `ibverbs`
//! on SoftRoCE and on network adapters, through libibverbs.
//!
//! ```text
//!        your service
//!  message     Connection: messages with flow control, and the operations below beside them
//!  cm          listen, connect and disconnect by IP address
//!  doctor      what works on this machine, and what to do if not
//!  op, dc      QueuePair::{send, recv, write, read, compare_swap, fetch_add}, Batch; DcInitiator, DcPool → futures
//!  completion  CompletionQueue: modes (events, busy polling or both), counters
//!  memory      Buf, Pool, ExposedRegion: registered memory, freed when no device reaches it any more
//!  verbs       the bare objects: Device, ProtectionDomain, Qp, Cq, Srq
//!  ───────────────────────────────────────────────────────────────────────────────────────────────
//!  rdma-soft   the embedded software device      rdma-ibverbs   libibverbs, librdmacm, libmlx5
//! ```
//!
//! [`error`] has the errors of all layers, [`types`] the values of the verbs interface, [`software`] the networks of the
//! software device, and [`raw`](raw/index.html) the handles of libibverbs.
//!
//! | Feature | What it adds |
//! |---|---|
//! | none | the software device, in memory and as RoCE v2 over UDP |
//! | `ibverbs` | devices that libibverbs opens, and connections by librdmacm; [`raw`](raw/index.html) |
//! | `mlx5` | dynamic connections (DC) of ConnectX adapters; includes `ibverbs` |
//! | `serde` | [`QueuePairEndpoint`], [`DcAddress`](dc::DcAddress) and [`RemoteRegion`] in any format of serde |
//!
//! # A first run
//!
//! ```
//! use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open_default()?;
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

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Compiles the programs of the Markdown pages.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}

    #[doc = include_str!("../docs/guide.md")]
    mod guide {}

    #[doc = include_str!("../docs/from-async-rdma.md")]
    mod from_async_rdma {}

    #[doc = include_str!("../docs/from-c-verbs.md")]
    mod from_c_verbs {}

    #[doc = include_str!("../docs/dc.md")]
    mod dc {}

    #[doc = include_str!("../docs/software-device.md")]
    mod software_device {}
}

// Under Miri, which parking_lot does not run on, the locks of that name are those of the standard library.
#[cfg(miri)]
extern crate rdma_provider as parking_lot;

#[cfg(not(loom))]
pub mod cm;
pub mod dc;
pub mod doctor;
pub mod error;
pub mod memory;
// Tokio has no sockets under loom.
#[cfg(not(loom))]
pub mod message;
pub mod op;
#[cfg(all(feature = "ibverbs", not(loom)))]
#[cfg_attr(docsrs, doc(cfg(feature = "ibverbs")))]
pub mod raw;
pub mod verbs;

mod contained;
mod dispatch;
mod engine;
mod sync;

/// Completion queues: how they are watched, and what they count.
pub mod completion {
    pub use crate::engine::{
        BusyPoller, CompletionMode, CompletionQueue, CompletionQueueBuilder,
        CompletionQueueCounters, DeviceEvents, Drive, WorkQueueCounters,
    };
}

pub use engine::{CompletionMode, CompletionQueue};
pub use error::{OpError, OpErrorKind, SetupError, VerbError};
pub use memory::{Buf, BufMut, ExposedRegion, Pool, RemoteRegion};
#[cfg(not(loom))]
pub use message::{
    CloseReason, Connection, ConnectionConfig, ConnectionRequest, EstablishError, Listener,
    MessageError,
};
pub use op::{Batch, QueuePair, QueuePairEndpoint, SharedReceiveQueue};
pub use types::{Access, Imm};
pub use verbs::{Device, ProtectionDomain};

/// The parsers of what a peer sends, for `fuzz/`.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::message::fuzzing::*;
}

/// Values of the verbs interface: what is asked of a device and what it answers.
pub mod types {
    pub use rdma_provider::types::*;

    pub use crate::verbs::gid_rank::{GidReason, IpPrefix, RankedGid};
}

/// The software device's own interface: networks within this process and over UDP, their faults and their clock.
pub mod software {
    pub use crate::error::UdpError;
    pub use rdma_soft::{
        CqCounters, DeviceControl, Faults, LinkCounters, Network, ReceiveCounters, SendCounters,
        TargetCounters, UdpConfig,
    };
}
