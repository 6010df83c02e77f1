//! Local sides of operations: what a device may read, and what it may write.

#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::registration::Registration;
use crate::memory::{Buf, BufMut, ExposedSlice};
use crate::types::Sge;
use crate::verbs::PdId;

/// Scatter/gather list of usual length without an allocation.
pub(crate) type SgeList = SmallVec<[Sge; 4]>;

/// What an operation can read its data from: [`Buf`], [`BufMut`], [`ExposedSlice`], and `Vec`s of them as
/// scatter/gather lists. `()` stands for no data at all.
///
/// The operation owns it until the device is done. This trait is sealed.
pub trait Gather: Sealed + Send + Unpin + 'static {}

/// What an operation can put its data into: [`BufMut`], [`ExposedSlice`], `Vec`s of them, and `()`.
///
/// This trait is sealed.
pub trait Scatter: Gather {
    /// Cuts the view down to the first `len` bytes, those that a message filled.
    #[doc(hidden)]
    fn filled(&mut self, len: usize);
}

/// Keeps the promise of [`Gather`] within this crate: the bytes stay where they are while it is owned.
pub trait Sealed {
    /// Calls `visit` for each piece with its registration's protection domain.
    #[doc(hidden)]
    fn pieces(&self, visit: &mut dyn FnMut(Sge, PdKey));

    /// The only piece, if there is exactly one: spares the visitor.
    #[doc(hidden)]
    #[inline]
    fn single(&self) -> Option<(Sge, PdKey)> {
        None
    }
}

/// Opaque key of a protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PdKey(pub(crate) PdId);

#[inline]
fn key(registration: &Registration) -> PdKey {
    PdKey(registration.pd().id())
}

macro_rules! piece {
    ($($buffer:ty, $this:ident => $registration:expr;)*) => {
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
            }
        )*
    };
}

piece! {
    Buf, this => this.slab().registration();
    BufMut, this => this.slab().registration();
    ExposedSlice, this => this.registration();
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
    /// Pieces beyond the message stay, with no bytes.
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

/// Bytes of one piece.
pub trait Length {
    /// Bytes.
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
