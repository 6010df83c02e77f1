//! CQEs: writing them and notifying completion channels.

use std::time::Instant;

use crate::abi::event;
use crate::channel;
use crate::control::{Release, Waiting};
use crate::cqe::{Cqe, MINI};
use crate::lint::Problem;
use crate::objects::{Arm, Cq, Handle, Qp};
use crate::state::State;
use crate::uar;

/// Consumer indices have 24 bits.
const INDEX: u32 = 0xff_ffff;

impl Cq {
    fn outstanding(&self) -> u32 {
        self.produced.wrapping_sub(self.records.record(0)) & INDEX
    }

    /// Returns the offset of the CQE at `index`.
    fn slot(&self, index: u32) -> u64 {
        let slot = u64::from(index & (self.entries - 1)) * u64::from(self.entry_size);
        // A 128-byte entry has the CQE in its second half.
        slot + u64::from(self.entry_size - 64)
    }

    /// Writes the CQE at the producer index, without moving it.
    fn put(&self, cqe: &Cqe) {
        let (rest, last) = cqe.parts(self.produced & self.entries != 0);
        let slot = self.slot(self.produced);
        if let Some(data) = cqe.before() {
            self.ring.write(slot - 64, data);
        }
        self.ring.write(slot, rest);
        self.ring.publish(slot + 63, last);
    }

    /// Writes a compressed session at the producer index, without moving it: arrays of eight
    /// mini-CQEs into the second entry and each eighth, then the title into the first. All other
    /// entries of the session keep their bytes.
    fn put_session(&self, run: &[Cqe]) {
        const MINIS: usize = 64 / MINI;
        // The sources say nothing about unused mini-CQEs.
        const UNUSED: u8 = 0xee;
        for (number, group) in (0_u32..).zip(run.chunks(MINIS)) {
            let mut array = [UNUSED; 64];
            for (place, cqe) in array.chunks_exact_mut(MINI).zip(group) {
                place.copy_from_slice(&cqe.mini());
            }
            let at = (number * MINIS as u32).max(1);
            self.ring.write(self.slot(self.produced.wrapping_add(at)), &array);
        }
        self.put(&run[0].title(run.len() as u32));
    }

    /// Checks the entries consumed since the last call; returns what is wrong.
    ///
    /// An entry that the device has written again since is skipped.
    fn check_consumed(&mut self) -> Option<String> {
        let consumed = self.records.record(0) & INDEX;
        let advance = consumed.wrapping_sub(self.checked) & INDEX;
        let from = std::mem::replace(&mut self.checked, consumed);
        if advance > INDEX / 2 {
            return Some(format!("consumer index moved back from {from} to {consumed}"));
        }
        let mut entries =
            (0..advance.min(self.entries)).map(|back| consumed.wrapping_sub(back + 1));
        entries.find_map(|index| {
            let written = self.produced.wrapping_sub(index) & INDEX;
            let slot = u64::from(index & (self.entries - 1)) * u64::from(self.entry_size);
            let last = self.ring.byte(slot + u64::from(self.entry_size) - 1);
            let owner = last & 1;
            // The program may mark entries of a session as never written.
            let marked = self.max_session > 0 && last >> 4 == crate::cqe::INVALID;
            let wrong = (1..=self.entries).contains(&written)
                && owner != u8::from(index & self.entries != 0)
                && !marked;
            wrong.then(|| format!("entry {} was consumed with owner bit {owner}", index & INDEX))
        })
    }

    /// Returns the first entry not marked as owned by the device, which the first pass would take
    /// for a CQE.
    pub(crate) fn unmarked(&self) -> Option<u32> {
        let last = |entry: u32| u64::from(entry + 1) * u64::from(self.entry_size) - 1;
        (0..self.entries).find(|&entry| {
            let byte = self.ring.byte(last(entry));
            byte >> 4 != crate::cqe::INVALID && byte & 1 == 0
        })
    }
}

impl State {
    /// Writes a completion of queue pair `qpn`, or keeps it for as long as the policy says.
    pub(crate) fn complete(&mut self, cq: Handle, qpn: u32, cqe: Cqe) {
        match self.policy.waits(qpn) {
            Some(due) => self.policy.waiting.push(Waiting { cq, qpn, cqe, due }),
            None => self.write(cq, cqe),
        }
    }

    /// Advances the clock that programs read, and returns its nanoseconds. It stands still between
    /// two rounds of the device's thread, so it is never ahead of the time, and behind by a round.
    pub(crate) fn tick(&self) -> u64 {
        let now = self.started.elapsed().as_nanos() as u64;
        uar::set_clock(now);
        now
    }

    fn write(&mut self, handle: Handle, mut cqe: Cqe) {
        let now = self.tick();
        let Some(cq) = self.cqs.get(&handle) else { return };
        cqe.stamp(now);
        if cq.run.last().is_some_and(|last| !cqe.continues(last)) {
            self.write_run(handle);
        }
        let Some(cq) = self.cqs.get_mut(&handle) else { return };
        let free = cq.entries.saturating_sub(cq.outstanding());
        if cq.max_session < 2 || !cqe.is_compressible() || cq.run.len() as u32 >= free {
            self.write_run(handle);
            return self.write_entries(handle, &[cqe]);
        }
        cq.run.push(cqe);
        if cq.run.len() as u32 == cq.max_session {
            self.write_run(handle);
        } else {
            self.runs.insert(handle);
        }
    }

