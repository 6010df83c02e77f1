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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_storage_names_its_own_bytes() {
        fn named<S: Storage>(mut storage: S) -> (usize, bool, Vec<u8>) {
            let before = storage.base();
            let mut moved = Box::new(storage);
            let (len, is_empty, base) = (moved.len(), moved.is_empty(), moved.base());
            assert_eq!(base, before, "it stays when its owner moves");
            // SAFETY: S1: the storage names so many initialised bytes, which nothing else reaches.
            (len, is_empty, unsafe { std::slice::from_raw_parts(base.as_ptr(), len) }.to_vec())
        }
        for bytes in [vec![], vec![7], vec![1, 2, 3]] {
            let expected = (bytes.len(), bytes.is_empty(), bytes.clone());
            assert_eq!(named(bytes.clone()), expected);
            assert_eq!(named(bytes.into_boxed_slice()), expected);
        }
        for len in [0, 1, 5000] {
            assert_eq!(named(HostMemory::zeroed(len).unwrap()), (len, len == 0, vec![0; len]));
        }
    }
}
