//! Memory of the process as the device reaches it: work queues and doorbell records of libmlx5, registered memory of the
//! program.
//!
//! The device reads and writes beside the program, as a NIC's DMA does. Whole records and the byte that passes a completion
//! on are atomic; the rest is copied as bytes, and who reads what the device is writing has broken the rules of verbs.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A stretch of the process's memory, checked on every use against its own length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    address: u64,
    len: u64,
}

impl Buffer {
    /// # Safety
    ///
    /// `address..address + len` stays mapped until the object that the buffer was given for is destroyed, or nothing of it
    /// is touched.
    pub(crate) unsafe fn new(address: u64, len: u64) -> Self {
        Self { address, len }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The part of `len` bytes from `offset`.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then_some(Self { address: self.address.wrapping_add(offset), len })
    }

    /// Where `len` bytes from `offset` are. Panics outside: the offsets are the device's own.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let part = self.part(offset, len as u64).expect("an offset within the buffer");
        ptr::with_exposed_provenance_mut(part.address as usize)
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: within the buffer, which is mapped (`new`); `into` is ours.
        unsafe { ptr::copy(from, into.as_mut_ptr(), into.len()) };
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) {
        let into = self.at(offset, from.len());
        // SAFETY: within the buffer, which is mapped (`new`) and, as who made it has checked, may be written.
        unsafe { ptr::copy(from.as_ptr(), into, from.len()) };
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.read(0, &mut bytes);
        bytes
    }

    /// A doorbell record: what the program wrote before it is there to be read.
    pub(crate) fn record(&self, index: u64) -> u32 {
        let at = self.at(index * 4, 4).cast::<AtomicU32>();
        assert!(at.is_aligned(), "doorbell records are aligned");
        // SAFETY: within the buffer, mapped, aligned.
        u32::from_be(unsafe { &*at }.load(Ordering::Acquire))
    }

    /// Writes the byte that passes what was written before to the program.
    pub(crate) fn publish(&self, offset: u64, byte: u8) {
        let at = self.at(offset, 1).cast::<AtomicU8>();
        // SAFETY: within the buffer, mapped; a byte is aligned.
        unsafe { &*at }.store(byte, Ordering::Release);
    }

    pub(crate) fn byte(&self, offset: u64) -> u8 {
        let at = self.at(offset, 1).cast::<AtomicU8>();
        // SAFETY: within the buffer, mapped; a byte is aligned.
        unsafe { &*at }.load(Ordering::Acquire)
    }

    /// The eight bytes at the start, which are aligned: changed at once with respect to the processor too.
    pub(crate) fn atomic(&self, change: impl Fn(u64) -> u64) -> u64 {
        let at = self.at(0, 8).cast::<AtomicU64>();
        assert!(at.is_aligned(), "the address of an atomic has been checked");
        // SAFETY: within the buffer, mapped, aligned.
        let word = unsafe { &*at };
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(change(old)))
            .unwrap_or_else(|old| old)
    }
}

/// Has the kernel make the pages present, for writing too if the device may: what pinning them does.
///
/// A kernel before Linux 5.14 cannot be asked; then the program is believed.
pub(crate) fn populate(start: u64, length: u64, write: bool) -> bool {
    const PAGE: u64 = 4096;
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let own = 0_u8;
    let there = (&raw const own).expose_provenance() as u64 & !(PAGE - 1);
    let known = *KNOWN.get_or_init(|| advise(there, PAGE, POPULATE_READ));
    let first = start & !(PAGE - 1);
    !known
        || advise(first, start + length - first, if write { POPULATE_WRITE } else { POPULATE_READ })
}

/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` of `madvise(2)`.
const POPULATE_READ: i32 = 22;
const POPULATE_WRITE: i32 = 23;

fn advise(first: u64, len: u64, advice: i32) -> bool {
    let address = ptr::with_exposed_provenance_mut(first as usize);
    // SAFETY: changes nothing that can be seen but which pages are present.
    unsafe { libc::madvise(address, len as usize, advice) == 0 }
}
