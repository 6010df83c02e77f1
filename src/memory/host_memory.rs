//! Page-aligned, zeroed memory.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use crate::error::{LimitError, SetupError, VerbError};

/// Zeroed memory on a page boundary, so that a registration pins no page of anyone else.
///
/// ```
/// use tokio_rdma::memory::HostMemory;
/// use tokio_rdma::{Access, ExposedRegion};
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let region = ExposedRegion::new(&pd, HostMemory::zeroed(1 << 20)?, Access::REMOTE_READ)?;
/// assert_eq!((region.len(), region.load(0)?), (1 << 20, 0));
/// let memory: HostMemory = region.into_storage().map_err(|_| "still in use")?;
/// assert_eq!(memory.len(), 1 << 20);
/// # Ok(())
/// # }
/// ```
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
    /// From so many bytes on memory is mapped, and returned to the system when it is freed. glibc's threshold begins here, too, but
    /// grows to the largest block that was freed, up to 32 MiB, and what it then frees stays with the process.
    const LARGE: usize = 128 << 10;

    /// `len` zero bytes. Of 128 KiB and more, pages that are not touched take no memory, unless a device pins them, and all of it
    /// goes back to the system when it is dropped.
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
        Ok(Self::allocated(len, layout).unwrap_or_else(|_| handle_alloc_error(layout)))
    }

    /// As [`zeroed`](Self::zeroed), but that the system has no memory is an error: for lengths that others choose.
    pub(crate) fn try_zeroed(len: usize) -> Result<Self, SetupError> {
        Ok(Self::allocated(len, Self::layout(len)?)?)
    }

    fn layout(len: usize) -> Result<Layout, LimitError> {
        let allowed = isize::MAX as u64 - Self::PAGE as u64;
        LimitError::check("memory", len as u64, allowed)?;
        let asked = len as u64;
        Layout::from_size_align(len.max(1), Self::PAGE).map_err(|_| LimitError {
            field: "memory",
            asked,
            allowed,
        })
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
        // SAFETY: S1: the layout has at least one byte.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) });
        let base = base.ok_or(VerbError::new("posix_memalign", VerbError::ENOMEM))?;
        Ok(Self { base, len, backing: Backing::Heap(layout) })
    }

    /// The first `len` bytes of `map`, which has as many.
    fn mapped(len: usize, mut map: MmapMut) -> Self {
        let base = NonNull::from(&mut map[..len]).cast();
        Self { base, len, backing: Backing::Mapped { _map: map } }
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
        let map = match MmapOptions::new().len(whole).huge(None).map_anon() {
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
        Ok(Self::mapped(len, map))
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
            // SAFETY: S1: allocated in `allocated` with this layout; registrations of it were dropped before.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("base", &self.base).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks for more memory than there are addresses")]
    fn every_length_has_pages_of_its_own() {
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
        assert!(HostMemory::try_zeroed(1 << 55).is_err(), "more than there are addresses");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no huge pages")]
    fn huge_memory_has_the_length_asked_for_and_is_zeroed() {
        const WHOLE: usize = 2 << 20;
        for len in [0, 1, 5000, WHOLE, WHOLE + 1] {
            let memory = HostMemory::huge(len).unwrap();
            assert_eq!((memory.len(), memory.is_empty()), (len, len == 0));
            // SAFETY: S1: the mapping has as many bytes, and this test alone reaches them.
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
    fn memory_beyond_what_an_allocation_can_hold_names_the_limit() {
        let allowed = (isize::MAX as usize) - HostMemory::PAGE;
        let refused = HostMemory::layout(allowed + 1).unwrap_err();
        assert_eq!((refused.asked, refused.allowed), (allowed as u64 + 1, allowed as u64));
        assert_eq!(HostMemory::layout(allowed).unwrap().size(), allowed);
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "reads how much memory the process has")]
    fn large_memory_takes_what_is_touched() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * HostMemory::PAGE
        };
        let before = resident();
        let memory = HostMemory::zeroed(1 << 30).unwrap();
        // Of other tests, too, which run at the same time.
        assert!(resident() < before + memory.len() / 2);
    }
}
