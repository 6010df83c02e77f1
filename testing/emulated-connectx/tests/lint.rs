//! Findings about queues, records and registers written by hand, as a direct data path writes them.
//! Correct entries cause none.

mod common;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::*;
use emulated_connectx::{EmulatedConnectX, Options, Problem};
use rdma_ibverbs::ffi::*;

/// Returns the device to one test at a time. Only a test that never rings may shorten
/// `options.doorbell_patience`: a thread suspended between record and doorbell would be a finding.
fn device(set: impl FnOnce(&mut Options)) -> (EmulatedConnectX, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = start(|options| {
        options.check_overwritten = true;
        options.check_blue_flame = true;
        set(options);
    });
    device.take_findings();
    (device, alone)
}

/// A queue pair whose send queue the test writes.
struct Direct {
    pair: Pair,
    qp: mlx5dv_qp,
    cq: mlx5dv_cq,
    posted: u16,
    taken: u32,
}

impl Direct {
    fn new() -> Self {
        let pair = Pair::new(RC);
        let mut direct = Self { qp: zeroed(), cq: zeroed(), posted: 0, taken: 0, pair };
        let mut object: mlx5dv_obj = zeroed();
        (object.qp.in_, object.qp.out) = (direct.pair.a.raw, &mut direct.qp);
        (object.cq.in_, object.cq.out) = (direct.pair.a.queues.send.0, &mut direct.cq);
        init_obj(&mut object, 1 | 2);
        direct
    }

    /// Writes a signaled WQE of three segments (a WRITE of 100 bytes), which `spoil` may change.
    /// Returns its doorbell value.
    fn entry(&mut self, spoil: impl Fn(&mut [u8; 64])) -> u64 {
        let mut entry = [0_u8; 64];
        entry[..4].copy_from_slice(&(u32::from(self.posted) << 8 | 8).to_be_bytes());
        entry[4..8].copy_from_slice(&(self.pair.a.number() << 8 | 3).to_be_bytes());
        entry[11] = 8;
        entry[16..24].copy_from_slice(&self.pair.target.address().to_be_bytes());
        entry[24..28].copy_from_slice(&self.pair.target.key().to_be_bytes());
        let sge = self.pair.source.sge(0, 100);
        entry[32..36].copy_from_slice(&sge.length.to_be_bytes());
        entry[36..40].copy_from_slice(&sge.lkey.to_be_bytes());
        entry[40..48].copy_from_slice(&sge.addr.to_be_bytes());
        spoil(&mut entry);
        let at = usize::from(self.posted) % self.qp.sq.wqe_cnt as usize * 64;
        // SAFETY: a block of the send queue, which nothing else uses.
        unsafe { self.qp.sq.buf.cast::<u8>().add(at).copy_from(entry.as_ptr(), 64) };
        self.posted = self.posted.wrapping_add(1);
        u64::from_ne_bytes(*entry.first_chunk().unwrap())
    }

    fn record(&self) {
        // SAFETY: the second of the two records belongs to the send queue.
        let record = unsafe { AtomicU32::from_ptr(self.qp.dbrec.add(1)) };
        record.store(u32::from(self.posted).to_be(), Ordering::Release);
    }

    fn ring(&self, value: u64) {
        // SAFETY: a register on the UAR page of this queue pair.
        unsafe { AtomicU64::from_ptr(self.qp.bf.reg.cast()) }.store(value, Ordering::Release);
    }

    /// Stores `words` of eight bytes of the last entry to the register at `offset` from the first,
    /// changed by `spoil`.
    fn blue_flame(&self, offset: usize, words: std::ops::Range<usize>, spoil: impl Fn(&mut [u64])) {
        let block = usize::from(self.posted.wrapping_sub(1)) % self.qp.sq.wqe_cnt as usize;
        let mut entry = [0_u64; 8];
        // SAFETY: a block of the send queue, and a register of 64 bytes on the UAR page.
        unsafe {
            let from = self.qp.sq.buf.cast::<u8>().add(block * 64);
            entry.as_mut_ptr().cast::<u8>().copy_from(from, 64);
            spoil(&mut entry);
            for at in words {
                let word = self.qp.bf.reg.cast::<u8>().add(offset + 8 * at).cast::<u64>();
                AtomicU64::from_ptr(word).store(entry[at], Ordering::Release);
            }
        }
    }

    fn post(&mut self, spoil: impl Fn(&mut [u8; 64])) {
        let value = self.entry(spoil);
        self.record();
        self.ring(value);
    }

    /// Consumes the next CQE by the owner bit rule; returns its opcode.
    fn take(&mut self) -> u8 {
        let slot = (self.taken % self.cq.cqe_cnt) as usize * self.cq.cqe_size as usize;
        let pass = u8::from(self.taken & self.cq.cqe_cnt != 0);
        let mut last = 0;
        until("a completion", || {
            // SAFETY: the last byte of an entry of the queue.
            last = unsafe { self.cq.buf.cast::<u8>().add(slot + 63).read_volatile() };
            last >> 4 != 15 && last & 1 == pass
        });
        self.taken += 1;
        self.consumed(self.taken);
        last >> 4
    }

