//! Scatter to CQE: the adapter puts short data into the CQE, and software copies it to the buffers
//! of the work request.

use std::ptr;

use rdma_provider::types::WcStatus;

use super::errors::BadEntry;
use super::layout::{Control, Cqe, DataSegment, Opcode};
use super::receive_queue::Entries;
use super::ring::Ring;

/// Bytes of data in a CQE.
const IN_ENTRY: usize = 32;

/// A copy of the data in an entry.
#[derive(Debug)]
pub(super) struct Inline {
    bytes: [u8; 64],
    capacity: usize,
}

impl Inline {
    /// Returns the data in the first 32 bytes of a CQE.
    pub(super) fn in_entry(entry: &Cqe) -> Self {
        // SAFETY: S3: a CQE has 64 bytes and no padding.
        let bytes = unsafe { ptr::from_ref(entry).cast::<[u8; 64]>().read() };
        Self { bytes, capacity: IN_ENTRY }
    }

    /// Returns the data in the 64 bytes before a CQE.
    pub(super) fn before(bytes: [u8; 64]) -> Self {
        Self { bytes, capacity: 64 }
    }

    /// Returns the first `length` bytes.
    pub(super) fn bytes(&self, qpn: u32, length: u32) -> Result<&[u8], BadEntry> {
        let bytes = self.bytes[..self.capacity].get(..length as usize);
        bytes.ok_or(BadEntry::Length { qpn, length })
    }
}

/// Copies data to the buffers of the READ or atomic whose WQE begins at block `index`. Returns
/// `None` if the WQE does not have `operation`: its segments are no buffers for a response. An
/// operation without a response is a completion with `REM_INV_REQ_ERR`, as in libmlx5.
///
/// # Safety
///
/// The WQE belongs to a request in flight, whose buffers are addresses of this process.
pub(super) unsafe fn to_request(
    ring: &Ring<'_>,
    index: u32,
    operation: Opcode,
    bytes: &[u8],
) -> Option<WcStatus> {
    let first = match operation {
        Opcode::Read => 2,
        Opcode::CompareSwap | Opcode::FetchAdd => 3,
        // No other operation returns data.
        _ => return Some(WcStatus::REM_INV_REQ_ERR),
    };
    let block = ring.block(index);
    // SAFETY: S3: the control segment of a WQE in the ring.
    let control = unsafe { block.cast::<Control>().read() };
    if control.index_opcode.get() != (index & 0xffff) << 8 | operation as u32 {
        return None;
    }
    let end = control.qpn_segments.get() & 0x3f;
    // SAFETY: S3: segments of the ring.
    let segments =
        (first..end).map(|segment| unsafe { ring.segment(index, block, segment).cast().read() });
    // SAFETY: S1, S2: the caller's promise.
    Some(unsafe { scatter(segments, bytes) })
}

/// Copies data to the buffers of receive `place`, after the first `skipped` segments.
///
/// # Safety
///
/// The entry belongs to a receive in flight, whose buffers are addresses of this process.
pub(super) unsafe fn to_receive(
    entries: &Entries,
    place: u32,
    skipped: usize,
    bytes: &[u8],
) -> WcStatus {
    // SAFETY: S3: segments of the queue.
    let segments =
        (skipped..entries.segments()).map(|at| unsafe { entries.segment(place, at).read() });
    // SAFETY: S1, S2: the caller's promise.
    unsafe { scatter(segments, bytes) }
}

/// Copies a message in the first 32 bytes of a CQE to the first buffer of receive `place`. Returns
/// false, and copies nothing, if it is longer than either.
///
/// # Safety
///
/// See [`to_receive`].
#[inline]
pub(super) unsafe fn to_first_buffer(entries: &Entries, place: u32, entry: &Cqe) -> bool {
    // SAFETY: S3: a segment of the queue.
    let segment: DataSegment = unsafe { entries.segment(place, 0).read() };
    let length = entry.length.get();
    if length > segment.length.get().min(IN_ENTRY as u32) {
        return false;
    }
    let to = ptr::with_exposed_provenance_mut::<u8>(segment.address.get() as usize);
    // SAFETY: S1, S2: as in `scatter`; the entry is longer.
    unsafe { to.copy_from_nonoverlapping(ptr::from_ref(entry).cast(), length as usize) };
    true
}

/// Copies `bytes` to a list of buffers.
///
/// # Safety
///
/// The buffers belong to work in flight, and are addresses of this process.
unsafe fn scatter(segments: impl Iterator<Item = DataSegment>, mut bytes: &[u8]) -> WcStatus {
    for segment in segments {
        if bytes.is_empty() || segment.key == DataSegment::END.key {
            break;
        }
        let (now, later) = bytes.split_at(bytes.len().min(segment.length.get() as usize));
        let to = ptr::with_exposed_provenance_mut::<u8>(segment.address.get() as usize);
        // SAFETY: S1, S2: the work request names this memory, and is in flight until its completion
        // is returned: the memory is allocated, and the adapter's to write.
        unsafe { to.copy_from_nonoverlapping(now.as_ptr(), now.len()) };
        bytes = later;
    }
    if bytes.is_empty() { WcStatus::SUCCESS } else { WcStatus::LOC_LEN_ERR }
}

#[cfg(test)]
mod tests {
    use rdma_provider::types::{Lkey, RecvWr, Sge, WrId};

    use super::super::entry::{Entry, Header};
    use super::super::heap::{Memory, ReceiveMemory};
    use super::super::layout::BLOCK;
    use super::super::receive_queue::ReceiveQueue;
    use super::*;

