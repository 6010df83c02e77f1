//! The device thread: polls doorbells, executes requests, writes CQEs.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::abi::state;
use crate::lint::Problem;
use crate::objects::{Handle, Qp, Ring};
use crate::requester::{self, read_control};
use crate::state::{self as device, State};
use crate::uar::Doorbell;
use crate::wqe::BLOCK;

/// Limit of requests per queue pair and round.
const QUANTUM: usize = 16;
/// Idle rounds before the thread sleeps instead of yielding.
const YIELD_ROUNDS: u32 = 200;
/// Idle rounds before it sleeps longer.
const SHORT_SLEEP_ROUNDS: u32 = 5000;
const SHORT_SLEEP: Duration = Duration::from_micros(20);
const LONG_SLEEP: Duration = Duration::from_micros(200);
/// Interval of audits, which find work that no doorbell announces.
const AUDIT_INTERVAL: Duration = Duration::from_micros(500);
/// With many queues: minimum interval of audits, in durations of an audit.
const AUDIT_SPACING: u32 = 10;

pub(crate) fn spawn() -> io::Result<()> {
    let run = || {
        let mut idle = 0_u32;
        loop {
            // The lock is not fair: waiters get it while this thread yields or sleeps.
            if device::lock_started().round() {
                idle = 0;
            }
            idle = idle.saturating_add(1);
            match idle {
                0..YIELD_ROUNDS => thread::yield_now(),
                YIELD_ROUNDS..SHORT_SLEEP_ROUNDS => thread::sleep(SHORT_SLEEP),
                SHORT_SLEEP_ROUNDS.. => thread::sleep(LONG_SLEEP),
            }
        }
    };
    thread::Builder::new().name("emulated-connectx".into()).spawn(run).map(drop)
}

impl State {
    fn round(&mut self) -> bool {
        self.tick();
        self.reap();
        let mut any = self.collect();
        if !self.options.manual_stepping {
            for qp in self.round_robin() {
                any |= self.run_send_queue(qp, QUANTUM, true);
                self.last_served = qp;
            }
        }
        any |= self.write_due();
        self.fail_overrun();
        if Instant::now() >= self.next_audit {
            any |= self.audit();
        }
        self.write_runs();
        any
    }

    pub(crate) fn collect(&mut self) -> bool {
        let doorbells = self.uar.doorbells();
        let armed = self.uar.armed();
        let any = !doorbells.is_empty() || !armed.is_empty();
        for ring in doorbells {
            self.counters.doorbells += 1;
            let senders = self.uar.senders(ring.page);
            self.check_doorbell(&ring, &senders);
            self.begin_blue_flame(&ring);
            self.ready.extend(senders);
        }
        let qps = &self.qps;
        // The register may hold another WQE, whose doorbell was overwritten unseen.
        let other = |qp: &Qp, word: usize, bytes: [u8; 8]| {
            let posted = |sq: Ring| {
                let blocks = sq.posted().min(sq.entries as u16);
                let block = |at| requester::read_block(&sq, sq.index.wrapping_add(at));
                (0..blocks).any(|at| block(at)[8 * word..8 * word + 8] == bytes)
            };
            qp.history.had(8 * word, bytes) || qp.sq.is_some_and(posted)
        };
        let executed = |senders: &[Handle], word: usize, value: u64| {
            let mut senders = senders.iter().filter_map(|qp| qps.get(qp));
            senders.any(|qp| other(qp, word, value.to_ne_bytes()))
        };
        let patience = self.options.doorbell_patience;
        for (number, at, detail) in self.uar.wrong_copies(patience, executed) {
            let detail = format!("register {at:#x}: {detail}");
            self.lint.note(number, Problem::BlueFlameMismatch, detail);
        }
        for cq in armed {
            self.poll_arm_record(cq);
        }
        any
    }

    /// Reports a doorbell for a queue pair that does not ring on its page. Destroyed queue pairs
    /// are exempt: they may have rung before.
    fn check_doorbell(&mut self, ring: &Doorbell, senders: &[Handle]) {
        let bytes = ring.value.to_ne_bytes();
        let number = u32::from_be_bytes([0, bytes[4], bytes[5], bytes[6]]);
        let known = senders.iter().any(|qp| self.qps.get(qp).is_some_and(|qp| qp.number == number));
        let gone = !self.qp_by_number.contains_key(&number) && self.number_was_assigned(number);
        if !known && !gone {
            let detail = format!(
                "doorbell value {:#x} on UAR page {}",
                u64::from_be_bytes(bytes),
                ring.page
            );
            self.lint.note(number, Problem::StrayDoorbell, detail);
        }
        // libmlx5 names only the UAR page of a queue pair, not its registers: any register of the
        // page may be right.
        if known {
            self.check_index(number, u16::from_be_bytes([bytes[1], bytes[2]]));
        }
    }

