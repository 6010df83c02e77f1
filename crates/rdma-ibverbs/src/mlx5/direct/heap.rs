//! Queues on heap memory, for tests and fuzzing: without a device and without libmlx5.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_provider::types::Transport;

use super::completion_queue::{self, CompletionQueue};
use super::doorbell::{ArmRegister, Record, Register};
use super::layout::{BLOCK, SEGMENT, cqe};
use super::receive_queue::{Entries, ReceiveQueue};
use super::ring::Ring;
use super::send_queue::{self, SendQueue};
use super::shared_receive_queue::SharedReceiveQueue;

/// Heap memory that a queue and a simulated adapter share. It is accessed by raw pointers only.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// Allocates `len` bytes of value `fill`, aligned to 64 bytes.
    pub(super) fn new(len: usize, fill: u8) -> Self {
        let Ok(layout) = Layout::from_size_align(len.max(1), BLOCK) else {
            panic!("{len} bytes exceed the address space");
        };
        // SAFETY: S3: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) });
        let start = start.unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: S3: just allocated.
        unsafe { start.write_bytes(fill, layout.size()) };
        Self { start, layout }
    }

    #[cfg(test)]
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the address of byte `at`, exposed like addresses of registered memory.
    pub(super) fn address(&self, at: usize) -> u64 {
        assert!(at <= self.layout.size(), "outside the memory");
        (self.start.as_ptr().expose_provenance() + at) as u64
    }

    /// Returns a copy of `len` bytes from `at` on.
    pub(super) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        self.check(at, len);
        let mut out = vec![0; len];
        // SAFETY: S3: within the memory; the result is new.
        unsafe { self.start.add(at).copy_to_nonoverlapping(NonNull::from(&mut *out).cast(), len) };
        out
    }

    pub(super) fn read_all(&self) -> Vec<u8> {
        self.read(0, self.layout.size())
    }

    /// Overwrites the bytes from `at` on.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: S3: within the memory, which no slice borrows.
        unsafe {
            self.start.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
        };
    }

    /// Returns the big-endian number at `at`.
    #[cfg(test)]
    pub(super) fn be32(&self, at: usize) -> u32 {
        self.read(at, 4).into_iter().fold(0, |number, byte| number << 8 | u32::from(byte))
    }

    fn check(&self, at: usize, len: usize) {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.layout.size()), "outside the memory");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: S3: allocated with this layout; queues on it do not outlive it.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The memory of a send queue.
#[derive(Debug)]
pub(super) struct SendMemory {
    pub(super) ring: Memory,
    pub(super) record: Memory,
    pub(super) register: Memory,
    /// Bytes of a half of the register.
    half: u32,
}

/// The limits of a send queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) transport: Transport,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) max_inline: u32,
}

impl SendMemory {
    /// Allocates a ring, and a register that takes BlueFlame of `half` bytes, 0 for doorbells only.
    pub(super) fn new(blocks: u32, half: u32) -> Self {
        Self {
            ring: Memory::new(blocks as usize * BLOCK, 0),
            record: Memory::new(4, 0),
            register: Memory::new((2 * half as usize).max(8), 0),
            half,
        }
    }

    /// Creates the queue.
    ///
    /// # Safety
    ///
    /// The memory outlives the queue, and no other queue uses it.
    pub(super) unsafe fn queue(&self, qpn: u32, limits: Limits) -> SendQueue {
        let Limits { transport, max_wr, max_sge, max_inline } = limits;
        let blocks = (self.ring.layout.size() / BLOCK) as u32;
        // SAFETY: S3: memory of this size and alignment; the caller's promise.
        unsafe {
            SendQueue::new(send_queue::Setup {
                qpn,
                transport,
                max_wr,
                max_sge,
                max_inline,
                ring: Ring::from_raw(self.ring.start, blocks),
                record: Record::new(self.record.start.cast()),
                register: Arc::new(Register::new(self.register.start, self.half, false)),
                blue_flame: true,
            })
        }
    }
}

