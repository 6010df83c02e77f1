//! Locks that know when a thread holds none of them.
//!
//! A lock is not reentrant, and a `tracing` subscriber may use any object of the program. Events of
//! [`event!`](crate::event) therefore reach it when the thread holds no lock: at once, or at the
//! release of the last one. All locks of the workspace are of this module, so that no function
//! needs to know which locks its callers hold.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;
use std::time::Duration;

#[cfg(not(miri))]
use parking_lot as imp;

#[cfg(miri)]
use crate::std_locks as imp;

/// A lock that gives one thread at a time access to its value.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

/// Access to the value of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    // Dropped first: events run after the release.
    guard: imp::MutexGuard<'a, T>,
    _section: Section,
}

/// A lock for several readers or one writer.
#[derive(Debug, Default)]
pub struct RwLock<T>(imp::RwLock<T>);

/// Access to the value of a [`RwLock`], for a reader or a writer.
#[derive(Debug)]
pub struct RwLockGuard<G> {
    // Dropped first: events run after the release.
    guard: G,
    _section: Section,
}

/// A condition that threads wait for under a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(imp::Condvar);

/// A section of code in which this thread counts as holding a lock. Each guard of a lock is one.
#[derive(Debug)]
pub struct Section(PhantomData<*const ()>);

type Events = VecDeque<Event>;

enum Event {
    Run(Box<dyn FnOnce()>),
    /// Separate, so that waking allocates nothing.
    Wake(Waker),
}

impl Event {
    /// Contains a panic.
    fn run(self) {
        match self {
            Self::Run(event) => caught_panic(event),
            Self::Wake(waker) => caught_panic(|| waker.wake()),
        };
    }
}

thread_local! {
    /// The number of this thread's sections, and [`WAITING`].
    static STATE: Cell<u32> = const { Cell::new(0) };
    /// Events of this thread that wait for the release of its last lock. Has no destructor, so that
    /// destructors of other thread-local variables can still use it; [`AtExit`] frees its memory.
    static EVENTS: RefCell<ManuallyDrop<Events>> =
        const { RefCell::new(ManuallyDrop::new(VecDeque::new())) };
    static AT_EXIT: AtExit = const { AtExit };
}

/// Events whose memory a thread keeps, so that usually none is allocated.
const KEPT: usize = 16;

/// Frees the memory of [`EVENTS`] when the thread exits.
struct AtExit;

impl Drop for AtExit {
    fn drop(&mut self) {
        EVENTS.with_borrow_mut(|events| events.shrink_to_fit());
    }
}

/// The bit of [`STATE`] that is set while events wait.
const WAITING: u32 = 1 << 31;

impl Section {
    /// Begins a section, which ends when it is dropped.
    #[inline]
    #[must_use]
    pub fn begin() -> Self {
        // `LocalKey::set` would be a function call.
        STATE.with(|state| state.set(state.get() + 1));
        Self(PhantomData)
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        let left = STATE.with(|state| {
            state.set(state.get() - 1);
            state.get()
        });
        if left == WAITING {
            run_events();
        }
    }
}

/// Returns the number of locks that this thread holds, with other [sections](Section).
#[inline]
#[must_use]
pub fn held() -> u32 {
    STATE.get() & !WAITING
}

/// Runs `event` when this thread holds no lock: at once, or at the release of the last one.
pub fn when_none_is_held(event: impl FnOnce() + 'static) {
    if held() == 0 {
        caught_panic(event);
    } else {
        defer(Event::Run(Box::new(event)));
    }
}

/// Wakes `waker` when this thread holds no lock, see [`when_none_is_held`].
pub fn wake_when_none_is_held(waker: Waker) {
    let event = Event::Wake(waker);
    if held() == 0 {
        event.run();
    } else {
        defer(event);
    }
}

fn defer(event: Event) {
    STATE.set(STATE.get() | WAITING);
    EVENTS.with_borrow_mut(|events| {
        if events.capacity() == 0 {
            // Registers the destructor, unless the thread is exiting.
            let _ = AT_EXIT.try_with(|_| ());
        }
        events.push_back(event);
    });
}

