//! All nodes: a page is read from one node that has it, and written to all of them.

use futures::future::join_all;
use tokio_rdma::{BufMut, Device, ProtectionDomain, RemoteRegion};

use crate::node::Node;
use crate::{Directory, Instance, Map, PagerError, StartError};

#[derive(Debug)]
pub(crate) struct Replicas {
    /// In order of replica, then of name.
    nodes: Vec<Node>,
    directory: Directory,
    /// The coordinator of the map.
    instance: Instance,
    pages: u64,
}

impl Replicas {
    pub(crate) async fn connect(
        device: &Device,
        pd: &ProtectionDomain,
        directory: &Directory,
        map: Map,
    ) -> Result<Self, StartError> {
        let (pages, instance) = (map.pages(1), map.instance);
        let connecting =
            map.shares.into_iter().map(|(name, share)| Node::connect(device, pd, name, share));
        let mut nodes = join_all(connecting).await;
        nodes.sort_by_key(|node| node.share.replica);
        if nodes.iter().all(|node| node.lost().is_some())
            && let Some((node, cause)) =
                nodes.iter().find_map(|node| Some((node.name.clone(), node.lost()?)))
        {
            return Err(StartError::Alone { node, cause });
        }
        Ok(Self { nodes, directory: directory.clone(), instance, pages })
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn lost(&self) -> Vec<(String, crate::NodeError)> {
        self.nodes.iter().filter_map(|node| Some((node.name.clone(), node.lost()?))).collect()
    }

    /// Fills the buffer from the first live node.
    pub(crate) async fn read(&self, page: u64, mut buffer: BufMut) -> Result<BufMut, PagerError> {
        let mut lost = self.no_page(page);
        for (node, at) in self.copies(page) {
            match node.read(at, buffer).await {
                Ok(buffer) => return Ok(buffer),
                Err((cause, back)) => {
                    buffer = back;
                    lost = PagerError::Lost { page, node: node.name.clone(), cause };
                }
            }
        }
        Err(lost)
    }

    /// Writes the buffer to all nodes with the page, one after the other because each operation
    /// owns the buffer. Returns the buffer in any case. Succeeds only when nodes that lack the page
    /// are off the map, so that no client reads it there.
    pub(crate) async fn write(
        &self,
        page: u64,
        mut buffer: BufMut,
    ) -> (BufMut, Result<(), PagerError>) {
        let (mut written, mut missed, mut lost) = (false, Vec::new(), self.no_page(page));
        for (node, at) in self.copies(page) {
            match node.write(at, buffer).await {
                Ok(back) => (buffer, written) = (back, true),
                Err((cause, back)) => {
                    buffer = back;
                    lost = PagerError::Lost { page, node: node.name.clone(), cause };
                    missed.push(node);
                }
            }
        }
        // A client that reaches no node must not declare all of them lost.
        if !written {
            return (buffer, Err(lost));
        }
        let strikes = missed.into_iter().map(async |node| {
            let struck = node.strike(&self.directory, self.instance).await;
            struck.map_err(|cause| PagerError::Unsure { page, node: node.name.clone(), cause })
        });
        (buffer, join_all(strikes).await.into_iter().collect())
    }

    /// Returns whether a removal is unconfirmed: write-backs may have to wait for the coordinator,
    /// or fail.
    pub(crate) fn is_unsure(&self) -> bool {
        self.nodes.iter().any(|node| node.is_unsure(&self.directory))
    }

    fn copies(&self, page: u64) -> impl Iterator<Item = (&Node, RemoteRegion)> {
        self.nodes.iter().filter_map(move |node| Some((node, node.share.page(page)?)))
    }

    fn no_page(&self, page: u64) -> PagerError {
        PagerError::NoPage { page, pages: self.pages }
    }
}
