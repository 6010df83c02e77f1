//! What the coordinator knows, and who may do what: a machine without I/O, which is told the time.
//!
//! ```text
//!             write                 give back
//!   nobody ─────────────▶ writing ─────────────▶ nobody
//!                           │
//!                           │ not heard of for as long as a lease is
//!                           ▼
//!                        unclean, for as long as this coordinator runs: copies may differ
//! ```

use std::time::Duration;

use axum::http::StatusCode;
use coordinator::service::{Refusal, check_room};
use tokio::time::Instant;

use crate::{Conflict, Instance, Map, Share, WriterId};

/// Settings of a coordinator.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Longest that is not heard of a client that writes; 30 s unless set. Clients let themselves be heard of six times in that.
    pub lease: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { lease: Duration::from_secs(30) }
    }
}

/// Why something is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum No {
    Conflict(Conflict),
    Refusal(Refusal),
}

impl From<Conflict> for No {
    fn from(conflict: Conflict) -> Self {
        Self::Conflict(conflict)
    }
}

/// Who writes.
#[derive(Debug)]
struct Writer {
    id: WriterId,
    until: Instant,
}

/// A map, and what keeps it right: it names nodes only that have all that was ever written, and says if that may not be so.
#[derive(Debug)]
pub(crate) struct Known {
    settings: Settings,
    map: Map,
    /// A client has it: who joins now would miss what that client writes.
    sealed: bool,
    writer: Option<Writer>,
}

impl Known {
    pub(crate) fn new(settings: Settings, instance: Instance) -> Self {
        let map = Map { instance, unclean: false, shares: Default::default() };
        Self { settings, map, sealed: false, writer: None }
    }

    /// Which coordinator this is.
    pub(crate) fn instance(&self) -> Instance {
        self.map.instance
    }

    /// The map as it is now.
    pub(crate) fn map(&mut self, now: Instant) -> &Map {
        self.notice(now);
        &self.map
    }

