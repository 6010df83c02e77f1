//! Containment of panics in the program's wakers that other libraries call, such as Tokio.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use rdma_provider::later::{self, contained};
use rdma_provider::locks;

/// A connection polls under its lock with its own waker, which runs no code of the program.
pub(crate) fn wake_to_repoll(context: &Context<'_>) {
    later::reported_panic(|| context.waker().wake_by_ref());
}

/// Tokio wakes the waiters of a `Notify`, a `Semaphore`, a timer or a descriptor in batches. A
/// panic of a waker unwinds out of the batch: later wakers are dropped, and their tasks are never
/// woken.
pub(crate) async fn wakes_contained<F: Future>(future: F) -> F::Output {
    let (mut future, mut wakers) = (pin!(future), ContainedWaker::default());
    poll_fn(|context| wakers.poll(context, |context| future.as_mut().poll(context))).await
}

/// Kept between polls so that a waiting task allocates once.
#[derive(Debug, Default)]
pub(crate) struct ContainedWaker {
    current: Option<(Arc<Inner>, Waker)>,
}

#[derive(Debug)]
struct Inner {
    /// Taken by `drop`, which contains the panic of the waker's destructor.
    waker: Option<Waker>,
}

impl ContainedWaker {
    pub(crate) fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let same = |inner: &Inner| {
            inner.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()))
        };
        // `will_wake` may be false for wakers of the same task: then each poll allocates.
        let current = self.current.take().filter(|(inner, _)| same(inner)).unwrap_or_else(|| {
            let inner = Arc::new(Inner { waker: Some(context.waker().clone()) });
            (Arc::clone(&inner), Waker::from(inner))
        });
        let (_, waker) = self.current.insert(current);
        poll(&mut Context::from_waker(waker))
    }
}

impl Wake for Inner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if locks::held() > 0 {
            // A buffer that is returned under a lock wakes the task that waits for one.
            later::wake([Waker::from(self.clone())]);
        } else if let Some(waker) = &self.waker {
            contained(|| waker.wake_by_ref());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        later::discard(self.waker.take());
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use futures::FutureExt as _;
    use tokio::sync::Notify;

    use super::*;

    /// After this time a test concludes that something hangs: no busy machine takes as long.
    pub(crate) const HANG: Duration = Duration::from_secs(600);

    #[derive(Default)]
    pub(crate) struct Panics(AtomicBool);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
            panic!("a waker of a test");
        }
    }

    impl Drop for Panics {
        fn drop(&mut self) {
            assert!(!*self.0.get_mut(), "the destructor of a waker of a test");
        }
    }

    #[derive(Default)]
    pub(crate) struct Counts(pub(crate) AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[allow(unsafe_code, reason = "a waker without `Wake` is made of raw parts")]
    pub(crate) fn calls_when_cloned(act: impl Fn() + Send + Sync + 'static) -> Waker {
        use std::task::{RawWaker, RawWakerVTable};

        type Act = Box<dyn Fn() + Send + Sync>;
        const TABLE: RawWakerVTable = RawWakerVTable::new(clone, discard, |_| (), discard);
        unsafe fn clone(data: *const ()) -> RawWaker {
            // SAFETY: C2: a reference that the caller keeps.
            unsafe {
                (*data.cast::<Act>())();
                Arc::increment_strong_count(data.cast::<Act>());
            }
            RawWaker::new(data, &TABLE)
        }
        unsafe fn discard(data: *const ()) {
            // SAFETY: C2: this function consumes the reference.
            drop(unsafe { Arc::from_raw(data.cast::<Act>()) });
        }
        let act: Arc<Act> = Arc::new(Box::new(act));
        // SAFETY: C2: the data are a reference, as each function of the table takes it.
        unsafe { Waker::new(Arc::into_raw(act).cast(), &TABLE) }
    }

    #[test]
    fn waiter_behind_one_whose_waker_panics_is_woken() {
        let (notify, counts) = (Notify::new(), Arc::new(Counts::default()));
        let panicking = Waker::from(Arc::new(Panics::default()));
        let counting = Waker::from(counts.clone());
        let mut waiters: Vec<_> =
            (0..40).map(|_| Box::pin(wakes_contained(notify.notified()))).collect();
        for (number, waiter) in waiters.iter_mut().enumerate() {
            let waker = if number % 3 == 0 { &panicking } else { &counting };
            assert!(waiter.poll_unpin(&mut Context::from_waker(waker)).is_pending());
        }
        drop(panicking);
        notify.notify_waiters();
        assert_eq!(counts.0.load(Ordering::Relaxed), 26);
        let mut noop = Context::from_waker(Waker::noop());
        assert!(waiters.iter_mut().all(|waiter| waiter.poll_unpin(&mut noop).is_ready()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "under Miri, clones of a waker have tables at other addresses")]
    fn task_that_waits_allocates_one_waker() {
        let (counts, mut wakers) = (Arc::new(Counts::default()), ContainedWaker::default());
        let waker = Waker::from(counts.clone());
        let mut seen = Vec::new();
        for _ in 0..3 {
            let poll = |context: &mut Context<'_>| {
                seen.push(context.waker().clone());
                Poll::<()>::Pending
            };
            assert!(wakers.poll(&mut Context::from_waker(&waker), poll).is_pending());
        }
        assert!(seen[0].will_wake(&seen[1]) && seen[1].will_wake(&seen[2]));
    }
}
