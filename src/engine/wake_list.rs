//! Actions to run after locks are released: waking tasks, dropping buffers, and shutting down the
//! objects of a failed completion queue.
//!
//! The drainer collects them in a [`WakeList`] under the lock of the completion queue, and runs
//! them after the release. Within a [`Deferral`] they run at its end instead, because the component
//! that polls an operation may hold a lock too.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::slot::Held;
use crate::contained::contained;
use crate::error::OpErrorKind;

/// An object to shut down when its completion queue fails: a queue pair, a DC target or a shared
/// receive queue.
pub(super) trait Teardown: Send + Sync {
    /// Destroys a queue pair or DC target, or closes a shared receive queue. Work without a
    /// completion fails with `kind`.
    ///
    /// Takes the lock of the completion queue.
    fn shut_down(&self, kind: OpErrorKind);

    /// Moves a queue pair to the error state because of `cause`. Returns false if it is not a queue
    /// pair, or the device refuses.
    fn move_to_error(&self, _cause: OpErrorKind) -> bool {
        false
    }

    /// Resets failed streams of a DC initiator.
    fn restore_streams(&self) {}
}

/// Tasks to wake, buffers and wakers to drop, and objects to shut down. Each can run user code or
/// take locks, so [`finish`](Self::finish) requires no lock held, or a [`Deferral`].
///
/// An empty list is one pointer, because each completion queue has one.
#[derive(Default)]
pub(super) struct WakeList {
    /// `None` if the list is empty.
    actions: Option<Box<Actions>>,
}

#[derive(Default)]
struct Actions {
    wakers: SmallVec<[Waker; 16]>,
    /// Buffers of abandoned operations, to be dropped.
    held: SmallVec<[Held; 2]>,
    /// Wakers of abandoned operations, to be dropped without waking their tasks.
    discarded: SmallVec<[Waker; 1]>,
    teardowns: SmallVec<[(Arc<dyn Teardown>, OpErrorKind); 1]>,
    /// DC initiators with failed streams to reset.
    failed_streams: SmallVec<[Arc<dyn Teardown>; 1]>,
}

thread_local! {
    /// Empty actions of the lists that this thread finished last, so that the next ones need not
    /// allocate. Several, because an action may finish other lists.
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

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.actions.is_none()
    }

    fn actions(&mut self) -> &mut Actions {
        self.actions.get_or_insert_with(spare)
    }

    pub(super) fn wake(&mut self, waker: Waker) {
        self.actions().wakers.push(waker);
    }

    /// Removes and returns the waker if the list contains nothing else.
    pub(super) fn take_single_waker(&mut self) -> Option<Waker> {
        let mut actions = self.actions.take_if(|actions| {
            actions.wakers.len() == 1
                && actions.held.is_empty()
                && actions.discarded.is_empty()
                && actions.teardowns.is_empty()
                && actions.failed_streams.is_empty()
        })?;
        let waker = actions.wakers.pop();
        actions.keep_spare();
        waker
    }

    /// Adds the buffers and the waker of an abandoned operation.
    pub(super) fn dispose(&mut self, held: Option<Held>, waker: Option<Waker>) {
        if held.is_some() || waker.is_some() {
            let actions = self.actions();
            actions.held.extend(held);
            actions.discarded.extend(waker);
        }
    }

    pub(super) fn shut_down(&mut self, object: Arc<dyn Teardown>, kind: OpErrorKind) {
        self.actions().teardowns.push((object, kind));
    }

    pub(super) fn restore_streams(&mut self, initiator: Arc<dyn Teardown>) {
        self.actions().failed_streams.push(initiator);
    }

    /// Runs the actions, or adds them to the current [`Deferral`].
    #[inline]
    pub(super) fn finish(self) {
        if let Some(actions) = self.actions {
            actions.finish();
        }
    }
}

impl Actions {
    fn finish(mut self: Box<Self>) {
        if DEFERRALS.get() > 0 {
            defer(|deferred| deferred.append(&mut self));
            return self.keep_spare();
        }
        // First, so that a task that has seen the last flush finds the stream usable.
        for initiator in self.failed_streams.drain(..) {
            initiator.restore_streams();
        }
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
        self.failed_streams.extend(more.failed_streams.drain(..));
    }

    /// Keeps the empty lists for the next [`WakeList`] of this thread.
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

/// Wakes one task, immediately or at the end of the current [`Deferral`].
#[inline]
pub(crate) fn wake(waker: Waker) {
    if DEFERRALS.get() > 0 {
        defer(|deferred| deferred.wakers.push(waker));
    } else {
        contained(|| waker.wake());
    }
}

/// Defers the actions of all [`WakeList`]s on this thread until its last `Deferral` is dropped.
///
/// A component that posts or polls operations under a lock creates a `Deferral` before it takes the
/// lock and drops it after the release. Polling an operation finishes other operations too, and
/// their wakers and buffers may run user code that takes the same lock.
#[derive(Debug)]
pub(crate) struct Deferral(PhantomData<*const ()>);

thread_local! {
    static DEFERRALS: Cell<u32> = const { Cell::new(0) };
    /// Empty unless a `Deferral` exists. Has no destructor, so that destructors of other
    /// thread-local variables can still use it.
    static DEFERRED: RefCell<Option<ManuallyDrop<Box<Actions>>>> = const { RefCell::new(None) };
}

fn defer(add: impl FnOnce(&mut Actions)) {
    DEFERRED.with_borrow_mut(|deferred| {
        add(deferred.get_or_insert_with(|| ManuallyDrop::new(spare())))
    });
}

impl Deferral {
    pub(crate) fn begin() -> Self {
        DEFERRALS.set(DEFERRALS.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let others = DEFERRALS.get() - 1;
        DEFERRALS.set(others);
        if others == 0
            && DEFERRED.with_borrow(Option::is_some)
            // Taken first, because the actions may begin another `Deferral` on this thread.
            && let Some(deferred) = DEFERRED.take()
        {
            ManuallyDrop::into_inner(deferred).finish();
        }
    }
}
