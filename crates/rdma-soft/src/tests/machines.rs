//! Shared parts of the tests of a requester or responder alone.

use super::*;
use rdma_provider::types::WcStatus;

use super::super::memory::dma::Memory;
use super::super::memory::keys::Keys;
use super::super::roce::requester::SendCompletions;
use super::super::roce::responder::{ReceiveWqe, Receiver};

pub(super) const MTU: usize = 256;
pub(super) const PSN: Psn = Psn::new(0xff_fffe);
pub(super) const PD: u32 = 1;
pub(super) const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_ALL).union(Access::MW_BIND);

/// Returns keys over one leaked buffer.
pub(super) fn memory() -> (Keys, u64, u32) {
    let keys = Keys::new();
    let buffer = Vec::<u64>::leak(vec![0; 1024]).as_mut_ptr().cast::<u8>();
    // SAFETY: leaked, and touched through the keys only.
    let memory = unsafe { Memory::new(buffer, 8192, buffer as u64) };
    let key = keys.insert(memory, ALL, false, PD, 42).unwrap();
    (keys, buffer as u64, key)
}

#[derive(Default)]
pub(super) struct Log {
    pub(super) completions: Vec<(u64, WcStatus)>,
    pub(super) events: Vec<AsyncEvent>,
    pub(super) failed: bool,
    pub(super) bad_pkeys: u32,
}

impl SendCompletions for Log {
    fn complete(&mut self, _: u32, completion: &WorkCompletion) {
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn now(&mut self) -> u64 {
        0
    }

    fn random(&mut self) -> Option<u64> {
        None
    }

    fn count_bad_pkey(&mut self) {
        self.bad_pkeys += 1;
    }
}

impl Receiver for Log {
    fn take_shared(&mut self, _: &mut ReceiveWqe) -> bool {
        false
    }

    fn complete(&mut self, _: u32, completion: &WorkCompletion, _: bool) {
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }

    fn count_bad_pkey(&mut self) {
        self.bad_pkeys += 1;
    }

    fn failed(&mut self) {
        self.failed = true;
    }
}
