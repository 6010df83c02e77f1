//! Memory windows of type 2B: keys that work requests bind and invalidate.
//!
//! A bound window has an open slot in [`Keys`] with a copy of the memory range. Removing a
//! registration therefore unbinds its windows, and binding holds a use of it.

use rdma_provider::types::{Access, Qpn, Rkey, WindowBind};

use super::keys::{Keys, NotCovered, REORDERED, SHARED, family, window_owner};

#[derive(Debug)]
pub(crate) struct Window {
    pd: u32,
    key: u32,
    bound: Option<Binding>,
}

#[derive(Debug)]
struct Binding {
    region: u32,
    qpn: Qpn,
}

impl Window {
    pub(crate) fn region(&self) -> Option<u32> {
        self.bound.as_ref().map(|bound| bound.region)
    }

    fn owner(&self) -> Option<Qpn> {
        self.bound.as_ref().map(|bound| bound.qpn)
    }
}

impl Keys {
    /// Allocates a window and returns its key, unless the table is full.
    pub(crate) fn add_window(&self, pd: u32, random: u64) -> Option<u32> {
        let (_, key) = self.claim(random)?;
        self.windows.lock().insert(family(key), Window { pd, key, bound: None });
        Some(key)
    }

    /// Unbinds and frees the window allocated as `key`.
    pub(crate) fn remove_window(&self, key: u32) {
        let mut windows = self.windows.lock();
        if let Some(mut window) = windows.remove(&family(key)) {
            self.unbind(&mut window);
            self.release(key);
        }
    }

    /// Binds a window for the peer of `qpn` (`ibv_bind_mw(3)`).
    pub(crate) fn bind_window(
        &self,
        qpn: Qpn,
        pd: u32,
        bind: &WindowBind,
    ) -> Result<(), NotCovered> {
        let mut windows = self.windows.lock();
        let key = bind.rkey.0;
        let window = windows.get_mut(&family(bind.window as u32)).ok_or(NotCovered)?;
        let fits = window.pd == pd
            && window.bound.is_none()
            && window.key == bind.current.0
            && family(window.key) == family(key)
            && window.key != key
            && bind.len > 0
            && Access::REMOTE_ALL.contains(bind.access);
        if !fits {
            return Err(NotCovered);
        }
        let mut need = Access::MW_BIND;
        if bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            need |= Access::LOCAL_WRITE;
        }
        let len = usize::try_from(bind.len).map_err(|_| NotCovered)?;
        let slot = self.slot(key).ok_or(NotCovered)?;
        let segment = self.resolve(bind.lkey.0, pd, bind.addr, len, need)?;
        slot.region().assign_window(&segment, bind.addr);
        let marks = if segment.is_reordered() { SHARED | REORDERED } else { SHARED };
        slot.open(key, window_owner(qpn), bind.access, marks);
        window.key = key;
        window.bound = Some(Binding { region: bind.lkey.0, qpn });
        // Until here the segment blocks the registration's removal; now `Keys::remove` finds the
        // window.
        drop(segment);
        Ok(())
    }

    /// Unbinds a window that `qpn` bound, and waits until no use is left.
    pub(crate) fn invalidate(&self, rkey: Rkey, qpn: Qpn) -> Result<(), NotCovered> {
        let mut windows = self.windows.lock();
        match windows.get_mut(&family(rkey.0)) {
            Some(window) if window.key == rkey.0 && window.owner() == Some(qpn) => {
                self.unbind(window);
                Ok(())
            }
            _ => Err(NotCovered),
        }
    }

    pub(crate) fn unbind_windows_of(&self, qpn: Qpn) {
        self.unbind_windows(|window| window.owner() == Some(qpn));
    }

    pub(crate) fn unbind_windows(&self, which: impl Fn(&Window) -> bool) {
        self.windows
            .lock()
            .values_mut()
            .filter(|window| which(window))
            .for_each(|window| self.unbind(window));
    }

    /// Closes the slot and waits for all uses.
    ///
    /// A use holds the responder lock of its queue pair and never waits for the lock of the
    /// windows, which the caller holds.
    fn unbind(&self, window: &mut Window) {
        if window.bound.take().is_some()
            && let Some(slot) = self.slot(window.key)
        {
            slot.close();
        }
    }
}
