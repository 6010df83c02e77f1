//! Servers that the peers of a set lead to, by connections and by a DC pool.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rdma::dc::{DcPool, DcPoolPeer, DcTarget};
use tokio_rdma::peers::{PeerLink, PeerSet, PeerSetConfig};
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Connection, Device, ExposedRegion, RemoteRegion,
    SharedReceiveQueue,
};

use super::setup::{Hosts, serve};
use crate::connected::{patient, recv};
use crate::torture::soon;

/// A server, and how a set reaches it.
pub(crate) trait Server: Sized + Send + Sync + 'static {
    type Link: PeerLink + fmt::Debug;

    async fn start() -> Self;

    /// Returns a set whose peers are all at this server.
    fn peers(&self, settings: PeerSetConfig, directory: &Directory) -> PeerSet<u32, Self::Link>;

    /// Uses the link; panics if it does not work.
    fn exchange(&self, link: &Self::Link) -> impl Future<Output = ()> + Send;

    /// Makes the server end the link, and waits until it has ended.
    async fn lose(&self, link: &Self::Link);
}

/// The lookup by which a set resolves its peers.
#[derive(Clone)]
pub(crate) struct Directory {
    entry: watch::Sender<Entry>,
    calls: Arc<AtomicU32>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Entry {
    /// The lookup does not end.
    Pending,
    Missing,
    Found,
}

impl Directory {
    pub(crate) fn new(entry: Entry) -> Self {
        Self { entry: watch::Sender::new(entry), calls: Arc::default() }
    }

    pub(crate) fn set(&self, entry: Entry) {
        self.entry.send_replace(entry);
    }

    /// Returns how often a peer was resolved.
    pub(crate) fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }

    fn resolve<A: Copy + Send + Sync + 'static>(
        &self,
        address: A,
    ) -> impl Fn(&u32) -> BoxFuture<'static, io::Result<A>> + Send + Sync + 'static {
        let this = self.clone();
        move |_| {
            this.calls.fetch_add(1, Ordering::Relaxed);
            let mut entry = this.entry.subscribe();
            async move {
                let entry = *entry.wait_for(|entry| *entry != Entry::Pending).await.unwrap();
                let found = (entry == Entry::Found).then_some(address);
                found.ok_or_else(|| io::Error::other("not in the directory"))
            }
            .boxed()
        }
    }
}

/// A server that answers the messages of its connections.
pub(crate) struct Rc {
    pub(crate) hosts: Hosts,
    serving: JoinHandle<()>,
}

impl Server for Rc {
    type Link = Connection;

    async fn start() -> Self {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        Self { hosts, serving }
    }

    fn peers(&self, settings: PeerSetConfig, directory: &Directory) -> PeerSet<u32> {
        let Hosts { client, address, config, .. } = &self.hosts;
        PeerSet::new(client, config, settings, directory.resolve(*address)).unwrap()
    }

    async fn exchange(&self, link: &Connection) {
        link.send("hello").await.unwrap();
        assert_eq!(recv(link).await, "hello");
    }

    async fn lose(&self, link: &Connection) {
        link.send(super::setup::END).await.unwrap();
        soon("end", link.closed()).await;
    }
}

impl Drop for Rc {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// A target with memory, and a pool of two initiators on another device.
pub(crate) struct Dc {
    pool: DcPool,
    target: DcTarget,
    region: ExposedRegion,
}

impl Server for Dc {
    type Link = DcPoolPeer;

    async fn start() -> Self {
        let network = Network::new();
        let [(client, sends), (server, receives)] = ["client", "server"].map(|name| {
            let device = Device::software_in(&network, name).unwrap();
            let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
            (device.protection_domain().unwrap(), queue)
        });
        let receives = SharedReceiveQueue::new(&server, &receives, 1, 1).unwrap();
        let target = DcTarget::new(&server, &receives).unwrap();
        let region = ExposedRegion::new(&server, vec![0; 8], Access::REMOTE_ALL).unwrap();
        let pool = DcPool::builder(&client, &sends)
            .initiators(2)
            .initiator(|each| each.retries(patient()))
            .build()
            .unwrap();
        Self { pool, target, region }
    }

    fn peers(&self, settings: PeerSetConfig, directory: &Directory) -> PeerSet<u32, DcPoolPeer> {
        PeerSet::over_dc(&self.pool, settings, directory.resolve(self.target.address())).unwrap()
    }

    async fn exchange(&self, link: &DcPoolPeer) {
        link.fetch_add(self.region.grant(), 1).await.unwrap();
    }

    async fn lose(&self, link: &DcPoolPeer) {
        let mut forbidden = self.region.grant().to_bytes();
        forbidden[16] ^= 0x5a;
        let forbidden = RemoteRegion::from_bytes(&forbidden).unwrap();
        soon("failure", link.write_inline(b"fail", forbidden)).await.unwrap_err();
    }
}
