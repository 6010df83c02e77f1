//! The work of a queue that failed: counted, with the first cause, and the failed parts of each batch.

use std::collections::BTreeMap;

use super::slot::{FailedParts, Slot};
use super::work_request_id::index_of;
use crate::error::{CompletionError, OpErrorKind};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::types::{WcStatus, WorkCompletion};

/// The work of a queue that failed.
pub(super) struct Failures {
    /// Completions that were errors, modulo 2^32.
    failed: AtomicU32,
    /// Flushes among them.
    flushed: AtomicU32,
    /// The first failure since the queue was made that is no flush.
    cause: Mutex<Option<OpErrorKind>>,
    /// Parts of batches that failed, by slot.
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

    /// Counts a completion that is an error.
    #[cold]
    pub(super) fn count(&self, wc: &WorkCompletion, failure: CompletionError) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if wc.status == WcStatus::WR_FLUSH_ERR {
            self.flushed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(qpn = %wc.qpn, wr_id = %wc.wr_id, "flushed");
        } else {
            tracing::warn!(qpn = %wc.qpn, wr_id = %wc.wr_id, status = %wc.status, vendor = wc.vendor_error, "work request failed");
            self.note_cause(OpErrorKind::Completion(failure));
        }
    }

    /// Completions that were errors, modulo 2^32.
    #[inline]
    pub(super) fn failed(&self) -> u32 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Flushes among them.
    pub(super) fn flushed(&self) -> u32 {
        self.flushed.load(Ordering::Relaxed)
    }

    /// Notes why work behind it will be flushed.
    pub(super) fn note_cause(&self, kind: OpErrorKind) {
        lock(&self.cause).get_or_insert(kind);
    }

    /// The first failure that is no flush.
    pub(super) fn cause(&self) -> Option<OpErrorKind> {
        *lock(&self.cause)
    }

    /// Notes why a part of a batch failed that is not its last, with which it ends. Under the lock of posting or of completions:
    /// else a future that is being roused might see it happen.
    #[cold]
    pub(super) fn fail_part<Q>(&self, slot: &Slot<Q>, part: u32, kind: OpErrorKind) {
        lock(&self.parts).entry(index_of(slot.id())).or_default().push((part, kind));
        slot.fail_parts();
    }

    /// Leaves one work request in the slot of a batch that is over; which of the others failed.
    #[inline]
    pub(super) fn end_parts<Q>(&self, slot: &Slot<Q>) -> FailedParts {
        if slot.end_parts() { self.take_parts(slot) } else { FailedParts::new() }
    }

    #[cold]
    fn take_parts<Q>(&self, slot: &Slot<Q>) -> FailedParts {
        lock(&self.parts).remove(&index_of(slot.id())).unwrap_or_default()
    }

    /// Ends the parts before the last of a batch that did not fail, and of which `done` were done, counted from the first.
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

/// Why it is no success, if it is none.
#[inline]
pub(super) fn success(wc: &WorkCompletion) -> Result<&WorkCompletion, OpErrorKind> {
    if wc.status.is_success() { Ok(wc) } else { Err(OpErrorKind::Completion(failure(wc))) }
}

#[cold]
pub(super) fn failure(wc: &WorkCompletion) -> CompletionError {
    let WorkCompletion { status, vendor_error, qpn, .. } = *wc;
    CompletionError { status, vendor_error, qpn, lengths: None }
}
