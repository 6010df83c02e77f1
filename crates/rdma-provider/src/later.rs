//! Work of a thread that waits until the thread holds no lock.
//!
//! Wakers, destructors of the program's values and `tracing` subscribers are code of the program,
//! which may use any object of the program, but locks are not reentrant. Functions that may run
//! under a lock therefore leave such work to this module. It runs at once if the thread holds no
//! lock, and otherwise, in order, when the thread releases its last [lock](crate::locks).

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

use crate::locks;

enum Work {
    Run(Box<dyn FnOnce()>),
    Drop(Box<dyn Any>),
    /// Wakers are separate, so that they need no allocation.
    Wake(Waker),
    Discard(Waker),
}

/// The work of a thread. Has no destructor, so that destructors of other thread-local variables can
/// still use it; [`AtExit`] frees its memory.
struct Later {
    /// The first work, if it is a waker: most locks that have work leave one waker. `None` whenever
    /// no work waits.
    first: Cell<Option<ManuallyDrop<Waker>>>,
    /// What follows. Entries that have begun are `None`.
    list: RefCell<ManuallyDrop<Vec<Option<Work>>>>,
    /// The length of the list, which is read more often than the list.
    len: Cell<usize>,
    /// How many entries belong to calls of [`run_all`] further up this thread's stack. A nested
    /// call runs only those behind them.
    outer: Cell<usize>,
}

thread_local! {
    static LATER: Later = const {
        Later {
            first: Cell::new(None),
            list: RefCell::new(ManuallyDrop::new(Vec::new())),
            len: Cell::new(0),
            outer: Cell::new(0),
        }
    };
    static AT_EXIT: AtExit = const { AtExit };
}

/// The capacity of the list that a thread keeps, so that usually none is allocated.
const KEPT: usize = 16;

/// Frees the memory of [`LATER`] when the thread exits.
struct AtExit;

impl Drop for AtExit {
    fn drop(&mut self) {
        LATER.with(|later| later.list.borrow_mut().shrink_to_fit());
    }
}

/// Runs `work`. Its panic is caught and, unlike in [`contained`], not reported: `work` may be the
/// report.
pub fn run(work: impl FnOnce() + 'static) {
    if locks::held() == 0 {
        caught_panic(work);
    } else {
        defer(Work::Run(Box::new(work)));
    }
}

/// Drops `value`.
pub fn dispose<T: 'static>(value: T) {
    if locks::held() == 0 {
        contained(|| drop(value));
    } else {
        defer(Work::Drop(Box::new(value)));
    }
}

/// Calls wakers.
#[inline]
pub fn wake(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(wake_one);
}

// Not generic, so that a caller without a waker calls nothing.
fn wake_one(waker: Waker) {
    if locks::held() == 0 {
        wake_now(waker);
    } else if locks::is_work_waiting() {
        defer(Work::Wake(waker));
    } else {
        locks::note_later();
        LATER.with(|later| {
            let before = later.first.replace(Some(ManuallyDrop::new(waker)));
            debug_assert!(before.is_none(), "nothing waits");
        });
    }
}

fn wake_now(waker: Waker) {
    contained(|| waker.wake_by_ref());
    // Separate: if both panicked at once, the process would abort.
    contained(|| drop(waker));
}

/// Drops wakers without calling them.
#[inline]
pub fn discard(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(discard_one);
}

fn discard_one(waker: Waker) {
    if locks::held() == 0 {
        contained(|| drop(waker));
    } else {
        defer(Work::Discard(waker));
    }
}

fn defer(work: Work) {
    locks::note_later();
    LATER.with(|later| {
        let mut list = later.list.borrow_mut();
        if list.capacity() == 0 {
            // Registers the destructor, unless the thread is exiting.
            let _ = AT_EXIT.try_with(|_| ());
        }
        list.push(Some(work));
        later.len.set(list.len());
    });
}

