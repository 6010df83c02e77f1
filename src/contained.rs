//! Code of users that runs in the frame of another task, a thread of this crate, or a driver of the runtime: its panics end there.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Runs a waker or a destructor of a user and stops its panic here.
///
/// The caller has other work to finish: it is another operation's task, a busy-poll thread, a runtime's I/O driver, or a poll that
/// wakes its own task. A panic would abort that work. The panic hook has reported the panic already.
pub(crate) fn contained(run: impl FnOnce()) {
    panics(run);
}

/// [`contained`]; true if it panicked.
fn panics(run: impl FnOnce()) -> bool {
    let Err(panic) = catch_unwind(AssertUnwindSafe(run)) else { return false };
    tracing::error!(
        "a waker, or the destructor of what an abandoned operation owned, panicked; the panic is ignored"
    );
    // The payload is of the user as well, and so is its destructor.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(another);
    }
    true
}

/// Awaits `future` with a waker whose panics are contained.
///
/// Tokio wakes the waiters of a `Notify`, a `Semaphore`, a timer or a descriptor in batches. A waker that panics unwinds out of
/// the batch: the wakers behind it are dropped, and their tasks sleep for ever.
pub(crate) async fn wakes_contained<F: Future>(future: F) -> F::Output {
    let (mut future, mut wakers) = (pin!(future), ContainedWaker::default());
    poll_fn(|context| wakers.poll(context, |context| future.as_mut().poll(context))).await
}

/// The contained waker of one task. It is kept between polls, so that a task which waits allocates once.
#[derive(Debug, Default)]
pub(crate) struct ContainedWaker {
    current: Option<(Arc<Inner>, Waker)>,
    panicked: Option<Arc<AtomicBool>>,
}

#[derive(Debug)]
struct Inner {
    /// `None` once dropped.
    waker: Option<Waker>,
    panicked: Option<Arc<AtomicBool>>,
}

impl ContainedWaker {
    /// Sets `panicked` when the waker panics: the task did not learn what it was woken for, so another one has to.
    #[cfg(not(loom))]
    pub(crate) fn reporting(panicked: &Arc<AtomicBool>) -> Self {
        Self { current: None, panicked: Some(Arc::clone(panicked)) }
    }

    /// Calls `poll` with the contained waker.
    pub(crate) fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let same = |inner: &Inner| {
            inner.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()))
        };
        // `will_wake` is best effort: without it each poll makes a new one.
        let current = self.current.take().filter(|(inner, _)| same(inner)).unwrap_or_else(|| {
            let inner = Arc::new(Inner {
                waker: Some(context.waker().clone()),
                panicked: self.panicked.clone(),
            });
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
        let Some(waker) = &self.waker else { return };
        if panics(|| waker.wake_by_ref())
            && let Some(panicked) = &self.panicked
        {
            panicked.store(true, Ordering::Release);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        contained(|| drop(self.waker.take()));
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures::FutureExt as _;
    use tokio::sync::Notify;

    use super::*;

    /// Panics when it is woken, and when it is dropped after that.
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

    /// Counts how often it is woken.
    #[derive(Default)]
    pub(crate) struct Counts(pub(crate) AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn waiter_behind_one_whose_waker_panics_is_woken() {
        let (notify, counts) = (Notify::new(), Arc::new(Counts::default()));
        let rude = Waker::from(Arc::new(Panics::default()));
        let honest = Waker::from(counts.clone());
        let mut waiters: Vec<_> =
            (0..40).map(|_| Box::pin(wakes_contained(notify.notified()))).collect();
        for (number, waiter) in waiters.iter_mut().enumerate() {
            let waker = if number % 3 == 0 { &rude } else { &honest };
            assert!(waiter.poll_unpin(&mut Context::from_waker(waker)).is_pending());
        }
        drop(rude);
        notify.notify_waiters();
        assert_eq!(counts.0.load(Ordering::Relaxed), 26);
        let mut noop = Context::from_waker(Waker::noop());
        assert!(waiters.iter_mut().all(|waiter| waiter.poll_unpin(&mut noop).is_ready()));
    }

    #[test]
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
