//! Actions to run after locks are released: waking tasks, dropping buffers, and shutting down the
//! objects of a failed completion queue. The drainer collects them in a [`WakeList`] under the lock
//! of the completion queue, and leaves them to [`later`] after the release: its caller may hold a
//! lock, too.

use std::cell::RefCell;
use std::sync::Arc;
use std::task::Waker;

use rdma_provider::later;
use smallvec::SmallVec;

use super::slot::DetachedBuffers;
use crate::error::OpErrorKind;

pub(super) trait Teardown: Send + Sync {
    /// Destroys the object, or closes a shared receive queue. Work without a completion fails with
    /// `kind`. Takes the lock of the completion queue.
    fn shut_down(&self, kind: OpErrorKind);

    /// Returns false if it is not a queue pair, or the device refuses.
    fn move_to_error(&self, _cause: OpErrorKind) -> bool {
        false
    }
}

/// Most lists wake one task, which needs no box. Each completion queue has a list, so it is small.
#[derive(Default)]
pub(super) struct WakeList {
    first: Option<Waker>,
    more: Option<Box<Actions>>,
}

#[derive(Default)]
struct Actions {
    wakers: SmallVec<[Waker; 16]>,
    held: SmallVec<[DetachedBuffers; 2]>,
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

    pub(super) fn dispose(&mut self, held: Option<DetachedBuffers>, waker: Option<Waker>) {
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
        later::wake(self.first);
        if let Some(more) = self.more {
            more.finish();
        }
    }
}

impl Actions {
    fn finish(mut self: Box<Self>) {
        later::wake(self.wakers.drain(..));
        for (object, kind) in self.teardowns.drain(..) {
            later::run(move || object.shut_down(kind));
        }
        self.held.drain(..).for_each(later::dispose);
        later::discard(self.discarded.drain(..));
        self.keep_spare();
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