    const MARK: u8 = 0xa5;

    /// Buffers of these lengths, each between marked bytes.
    struct Buffers {
        memory: Memory,
        list: Vec<Sge>,
    }

    impl Buffers {
        fn new(lengths: &[u32]) -> Self {
            let memory = Memory::new(lengths.len() * 128 + 64, MARK);
            let buffer = |(at, &length): (usize, &u32)| Sge {
                addr: memory.address(64 + at * 128),
                length,
                lkey: Lkey(9),
            };
            let list = lengths.iter().enumerate().map(buffer).collect();
            Self { memory, list }
        }

        /// Checks that exactly `bytes` were written, in the order of the list.
        fn check(&self, mut bytes: &[u8]) {
            let mut expected = vec![MARK; self.list.len() * 128 + 64];
            for (at, buffer) in self.list.iter().enumerate() {
                let (now, later) = bytes.split_at(bytes.len().min(buffer.length as usize));
                expected[64 + at * 128..][..now.len()].copy_from_slice(now);
                bytes = later;
            }
            assert_eq!(self.memory.read_all(), expected);
        }
    }

    fn bytes(length: usize) -> Vec<u8> {
        (0..length as u8).collect()
    }

    #[test]
    fn data_fill_the_buffers_of_a_receive_up_to_the_end_of_its_list() {
        for (lengths, length) in [
            (&[10, 0, 20][..], 30),
            (&[10, 0, 20], 29),
            (&[10, 0, 20], 31),
            (&[10, 20, 30, 4], 64),
            (&[64], 0),
            (&[64], 64),
            (&[], 0),
            (&[], 1),
        ] {
            for skipped in [0, 1] {
                let buffers = Buffers::new(lengths);
                let memory = ReceiveMemory::new(2, 4 + skipped as u32);
                // SAFETY: S3: the memory is dropped after the queue.
                let queue: ReceiveQueue = unsafe { memory.own() };
                // An older list, beyond whose end the new one does not reach.
                let older = Buffers::new(&[64; 4]);
                let wr = RecvWr { wr_id: WrId(0), sges: &older.list };
                assert!(queue.entries().write(1, skipped, &wr));
                assert!(queue.entries().write(1, skipped, &RecvWr { sges: &buffers.list, ..wr }));
                let bytes = bytes(length);
                let capacity = lengths.iter().sum::<u32>() as usize;
                // SAFETY: S2: the buffers are alive.
                let status = unsafe { to_receive(queue.entries(), 1, skipped, &bytes) };
                let fits = length <= capacity;
                assert_eq!(status == WcStatus::SUCCESS, fits, "{lengths:?}, {length}");
                assert!(fits || status == WcStatus::LOC_LEN_ERR);
                buffers.check(&bytes[..length.min(capacity)]);
                older.check(&[]);
            }
        }
    }

    #[test]
    fn data_fill_the_buffers_of_the_read_or_atomic_that_completed() {
        let memory = Memory::new(4 * BLOCK, 0);
        // SAFETY: S3: the memory is dropped after the ring.
        let ring: Ring<'_> = unsafe { Ring::from_raw(memory.start(), 4) };
        // Across the end of the ring.
        let index = 0x1_0003;
        let buffers = Buffers::new(&[5, 1, 2, 40]);
        let entry = Entry::connected(&ring, index).read().remote(0, 0).buffer(&buffers.list);
        entry.finish(&Header::default());
        let (all, more) = (bytes(48), bytes(49));
        // SAFETY: S2: the buffers of both requests are alive.
        let copy = |index, op, bytes: &[u8]| unsafe { to_request(&ring, index, op, bytes) };
        // An operation that the WQE does not have, or another WQE's index.
        assert_eq!(copy(index, Opcode::FetchAdd, &all), None);
        assert_eq!(copy(7, Opcode::Read, &all), None);
        assert_eq!(copy(index, Opcode::Send, &all), Some(WcStatus::REM_INV_REQ_ERR));
        buffers.check(&[]);
        let index = index & 0xffff;
        assert_eq!(copy(index, Opcode::Read, &all), Some(WcStatus::SUCCESS));
        buffers.check(&all);
        assert_eq!(copy(index, Opcode::Read, &more), Some(WcStatus::LOC_LEN_ERR));
        buffers.check(&all);

        let result = Buffers::new(&[8]);
        let entry = Entry::connected(&ring, 1).atomic(Opcode::CompareSwap).remote(0, 0);
        entry.operands(1, 2).buffer(&result.list).finish(&Header::default());
        let status = copy(1, Opcode::CompareSwap, &all[..8]);
        assert_eq!(status, Some(WcStatus::SUCCESS));
        result.check(&all[..8]);
    }

    #[test]
    fn inline_data_end_with_their_part_of_the_entry() {
        let in_entry = Inline { bytes: [7; 64], capacity: 32 };
        let before = Inline::before([7; 64]);
        let bad = |length| Err(BadEntry::Length { qpn: 3, length });
        assert_eq!(in_entry.bytes(3, 32), Ok(&[7; 32][..]));
        assert_eq!(in_entry.bytes(3, 33), bad(33));
        assert_eq!(before.bytes(3, 64), Ok(&[7; 64][..]));
        assert_eq!(before.bytes(3, 65), bad(65));
        assert_eq!(before.bytes(3, u32::MAX), bad(u32::MAX));
        assert_eq!(before.bytes(3, 0), Ok(&[][..]));
    }
}