/// Runs the work that waits. The thread holds no lock.
#[cold]
pub(crate) fn run_all() {
    locks::clear_waiting();
    LATER.with(|later| {
        // Work may take locks and add more. All present entries count as those of outer calls, so
        // the release of such a lock runs only what was added since: calls nest as deep as work
        // causes other work, not as long as the list is.
        let start = later.outer.replace(later.len.get());
        if let Some(waker) = later.first.take() {
            wake_now(ManuallyDrop::into_inner(waker));
        }
        if later.len.get() > start {
            later.run_list(start);
        }
        later.outer.set(start);
    });
}

impl Later {
    /// Runs the entries of the list from `start`.
    #[cold]
    fn run_list(&self, start: usize) {
        for entry in start..self.len.get() {
            let work = self.list.borrow_mut().get_mut(entry).and_then(Option::take);
            if let Some(work) = work {
                work.run();
            }
        }
        let mut list = self.list.borrow_mut();
        list.truncate(start);
        if start == 0 && list.capacity() > KEPT {
            list.shrink_to(KEPT);
        }
        self.len.set(start);
    }
}

impl Work {
    fn run(self) {
        match self {
            Self::Run(work) => {
                caught_panic(work);
            }
            Self::Drop(value) => contained(|| drop(value)),
            Self::Wake(waker) => wake_now(waker),
            Self::Discard(waker) => contained(|| drop(waker)),
        }
    }
}

/// Runs a waker or a destructor of the program, and reports and stops its panic: it would abort the
/// work of another task, of a thread of a device, or of a runtime's I/O driver. The caller holds no
/// lock.
pub fn contained(run: impl FnOnce()) {
    debug_assert_eq!(locks::held(), 0, "code of the program runs under a lock");
    reported_panic(run);
}

/// Runs code of the program, and reports and stops its panic. Returns true if it panicked.
pub fn reported_panic(run: impl FnOnce()) -> bool {
    let panicked = caught_panic(run);
    if panicked {
        crate::error!("a waker or a destructor of the program panicked; ignoring it");
    }
    panicked
}

