//! Memory windows of leases: allocated on demand, reused, and freed before their queue pair.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;

use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{ExposedRegion, MemoryWindow};
use crate::types::{Access, WindowBind};
use crate::verbs::ProtectionDomain;

#[derive(Debug, Default)]
pub(crate) struct WindowSet(Mutex<Windows>);

#[derive(Debug, Default)]
struct Windows {
    /// Unbound windows for reuse, since allocation may be slow.
    idle: Vec<Arc<MemoryWindow>>,
    all: Vec<Weak<MemoryWindow>>,
}

impl WindowSet {
    /// `pd` is the queue pair's protection domain.
    pub(crate) fn lease(
        self: &Arc<Self>,
        pd: &ProtectionDomain,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<(BoundWindow, WindowBind), OpErrorKind> {
        LimitError::check(
            "memory windows (max_mw of the device)",
            1,
            pd.device().attr().max_mw.into(),
        )?;
        if !region.registration().pd().same(pd) {
            return Err(OpErrorKind::Foreign { what: "exposed region" });
        }
        region.registration().check_range(&range)?;
        // Devices refuse to bind an empty range, which would break the connection.
        if range.is_empty() {
            let (asked, allowed) = (range.start as u64, (range.end as u64).saturating_sub(1));
            let field = "start of the leased range, which must not be empty";
            return Err(LimitError { field, asked, allowed }.into());
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

    pub(crate) fn end(&self) {
        let Windows { idle, all } = std::mem::take(&mut *self.0.lock());
        all.iter().filter_map(Weak::upgrade).for_each(|window| window.free());
        drop(idle);
    }
}

/// Dropping it revokes the access.
#[derive(Debug)]
pub(crate) struct BoundWindow {
    window: Option<Arc<MemoryWindow>>,
    set: Arc<WindowSet>,
}

impl BoundWindow {
    pub(crate) fn window(&self) -> Option<&Arc<MemoryWindow>> {
        self.window.as_ref()
    }

    /// The device must have invalidated the window.
    pub(crate) fn recycle(mut self) {
        if let Some(window) = self.window.take() {
            window.release_regions();
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
