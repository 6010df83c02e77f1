//! Dynamic connections between changing targets and failing initiators. Successful work is executed
//! once, failed work at most once, and other initiators are unaffected.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use fastrand::Rng;
use tokio_rdma::software::{LinkCounters, Network};
use tokio_rdma::types::{
    AddressVector, Data, DcKey, DctTarget, Mtu, PortNum, QpAttr, QpState, Qpn, RecvWr, RnrTimer,
    SendFlags, SendOp, SendWr, SrqCaps, Transport, WcOpcode, WcStatus, WorkCompletion, WrId,
};
use tokio_rdma::verbs::{Dct, Qp, Srq};
use tokio_rdma::{Access, Imm};

use super::campaign::{Trace, seeds};
use super::chance::{LARGEST, Mix, noise, size};
use super::memory::Memory;
use super::setup::{Side, Terms, fail, is};

const STEPS: usize = 24;
const RECEIVE: u64 = 1 << 63;
const SLOT: usize = 16 << 10;

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    hash: u64,
    now: Duration,
    link: LinkCounters,
    failed: usize,
    sessions: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    WriteImm,
    Write,
    Read,
    Add,
}

/// A work request, identified by the position of its bytes in the noise.
#[derive(Debug, Clone)]
struct Step {
    kind: Kind,
    target: usize,
    /// The target's number at the time of the post.
    number: Qpn,
    at: usize,
    len: usize,
    status: Option<WcStatus>,
    arrived: usize,
}

impl Step {
    fn bytes(&self) -> &'static [u8] {
        &noise()[self.at..self.at + self.len]
    }
}

/// A target that may be replaced while its memory stays.
struct Target {
    side: usize,
    key: DcKey,
    dct: Dct,
    srq: Srq,
    inbox: Memory,
    free: Vec<usize>,
    /// The slots of posted receives, by receive number.
    posted: BTreeMap<u64, usize>,
    next: u64,
    /// The counter, and a slot for each step of each initiator.
    memory: Memory,
    timer: RnrTimer,
}

struct Initiator {
    side: usize,
    qp: Qp,
    terms: Terms,
    source: Memory,
    results: Memory,
    steps: Vec<Step>,
    done: usize,
    /// The first failed step since the last repair.
    failed_at: Option<usize>,
    repaired: usize,
}

impl Target {
    fn new(sides: &[Side], side: usize, random: &mut Rng, places: usize) -> Self {
        let here = &sides[side];
        let depth = random.usize(1..12);
        let srq = Srq::new(&here.pd, SrqCaps { max_wr: 16, max_sge: 2 }).unwrap();
        let memory = Memory::new(&here.pd, 8 + places * SLOT);
        let (key, timer) = (DcKey(random.u64(..)), RnrTimer::from_code(random.u8(1..9)));
        let dct = Self::dct(here, &srq, key, timer);
        let inbox = Memory::new(&here.pd, depth * SLOT);
        let free = (0..depth).collect();
        Self { side, key, dct, srq, inbox, free, posted: BTreeMap::new(), next: 0, memory, timer }
    }

    fn dct(side: &Side, srq: &Srq, key: DcKey, timer: RnrTimer) -> Dct {
        let dct = Dct::new(&side.pd, &side.cq, srq, key).unwrap();
        dct.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            access: Some(Access::REMOTE_ALL),
            ..QpAttr::to_state(QpState::Init)
        })
        .unwrap();
        dct.modify(&QpAttr {
            address: Some(side.address()),
            path_mtu: Some(Mtu::Mtu4096),
            min_rnr_timer: Some(timer),
            ..QpAttr::to_state(QpState::Rtr)
        })
        .unwrap();
        dct
    }

    fn number(&self) -> Qpn {
        self.dct.number().unwrap()
    }

    fn receive(&mut self, index: usize) {
        let Some(slot) = self.free.pop() else { return };
        let sges = [self.inbox.sge(slot * SLOT, SLOT)];
        let wr_id = WrId(RECEIVE | (index as u64) << 32 | self.next);
        // SAFETY: the inbox outlives the target and is read only after the completion.
        unsafe { self.srq.post_recv(&[RecvWr { wr_id, sges: &sges }]) }.unwrap();
        self.posted.insert(self.next, slot);
        self.next += 1;
    }
}

