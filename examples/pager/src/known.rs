//! The coordinator's state: the map and the client that writes. A state machine without I/O;
//! callers pass the time.
//!
//! ```text
//!             write                  end_write
//!   no writer ─────────▶ writing ─────────────▶ no writer
//!                           │
//!                           │ not renewed for the duration of a lease
//!                           ▼
//!                        unclean for as long as this coordinator runs: copies may differ
//! ```

use std::time::Duration;

use axum::http::StatusCode;
use coordinator::service::{Refusal, check_capacity};
use tokio::time::Instant;

use crate::{Conflict, Instance, Map, Share, WriterId};

/// Settings of a coordinator.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Duration of the lease of a client that writes, unless renewed; 30 s by default. Clients
    /// renew it six times in that time.
    pub lease: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { lease: Duration::from_secs(30) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rejection {
    Conflict(Conflict),
    Refusal(Refusal),
}

impl From<Conflict> for Rejection {
    fn from(conflict: Conflict) -> Self {
        Self::Conflict(conflict)
    }
}

#[derive(Debug)]
struct Writer {
    id: WriterId,
    until: Instant,
}

/// The map with its invariants: it names only nodes that have every write, and is marked unclean if
/// that is in doubt.
#[derive(Debug)]
pub(crate) struct Known {
    settings: Settings,
    map: Map,
    /// A client has the map. A node that joined now would lack that client's writes.
    sealed: bool,
    writer: Option<Writer>,
}

impl Known {
    pub(crate) fn new(settings: Settings, instance: Instance) -> Self {
        let map = Map { instance, unclean: false, shares: Default::default() };
        Self { settings, map, sealed: false, writer: None }
    }

    pub(crate) fn instance(&self) -> Instance {
        self.map.instance
    }

    pub(crate) fn map(&mut self, now: Instant) -> &Map {
        self.expire_writer(now);
        &self.map
    }

    pub(crate) fn seal(&mut self) {
        self.sealed = true;
    }

    /// Joins a node with its share: a new one, or one that joined coordinator `before`.
    pub(crate) fn join(
        &mut self,
        id: String,
        share: Share,
        before: Option<Instance>,
    ) -> Result<StatusCode, Rejection> {
        if let Some(before) = before {
            // The memory may have been written to. It lacks no write only if it has been on this
            // map ever since.
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
        check_capacity(&id, self.map.shares.len(), self.map.shares.contains_key(&id))
            .map_err(Rejection::Refusal)?;
        Ok(match self.map.shares.insert(id, share) {
            None => StatusCode::CREATED,
            Some(_) => StatusCode::OK,
        })
    }

    /// Removes a node that leaves or lacks a write. Returns whether it was on the map.
    pub(crate) fn leave(&mut self, id: &str, of: Instance) -> Result<bool, Conflict> {
        self.check(of)?;
        Ok(self.map.shares.remove(id).is_some())
    }

    /// Gives a client the lease to write. The client may repeat the request if it missed the
    /// response.
    pub(crate) fn write(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
        unclean_too: bool,
    ) -> Result<Duration, Conflict> {
        self.check(of)?;
        self.expire_writer(now);
        if self.writer.as_ref().is_some_and(|writer| writer.id != id) {
            return Err(Conflict::Writing);
        }
        if self.map.unclean && !unclean_too {
            return Err(Conflict::Unclean);
        }
        self.writer = Some(Writer { id, until: now + self.settings.lease });
        Ok(self.settings.lease)
    }

    pub(crate) fn renew(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
    ) -> Result<Duration, Conflict> {
        self.check(of)?;
        self.expire_writer(now);
        let writer =
            self.writer.as_mut().filter(|writer| writer.id == id).ok_or(Conflict::Lapsed)?;
        writer.until = now + self.settings.lease;
        Ok(self.settings.lease)
    }

    /// Ends the lease of a client that has written everything back.
    pub(crate) fn end_write(
        &mut self,
        now: Instant,
        id: WriterId,
        of: Instance,
    ) -> Result<(), Conflict> {
        self.renew(now, id, of)?;
        self.writer = None;
        Ok(())
    }

    fn check(&self, of: Instance) -> Result<(), Conflict> {
        let now = self.map.instance;
        if of == now { Ok(()) } else { Err(Conflict::Instance { asked: of, now }) }
    }

    /// Marks the map as unclean if the lease has expired: its client may have written to some
    /// copies only.
    fn expire_writer(&mut self, now: Instant) {
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

    fn stale(before: Instance) -> Result<StatusCode, Rejection> {
        Err(Rejection::Conflict(Conflict::Stale { before, now: HERE }))
    }

    #[test]
    fn memory_that_may_lack_writes_does_not_join() {
        let (mut known, name) = (known(), || "a".to_owned());
        // Another coordinator may have removed it from its map.
        assert_eq!(known.join(name(), share(0), Some(OTHER)), stale(OTHER));
        // The coordinator was restarted with the same instance number, without its state.
        assert_eq!(known.join(name(), share(0), Some(HERE)), stale(HERE));
        assert!(known.map.shares.is_empty());
        assert_eq!(known.join(name(), share(0), None), Ok(StatusCode::CREATED));
        assert_eq!(known.join(name(), share(0), Some(HERE)), Ok(StatusCode::OK));
        assert_eq!(known.join(name(), share(4096), Some(HERE)), stale(HERE));
        assert_eq!(known.join(name(), share(4096), None), Ok(StatusCode::OK));
        assert_eq!(known.join(name(), share(0), Some(HERE)), stale(HERE));
        // Sealing does not affect nodes on the map.
        known.seal();
        assert_eq!(known.join(name(), share(4096), Some(HERE)), Ok(StatusCode::OK));
        assert_eq!(
            known.join("b".to_owned(), share(0), None),
            Err(Rejection::Conflict(Conflict::Sealed))
        );
        // Removed because a write did not reach it.
        assert_eq!(known.leave("a", HERE), Ok(true));
        assert_eq!(known.leave("a", HERE), Ok(false));
        assert_eq!(known.join(name(), share(4096), Some(HERE)), stale(HERE));
        assert_eq!(
            known.join(name(), share(4096), None),
            Err(Rejection::Conflict(Conflict::Sealed))
        );
    }

    #[test]
    fn requests_with_another_coordinators_map_are_refused() {
        let (mut known, now) = (known(), Instant::now());
        known.join("a".to_owned(), share(0), None).unwrap();
        let other = Conflict::Instance { asked: OTHER, now: HERE };
        assert_eq!(known.leave("a", OTHER), Err(other.clone()));
        assert_eq!(known.write(now, WriterId(7), OTHER, true), Err(other.clone()));
        known.write(now, WriterId(7), HERE, false).unwrap();
        assert_eq!(known.renew(now, WriterId(7), OTHER), Err(other.clone()));
        assert_eq!(known.end_write(now, WriterId(7), OTHER), Err(other));
        assert_eq!(known.write(now, WriterId(8), HERE, false), Err(Conflict::Writing));
        assert_eq!(known.map(now).shares.len(), 1);
    }

    #[test]
    fn one_client_has_the_lease_at_a_time() {
        let (mut known, now) = (known(), Instant::now());
        let (a, b) = (WriterId(7), WriterId(8));
        assert_eq!(known.end_write(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.write(now, a, HERE, false), Ok(LEASE));
        assert_eq!(known.write(now, a, HERE, false), Ok(LEASE));
        for unclean_too in [false, true] {
            assert_eq!(known.write(now, b, HERE, unclean_too), Err(Conflict::Writing));
        }
        assert_eq!(known.renew(now, b, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.end_write(now, b, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.end_write(now, a, HERE), Ok(()));
        assert_eq!(known.write(now, b, HERE, false), Ok(LEASE));
        assert!(!known.map(now).unclean);
    }

    #[test]
    fn writer_that_stops_renewing_leaves_the_map_unclean() {
        let (mut known, mut now) = (known(), Instant::now());
        let (a, b, c) = (WriterId(7), WriterId(8), WriterId(9));
        known.write(now, a, HERE, false).unwrap();
        for _ in 0..5 {
            now += LEASE;
            known.renew(now, a, HERE).unwrap();
        }
        now += LEASE;
        assert!(!known.map(now).unclean, "its time is not over");
        now += Duration::from_millis(1);
        assert!(known.map(now).unclean);
        // Its lease has expired meanwhile.
        assert_eq!(known.renew(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.end_write(now, a, HERE), Err(Conflict::Lapsed));
        assert_eq!(known.write(now, b, HERE, false), Err(Conflict::Unclean));
        // A client that accepts this may write, which does not make the map clean.
        assert_eq!(known.write(now, b, HERE, true), Ok(LEASE));
        assert_eq!(known.write(now, c, HERE, true), Err(Conflict::Writing));
        known.end_write(now, b, HERE).unwrap();
        assert!(known.map(now).unclean);
    }

    #[test]
    fn every_request_notices_an_expired_lease() {
        let come: [fn(&mut Known, Instant); 3] = [
            |known, now| {
                assert_eq!(known.write(now, WriterId(8), HERE, false), Err(Conflict::Unclean))
            },
            |known, now| assert_eq!(known.renew(now, WriterId(7), HERE), Err(Conflict::Lapsed)),
            |known, now| assert_eq!(known.end_write(now, WriterId(7), HERE), Err(Conflict::Lapsed)),
        ];
        for come in come {
            let (mut known, now) = (known(), Instant::now());
            known.write(now, WriterId(7), HERE, false).unwrap();
            come(&mut known, now + LEASE * 2);
            assert!(known.map.unclean);
        }
    }
}
