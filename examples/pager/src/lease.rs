//! The lease to write: one client writes at a time. It takes the lease before its first change,
//! renews it, and ends it when everything is written back. If it stops renewing, the map says that
//! copies may differ.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

use crate::service::Writing;
use crate::{Conflict, Directory, DirectoryError, Instance, WriterId};

/// Renewals per duration of the lease.
const RENEWALS_PER_LEASE: u32 = 6;

#[derive(Debug)]
pub(crate) struct Lease {
    terms: Arc<Terms>,
    state: Arc<RwLock<State>>,
    runtime: Handle,
}

#[derive(Debug)]
struct Terms {
    directory: Directory,
    instance: Instance,
    unclean_too: bool,
    /// Set when the coordinator has declared the lease lapsed or was restarted. Outside the lock,
    /// whose holder may be waiting for a write-back.
    lapsed: OnceLock<Conflict>,
}

#[derive(Debug)]
enum State {
    Without,
    /// Requested, without a known response.
    Asked(WriterId),
    Held(WriterId, #[expect(dead_code, reason = "held")] Renewal),
}

/// The task that renews the lease, aborted on drop.
#[derive(Debug)]
struct Renewal(AbortHandle);

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A guard that prevents the end of the lease.
#[derive(Debug)]
#[must_use = "without it, others may write"]
pub(crate) struct Held {
    _state: OwnedRwLockReadGuard<State>,
}

impl Lease {
    pub(crate) fn new(directory: &Directory, instance: Instance, unclean_too: bool) -> Self {
        let terms =
            Terms { directory: directory.clone(), instance, unclean_too, lapsed: OnceLock::new() };
        let state = Arc::new(RwLock::new(State::Without));
        Self { terms: Arc::new(terms), state, runtime: Handle::current() }
    }

    /// Waits until this client may write. Returns `None` if the runtime has shut down.
    pub(crate) async fn hold(&self) -> Option<Result<Held, DirectoryError>> {
        loop {
            if let Err(lapsed) = self.check() {
                return Some(Err(lapsed));
            }
            let state = self.state.clone().read_owned().await;
            if matches!(&*state, State::Held(..)) {
                return Some(Ok(Held { _state: state }));
            }
            drop(state);
            // A separate task: dropping this future must not lose the coordinator's response.
            let (terms, state) = (self.terms.clone(), self.state.clone());
            let requesting =
                self.runtime.spawn(async move { request(state.write_owned().await, terms).await });
            if let Err(error) = requesting.await.ok()? {
                return Some(Err(error));
            }
        }
    }

    /// Returns an error if nothing may be written back because other clients may write.
    pub(crate) fn check(&self) -> Result<(), DirectoryError> {
        self.terms
            .lapsed
            .get()
            .map_or(Ok(()), |conflict| Err(DirectoryError::Conflict(conflict.clone())))
    }

    /// Ends the lease unless a task writes or `is_needed`. Returns `None` if the runtime has shut
    /// down.
    pub(crate) async fn end(
        &self,
        is_needed: impl FnOnce() -> bool,
    ) -> Option<Result<(), DirectoryError>> {
        if let Err(lapsed) = self.check() {
            return Some(Err(lapsed));
        }
        // A task that holds the lock writes now and will flush later.
        let Ok(mut state) = self.state.clone().try_write_owned() else { return Some(Ok(())) };
        let (id, known) = match &*state {
            State::Held(id, _) => (*id, true),
            State::Asked(id) => (*id, false),
            State::Without => return Some(Ok(())),
        };
        if is_needed() {
            return Some(Ok(()));
        }
        // The next request has another id, so this one may arrive at any time.
        *state = State::Without;
        let terms = self.terms.clone();
        let ending = self.runtime.spawn(async move {
            let ended = terms.directory.end_write(id, terms.instance).await;
            // Locked until the response: an earlier request would find the lease taken by this
            // client.
            drop(state);
            match ended {
                // The coordinator never got the request for the lease.
                Err(DirectoryError::Conflict(Conflict::Lapsed)) if !known => Ok(()),
                ended => ended,
            }
        });
        ending.await.ok()
    }
}

/// Requests the lease, unless another task already has.
async fn request(
    mut state: OwnedRwLockWriteGuard<State>,
    terms: Arc<Terms>,
) -> Result<(), DirectoryError> {
    let id = match &*state {
        State::Held(..) => return Ok(()),
        State::Asked(id) => *id,
        State::Without => WriterId(fastrand::u64(..)),
    };
    *state = State::Asked(id);
    let how = Writing { going_on: false, unclean_too: terms.unclean_too };
    match terms.directory.write(id, terms.instance, &how).await {
        Ok(lease) => {
            let renewal = tokio::spawn(renew(id, terms, lease));
            *state = State::Held(id, Renewal(renewal.abort_handle()));
            Ok(())
        }
        // The coordinator refused.
        Err(error @ DirectoryError::Conflict(_)) => {
            *state = State::Without;
            Err(error)
        }
        Err(error) => Err(error),
    }
}

/// Renews the lease until aborted or refused. A coordinator that does not answer grants the lease
/// to no other client, and refuses if it was restarted.
async fn renew(id: WriterId, terms: Arc<Terms>, lease: Duration) {
    let how = Writing { going_on: true, unclean_too: terms.unclean_too };
    // At least 1 ms, whatever the coordinator answers.
    let mut ticks = interval((lease / RENEWALS_PER_LEASE).max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(DirectoryError::Conflict(conflict)) =
            terms.directory.write(id, terms.instance, &how).await
        {
            terms.lapsed.get_or_init(|| conflict);
            return;
        }
    }
}
