//! Drops objects whose destruction may block.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use rdma_provider::locks::{Condvar, Mutex};

use crate::blocking;

#[derive(Debug)]
pub(super) struct Disposer<T> {
    state: Mutex<State<T>>,
    idle: Condvar,
}

#[derive(Debug)]
struct State<T> {
    waiting: Vec<T>,
    held: usize,
    busy: bool,
    stalled: bool,
}

pub(super) const STALL_LENGTH: usize = 256;

impl<T> Default for Disposer<T> {
    fn default() -> Self {
        let state = State { waiting: Vec::new(), held: 0, busy: false, stalled: false };
        Self { state: Mutex::new(state), idle: Condvar::new() }
    }
}

impl<T: Send + 'static> Disposer<T> {
    /// Starts the thread that drops the items if needed. Only the `on_resume` of the call that
    /// starts it is kept, until it ends, and called when the queue is empty again after
    /// [`is_stalled`](Self::is_stalled) has returned true.
    pub(super) fn dispose<F: Fn() + Send + 'static>(
        self: &Arc<Self>,
        items: impl IntoIterator<Item = T>,
        on_resume: F,
    ) {
        let mut state = self.state.lock();
        state.waiting.extend(items);
        if state.waiting.is_empty() || mem::replace(&mut state.busy, true) {
            return;
        }
        drop(state);
        let disposer = Arc::clone(self);
        blocking::spawn(move || disposer.drop_all(on_resume));
    }

    fn drop_all(&self, on_resume: impl Fn()) {
        loop {
            let mut state = self.state.lock();
            let items = mem::take(&mut state.waiting);
            state.busy = !items.is_empty();
            if !state.busy {
                let resumes = mem::take(&mut state.stalled);
                drop(state);
                self.idle.notify_all();
                if resumes {
                    on_resume();
                }
                return;
            }
            drop(state);
            drop(items);
        }
    }

    /// Another item may follow while the result lives.
    pub(super) fn hold(self: &Arc<Self>) -> Hold<T> {
        self.state.lock().held += 1;
        Hold(Arc::clone(self))
    }

    /// Returns at `end` at the latest.
    pub(super) fn wait_until_idle(&self, end: Instant) {
        let mut state = self.state.lock();
        while state.busy || state.held > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.idle.wait_for(&mut state, left);
        }
    }

    pub(super) fn is_stalled(&self) -> bool {
        let mut state = self.state.lock();
        let many = state.busy && state.waiting.len() >= STALL_LENGTH;
        state.stalled |= many;
        many
    }
}

#[derive(Debug)]
pub(super) struct Hold<T>(Arc<Disposer<T>>);

impl<T> Drop for Hold<T> {
    fn drop(&mut self) {
        self.0.state.lock().held -= 1;
        self.0.idle.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Blocks in its drop until its sender is dropped.
    struct Slow(mpsc::Receiver<()>, Arc<AtomicUsize>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn many_items_use_one_thread_and_stall_at_limit() {
        let (disposer, gone, on_resume) =
            (Arc::new(Disposer::default()), Arc::default(), Arc::new(AtomicUsize::new(0)));
        let mut held = Vec::new();
        let mut dispose = |count: usize| {
            let items: Vec<_> = (0..count)
                .map(|_| {
                    let (hold, wait) = mpsc::channel();
                    held.push(hold);
                    Slow(wait, Arc::clone(&gone))
                })
                .collect();
            let on_resume = Arc::clone(&on_resume);
            disposer.dispose(items, move || {
                on_resume.fetch_add(1, Ordering::SeqCst);
            });
        };
        dispose(0);
        dispose(1);
        while !disposer.state.lock().waiting.is_empty() {
            thread::yield_now();
        }
        for _ in 1..STALL_LENGTH {
            dispose(1);
        }
        assert!(!disposer.is_stalled());
        dispose(1);
        assert!(disposer.is_stalled());
        disposer.wait_until_idle(Instant::now() + Duration::from_millis(1));
        assert_eq!((gone.load(Ordering::SeqCst), on_resume.load(Ordering::SeqCst)), (0, 0));
        held.clear();
        disposer.wait_until_idle(Instant::now() + Duration::from_secs(600));
        assert_eq!(gone.load(Ordering::SeqCst), STALL_LENGTH + 1);
        while on_resume.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        assert_eq!(
            (gone.load(Ordering::SeqCst), on_resume.load(Ordering::SeqCst)),
            (STALL_LENGTH + 1, 1)
        );
        assert!(!disposer.is_stalled());
    }

    #[test]
    fn announced_item_is_awaited() {
        let disposer = Arc::new(Disposer::<u8>::default());
        let hold = disposer.hold();
        let start = Instant::now();
        disposer.wait_until_idle(start + Duration::from_millis(1));
        assert!(start.elapsed() >= Duration::from_millis(1));
        let other = Arc::clone(&disposer);
        let waiting = thread::spawn(move || {
            other.wait_until_idle(Instant::now() + Duration::from_secs(600));
        });
        drop(hold);
        waiting.join().unwrap();
    }
}