    /// Checks that a doorbell's `index` names a WQE, posted or just executed.
    fn check_index(&mut self, number: u32, index: u16) {
        let Some(qp) = self.qp_by_number.get(&number).and_then(|qp| self.qps.get_mut(qp)) else {
            return;
        };
        let Some(sq) = qp.sq else { return };
        let record = sq.record.record(0) as u16;
        let mut problem = Problem::WrongDoorbellIndex;
        if u32::from(index.wrapping_sub(record)) < sq.entries {
            problem = Problem::DoorbellWithoutRecord;
        } else if qp.history.has_executed(index) {
            return;
        }
        let (mut at, mut left) = (sq.index, record.wrapping_sub(sq.index));
        // More blocks than the queue holds: their WQEs are overwritten.
        if u32::from(left) > sq.entries {
            return;
        }
        while left > 0 && problem == Problem::WrongDoorbellIndex {
            let blocks = read_control(&sq, at).blocks();
            if at == index {
                match blocks <= left {
                    true => return,
                    false => problem = Problem::DoorbellWithoutRecord,
                }
            }
            at = at.wrapping_add(blocks.min(left));
            left = left.saturating_sub(blocks);
        }
        let detail =
            format!("doorbell with index {index:#x}, record {record:#x}, next WQE {:#x}", sq.index);
        self.lint.note(number, problem, detail);
    }

    /// Begins the check of a possible BlueFlame copy, and copies posted WQEs if the options
    /// request it.
    fn begin_blue_flame(&mut self, ring: &Doorbell) {
        let bytes = ring.value.to_ne_bytes();
        let number = u32::from_be_bytes([0, bytes[4], bytes[5], bytes[6]]);
        let index = u16::from_be_bytes([bytes[1], bytes[2]]);
        let qp = self.qp_by_number.get(&number).and_then(|qp| self.qps.get_mut(qp));
        let mut entry = None;
        if let Some((qp, sq)) = qp.and_then(|qp| qp.sq.map(|sq| (qp, sq))) {
            let mut block = [0; BLOCK];
            sq.memory.read(sq.offset(index), &mut block);
            // Otherwise the entry was executed and its block used again.
            if block[..8] == bytes {
                let mut words = [0; 8];
                for (word, bytes) in words.iter_mut().zip(block.chunks_exact(8)) {
                    *word = u64::from_ne_bytes(*bytes.first_chunk().expect("a chunk of 8"));
                }
                entry = Some((words, usize::from(bytes[7] & 0x3f) * 16));
            }
            let (mut at, mut left) = (sq.index, sq.posted());
            while self.options.check_overwritten && left > 0 && u32::from(left) <= sq.entries {
                let blocks = read_control(&sq, at).blocks().min(left);
                if !qp.history.has_copy(at) {
                    qp.history.copy(at, requester::read_blocks(&sq, at, blocks));
                }
                (at, left) = (at.wrapping_add(blocks), left - blocks);
            }
        }
        if self.options.check_blue_flame {
            self.uar.begin_copy(ring, number, entry);
        }
    }

    /// Returns the queue pairs that may have work, in round-robin order after the last one served.
    fn round_robin(&self) -> Vec<Handle> {
        let after = self.ready.range(self.last_served + 1..);
        after.chain(self.ready.range(..=self.last_served)).copied().collect()
    }

    /// Serves doorbells and makes one attempt at one request; returns `false` if none is ready.
    pub(crate) fn step(&mut self) -> bool {
        self.collect();
        self.step_one()
    }

    /// Makes one attempt at one request; returns `false` if none is ready.
    fn step_one(&mut self) -> bool {
        for qp in self.round_robin() {
            if self.run_send_queue(qp, 1, false) {
                self.last_served = qp;
                return true;
            }
        }
        false
    }

    /// Flushes queues in the error state, which need no doorbell, and reports missed doorbells of
    /// others. Returns whether anything was flushed.
    fn audit(&mut self) -> bool {
        let now = Instant::now();
        let mut flushed = Vec::new();
        let Self { qps, ready, lint, options, .. } = self;
        for (&handle, qp) in qps.iter_mut() {
            let posted = qp.sq.map_or(0, |sq| sq.posted());
            if matches!(qp.state, state::ERR | state::SQE) {
                let receives = qp.state == state::ERR && qp.rq.is_some_and(|rq| rq.posted() != 0);
                if posted != 0 || receives {
                    flushed.push(handle);
                }
                continue;
            }
            if posted == 0 || qp.state != state::RTS || ready.contains(&handle) {
                qp.doorbell_missing_since = None;
                continue;
            }
            let since = *qp.doorbell_missing_since.get_or_insert(now);
            if now - since >= options.doorbell_patience {
                let detail = format!("{posted} WQE blocks posted without a doorbell");
                lint.note(qp.number, Problem::MissedDoorbell, detail);
            }
        }
        self.audit_cqs();
        for channel in self.channels.values_mut() {
            channel.flush();
        }
        let any = flushed.into_iter().fold(false, |any, qp| self.flush(qp) | any);
        self.next_audit = Instant::now() + AUDIT_INTERVAL.max(now.elapsed() * AUDIT_SPACING);
        any
    }
}