impl Initiator {
    fn new(sides: &[Side], side: usize, random: &mut Rng, mtu: Mtu, patient: bool) -> Self {
        let here = &sides[side];
        let mut terms = Terms::draw(random, mtu);
        (terms.caps.max_recv_wr, terms.caps.max_recv_sge) = (0, 0);
        terms.caps.max_send_wr = terms.caps.max_send_wr.max(4);
        if !patient {
            (terms.retry_count, terms.rnr_retry) = (random.u8(..3), random.u8(1..8));
        }
        let qp = here.queue_pair(Transport::Dci, None, terms.caps);
        let source = Memory::new(&here.pd, 2 * LARGEST);
        source.fill(0, &noise()[..2 * LARGEST]);
        let results = Memory::new(&here.pd, STEPS * SLOT);
        let steps = Vec::new();
        let initiator =
            Self { side, qp, terms, source, results, steps, done: 0, failed_at: None, repaired: 0 };
        initiator.move_to_rts();
        initiator
    }

    fn move_to_rts(&self) {
        let Terms { mtu, psn, timeout, retry_count, rnr_retry, rd_atomic, .. } = self.terms;
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            ..QpAttr::to_state(QpState::Init)
        };
        self.qp.modify(&init).unwrap();
        self.qp.modify(&QpAttr { path_mtu: Some(mtu), ..QpAttr::to_state(QpState::Rtr) }).unwrap();
        self.qp
            .modify(&QpAttr {
                sq_psn: Some(psn),
                timeout: Some(timeout),
                retry_count: Some(retry_count),
                rnr_retry: Some(rnr_retry),
                max_rd_atomic: Some(rd_atomic),
                ..QpAttr::to_state(QpState::Rts)
            })
            .unwrap();
    }

    fn post(
        &mut self,
        index: usize,
        random: &mut Rng,
        targets: &[Target],
        places: &[AddressVector],
    ) {
        let is_full = self.steps.len() - self.done >= self.terms.caps.max_send_wr as usize;
        if self.steps.len() == STEPS || is_full || !is(&self.qp, QpState::Rts) {
            return;
        }
        let number = self.steps.len();
        let target = match self.steps.last() {
            Some(last) if random.bool() => last.target,
            _ => random.usize(..targets.len()),
        };
        let to = &targets[target];
        let kind =
            [Kind::Send, Kind::WriteImm, Kind::Write, Kind::Read, Kind::Add][random.usize(..5)];
        let len = size(random, self.terms.mtu, SLOT).max(1);
        let at = random.usize(..LARGEST);
        let place = 8 + (index * STEPS + number) * SLOT;
        let imm = Imm((index * STEPS + number) as u32);
        let sge = match kind {
            Kind::Read => self.results.sge(number * SLOT, len),
            Kind::Add => self.results.sge(number * SLOT, 8),
            _ => self.source.sge(at, len),
        };
        let op = match kind {
            Kind::Send => SendOp::SendWithImm(imm),
            Kind::WriteImm => SendOp::WriteWithImm(to.memory.remote(place), imm),
            Kind::Write => SendOp::Write(to.memory.remote(place)),
            Kind::Read => {
                to.memory.fill(place, &noise()[at..at + len]);
                SendOp::Read(to.memory.remote(place))
            }
            Kind::Add => SendOp::FetchAdd { remote: to.memory.remote(0), add: 1 },
        };
        let address = &places[to.side];
        let receiver = DctTarget { address, handle: 0, number: to.number(), key: to.key };
        let flags = if random.u8(..6) == 0 { SendFlags::FENCE } else { SendFlags::empty() }
            | SendFlags::SIGNALED;
        let wr_id = WrId((index * STEPS + number) as u64);
        let sges = [sge];
        let wr =
            SendWr { wr_id, op, flags, data: Data::Sges(&sges), target: Some(receiver.into()) };
        // SAFETY: source and results outlive the queue pair; results are read after the completion.
        unsafe { self.qp.post_send(&[wr]) }.unwrap();
        self.steps.push(Step {
            kind,
            target,
            number: to.number(),
            at,
            len,
            status: None,
            arrived: 0,
        });
    }

    fn complete(&mut self, index: usize, wc: &WorkCompletion, patient: bool) {
        let number = wc.wr_id.0 as usize - index * STEPS;
        assert_eq!(number, self.done, "completions arrive in posting order");
        self.done += 1;
        let step = &mut self.steps[number];
        step.status = Some(wc.status);
        match wc.status {
            WcStatus::SUCCESS => {
                assert_eq!(self.failed_at, None, "work after a failure succeeded");
                if step.kind == Kind::Read {
                    assert!(self.results.bytes(number * SLOT, step.len) == step.bytes());
                }
            }
            WcStatus::WR_FLUSH_ERR => {
                assert!(self.failed_at.is_some() || is(&self.qp, QpState::Err))
            }
            WcStatus::RETRY_EXC_ERR => self.failed_at = Some(number),
            WcStatus::RNR_RETRY_EXC_ERR if !patient => self.failed_at = Some(number),
            other => panic!("{other} of {step:?}"),
        }
    }

    /// Resets the initiator and moves it to RTS. Work in flight counts as flushed.
    fn repair(&mut self) {
        self.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        for step in &mut self.steps[self.done..] {
            step.status = Some(WcStatus::WR_FLUSH_ERR);
        }
        self.done = self.steps.len();
        self.failed_at = None;
        self.repaired += 1;
        self.move_to_rts();
    }
}

