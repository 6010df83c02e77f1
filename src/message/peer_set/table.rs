//! The table of peers: which are busy, idle or connected. No waiting.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, WeakShared};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Attempt, Attempted, PeerSetConfig, PeerSetCounters};
use crate::message::Connection;

pub(super) struct Table<K> {
    slots: HashMap<K, Slot>,
    /// Keys of idle slots, the least recently used first.
    idle: BTreeMap<u64, K>,
    /// The next key of `idle`.
    next_idle: u64,
    generation: u64,
    /// Connections that the closer has not taken.
    ended: Vec<Arc<Connection>>,
    /// The closer looks for expired peers again at this time.
    closer_wakes: Option<Instant>,
    counters: PeerSetCounters,
    max_peers: usize,
    max_in_flight_per_peer: usize,
    idle_timeout: Option<Duration>,
}

/// A peer that is busy, or idle and connected.
struct Slot {
    /// Guards, and callers that wait for one.
    users: usize,
    permits: Arc<Semaphore>,
    link: Link,
    /// The key in `idle` and the time since when it is idle.
    idle: Option<(u64, Instant)>,
}

pub(super) enum Link {
    None,
    Connecting(WeakShared<BoxFuture<'static, Attempted>>),
    Connected(u64, Arc<Connection>),
}

impl Link {
    fn is_live(&self) -> bool {
        matches!(self, Self::Connected(_, connection) if connection.close_reason().is_none())
    }

    fn into_connection(self) -> Option<Arc<Connection>> {
        if let Self::Connected(_, connection) = self { Some(connection) } else { None }
    }
}

impl<K: Hash + Eq + Clone> Table<K> {
    pub(super) fn new(settings: &PeerSetConfig) -> Self {
        Self {
            slots: HashMap::new(),
            idle: BTreeMap::new(),
            next_idle: 0,
            generation: 0,
            ended: Vec::new(),
            closer_wakes: None,
            counters: PeerSetCounters::default(),
            max_peers: settings.max_peers,
            max_in_flight_per_peer: settings.max_in_flight_per_peer,
            idle_timeout: settings.idle_timeout,
        }
    }

    /// Enters the slot of a known peer and returns its permits. Returns `None` for other peers.
    pub(super) fn enter(&mut self, key: &K) -> Option<Arc<Semaphore>> {
        let slot = self.slots.get_mut(key)?;
        slot.users += 1;
        if let Some((number, _)) = slot.idle.take() {
            self.idle.remove(&number);
        }
        Some(slot.permits.clone())
    }

    /// Enters the slot of any peer, and evicts the least recently used idle one if necessary.
    /// Returns `None` if all are busy.
    pub(super) fn enter_new(&mut self, key: &K) -> Option<Arc<Semaphore>> {
        if let Some(permits) = self.enter(key) {
            return Some(permits);
        }
        if self.slots.len() >= self.max_peers && !self.evict() {
            return None;
        }
        let permits = Arc::new(Semaphore::new(self.max_in_flight_per_peer));
        let slot = Slot { users: 1, permits: permits.clone(), link: Link::None, idle: None };
        self.slots.insert(key.clone(), slot);
        Some(permits)
    }

    fn evict(&mut self) -> bool {
        let Some((_, key)) = self.idle.pop_first() else { return false };
        self.counters.evicted += 1;
        let slot = self.slots.remove(&key);
        self.ended.extend(slot.and_then(|slot| slot.link.into_connection()));
        true
    }

    /// Ends a use. Returns a connection to drop without the lock.
    pub(super) fn leave(&mut self, key: &K) -> Option<Arc<Connection>> {
        let slot = self.slots.get_mut(key)?;
        slot.users -= 1;
        if slot.users > 0 {
            return None;
        }
        if slot.link.is_live() {
            slot.idle = Some((self.next_idle, Instant::now()));
            self.idle.insert(self.next_idle, key.clone());
            self.next_idle += 1;
            return None;
        }
        let connection = self.slots.remove(key).and_then(|slot| slot.link.into_connection());
        self.counters.lost += u64::from(connection.is_some());
        connection
    }

