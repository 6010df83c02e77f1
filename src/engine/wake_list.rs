//! What is left to do when the locks are released: those of a completion queue, and with a [`Deferral`] those of whoever
//! polls operations under a lock of its own.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::drain::CqShared;
use super::queue_pair_core::Drawing;
use super::slot::Held;
use super::work_queue::{Owner, WorkQueue};
use crate::contained::contained;
use crate::error::OpErrorKind;

/// Tasks to wake, and what abandoned operations owned to drop: both can run code of users, which no lock may be held for.
#[derive(Default)]
pub(super) struct WakeList {
    any: bool,
    wakers: SmallVec<[Waker; 16]>,
    held: SmallVec<[Held; 2]>,
    /// To be dropped, not woken.
    spent: SmallVec<[Waker; 1]>,
    ends: SmallVec<[(Arc<dyn Drawing>, OpErrorKind); 1]>,
    abandons: SmallVec<[(Arc<WorkQueue>, OpErrorKind); 1]>,
    doomed: SmallVec<[(Arc<CqShared>, Owner, OpErrorKind); 1]>,
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
        let else_nothing = self.held.is_empty()
            && self.spent.is_empty()
            && self.ends.is_empty()
            && self.abandons.is_empty()
            && self.doomed.is_empty();
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

    /// What must be destroyed before its operations can end.
    pub(super) fn end(&mut self, core: Arc<dyn Drawing>, kind: OpErrorKind) {
        self.any = true;
        self.ends.push((core, kind));
    }

    /// A shared receive queue whose operations end once its queue pairs have.
    pub(super) fn abandon(&mut self, queue: Arc<WorkQueue>, kind: OpErrorKind) {
        self.any = true;
        self.abandons.push((queue, kind));
    }

    /// As [`end`](Self::end), of the queue pair of a send queue.
    pub(super) fn end_queue_pair_of(&mut self, cq: Arc<CqShared>, owner: Owner, kind: OpErrorKind) {
        self.any = true;
        self.doomed.push((cq, owner, kind));
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
        for (core, kind) in self.ends {
            core.shut_down(kind);
        }
        for (cq, owner, kind) in self.doomed {
            if let Some(core) = cq.queue_pair_of(owner) {
                core.shut_down(kind);
            }
        }
        for (queue, kind) in self.abandons {
            drop(queue.close());
            queue.cq().abandon(&queue, kind, false);
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
        self.abandons.extend(more.abandons);
        self.doomed.extend(more.doomed);
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
    DEFERRED.with_borrow_mut(|deferred| add(deferred.get_or_insert_with(|| ManuallyDrop::new(WakeList::new()))));
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
