//! Locks of the standard library with parking_lot's interface, for Miri, which lacks the system
//! call by which parking_lot parks threads. Under Miri, crates import this crate as `parking_lot`.

#![allow(missing_docs, reason = "compiled under Miri only")]

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard};

#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

/// The guard of a [`Mutex`]; `None` while temporarily unlocked.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(&'a Mutex<T>, Option<std::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(self, Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(MutexGuard(self, Some(guard))),
            Err(TryLockError::Poisoned(poisoned)) => {
                Some(MutexGuard(self, Some(poisoned.into_inner())))
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> MutexGuard<'_, T> {
    pub fn unlocked<R>(this: &mut Self, f: impl FnOnce() -> R) -> R {
        this.1 = None;
        let result = f();
        this.1 = this.0.lock().1.take();
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.1 {
            Some(guard) => guard,
            None => unreachable!("`unlocked` and `wait` lock again before they return"),
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.1 {
            Some(guard) => guard,
            None => unreachable!("`unlocked` and `wait` lock again before they return"),
        }
    }
}

#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(locked) = guard.1.take() {
            guard.1 = Some(self.0.wait(locked).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) {
        if let Some(locked) = guard.1.take() {
            guard.1 =
                Some(self.0.wait_timeout(locked, time).unwrap_or_else(PoisonError::into_inner).0);
        }
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
