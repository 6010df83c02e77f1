//! Actions to run after locks are released: waking tasks, dropping buffers, and shutting down the
//! objects of a failed completion queue.
//!
//! The drainer collects them under the lock of the completion queue, and runs them after this
//! thread has released its last lock.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;

use rdma_provider::locks;
use smallvec::SmallVec;

use super::slot::Held;
use crate::contained::contained;
use crate::error::OpErrorKind;

pub(super) trait Teardown: Send + Sync {
    /// Destroys a queue pair or DC target, or closes a shared receive queue. Work without a
    /// completion fails with `kind`. Takes the lock of the completion queue.
    fn shut_down(&self, kind: OpErrorKind);

    /// Moves a queue pair to the error state because of `cause`. Returns false if it is not a queue
    /// pair, or the device refuses.
    fn move_to_error(&self, _cause: OpErrorKind) -> bool {
        false
    }
}

/// Actions to run when no lock is held, because they run user code or take locks.
///
/// Most lists wake one task, which needs no box. A list is small, because each completion queue has
/// one.
#[derive(Default)]
pub(super) struct WakeList {
    first: Option<Waker>,
    more: Option<Box<Actions>>,
}

#[derive(Default)]
struct Actions {
    wakers: SmallVec<[Waker; 16]>,
    held: SmallVec<[Held; 2]>,
    discarded: SmallVec<[Waker; 1]>,
    teardowns: SmallVec<[(Arc<dyn Teardown>, OpErrorKind); 1]>,
}

thread_local! {
    /// Empty lists that this thread finished last, so that the next ones need not allocate.
    /// Several, because an action may finish other lists.
    #[allow(clippy::vec_box, reason = "boxes change hands, and the actions are large")]
    static SPARES: RefCell<Vec<Box<Actions>>> = const { RefCell::new(Vec::new()) };
}

const MAX_SPARES: usize = 4;

fn spare() -> Box<Actions> {
    // Destructors of thread-local variables may run when `SPARES` are gone.
    SPARES.try_with(|spares| spares.borrow_mut().pop()).ok().flatten().unwrap_or_default()
}

impl WakeList {
    #[inline]
    pub(super) fn new() -> Self {
        Self::default()
    }

    const fn empty() -> Self {
        Self { first: None, more: None }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.more.is_none()
    }

    fn more(&mut self) -> &mut Actions {
        self.more.get_or_insert_with(spare)
    }

    #[inline]
    pub(super) fn wake(&mut self, waker: Waker) {
        if self.is_empty() {
            self.first = Some(waker);
        } else {
            self.more().wakers.push(waker);
        }
    }

    pub(super) fn wake_once(&mut self, waker: &Waker) {
        let last = self.more.as_ref().and_then(|more| more.wakers.last());
        if last.or(self.first.as_ref()).is_none_or(|last| !last.will_wake(waker)) {
            self.wake(waker.clone());
        }
    }

    #[inline]
    pub(super) fn take_single_waker(&mut self) -> Option<Waker> {
        if self.more.is_none() { self.first.take() } else { None }
    }

    pub(super) fn dispose(&mut self, held: Option<Held>, waker: Option<Waker>) {
        if held.is_some() || waker.is_some() {
            let actions = self.more();
            actions.held.extend(held);
            actions.discarded.extend(waker);
        }
    }

    pub(super) fn shut_down(&mut self, object: Arc<dyn Teardown>, kind: OpErrorKind) {
        self.more().teardowns.push((object, kind));
    }

    #[inline]
    pub(super) fn finish(self) {
        if !self.is_empty() {
            if locks::held() > 0 {
                defer(|deferred| deferred.append(self));
            } else {
                self.run();
            }
        }
    }

    fn run(self) {
        if let Some(waker) = self.first {
            contained(|| waker.wake());
        }
        if let Some(more) = self.more {
            more.run();
        }
    }

    fn append(&mut self, other: Self) {
        if let Some(waker) = other.first {
            self.wake(waker);
        }
        if let Some(mut more) = other.more {
            self.more().append(&mut more);
            more.keep_spare();
        }
    }
}

impl Actions {
    fn run(mut self: Box<Self>) {
        for waker in self.wakers.drain(..) {
            contained(|| waker.wake());
        }
        for (object, kind) in self.teardowns.drain(..) {
            object.shut_down(kind);
        }
        for held in self.held.drain(..) {
            contained(|| drop(held));
        }
        for waker in self.discarded.drain(..) {
            contained(|| drop(waker));
        }
        self.keep_spare();
    }

    fn append(&mut self, more: &mut Self) {
        self.wakers.extend(more.wakers.drain(..));
        self.held.extend(more.held.drain(..));
        self.discarded.extend(more.discarded.drain(..));
        self.teardowns.extend(more.teardowns.drain(..));
    }

    fn keep_spare(self: Box<Self>) {
        // During the destruction of a thread, they are dropped instead.
        let _ = SPARES.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if spares.len() < MAX_SPARES {
                spares.push(self);
            }
        });
    }
}

#[inline]
pub(crate) fn wake(waker: Waker) {
    if locks::held() > 0 {
        defer(|deferred| deferred.wake(waker));
    } else {
        contained(|| waker.wake());
    }
}

thread_local! {
    /// The actions that wait for the release of this thread's last lock. It has no destructor, so
    /// that destructors of other thread-local variables can still use it.
    static DEFERRED: RefCell<ManuallyDrop<WakeList>> =
        const { RefCell::new(ManuallyDrop::new(WakeList::empty())) };
}

/// Adds actions that run when this thread holds no lock. A component that polls an operation under
/// a lock finishes other operations too, whose wakers and buffers may run user code that takes the
/// same lock.
#[cold]
fn defer(add: impl FnOnce(&mut WakeList)) {
    let is_first = DEFERRED.with_borrow_mut(|deferred| {
        let is_first = deferred.is_empty();
        add(deferred);
        is_first
    });
    if is_first {
        locks::when_none_is_held(|| {
            // Taken first, because the actions may take locks and defer others.
            DEFERRED.with_borrow_mut(|deferred| std::mem::take(&mut **deferred)).run();
        });
    }
}
