#![allow(unsafe_code)]

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::slot::Slot;
use crate::error::OpErrorKind;

/// The exclusive right to one generation of a slot, from posting until the operation takes the
/// result or is abandoned.
///
/// It has the size of a pointer, so that an operation is passed in registers; the slot holds the
/// reference to the work queue. Dropping a claim without ending it leaks both.
#[must_use]
pub(crate) struct Claim<Q>(NonNull<Slot<Q>>);

// SAFETY: C1: a claim is a reference to a slot, which is `Sync`.
unsafe impl<Q: Send + Sync> Send for Claim<Q> {}
// SAFETY: C1: as above.
unsafe impl<Q: Send + Sync> Sync for Claim<Q> {}

impl<Q> Claim<Q> {
    /// # Safety
    ///
    /// `slot` is part of `queue`, and the caller has just claimed it.
    #[inline]
    pub(super) unsafe fn new(queue: &Arc<Q>, slot: &Slot<Q>) -> Self {
        // SAFETY: C1: the caller's promise.
        unsafe { slot.keep_queue(queue.clone()) };
        Self(NonNull::from(slot))
    }

    #[cold]
    pub(crate) fn refused(kind: OpErrorKind) -> Self {
        rdma_provider::debug!(error = %kind, "refused operation; nothing was posted");
        Self(NonNull::from(Box::leak(Box::new(Slot::refused(kind)))))
    }

    /// Copies this claim, for a caller that moves the original while it uses the copy.
    ///
    /// # Safety
    ///
    /// Only one of the two is ended.
    #[inline]
    pub(super) unsafe fn same(&self) -> Self {
        Self(self.0)
    }

    /// # Panics
    ///
    /// If the operation was never posted.
    #[inline]
    pub(super) fn queue(&self) -> &Arc<Q> {
        match self.posted_to() {
            Some(queue) => queue,
            None => unreachable!("a refused operation has no work queue"),
        }
    }

    #[inline]
    pub(super) fn posted_to(&self) -> Option<&Arc<Q>> {
        // SAFETY: C1: this is the claim.
        unsafe { Slot::queue(self) }
    }

    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        if self.posted_to().is_none() { self.outcome(|outcome| outcome.err()) } else { None }
    }

    /// # Safety
    ///
    /// The operation was refused.
    #[cold]
    pub(super) unsafe fn end_refused(self) {
        debug_assert!(self.posted_to().is_none(), "a posted operation was ended as refused");
        // SAFETY: C1: made by `refused`, for this one claim.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    /// The caller passes the slot of the posted operation to
    /// [`Slots::remember_free`](super::slot_table::Slots::remember_free).
    ///
    /// # Safety
    ///
    /// The operation was not [refused](Self::refused).
    #[inline]
    pub(super) unsafe fn end(self) {
        // SAFETY: C1: this is the claim, and ends here. M1: the reference is dropped after the
        // slot's last use.
        let reference = unsafe { self.take_queue() };
        debug_assert!(reference.is_some(), "a refused operation was ended as posted");
        self.free();
        // SAFETY: C1: `new` stored it, because the work was posted.
        drop(unsafe { reference.unwrap_unchecked() });
    }
}

impl<Q> Deref for Claim<Q> {
    type Target = Slot<Q>;

    #[inline]
    fn deref(&self) -> &Slot<Q> {
        // SAFETY: C1: the slot references the queue that contains it and never moves, or it is a
        // separate slot.
        unsafe { self.0.as_ref() }
    }
}