/// Runs code of the program and catches its panic, which the panic hook has already reported.
/// Returns true if it panicked.
pub fn caught_panic(run: impl FnOnce()) -> bool {
    let Err(panic) = catch_unwind(AssertUnwindSafe(run)) else { return false };
    // The destructor of the payload is code of the program, too.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(another);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::locks::{Mutex, MutexGuard, RwLock, Section, held};

    fn log() -> (impl Fn(u32), Receiver<(u32, u32)>) {
        let (sender, receiver) = channel();
        let emit = move |number| {
            let sender: Sender<_> = sender.clone();
            run(move || sender.send((number, held())).unwrap());
        };
        (emit, receiver)
    }

    // Shows F2.
    #[test]
    fn events_run_in_order_once_the_thread_holds_no_lock() {
        let (emit, received) = log();
        let (first, second) = (Mutex::new(()), RwLock::new(()));
        emit(1);
        assert_eq!(received.try_recv(), Ok((1, 0)), "without a lock, at once");
        let (one, other) = (first.lock(), second.read());
        emit(2);
        drop(one);
        emit(3);
        assert!(received.try_recv().is_err(), "a lock is held");
        drop(other);
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [(2, 0), (3, 0)]);
        let section = Section::begin();
        let guard = first.try_lock().unwrap();
        emit(4);
        assert!(first.try_lock().is_none());
        drop((guard, section));
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [(4, 0)]);
    }

    #[test]
    fn events_run_while_a_guard_is_unlocked() {
        let (emit, received) = log();
        let lock = Mutex::new(());
        let mut guard = lock.lock();
        emit(1);
        MutexGuard::unlocked(&mut guard, || {
            assert_eq!(received.try_recv(), Ok((1, 0)));
            emit(2);
            assert_eq!(received.try_recv(), Ok((2, 0)));
            assert!(lock.try_lock().is_some());
        });
        assert_eq!(held(), 1);
        let panic = || MutexGuard::unlocked(&mut guard, || panic!("a test"));
        assert!(caught_panic(panic));
        assert_eq!(held(), 1, "locked again");
        drop(guard);
        assert_eq!(held(), 0);
    }

    #[test]
    fn events_leave_no_memory_to_a_thread_that_exits() {
        let lock = Mutex::new(());
        let guard = lock.lock();
        (0..100).for_each(|_| run(|| ()));
        assert!(LATER.with(|later| later.list.borrow().capacity()) >= 100);
        drop(guard);
        assert!(LATER.with(|later| later.list.borrow().capacity()) <= KEPT);
        drop(AtExit);
        assert_eq!(LATER.with(|later| later.list.borrow().capacity()), 0);
    }

    #[test]
    fn holder_of_one_lock_runs_waiting_events_without_it() {
        let (emit, received) = log();
        let (lock, other) = (Mutex::new(()), Mutex::new(()));
        let mut guard = lock.lock();
        emit(1);
        let second = other.lock();
        MutexGuard::run_later(&mut guard);
        assert!(received.try_recv().is_err(), "another lock is held");
        drop(second);
        MutexGuard::run_later(&mut guard);
        assert_eq!((received.try_recv(), held()), (Ok((1, 0)), 1));
    }

    // Shows F2.
    #[test]
    fn panic_of_an_event_does_not_affect_later_ones() {
        let (emit, received) = log();
        let lock = Mutex::new(());
        let guard = lock.lock();
        run(|| panic!("a test"));
        emit(1);
        drop(guard);
        assert_eq!(received.try_recv(), Ok((1, 0)));
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn event_that_takes_locks_and_adds_events_runs_them_before_it_ends() {
        let (emit, received) = log();
        let lock: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
        let guard = lock.lock();
        run(move || {
            drop(lock.lock());
            emit(1);
            let again = lock.lock();
            emit(2);
            drop(again);
            emit(3);
        });
        drop(guard);
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [(1, 0), (2, 0), (3, 0)]);
    }

    #[test]
    fn waker_that_causes_work_ends_before_the_work_behind_it() {
        struct Waking(&'static Mutex<()>, std::sync::Mutex<Sender<(u32, u32)>>);

        impl std::task::Wake for Waking {
            fn wake(self: std::sync::Arc<Self>) {
                let sender = self.1.lock().unwrap().clone();
                let send = |number| sender.send((number, held())).unwrap();
                send(1);
                let guard = self.0.lock();
                let caused = sender.clone();
                run(move || caused.send((2, held())).unwrap());
                drop(guard);
                send(3);
            }
        }

        let (sender, received) = channel();
        let lock: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
        let guard = lock.lock();
        wake([Waker::from(std::sync::Arc::new(Waking(lock, sender.clone().into())))]);
        let behind = sender.clone();
        run(move || behind.send((4, held())).unwrap());
        wake([Waker::from(std::sync::Arc::new(Waking(lock, sender.into())))]);
        drop(guard);
        let all: Vec<_> = received.try_iter().collect();
        assert_eq!(all, [1, 2, 3, 4, 1, 2, 3].map(|number| (number, 0)));
    }

    #[test]
    fn work_that_adds_more_does_not_nest_the_rest() {
        use std::cell::Cell;
        use std::rc::Rc;

        let lock: &'static Mutex<()> = Box::leak(Box::new(Mutex::new(())));
        let (depth, deepest) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let guard = lock.lock();
        for _ in 0..1000 {
            let (depth, deepest) = (depth.clone(), deepest.clone());
            run(move || {
                depth.set(depth.get() + 1);
                deepest.set(deepest.get().max(depth.get()));
                let again = lock.lock();
                run(|| ());
                drop(again);
                depth.set(depth.get() - 1);
            });
        }
        drop(guard);
        assert_eq!((deepest.get(), Rc::strong_count(&depth)), (1, 1));
    }
}
