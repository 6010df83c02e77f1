//! Locks that know when a thread holds none of them.
//!
//! The release of a thread's last lock runs the work that waits in [`later`]. All locks of the
//! workspace are of this module, except those within Tokio, so that no function needs to know which
//! locks its callers hold.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

#[cfg(not(miri))]
use parking_lot as imp;

#[cfg(miri)]
use crate::std_locks as imp;

use crate::later;

/// A lock that gives one thread at a time access to its value.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

/// Access to the value of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    // Dropped first: the work that waits runs after the release.
    guard: imp::MutexGuard<'a, T>,
    _section: Section,
}

/// A lock for several readers or one writer.
#[derive(Debug, Default)]
pub struct RwLock<T>(imp::RwLock<T>);

/// Access to the value of a [`RwLock`], for a reader or a writer.
#[derive(Debug)]
pub struct RwLockGuard<G> {
    // Dropped first: the work that waits runs after the release.
    guard: G,
    _section: Section,
}

/// A condition that threads wait for under a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(imp::Condvar);

/// A section of code in which this thread counts as holding a lock. Each guard of a lock is one.
#[derive(Debug)]
pub struct Section(PhantomData<*const ()>);

thread_local! {
    /// The number of this thread's sections, and [`WAITING`].
    static STATE: Cell<u32> = const { Cell::new(0) };
}

/// The bit of [`STATE`] that is set while work of [`later`] waits.
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
            later::run_all();
        }
    }
}

/// Returns the number of locks that this thread holds, with other [sections](Section).
#[inline]
#[must_use]
pub fn held() -> u32 {
    STATE.get() & !WAITING
}

/// Returns whether work of [`later`] waits for the release of this thread's last lock.
pub(crate) fn is_work_waiting() -> bool {
    STATE.get() & WAITING != 0
}

/// Makes the release of this thread's last lock run the work of [`later`].
pub(crate) fn note_later() {
    STATE.set(STATE.get() | WAITING);
}

/// Clears [`WAITING`] before the work of [`later`] runs. Only work that is added meanwhile triggers
/// another run.
pub(crate) fn clear_waiting() {
    STATE.set(0);
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
            released.run_later();
            run()
        })
    }

    /// Releases the lock while the work of [`later`] runs, if it is the only lock that this thread
    /// holds. Threads that sleep with a lock must call this before.
    pub fn run_later(this: &mut Self) {
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

    fn run_later(&self) {
        if STATE.get() == WAITING {
            later::run_all();
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