    /// Writes the runs of CQEs that wait for another of their kind.
    pub(crate) fn write_runs(&mut self) {
        while let Some(cq) = self.runs.first().copied() {
            self.write_run(cq);
        }
    }

    fn write_run(&mut self, handle: Handle) {
        self.runs.remove(&handle);
        let Some(cq) = self.cqs.get_mut(&handle) else { return };
        let run = std::mem::take(&mut cq.run);
        if !run.is_empty() {
            self.write_entries(handle, &run);
        }
    }

    /// Writes one CQE, or a session of several.
    fn write_entries(&mut self, handle: Handle, run: &[Cqe]) {
        let Some(cq) = self.cqs.get_mut(&handle) else { return };
        let (outstanding, entries, number) = (cq.outstanding(), cq.entries, cq.number);
        if outstanding > entries {
            let detail = format!(
                "consumer index {} is ahead of producer index {}",
                cq.records.record(0),
                cq.produced & INDEX
            );
            self.lint.note(number, Problem::WrongOwner, detail);
        }
        if cq.overrun {
            return;
        }
        let new = run.len() as u32;
        if outstanding.saturating_add(new) > entries {
            cq.overrun = true;
            let detail = format!("all {entries} entries are in use");
            self.lint.note(number, Problem::CompletionOverrun, detail);
            self.cq_event(handle, event::CQ_ERR);
            self.overrun.push(handle);
            return;
        }
        match run {
            [cqe] => cq.put(cqe),
            _ => cq.put_session(run),
        }
        cq.produced = cq.produced.wrapping_add(new);
        self.counters.compressed_sessions += u64::from(new > 1);
        self.counters.completions += u64::from(new);
        self.counters.scattered += run.iter().filter(|cqe| cqe.has_data()).count() as u64;
        self.counters.errors += run.iter().filter(|cqe| cqe.is_error()).count() as u64;
        let urgent = run.iter().any(|cqe| cqe.solicited || cqe.is_error());
        if urgent {
            cq.solicited = cq.produced;
        }
        if cq.armed.is_some_and(|arm| arm == Arm::Any || urgent) {
            self.notify(handle);
        }
    }

    fn notify(&mut self, handle: Handle) {
        let Some(cq) = self.cqs.get_mut(&handle) else { return };
        cq.armed = None;
        let Some(channel) = cq.channel.and_then(|fd| self.channels.get_mut(&fd)) else { return };
        channel.send(&channel::completion_event(cq.user_handle));
        cq.completion_events += 1;
        self.counters.completion_events += 1;
    }

    /// Reads the arm record of a completion queue, and notifies if a completion is due already.
    pub(crate) fn poll_arm_record(&mut self, handle: Handle) {
        const SOLICITED: u32 = 1 << 24;
        let Some(cq) = self.cqs.get_mut(&handle) else { return };
        let record = cq.records.record(1);
        // Another queue of the UAR page may have rung: an unchanged record is no request. Records
        // start at zero.
        if cq.last_arm == Some(record)
            || cq.last_arm.is_none() && record == 0 && cq.channel.is_none()
        {
            return;
        }
        cq.last_arm = Some(record);
        let consumed = record & INDEX;
        let arm = if record & SOLICITED != 0 { Arm::Solicited } else { Arm::Any };
        // A request for any completion is not weakened.
        if cq.armed != Some(Arm::Any) {
            cq.armed = Some(arm);
        }
        // Completions written after the program's consumer index notify at once.
        let written = if arm == Arm::Any { cq.produced } else { cq.solicited };
        let ahead = written.wrapping_sub(consumed) & INDEX;
        if ahead != 0 && ahead <= INDEX / 2 {
            self.notify(handle);
        }
    }

    pub(crate) fn fail_overrun(&mut self) {
        for cq in std::mem::take(&mut self.overrun) {
            let uses = |qp: &Qp| qp.send_cq == cq || qp.recv_cq == cq;
            let users: Vec<_> =
                self.qps.iter().filter(|(_, qp)| uses(qp)).map(|(&qp, _)| qp).collect();
            for qp in users {
                self.qp_event(qp, event::QP_FATAL);
                self.fail_qp(qp);
            }
        }
    }

    /// Writes delayed completions that are due; returns whether there were any.
    pub(crate) fn write_due(&mut self) -> bool {
        if self.policy.waiting.is_empty() {
            return false;
        }
        let now = Instant::now();
        let (due, waiting) = std::mem::take(&mut self.policy.waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|waiting| waiting.due.is_some_and(|due| due <= now));
        self.policy.waiting = waiting;
        let any = !due.is_empty();
        for waiting in due {
            self.write(waiting.cq, waiting.cqe);
        }
        any
    }

    pub(crate) fn release(&mut self, order: Release) {
        for waiting in self.policy.released(order) {
            self.write(waiting.cq, waiting.cqe);
        }
    }

    pub(crate) fn audit_cqs(&mut self) {
        let Self { cqs, lint, .. } = self;
        for cq in cqs.values_mut() {
            if let Some(detail) = cq.check_consumed() {
                lint.note(cq.number, Problem::WrongOwner, detail);
            }
            if cq.outstanding() > cq.entries && !cq.overrun {
                let detail = format!(
                    "consumer index {} is ahead of producer index {}",
                    cq.records.record(0),
                    cq.produced & INDEX
                );
                lint.note(cq.number, Problem::WrongOwner, detail);
            }
        }
    }
}
