use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use crate::error::LimitError;

pub(super) const FIELD: &str = "bytes of the BufferBudget, with those left for others";

static PROCESS: LazyLock<BufferBudget> = LazyLock::new(|| BufferBudget::new(1 << 30));

/// A limit on the registered bytes of receive, spare and send buffers, shared by all connections
/// whose [settings](super::ConnectionConfig::budget) name it.
///
/// A connection that grows must leave as many bytes free as it then holds, so it gets at most half
/// of the budget. If the configured receive buffers do not fit, it takes shorter ones, or tries
/// again later. If the first buffers do not fit (all, with
/// [`preallocate`](super::ConnectionConfig::preallocate)), a listener refuses the connection with
/// [`RefusalReason::OutOfBuffers`](super::RefusalReason::OutOfBuffers).
///
/// It does not count the first four short send buffers (1.5 KiB per connection), messages that the
/// application keeps after their connection is idle or closed, and long messages, which
/// [`receive_memory`](super::ConnectionConfig::receive_memory) limits.
///
/// ```
/// use tokio_rdma::ConnectionConfig;
/// use tokio_rdma::connection::BufferBudget;
///
/// let device = BufferBudget::new(256 << 20);
/// // One of two listeners on it.
/// let listener = device.part(64 << 20);
/// let config = ConnectionConfig::default().budget(&listener);
/// ```
#[derive(Clone)]
pub struct BufferBudget {
    inner: Arc<Inner>,
}

struct Inner {
    bytes: u64,
    used: AtomicU64,
    refused: AtomicU64,
    whole: Option<BufferBudget>,
}

/// Counters of a [`BufferBudget`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetCounters {
    /// The limit in bytes.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// Requests that this budget has refused, without those that only a [part](BufferBudget::part)
    /// refused.
    pub refused: u64,
}

impl BufferBudget {
    /// Creates a budget of `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self::with(bytes, None)
    }

    /// Creates a budget of at most `bytes`, which count towards this one too.
    #[must_use]
    pub fn part(&self, bytes: u64) -> Self {
        Self::with(bytes, Some(self.clone()))
    }

    /// Returns the default budget of connections, 1 GiB.
    #[must_use]
    pub fn process() -> Self {
        PROCESS.clone()
    }

    fn with(bytes: u64, whole: Option<Self>) -> Self {
        let (used, refused) = Default::default();
        Self { inner: Arc::new(Inner { bytes, used, refused, whole }) }
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> BudgetCounters {
        BudgetCounters {
            bytes: self.inner.bytes,
            used: self.inner.used.load(Ordering::Relaxed),
            refused: self.inner.refused.load(Ordering::Relaxed),
        }
    }

    /// Returns the smallest limit of this budget and those that it is a part of.
    pub(super) fn limit(&self) -> u64 {
        let whole = self.inner.whole.as_ref().map_or(u64::MAX, Self::limit);
        whole.min(self.inner.bytes)
    }

    pub(super) fn has(&self, bytes: u64) -> bool {
        let free = self.inner.bytes.saturating_sub(self.inner.used.load(Ordering::Relaxed));
        bytes <= free && self.inner.whole.as_ref().is_none_or(|whole| whole.has(bytes))
    }

    /// At least `left` must be free afterwards.
    fn take(&self, more: u64, left: u64) -> Result<(), LimitError> {
        let Inner { bytes, used, refused, whole } = &*self.inner;
        let taken = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            let after = used.checked_add(more)?;
            (after.checked_add(left)? <= *bytes).then_some(after)
        });
        if let Err(used) = taken {
            refused.fetch_add(1, Ordering::Relaxed);
            let asked = used.saturating_add(more).saturating_add(left);
            return Err(LimitError { field: FIELD, asked, allowed: *bytes });
        }
        if let Some(whole) = whole {
            whole.take(more, left).inspect_err(|_| self.release_own(more))?;
        }
        Ok(())
    }

    fn release(&self, bytes: u64) {
        self.release_own(bytes);
        if let Some(whole) = &self.inner.whole {
            whole.release(bytes);
        }
    }

    fn release_own(&self, bytes: u64) {
        self.inner.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for BufferBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferBudget")
            .field("bytes", &self.inner.bytes)
            .field("used", &self.inner.used)
            .field("refused", &self.inner.refused)
            .field("whole", &self.inner.whole)
            .finish()
    }
}

/// The bytes that one connection has taken from a budget.
#[derive(Debug)]
pub(super) struct BudgetGuard {
    budget: BufferBudget,
    bytes: u64,
}

impl BudgetGuard {
    pub(super) fn new(budget: &BufferBudget, bytes: u64) -> Result<Self, LimitError> {
        budget.take(bytes, 0)?;
        Ok(Self { budget: budget.clone(), bytes })
    }

    /// Leaves as much for others as the connection then has.
    pub(super) fn grow(&mut self, more: u64) -> Result<(), LimitError> {
        self.budget.take(more, self.bytes.saturating_add(more))?;
        self.bytes += more;
        Ok(())
    }

    pub(super) fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.release(bytes);
    }
}

impl Drop for BudgetGuard {
    fn drop(&mut self) {
        self.budget.release(self.bytes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn refused(asked: u64, allowed: u64) -> LimitError {
        LimitError { field: FIELD, asked, allowed }
    }

    #[test]
    fn connection_takes_no_more_than_it_leaves() {
        let budget = BufferBudget::new(1000);
        let mut one = BudgetGuard::new(&budget, 100).unwrap();
        one.grow(400).unwrap();
        assert_eq!(one.grow(1).unwrap_err(), refused(500 + 1 + 501, 1000));
        let mut two = BudgetGuard::new(&budget, 100).unwrap();
        two.grow(100).unwrap();
        assert_eq!(two.grow(200).unwrap_err(), refused(700 + 200 + 400, 1000));
        assert_eq!(budget.counters(), BudgetCounters { bytes: 1000, used: 700, refused: 2 });
        one.shrink(300);
        two.grow(100).unwrap();
        drop((one, two));
        assert_eq!(budget.counters().used, 0);
    }

    #[test]
    fn first_buffers_may_use_the_whole_budget() {
        let budget = BufferBudget::new(10);
        let all = BudgetGuard::new(&budget, 10).unwrap();
        assert!(!budget.has(1));
        assert_eq!(BudgetGuard::new(&budget, 1).unwrap_err(), refused(11, 10));
        drop(all);
        assert!(budget.has(10) && !budget.has(11));
    }

    #[test]
    fn part_counts_towards_the_whole() {
        let whole = BufferBudget::new(100);
        let (one, two) = (whole.part(80), whole.part(80));
        let first = BudgetGuard::new(&one, 60).unwrap();
        assert_eq!(BudgetGuard::new(&two, 50).unwrap_err(), refused(110, 100));
        assert_eq!((two.counters().used, two.counters().refused), (0, 0));
        assert_eq!((whole.counters().used, whole.counters().refused), (60, 1));
        assert_eq!(BudgetGuard::new(&one, 21).unwrap_err(), refused(81, 80));
        assert!(two.has(40) && !two.has(41));
        drop(first);
        assert_eq!((one.counters().used, whole.counters().used), (0, 0));
    }
}
