//! UAR pages: the program maps them and stores into their doorbell registers, which the device
//! polls.
//!
//! A page has two pairs of send registers at 0x800, and the register that arms completion queues at
//! 0x20. Two stores into one register may be seen as one, so each store makes the device check all
//! queues of the page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: u64 = 4096;
const PAGES: u64 = 1024;
/// Offset of the pages in the device's descriptor.
const FIRST: i64 = 0x1_0000_0000;
const SEND_REGISTERS: [u64; 4] = [0x800, 0x900, 0xa00, 0xb00];
const ARM_REGISTER: u64 = 0x20;

struct Memory {
    fd: RawFd,
    /// `PAGES` pages, never unmapped.
    start: NonNull<u8>,
}

// SAFETY: accessed by atomics only.
unsafe impl Send for Memory {}
// SAFETY: accessed by atomics only.
unsafe impl Sync for Memory {}

static MEMORY: OnceLock<Memory> = OnceLock::new();

/// Returns the descriptor and offset behind `offset` of the device's descriptor.
pub(crate) fn mapping(offset: i64, len: usize) -> Option<(RawFd, i64)> {
    let at = offset.checked_sub(FIRST)?;
    let inside =
        at >= 0 && at % PAGE as i64 == 0 && len as u64 == PAGE && at < (PAGES * PAGE) as i64;
    inside.then_some((MEMORY.get()?.fd, at))
}

#[derive(Default)]
pub(crate) struct Uar {
    used: BTreeSet<u32>,
    /// Queue pairs and completion queues that ring on each page.
    senders: BTreeMap<u32, Vec<u32>>,
    armers: BTreeMap<u32, Vec<u32>>,
}

impl fmt::Debug for Uar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uar").field("used", &self.used).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Doorbell {
    pub(crate) page: u32,
    /// The first eight bytes of the control segment, in memory order.
    pub(crate) value: u64,
}

pub(crate) fn prepare() -> std::io::Result<()> {
    if MEMORY.get().is_some() {
        return Ok(());
    }
    let len = (PAGES * PAGE) as usize;
    // SAFETY: a NUL-terminated name; descriptor and mapping are new.
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
    assert!(offset < PAGES * PAGE && offset.is_multiple_of(8), "register is outside the UAR pages");
    // SAFETY: within the memory, aligned, never unmapped; all stores are whole words.
    unsafe { &*memory.start.as_ptr().add(offset as usize).cast::<AtomicU64>() }
}

/// Takes the value stored since the last call. Costs one load if there is none.
fn take_stored(register: &AtomicU64) -> Option<u64> {
    (register.load(Ordering::Relaxed) != 0).then(|| register.swap(0, Ordering::AcqRel))
}

impl Uar {
    /// Allocates a page; returns its index and the offset to map.
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

    pub(crate) fn senders(&self, page: u32) -> Vec<u32> {
        self.senders.get(&page).cloned().unwrap_or_default()
    }

    /// Takes the doorbells of send queues.
    pub(crate) fn doorbells(&self) -> Vec<Doorbell> {
        let mut doorbells = Vec::new();
        for &page in &self.used {
            let stored =
                SEND_REGISTERS.into_iter().filter_map(|at| take_stored(register(page, at)));
            doorbells.extend(stored.map(|value| Doorbell { page, value }));
        }
        doorbells
    }

    pub(crate) fn armed(&self) -> Vec<u32> {
        let mut armed = Vec::new();
        for &page in &self.used {
            if take_stored(register(page, ARM_REGISTER)).is_some() {
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
