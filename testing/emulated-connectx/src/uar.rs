//! UAR pages: the program maps them and stores into their doorbell registers, which the device
//! polls.
//!
//! A page has two pairs of send registers at 0x800, and the register that arms completion queues at
//! 0x20. A store of 8 bytes to a send register is a doorbell. With BlueFlame, the program stores
//! the whole entry, whose first 8 bytes are the doorbell. Two stores into one register may be seen
//! as one, so each store makes the device check all queues of the page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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

/// The page of the device's clock, which is none of the UAR pages: they count from 1.
const CLOCK_PAGE: u32 = 0;
/// The offset of the page in the device's descriptor. The page number is the command
/// `MLX5_MMAP_GET_CORE_CLOCK_CMD` << `MLX5_MMAP_CMD_SHIFT`.
const CLOCK: i64 = (5 << 8) * PAGE as i64;

/// Sets the clock that programs read. Its two big-endian halves change together.
pub(crate) fn set_clock(nanoseconds: u64) {
    register(CLOCK_PAGE, 0).store(nanoseconds.to_be(), Ordering::Release);
}

/// Returns the descriptor and offset behind `offset` of the device's descriptor.
pub(crate) fn mapping(offset: i64, len: usize) -> Option<(RawFd, i64)> {
    if offset == CLOCK && len as u64 == PAGE {
        return Some((MEMORY.get()?.fd, i64::from(CLOCK_PAGE) * PAGE as i64));
    }
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
    /// Send registers by page and offset, once used.
    registers: BTreeMap<(u32, u64), Register>,
}

impl fmt::Debug for Uar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uar").field("used", &self.used).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Doorbell {
    pub(crate) page: u32,
    /// Offset of the register in the page.
    pub(crate) at: u64,
    /// The first eight bytes of the control segment, in memory order.
    pub(crate) value: u64,
}

/// The eight words of a send register, in memory order.
pub(crate) type Words = [u64; 8];

/// The device's knowledge about a send register's contents.
///
/// The device cannot see the size of a store. It compares the words after the first with their
/// former contents: unchanged words mean a plain doorbell.
#[derive(Clone, Debug, Default)]
struct Register {
    /// Contents when last checked.
    seen: Words,
    /// Entries of the doorbells since: their copies may have been completed after the check.
    former: Vec<Words>,
    /// Whether the last doorbell's entry is unknown.
    unknown: bool,
    pending: Option<BlueFlame>,
}

/// A doorbell that may be the start of a BlueFlame copy.
#[derive(Clone, Copy, Debug)]
struct BlueFlame {
    /// The queue pair.
    number: u32,
    /// The entry in the ring.
    entry: Words,
    /// Length of the entry in words, at most 8.
    words: usize,
    since: Instant,
    /// Number of times that a wrong word was seen.
    looks: u32,
}

impl Register {
    /// Begins the check of a doorbell. `entry`: the ring's entry and its length in bytes, if the
    /// ring still holds it. `now`: the contents after the doorbell.
    fn begin(&mut self, number: u32, entry: Option<(Words, usize)>, now: Words) {
        const FORMER: usize = 8;
        self.former.extend(self.pending.take().map(|before| before.entry));
        if self.unknown || self.former.len() > FORMER {
            // What was stored before this doorbell is complete.
            (self.seen, self.unknown) = (now, false);
            self.former.clear();
        }
        self.unknown = entry.is_none();
        self.pending = entry.map(|(entry, len)| {
            let words = (len / 8).min(8);
            BlueFlame { number, entry, words, since: Instant::now(), looks: 0 }
        });
    }

