//! RDMA that you await: every work request is a future on Tokio.
//!
//! ```text
//!        your service
//!  transport   Connection: messages with flow control, and the operations below beside them
//!  cm          listen, connect, disconnect by IP address
//!  doctor      what works on this machine, and what to do if not
//!  op          QueuePair::{send, recv, write, read, compare_swap, fetch_add}, Batch → futures
//!  completion  slot in flight ▸ drain one queue ▸ wake; watched by events, busy-poll or both
//!  verbs       Device, ProtectionDomain, memory, Qp, Cq, Srq: freed in the right order
//!  provider    who executes: the embedded software device, or libibverbs
//! ```
//!
//! The same program runs on a software device inside the process, with no hardware, no kernel module and no
//! root, and with feature `ibverbs` on real devices, through libibverbs.
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

#![cfg_attr(docsrs, feature(doc_cfg))]

/// The programs of the pages are tests.
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

// Under Miri the name `parking_lot` means this crate, which has the locks of the standard library under the same names.
#[cfg(miri)]
extern crate self as parking_lot;
#[cfg(miri)]
use sync::locks::{Condvar, Mutex, MutexGuard, RwLock};

#[cfg(not(loom))]
pub mod cm;
pub mod doctor;
pub mod types;
pub mod verbs;

mod completion;
mod contained;
mod error;
mod host;
mod mem;
mod op;
mod provider;
mod sync;
// Tokio has no sockets under loom.
#[cfg(not(loom))]
mod transport;

pub use completion::{
    BusyPoller, CompletionMode, CompletionQueue, CompletionQueueBuilder, CompletionQueueCounters, DeviceEvents, Drive,
    WorkQueueCounters, events,
};
pub use error::{
    CompletionError, LimitError, NoRuntime, OpError, OpErrorKind, OpenError, OutOfBounds, ReceiveLengths, SetupError,
    TryError, VerbError,
};
pub use mem::{HostMemory, RemoteRegion, Storage};
pub use op::{
    Atomic, Batch, BatchOp, BatchResult, ConnectOptions, DcAddress, DcInitiator, DcInitiatorBuilder, DcLease, DcPeer,
    DcPolicy, DcPool, DcPoolBuilder, DcPoolCounters, DcPoolPeer, DcSender, DcTarget, DcTargetBuilder, EndpointError,
    Invalidate, Lease, Leasing, Lending, Operation, Pooled, QueuePair, QueuePairBuilder, QueuePairEndpoint, Read,
    Received, Recv, Send, SendTo, SharedReceiveQueue, Write,
};
#[cfg(not(loom))]
pub use transport::{
    CloseReason, Connection, ConnectionConfig, ConnectionCounters, ConnectionRequest, EstablishError, Hello,
    HelloError, Listener, ListenerStats, MessageError, Prepared, RecvHalf, Refusal, SendHalf, Violation,
};
pub use types::{Access, Imm};
pub use verbs::{
    AddressHandle, Buf, BufMut, Device, DmaBufRegion, ExposedRegion, ExposedSlice, Pool, PoolBuilder, PoolError,
    ProtectionDomain, Source, Target,
};

/// The parsers of what a peer sends, for `fuzz/`.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::provider::soft::fuzzing::*;
    pub use crate::transport::fuzzing::*;
}

/// The software device's own interface: networks within this process and over UDP, their faults and their clock.
pub mod software {
    pub use crate::error::UdpError;
    pub use crate::provider::soft::{
        CqCounters, DeviceControl, Faults, LinkCounters, Network, ReceiveCounters, SendCounters, TargetCounters,
        UdpConfig,
    };
}
