//! Memory that users bring.

#![allow(unsafe_code)]

use std::any::Any;
use std::ptr::NonNull;

use super::HostMemory;

/// Owned bytes at an address that does not change when the owner is moved.
///
/// # Safety
///
/// Until the value is dropped, [`base`](Self::base) and [`len`](Self::len) always give the same answer,
/// name initialised memory that nobody else owns, and stay the same when the value is moved.
pub unsafe trait Storage: Any + Send {
    /// First byte; well aligned and not null even if there is none.
    fn base(&mut self) -> NonNull<u8>;

    /// Bytes.
    fn len(&self) -> usize;

    /// True without any byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: S1: the heap buffer of a `Vec` that nobody resizes stays where it is.
unsafe impl Storage for Vec<u8> {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(self.as_mut_slice()).cast()
    }

    fn len(&self) -> usize {
        Self::len(self)
    }
}

// SAFETY: S1: a boxed slice owns its heap memory alone.
unsafe impl Storage for Box<[u8]> {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&mut **self).cast()
    }

    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

// SAFETY: S1: the allocation belongs to the value alone.
unsafe impl Storage for HostMemory {
    fn base(&mut self) -> NonNull<u8> {
        Self::base(self)
    }

    fn len(&self) -> usize {
        Self::len(self)
    }
}
