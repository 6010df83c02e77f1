//! Telling the adapter about work: barriers, doorbell records, doorbell registers.
//!
//! The order of a post, where each arrow is a barrier between the processor's stores and what the
//! adapter observes by DMA or at its registers:
//!
//! ```text
//! WQE in the ring ──to_device──▶ doorbell record ──write_combining──▶ register
//! register ──write_combining──▶ next post
//! ```
//!
//! rdma-core's `util/udma_barrier.h` has the same barriers.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::locks::Mutex;

use super::layout::BLOCK;

/// Executes the barrier of the processor; elsewhere, and under Miri, the strongest fence. An empty
/// instruction restrains only the compiler.
macro_rules! barrier {
    (aarch64: $aarch64:literal, x86_64: $x86_64:literal) => {
        // SAFETY: S3: a barrier has no other effect than to order accesses to memory.
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        unsafe {
            std::arch::asm!($aarch64, options(nostack, preserves_flags));
        }
        // SAFETY: S3: as above. x86-64 has SSE.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            std::arch::asm!($x86_64, options(nostack, preserves_flags));
        }
        #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
        std::sync::atomic::fence(Ordering::SeqCst);
    };
}

/// Makes all earlier stores to memory visible to the adapter before later ones:
/// `udma_to_device_barrier`.
///
/// Observers: this processor's stores, and the adapter's DMA reads. x86-64 keeps stores to normal
/// memory in order, so only the compiler is restrained.
#[inline]
pub(super) fn to_device() {
    barrier!(aarch64: "dmb oshst", x86_64: "");
}

/// Makes what the adapter has written before an observed store visible to later loads:
/// `udma_from_device_barrier`.
///
/// Observers: the adapter's DMA writes, and this processor's loads. x86-64 keeps loads from normal
/// memory in order. rdma-core has an `lfence` here, which matters for other types of memory only;
/// completion queues are normal memory.
#[inline]
pub(super) fn from_device() {
    barrier!(aarch64: "dmb oshld", x86_64: "");
}

/// Separates stores to registers from all stores before and after, and flushes the buffers that
/// combine writes: `mmio_wc_start` and `mmio_flush_writes`.
///
/// Observers: this processor's stores to memory and registers, and the adapter's DMA reads and
/// registers.
#[inline]
fn write_combining() {
    barrier!(aarch64: "dsb st", x86_64: "sfence");
}

/// A doorbell record: a big-endian index in memory that the adapter reads.
#[derive(Debug)]
pub(super) struct Record(NonNull<AtomicU32>);

// SAFETY: S3: accessed by atomics only; the memory lives as long as the queue, see `new`.
unsafe impl Send for Record {}
// SAFETY: S3: as above.
unsafe impl Sync for Record {}

impl Record {
    /// Wraps a record.
    ///
    /// # Safety
    ///
    /// `record` is aligned, and valid for reads and writes as long as the value is used.
    pub(super) unsafe fn new(record: NonNull<u32>) -> Self {
        Self(record.cast())
    }

    /// Stores an index after all earlier stores are visible to the adapter.
    #[inline]
    pub(super) fn publish(&self, index: u32) {
        to_device();
        self.store(index);
    }

    /// Stores an index without a barrier: no entry becomes visible by it.
    #[inline]
    pub(super) fn store(&self, index: u32) {
        // SAFETY: S3: promised to `new`.
        unsafe { self.0.as_ref() }.store(index.to_be(), Ordering::Relaxed);
    }

    /// Stores the index up to which entries are returned to the adapter, after all earlier loads
    /// from them.
    #[inline]
    pub(super) fn release(&self, index: u32) {
        // SAFETY: S3: promised to `new`.
        unsafe { self.0.as_ref() }.store(index.to_be(), Ordering::Release);
    }

    /// Returns the index.
    #[cfg(test)]
    pub(super) fn load(&self) -> u32 {
        // SAFETY: S3: promised to `new`.
        u32::from_be(unsafe { self.0.as_ref() }.load(Ordering::Relaxed))
    }
}

/// A doorbell register of send queues, with two halves for BlueFlame. No queue pair of libmlx5
/// uses it.
#[derive(Debug)]
pub(super) struct Register {
    start: NonNull<u8>,
    /// Bytes of a half; 0 if the register takes doorbells only.
    half: u32,
    /// Offset of the half for the next doorbell. The lock keeps the stores of a doorbell together
    /// if the register is shared.
    offset: Mutex<u32>,
    /// Queue pairs share the register, so the lock is needed.
    shared: bool,
}

// SAFETY: S3: stores to the register exclude each other by the lock, or by the promise to `new`; it
// is mapped as long as the value is used.
unsafe impl Send for Register {}
// SAFETY: S3: as above.
unsafe impl Sync for Register {}

