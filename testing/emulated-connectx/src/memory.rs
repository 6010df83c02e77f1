//! Memory of the process as the device accesses it: libmlx5's work queues and doorbell records, and
//! the program's registered memory.
//!
//! The device accesses it concurrently with the program, like a NIC's DMA. Doorbell records and the
//! owner byte of a CQE are atomic; the rest is copied as bytes. A program that reads what the
//! device is writing violates the rules of verbs.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A range of memory; each access is checked against its length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    address: u64,
    len: u64,
}

impl Buffer {
    /// Creates a buffer.
    ///
    /// # Safety
    ///
    /// `address..address + len` stays mapped until the object that owns the buffer is destroyed, or
    /// is not accessed.
    pub(crate) unsafe fn new(address: u64, len: u64) -> Self {
        Self { address, len }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then_some(Self { address: self.address.wrapping_add(offset), len })
    }

    /// Returns the address of `len` bytes at `offset`. Panics if they are outside: the device
    /// computes offsets itself.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let part = self.part(offset, len as u64).expect("offset within the buffer");
        ptr::with_exposed_provenance_mut(part.address as usize)
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: within the buffer, which is mapped (`new`); `into` is a separate slice.
        unsafe { ptr::copy(from, into.as_mut_ptr(), into.len()) };
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) {
        let into = self.at(offset, from.len());
        // SAFETY: within the buffer, which is mapped (`new`); its creator checked that it is
        // writable.
        unsafe { ptr::copy(from.as_ptr(), into, from.len()) };
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.read(0, &mut bytes);
        bytes
    }

    /// Loads a doorbell record (Acquire): the WQEs written before it are visible.
    pub(crate) fn record(&self, index: u64) -> u32 {
        let at = self.at(index * 4, 4).cast::<AtomicU32>();
        assert!(at.is_aligned(), "doorbell record must be aligned");
        // SAFETY: within the buffer, mapped, aligned.
        u32::from_be(unsafe { &*at }.load(Ordering::Acquire))
    }

    /// Stores the owner byte of a CQE (Release): publishes the bytes written before it.
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

    /// Changes the eight bytes at the start atomically, also with respect to the processor; returns
    /// the old value.
    pub(crate) fn atomic(&self, change: impl Fn(u64) -> u64) -> u64 {
        let at = self.at(0, 8).cast::<AtomicU64>();
        assert!(at.is_aligned(), "address of an atomic must be aligned");
        // SAFETY: within the buffer, mapped, aligned.
        let word = unsafe { &*at };
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(change(old)))
            .unwrap_or_else(|old| old)
    }
}

/// Makes the kernel populate the pages, writable if the device may write, like pinning would.
/// Returns `false` if that fails.
///
/// Kernels before Linux 5.14 cannot do this; the range is then trusted.
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
    // SAFETY: only changes which pages are resident.
    unsafe { libc::madvise(address, len as usize, advice) == 0 }
}
