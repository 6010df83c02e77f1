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
    fn fence(&self, _cause: OpErrorKind) -> bool {
        false
    }

    /// Resets failed streams of a DC initiator.
    fn restore_streams(&self) {}
}

/// Tasks to wake, buffers and wakers to drop, and objects to shut down. Each can run user code or
/// take locks, so [`finish`](Self::finish) requires no lock held, or a [`Deferral`].
#[derive(Default)]
pub(super) struct WakeList {
    any: bool,
    wakers: SmallVec<[Waker; 16]>,
    /// Buffers of abandoned operations, to be dropped.
    held: SmallVec<[Held; 2]>,
    /// Wakers of abandoned operations, to be dropped without waking their tasks.
    discarded: SmallVec<[Waker; 1]>,
    teardowns: SmallVec<[(Arc<dyn Teardown>, OpErrorKind); 1]>,
    /// DC initiators with failed streams to reset.
    failed_streams: SmallVec<[Arc<dyn Teardown>; 1]>,
}

impl WakeList {
    #[inline]
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.any
    }

    pub(super) fn wake(&mut self, waker: Waker) {
        self.any = true;
        self.wakers.push(waker);
    }

    /// Removes and returns the waker if the list contains nothing else. This common case avoids
    /// moving the list.
    pub(super) fn take_single_waker(&mut self) -> Option<Waker> {
        let no_other = self.held.is_empty()
            && self.discarded.is_empty()
            && self.teardowns.is_empty()
            && self.failed_streams.is_empty();
        if self.wakers.len() != 1 || !no_other {
            return None;
        }
        self.any = false;
        self.wakers.pop()
    }

    /// Adds the buffers and the waker of an abandoned operation.
    pub(super) fn dispose(&mut self, held: Option<Held>, waker: Option<Waker>) {
        self.any |= held.is_some() || waker.is_some();
        self.held.extend(held);
        self.discarded.extend(waker);
    }

    pub(super) fn shut_down(&mut self, object: Arc<dyn Teardown>, kind: OpErrorKind) {
        self.any = true;
        self.teardowns.push((object, kind));
    }

    pub(super) fn restore_streams(&mut self, initiator: Arc<dyn Teardown>) {
        self.any = true;
        self.failed_streams.push(initiator);
    }

    /// Runs the actions, or adds them to the current [`Deferral`].
    #[inline]
    pub(super) fn finish(self) {
        if !self.is_empty() {
            self.finish_slow();
        }
    }

    fn finish_slow(self) {
        if DEFERRALS.get() > 0 {
            return defer(|deferred| deferred.append(self));
        }
        // First, so that a task that has seen the last flush finds the stream usable.
        for initiator in self.failed_streams {
            initiator.restore_streams();
        }
        for waker in self.wakers {
            contained(|| waker.wake());
        }
        for (object, kind) in self.teardowns {
            object.shut_down(kind);
        }
        for held in self.held {
            contained(|| drop(held));
        }
        for waker in self.discarded {
            contained(|| drop(waker));
        }
    }

    fn append(&mut self, more: Self) {
        self.any |= more.any;
        self.wakers.extend(more.wakers);
        self.held.extend(more.held);
        self.discarded.extend(more.discarded);
        self.teardowns.extend(more.teardowns);
        self.failed_streams.extend(more.failed_streams);
    }
}

/// Wakes one task, immediately or at the end of the current [`Deferral`].
#[inline]
pub(crate) fn wake(waker: Waker) {
    if DEFERRALS.get() > 0 {
        defer(|deferred| deferred.wake(waker));
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
    static DEFERRED: RefCell<Option<ManuallyDrop<WakeList>>> = const { RefCell::new(None) };
}

fn defer(add: impl FnOnce(&mut WakeList)) {
    DEFERRED.with_borrow_mut(|deferred| {
        add(deferred.get_or_insert_with(|| ManuallyDrop::new(WakeList::new())))
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
            ManuallyDrop::into_inner(deferred).finish_slow();
        }
    }
}
