#![allow(unsafe_code)]

use std::any::Any;
use std::ptr::NonNull;

use super::HostMemory;

/// Owned bytes at a stable address.
///
/// # Safety
///
/// Until the value is dropped, even if it is moved, [`base`](Self::base) and [`len`](Self::len)
/// return the same values. They describe initialised memory without any other owner.
pub unsafe trait Storage: Any + Send {
    /// Returns the first byte: aligned and not null, even if `len` is 0.
    fn base(&mut self) -> NonNull<u8>;

    /// Returns the number of bytes.
    fn len(&self) -> usize;

    /// Returns true if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: S1: a `Vec` owns its heap buffer, which does not move unless the `Vec` is resized.
unsafe impl Storage for Vec<u8> {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(self.as_mut_slice()).cast()
    }

    fn len(&self) -> usize {
        Self::len(self)
    }
}

// SAFETY: S1: a boxed slice owns its heap memory exclusively.
unsafe impl Storage for Box<[u8]> {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&mut **self).cast()
    }

    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

// SAFETY: S1: the value owns its allocation exclusively.
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
    fn storages_keep_their_address_when_moved() {
        fn named<S: Storage>(mut storage: S) -> (usize, bool, Vec<u8>) {
            let before = storage.base();
            let mut moved = Box::new(storage);
            let (len, is_empty, base) = (moved.len(), moved.is_empty(), moved.base());
            assert_eq!(base, before, "a move of the owner does not move the bytes");
            // SAFETY: S1: the storage owns `len` initialised bytes, which nothing else accesses.
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
