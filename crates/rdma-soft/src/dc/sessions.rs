//! The bounded session table of a target.
//!
//! An initiator has at most one session. A full table evicts the session that has been silent
//! longest if it has exceeded [`SILENCE`]; otherwise the target refuses new sessions.

use std::collections::HashMap;

use rdma_provider::types::{Gid, Qpn};

use crate::roce::responder::Responder;

use super::header::SessionNumber;

/// 4096 sessions take 2 MiB, and at most 1 KiB each for replay data.
pub(crate) const MAX_SESSIONS: usize = 4096;

/// How long a session must be silent before eviction, in nanoseconds. An initiator that has all its
/// answers renews its session after a tenth of that anyway.
const SILENCE: u64 = 10_000_000_000;

/// The initiator of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionKey {
    pub(crate) gid: Gid,
    pub(super) source: Qpn,
    pub(super) incarnation: u32,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: SessionNumber,
    /// Drawn by the target: a packet that contains it comes from the initiator that received it.
    pub(super) cookie: u32,
    pub(super) responder: Responder,
    /// When the last packet arrived.
    pub(super) used: u64,
    /// The session is in the queue of sessions with replies.
    pub(super) due: bool,
}

#[derive(Debug)]
pub(super) struct Sessions {
    table: HashMap<SessionKey, Session>,
    limit: usize,
    /// A lower bound of `used` of all sessions.
    oldest: u64,
}

impl Sessions {
    pub(super) fn new(limit: usize) -> Self {
        Self { table: HashMap::new(), limit, oldest: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn get_mut(&mut self, key: &SessionKey) -> Option<&mut Session> {
        self.table.get_mut(key)
    }

    pub(super) fn is_full(&self) -> bool {
        self.table.len() >= self.limit
    }

    pub(super) fn insert(&mut self, key: SessionKey, session: Session) {
        self.table.insert(key, session);
    }

    /// Returns the session that has been silent longest, if it may be evicted.
    pub(super) fn silent(&mut self, now: u64) -> Option<SessionKey> {
        // The bound avoids a search for each refused session while the table is full.
        if now.saturating_sub(self.oldest) < SILENCE {
            return None;
        }
        // Ties are broken by key, for reproducible simulations.
        let (used, key) = self.table.iter().map(|(key, session)| (session.used, *key)).min()?;
        self.oldest = used;
        (now.saturating_sub(used) >= SILENCE).then_some(key)
    }

    pub(super) fn remove(&mut self, key: &SessionKey) -> Option<Session> {
        self.table.remove(key)
    }

    /// Removes all sessions, ordered by key for reproducible simulations.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Session> {
        let mut all: Vec<_> = std::mem::take(&mut self.table).into_iter().collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all.into_iter().map(|(_, session)| session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_small() {
        let each = size_of::<(SessionKey, Session)>();
        assert!(each * MAX_SESSIONS <= 2 << 20, "{each} bytes");
    }
}