    /// Returns the link of a busy peer, and `None` instead of a connection that has ended.
    pub(super) fn link(&mut self, key: &K) -> Option<&Link> {
        let slot = self.slots.get_mut(key)?;
        if matches!(slot.link, Link::Connected(..)) && !slot.link.is_live() {
            let link = std::mem::replace(&mut slot.link, Link::None);
            self.counters.lost += 1;
            // Closed already, so the closer only drops it.
            self.ended.extend(link.into_connection());
        }
        Some(&slot.link)
    }

    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Notes an attempt and returns it, or the one that another caller has started.
    pub(super) fn start(&mut self, key: &K, attempt: Attempt) -> Attempt {
        let Some(slot) = self.slots.get_mut(key) else { return attempt };
        if let Link::Connecting(other) = &slot.link
            && let Some(other) = other.upgrade()
        {
            return other;
        }
        if let Some(weak) = attempt.downgrade() {
            slot.link = Link::Connecting(weak);
        }
        attempt
    }

    /// Notes the result of an attempt, once.
    pub(super) fn settle(&mut self, key: &K, attempt: &Attempt, result: &Attempted) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        let Link::Connecting(noted) = &slot.link else { return };
        if !noted.upgrade().is_some_and(|noted| noted.ptr_eq(attempt)) {
            return;
        }
        slot.link = match result {
            Ok((generation, connection)) => {
                self.counters.connected += 1;
                Link::Connected(*generation, connection.clone())
            }
            Err(_) => {
                self.counters.failed += 1;
                Link::None
            }
        };
    }

    /// Detaches the connection of a peer. Returns false if there is none.
    pub(super) fn disconnect(&mut self, key: &K) -> bool {
        let Some(slot) = self.slots.get_mut(key) else { return false };
        let link = std::mem::replace(&mut slot.link, Link::None);
        if let Some((number, _)) = slot.idle.take() {
            self.idle.remove(&number);
            self.slots.remove(key);
            self.ended.extend(link.into_connection());
            return true;
        }
        // Guards have references; the last one drops it.
        matches!(link, Link::Connected(..))
    }

    /// Removes idle peers whose time is over. Returns connections to close, and the time when the
    /// next peer expires.
    pub(super) fn expire(&mut self, now: Instant) -> (Vec<Arc<Connection>>, Option<Instant>) {
        let mut next = None;
        while let (Some(timeout), Some(oldest)) = (self.idle_timeout, self.idle.first_entry()) {
            let since = self.slots.get(oldest.get()).and_then(|slot| slot.idle);
            let end = since.and_then(|(_, since)| since.checked_add(timeout));
            if end.is_none_or(|end| end > now) {
                next = end;
                break;
            }
            let slot = self.slots.remove(&oldest.remove());
            self.counters.expired += 1;
            self.ended.extend(slot.and_then(|slot| slot.link.into_connection()));
        }
        self.closer_wakes = next;
        (std::mem::take(&mut self.ended), next)
    }

    /// Returns true if the closer must be notified. Its timer suffices for later idle peers: they
    /// expire later.
    pub(super) fn needs_closer(&self) -> bool {
        let expires = self.idle_timeout.is_some() && !self.idle.is_empty();
        !self.ended.is_empty() || expires && self.closer_wakes.is_none()
    }

    /// Removes all peers and returns their connections.
    pub(super) fn clear(&mut self) -> Vec<Arc<Connection>> {
        self.idle.clear();
        let slots = self.slots.drain().filter_map(|(_, slot)| slot.link.into_connection());
        slots.chain(self.ended.drain(..)).collect()
    }

    pub(super) fn counters(&self) -> PeerSetCounters {
        PeerSetCounters { peers: self.slots.len(), idle: self.idle.len(), ..self.counters }
    }
}
