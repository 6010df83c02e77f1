//! Memory windows of type 2B: keys that work requests turn on and off.
//!
//! A window has a slot among the [`Keys`], open while it is bound. It covers a part of a registration, whose memory it
//! names itself: so the registration ends its windows when it ends, and a binding is made while the registration is in use.

use rdma_provider::types::{Access, Qpn, Rkey, WindowBind};

use super::keys::{Keys, NotCovered, family, window_owner};

/// Window that is allocated.
#[derive(Debug)]
pub(crate) struct Window {
    pd: u32,
    /// As allocated, or as bound last.
    key: u32,
    bound: Option<Binding>,
}

#[derive(Debug)]
struct Binding {
    region: u32,
    qpn: Qpn,
}

impl Window {
    /// Key of the registration it is bound to.
    pub(crate) fn region(&self) -> Option<u32> {
        self.bound.as_ref().map(|bound| bound.region)
    }

    fn owner(&self) -> Option<Qpn> {
        self.bound.as_ref().map(|bound| bound.qpn)
    }
}

impl Keys {
    /// Allocates a window; its key, or `None` if the table is full.
    pub(crate) fn add_window(&self, pd: u32, random: u64) -> Option<u32> {
        let (_, key) = self.claim(random)?;
        self.windows.lock().insert(family(key), Window { pd, key, bound: None });
        Some(key)
    }

    /// Ends the access through the window that was allocated as `key`, and the window.
    pub(crate) fn remove_window(&self, key: u32) {
        let mut windows = self.windows.lock();
        if let Some(mut window) = windows.remove(&family(key)) {
            self.end(&mut window);
            self.release(key);
        }
    }

    /// Binds a window for the peer of `qpn`, a queue pair of `pd` (`ibv_bind_mw(3)`).
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
        slot.open(key, window_owner(qpn), bind.access, true);
        window.key = key;
        window.bound = Some(Binding { region: bind.lkey.0, qpn });
        // The segment keeps the registration from ending until here, where it finds the window; see `Keys::remove`.
        drop(segment);
        Ok(())
    }

    /// Ends the access by `rkey`, a window that `qpn` bound, and returns when nobody is within any more.
    pub(crate) fn invalidate(&self, rkey: Rkey, qpn: Qpn) -> Result<(), NotCovered> {
        let mut windows = self.windows.lock();
        match windows.get_mut(&family(rkey.0)) {
            Some(window) if window.key == rkey.0 && window.owner() == Some(qpn) => {
                self.end(window);
                Ok(())
            }
            _ => Err(NotCovered),
        }
    }

    /// Ends the access through all windows that `qpn` bound.
    pub(crate) fn end_windows_of(&self, qpn: Qpn) {
        self.end_windows(|window| window.owner() == Some(qpn));
    }

    pub(crate) fn end_windows(&self, which: impl Fn(&Window) -> bool) {
        self.windows
            .lock()
            .values_mut()
            .filter(|window| which(window))
            .for_each(|window| self.end(window));
    }

    /// Those who are within hold the responder of the queue pair and wait for nobody who is here.
    fn end(&self, window: &mut Window) {
        if window.bound.take().is_some()
            && let Some(slot) = self.slot(window.key)
        {
            slot.close();
        }
    }
}
