//! Tests of DC pools for any device with DC.

mod campaign;
mod deadlines;
mod errors;
mod scheduling;
mod sets;

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio_rdma::dc::{DcPolicy, DcPool, DcPoolPeer, DcTarget};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::{AckTimeout, RnrTimer};
use tokio_rdma::{
    Access, BufMut, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain, RemoteRegion,
    SharedReceiveQueue,
};

use crate::common::{Setup, mode, skip, until};

pub(crate) fn setup(test: &str) -> Option<Setup> {
    let setup = Setup::new();
    if setup.a.attr().dc.is_none() {
        skip(test, "no DC");
        return None;
    }
    Some(setup)
}

/// Returns options with a short ACK timeout but unlimited RNR retries, so that a missing receive
/// keeps an initiator busy. Over UDP, answers wait for a thread.
fn options() -> RetryConfig {
    RetryConfig {
        timeout: AckTimeout::from_code(match crate::wire() {
            crate::common::Wire::Memory => 10,
            _ => 17,
        }),
        retry_count: 2,
        rnr_retry: 7,
        rnr_timer: RnrTimer::from_code(1),
    }
}

pub(crate) struct Home {
    pub(crate) buffers: Pool,
    queue: CompletionQueue,
    pd: ProtectionDomain,
}

impl Home {
    pub(crate) fn new(device: &Device, mode_name: &str) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(device, mode(mode_name)).unwrap();
        let buffers = Pool::builder(&pd).buffer_size(256).buffers(512).build().unwrap();
        Self { buffers, queue, pd }
    }

    pub(crate) fn pool(&self, initiators: usize, policy: DcPolicy) -> DcPool {
        let builder = DcPool::builder(&self.pd, &self.queue).initiators(initiators).policy(policy);
        builder.initiator(|each| each.retries(options()).max_send_wr(64)).build().unwrap()
    }

    pub(crate) fn buffer(&self, bytes: &[u8]) -> BufMut {
        self.buffers.copy_from(bytes).unwrap()
    }
}

pub(crate) struct Node {
    pub(crate) target: DcTarget,
    srq: SharedReceiveQueue,
    pub(crate) region: ExposedRegion,
    buffers: Pool,
    /// Dropped last.
    queue: CompletionQueue,
}

impl Node {
    pub(crate) fn new(device: &Device, mode_name: &str) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(device, mode(mode_name)).unwrap();
        Self::within(&pd, &queue)
    }

    fn within(pd: &ProtectionDomain, queue: &CompletionQueue) -> Self {
        let srq = SharedReceiveQueue::new(pd, queue, 64, 1).unwrap();
        let (target, region) = expose(pd, &srq);
        let buffers = Pool::builder(pd).buffer_size(64).buffers(64).build().unwrap();
        Self { target, srq, region, buffers, queue: queue.clone() }
    }

    /// Creates a node with the same receives, and a target and memory of its own.
    fn beside(&self) -> Self {
        let (target, region) = expose(self.target.protection_domain(), &self.srq);
        let (srq, buffers) = (self.srq.clone(), self.buffers.clone());
        Self { target, region, srq, buffers, queue: self.queue.clone() }
    }

    pub(crate) fn remote(&self, offset: usize, len: usize) -> RemoteRegion {
        self.region.grant().slice(offset as u64..(offset + len) as u64).unwrap()
    }

    fn word(&self, at: usize) -> RemoteRegion {
        self.remote(8 * at, 8)
    }

    pub(crate) fn forbidden(&self) -> RemoteRegion {
        let mut bytes = self.remote(0, 8).to_bytes();
        bytes[16] ^= 0x5a;
        RemoteRegion::from_bytes(&bytes).unwrap()
    }
}

fn expose(pd: &ProtectionDomain, srq: &SharedReceiveQueue) -> (DcTarget, ExposedRegion) {
    let target = DcTarget::builder(pd, srq).rnr_timer(RnrTimer::from_code(1)).build().unwrap();
    let memory = HostMemory::zeroed(4096).unwrap();
    (target, ExposedRegion::new(pd, memory, Access::REMOTE_ALL).unwrap())
}

const fn exclusive(quota: u32) -> DcPolicy {
    DcPolicy::Exclusive { quota }
}

pub(crate) fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Keeps the initiator of `peer` busy until `node` posts a receive.
async fn block(
    node: &Node,
    peer: &DcPoolPeer,
) -> tokio_rdma::dc::PooledOperation<tokio_rdma::op::Send<()>> {
    let mut send = peer.send_inline(b"blocks");
    assert!(poll(&mut send).is_pending(), "there is a receive: {:?}", node.srq);
    send
}

async fn unblock(node: &Node) {
    let receive = node.srq.recv(node.buffers.try_alloc(64).unwrap());
    let received = crate::common::within("receive", receive).await.unwrap();
    assert_eq!(&received.buffer[..], b"blocks");
}