struct World {
    trace: Trace,
    initiators: Vec<Initiator>,
    targets: Vec<Target>,
    sides: Vec<Side>,
    network: Network,
    patient: bool,
    failed: usize,
    /// The newest message that arrived, by target number and initiator.
    newest: HashMap<(Qpn, usize), usize>,
}

impl World {
    fn poll(&mut self) -> bool {
        let all: Vec<_> = self
            .sides
            .iter()
            .enumerate()
            .flat_map(|(side, here)| here.poll().into_iter().map(move |wc| (side, wc)))
            .collect();
        for (side, wc) in &all {
            let now = self.network.now().as_nanos() as u64;
            self.trace.add(&[
                now,
                *side as u64,
                wc.wr_id.0,
                wc.status.0.into(),
                wc.byte_len.into(),
                wc.qpn.0.into(),
            ]);
            self.trace.print(|| format!("{now} ns, side {side}: {wc:?}"));
            if wc.wr_id.0 & RECEIVE != 0 {
                self.received(*side, wc);
                continue;
            }
            let index = wc.wr_id.0 as usize / STEPS;
            assert_eq!(
                (self.initiators[index].side, self.initiators[index].qp.qpn()),
                (*side, wc.qpn)
            );
            self.failed += usize::from(!wc.status.is_success());
            self.initiators[index].complete(index, wc, self.patient);
        }
        !all.is_empty()
    }

