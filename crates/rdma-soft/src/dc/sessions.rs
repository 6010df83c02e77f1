//! Sessions of a target: a bounded table.
//!
//! An initiator has one at most, its newest. A full table gives up the one that has been silent longest, if that is long
//! enough for its initiator to begin a new one with its next message anyway; else it takes nobody in.

use std::collections::HashMap;

use rdma_provider::types::{Gid, Qpn};

use crate::roce::responder::Responder;

use super::header::SessionNumber;

/// Sessions of one target: 2 MiB of them, and what they keep to answer again, 1 KiB each at most.
pub(super) const MAX_SESSIONS: usize = 4096;

/// How long a session must have been silent before another takes its place, in nanoseconds: ten times what it takes for its
/// initiator to begin a new one with its next message, if it has got all answers.
const SILENCE: u64 = 10_000_000_000;

/// Whose session it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionKey {
    pub(super) gid: Gid,
    pub(super) source: Qpn,
    pub(super) incarnation: u32,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: SessionNumber,
    /// Drawn by the target: a packet that has it was sent by who got it.
    pub(super) cookie: u32,
    pub(super) responder: Responder,
    /// When a packet of it came last.
    pub(super) used: u64,
    /// Among those that have answers to send.
    pub(super) due: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Sessions {
    table: HashMap<SessionKey, Session>,
    limit: usize,
    /// All that are there have been used at this time or later.
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

    /// Takes a session in; there is room for it.
    pub(super) fn insert(&mut self, key: SessionKey, session: Session) {
        self.table.insert(key, session);
    }

    /// The session that has been silent longest, if that is long enough.
    pub(super) fn silent(&mut self, now: u64) -> Option<SessionKey> {
        // Looked for again only when there may be one: with a full table, who asks for a session costs little.
        if now.saturating_sub(self.oldest) < SILENCE {
            return None;
        }
        // By key among equals, so that simulations repeat.
        let (used, key) = self.table.iter().map(|(key, session)| (session.used, *key)).min()?;
        self.oldest = used;
        (now.saturating_sub(used) >= SILENCE).then_some(key)
    }

    pub(super) fn remove(&mut self, key: &SessionKey) -> Option<Session> {
        self.table.remove(key)
    }

    /// Forgets all; in the order of their keys, so that simulations repeat.
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