impl Register {
    /// Wraps a register.
    ///
    /// # Safety
    ///
    /// `start` is aligned to 64 bytes, and mapped for `2 * half` bytes, at least 8, as long as the
    /// value is used. Nothing else stores there. Unless `shared`, one queue pair at a time uses the
    /// register, and its users are ordered by happens-before.
    pub(super) unsafe fn new(start: NonNull<u8>, half: u32, shared: bool) -> Self {
        Self { start, half, offset: Mutex::new(0), shared }
    }

    /// Calls `store` with the address of the next half.
    ///
    /// # Safety
    ///
    /// The caller excludes all other doorbells of its queue pair.
    #[inline]
    unsafe fn store(&self, store: impl FnOnce(NonNull<u8>)) {
        if self.shared {
            // SAFETY: S3: locked.
            unsafe { self.store_at(&mut self.offset.lock(), store) };
        } else {
            // SAFETY: S3: used by one queue pair, whose doorbells the caller excludes.
            unsafe { self.store_at(&mut *self.offset.data_ptr(), store) };
        }
    }

    /// Calls `store` with the address of the half at `offset`, and turns to the other.
    ///
    /// # Safety
    ///
    /// Nothing else stores to the register now.
    #[inline]
    unsafe fn store_at(&self, offset: &mut u32, store: impl FnOnce(NonNull<u8>)) {
        write_combining();
        // SAFETY: S3: promised to `new`; the offset is below `2 * half`.
        store(unsafe { self.start.add(*offset as usize) });
        write_combining();
        *offset ^= self.half;
    }

    /// Returns true if several queue pairs may use the register.
    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Copies a WQE of one block to a register that is not [shared](Self::is_shared) and takes at
    /// least one.
    ///
    /// # Safety
    ///
    /// See [`copy`](Self::copy).
    #[inline]
    pub(super) unsafe fn copy_alone(&self, block: NonNull<u8>) {
        // SAFETY: S3: used by one queue pair, whose doorbells the caller excludes.
        unsafe { self.store_at(&mut *self.offset.data_ptr(), |to| copy_block(to, block)) };
    }

    /// Returns the number of blocks that BlueFlame takes.
    pub(super) fn blocks(&self) -> u32 {
        self.half / BLOCK as u32
    }

    /// Writes the first eight bytes of a WQE to the register: the doorbell of all WQEs up to it.
    ///
    /// # Safety
    ///
    /// The caller excludes all other doorbells of its queue pair.
    #[inline]
    pub(super) unsafe fn ring(&self, value: u64) {
        // SAFETY: S3: the caller's promise; the register takes at least eight bytes.
        unsafe { self.store(|to| to.cast::<u64>().write_volatile(value)) };
    }

    /// Copies a WQE to the register (BlueFlame): doorbell and contents at once. `block` returns the
    /// address of each of its `blocks`, which are at most [`blocks`](Self::blocks).
    ///
    /// # Safety
    ///
    /// Each address is valid for reads of a block, and aligned to 64 bytes. The caller excludes all
    /// other doorbells of its queue pair.
    #[inline]
    pub(super) unsafe fn copy(&self, blocks: u32, block: impl Fn(u32) -> NonNull<u8>) {
        debug_assert!(blocks <= self.blocks(), "the WQE exceeds the register");
        // SAFETY: S3: the caller's promise; all blocks are within a half of the register.
        unsafe {
            self.store(|to| {
                for number in 0..blocks {
                    copy_block(to.add(number as usize * BLOCK), block(number));
                }
            });
        }
    }
}

/// Copies 64 bytes with stores in ascending order, none of which is split or left out.
///
/// # Safety
///
/// `from` is valid for reads, `to` for writes, both aligned to 64 bytes.
#[inline]
unsafe fn copy_block(to: NonNull<u8>, from: NonNull<u8>) {
    // SAFETY: S3: the caller's promise.
    unsafe {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::x86_64::__m128i;
            let (to, from) = (to.cast::<__m128i>(), from.cast::<__m128i>());
            for part in 0..4 {
                to.add(part).write_volatile(from.add(part).read());
            }
        }
        // As in rdma-core: processors combine one store of 64 bytes more reliably than eight.
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        std::arch::asm!(
            "ld4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{from}]",
            "st4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{to}]",
            from = in(reg) from.as_ptr(),
            to = in(reg) to.as_ptr(),
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            options(nostack, preserves_flags),
        );
        #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
        {
            let (to, from) = (to.cast::<u64>(), from.cast::<u64>());
            for part in 0..8 {
                to.add(part).write_volatile(from.add(part).read());
            }
        }
    }
}

/// The register that arms completion queues, shared by all of a device context.
#[derive(Debug)]
pub(super) struct ArmRegister(NonNull<u64>);

// SAFETY: S3: a store of eight bytes is indivisible; mapped as long as the context is open.
unsafe impl Send for ArmRegister {}
// SAFETY: S3: as above.
unsafe impl Sync for ArmRegister {}

/// Offset of the register in its page, `MLX5_CQ_DOORBELL`.
const ARM_OFFSET: usize = 0x20;

