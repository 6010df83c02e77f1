//! A slot in the hands of its operation.

#![allow(unsafe_code)]

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::slot::Slot;
use crate::error::OpErrorKind;

/// The right to one slot for one life: from posting until the operation has taken the result or is abandoned. No larger than a
/// pointer, so that an operation is handed over in registers; the slot keeps the share of the work queue.
///
/// Dropping a claim without ending it leaks the slot and the share.
#[must_use]
pub(crate) struct Claim<Q>(NonNull<Slot<Q>>);

// SAFETY: C1: a claim is a reference to a slot, which is `Sync`.
unsafe impl<Q: Send + Sync> Send for Claim<Q> {}
// SAFETY: C1: as above.
unsafe impl<Q: Send + Sync> Sync for Claim<Q> {}

impl<Q> Claim<Q> {
    /// # Safety
    ///
    /// `slot` is part of `queue`, and was claimed for this.
    #[inline(always)]
    pub(super) unsafe fn new(queue: &Arc<Q>, slot: &Slot<Q>) -> Self {
        // SAFETY: C1: promised.
        unsafe { slot.keep(queue.clone()) };
        Self(NonNull::from(slot))
    }

    /// A slot of its own for an operation that was never posted.
    #[cold]
    pub(crate) fn refused(kind: OpErrorKind) -> Self {
        tracing::debug!(error = %kind, "operation refused");
        Self(NonNull::from(Box::leak(Box::new(Slot::refused(kind)))))
    }

    /// The same claim, for a caller that takes this one out of its place meanwhile.
    ///
    /// # Safety
    ///
    /// Only one of the two is ended.
    #[inline(always)]
    pub(super) unsafe fn same(&self) -> Self {
        Self(self.0)
    }

    /// Where the work is in flight.
    ///
    /// # Panics
    ///
    /// If it was never posted.
    #[inline(always)]
    pub(super) fn queue(&self) -> &Arc<Q> {
        match self.posted_to() {
            Some(queue) => queue,
            None => unreachable!("complete from the start"),
        }
    }

    /// Where the work is in flight, if it was posted.
    #[inline(always)]
    pub(super) fn posted_to(&self) -> Option<&Arc<Q>> {
        // SAFETY: C1: this is the claim.
        unsafe { Slot::queue(self) }
    }

    /// Why it was never posted, if it was not.
    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        if self.posted_to().is_none() { self.outcome(|outcome| outcome.err()) } else { None }
    }

    /// Ends the claim of an operation that was [refused](Self::refused).
    ///
    /// # Safety
    ///
    /// It was.
    #[cold]
    pub(super) unsafe fn end_refused(self) {
        debug_assert!(self.posted_to().is_none(), "its slot is part of a work queue");
        // SAFETY: C1: made by `refused`, for this one claim.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    /// Frees the slot of work that was posted; the slot is [hinted at](super::slot_table::Slots::hint).
    ///
    /// # Safety
    ///
    /// The operation was not [refused](Self::refused).
    #[inline(always)]
    pub(super) unsafe fn end(self) {
        // SAFETY: C1: this is the claim, and ends here. M1: the share is dropped last, when no reference to the slot is left.
        let share = unsafe { self.let_go() };
        debug_assert!(share.is_some(), "it was posted");
        self.free();
        // SAFETY: C1: `new` put it there, for the work was posted.
        drop(unsafe { share.unwrap_unchecked() });
    }
}

impl<Q> Deref for Claim<Q> {
    type Target = Slot<Q>;

    #[inline(always)]
    fn deref(&self) -> &Slot<Q> {
        // SAFETY: C1: the slot keeps the queue that it is part of, and never moves; or it is a slot of its own.
        unsafe { self.0.as_ref() }
    }
}
