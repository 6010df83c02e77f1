#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::free_list::FreeList;
use super::registration::Registration;
use crate::memory::{Buf, BufMut, ExposedSlice};
use crate::types::Sge;
use crate::verbs::PdId;

pub(crate) type SgeList = SmallVec<[Sge; 4]>;

/// Local memory that an operation reads: [`Buf`], [`BufMut`], [`ExposedSlice`], a `Vec` of them as
/// a scatter/gather list, or `()` for no data.
///
/// The operation owns the memory until the device has finished. This trait is sealed.
pub trait Gather: Sealed + Send + Unpin + 'static {}

/// Local memory that an operation writes: [`BufMut`], [`ExposedSlice`], a `Vec` of them, or `()`.
///
/// This trait is sealed.
pub trait Scatter: Gather {
    #[doc(hidden)]
    fn filled(&mut self, len: usize);
}

/// Seals [`Gather`]. The bytes do not move while the value is owned.
pub trait Sealed {
    #[doc(hidden)]
    fn pieces(&self, visit: &mut dyn FnMut(Sge, PdKey));

    /// Returns the element, for types that have exactly one: avoids the visitor.
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

macro_rules! piece {
    ($($buffer:ty, $this:ident => $registration:expr, {$($more:tt)*})*) => {
        $(
            impl Gather for $buffer {}

            impl Sealed for $buffer {
                fn pieces(&self, visit: &mut dyn FnMut(Sge, PdKey)) {
                    let $this = self;
                    visit($this.sge(), key($registration));
                }

                #[inline]
                fn single(&self) -> Option<(Sge, PdKey)> {
                    let $this = self;
                    Some(($this.sge(), key($registration)))
                }

                $($more)*
            }
        )*
    };
}

piece! {
    Buf, this => this.slab().registration(), {}
    BufMut, this => this.slab().registration(), {
        #[inline]
        fn drop_all(buffers: &mut Vec<Self>) {
            while !buffers.is_empty() {
                FreeList::return_last(buffers);
            }
        }
    }
    ExposedSlice, this => this.registration(), {}
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

impl Sealed for () {
    fn pieces(&self, _visit: &mut dyn FnMut(Sge, PdKey)) {}
}

impl Scatter for BufMut {
    fn filled(&mut self, len: usize) {
        self.truncate(len);
    }
}

impl Scatter for ExposedSlice {
    fn filled(&mut self, len: usize) {
        self.truncate(len);
    }
}

impl<B: Scatter + Length> Scatter for Vec<B> {
    fn filled(&mut self, mut len: usize) {
        for buffer in self {
            let take = len.min(buffer.length());
            buffer.filled(take);
            len -= take;
        }
    }
}

impl Scatter for () {
    fn filled(&mut self, _len: usize) {}
}

pub trait Length {
    #[doc(hidden)]
    fn length(&self) -> usize;
}

impl Length for BufMut {
    fn length(&self) -> usize {
        self.len()
    }
}

impl Length for ExposedSlice {
    fn length(&self) -> usize {
        self.len()
    }
}
