#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::free_list::FreeList;
use super::registration::Registration;
use crate::memory::{Buf, BufMut, ExposedSlice};
use crate::types::Sge;
use crate::verbs::PdId;

pub(crate) type SgeList = SmallVec<[Sge; 4]>;

/// Local memory that an operation reads, and owns until the device has finished: [`Buf`],
/// [`BufMut`], [`ExposedSlice`], a `Vec` of them as a scatter/gather list, or `()` for no data.
/// This trait is sealed.
pub trait Gather: Sealed + Send + Unpin + 'static {}

/// Local memory that an operation writes: [`BufMut`], [`ExposedSlice`], a `Vec` of them, or `()`.
/// This trait is sealed.
pub trait Scatter: Gather {
    /// Returns how many of the first `len` bytes the memory has.
    #[doc(hidden)]
    fn filled(&mut self, len: usize) -> usize;
}

/// Seals [`Gather`]. The bytes do not move while the value is owned.
pub trait Sealed {
    #[doc(hidden)]
    fn pieces(&self, visit: &mut dyn FnMut(Sge, PdKey)) {
        if let Some((sge, pd)) = self.single() {
            visit(sge, pd);
        }
    }

    /// Returns the element, for types that have exactly one.
    #[doc(hidden)]
    #[inline]
    fn single(&self) -> Option<(Sge, PdKey)> {
        None
    }

    #[doc(hidden)]
    #[inline]
    fn drop_all(buffers: &mut Vec<Self>)
    where
        Self: Sized,
    {
        buffers.clear();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PdKey(pub(crate) PdId);

#[inline]
fn key(registration: &Registration) -> PdKey {
    PdKey(registration.pd().id())
}

impl Gather for Buf {}

impl Sealed for Buf {
    #[inline]
    fn single(&self) -> Option<(Sge, PdKey)> {
        Some((self.sge(), key(self.slab().registration())))
    }
}

impl Gather for BufMut {}

impl Sealed for BufMut {
    #[inline]
    fn single(&self) -> Option<(Sge, PdKey)> {
        Some((self.sge(), key(self.slab().registration())))
    }

    #[inline]
    fn drop_all(buffers: &mut Vec<Self>) {
        while !buffers.is_empty() {
            FreeList::return_last(buffers);
        }
    }
}

impl Gather for ExposedSlice {}

impl Sealed for ExposedSlice {
    #[inline]
    fn single(&self) -> Option<(Sge, PdKey)> {
        Some((self.sge(), key(self.registration())))
    }
}

impl<B: Gather> Gather for Vec<B> {}

impl<B: Gather> Sealed for Vec<B> {
    fn pieces(&self, visit: &mut dyn FnMut(Sge, PdKey)) {
        for buffer in self {
            buffer.pieces(visit);
        }
    }
}

impl Gather for () {}

impl Sealed for () {}

impl Scatter for BufMut {
    fn filled(&mut self, len: usize) -> usize {
        self.truncate(len);
        self.len()
    }
}

impl Scatter for ExposedSlice {
    fn filled(&mut self, len: usize) -> usize {
        self.truncate(len);
        self.len()
    }
}

impl<B: Scatter> Scatter for Vec<B> {
    fn filled(&mut self, len: usize) -> usize {
        let mut left = len;
        for buffer in self {
            left -= buffer.filled(left);
        }
        len - left
    }
}

impl Scatter for () {
    fn filled(&mut self, _len: usize) -> usize {
        0
    }
}