    fn consumed(&self, index: u32) {
        // SAFETY: the record of the completion queue.
        let record = unsafe { AtomicU32::from_ptr(self.cq.dbrec) };
        record.store((index & 0xff_ffff).to_be(), Ordering::Release);
    }
}

fn found(device: &EmulatedConnectX) -> Vec<Problem> {
    let mut findings = Vec::new();
    until("a finding", || {
        findings = device.take_findings();
        !findings.is_empty()
    });
    findings.iter().map(|finding| finding.problem).collect()
}

#[test]
fn good_entries_are_executed_for_many_passes() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for _ in 0..1000 {
        direct.post(|_| {});
        assert_eq!(direct.take(), 0);
    }
    assert_eq!(direct.pair.target.bytes()[..100], direct.pair.source.bytes()[..100]);
    device.assert_clean();
}

#[test]
fn malformed_entries_are_found_and_fail() {
    let (device, _alone) = device(|_| {});
    type Spoil = fn(&mut [u8; 64]);
    let wrong: [(&str, Spoil); 5] = [
        ("index", |entry| entry[2] = 9),
        ("queue pair", |entry| entry[6] ^= 1),
        ("operation", |entry| entry[3] = 0x3f),
        ("two segments: no data", |entry| entry[7] = 1),
        ("inline data longer than the entry", |entry| {
            entry[32..36].copy_from_slice(&0x8000_0100_u32.to_be_bytes())
        }),
    ];
    for (what, spoil) in wrong {
        let mut direct = Direct::new();
        let value = direct.entry(spoil);
        direct.record();
        // A valid doorbell of this queue pair, whatever the WQE says.
        direct.ring(u64::from_ne_bytes({
            let mut bytes = value.to_ne_bytes();
            bytes[1..3].fill(0);
            bytes[4..].copy_from_slice(&(direct.pair.a.number() << 8 | 3).to_be_bytes());
            bytes
        }));
        assert_eq!(found(&device), [Problem::MalformedWqe], "{what}");
        assert_eq!(direct.take(), 13, "{what}: an error");
    }
}

#[test]
fn missing_doorbell_is_found_and_nothing_is_executed() {
    let (device, _alone) = device(|options| options.doorbell_patience = Duration::from_millis(40));
    let mut direct = Direct::new();
    let value = direct.entry(|_| {});
    direct.record();
    assert_eq!(found(&device), [Problem::MissedDoorbell]);
    assert_eq!(direct.pair.target.word(0), 0);
    direct.ring(value);
    assert_eq!(direct.take(), 0);
    device.take_findings();
}

#[test]
fn doorbell_for_an_unknown_queue_pair_is_found() {
    let (device, _alone) = device(|_| {});
    let direct = Direct::new();
    direct.ring(u64::from_ne_bytes([0, 0, 0, 8, 0xff, 0xff, 0xf0, 3]));
    assert_eq!(found(&device), [Problem::StrayDoorbell]);
}

#[test]
fn completions_taken_by_a_wrong_owner_bit_are_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    direct.post(|_| {});
    direct.take();
    // Consumes the next entry too, which the device owns.
    direct.consumed(2);
    assert_eq!(found(&device), [Problem::WrongOwner]);
    direct.consumed(1);
    assert_eq!(found(&device), [Problem::WrongOwner], "the index moved back");
}

#[test]
fn unpolled_completions_overrun_their_queue() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for _ in 0..=direct.cq.cqe_cnt {
        let before = device.counters().requests;
        direct.post(|_| {});
        until("the request", || device.counters().requests > before);
    }
    assert_eq!(found(&device), [Problem::CompletionOverrun]);
    assert_eq!(direct.pair.context.event(), ibv_event_type::IBV_EVENT_CQ_ERR);
    assert_eq!(direct.pair.context.event(), ibv_event_type::IBV_EVENT_QP_FATAL);
}

#[test]
fn entry_longer_than_what_is_posted_is_found_and_flushing_ends() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    // 63 segments: 16 blocks, of which one is posted.
    direct.post(|entry| entry[7] = 63);
    assert_eq!(direct.take(), 13, "an error");
    // The doorbell too, if the device sees it before it executes the entry.
    assert!(found(&device).contains(&Problem::MalformedWqe));
    // Posted in the error state: flushed.
    direct.post(|entry| entry[7] = 63);
    assert_eq!(direct.take(), 13, "flushed");
    device.take_findings();
}

#[test]
fn good_copies_and_doorbells_to_all_registers_have_no_finding() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    // The queue pair's registers are one of two pairs on the page.
    for round in 0..2000_usize {
        let bytes = 1 + round as u32 % 100;
        let value = direct.entry(|entry| entry[32..36].copy_from_slice(&bytes.to_be_bytes()));
        direct.record();
        match round % 7 {
            // Whole blocks, and only the entry's 48 bytes.
            0 | 1 | 4 => direct.blue_flame(round % 2 * 256, 0..8, |_| {}),
            2 | 5 => direct.blue_flame(round % 2 * 256, 0..6, |_| {}),
            _ => direct.ring(value),
        }
        assert_eq!(direct.take(), 0);
    }
    device.assert_clean();
}

