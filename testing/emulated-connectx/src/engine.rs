//! The device thread: polls doorbells, executes requests, writes CQEs.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::abi::state;
use crate::lint::Problem;
use crate::objects::Handle;
use crate::state::{self as device, State};
use crate::uar::Doorbell;

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
            self.ready.extend(senders);
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
    }

    /// Returns the queue pairs that may have work, in round-robin order after the last one served.
    fn round_robin(&self) -> Vec<Handle> {
        let after = self.ready.range(self.last_served + 1..);
        after.chain(self.ready.range(..=self.last_served)).copied().collect()
    }

    /// Makes one attempt at one request; returns `false` if none is ready.
    pub(crate) fn step_one(&mut self) -> bool {
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
