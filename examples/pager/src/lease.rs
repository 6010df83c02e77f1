//! One client writes at a time: it begins when it first changes a page, goes on for as long as anything has to be written back, and
//! tells the coordinator when all is. Of one that does not the map says that copies may differ.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

use crate::service::Writing;
use crate::{Conflict, Directory, DirectoryError, Instance, WriterId};

/// How often the coordinator hears of a client that writes, in the time of a lease.
const OFTEN: u32 = 6;

/// The right to write, of one client.
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
    /// The coordinator has told others that copies may differ, or is another one. Not within the lock: whoever holds that may be
    /// waiting for a page to be written back.
    lapsed: OnceLock<Conflict>,
}

#[derive(Debug)]
enum State {
    Without,
    /// It was asked for, and the answer is not known.
    Asked(WriterId),
    Held(WriterId, #[expect(dead_code, reason = "held")] GoingOn),
}

/// The task by which the coordinator hears of us; it ends when this is dropped.
#[derive(Debug)]
struct GoingOn(AbortHandle);

impl Drop for GoingOn {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// As long as somebody has one, the lease is not given back.
#[derive(Debug)]
#[must_use = "without it, others may write"]
pub(crate) struct Held {
    _state: OwnedRwLockReadGuard<State>,
}

impl Lease {
    /// By a map of that instance.
    pub(crate) fn new(directory: &Directory, instance: Instance, unclean_too: bool) -> Self {
        let terms =
            Terms { directory: directory.clone(), instance, unclean_too, lapsed: OnceLock::new() };
        let state = Arc::new(RwLock::new(State::Without));
        Self { terms: Arc::new(terms), state, runtime: Handle::current() }
    }

    /// Waits until this client may write. `None` if the runtime has shut down.
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
            // In a task of its own: what the coordinator has heard it has heard, whoever gives up here.
            let (terms, state) = (self.terms.clone(), self.state.clone());
            let taking =
                self.runtime.spawn(async move { take(state.write_owned().await, terms).await });
            if let Err(error) = taking.await.ok()? {
                return Some(Err(error));
            }
        }
    }

    /// Why nothing may be written back, if that is so: others may write.
    pub(crate) fn check(&self) -> Result<(), DirectoryError> {
        self.terms
            .lapsed
            .get()
            .map_or(Ok(()), |conflict| Err(DirectoryError::Conflict(conflict.clone())))
    }

    /// Gives it back, unless somebody writes or `is_needed` says so. `None` if the runtime has shut down.
    pub(crate) async fn give_back(
        &self,
        is_needed: impl FnOnce() -> bool,
    ) -> Option<Result<(), DirectoryError>> {
        if let Err(lapsed) = self.check() {
            return Some(Err(lapsed));
        }
        // Who has it will flush, too.
        let Ok(mut state) = self.state.clone().try_write_owned() else { return Some(Ok(())) };
        let (id, known) = match &*state {
            State::Held(id, _) => (*id, true),
            State::Asked(id) => (*id, false),
            State::Without => return Some(Ok(())),
        };
        if is_needed() {
            return Some(Ok(()));
        }
        // What is asked for next has another number, so that this may arrive whenever it does.
        *state = State::Without;
        let terms = self.terms.clone();
        let giving = self.runtime.spawn(async move {
            let given = terms.directory.give_back(id, terms.instance).await;
            // Who asks for it next would be told that this one has it.
            drop(state);
            match given {
                // It has never heard that this one asked.
                Err(DirectoryError::Conflict(Conflict::Lapsed)) if !known => Ok(()),
                given => given,
            }
        });
        giving.await.ok()
    }
}

/// Asks for it, unless another task has done that meanwhile.
async fn take(
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
            let going_on = tokio::spawn(go_on(id, terms, lease));
            *state = State::Held(id, GoingOn(going_on.abort_handle()));
            Ok(())
        }
        // It has said no.
        Err(error @ DirectoryError::Conflict(_)) => {
            *state = State::Without;
            Err(error)
        }
        Err(error) => Err(error),
    }
}

/// Until it is aborted, or the coordinator says no. One that does not answer gives the right to write to nobody else, and says so
/// of this map when it does.
async fn go_on(id: WriterId, terms: Arc<Terms>, lease: Duration) {
    let how = Writing { going_on: true, unclean_too: terms.unclean_too };
    // Not without a pause, whatever the coordinator says.
    let mut often = interval((lease / OFTEN).max(Duration::from_millis(1)));
    often.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        often.tick().await;
        if let Err(DirectoryError::Conflict(conflict)) =
            terms.directory.write(id, terms.instance, &how).await
        {
            terms.lapsed.get_or_init(|| conflict);
            return;
        }
    }
}
