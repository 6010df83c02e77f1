//! Page-aligned, zeroed memory.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use crate::error::{LimitError, SetupError, VerbError};

/// Zeroed memory on a page boundary, so that a registration pins no page of anyone else.
pub struct HostMemory {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
}

/// Where it came from and goes back to.
enum Backing {
    Heap(Layout),
    Mapped { _map: MmapMut },
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
        let layout = Self::layout(len)?;
        Ok(Self::allocated(len, layout).unwrap_or_else(|| handle_alloc_error(layout)))
    }

    /// As [`zeroed`](Self::zeroed), but that the system has no memory is an error: for lengths that others choose.
    pub(crate) fn try_zeroed(len: usize) -> Result<Self, SetupError> {
        let layout = Self::layout(len)?;
        let none = || VerbError::new("posix_memalign", VerbError::ENOMEM);
        Ok(Self::allocated(len, layout).ok_or_else(none)?)
    }

    fn layout(len: usize) -> Result<Layout, LimitError> {
        let allowed = isize::MAX as u64 - Self::PAGE as u64;
        LimitError::check("memory", len as u64, allowed)?;
        let asked = len as u64;
        Layout::from_size_align(len.max(1), Self::PAGE).map_err(|_| LimitError { field: "memory", asked, allowed })
    }

    fn allocated(len: usize, layout: Layout) -> Option<Self> {
        debug_assert!(layout.size() >= len.max(1));
        // SAFETY: S1: the layout has at least one byte.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, len, backing: Backing::Heap(layout) })
    }

    /// `len` zero bytes on huge pages of the system's default size: of those that are reserved
    /// (`/proc/sys/vm/nr_hugepages`), or else such as the kernel puts together when it can (`MADV_HUGEPAGE`).
    ///
    /// A device looks up fewer addresses, and registering takes less time. Takes whole pages: 2 MiB each on x86-64.
    ///
    /// # Errors
    ///
    /// What `mmap(2)` says if there is no memory.
    pub fn huge(len: usize) -> io::Result<Self> {
        const HUGE: usize = 2 << 20;
        let whole = len.max(1).checked_next_multiple_of(HUGE).ok_or(io::ErrorKind::InvalidInput)?;
        let mut map = match MmapOptions::new().len(whole).huge(None).map_anon() {
            Ok(map) => map,
            Err(error) => {
                tracing::debug!(%error, len, "no huge pages are reserved, asking for transparent ones");
                let map = MmapOptions::new().len(whole).map_anon()?;
                #[cfg(target_os = "linux")]
                if let Err(error) = map.advise(memmap2::Advice::HugePage) {
                    tracing::debug!(%error, "the kernel has no transparent huge pages");
                }
                map
            }
        };
        let base = NonNull::from(&mut map[..]).cast();
        Ok(Self { base, len, backing: Backing::Mapped { _map: map } })
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
        // A mapping unmaps itself.
        if let Backing::Heap(layout) = self.backing {
            // SAFETY: S1: allocated in `zeroed` with this layout; registrations of it were dropped before.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("base", &self.base).field("len", &self.len).finish()
    }
}