    fn received(&mut self, side: usize, wc: &WorkCompletion) {
        assert_eq!(wc.status, WcStatus::SUCCESS, "a receive failed");
        let at = ((wc.wr_id.0 & !RECEIVE) >> 32) as usize;
        let target = &mut self.targets[at];
        assert_eq!((target.side, target.number()), (side, wc.qpn));
        let slot =
            target.posted.remove(&(wc.wr_id.0 & 0xffff_ffff)).expect("a receive completes once");
        target.free.push(slot);
        let id = wc.imm().expect("each message has immediate data").0 as usize;
        let (index, number) = (id / STEPS, id % STEPS);
        let step = &mut self.initiators[index].steps[number];
        step.arrived += 1;
        assert_eq!(
            (step.arrived, step.target, step.number),
            (1, at, wc.qpn),
            "each message arrives once, at its target"
        );
        assert_eq!(wc.byte_len as usize, step.len);
        let before = self.newest.insert((wc.qpn, index), number);
        assert!(before < Some(number), "{number} after {before:?}: out of order");
        let found = if step.kind == Kind::Send {
            assert_eq!(wc.opcode, WcOpcode::RECV);
            target.inbox.bytes(slot * SLOT, step.len)
        } else {
            assert_eq!((wc.opcode, step.kind), (WcOpcode::RECV_RDMA_WITH_IMM, Kind::WriteImm));
            target.memory.bytes(8 + id * SLOT, step.len)
        };
        assert!(found == step.bytes(), "the message has wrong contents");
    }

    /// Replaces a target by a new one on the same shared receive queue.
    fn replace(&mut self, index: usize) {
        // Completed receives are checked against the old target's number.
        self.poll();
        let target = &mut self.targets[index];
        let new = Target::dct(&self.sides[target.side], &target.srq, target.key, target.timer);
        std::mem::replace(&mut target.dct, new).destroy().unwrap();
    }

    fn check(&self) {
        for (index, initiator) in self.initiators.iter().enumerate() {
            for (number, step) in initiator.steps.iter().enumerate() {
                self.check_step(index * STEPS + number, step);
            }
            assert!(
                initiator.repaired > 0
                    || initiator.steps.iter().all(|step| step.status == Some(WcStatus::SUCCESS))
            );
        }
        for (index, target) in self.targets.iter().enumerate() {
            let added = target.memory.word(0);
            let (mut posted, mut originals) = (0, Vec::new());
            for initiator in &self.initiators {
                for (number, step) in initiator.steps.iter().enumerate() {
                    if step.kind == Kind::Add && step.target == index {
                        posted += 1;
                        if step.status == Some(WcStatus::SUCCESS) {
                            originals.push(initiator.results.word(number * SLOT));
                        }
                    }
                }
            }
            assert!(
                (originals.len() as u64..=posted).contains(&added),
                "each addition is executed once"
            );
            originals.sort_unstable();
            assert!(
                originals.windows(2).all(|pair| pair[0] < pair[1]),
                "two additions returned the same value"
            );
            assert!(originals.last().is_none_or(|&last| last < added));
            let counters = target.dct.software_counters().unwrap();
            assert!(
                counters.open <= self.initiators.len() as u64,
                "sessions are not closed: {counters:?}"
            );
            assert_eq!((counters.evicted, counters.full, counters.refused), (0, 0, 0));
            assert_eq!(target.dct.query().unwrap().0, QpState::Rtr);
        }
    }

    fn check_step(&self, id: usize, step: &Step) {
        let done = step.status == Some(WcStatus::SUCCESS);
        if matches!(step.kind, Kind::Send | Kind::WriteImm) && done {
            assert_eq!(step.arrived, 1, "completed but not delivered: {step:?}");
        }
        if matches!(step.kind, Kind::Write | Kind::WriteImm) {
            let found = self.targets[step.target].memory.bytes(8 + id * SLOT, SLOT);
            let (written, beside) = found.split_at(step.len);
            assert!(*beside == [0; SLOT][step.len..], "bytes after the target range changed");
            // A failed WRITE may have written a part of its bytes.
            let partly = || {
                written.iter().zip(step.bytes()).all(|(&found, &byte)| found == byte || found == 0)
            };
            assert!(written == step.bytes() || !done && partly());
        }
    }
}