/// The memory of a receive queue or shared receive queue.
#[derive(Debug)]
pub(super) struct ReceiveMemory {
    pub(super) entries: Memory,
    pub(super) record: Memory,
    stride: u32,
    count: u32,
}

impl ReceiveMemory {
    /// Allocates `count` entries of `segments` segments.
    pub(super) fn new(count: u32, segments: u32) -> Self {
        let stride = segments * SEGMENT as u32;
        Self {
            entries: Memory::new((count * stride) as usize, 0),
            record: Memory::new(4, 0),
            stride,
            count,
        }
    }

    /// Returns entries and doorbell record of a queue.
    ///
    /// # Safety
    ///
    /// See [`SendMemory::queue`].
    unsafe fn parts(&self) -> (Entries, Record) {
        // SAFETY: S3: memory of this size and alignment; the caller's promise.
        unsafe {
            let entries = Entries::new(self.entries.start, self.stride, self.count);
            (entries, Record::new(self.record.start.cast()))
        }
    }

    /// Creates a queue pair's own receive queue.
    ///
    /// # Safety
    ///
    /// See [`SendMemory::queue`].
    pub(super) unsafe fn own(&self) -> ReceiveQueue {
        // SAFETY: S3: the caller's promise.
        let (entries, record) = unsafe { self.parts() };
        ReceiveQueue::new(entries, record)
    }

    /// Links the entries, as libmlx5 does, and creates a shared receive queue.
    ///
    /// # Safety
    ///
    /// See [`SendMemory::queue`].
    pub(super) unsafe fn shared(&self) -> SharedReceiveQueue {
        for index in 0..self.count {
            let next = ((index + 1) % self.count) as u16;
            self.entries.write((index * self.stride) as usize + 2, &next.to_be_bytes());
        }
        // SAFETY: S3: the caller's promise.
        let (entries, record) = unsafe { self.parts() };
        SharedReceiveQueue::new(entries, record, 0, (self.count - 1) as u16)
    }
}

/// The memory of a completion queue.
#[derive(Debug)]
pub(super) struct CompletionMemory {
    pub(super) ring: Memory,
    /// The consumer index, then the request for an event.
    pub(super) records: Memory,
    /// The page of the register that arms.
    pub(super) page: Memory,
    entries: u32,
    entry_size: u32,
    /// The queue is created with compression.
    pub(super) compressed: bool,
}

impl CompletionMemory {
    /// Allocates a ring of entries that have never been written.
    pub(super) fn new(entries: u32, entry_size: u32) -> Self {
        let ring = Memory::new((entries * entry_size) as usize, 0);
        for entry in 1..=entries {
            ring.write((entry * entry_size) as usize - 1, &[cqe::INVALID << 4]);
        }
        Self {
            ring,
            records: Memory::new(8, 0),
            page: Memory::new(0x28, 0),
            entries,
            entry_size,
            compressed: false,
        }
    }

    /// Creates the queue.
    ///
    /// # Safety
    ///
    /// See [`SendMemory::queue`].
    pub(super) unsafe fn queue(&self, number: u32) -> CompletionQueue {
        // SAFETY: S3: memory of this size and alignment; the caller's promise.
        unsafe {
            CompletionQueue::new(completion_queue::Setup {
                start: self.ring.start,
                entries: self.entries,
                entry_size: self.entry_size,
                consumer: Record::new(self.records.start.cast()),
                arm: Record::new(self.records.start.add(4).cast()),
                register: ArmRegister::new(self.page.start),
                number,
                compressed: self.compressed,
            })
        }
    }
}

/// Ends the waits of the other threads of a test when one panics.
#[cfg(test)]
pub(super) struct Panics<'a>(pub(super) &'a AtomicBool);

#[cfg(test)]
impl Panics<'_> {
    /// Lets other threads run. Relaxed, so that it orders nothing between threads.
    pub(super) fn wait(&self) {
        assert!(!self.0.load(Ordering::Relaxed), "another thread has panicked");
        std::thread::yield_now();
    }
}

#[cfg(test)]
impl Drop for Panics<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
