#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use crate::error::{LimitError, SetupError, VerbError};

/// Page-aligned, zeroed memory. Its registration pins no page that holds other data.
///
/// ```
/// use tokio_rdma::memory::HostMemory;
/// use tokio_rdma::{Access, ExposedRegion};
/// # use tokio_rdma::Device;
///
/// # let pd = Device::software()?.protection_domain()?;
/// let region = ExposedRegion::new(&pd, HostMemory::zeroed(1 << 20)?, Access::REMOTE_READ)?;
/// let memory: HostMemory = region.into_storage().map_err(|_| "still in use")?;
/// assert_eq!(memory.len(), 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    Heap(Layout),
    Mapped { _map: MmapMut },
}

// SAFETY: S1: the value owns the allocation exclusively.
unsafe impl Send for HostMemory {}
// SAFETY: S2: a shared `HostMemory` gives no access to the bytes; its owners guard them.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) const PAGE: usize = 4096;
    /// Memory of at least this size is mapped, so that freeing returns it to the system. The
    /// threshold of glibc starts here too, but grows to 32 MiB with freed blocks, and the process
    /// keeps smaller ones.
    const LARGE: usize = 128 << 10;

    /// Allocates `len` zero bytes.
    ///
    /// From 128 KiB on, untouched pages take no memory unless a device pins them, and dropping
    /// returns all memory to the system. The process aborts if the system is out of memory.
    ///
    /// # Errors
    ///
    /// [`LimitError`] if `len` exceeds the maximum size of an allocation.
    pub fn zeroed(len: usize) -> Result<Self, LimitError> {
        let layout = Self::layout(len)?;
        Ok(Self::allocated(len, layout).unwrap_or_else(|_| handle_alloc_error(layout)))
    }

    /// Fails if the system is out of memory, for lengths that a peer chooses.
    pub(crate) fn try_zeroed(len: usize) -> Result<Self, SetupError> {
        Ok(Self::allocated(len, Self::layout(len)?)?)
    }

    fn layout(len: usize) -> Result<Layout, LimitError> {
        let allowed = isize::MAX as u64 - Self::PAGE as u64;
        LimitError::check("bytes of memory", len as u64, allowed)?;
        Ok(Layout::from_size_align(len.max(1), Self::PAGE)
            .unwrap_or_else(|_| unreachable!("a whole number of pages fits below isize::MAX")))
    }

    fn allocated(len: usize, layout: Layout) -> Result<Self, VerbError> {
        debug_assert!(layout.size() >= len.max(1));
        if len >= Self::LARGE {
            let errno = |error: io::Error| error.raw_os_error().unwrap_or(VerbError::ENOMEM);
            let map = MmapOptions::new()
                .len(len)
                .map_anon()
                .map_err(|error| VerbError::new("mmap", errno(error)))?;
            return Ok(Self::mapped(len, map));
        }
        // SAFETY: S1: the size of the layout is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) });
        let base = base.ok_or(VerbError::new("posix_memalign", VerbError::ENOMEM))?;
        Ok(Self { base, len, backing: Backing::Heap(layout) })
    }

    fn mapped(len: usize, mut map: MmapMut) -> Self {
        let base = NonNull::from(&mut map[..len]).cast();
        Self { base, len, backing: Backing::Mapped { _map: map } }
    }

    /// Allocates `len` zero bytes on huge pages of the system's default size.
    ///
    /// Takes reserved pages (`/proc/sys/vm/nr_hugepages`), or, if too few are free, transparent
    /// huge pages where possible (`MADV_HUGEPAGE`), for faster registration and address
    /// translation. The size is rounded up to 2 MiB.
    ///
    /// # Errors
    ///
    /// The error of `mmap(2)`.
    pub fn huge(len: usize) -> io::Result<Self> {
        const HUGE: usize = 2 << 20;
        let whole = len.max(1).checked_next_multiple_of(HUGE).ok_or(io::ErrorKind::InvalidInput)?;
        let map = match MmapOptions::new().len(whole).huge(None).map_anon() {
            Ok(map) => map,
            Err(error) => {
                rdma_provider::debug!(
                    %error,
                    len,
                    "failed to map reserved huge pages; using transparent huge pages"
                );
                let map = MmapOptions::new().len(whole).map_anon()?;
                #[cfg(target_os = "linux")]
                if let Err(error) = map.advise(memmap2::Advice::HugePage) {
                    rdma_provider::debug!(
                        %error,
                        "failed to enable transparent huge pages; using small pages"
                    );
                }
                map
            }
        };
        Ok(Self::mapped(len, map))
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Backing::Heap(layout) = self.backing {
            // SAFETY: S1: `allocated` used this layout, and registrations were dropped before.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "requests more memory than the address space")]
    fn every_length_is_page_aligned() {
        for len in [
            0,
            1,
            4095,
            4096,
            HostMemory::LARGE - 1,
            HostMemory::LARGE,
            HostMemory::LARGE + 1,
            3 << 20,
        ] {
            let memory = HostMemory::zeroed(len).unwrap();
            assert_eq!((memory.len(), memory.base().addr().get() % HostMemory::PAGE), (len, 0));
        }
        assert!(HostMemory::zeroed(usize::MAX).is_err());
        assert!(HostMemory::try_zeroed(1 << 55).is_err(), "more than the address space");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no huge pages")]
    fn huge_memory_has_the_requested_length_and_is_zeroed() {
        const WHOLE: usize = 2 << 20;
        for len in [0, 1, 5000, WHOLE, WHOLE + 1] {
            let memory = HostMemory::huge(len).unwrap();
            assert_eq!((memory.len(), memory.is_empty()), (len, len == 0));
            // SAFETY: S1: the mapping has `len` bytes, which only this test accesses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base().as_ptr(), len) };
            if let ([_, ..], Some(last)) = (&*bytes, len.checked_sub(1)) {
                assert_eq!((bytes[0], bytes[last]), (0, 0));
                (bytes[0], bytes[last]) = (1, 2);
            }
            drop(memory);
        }
        assert!(HostMemory::huge(usize::MAX).is_err());
    }

    #[test]
    fn too_long_memory_is_refused_with_the_limit() {
        let allowed = (isize::MAX as usize) - HostMemory::PAGE;
        let refused = HostMemory::layout(allowed + 1).unwrap_err();
        assert_eq!((refused.asked, refused.allowed), (allowed as u64 + 1, allowed as u64));
        assert_eq!(HostMemory::layout(allowed).unwrap().size(), allowed);
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "reads the resident memory of the process")]
    fn untouched_large_memory_takes_no_memory() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * HostMemory::PAGE
        };
        let before = resident();
        let memory = HostMemory::zeroed(1 << 30).unwrap();
        // Other tests of the process allocate at the same time.
        assert!(resident() < before + memory.len() / 2);
    }
}
