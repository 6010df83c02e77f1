//! CQEs: writing them and notifying completion channels.

use std::time::Instant;

use crate::abi::event;
use crate::channel;
use crate::control::{Release, Waiting};
use crate::cqe::Cqe;
use crate::lint::Problem;
use crate::objects::{Arm, Cq, Handle, Qp};
use crate::state::State;

/// Consumer indices have 24 bits.
const INDEX: u32 = 0xff_ffff;

impl Cq {
    fn outstanding(&self) -> u32 {
        self.produced.wrapping_sub(self.records.record(0)) & INDEX
    }

    fn slot(&self) -> u64 {
        let slot = u64::from(self.produced & (self.entries - 1)) * u64::from(self.entry_size);
        // A 128-byte entry has the CQE in its second half.
        slot + u64::from(self.entry_size - 64)
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
            let owner = self.ring.byte(slot + u64::from(self.entry_size) - 1) & 1;
            let wrong = (1..=self.entries).contains(&written)
                && owner != u8::from(index & self.entries != 0);
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

    fn write(&mut self, handle: Handle, mut cqe: Cqe) {
        let now = self.started.elapsed().as_nanos() as u64;
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
        if outstanding >= entries {
            cq.overrun = true;
            let detail = format!("all {entries} entries are in use");
            self.lint.note(number, Problem::CompletionOverrun, detail);
            self.cq_event(handle, event::CQ_ERR);
            self.overrun.push(handle);
            return;
        }
        cqe.stamp(now);
        let (rest, last) = cqe.parts(cq.produced & cq.entries != 0);
        let slot = cq.slot();
        if let Some(data) = cqe.before() {
            cq.ring.write(slot - 64, data);
        }
        cq.ring.write(slot, rest);
        cq.ring.publish(slot + 63, last);
        cq.produced = cq.produced.wrapping_add(1);
        self.counters.completions += 1;
        self.counters.errors += u64::from(cqe.is_error());
        let urgent = cqe.solicited || cqe.is_error();
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