#[cold]
fn run_events() {
    STATE.set(0);
    // One by one: an event may take locks, add events, and run those that are left.
    while let Some(event) = EVENTS.with_borrow_mut(|events| events.pop_front()) {
        event.run();
    }
    EVENTS.with_borrow_mut(|events| {
        if events.capacity() > KEPT {
            events.shrink_to(KEPT);
        }
    });
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

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { guard: self.0.lock(), _section: Section::begin() }
    }

    /// Takes the lock unless a thread has it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.0.try_lock()?;
        Some(MutexGuard { guard, _section: Section::begin() })
    }

    /// Returns the value, which no thread can have locked.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Returns the address of the value, whether it is locked or not.
    pub fn data_ptr(&self) -> *mut T {
        self.0.data_ptr()
    }
}

impl<T> MutexGuard<'_, T> {
    /// Releases the lock while `run` runs.
    pub fn unlocked<R>(this: &mut Self, run: impl FnOnce() -> R) -> R {
        let released = Released::begin();
        imp::MutexGuard::unlocked(&mut this.guard, || {
            released.run_events();
            run()
        })
    }

    /// Releases the lock while waiting events run, if it is the only one that this thread holds.
    /// Threads that sleep with a lock must call this before.
    pub fn run_events(this: &mut Self) {
        if STATE.get() == WAITING | 1 {
            Self::unlocked(this, || {});
        }
    }
}

/// The time during which a guard does not hold its lock.
struct Released(());

impl Released {
    fn begin() -> Self {
        STATE.set(STATE.get() - 1);
        Self(())
    }

    fn run_events(&self) {
        if STATE.get() == WAITING {
            run_events();
        }
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        STATE.set(STATE.get() + 1);
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> RwLock<T> {
    /// Creates an unlocked lock.
    pub const fn new(value: T) -> Self {
        Self(imp::RwLock::new(value))
    }

    /// Waits for access as one of several readers.
    #[inline]
    pub fn read(&self) -> RwLockGuard<imp::RwLockReadGuard<'_, T>> {
        RwLockGuard { guard: self.0.read(), _section: Section::begin() }
    }

    /// Waits for access as the only writer.
    #[inline]
    pub fn write(&self) -> RwLockGuard<imp::RwLockWriteGuard<'_, T>> {
        RwLockGuard { guard: self.0.write(), _section: Section::begin() }
    }
}

impl<G: Deref> Deref for RwLockGuard<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for RwLockGuard<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

impl Condvar {
    /// Creates a condition without waiting threads.
    #[must_use]
    pub const fn new() -> Self {
        Self(imp::Condvar::new())
    }

    /// Waits, without the lock, for a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.0.wait(&mut guard.guard);
    }

    /// Waits, without the lock, for a notification, and at most for `time`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        let _ = self.0.wait_for(&mut guard.guard, time);
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    fn log() -> (impl Fn(u32), Receiver<(u32, u32)>) {
        let (sender, receiver) = channel();
        let emit = move |number| {
            let sender: Sender<_> = sender.clone();
            when_none_is_held(move || sender.send((number, held())).unwrap());
        };
        (emit, receiver)
    }

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
        (0..100).for_each(|_| when_none_is_held(|| ()));
        assert!(EVENTS.with_borrow(|events| events.capacity()) >= 100);
        drop(guard);
        assert!(EVENTS.with_borrow(|events| events.capacity()) <= KEPT);
        drop(AtExit);
        assert_eq!(EVENTS.with_borrow(|events| events.capacity()), 0);
    }

    #[test]
    fn holder_of_one_lock_runs_waiting_events_without_it() {
        let (emit, received) = log();
        let (lock, other) = (Mutex::new(()), Mutex::new(()));
        let mut guard = lock.lock();
        emit(1);
        let second = other.lock();
        MutexGuard::run_events(&mut guard);
        assert!(received.try_recv().is_err(), "another lock is held");
        drop(second);
        MutexGuard::run_events(&mut guard);
        assert_eq!((received.try_recv(), held()), (Ok((1, 0)), 1));
    }

    #[test]
    fn panic_of_an_event_does_not_affect_later_ones() {
        let (emit, received) = log();
        let lock = Mutex::new(());
        let guard = lock.lock();
        when_none_is_held(|| panic!("a test"));
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
        when_none_is_held(move || {
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
}
