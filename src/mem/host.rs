//! Page-aligned, zeroed memory.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;

use crate::error::LimitError;

/// Zeroed memory on a page boundary, so that a registration pins no page of anyone else.
pub struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
    len: usize,
}

// SAFETY: S1: the allocation is owned alone; the pointer is only a way to name it.
unsafe impl Send for HostMemory {}
// SAFETY: S2: nothing reads or writes through a shared `HostMemory`; its users guard the bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Devices register whole pages.
    const PAGE: usize = 4096;

    /// `len` zero bytes.
    ///
    /// # Errors
    ///
    /// [`LimitError`] if `len` is more than an allocation can hold.
    ///
    /// # Panics
    ///
    /// Does not; if the system has no memory the process ends, as with any allocation.
    pub fn zeroed(len: usize) -> Result<Self, LimitError> {
        let allowed = isize::MAX as u64 - Self::PAGE as u64;
        LimitError::check("memory", len as u64, allowed)?;
        let layout = Layout::from_size_align(len.max(1), Self::PAGE).map_err(|_| LimitError {
            field: "memory",
            asked: len as u64,
            allowed,
        })?;
        // SAFETY: S1: the layout has at least one byte.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Ok(Self { base, layout, len })
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without any byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: S1: allocated in `zeroed` with this layout; registrations of it were dropped before.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("base", &self.base).field("len", &self.len).finish()
    }
}
