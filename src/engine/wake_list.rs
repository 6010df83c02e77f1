//! What is left to do when the locks are released: those of a completion queue, and with a [`Deferral`] those of whoever
//! polls operations under a lock of its own.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::slot::Held;
use crate::contained::contained;
use crate::error::OpErrorKind;

/// What has work in flight, which ends with it: a queue pair, a DC target, a shared receive queue.
pub(super) trait Teardown: Send + Sync {
    /// Destroys it and ends all that is in flight on it, with `kind` where the device said nothing.
    fn shut_down(&self, kind: OpErrorKind);
}

/// Tasks to wake, and what abandoned operations owned to drop: both can run code of users, which no lock may be held for.
#[derive(Default)]
pub(super) struct WakeList {
    any: bool,
    wakers: SmallVec<[Waker; 16]>,
    held: SmallVec<[Held; 2]>,
    /// To be dropped, not woken.
    spent: SmallVec<[Waker; 1]>,
    ends: SmallVec<[(Arc<dyn Teardown>, OpErrorKind); 1]>,
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

    /// The one task to wake, if that is all that is left to do, as it is most of the time: spares moving the list.
    pub(super) fn only(&mut self) -> Option<Waker> {
        let else_nothing = self.held.is_empty() && self.spent.is_empty() && self.ends.is_empty();
        if self.wakers.len() != 1 || !else_nothing {
            return None;
        }
        self.any = false;
        self.wakers.pop()
    }

    pub(super) fn dispose(&mut self, held: Option<Held>, waker: Option<Waker>) {
        self.any |= held.is_some() || waker.is_some();
        self.held.extend(held);
        self.spent.extend(waker);
    }

    /// What is to be destroyed, with the reason.
    pub(super) fn end(&mut self, object: Arc<dyn Teardown>, kind: OpErrorKind) {
        self.any = true;
        self.ends.push((object, kind));
    }

    #[inline]
    pub(super) fn finish(self) {
        if !self.is_empty() {
            self.finish_slow();
        }
    }

    fn finish_slow(self) {
        if DEFERRALS.get() > 0 {
            return later(|deferred| deferred.append(self));
        }
        for waker in self.wakers {
            contained(|| waker.wake());
        }
        for (object, kind) in self.ends {
            object.shut_down(kind);
        }
        for held in self.held {
            contained(|| drop(held));
        }
        for waker in self.spent {
            contained(|| drop(waker));
        }
    }

    fn append(&mut self, more: Self) {
        self.any |= more.any;
        self.wakers.extend(more.wakers);
        self.held.extend(more.held);
        self.spent.extend(more.spent);
        self.ends.extend(more.ends);
    }
}

/// Wakes one task, now or when it may be.
#[inline]
pub(crate) fn wake(waker: Waker) {
    if DEFERRALS.get() > 0 {
        later(|deferred| deferred.wake(waker));
    } else {
        contained(|| waker.wake());
    }
}

/// While it lives, nothing of what completion queues have to do for others is done on this thread: nobody is woken, and
/// what abandoned operations owned is not dropped. All of that is done when the last of them is dropped.
///
/// Who posts and polls operations under a lock makes one before it takes the lock, and drops it after the lock was released:
/// an operation that is polled finds the completions of all others, and what it leads to may be code of users that comes
/// back for the same lock.
#[derive(Debug)]
pub(crate) struct Deferral(PhantomData<*const ()>);

thread_local! {
    static DEFERRALS: Cell<u32> = const { Cell::new(0) };
    /// Without a destructor: destructors of other variables of a thread may still need it. It is empty by then.
    static DEFERRED: RefCell<Option<ManuallyDrop<WakeList>>> = const { RefCell::new(None) };
}

fn later(add: impl FnOnce(&mut WakeList)) {
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
            // Taken out: what is done now may make another deferral on this thread.
            && let Some(deferred) = DEFERRED.take()
        {
            ManuallyDrop::into_inner(deferred).finish_slow();
        }
    }
}
