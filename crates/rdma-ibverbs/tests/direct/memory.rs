//! The memory that a data path shares with the device: rings, doorbell records, registers.

use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::OnceLock;

use rdma_ibverbs::ffi::*;

pub const BLOCK: usize = 64;
/// Bytes of a doorbell register: two halves.
pub const REGISTER: usize = 512;
pub const HALF: usize = REGISTER / 2;

type InitObj = unsafe extern "C" fn(*mut mlx5dv_obj, u64) -> c_int;

/// Calls `mlx5dv_init_obj`, which the binding lacks.
fn init_obj(object: &mut mlx5dv_obj, kinds: u64) {
    static FUNCTION: OnceLock<InitObj> = OnceLock::new();
    let function = FUNCTION.get_or_init(|| {
        // SAFETY: libmlx5 has this function, with this signature.
        unsafe {
            let library = libc::dlopen(c"libmlx5.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null());
            let symbol = libc::dlsym(library, c"mlx5dv_init_obj".as_ptr());
            assert!(!symbol.is_null());
            mem::transmute::<*mut c_void, InitObj>(symbol)
        }
    });
    // SAFETY: the callers pass live objects.
    assert_eq!(unsafe { function(object, kinds) }, 0);
}

pub fn zeroed<T>() -> T {
    const { assert!(!mem::needs_drop::<T>()) };
    // SAFETY: used for structures of numbers and pointers of the C libraries.
    unsafe { mem::zeroed() }
}

/// A piece of memory outside of Rust's view.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub start: *mut u8,
    pub len: usize,
}

// SAFETY: each test accesses its objects from one thread at a time.
unsafe impl Send for Memory {}

impl Memory {
    pub fn new(start: *mut c_void, len: usize) -> Self {
        assert!(!start.is_null());
        Self { start: start.cast(), len }
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: mapped for this length, and the device is silent.
        unsafe { self.start.write_bytes(byte, self.len) };
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.start, self.len) };
        bytes
    }

    pub fn part(&self, from: usize, len: usize) -> Self {
        assert!(from + len <= self.len);
        // SAFETY: within the memory.
        Self { start: unsafe { self.start.add(from) }, len }
    }

    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        // SAFETY: mapped for this length, and the device is silent.
        unsafe { self.start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

fn number(record: *mut u32) -> u32 {
    // SAFETY: a doorbell record of a live queue.
    u32::from_be(unsafe { record.read_volatile() })
}

/// The queues of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Rings {
    pub send: Memory,
    pub blocks: u32,
    pub receive: Memory,
    /// Bytes of a receive's entry.
    pub stride: usize,
    pub register: Memory,
    records: *mut u32,
}

impl Rings {
    pub fn of(qp: *mut ibv_qp) -> Self {
        let (mut object, mut out) = (zeroed::<mlx5dv_obj>(), zeroed::<mlx5dv_qp>());
        (object.qp.in_, object.qp.out) = (qp, &raw mut out);
        init_obj(&mut object, 1);
        let stride = out.rq.stride as usize;
        Self {
            send: Memory::new(out.sq.buf, out.sq.wqe_cnt as usize * BLOCK),
            blocks: out.sq.wqe_cnt,
            receive: Memory::new(out.rq.buf, out.rq.wqe_cnt as usize * stride),
            stride,
            register: Memory::new(out.bf.reg, REGISTER),
            records: out.dbrec,
        }
    }

    pub fn receive_record(&self) -> u32 {
        number(self.records)
    }

    pub fn send_record(&self) -> u32 {
        // SAFETY: the second of two records.
        number(unsafe { self.records.add(1) })
    }

    /// Returns the blocks of the send queue from `index` on, once around.
    pub fn from(&self, index: u32) -> Vec<u8> {
        let mut bytes = self.send.read();
        bytes.rotate_left((index % self.blocks) as usize * BLOCK);
        bytes
    }
}

/// The memory of a shared receive queue.
#[derive(Debug, Clone, Copy)]
pub struct SharedRing {
    pub entries: Memory,
    pub stride: usize,
    pub head: u32,
    pub tail: u32,
    record: *mut u32,
}