    /// Checks the contents `now`. Returns the first wrong word, found and expected, once it is
    /// sure.
    ///
    /// `executed`: whether an executed WQE had a value in a word.
    fn look(
        &mut self,
        now: Words,
        patience: Duration,
        executed: impl Fn(usize, u64) -> bool,
    ) -> Option<(usize, u64, u64)> {
        /// A wrong word may belong to the next copy, whose first word is not visible yet.
        const LOOKS: u32 = 64;
        let mut pending = self.pending?;
        let stale = |at: usize| {
            now[at] == self.seen[at]
                || self.former.iter().any(|entry| now[at] == entry[at])
                || executed(at, now[at])
        };
        let wrong = (1..pending.words).filter(|&at| now[at] != pending.entry[at]);
        let (late, bad): (Vec<_>, Vec<_>) = wrong.partition(|&at| stale(at));
        let expired = pending.since.elapsed() >= patience;
        pending.looks += u32::from(!bad.is_empty());
        let found = bad.first().filter(|_| pending.looks >= LOOKS).copied();
        let done = late.is_empty() && bad.is_empty() || expired || found.is_some();
        self.pending = (!done).then_some(pending);
        if done {
            self.former = vec![pending.entry];
        }
        // What is left of earlier stores may be forgotten by the queue pairs later.
        if done || bad.is_empty() {
            self.seen = now;
        }
        found.map(|at| (at, now[at], pending.entry[at]))
    }
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

/// Returns the words of a send register after the first, in their places.
fn contents(page: u32, at: u64) -> Words {
    let mut words = [0; 8];
    for (word, value) in (1..).zip(&mut words[1..]) {
        *value = register(page, at + 8 * word).load(Ordering::Acquire);
    }
    words
}

/// Takes the value stored since the last call. Costs one load if there is none.
fn take_stored(register: &AtomicU64) -> Option<u64> {
    (register.load(Ordering::Relaxed) != 0).then(|| register.swap(0, Ordering::AcqRel))
}

impl Uar {
    /// Allocates a page; returns its index and the offset to map.
    pub(crate) fn allocate(&mut self) -> Option<(u32, u64)> {
        let page = (1..PAGES as u32).find(|page| !self.used.contains(page))?;
        for at in SEND_REGISTERS {
            (0..8).for_each(|word| register(page, at + 8 * word).store(0, Ordering::Relaxed));
            self.registers.remove(&(page, at));
        }
        register(page, ARM_REGISTER).store(0, Ordering::Relaxed);
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
            doorbells.extend(SEND_REGISTERS.into_iter().filter_map(|at| {
                take_stored(register(page, at)).map(|value| Doorbell { page, at, value })
            }));
        }
        doorbells
    }

    /// Begins the check of a doorbell as a BlueFlame copy of `entry`.
    pub(crate) fn begin_copy(
        &mut self,
        ring: &Doorbell,
        number: u32,
        entry: Option<(Words, usize)>,
    ) {
        let now = contents(ring.page, ring.at);
        self.registers.entry((ring.page, ring.at)).or_default().begin(number, entry, now);
    }

    /// Checks the BlueFlame copies in progress; returns queue pairs, registers and wrong words.
    pub(crate) fn wrong_copies(
        &mut self,
        patience: Duration,
        executed: impl Fn(&[u32], usize, u64) -> bool,
    ) -> Vec<(u32, u64, String)> {
        let mut wrong = Vec::new();
        for (&(page, at), known) in &mut self.registers {
            let Some(BlueFlame { number, .. }) = known.pending else { continue };
            let now = contents(page, at);
            // The next doorbell has come: the words may belong to its copy.
            if register(page, at).load(Ordering::Acquire) != 0 {
                continue;
            }
            let senders = self.senders.get(&page).map_or(&[][..], Vec::as_slice);
            let executed = |word, value| executed(senders, word, value);
            if let Some((word, found, expected)) = known.look(now, patience, executed) {
                let [found, expected] = [found, expected].map(u64::from_be);
                let detail = format!(
                    "bytes {} to {} of the register are {found:#x}, of the entry {expected:#x}",
                    8 * word,
                    8 * word + 7
                );
                wrong.push((number, at, detail));
            }
        }
        wrong
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