fn run(seed: u64, verbose: bool) -> Outcome {
    let mut random = Rng::with_seed(seed);
    let mix = Mix::draw(&mut random);
    let network = Network::simulated(seed, mix.faults(&mut random));
    let trace = Trace::new(verbose);
    let patient = random.u8(..5) > 0;
    // Whether targets are replaced and initiators reset.
    let disruptive = random.u8(..3) == 0;
    let mtu = Mtu::ALL[random.usize(..5)];
    let sides: Vec<_> = ["a", "b", "c"].iter().map(|name| Side::new(&network, name)).collect();
    let places: Vec<_> = sides.iter().map(Side::address).collect();
    let count = random.usize(1..=3);
    let targets = (0..random.usize(1..=4)).map(|_| {
        let side = random.usize(1..3);
        Target::new(&sides, side, &mut random, count * STEPS)
    });
    let targets = targets.collect();
    let initiators = (0..count).map(|_| {
        let side = random.usize(..2);
        Initiator::new(&sides, side, &mut random, mtu, patient)
    });
    let initiators = initiators.collect();
    trace.print(|| {
        format!(
            "seed {seed}: {mix:?}, {mtu:?}, patient {patient}, disruptive {disruptive}, \
             {count} initiators"
        )
    });
    let mut world = World {
        trace,
        initiators,
        targets,
        sides,
        network,
        patient,
        failed: 0,
        newest: HashMap::new(),
    };
    let eager = random.u8(20..=100);
    let (mut idle, mut rounds) = (false, 0);
    while !idle || world.initiators.iter().any(|initiator| initiator.done < STEPS) {
        rounds += 1;
        assert!(rounds < 1_000_000, "the run does not end");
        for (index, target) in world.targets.iter_mut().enumerate() {
            if random.u8(..100) < eager {
                target.receive(index);
            }
        }
        for (index, initiator) in world.initiators.iter_mut().enumerate() {
            if random.bool() {
                initiator.post(index, &mut random, &world.targets, &places);
            }
            let broken = is(&initiator.qp, QpState::Err) && initiator.done == initiator.steps.len();
            if broken || disruptive && random.u8(..200) == 0 {
                if !broken && random.bool() {
                    fail(&initiator.qp);
                } else {
                    initiator.repair();
                }
            }
        }
        if disruptive && random.u8(..100) == 0 {
            let index = random.usize(..world.targets.len());
            world.replace(index);
        }
        if mix == Mix::Changing && random.u8(..10) == 0 {
            world.network.set_faults(mix.faults(&mut random));
        }
        idle = true;
        for _ in 0..random.u8(..30) {
            idle &= !world.network.step();
        }
        idle = idle && world.network.run_until_idle(Duration::ZERO);
        idle &= !world.poll();
    }
    world.check();
    let World { trace, initiators, network, failed, .. } = world;
    let sessions = initiators
        .iter()
        .map(|initiator| initiator.qp.software_counters().unwrap().0.sessions)
        .sum();
    Outcome { hash: trace.hash(), now: network.now(), link: network.counters(), failed, sessions }
}

#[test]
fn alternating_targets_execute_each_operation_once() {
    let Some(outcomes) =
        seeds("dynamic::alternating_targets_execute_each_operation_once", 1.0, run)
    else {
        return;
    };
    let sessions: u64 = outcomes.iter().map(|outcome| outcome.sessions).sum();
    let lost: u64 = outcomes.iter().map(|outcome| outcome.link.lost).sum();
    let failed = outcomes.iter().filter(|outcome| outcome.failed > 0).count();
    println!("{sessions} sessions, {lost} packets lost, {failed} runs with failures");
    assert!(lost > 0 && failed > 0 && failed < outcomes.len(), "the runs cover too few failures");
}

#[test]
fn dynamic_runs_are_reproducible() {
    for seed in [1, 2, 3] {
        assert_eq!(run(seed, false), run(seed, false));
    }
}
