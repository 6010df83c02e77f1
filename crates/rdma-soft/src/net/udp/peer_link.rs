//! The way to a peer, shared by all queue pairs that send there.
//!
//! A peer's socket holds what its kernel gives it, 208 KiB by default, whoever sends. So what is underway to one peer from one
//! device is bounded, whatever the number of queue pairs. Who has nothing underway and finds no room waits in line; as others'
//! packets are acknowledged, those at its head are let in. Who is on the way may have an equal share underway, at least one
//! packet, and stands in line again when nothing of it is underway any more and others wait. Who has waited has a turn of several
//! packets, as each change costs.
//!
//! ```text
//!  Off ── no room ──▶ Waiting ── its turn ──▶ Entered ── sent ──▶ On
//!   └──── room ─────────────────────────────────▲                 │
//!   ▲──────────────── all acknowledged, failed, ended ────────────┘
//! ```
//!
//! A queue pair that nobody answers must not keep out the others. The socket hands out packets in the order in which they came.
//! So what is underway stands on two pages: what was sent since the page was turned, and what was sent before. When somebody who
//! has sent since is acknowledged, all from before has left the socket, or was lost: it counts no more, and the page is turned.
//! If nobody is acknowledged, but somebody waits, it is turned after [`PATIENCE`], again and again. That ends each wait.

mod pages;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;

use self::pages::{Load, Pages};
use crate::device::queue_pair::QpInner;
use crate::device::scheduler::{Job, Scheduler};
use crate::roce::requester::{Asks, Flow};
use rdma_provider::types::Mtu;

/// Bytes underway to a peer. As much as fits: with half of it a receiver has taken in all before the next comes, and both ends
/// sleep in turns.
pub(super) const TO_PEER: u32 = 128 << 10;
/// Packets of one queue pair, however small: each also costs its receiver some hundred bytes.
pub(super) const PACKETS: u32 = 64;
/// Nanoseconds after which a page is turned though nobody is acknowledged. Longer than a peer is usually kept from its
/// processor; what is let in too early finds the socket full at worst, and is sent again.
const PATIENCE: u64 = 50_000_000;
/// It halves each time, down to this: so a thousand queue pairs find out in time that nobody is there.
const LEAST_PATIENCE: u64 = 5_000_000;

