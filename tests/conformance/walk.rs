//! Control verbs in random order beside a model, and from many threads at once.
//!
//! The walk checks states, refusals and flushes. It moves no data, completes no receive with
//! success, sends nothing over RC in RTS, and does not visit SQE.

use std::any::Any;
use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;
use std::thread;

use tokio_rdma::memory::MemoryWindow;
use tokio_rdma::types::{QpCaps, QpState, Qpn, SendOp, SrqCaps, Transport, WcStatus};
use tokio_rdma::verbs::{Channel, Cq, Srq};
use tokio_rdma::{Device, ProtectionDomain};

use super::transitions::{attributes, row};
use crate::common::raw::{End, Options, QKEY, address_of, connect, init, outcome, rtr, rts};
use crate::common::{Memory, Setup, hardware};
use crate::torture::{HANG, Seed, bounded};

const MAX_OBJECTS: usize = 6;

fn steps() -> usize {
    if hardware().is_some() { 400 } else { 3_000 }
}

/// A queue pair and what it should be.
struct Modelled {
    end: End,
    transport: Transport,
    state: QpState,
    /// It has been in RTS since the last reset.
    was_ready: bool,
    receives: VecDeque<u64>,
    next: u64,
}

impl Modelled {
    fn new(device: &Device, transport: Transport) -> Self {
        let caps = QpCaps { max_send_wr: 8, max_recv_wr: 8, ..Options::default().caps };
        let end = End::new(device, &Options { caps, ..Options::of(transport) });
        let (state, receives) = (QpState::Reset, VecDeque::new());
        Self { end, transport, state, was_ready: false, receives, next: 1 }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn flush(&mut self) {
        let flushed: Vec<_> =
            self.receives.drain(..).map(|id| (id, WcStatus::WR_FLUSH_ERR)).collect();
        assert_eq!(outcome(&self.end.received(flushed.len())), flushed);
    }

    fn modify(&mut self, to: QpState, peer: &End) {
        let name = format!("{:?}", self.transport).to_uppercase();
        let options = Options::of(self.transport);
        let Some((required, _)) = row(&name, self.state, to) else {
            let attr = attributes(&[], self.state, to, peer);
            assert!(self.end.qp.modify(&attr).is_err(), "{name} {:?} to {to:?}", self.state);
            return;
        };
        let attr = match to {
            QpState::Init if self.state == QpState::Reset => init(&options),
            QpState::Rtr => rtr(&options, peer),
            QpState::Rts if self.state == QpState::Rtr => rts(&options),
            _ => attributes(&required, self.state, to, peer),
        };
        self.end.qp.modify(&attr).unwrap();
        match (self.state, to) {
            (_, QpState::Reset) => {
                self.receives.clear();
                self.was_ready = false;
            }
            (_, QpState::Rts) => self.was_ready = true,
            (_, QpState::Err) => self.flush(),
            (QpState::Rts, QpState::Sqd) => self.end.drained(),
            _ => {}
        }
        self.state = to;
    }

    fn recv(&mut self) {
        let id = self.id();
        if self.state == QpState::Reset {
            assert!(self.end.recv(id, &[]).is_err());
        } else if self.state == QpState::Err {
            self.end.recv_late(id, &[]).unwrap();
            self.receives.push_back(id);
            self.flush();
        } else if self.receives.len() < 8 {
            self.end.recv(id, &[]).unwrap();
            self.receives.push_back(id);
        }
    }

    fn send(&mut self, peer: &End) {
        let id = self.id();
        let post = |end: &End| match self.transport {
            Transport::Ud => end.send_to(id, peer, peer.qp.qpn(), QKEY, &[]),
            _ => end.send(id, SendOp::Send, &[]),
        };
        let status = match self.state {
            QpState::Reset | QpState::Init | QpState::Rtr => {
                assert!(post(&self.end).is_err(), "{:?}", self.state);
                return;
            }
            // It would be sent later.
            QpState::Sqd | QpState::Sqe => return,
            // The peer is in RESET and would not acknowledge it.
            QpState::Rts if self.transport == Transport::Rc => return,
            QpState::Rts => WcStatus::SUCCESS,
            QpState::Err => WcStatus::WR_FLUSH_ERR,
        };
        if let Err(refused) = post(&self.end) {
            // libmlx5 refuses sends of a queue pair that was never ready: its queue seems full.
            let by_library = self.end.device.attr().vendor_id == 0x2c9 && !self.was_ready;
            assert!(by_library && self.state == QpState::Err, "{refused}");
            return;
        }
        assert_eq!(outcome(&self.end.sent(1)), [(id, status)]);
    }

    fn check(&self) {
        assert_eq!(self.end.state(), self.state);
        assert_eq!((self.end.sent(0).len(), self.end.received(0).len()), (0, 0));
    }
}

/// Creates an object without a state.
fn object(kind: u8, pd: &ProtectionDomain) -> Box<dyn Any> {
    let device = pd.device();
    match kind {
        0 => Box::new(device.protection_domain().unwrap()),
        1 => Box::new(Cq::new(device, 16, None, 1).unwrap()),
        2 => Box::new(Channel::new(device).unwrap()),
        3 => Box::new(Memory::new(pd, 5_000)),
        4 => Box::new(Srq::new(pd, SrqCaps { max_wr: 8, max_sge: 1 }).unwrap()),
        5 if device.attr().max_mw > 0 => Box::new(MemoryWindow::new(pd).unwrap()),
        _ => Box::new(pd.address_handle(&address_of(device)).unwrap()),
    }
}

#[test]
fn control_verbs_in_random_order_follow_the_model() {
    bounded("a random walk", HANG, || {
        let seed = Seed::new("--test conformance walk");
        let mut rng = fastrand::Rng::with_seed(seed.value);
        let setup = Setup::new();
        let transports = [Transport::Rc, Transport::Uc, Transport::Ud];
        let peers = transports.map(|transport| End::new(&setup.b, &Options::of(transport)));
        let mut pairs: Vec<Modelled> = Vec::new();
        let mut objects: Vec<Box<dyn Any>> = Vec::new();
        let mut visited = HashSet::new();
        for _ in 0..steps() {
            match rng.u8(..16) {
                0 if pairs.len() < MAX_OBJECTS => {
                    let transport = transports[rng.usize(..3)];
                    pairs.push(Modelled::new(&setup.a, transport));
                }
                1 if !pairs.is_empty() => drop(pairs.swap_remove(rng.usize(..pairs.len()))),
                2 | 3 if objects.len() < MAX_OBJECTS => {
                    let pd = pairs.first().map(|pair| pair.end.pd.clone());
                    let pd = pd.unwrap_or_else(|| setup.a.protection_domain().unwrap());
                    objects.push(object(rng.u8(..7), &pd));
                }
                4 if !objects.is_empty() => {
                    drop(objects.swap_remove(rng.usize(..objects.len())));
                }
                action => {
                    let Some(pair) = rng.choice(&mut pairs) else { continue };
                    let index = transports.iter().position(|kind| *kind == pair.transport);
                    let peer = &peers[index.unwrap()];
                    match action {
                        5..9 => pair.recv(),
                        9..12 => pair.send(peer),
                        // Mostly forward, or few queue pairs leave RESET.
                        12..15 => {
                            let next = match pair.state {
                                QpState::Reset => QpState::Init,
                                QpState::Init => QpState::Rtr,
                                QpState::Sqd | QpState::Rtr => QpState::Rts,
                                _ => QpState::Sqd,
                            };
                            pair.modify(next, peer);
                        }
                        _ => {
                            let to = QpState::ALL[rng.usize(..QpState::ALL.len())];
                            if to != QpState::Sqe && pair.state != QpState::Sqe {
                                pair.modify(to, peer);
                            }
                        }
                    }
                    pair.check();
                    visited.insert(format!("{:?} {:?}", pair.transport, pair.state));
                }
            }
        }
        for pair in &pairs {
            pair.check();
        }
        // All but SQE. A real device may have made fewer steps than that needs.
        assert!(visited.len() == 3 * 6 || hardware().is_some(), "{visited:?}");
    });
}

#[test]
fn objects_of_every_kind_are_created_and_destroyed_by_many_threads() {
    let rounds = if hardware().is_some() { 20 } else { 200 };
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let numbers: Mutex<HashSet<Qpn>> = Mutex::default();
    thread::scope(|scope| {
        for seed in 0..8 {
            let (pd, numbers) = (&pd, &numbers);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed);
                let mut kept: VecDeque<Box<dyn Any>> = VecDeque::new();
                let mut pairs: VecDeque<End> = VecDeque::new();
                for _ in 0..rounds {
                    kept.push_back(object(rng.u8(..7), pd));
                    let transport = [Transport::Rc, Transport::Uc, Transport::Ud][rng.usize(..3)];
                    let end = End::new(pd.device(), &Options::of(transport));
                    let is_new = numbers.lock().unwrap().insert(end.qp.qpn());
                    assert!(is_new, "two queue pairs are {}", end.qp.qpn());
                    pairs.push_back(end);
                    if rng.bool() {
                        kept.pop_front();
                        let end = pairs.pop_front().unwrap();
                        // Before the drop, after which another thread may get the number.
                        numbers.lock().unwrap().remove(&end.qp.qpn());
                        drop(end);
                    }
                }
            });
        }
    });
    let (a, b) = (End::new(&setup.a, &Options::default()), End::new(&setup.b, &Options::default()));
    connect(&a, &b, &Options::default());
    b.recv(1, &[]).unwrap();
    a.send(2, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)]);
}
