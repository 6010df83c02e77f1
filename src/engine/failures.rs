//! The failed work of a queue: counters, first cause, failed parts of batches.

use std::collections::BTreeMap;

use super::slot::{FailedParts, Slot};
use super::work_request_id::index_of;
use crate::error::{CompletionError, OpErrorKind};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::types::{WcStatus, WorkCompletion};

pub(super) struct Failures {
    failed: AtomicU32,
    flushed: AtomicU32,
    /// First failure since the queue was created that is not a flush.
    cause: Mutex<Option<Box<OpErrorKind>>>,
    parts: Mutex<BTreeMap<u32, FailedParts>>,
}

impl Failures {
    pub(super) fn new() -> Self {
        Self {
            failed: AtomicU32::new(0),
            flushed: AtomicU32::new(0),
            cause: Mutex::new(None),
            parts: Mutex::new(BTreeMap::new()),
        }
    }

    #[cold]
    pub(super) fn count(&self, wc: &WorkCompletion, failure: CompletionError) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if wc.status == WcStatus::WR_FLUSH_ERR {
            self.flushed.fetch_add(1, Ordering::Relaxed);
            rdma_provider::debug!(qpn = %wc.qpn, wr_id = %wc.wr_id, "work request flushed");
        } else {
            rdma_provider::warn!(
                qpn = %wc.qpn,
                wr_id = %wc.wr_id,
                status = %wc.status,
                vendor_error = wc.vendor_error,
                "work request failed"
            );
            self.note_cause(OpErrorKind::Completion(failure));
        }
    }

    #[inline]
    pub(super) fn failed(&self) -> u32 {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn flushed(&self) -> u32 {
        self.flushed.load(Ordering::Relaxed)
    }

    pub(super) fn note_cause(&self, kind: OpErrorKind) {
        lock(&self.cause).get_or_insert_with(|| Box::new(kind));
    }

    pub(super) fn cause(&self) -> Option<OpErrorKind> {
        lock(&self.cause).as_deref().copied()
    }

    /// Records the failure of a part other than the last of its batch. Requires `WorkQueue::state`
    /// or of the completion queue, because `wake_to_repoll` would
    /// mistake the new flag for an abandonment.
    #[cold]
    pub(super) fn fail_part<Q>(&self, slot: &Slot<Q>, part: u32, kind: OpErrorKind) {
        lock(&self.parts).entry(index_of(slot.id())).or_default().push((part, kind));
        slot.fail_parts();
    }

    #[inline]
    pub(super) fn end_parts<Q>(&self, slot: &Slot<Q>) -> FailedParts {
        if slot.end_parts() { self.take_parts(slot) } else { FailedParts::new() }
    }

    #[cold]
    fn take_parts<Q>(&self, slot: &Slot<Q>) -> FailedParts {
        lock(&self.parts).remove(&index_of(slot.id())).unwrap_or_default()
    }

    /// Fails the parts before the last one that have not failed, except the first `done`, which
    /// have completed.
    pub(super) fn fail_parts_from<Q>(&self, slot: &Slot<Q>, done: u32, kind: OpErrorKind) {
        let mut failed: Vec<u32> = match lock(&self.parts).get(&index_of(slot.id())) {
            Some(failed) => failed.iter().map(|&(part, _)| part).collect(),
            None => Vec::new(),
        };
        failed.sort_unstable();
        for part in (done..slot.parts() - 1).filter(|part| failed.binary_search(part).is_err()) {
            self.fail_part(slot, part, kind);
        }
    }
}

#[inline]
pub(super) fn success(wc: &WorkCompletion) -> Result<&WorkCompletion, OpErrorKind> {
    if wc.status.is_success() { Ok(wc) } else { Err(OpErrorKind::Completion(failure(wc))) }
}

#[cold]
pub(super) fn failure(wc: &WorkCompletion) -> CompletionError {
    let WorkCompletion { status, vendor_error, qpn, .. } = *wc;
    CompletionError { status, vendor_error, qpn, lengths: None }
}
