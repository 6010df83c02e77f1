//! Memory windows of type 2B: bound and invalidated by the send queue of the queue pair that owns
//! the binding.

use crate::abi::access;
use crate::control::Status;
use crate::memory::Buffer;
use crate::objects::{ContextId, Handle, Qp};
use crate::state::State;
use crate::wqe::{Bind, Remote, Umr};

/// A memory window.
///
/// The index in the upper 24 bits of the key stays the same; each binding chooses the low byte. An
/// invalidated window keeps its last key, which the next binding names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mw {
    pub(crate) context: ContextId,
    pub(crate) pd: Handle,
    pub(crate) key: u32,
    pub(crate) binding: Option<Binding>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    qpn: u32,
    pub(crate) mr: Handle,
    access: u32,
    start: u64,
    memory: Buffer,
}

impl Mw {
    pub(crate) fn index(&self) -> u32 {
        self.key >> 8
    }
}

impl State {
    /// Executes a UMR request of `qp`.
    pub(crate) fn change_window(&mut self, qp: &Qp, umr: &Umr) -> Result<(), Status> {
        let Some(bind) = umr.bind else {
            // libmlx5 writes a binding of no bytes as an invalidation that changes the key. Its own
            // invalidations set the low byte to 0.
            return match self.invalidate(qp.number, umr.key) {
                true => Ok(()),
                false if umr.variant != 0 => Err(Status::MemoryWindowBind),
                false => Err(Status::LocalQueuePairOperation),
            };
        };
        let binding = self.binding(qp, umr, &bind).ok_or(Status::MemoryWindowBind)?;
        let mw = self.mw_by_index.get(&(umr.key >> 8)).and_then(|mw| self.mws.get_mut(mw));
        let mw = mw.ok_or(Status::MemoryWindowBind)?;
        mw.key = umr.key & !0xff | u32::from(umr.variant);
        mw.binding = Some(binding);
        Ok(())
    }

    /// Checks window, region and rights; returns the binding if they permit it.
    fn binding(&self, qp: &Qp, umr: &Umr, bind: &Bind) -> Option<Binding> {
        const CHANGES: u32 = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
        let mw = self.mw_by_index.get(&(umr.key >> 8)).and_then(|mw| self.mws.get(mw))?;
        let free = mw.pd == qp.pd && mw.key == umr.key && mw.binding.is_none();
        // A binding under the same key would revive references that the peer kept.
        if !free || umr.variant == umr.key as u8 {
            return None;
        }
        let &handle = self.mr_by_key.get(&bind.memory.key)?;
        let mr = &self.mrs[&handle];
        let needed = match bind.access & CHANGES {
            0 => access::MW_BIND,
            _ => access::MW_BIND | access::LOCAL_WRITE,
        };
        let permitted = mr.pd == qp.pd
            && mr.access & needed == needed
            && bind.access & access::LOCAL_WRITE == 0
            && bind.memory.len != 0;
        let memory = mr.part(bind.memory.address, bind.memory.len).filter(|_| permitted)?;
        let (qpn, access, start) = (qp.number, bind.access, bind.start);
        Some(Binding { qpn, mr: handle, access, start, memory })
    }

    /// Invalidates the window bound by queue pair `qpn` under `key`; returns `false` if there is
    /// none.
    pub(crate) fn invalidate(&mut self, qpn: u32, key: u32) -> bool {
        let mw = self.mw_by_index.get(&(key >> 8)).and_then(|mw| self.mws.get_mut(mw));
        let bound =
            mw.filter(|mw| mw.key == key && mw.binding.is_some_and(|binding| binding.qpn == qpn));
        bound.is_some_and(|mw| mw.binding.take().is_some())
    }

    /// Returns the memory behind a window's key, if queue pair `qpn` has bound it and it grants
    /// access `wanted`.
    pub(crate) fn window(
        &self,
        qpn: u32,
        remote: &Remote,
        len: u64,
        wanted: u32,
    ) -> Option<Buffer> {
        let mw = self.mw_by_index.get(&(remote.key >> 8)).and_then(|mw| self.mws.get(mw))?;
        let binding = mw.binding.filter(|binding| mw.key == remote.key && binding.qpn == qpn)?;
        let from = remote.address.checked_sub(binding.start)?;
        (binding.access & wanted == wanted).then(|| binding.memory.part(from, len)).flatten()
    }
}