/// What a packet counts as, in bytes: a small one takes room besides its payload.
fn counts_as(mtu: Mtu) -> u32 {
    (mtu.bytes() as u32).max(512)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PeerLink {
    scheduler: Arc<Scheduler>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pages: Pages,
    line: VecDeque<Ask>,
    entries: Vec<Entry>,
    /// Entries that nobody has.
    free: Vec<usize>,
    /// The page when the scheduler looked last whether it is to be turned, while it is to look again.
    watched: Option<u64>,
    /// Times that it was turned since somebody was acknowledged.
    silences: u32,
}

/// Who waits in line, and for how many bytes.
#[derive(Debug)]
struct Ask {
    index: usize,
    bytes: u32,
}

#[derive(Debug)]
struct Entry {
    qp: Weak<QpInner>,
    standing: Standing,
    /// The page when it went last.
    went: u64,
}

/// See the module.
#[derive(Debug, Clone, Copy)]
enum Standing {
    Off,
    Waiting,
    Entered(Load),
    On(Load),
}

/// Who is to be told that it has been let in.
type LetIn = SmallVec<[Weak<QpInner>; 4]>;

impl State {
    /// It stands nowhere; `heard`: as all that it has sent was answered.
    fn clear(&mut self, index: usize, heard: bool) {
        match std::mem::replace(&mut self.entries[index].standing, Standing::Off) {
            Standing::Off => {}
            Standing::Waiting => self.line.retain(|ask| ask.index != index),
            Standing::Entered(load) => self.pages.remove(load),
            Standing::On(load) => {
                self.pages.remove(load);
                if heard {
                    self.silences = 0;
                    if load.page == Some(self.pages.now()) {
                        self.pages.turn();
                    }
                }
            }
        }
    }

    fn has_room(&self, bytes: u32) -> bool {
        let (underway, _) = self.pages.total();
        underway == 0 || underway.saturating_add(bytes) <= TO_PEER
    }

    /// Lets in who fits, in order; all but `asking` are to be told.
    fn let_in(&mut self, asking: Option<usize>) -> LetIn {
        let mut all = LetIn::new();
        while let Some(&Ask { index, bytes }) =
            self.line.front().filter(|first| self.has_room(first.bytes))
        {
            self.line.pop_front();
            let entry = &mut self.entries[index];
            entry.standing = Standing::Entered(self.pages.add(bytes, None));
            if asking != Some(index) {
                all.push(Weak::clone(&entry.qp));
            }
        }
        all
    }

    /// Room for what it asks for, or a place at the end of the line.
    fn ask(&mut self, index: usize, asks: Asks, mtu: u32, heard: bool) -> LetIn {
        if matches!(self.entries[index].standing, Standing::Waiting | Standing::Entered(_)) {
            return LetIn::new();
        }
        self.clear(index, heard);
        let (least, turn) = (asks.least.saturating_mul(mtu), asks.turn.saturating_mul(mtu));
        let at_once = self.line.is_empty() && self.has_room(least);
        self.entries[index].standing = Standing::Waiting;
        self.line.push_back(Ask { index, bytes: if at_once { least } else { turn } });
        self.let_in(Some(index))
    }

    /// It goes now: what it may have underway.
    fn share(&mut self, index: usize, mtu: u32) -> Flow {
        self.entries[index].went = self.pages.now();
        let entry = &self.entries[index];
        let own = match entry.standing {
            Standing::Entered(load) | Standing::On(load) if self.pages.counts(load) => {
                Some(load.bytes)
            }
            _ => None,
        };
        let (bytes, pairs) = self.pages.total();
        let pairs = pairs + u32::from(own.is_none());
        let others = bytes.saturating_sub(own.unwrap_or(0));
        let mut equal = TO_PEER / (pairs + self.line.len() as u32);
        if let Some(first) = self.line.front() {
            // It fits at last, whatever it asks for.
            equal = equal.min(TO_PEER.saturating_sub(first.bytes) / pairs);
        }
        // What it was let in for it has.
        let entered =
            if matches!(entry.standing, Standing::Entered(_)) { own.unwrap_or(0) } else { 0 };
        Flow::of((equal.min(TO_PEER.saturating_sub(others)).max(entered) / mtu).clamp(1, PACKETS))
    }

    /// So much of it is underway; `sent`: more than before, or again.
    fn tell(&mut self, index: usize, bytes: u32, sent: bool) {
        let Entry { standing, went, .. } = self.entries[index];
        let standing = match standing {
            Standing::Waiting => return,
            Standing::Off if !sent => return,
            Standing::Off => Standing::On(self.pages.add(bytes, Some(went))),
            Standing::Entered(load) | Standing::On(load) if sent => {
                self.pages.remove(load);
                Standing::On(self.pages.add(bytes, Some(went)))
            }
            Standing::Entered(load) => Standing::Entered(self.pages.lower(load, bytes)),
            Standing::On(load) => Standing::On(self.pages.lower(load, bytes)),
        };
        self.entries[index].standing = standing;
    }
}

impl PeerLink {
    pub(crate) fn new(scheduler: &Arc<Scheduler>) -> Self {
        Self { scheduler: Arc::clone(scheduler), state: Mutex::default() }
    }

    /// A place for `qp`, which has nothing underway.
    pub(crate) fn place(self: &Arc<Self>, qp: Weak<QpInner>) -> Place {
        let entry = Entry { qp, standing: Standing::Off, went: 0 };
        let mut state = self.state.lock();
        let index = match state.free.pop() {
            Some(index) => {
                state.entries[index] = entry;
                index
            }
            None => {
                state.entries.push(entry);
                state.entries.len() - 1
            }
        };
        drop(state);
        Place { link: Arc::clone(self), index, packets: 0 }
    }

    /// The scheduler: nobody who waits is kept out by what was sent long ago.
    pub(crate) fn on_tick(self: &Arc<Self>) {
        self.change(|state| {
            if state.watched.take() == Some(state.pages.now()) {
                state.pages.turn();
                state.silences = state.silences.saturating_add(1);
            }
        });
        self.tick();
    }

    /// Lets in who fits after `change`.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let let_in = {
            let mut state = self.state.lock();
            change(&mut state);
            state.let_in(None)
        };
        self.tell_them(let_in);
    }

    /// As long as somebody waits.
    fn tick(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.watched.is_none() && !state.line.is_empty() {
            state.watched = Some(state.pages.now());
            let patience = PATIENCE.checked_shr(state.silences).unwrap_or(0).max(LEAST_PATIENCE);
            drop(state);
            let at = self.scheduler.now() + patience;
            self.scheduler.schedule(at, Job::TurnPage(Arc::downgrade(self)));
        }
    }

    /// The scheduler goes on with them: each has a lock, and the caller may hold that of another.
    fn tell_them(&self, let_in: LetIn) {
        for qp in let_in {
            self.scheduler.schedule(self.scheduler.now(), Job::Enter(qp));
        }
    }
}

