//! Pages accessed by pointers: addresses without memory, whose page faults are handled with
//! `userfaultfd(2)`.
//!
//! ```text
//!   reads base + 4096 × n ──▶ fault ──▶ userfaultfd ──▶ Pager::read ──▶ UFFDIO_COPY ──▶ resume
//! ```

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap,
};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use userfaultfd::{Event, Uffd, UffdBuilder};

use crate::{PAGE, Pager};

/// A read-only range of addresses with pages of a [`Pager`], fetched on access.
///
/// A store raises `SIGSEGV`. A page has the content of the moment of its fault. Later writes
/// through the pager become visible when the page is evicted from here and accessed again.
///
/// Access to a page that cannot be fetched raises `SIGSEGV`, like an input error in a mapped file.
/// The reason is printed on standard error.
#[derive(Debug)]
pub struct Mapping {
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

/// Why a mapping cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The system does not let this process handle page faults.
    #[error(
        "userfaultfd is not permitted ({0}): it requires CAP_SYS_PTRACE, sysctl \
         vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; in a container, the \
         seccomp profile must allow it too"
    )]
    NotPermitted(userfaultfd::Error),
    /// The system's page size differs from the pager's.
    #[error("system page size is {system} bytes, must be {PAGE}")]
    PageSize {
        /// Page size of the system.
        system: usize,
    },
    /// A setting is out of range.
    #[error("invalid {field}: {asked}, must be {min} to {max}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// The value given.
        asked: u64,
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
    },
    /// A system call failed.
    #[error("{call} failed: {error}")]
    System {
        /// The system call.
        call: &'static str,
        /// Why it failed.
        error: io::Error,
    },
    /// The addresses cannot be registered.
    #[error("failed to register memory with userfaultfd: {0}")]
    Register(userfaultfd::Error),
}

#[derive(Debug)]
struct Shared {
    pager: Pager,
    first: u64,
    // Dropped before `faults`: after its close, the kernel would fill missing pages with zeros.
    memory: Memory,
    faults: AsyncFd<Uffd>,
    /// Offsets of the pages that have memory, oldest first.
    resident: Mutex<VecDeque<usize>>,
    max_resident: usize,
}

impl Mapping {
    /// Maps pages, of which at most `max_resident` have memory; the oldest is evicted first.
    ///
    /// Access them only on threads on which the pager's runtime does not depend, such as the
    /// threads of `spawn_blocking`: an access blocks until tasks of the runtime have fetched the
    /// page.
    ///
    /// # Errors
    ///
    /// [`MappingError`].
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O driver.
    pub fn new(
        pager: &Pager,
        pages: Range<u64>,
        max_resident: usize,
    ) -> Result<Self, MappingError> {
        let setting = |field, asked: u64, min: u64, max: u64| match asked {
            asked if (min..=max).contains(&asked) => Ok(()),
            asked => Err(MappingError::Setting { field, asked, min, max }),
        };
        setting("end of pages", pages.end, 1, pager.pages())?;
        setting("start of pages", pages.start, 0, pages.end - 1)?;
        setting("max_resident", max_resident as u64, 2, u64::MAX)?;
        let system = rustix::param::page_size();
        if system != PAGE {
            return Err(MappingError::PageSize { system });
        }
        let faults = open().map_err(MappingError::NotPermitted)?;
        let len = (pages.end - pages.start).saturating_mul(PAGE as u64);
        let memory =
            Memory::new(usize::try_from(len).unwrap_or(usize::MAX)).map_err(failed("mmap"))?;
        faults.register(memory.base.as_ptr(), memory.len).map_err(MappingError::Register)?;
        #[allow(deprecated, reason = "what takes its place asks for `AsFd`, which `Uffd` lacks")]
        let faults = AsyncFd::new(faults).map_err(failed("epoll_ctl"))?;
        let resident = Mutex::default();
        let shared = Arc::new(Shared {
            pager: pager.clone(),
            first: pages.start,
            memory,
            faults,
            resident,
            max_resident,
        });
        let serving = tokio::spawn(serve(Serving(shared.clone())));
        Ok(Self { shared, serving })
    }

    /// Returns the address of the first page. Reading is sound while the mapping is alive. Bytes
    /// stay the same only if their page is not written to.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.shared.memory.base.as_ptr().cast()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.memory.len
    }

    /// Returns `false`: there is at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of pages that have memory.
    #[must_use]
    pub fn resident(&self) -> usize {
        self.shared.resident.lock().len()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Denies access on drop, so that waiting threads get a signal instead of hanging.
struct Serving(Arc<Shared>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.refuse(0, self.0.memory.len);
    }
}