    /// A client takes the map.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
    }

    /// A node lends pages: new ones, or those that it has lent `before`, by the word of the coordinator of then.
    pub(crate) fn join(
        &mut self,
        id: String,
        share: Share,
        before: Option<Instance>,
    ) -> Result<StatusCode, No> {
        if let Some(before) = before {
            // Its memory has been written to, or should have been: it is what it was if it has been on the map ever since.
            let kept = before == self.map.instance && self.map.shares.get(&id) == Some(&share);
            return if kept {
                Ok(StatusCode::OK)
            } else {
                Err(Conflict::Stale { before, now: self.map.instance }.into())
            };
        }
        if self.sealed {
            return Err(Conflict::Sealed.into());
        }
        check_room(&id, self.map.shares.len(), self.map.shares.contains_key(&id))
            .map_err(No::Refusal)?;
        Ok(match self.map.shares.insert(id, share) {
            None => StatusCode::CREATED,
            Some(_) => StatusCode::OK,
        })
    }

    /// A node leaves, or lacks what was written. True if it was there.
    pub(crate) fn leave(&mut self, id: &str, of: Instance) -> Result<bool, Conflict> {
        self.check(of)?;
        Ok(self.map.shares.remove(id).is_some())
    }

    /// A client begins to write, for as long as it is heard of at least that often. It may ask again if it has not heard the answer.
    pub(crate) fn write(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
        unclean_too: bool,
    ) -> Result<Duration, Conflict> {
        self.check(of)?;
        self.notice(now);
        if self.writer.as_ref().is_some_and(|writer| writer.id != id) {
            return Err(Conflict::Writing);
        }
        if self.map.unclean && !unclean_too {
            return Err(Conflict::Unclean);
        }
        self.writer = Some(Writer { id, until: now + self.settings.lease });
        Ok(self.settings.lease)
    }

    /// A client goes on writing.
    pub(crate) fn go_on(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
    ) -> Result<Duration, Conflict> {
        self.check(of)?;
        self.notice(now);
        let writer =
            self.writer.as_mut().filter(|writer| writer.id == id).ok_or(Conflict::Lapsed)?;
        writer.until = now + self.settings.lease;
        Ok(self.settings.lease)
    }

    /// A client has written all that it was to write.
    pub(crate) fn give_back(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
    ) -> Result<(), Conflict> {
        self.go_on(now, id, of)?;
        self.writer = None;
        Ok(())
    }

    fn check(&self, of: Instance) -> Result<(), Conflict> {
        let now = self.map.instance;
        if of == now { Ok(()) } else { Err(Conflict::Instance { asked: of, now }) }
    }

    /// A writer that is not heard of may have written to one copy and not to another.
    fn notice(&mut self, now: Instant) {
        if self.writer.as_ref().is_some_and(|writer| writer.until < now) {
            self.writer = None;
            self.map.unclean = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_rdma::RemoteRegion;
    use tokio_rdma::types::Rkey;

    use super::*;
    use crate::PAGE;

    const HERE: Instance = Instance(1);
    const OTHER: Instance = Instance(2);
    const LEASE: Duration = Duration::from_secs(30);

    fn known() -> Known {
        Known::new(Settings { lease: LEASE }, HERE)
    }

    fn share(address: u64) -> Share {
        let region = RemoteRegion::new(address, PAGE as u64, Rkey(1));
        Share { address: ([127, 0, 0, 1], 1).into(), first: 0, region, replica: 0 }
    }

    fn stale(before: Instance) -> Result<StatusCode, No> {
        Err(No::Conflict(Conflict::Stale { before, now: HERE }))
    }

    #[test]
    fn memory_that_may_lack_what_was_written_does_not_join() {
        let (mut known, name) = (known(), || "a".to_owned());
        // Of another coordinator, which may have taken it off the map.
        assert_eq!(known.join(name(), share(0), Some(OTHER)), stale(OTHER));
        // As if it had been here, which nobody remembers.
        assert_eq!(known.join(name(), share(0), Some(HERE)), stale(HERE));
        assert!(known.map.shares.is_empty());
        assert_eq!(known.join(name(), share(0), None), Ok(StatusCode::CREATED));
        // It is still the same.
        assert_eq!(known.join(name(), share(0), Some(HERE)), Ok(StatusCode::OK));
        // Other memory of that name is not.
        assert_eq!(known.join(name(), share(4096), Some(HERE)), stale(HERE));
        assert_eq!(known.join(name(), share(4096), None), Ok(StatusCode::OK));
        assert_eq!(known.join(name(), share(0), Some(HERE)), stale(HERE));
        // A client has it, which takes nothing from who is there.
        known.seal();
        assert_eq!(known.join(name(), share(4096), Some(HERE)), Ok(StatusCode::OK));
        assert_eq!(known.join("b".to_owned(), share(0), None), Err(No::Conflict(Conflict::Sealed)));
        // Not written to.
        assert_eq!(known.leave("a", HERE), Ok(true));
        assert_eq!(known.leave("a", HERE), Ok(false));
        assert_eq!(known.join(name(), share(4096), Some(HERE)), stale(HERE));
        assert_eq!(known.join(name(), share(4096), None), Err(No::Conflict(Conflict::Sealed)));
    }

    #[test]
    fn whoever_has_the_map_of_another_coordinator_changes_nothing() {
        let (mut known, now) = (known(), Instant::now());
        known.join("a".to_owned(), share(0), None).unwrap();
        let other = Conflict::Instance { asked: OTHER, now: HERE };
        assert_eq!(known.leave("a", OTHER), Err(other.clone()));
        assert_eq!(known.write(now, WriterId(7), OTHER, true), Err(other.clone()));
        known.write(now, WriterId(7), HERE, false).unwrap();
        assert_eq!(known.go_on(now, WriterId(7), OTHER), Err(other.clone()));
        assert_eq!(known.give_back(now, WriterId(7), OTHER), Err(other));
        assert_eq!(known.write(now, WriterId(8), HERE, false), Err(Conflict::Writing));
        assert_eq!(known.map(now).shares.len(), 1);
    }

    #[test]
    fn one_writes_at_a_time() {
        let (mut known, now) = (known(), Instant::now());
        let (a, b) = (WriterId(7), WriterId(8));
        assert_eq!(known.give_back(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.write(now, a, HERE, false), Ok(LEASE));
        assert_eq!(known.write(now, a, HERE, false), Ok(LEASE));
        for unclean_too in [false, true] {
            assert_eq!(known.write(now, b, HERE, unclean_too), Err(Conflict::Writing));
        }
        assert_eq!(known.go_on(now, b, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.give_back(now, b, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.give_back(now, a, HERE), Ok(()));
        assert_eq!(known.write(now, b, HERE, false), Ok(LEASE));
        assert!(!known.map(now).unclean);
    }

    #[test]
    fn a_writer_that_is_not_heard_of_leaves_the_map_unclean() {
        let (mut known, mut now) = (known(), Instant::now());
        let (a, b, c) = (WriterId(7), WriterId(8), WriterId(9));
        known.write(now, a, HERE, false).unwrap();
        for _ in 0..5 {
            now += LEASE;
            known.go_on(now, a, HERE).unwrap();
        }
        now += LEASE;
        assert!(!known.map(now).unclean, "its time is not over");
        now += Duration::from_millis(1);
        assert!(known.map(now).unclean);
        // It has not been there meanwhile, and is told so.
        assert_eq!(known.go_on(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.give_back(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.write(now, b, HERE, false), Err(Conflict::Unclean));
        // One who says that this is fine may write, and makes nothing right by that.
        assert_eq!(known.write(now, b, HERE, true), Ok(LEASE));
        assert_eq!(known.write(now, c, HERE, true), Err(Conflict::Writing));
        known.give_back(now, b, HERE).unwrap();
        assert!(known.map(now).unclean);
    }

    #[test]
    fn a_time_that_is_over_is_noticed_by_whoever_comes() {
        let come: [fn(&mut Known, Instant); 3] = [
            |known, now| {
                assert_eq!(known.write(now, WriterId(8), HERE, false), Err(Conflict::Unclean))
            },
            |known, now| assert_eq!(known.go_on(now, WriterId(7), HERE), Err(Conflict::Lapsed)),
            |known, now| assert_eq!(known.give_back(now, WriterId(7), HERE), Err(Conflict::Lapsed)),
        ];
        for come in come {
            let (mut known, now) = (known(), Instant::now());
            known.write(now, WriterId(7), HERE, false).unwrap();
            come(&mut known, now + LEASE * 2);
            assert!(known.map.unclean);
        }
    }
}
