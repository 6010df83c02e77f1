//! Wakers called after the runtime of the current thread has run its other tasks and I/O.
//!
//! A task that wakes itself in each poll keeps the queue of a current-thread runtime filled. Such a
//! runtime then polls the future of `block_on` and its I/O driver only every 61 tasks. A deferred
//! task is not in the queue meanwhile.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use rdma_provider::later;
use rdma_provider::locks::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{try_id, yield_now};

use crate::contained::wake_to_repoll;

/// Called by the waker that Tokio has. Panics are contained, because they would unwind into the
/// runtime.
#[derive(Debug, Default)]
struct Deferred(Mutex<Vec<Waker>>);

thread_local! {
    static DEFERRED: (Arc<Deferred>, Waker) = {
        let deferred = Arc::<Deferred>::default();
        (deferred.clone(), deferred.into())
    };
}

const ROUNDS_IN_TURN: u32 = 4;

/// Rounds that a task of a multi-thread runtime spins before other threads get its core. A round
/// takes about 0.2 µs, so an operation on an adapter completes within this number.
const ROUNDS_OF_THREAD: u32 = 32;

/// The task has spun for `rounds`.
pub(super) fn wake_in_turn(context: &Context<'_>, rounds: u32) {
    if rounds % ROUNDS_IN_TURN == 1 {
        // The completion may depend on other tasks.
        wake_after_others(context);
    } else {
        wake_to_repoll(context);
    }
}

/// Yields the core of a thread every few rounds, for a task that spins without a limit.
pub(super) fn share_core(rounds: u32) {
    // The completion may depend on a thread that shares the core, which would otherwise wait some
    // milliseconds for the end of the time slice. A current-thread runtime is assumed to have its
    // own core.
    if rounds.is_multiple_of(ROUNDS_OF_THREAD) && !is_single_threaded() {
        std::thread::yield_now();
    }
}

/// A current-thread runtime runs its other tasks and I/O first.
#[inline(never)]
pub(super) fn wake_after_others(context: &Context<'_>) {
    // Other wake-ups need no deferral: the future of `block_on` is not in the queue, and a
    // multi-thread runtime polls its I/O elsewhere.
    if try_id().is_some() && is_single_threaded() {
        let task = context.waker().clone();
        let deferred = DEFERRED.try_with(|(deferred, waker)| {
            deferred.0.lock().push(task);
            // Its first poll gives the waker to the runtime of this thread, which may be another
            // one in each call.
            pin!(yield_now()).poll(&mut Context::from_waker(waker)).is_pending()
        });
        if deferred.is_ok() {
            return;
        }
    }
    wake_to_repoll(context);
}

fn is_single_threaded() -> bool {
    Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::CurrentThread)
}

impl Wake for Deferred {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A waker may defer again.
        let count = self.0.lock().len();
        for _ in 0..count {
            let Some(waker) = self.0.lock().pop() else { return };
            // Outside of the scheduler, Tokio calls this at once, perhaps under a lock.
            later::wake([waker]);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::rc::Rc;
    use std::task::Poll;

    use rdma_provider::later::contained;
    use tokio::runtime::{Builder, Runtime};
    use tokio::task::{LocalSet, spawn_local};

    use super::*;
    use crate::contained::tests::{Counts, Panics};

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_io().build().unwrap()
    }

    /// Lets the runtime poll the others once, and returns `count` afterwards.
    async fn turn(count: &Cell<u32>) -> u32 {
        let mut polled = false;
        poll_fn(|context| {
            context.waker().wake_by_ref();
            if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        count.get()
    }

    #[test]
    fn future_of_block_on_is_polled_every_few_rounds_of_a_spinning_task() {
        let most = |spin: fn(&Context<'_>, u32)| {
            let rounds = Rc::new(Cell::new(0));
            let spun = rounds.clone();
            LocalSet::new().block_on(&runtime(), async move {
                spawn_local(poll_fn::<(), _>(move |context| {
                    spun.set(spun.get() + 1);
                    spin(context, spun.get());
                    Poll::Pending
                }));
                let (mut most, mut before) = (0, 0);
                for _ in 0..50 {
                    let now = turn(&rounds).await;
                    (most, before) = (most.max(now - before), now);
                }
                most
            })
        };
        assert!((1..=2 * ROUNDS_IN_TURN).contains(&most(wake_in_turn)));
        let without = most(|context, _| context.waker().wake_by_ref());
        assert!(without > 2 * ROUNDS_IN_TURN, "{without}: the runtime has changed");
    }

    #[test]
    fn deferred_wakers_are_all_called_and_their_panics_contained() {
        let counts = Arc::new(Counts::default());
        let wakers = [Waker::from(counts.clone()), Arc::new(Panics::default()).into()];
        let deferring = async move {
            for round in 1..=3 {
                for waker in wakers.iter().cycle().take(6) {
                    wake_after_others(&Context::from_waker(waker));
                }
                assert_eq!(counts.0.load(std::sync::atomic::Ordering::Relaxed), 3 * (round - 1));
                yield_now().await;
                assert_eq!(counts.0.load(std::sync::atomic::Ordering::Relaxed), 3 * round);
            }
            contained(|| drop(wakers));
        };
        let runtime = runtime();
        runtime.block_on(runtime.spawn(deferring)).unwrap();
    }

    #[test]
    fn waker_deferred_on_a_thread_without_a_scheduler_is_called_without_locks() {
        let counts = Arc::new(Counts::default());
        let (runtime, waker) = (runtime(), Waker::from(counts.clone()));
        let handle = runtime.handle().clone();
        let blocking = runtime.spawn_blocking(move || {
            handle.block_on(async {
                let lock = Mutex::new(());
                let guard = lock.lock();
                wake_after_others(&Context::from_waker(&waker));
                let before = counts.0.load(std::sync::atomic::Ordering::Relaxed);
                drop(guard);
                (before, counts.0.load(std::sync::atomic::Ordering::Relaxed))
            })
        });
        assert_eq!(runtime.block_on(blocking).unwrap(), (0, 1));
    }

    #[test]
    fn outside_of_the_tasks_of_a_current_thread_runtime_the_waker_is_called_at_once() {
        let counts = Arc::new(Counts::default());
        let waker = Waker::from(counts.clone());
        wake_after_others(&Context::from_waker(&waker));
        let threads = Builder::new_multi_thread().worker_threads(1).build().unwrap();
        threads.block_on(async { wake_after_others(&Context::from_waker(&waker)) });
        runtime().block_on(async { wake_after_others(&Context::from_waker(&waker)) });
        let spawned = waker.clone();
        let task = threads.spawn(async move { wake_after_others(&Context::from_waker(&spawned)) });
        threads.block_on(task).unwrap();
        assert_eq!(counts.0.load(std::sync::atomic::Ordering::Relaxed), 4);
    }
}