impl SharedRing {
    pub fn of(srq: *mut ibv_srq) -> Self {
        let (mut object, mut out) = (zeroed::<mlx5dv_obj>(), zeroed::<mlx5dv_srq>());
        (object.srq.in_, object.srq.out) = (srq, &raw mut out);
        init_obj(&mut object, 4);
        let stride = out.stride as usize;
        Self {
            entries: Memory::new(out.buf, (out.tail as usize + 1) * stride),
            stride,
            head: out.head,
            tail: out.tail,
            record: out.dbrec,
        }
    }

    pub fn record(&self) -> u32 {
        number(self.record)
    }
}

/// A completion queue into which a test writes entries in place of the device.
#[derive(Debug)]
pub struct CompletionRing {
    pub entries: Memory,
    pub count: u32,
    pub entry: usize,
    /// Index of the next entry, counted on beyond the ring.
    pub next: u32,
    records: *mut u32,
}

impl CompletionRing {
    /// Returns the parts of `cq`. `mlx5dv_init_obj` makes libmlx5 leave the removal of completions
    /// to its caller; this change is undone.
    pub fn of(cq: *mut ibv_cq) -> Self {
        // SAFETY: libmlx5 has allocated its queue with `malloc`, and `ibv_cq` is its first field.
        let before = unsafe {
            let length = libc::malloc_usable_size(cq.cast());
            assert!(length > size_of::<ibv_cq>());
            Memory::new(cq.cast(), length)
        };
        let saved = before.read();
        let ring = Self::taken(cq);
        before.write(&saved);
        ring
    }

    /// Returns the memory of a queue that libmlx5 does not consume from.
    pub fn taken(cq: *mut ibv_cq) -> Self {
        let (mut object, mut out) = (zeroed::<mlx5dv_obj>(), zeroed::<mlx5dv_cq>());
        (object.cq.in_, object.cq.out) = (cq, &raw mut out);
        init_obj(&mut object, 2);
        let entry = out.cqe_size as usize;
        Self {
            entries: Memory::new(out.buf, out.cqe_cnt as usize * entry),
            count: out.cqe_cnt,
            entry,
            next: 0,
            records: out.dbrec,
        }
    }

    pub fn consumer(&self) -> u32 {
        number(self.records)
    }

    pub fn at(&self, index: u32) -> Memory {
        self.entries.part((index % self.count) as usize * self.entry, self.entry)
    }

    /// Returns the owner bit of entries that the device writes at `index`.
    pub fn owner(&self, index: u32) -> u8 {
        u8::from(index & self.count != 0)
    }

    /// Writes the next entry, with the right owner bit.
    pub fn put(&mut self, cqe: &Cqe) {
        self.put_at(self.next, cqe, self.owner(self.next));
        self.next = self.next.wrapping_add(1);
    }

    pub fn put_at(&self, index: u32, cqe: &Cqe, owner: u8) {
        let mut bytes = cqe.bytes;
        bytes[127] = bytes[127] & !1 | owner;
        let entry = self.at(index);
        entry.write(&bytes[128 - self.entry..]);
    }
}

/// A completion queue entry. The first 64 bytes are those before it in long entries.
#[derive(Debug, Clone, Copy)]
pub struct Cqe {
    pub bytes: [u8; 128],
}

impl Cqe {
    pub fn new(kind: u8) -> Self {
        let mut bytes = [0; 128];
        bytes[127] = kind << 4;
        Self { bytes }
    }

    /// Sets bytes at an offset of `struct mlx5_cqe64`.
    pub fn set(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[64 + at..64 + at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub fn number(self, at: usize, number: u32) -> Self {
        self.set(at, &number.to_be_bytes())
    }

    /// Sets the queue pair, by its number and by libmlx5's index of it.
    pub fn of(self, qpn: u32, user_index: u32) -> Self {
        let code = self.bytes[64 + 56];
        let user = u32::from(self.bytes[64 + 32]) << 24 | user_index & 0xff_ffff;
        self.number(56, u32::from(code) << 24 | qpn).number(32, user)
    }

    pub fn operation(self, code: u8) -> Self {
        self.set(56, &[code])
    }

    pub fn counter(self, counter: u16) -> Self {
        self.set(60, &counter.to_be_bytes())
    }

    pub fn failed(self, syndrome: u8, vendor: u8) -> Self {
        self.set(54, &[vendor, syndrome])
    }
}

/// Returns the address of a pointer as work requests name it.
pub fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}