/// The place of a queue pair on the way to its peer.
#[derive(Debug)]
pub(crate) struct Place {
    link: Arc<PeerLink>,
    index: usize,
    /// Packets that it had ever sent, as last told.
    packets: u64,
}

impl Place {
    /// It would send: how much it may have underway, or none if it waits in line and is told when it is let in. `asks`: if
    /// nothing of it is underway; `heard`: as all was answered.
    pub(crate) fn go(&self, asks: Option<Asks>, heard: bool, mtu: Mtu) -> Option<Flow> {
        let mtu = counts_as(mtu);
        let mut state = self.link.state.lock();
        let let_in = asks.map(|asks| state.ask(self.index, asks, mtu, heard)).unwrap_or_default();
        let waits =
            asks.is_some() && matches!(state.entries[self.index].standing, Standing::Waiting);
        let flow = (!waits).then(|| state.share(self.index, mtu));
        let tick = waits && state.watched.is_none();
        drop(state);
        self.link.tell_them(let_in);
        if tick {
            self.link.tick();
        }
        flow
    }

    /// So many packets, or answers, are underway; `sent`: packets that it has ever sent.
    pub(crate) fn tell(&mut self, underway: u32, sent: u64, mtu: Mtu) {
        let bytes = underway.saturating_mul(counts_as(mtu));
        let before = std::mem::replace(&mut self.packets, sent);
        self.link.change(|state| state.tell(self.index, bytes, before != sent));
    }

    /// Nothing of it is underway; if it was let in, its turn is over. `heard`: all that it has sent was answered.
    pub(crate) fn rest(&self, heard: bool) {
        self.link.change(|state| {
            if !matches!(state.entries[self.index].standing, Standing::Waiting) {
                state.clear(self.index, heard);
            }
        });
    }

    /// It has nothing to send any more, and does not wait.
    pub(crate) fn leave(&self) {
        self.link.change(|state| state.clear(self.index, false));
    }

    /// True if something of it is underway.
    #[cfg(test)]
    pub(crate) fn is_on(&self) -> bool {
        matches!(
            self.link.state.lock().entries[self.index].standing,
            Standing::Entered(_) | Standing::On(_)
        )
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
        let mut state = self.link.state.lock();
        state.entries[self.index].qp = Weak::new();
        state.free.push(self.index);
    }
}

#[cfg(test)]
mod tests;
