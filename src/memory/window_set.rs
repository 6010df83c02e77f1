//! The windows of leases: made when needed, used again, gone before their queue pair.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{ExposedRegion, MemoryWindow};
use crate::types::{Access, WindowBind};
use crate::verbs::ProtectionDomain;

/// The windows of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct WindowSet(Mutex<Windows>);

#[derive(Debug, Default)]
struct Windows {
    /// Not bound, to be used again: a device may take long to make one.
    idle: Vec<Arc<MemoryWindow>>,
    /// All of them.
    all: Vec<Weak<MemoryWindow>>,
}

impl WindowSet {
    /// A window for `range` of `region`, and what to post to bind it. `pd` is that of the queue pair.
    pub(crate) fn lease(
        self: &Arc<Self>,
        pd: &ProtectionDomain,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<(BoundWindow, WindowBind), OpErrorKind> {
        LimitError::check("memory windows", 1, pd.device().attr().max_mw.into())?;
        if !region.registration().pd().same(pd) {
            return Err(OpErrorKind::Foreign { what: "exposed region" });
        }
        region.check(&range)?;
        // Devices refuse to bind nothing, and the connection would end of it.
        if range.is_empty() {
            let (asked, allowed) = (range.start as u64, (range.end as u64).saturating_sub(1));
            return Err(LimitError { field: "start of the lease", asked, allowed }.into());
        }
        let missing = Access::MW_BIND.difference(region.access());
        if !missing.is_empty() {
            return Err(OpErrorKind::Rights { missing });
        }
        let window = self.take(pd).map_err(OpErrorKind::Post)?;
        let bind = window.bind(region.registration(), range, access);
        Ok((BoundWindow { window: Some(window), set: self.clone() }, bind))
    }

    fn take(&self, pd: &ProtectionDomain) -> Result<Arc<MemoryWindow>, VerbError> {
        if let Some(idle) = self.0.lock().idle.pop() {
            return Ok(idle);
        }
        let window = Arc::new(MemoryWindow::allocate(pd)?);
        let mut windows = self.0.lock();
        if windows.all.len() == windows.all.capacity() {
            windows.all.retain(|window| window.strong_count() > 0);
        }
        windows.all.push(Arc::downgrade(&window));
        Ok(window)
    }

    /// Ends the access through all of them: the queue pair is about to be destroyed.
    pub(crate) fn end(&self) {
        let Windows { idle, all } = std::mem::take(&mut *self.0.lock());
        all.iter().filter_map(Weak::upgrade).for_each(|window| window.free());
        drop(idle);
    }
}

/// Window that a queue pair is to bind, or has bound. Dropping it ends the access and the window.
#[derive(Debug)]
pub(crate) struct BoundWindow {
    /// `None` once recycled.
    window: Option<Arc<MemoryWindow>>,
    set: Arc<WindowSet>,
}

impl BoundWindow {
    /// The device has invalidated it: its region is free, and it can be bound again.
    pub(crate) fn recycle(mut self) {
        if let Some(window) = self.window.take() {
            window.unbound();
            self.set.0.lock().idle.push(window);
        }
    }
}

impl Drop for BoundWindow {
    fn drop(&mut self) {
        if let Some(window) = self.window.take() {
            window.free();
        }
    }
}
