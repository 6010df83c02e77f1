//! Locks of the standard library with parking_lot's interface, for Miri, which lacks the system
//! call by which parking_lot parks threads.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

pub(crate) use std::sync::{RwLockReadGuard, RwLockWriteGuard};

/// A lock beside its value, because the standard library's has no stable `data_ptr`.
#[derive(Default)]
pub(crate) struct Mutex<T: ?Sized> {
    lock: std::sync::Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: S3: the lock gives one thread at a time access to the value.
unsafe impl<T: ?Sized + Send> Sync for Mutex<T> {}

/// The guard of a [`Mutex`]; `None` while temporarily unlocked.
#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T>(
    &'a Mutex<T>,
    Option<std::sync::MutexGuard<'a, ()>>,
    // Threads may share the guard only if they may share the value.
    PhantomData<&'a mut T>,
);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { lock: std::sync::Mutex::new(()), value: UnsafeCell::new(value) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard(self, Some(locked), PhantomData)
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.lock.try_lock() {
            Ok(guard) => Some(MutexGuard(self, Some(guard), PhantomData)),
            Err(TryLockError::Poisoned(poisoned)) => {
                Some(MutexGuard(self, Some(poisoned.into_inner()), PhantomData))
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Returns the address of the value, whether it is locked or not.
    pub(crate) const fn data_ptr(&self) -> *mut T {
        self.value.get()
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

impl<T> MutexGuard<'_, T> {
    pub(crate) fn unlocked<R>(this: &mut Self, f: impl FnOnce() -> R) -> R {
        this.1 = None;
        let result = f();
        this.1 = this.0.lock().1.take();
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        assert!(self.1.is_some(), "`unlocked` and `wait` lock again before they return");
        // SAFETY: S3: locked until the guard is dropped, which the result does not outlive.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        assert!(self.1.is_some(), "`unlocked` and `wait` lock again before they return");
        // SAFETY: S3: as above; the guard is borrowed exclusively.
        unsafe { &mut *self.0.value.get() }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(std::sync::Condvar);

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(locked) = guard.1.take() {
            guard.1 = Some(self.0.wait(locked).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        if let Some(locked) = guard.1.take() {
            guard.1 =
                Some(self.0.wait_timeout(locked, time).unwrap_or_else(PoisonError::into_inner).0);
        }
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
