//! Two connected queue pairs of the operation layer.

use std::future::Future;
use std::time::Duration;

use tokio_rdma::op::{QueuePairBuilder, RetryConfig};
use tokio_rdma::types::{AckTimeout, AddressVector, Mtu, PortNum, Qkey, QpState, Transport};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, ExposedRegion, Pool, ProtectionDomain, QueuePair,
    RemoteRegion,
};

use super::{Setup, Wire, rxe};

pub(crate) const QKEY: Qkey = Qkey(0x1111_2222);

pub(crate) struct Side {
    pub(crate) qp: QueuePair,
    pub(crate) queue: CompletionQueue,
    pub(crate) pool: Pool,
    pub(crate) pd: ProtectionDomain,
}

impl Side {
    fn new(device: &tokio_rdma::Device, shape: &Shape<'_>) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::builder(device).mode(shape.mode.clone());
        let queue = queue.timestamps(shape.timestamps).build().unwrap();
        let builder = QueuePair::builder(&pd, &queue).transport(shape.transport);
        let builder = if shape.transport == Transport::Ud { builder.qkey(QKEY) } else { builder };
        let qp = (shape.build)(builder).build().unwrap();
        let pool = Pool::builder(&pd)
            .buffer_size(shape.buffer_size)
            .buffers(16)
            .growing(true)
            .build()
            .unwrap();
        Self { qp, queue, pool, pd }
    }

    pub(crate) fn buffer(&self, bytes: &[u8]) -> BufMut {
        self.pool.copy_from(bytes).unwrap()
    }

    /// Returns a buffer of `len` filler bytes.
    pub(crate) fn blank(&self, len: usize) -> BufMut {
        let mut buffer = self.pool.try_alloc(len).unwrap();
        buffer.fill(0xee);
        buffer
    }

    pub(crate) fn region(&self, len: usize) -> ExposedRegion {
        ExposedRegion::new(
            &self.pd,
            tokio_rdma::memory::HostMemory::zeroed(len).unwrap(),
            tokio_rdma::Access::REMOTE_ALL,
        )
        .unwrap()
    }

    pub(crate) fn state(&self) -> QpState {
        self.qp.query().unwrap().0
    }

    pub(crate) fn route_to(&self, peer: &Self) -> AddressHandle {
        let index = self.pd.device().default_path().unwrap().1.index;
        let endpoint = peer.qp.endpoint();
        let address = AddressVector {
            dlid: endpoint.lid,
            ..AddressVector::new(PortNum(1), index, endpoint.gid)
        };
        self.pd.address_handle(&address).unwrap()
    }
}

pub(crate) struct Shape<'a> {
    pub(crate) transport: Transport,
    pub(crate) mode: CompletionMode,
    pub(crate) timestamps: bool,
    pub(crate) mtu: Mtu,
    pub(crate) buffer_size: usize,
    pub(crate) options: RetryConfig,
    pub(crate) build: &'a dyn Fn(QueuePairBuilder) -> QueuePairBuilder,
}

impl Shape<'_> {
    pub(crate) fn new(transport: Transport, mode: &str) -> Self {
        Self {
            transport,
            mode: super::mode(mode),
            timestamps: false,
            mtu: Mtu::Mtu4096,
            buffer_size: 16384,
            options: match crate::wire() {
                // Short, because lost packets are retransmitted after it.
                Wire::Faults => {
                    RetryConfig { timeout: AckTimeout::from_code(14), ..Default::default() }
                }
                _ => RetryConfig::default(),
            },
            build: &|builder| builder,
        }
    }
}

/// Two connected ends, dropped before their devices.
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) setup: Setup,
}

impl Pair {
    pub(crate) fn new(transport: Transport, mode: &str) -> Self {
        Self::shaped(Setup::new(), &Shape::new(transport, mode))
    }

    pub(crate) fn shaped(setup: Setup, shape: &Shape<'_>) -> Self {
        let pair = Self { a: Side::new(&setup.a, shape), b: Side::new(&setup.b, shape), setup };
        connect(&pair.a.qp, &pair.b.qp, shape.mtu, &shape.options);
        pair
    }
}

/// Awaits fenced work of `side`, or a batch that contains some.
pub(crate) async fn fenced<T>(
    side: &Side,
    remote: RemoteRegion,
    work: impl Future<Output = T>,
) -> T {
    let mut work = std::pin::pin!(work);
    if !rxe::known(side.pd.device(), &rxe::FENCED_WORK_STALLS) {
        return work.await;
    }
    loop {
        match tokio::time::timeout(Duration::from_millis(20), &mut work).await {
            Ok(output) => return output,
            // SoftRoCE resumes stalled fenced work at the next post.
            Err(_) => drop(side.qp.write_inline(b"", remote)),
        }
    }
}

/// Connects two queue pairs, or activates both if they are of datagrams.
pub(crate) fn connect(a: &QueuePair, b: &QueuePair, mtu: Mtu, options: &RetryConfig) {
    if a.transport() == Transport::Ud {
        a.activate().unwrap();
        b.activate().unwrap();
        return;
    }
    if crate::torture::connect_by_address(a, b) {
        return;
    }
    for (from, to) in [(a, b), (b, a)] {
        let mut endpoint = to.endpoint();
        endpoint.mtu = endpoint.mtu.min(mtu);
        from.connect_with(&endpoint, options).unwrap();
    }
}
