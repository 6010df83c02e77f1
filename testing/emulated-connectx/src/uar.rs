//! Doorbell registers: pages that the program maps and stores into, and the device watches.
//!
//! A page has two pairs of registers of send queues at 0x800, and the one that arms completion queues at 0x20. Two stores
//! into one register may be seen as one, so whoever sees one looks at all queues of that page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: u64 = 4096;
const PAGES: u64 = 1024;
/// Where the pages are in the descriptor, as the device answers.
const FIRST: i64 = 0x1_0000_0000;
const SEND_REGISTERS: [u64; 4] = [0x800, 0x900, 0xa00, 0xb00];
const ARM_REGISTER: u64 = 0x20;

struct Memory {
    fd: RawFd,
    /// `PAGES` pages, never unmapped.
    start: NonNull<u8>,
}

// SAFETY: only accessed by atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

static MEMORY: OnceLock<Memory> = OnceLock::new();

/// The descriptor and place of what is at `offset` of the device's.
pub(crate) fn mapping(offset: i64, len: usize) -> Option<(RawFd, i64)> {
    let at = offset.checked_sub(FIRST)?;
    let inside =
        at >= 0 && at % PAGE as i64 == 0 && len as u64 == PAGE && at < (PAGES * PAGE) as i64;
    inside.then_some((MEMORY.get()?.fd, at))
}

/// The pages in use.
#[derive(Default)]
pub(crate) struct Uar {
    used: BTreeSet<u32>,
    /// Which queue pairs and completion queues ring on a page.
    senders: BTreeMap<u32, Vec<u32>>,
    armers: BTreeMap<u32, Vec<u32>>,
}

impl fmt::Debug for Uar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uar").field("used", &self.used).finish_non_exhaustive()
    }
}

/// A store that was seen.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) page: u32,
    /// The first eight bytes of the control segment that was stored, as they are in memory.
    pub(crate) value: u64,
}

/// Makes the memory behind the pages.
pub(crate) fn prepare() -> std::io::Result<()> {
    if MEMORY.get().is_some() {
        return Ok(());
    }
    let len = (PAGES * PAGE) as usize;
    // SAFETY: a name that ends in a zero; what is made is ours.
    let (fd, start) = unsafe {
        let fd = libc::memfd_create(c"emulated-connectx".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 || libc::ftruncate(fd, len as i64) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        (fd, libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0))
    };
    match NonNull::new(start.cast::<u8>()) {
        Some(first) if start != libc::MAP_FAILED => {
            MEMORY.get_or_init(|| Memory { fd, start: first });
            Ok(())
        }
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn register(page: u32, at: u64) -> &'static AtomicU64 {
    let memory = MEMORY.get().expect("the device was started");
    let offset = u64::from(page) * PAGE + at;
    assert!(offset < PAGES * PAGE && offset.is_multiple_of(8), "a register of a page there is");
    // SAFETY: within the memory, aligned, never unmapped; all others store whole words.
    unsafe { &*memory.start.as_ptr().add(offset as usize).cast::<AtomicU64>() }
}

/// What was stored since the last look; quick when nothing was.
fn taken(register: &AtomicU64) -> Option<u64> {
    (register.load(Ordering::Relaxed) != 0).then(|| register.swap(0, Ordering::AcqRel))
}

impl Uar {
    /// A page of its own, and where to map it.
    pub(crate) fn allocate(&mut self) -> Option<(u32, u64)> {
        let page = (1..PAGES as u32).find(|page| !self.used.contains(page))?;
        for at in SEND_REGISTERS.into_iter().chain([ARM_REGISTER]) {
            register(page, at).store(0, Ordering::Relaxed);
        }
        self.used.insert(page);
        Some((page, FIRST as u64 + u64::from(page) * PAGE))
    }

    pub(crate) fn free(&mut self, page: u32) {
        self.used.remove(&page);
    }

    pub(crate) fn is_used(&self, page: u32) -> bool {
        self.used.contains(&page)
    }

    pub(crate) fn add_sender(&mut self, page: u32, qp: u32) {
        self.senders.entry(page).or_default().push(qp);
    }

    pub(crate) fn remove_sender(&mut self, page: u32, qp: u32) {
        remove(&mut self.senders, page, qp);
    }

    pub(crate) fn add_armer(&mut self, page: u32, cq: u32) {
        self.armers.entry(page).or_default().push(cq);
    }

    pub(crate) fn remove_armer(&mut self, page: u32, cq: u32) {
        remove(&mut self.armers, page, cq);
    }

    /// Queue pairs that ring on `page`.
    pub(crate) fn senders(&self, page: u32) -> Vec<u32> {
        self.senders.get(&page).cloned().unwrap_or_default()
    }

    /// Doorbells of send queues.
    pub(crate) fn rings(&self) -> Vec<Ring> {
        let mut rings = Vec::new();
        for &page in &self.used {
            let stored = SEND_REGISTERS.into_iter().filter_map(|at| taken(register(page, at)));
            rings.extend(stored.map(|value| Ring { page, value }));
        }
        rings
    }

    /// Completion queues that may have been armed.
    pub(crate) fn armed(&self) -> Vec<u32> {
        let mut armed = Vec::new();
        for &page in &self.used {
            if taken(register(page, ARM_REGISTER)).is_some() {
                armed.extend(self.armers.get(&page).into_iter().flatten());
            }
        }
        armed
    }
}

fn remove(of: &mut BTreeMap<u32, Vec<u32>>, page: u32, object: u32) {
    if let Some(objects) = of.get_mut(&page) {
        objects.retain(|&one| one != object);
        if objects.is_empty() {
            of.remove(&page);
        }
    }
}
