//! Destroys what may take its time, where that holds up nobody.

use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;

/// Things to be dropped by one thread that may block, one after the other: however many there are, they take no more
/// threads from others.
#[derive(Debug)]
pub(super) struct Disposer<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    waiting: Vec<T>,
    /// A thread is at it.
    busy: bool,
    /// Somebody has seen that there were too many, and is to be told when there are not.
    stalled: bool,
}

/// Things that wait before [`Disposer::stalls`] says that it is too many: destroying them takes as long as a hundred
/// calls of the kernel.
pub(super) const MOST: usize = 256;

impl<T> Default for Disposer<T> {
    fn default() -> Self {
        Self(Mutex::new(State { waiting: Vec::new(), busy: false, stalled: false }))
    }
}

impl<T: Send + 'static> Disposer<T> {
    /// Leaves `things` to a thread of `runtime`; if that has shut down, drops them here. `relieved` is called if somebody
    /// was told to wait.
    pub(super) fn dispose<F: Fn() + Send + 'static>(
        self: &Arc<Self>,
        things: impl IntoIterator<Item = T>,
        runtime: &Handle,
        relieved: F,
    ) {
        let mut state = self.0.lock();
        state.waiting.extend(things);
        if state.waiting.is_empty() || mem::replace(&mut state.busy, true) {
            return;
        }
        drop(state);
        let disposal = Disposal { disposer: Arc::clone(self), relieved };
        drop(runtime.spawn_blocking(move || drop(disposal)));
    }

    /// True if so many wait that no more should be added; then `relieved` is called when they are gone.
    pub(super) fn stalls(&self) -> bool {
        let mut state = self.0.lock();
        let many = state.busy && state.waiting.len() >= MOST;
        state.stalled |= many;
        many
    }
}

/// Somebody's turn to drop things. Done by its drop: a runtime that shuts down drops it without running it.
struct Disposal<T, F: Fn()> {
    disposer: Arc<Disposer<T>>,
    relieved: F,
}

impl<T, F: Fn()> Drop for Disposal<T, F> {
    fn drop(&mut self) {
        loop {
            let mut state = self.disposer.0.lock();
            let things = mem::take(&mut state.waiting);
            state.busy = !things.is_empty();
            let relieves = !state.busy && mem::take(&mut state.stalled);
            let done = !state.busy;
            drop(state);
            drop(things);
            if relieves {
                (self.relieved)();
            }
            if done {
                return;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Takes until it is let go.
    struct Slow(mpsc::Receiver<()>, Arc<AtomicUsize>);

    impl Drop for Slow {
        fn drop(&mut self) {
            // An error: nobody holds it up any more.
            let _ = self.0.recv();
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_flood_takes_one_thread_and_says_when_it_is_too_much() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (disposer, gone, relieved) =
            (Arc::new(Disposer::default()), Arc::default(), Arc::new(AtomicUsize::new(0)));
        let mut held = Vec::new();
        let mut dispose = |count: usize| {
            let things: Vec<_> = (0..count)
                .map(|_| {
                    let (hold, wait) = mpsc::channel();
                    held.push(hold);
                    Slow(wait, Arc::clone(&gone))
                })
                .collect();
            let relieved = Arc::clone(&relieved);
            disposer.dispose(things, runtime.handle(), move || {
                relieved.fetch_add(1, Ordering::SeqCst);
            });
        };
        dispose(0);
        dispose(1);
        // Until the thread has taken the first.
        while !disposer.0.lock().waiting.is_empty() {
            thread::yield_now();
        }
        for _ in 1..MOST {
            dispose(1);
        }
        assert!(!disposer.stalls());
        dispose(1);
        assert!(disposer.stalls());
        assert_eq!((gone.load(Ordering::SeqCst), relieved.load(Ordering::SeqCst)), (0, 0));
        held.clear();
        while relieved.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        assert_eq!((gone.load(Ordering::SeqCst), relieved.load(Ordering::SeqCst)), (MOST + 1, 1));
        assert!(!disposer.stalls());
    }

    #[test]
    fn what_is_left_to_a_runtime_that_has_shut_down_is_dropped_here() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let handle = runtime.handle().clone();
        drop(runtime);
        let (disposer, gone) = (Arc::new(Disposer::default()), Arc::default());
        for count in 1..=3 {
            let (hold, wait) = mpsc::channel();
            drop(hold);
            disposer.dispose([Slow(wait, Arc::clone(&gone))], &handle, || {});
            assert_eq!(gone.load(Ordering::SeqCst), count);
        }
    }
}
