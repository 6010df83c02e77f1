//! Registered memory for the verbs layer.

use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::{Lkey, RemoteAddr, Sge};
use tokio_rdma::{Access, ExposedRegion, ProtectionDomain};

#[derive(Debug)]
pub(crate) struct Memory(ExposedRegion);

impl Memory {
    pub(crate) fn new(pd: &ProtectionDomain, len: usize) -> Self {
        let memory = HostMemory::zeroed(len.max(8)).unwrap();
        Self(ExposedRegion::new(pd, memory, Access::REMOTE_ALL).unwrap())
    }

    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        assert!(at + len <= self.0.len());
        let grant = self.0.grant();
        // The software device has one key for both uses.
        Sge { addr: grant.addr() + at as u64, length: len as u32, lkey: Lkey(grant.rkey().0) }
    }

    pub(crate) fn remote(&self, at: usize) -> RemoteAddr {
        let grant = self.0.grant();
        RemoteAddr { addr: grant.addr() + at as u64, rkey: grant.rkey() }
    }

    pub(crate) fn fill(&self, at: usize, bytes: &[u8]) {
        self.0.write(at, bytes).unwrap();
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read(at, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0.load(at).unwrap()
    }
}