#[test]
fn copy_that_differs_from_its_entry_is_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for (word, offset) in [(1, 0), (5, 256), (3, 0)] {
        direct.entry(|_| {});
        direct.record();
        direct.blue_flame(offset, 0..8, |entry| entry[word] ^= 0x100);
        assert_eq!(found(&device), [Problem::BlueFlameMismatch], "word {word}");
        assert_eq!(direct.take(), 0);
        // The next copy to this register is compared with its own entry.
        direct.entry(|_| {});
        direct.record();
        direct.blue_flame(offset, 0..8, |_| {});
        assert_eq!(direct.take(), 0);
        device.assert_clean();
    }
}

#[test]
fn copy_may_arrive_late() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for length in 1..50 {
        direct.entry(|entry| entry[35] = length);
        direct.record();
        direct.blue_flame(0, 0..3, |_| {});
        assert_eq!(direct.take(), 0);
        direct.blue_flame(0, 3..8, |_| {});
    }
    device.assert_clean();
    direct.entry(|_| {});
    direct.record();
    direct.blue_flame(0, 0..3, |_| {});
    assert_eq!(direct.take(), 0);
    direct.blue_flame(0, 3..8, |entry| entry[4] ^= 1);
    assert_eq!(found(&device), [Problem::BlueFlameMismatch]);
}

#[test]
fn doorbell_before_its_record_is_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    let value = direct.entry(|_| {});
    direct.ring(value);
    assert_eq!(found(&device), [Problem::DoorbellWithoutRecord]);
    direct.record();
    direct.ring(value);
    assert_eq!(direct.take(), 0);
    // A record that covers only the first of two blocks.
    device.set_manual_stepping(true);
    let value = direct.entry(|entry| entry[7] = 5);
    direct.record();
    direct.ring(value);
    assert_eq!(found(&device), [Problem::DoorbellWithoutRecord]);
    device.set_manual_stepping(false);
    assert_eq!(direct.take(), 13, "an error");
    device.take_findings();
}

#[test]
fn doorbell_with_an_index_that_is_no_entry_is_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    let far = direct.qp.sq.wqe_cnt as u16;
    // Before the first entry, and a whole queue ahead.
    for index in [0xffff_u16, 1 + far, 0x8000] {
        let mut value = direct.entry(|_| {}).to_ne_bytes();
        direct.record();
        value[1..3].copy_from_slice(&index.wrapping_add(direct.posted - 1).to_be_bytes());
        direct.ring(u64::from_ne_bytes(value));
        assert_eq!(found(&device), [Problem::WrongDoorbellIndex], "index {index:#x}");
        assert_eq!(direct.take(), 0);
    }
}

#[test]
fn doorbell_of_an_executed_entry_is_not_wrong() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for _ in 0..50 {
        let value = direct.entry(|_| {});
        direct.record();
        direct.ring(value);
        assert_eq!(direct.take(), 0);
        // Late, as from a processor that was interrupted.
        let before = device.counters().doorbells;
        direct.ring(value);
        until("the doorbell", || device.counters().doorbells > before);
    }
    device.assert_clean();
}

#[test]
fn entry_overwritten_before_its_execution_is_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for overwrite in [false, true] {
        device.set_manual_stepping(true);
        let before = device.counters().doorbells;
        direct.post(|_| {});
        until("the doorbell", || device.counters().doorbells > before);
        if overwrite {
            // The same entry with another length, in the place of the posted one.
            direct.posted -= 1;
            direct.entry(|entry| entry[35] = 50);
        }
        device.set_manual_stepping(false);
        assert_eq!(direct.take(), 0);
        let problems: Vec<_> =
            device.take_findings().iter().map(|finding| finding.problem).collect();
        let expected: &[Problem] = if overwrite { &[Problem::OverwrittenEntry] } else { &[] };
        assert_eq!(problems, expected);
    }
}

#[test]
fn consumed_entry_with_a_changed_owner_bit_is_found() {
    let (device, _alone) = device(|_| {});
    let mut direct = Direct::new();
    for _ in 0..300 {
        direct.post(|_| {});
        direct.take();
    }
    let before = device.counters().completions;
    direct.post(|_| {});
    until("a completion", || device.counters().completions > before);
    let slot = (direct.taken % direct.cq.cqe_cnt) as usize * direct.cq.cqe_size as usize;
    // SAFETY: the last byte of an entry that the program owns.
    unsafe { *direct.cq.buf.cast::<u8>().add(slot + 63) ^= 1 };
    device.assert_clean();
    direct.consumed(direct.taken + 1);
    assert_eq!(found(&device), [Problem::WrongOwner]);
    direct.consumed(direct.taken);
    assert_eq!(found(&device), [Problem::WrongOwner], "the index moved back");
}
