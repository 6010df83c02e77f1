//! Pages by dereferencing a pointer: addresses without memory, whose faults the kernel hands to us, by `userfaultfd(2)`.
//!
//! ```text
//!   a thread reads base + 4096 × n ──▶ fault ──▶ userfaultfd ──▶ Pager::read ──▶ UFFDIO_COPY ──▶ it goes on
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

/// A range of addresses that holds pages of a [`Pager`], which are fetched when they are touched.
///
/// It is for reading: a store is a `SIGSEGV`, as to any memory that is read-only. A page is that of the moment of its fault, and
/// what is written through the pager afterwards is seen when the page has been dropped from here and is touched again.
///
/// A page that cannot be fetched is a `SIGSEGV` for whoever touches it, as an input error is for those who map files; the reason
/// is on standard error.
#[derive(Debug)]
pub struct Mapping {
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

/// Why there is no mapping.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The system does not let this process handle page faults.
    #[error(
        "userfaultfd is not permitted ({0}): it takes CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1 (sysctl), or the right \
         to open /dev/userfaultfd; in a container its seccomp profile has to allow it, too"
    )]
    NotPermitted(userfaultfd::Error),
    /// Pages of this system are not those of the pager.
    #[error("pages have {system} bytes here, those of the pager {PAGE}")]
    PageSize {
        /// Of the system.
        system: usize,
    },
    /// No such pages, or no room for any.
    #[error("{field}: asked for {asked}, {least} to {most} work")]
    Setting {
        /// Which.
        field: &'static str,
        /// How much was asked.
        asked: u64,
        /// The least.
        least: u64,
        /// The most.
        most: u64,
    },
    /// The system refuses.
    #[error("{call}: {error}")]
    System {
        /// What was called.
        call: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// The system refuses to handle these addresses.
    #[error("userfaultfd: {0}")]
    Register(userfaultfd::Error),
}

#[derive(Debug)]
struct Shared {
    pager: Pager,
    first: u64,
    // Unmapped before its faults are left alone, upon which the kernel would fill it with zeros.
    memory: Memory,
    faults: AsyncFd<Uffd>,
    /// Offsets of the pages that are there, the first to have come first.
    resident: Mutex<VecDeque<usize>>,
    most: usize,
}

impl Mapping {
    /// Maps pages, of which up to `most` have memory at a time: the first to have come make room.
    ///
    /// Touch them on threads only that no task of the pager's runtime is waiting for, for example those of `spawn_blocking`:
    /// the thread stands still until the page is there, and other tasks have to bring it.
    ///
    /// # Errors
    ///
    /// [`MappingError`].
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O driver.
    pub fn new(pager: &Pager, pages: Range<u64>, most: usize) -> Result<Self, MappingError> {
        let setting = |field, asked: u64, least: u64, most: u64| match asked {
            asked if (least..=most).contains(&asked) => Ok(()),
            asked => Err(MappingError::Setting { field, asked, least, most }),
        };
        setting("end of pages", pages.end, 1, pager.pages())?;
        setting("start of pages", pages.start, 0, pages.end - 1)?;
        setting("most", most as u64, 2, u64::MAX)?;
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
            most,
        });
        let serving = tokio::spawn(serve(Serving(shared.clone())));
        Ok(Self { shared, serving })
    }

    /// The first byte of the first page. Reading is sound as long as the mapping lives, and only the bytes of a page that is
    /// not written to by anybody stay what they are.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.shared.memory.base.as_ptr().cast()
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.memory.len
    }

    /// Never true: there is a page at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages that have memory now.
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

/// Who waits for a page when nobody serves any more gets a signal, rather than to wait for ever.
struct Serving(Arc<Shared>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.refuse(0, self.0.memory.len);
    }
}

/// Also faults of the kernel's on our behalf, as in `write(2)` from the mapping, if we may; else our own.
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

/// Each fault in a task of its own: a page that takes long holds up nobody else.
async fn serve(serving: Serving) {
    let shared = &serving.0;
    loop {
        let mut ready = match shared.faults.readable().await {
            Ok(ready) => ready,
            Err(error) => return eprintln!("pager: no more page faults are served: {error}"),
        };
        match ready.get_inner().read_event() {
            Ok(Some(Event::Pagefault { addr, .. })) => {
                let at = (addr.addr() - shared.memory.base.addr().get()) / PAGE * PAGE;
                drop(tokio::spawn(shared.clone().bring(at)));
            }
            Ok(Some(_)) => {}
            Ok(None) => ready.clear_ready(),
            Err(error) => return eprintln!("pager: no more page faults are served: {error}"),
        }
    }
}

impl Shared {
    /// Brings the page at this offset.
    async fn bring(self: Arc<Self>, at: usize) {
        let page = self.first + (at / PAGE) as u64;
        let mut bytes = [0; PAGE];
        if let Err(error) = self.pager.read(page, 0, &mut bytes).await {
            eprintln!("pager: {error}");
            return self.refuse(at, PAGE);
        }
        if let Err(error) = self.fill(at, &bytes) {
            eprintln!("pager: page {page} does not get into its place: {error}");
            self.refuse(at, PAGE);
        }
    }

    fn fill(&self, at: usize, bytes: &[u8; PAGE]) -> userfaultfd::Result<()> {
        let (from, to) = (bytes.as_ptr().cast(), self.memory.at(at));
        let mut resident = self.resident.lock();
        loop {
            // SAFETY: `to` is a whole page of memory that is ours as long as `self` is, and where nobody else puts anything but
            // its content; the kernel puts all of it there, or none, before anybody sees it.
            match unsafe { self.faults.get_ref().copy(from, to, PAGE, true) } {
                Ok(_) => break,
                // The address space was being changed.
                Err(userfaultfd::Error::PartiallyCopied(_)) => {}
                // Two threads have touched it, and it has come for the other one.
                Err(userfaultfd::Error::CopyFailed(errno))
                    if errno as i32 == Errno::EXIST.raw_os_error() =>
                {
                    return self.faults.get_ref().wake(to, PAGE);
                }
                Err(error) => return Err(error),
            }
        }
        resident.push_back(at);
        if resident.len() > self.most
            && let Some(oldest) = resident.pop_front()
        {
            // SAFETY: a page of memory that is ours, whose content comes again when it is touched.
            let dropped = unsafe { madvise(self.memory.at(oldest), PAGE, Advice::LinuxDontNeed) };
            if let Err(error) = dropped {
                eprintln!("pager: a page stays in memory: {error}");
            }
        }
        Ok(())
    }

    /// Has whoever touches these bytes get a `SIGSEGV`.
    fn refuse(&self, at: usize, len: usize) {
        let start = self.memory.at(at);
        // SAFETY: memory that is ours; nobody holds a reference to it.
        let refused = unsafe { mprotect(start, len, MprotectFlags::empty()) };
        let woken = self.faults.get_ref().wake(start, len);
        if refused.is_err() || woken.is_err() {
            eprintln!(
                "pager: {len} bytes at {start:?} stay without an answer: {refused:?}, {woken:?}"
            );
        }
    }
}

/// Addresses without memory, unmapped when it is dropped.
#[derive(Debug)]
struct Memory {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: addresses are the same for all threads, and nothing here reads or writes what is there.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses addresses that nobody has.
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
        // SAFETY: it was mapped with this length, and whoever reads it holds the mapping.
        if let Err(error) = unsafe { munmap(self.base.as_ptr(), self.len) } {
            eprintln!("pager: {} bytes stay mapped: {error}", self.len);
        }
    }
}
