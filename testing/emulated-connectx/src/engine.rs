//! The thread that plays the device: sees doorbells, executes requests, writes completions.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::abi::state;
use crate::lint::Problem;
use crate::objects::Handle;
use crate::state::{self as device, State};
use crate::uar::Ring;

/// Requests of one queue pair before the next one's turn, and rounds with nothing to do before the thread sleeps, a little
/// and then longer.
const TURN: usize = 16;
const EAGER: u32 = 200;
const AWAKE: u32 = 5000;
const SHORT: Duration = Duration::from_micros(20);
const LONG: Duration = Duration::from_micros(200);
/// How often all queues are looked at, for what no doorbell tells; less often if they are so many that it takes a while.
const AUDIT: Duration = Duration::from_micros(500);
const SHARE: u32 = 10;

pub(crate) fn spawn() -> io::Result<()> {
    let run = || {
        let mut idle = 0_u32;
        loop {
            // The lock is not fair: who waits for it gets it while this thread yields or sleeps.
            if device::lock_started().round() {
                idle = 0;
            }
            idle = idle.saturating_add(1);
            match idle {
                0..EAGER => thread::yield_now(),
                EAGER..AWAKE => thread::sleep(SHORT),
                AWAKE.. => thread::sleep(LONG),
            }
        }
    };
    thread::Builder::new().name("emulated-connectx".into()).spawn(run).map(drop)
}

impl State {
    /// One look at everything; whether there was anything to do.
    fn round(&mut self) -> bool {
        self.reap();
        let mut any = self.collect();
        if !self.options.manual_stepping {
            for qp in self.turns() {
                any |= self.run_send_queue(qp, TURN, true);
                self.last_served = qp;
            }
        }
        any |= self.write_due();
        self.end_overrun();
        if Instant::now() >= self.next_audit {
            any |= self.audit();
        }
        any
    }

    /// Takes in doorbells.
    pub(crate) fn collect(&mut self) -> bool {
        let rings = self.uar.rings();
        let armed = self.uar.armed();
        let any = !rings.is_empty() || !armed.is_empty();
        for ring in rings {
            self.counters.doorbells += 1;
            let senders = self.uar.senders(ring.page);
            self.check_ring(&ring, &senders);
            self.ready.extend(senders);
        }
        for cq in armed {
            self.look_at_arm(cq);
        }
        any
    }

    /// A doorbell names a queue pair that rings there; one that has gone may have rung before.
    fn check_ring(&mut self, ring: &Ring, senders: &[Handle]) {
        let bytes = ring.value.to_ne_bytes();
        let number = u32::from_be_bytes([0, bytes[4], bytes[5], bytes[6]]);
        let known = senders.iter().any(|qp| self.qps.get(qp).is_some_and(|qp| qp.number == number));
        let gone = !self.qp_by_number.contains_key(&number) && self.was_number(number);
        if !known && !gone {
            let detail = format!("on page {}, with {:#x}", ring.page, u64::from_be_bytes(bytes));
            self.lint.note(number, Problem::StrayDoorbell, detail);
        }
    }

    /// Who may have something to do, from the one after the last that was served.
    fn turns(&self) -> Vec<Handle> {
        let after = self.ready.range(self.last_served + 1..);
        after.chain(self.ready.range(..=self.last_served)).copied().collect()
    }

    /// One attempt at one request; `false` if there is none.
    pub(crate) fn step_one(&mut self) -> bool {
        for qp in self.turns() {
            if self.run_send_queue(qp, 1, false) {
                self.last_served = qp;
                return true;
            }
        }
        false
    }

    /// What is posted to queues in the error state needs no doorbell; what else needs one and has none is a problem.
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
                qp.unrung = None;
                continue;
            }
            let since = *qp.unrung.get_or_insert(now);
            if now - since >= options.doorbell_patience {
                let detail = format!("{posted} blocks posted and not rung for");
                lint.note(qp.number, Problem::MissedDoorbell, detail);
            }
        }
        self.audit_cqs();
        for channel in self.channels.values_mut() {
            channel.flush();
        }
        let any = flushed.into_iter().fold(false, |any, qp| self.flush(qp) | any);
        self.next_audit = Instant::now() + AUDIT.max(now.elapsed() * SHARE);
        any
    }
}
