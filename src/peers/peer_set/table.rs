//! The table of peers, without waiting.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use futures::future::{BoxFuture, WeakShared};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Attempt, Attempted, PeerLink, PeerSetConfig, PeerSetCounters};

pub(super) struct Table<K, L> {
    slots: HashMap<K, Slot<L>>,
    idle: BTreeMap<u64, K>,
    next_idle: u64,
    generation: u64,
    ended: Vec<Arc<L>>,
    closer_wakes: Option<Instant>,
    counters: PeerSetCounters,
    settings: PeerSetConfig,
}

struct Slot<L> {
    users: usize,
    permits: Arc<Semaphore>,
    state: State<L>,
    idle: Option<(u64, Instant)>,
}

pub(super) enum State<L> {
    Unlinked,
    Connecting(WeakShared<BoxFuture<'static, Attempted<L>>>),
    Linked(u64, Arc<L>),
}

impl<L: PeerLink> State<L> {
    fn is_live(&self) -> bool {
        matches!(self, Self::Linked(_, link) if !link.has_ended())
    }

    fn into_link(self) -> Option<Arc<L>> {
        if let Self::Linked(_, link) = self { Some(link) } else { None }
    }
}

impl<K: Hash + Eq + Clone, L: PeerLink> Table<K, L> {
    pub(super) fn new(settings: &PeerSetConfig) -> Self {
        Self {
            slots: HashMap::new(),
            idle: BTreeMap::new(),
            next_idle: 0,
            generation: 0,
            ended: Vec::new(),
            closer_wakes: None,
            counters: PeerSetCounters::default(),
            settings: settings.clone(),
        }
    }

    pub(super) fn enter(&mut self, key: &K) -> Option<Arc<Semaphore>> {
        let slot = self.slots.get_mut(key)?;
        slot.users += 1;
        if let Some((number, _)) = slot.idle.take() {
            self.idle.remove(&number);
        }
        Some(slot.permits.clone())
    }

    /// Evicts the least recently used idle peer if necessary. Returns `None` if all are busy.
    pub(super) fn enter_new(&mut self, key: &K) -> Option<Arc<Semaphore>> {
        if let Some(permits) = self.enter(key) {
            return Some(permits);
        }
        if self.slots.len() >= self.settings.max_peers && !self.evict() {
            return None;
        }
        let permits = Arc::new(Semaphore::new(self.settings.max_in_flight_per_peer));
        let slot = Slot { users: 1, permits: permits.clone(), state: State::Unlinked, idle: None };
        self.slots.insert(key.clone(), slot);
        Some(permits)
    }

    fn evict(&mut self) -> bool {
        let Some((_, key)) = self.idle.pop_first() else { return false };
        self.counters.evicted += 1;
        let slot = self.slots.remove(&key);
        self.ended.extend(slot.and_then(|slot| slot.state.into_link()));
        true
    }

    /// The caller must drop the returned link without the lock.
    pub(super) fn leave(&mut self, key: &K) -> Option<Arc<L>> {
        let slot = self.slots.get_mut(key)?;
        slot.users -= 1;
        if slot.users > 0 {
            return None;
        }
        if slot.state.is_live() {
            slot.idle = Some((self.next_idle, Instant::now()));
            self.idle.insert(self.next_idle, key.clone());
            self.next_idle += 1;
            return None;
        }
        let link = self.slots.remove(key).and_then(|slot| slot.state.into_link());
        self.counters.lost += u64::from(link.is_some());
        link
    }

    /// Removes a link that has ended first.
    pub(super) fn state(&mut self, key: &K) -> Option<&State<L>> {
        let slot = self.slots.get_mut(key)?;
        if matches!(slot.state, State::Linked(..)) && !slot.state.is_live() {
            let state = std::mem::replace(&mut slot.state, State::Unlinked);
            self.counters.lost += 1;
            // Dropped by the closer, without this lock.
            self.ended.extend(state.into_link());
        }
        Some(&slot.state)
    }

    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    pub(super) fn start(&mut self, key: &K, attempt: Attempt<L>) -> Attempt<L> {
        let Some(slot) = self.slots.get_mut(key) else { return attempt };
        if let State::Connecting(other) = &slot.state
            && let Some(other) = other.upgrade()
        {
            return other;
        }
        if let Some(weak) = attempt.downgrade() {
            slot.state = State::Connecting(weak);
        }
        attempt
    }

    pub(super) fn settle(&mut self, key: &K, attempt: &Attempt<L>, result: &Attempted<L>) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        let State::Connecting(noted) = &slot.state else { return };
        if !noted.upgrade().is_some_and(|noted| noted.ptr_eq(attempt)) {
            return;
        }
        slot.state = match result {
            Ok((generation, link)) => {
                self.counters.connected += 1;
                State::Linked(*generation, link.clone())
            }
            Err(_) => {
                self.counters.failed += 1;
                State::Unlinked
            }
        };
    }

    /// The caller must drop the returned link without the lock.
    pub(super) fn disconnect(&mut self, key: &K) -> Option<Arc<L>> {
        let slot = self.slots.get_mut(key)?;
        let link = std::mem::replace(&mut slot.state, State::Unlinked).into_link();
        if let Some((number, _)) = slot.idle.take() {
            self.idle.remove(&number);
            self.slots.remove(key);
            self.ended.extend(link.clone());
        }
        link
    }

    /// Returns the links to close, and when the next peer expires.
    pub(super) fn expire(&mut self, now: Instant) -> (Vec<Arc<L>>, Option<Instant>) {
        let mut next = None;
        while let (Some(timeout), Some(oldest)) =
            (self.settings.idle_timeout, self.idle.first_entry())
        {
            let since = self.slots.get(oldest.get()).and_then(|slot| slot.idle);
            let end = since.and_then(|(_, since)| since.checked_add(timeout));
            if end.is_none_or(|end| end > now) {
                next = end;
                break;
            }
            let slot = self.slots.remove(&oldest.remove());
            self.counters.expired += 1;
            self.ended.extend(slot.and_then(|slot| slot.state.into_link()));
        }
        self.closer_wakes = next;
        (std::mem::take(&mut self.ended), next)
    }

    /// A peer that becomes idle while the closer's timer runs need not notify it, because it
    /// expires later.
    pub(super) fn needs_closer(&self) -> bool {
        let expires = self.settings.idle_timeout.is_some() && !self.idle.is_empty();
        !self.ended.is_empty() || expires && self.closer_wakes.is_none()
    }

    pub(super) fn links(&self) -> Vec<Arc<L>> {
        let linked = |slot: &Slot<L>| match &slot.state {
            State::Linked(_, link) => Some(link.clone()),
            _ => None,
        };
        self.slots.values().filter_map(linked).collect()
    }

    pub(super) fn clear(&mut self) -> Vec<Arc<L>> {
        self.idle.clear();
        let slots = self.slots.drain().filter_map(|(_, slot)| slot.state.into_link());
        slots.chain(self.ended.drain(..)).collect()
    }

    pub(super) fn counters(&self) -> PeerSetCounters {
        PeerSetCounters { peers: self.slots.len(), idle: self.idle.len(), ..self.counters }
    }
}