impl ArmRegister {
    /// Wraps the register in the page at `page`.
    ///
    /// # Safety
    ///
    /// The page stays mapped as long as the value is used.
    pub(super) unsafe fn new(page: NonNull<u8>) -> Self {
        // SAFETY: S3: within the page, the caller's promise.
        Self(unsafe { page.add(ARM_OFFSET) }.cast())
    }

    /// Writes to the register after the record of the request is visible to the adapter.
    pub(super) fn ring(&self, value: u64) {
        write_combining();
        // SAFETY: S3: promised to `new`.
        unsafe { self.0.write_volatile(value.to_be()) };
        write_combining();
    }
}

#[cfg(test)]
mod tests {
    use super::super::heap::Memory;
    use super::*;

    fn block(number: u8) -> Memory {
        let memory = Memory::new(BLOCK, 0);
        memory.write(0, &std::array::from_fn::<u8, BLOCK, _>(|at| number ^ at as u8));
        memory
    }

    #[test]
    fn records_are_big_endian() {
        let memory = Memory::new(8, 0xff);
        // SAFETY: S3: the memory is dropped after the record.
        let record = unsafe { Record::new(memory.start().cast()) };
        record.publish(0x0102_0304);
        assert_eq!(memory.read_all(), [1, 2, 3, 4, 255, 255, 255, 255]);
        assert_eq!(record.load(), 0x0102_0304);
        record.store(0x0506);
        assert_eq!(memory.read_all(), [0, 0, 5, 6, 255, 255, 255, 255]);
        record.release(0x07);
        assert_eq!(memory.read_all(), [0, 0, 0, 7, 255, 255, 255, 255]);
    }

    #[test]
    fn doorbells_alternate_between_the_halves_of_a_register() {
        for shared in [false, true] {
            let memory = Memory::new(2 * 128 + BLOCK, 0xa5);
            // SAFETY: S3: the memory is dropped after the register.
            let register = unsafe { Register::new(memory.start(), 128, shared) };
            assert_eq!(register.blocks(), 2);
            let mut expected = memory.read_all();
            for doorbell in 0..7_u8 {
                let half = usize::from(doorbell % 2) * 128;
                let blocks = [block(doorbell), block(!doorbell)];
                let count = doorbell % 3;
                // SAFETY: S3: one thread; the addresses are blocks.
                unsafe {
                    if count == 0 {
                        let value = blocks[0].start().cast::<u64>().read();
                        register.ring(value);
                    } else {
                        register.copy(count.into(), |at| blocks[at as usize].start());
                    }
                }
                if count == 0 {
                    expected[half..half + 8].copy_from_slice(&blocks[0].read(0, 8));
                }
                for (at, block) in blocks[..usize::from(count)].iter().enumerate() {
                    expected[half + at * BLOCK..][..BLOCK].copy_from_slice(&block.read_all());
                }
                assert_eq!(memory.read_all(), expected, "doorbell {doorbell}");
            }
        }
    }

    #[test]
    fn register_without_blue_flame_takes_every_doorbell_at_its_start() {
        let memory = Memory::new(64, 0xa5);
        // SAFETY: S3: the memory is dropped after the register.
        let register = unsafe { Register::new(memory.start(), 0, false) };
        assert_eq!(register.blocks(), 0);
        let mut expected = memory.read_all();
        for value in [1_u64, u64::MAX / 3, 5] {
            // SAFETY: S3: one thread.
            unsafe { register.ring(value) };
            expected[..8].copy_from_slice(&value.to_ne_bytes());
            assert_eq!(memory.read_all(), expected);
        }
    }

    // Each doorbell of either queue pair is whole, and none uses the half of the one before it.
    #[test]
    fn queue_pairs_that_share_a_register_ring_one_after_the_other() {
        let memory = Memory::new(2 * BLOCK, 0);
        // SAFETY: S3: the memory is dropped after the register.
        let register = &unsafe { Register::new(memory.start(), BLOCK as u32, true) };
        std::thread::scope(|scope| {
            for number in [1, 2] {
                scope.spawn(move || {
                    let block = Memory::new(BLOCK, number);
                    for _ in 0..if cfg!(miri) { 10 } else { 1001 } {
                        // SAFETY: S3: a block; the other thread is another queue pair.
                        unsafe { register.copy(1, |_| block.start()) };
                    }
                });
            }
        });
        let half = |at| {
            let bytes = memory.read(at, BLOCK);
            assert!(bytes.iter().all(|&byte| byte == bytes[0] && byte != 0), "{bytes:?}");
        };
        half(0);
        half(BLOCK);
        assert_eq!(*register.offset.lock(), 0, "an even number of doorbells");
    }

    #[test]
    fn register_that_arms_takes_big_endian_numbers_at_its_offset() {
        let memory = Memory::new(0x40, 0xa5);
        // SAFETY: S3: the memory is dropped after the register.
        let register = unsafe { ArmRegister::new(memory.start()) };
        register.ring(0x0102_0304_0506_0708);
        let mut expected = [0xa5; 0x40];
        expected[0x20..0x28].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(memory.read_all(), expected);
    }
}