/// Opens a userfaultfd that also handles faults in the kernel, as in `write(2)` from the mapping,
/// if permitted; otherwise only faults in user mode.
fn open() -> userfaultfd::Result<Uffd> {
    let open = |user_mode_only| {
        UffdBuilder::new()
            .close_on_exec(true)
            .non_blocking(true)
            .user_mode_only(user_mode_only)
            .create()
    };
    open(false).or_else(|_| open(true))
}

fn failed<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> MappingError {
    move |error| MappingError::System { call, error: error.into() }
}

/// Serves page faults, each in a separate task so that a slow page delays no other.
async fn serve(serving: Serving) {
    let shared = &serving.0;
    loop {
        let mut ready = match shared.faults.readable().await {
            Ok(ready) => ready,
            Err(error) => return eprintln!("pager: stopped serving page faults: {error}"),
        };
        match ready.get_inner().read_event() {
            Ok(Some(Event::Pagefault { addr, .. })) => {
                let at = (addr.addr() - shared.memory.base.addr().get()) / PAGE * PAGE;
                drop(tokio::spawn(shared.clone().fetch(at)));
            }
            Ok(Some(_)) => {}
            Ok(None) => ready.clear_ready(),
            Err(error) => return eprintln!("pager: stopped serving page faults: {error}"),
        }
    }
}

impl Shared {
    async fn fetch(self: Arc<Self>, at: usize) {
        let page = self.first + (at / PAGE) as u64;
        let mut bytes = [0; PAGE];
        if let Err(error) = self.pager.read(page, 0, &mut bytes).await {
            eprintln!("pager: {error}");
            return self.refuse(at, PAGE);
        }
        if let Err(error) = self.fill(at, &bytes) {
            eprintln!("pager: failed to map page {page}: {error}");
            self.refuse(at, PAGE);
        }
    }

    fn fill(&self, at: usize, bytes: &[u8; PAGE]) -> userfaultfd::Result<()> {
        let (from, to) = (bytes.as_ptr().cast(), self.memory.at(at));
        let mut resident = self.resident.lock();
        loop {
            // SAFETY: `to` is a whole page of memory owned by `self`, filled by nothing but this
            // function. The kernel copies all of it or nothing before a thread can read it.
            match unsafe { self.faults.get_ref().copy(from, to, PAGE, true) } {
                Ok(_) => break,
                // The address space was changing.
                Err(userfaultfd::Error::PartiallyCopied(_)) => {}
                // Another fault on the same page has been served already.
                Err(userfaultfd::Error::CopyFailed(errno))
                    if errno as i32 == Errno::EXIST.raw_os_error() =>
                {
                    return self.faults.get_ref().wake(to, PAGE);
                }
                Err(error) => return Err(error),
            }
        }
        resident.push_back(at);
        if resident.len() > self.max_resident
            && let Some(oldest) = resident.pop_front()
        {
            // SAFETY: a page of memory owned by `self`, fetched again on its next access.
            let dropped = unsafe { madvise(self.memory.at(oldest), PAGE, Advice::LinuxDontNeed) };
            if let Err(error) = dropped {
                eprintln!("pager: failed to evict a mapped page: {error}");
            }
        }
        Ok(())
    }

    /// Makes access to these bytes raise `SIGSEGV`.
    fn refuse(&self, at: usize, len: usize) {
        let start = self.memory.at(at);
        // SAFETY: memory owned by `self`, to which there are no references.
        let refused = unsafe { mprotect(start, len, MprotectFlags::empty()) };
        let woken = self.faults.get_ref().wake(start, len);
        if refused.is_err() || woken.is_err() {
            eprintln!("pager: threads may hang at {start:?}, {len} bytes: {refused:?}, {woken:?}");
        }
    }
}

/// Reserved addresses, unmapped on drop.
#[derive(Debug)]
struct Memory {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: addresses are valid in all threads, and this type does not access the memory.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses unused addresses.
        let base = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::READ, flags) }?;
        Ok(Self { base: NonNull::new(base).ok_or(Errno::FAULT)?, len })
    }

    fn at(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset < self.len);
        self.base.as_ptr().wrapping_byte_add(offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; readers hold the mapping.
        if let Err(error) = unsafe { munmap(self.base.as_ptr(), self.len) } {
            eprintln!("pager: failed to unmap {} bytes, leaking them: {error}", self.len);
        }
    }
}
