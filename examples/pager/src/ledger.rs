//! Whether pages hold what was written to them, with many tasks that read and write at once.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::{Content, PAGE, Pager, PagerError};

/// What was written, by version. A page that is read must be one that was whole between the two moments: no older one than
/// the last that was there before, and none of which nobody had begun to write.
#[derive(Debug)]
pub struct Ledger {
    content: Content,
    pages: Vec<Versions>,
}

#[derive(Debug, Default)]
struct Versions {
    /// One task writes at a time, so that versions come in order.
    writing: Mutex<()>,
    begun: AtomicU64,
    done: AtomicU64,
}

/// Why a page is not verified.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Verdict {
    /// There was none.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// It is not what it has to be.
    #[error("page {page} is WRONG: not one of its versions {versions:?}, but {what}")]
    Wrong {
        /// The page.
        page: u64,
        /// Those it may have had.
        versions: RangeInclusive<u64>,
        /// What it is.
        what: String,
    },
}

impl Ledger {
    /// Of pages 0 to `pages`, which nobody has written to.
    #[must_use]
    pub fn new(content: Content, pages: u64) -> Self {
        Self { content, pages: (0..pages).map(|_| Versions::default()).collect() }
    }

    /// Reads a page and looks whether it is right.
    ///
    /// # Errors
    ///
    /// [`Verdict`].
    pub async fn read(&self, pager: &Pager, page: u64) -> Result<(), Verdict> {
        let versions = self.versions(page)?;
        let mut bytes = [0; PAGE];
        let done = versions.done.load(Ordering::Acquire);
        pager.read(page, 0, &mut bytes).await?;
        let possible = done..=versions.begun.load(Ordering::Acquire);
        self.check(page, &bytes, possible)
    }

    /// Writes the next version of a page.
    ///
    /// # Errors
    ///
    /// [`Verdict::Pager`]; nothing was changed then.
    pub async fn write(&self, pager: &Pager, page: u64) -> Result<(), Verdict> {
        let versions = self.versions(page)?;
        let _alone = versions.writing.lock().await;
        let version = versions.done.load(Ordering::Acquire) + 1;
        versions.begun.store(version, Ordering::Release);
        pager.write(page, 0, &self.content.of(page, version)).await?;
        versions.done.store(version, Ordering::Release);
        Ok(())
    }

    /// Writes to all pages what was there at first. Nobody reads or writes meanwhile, or afterwards.
    ///
    /// # Errors
    ///
    /// [`Verdict::Pager`].
    pub async fn restore(&self, pager: &Pager) -> Result<(), Verdict> {
        for (page, versions) in (0..).zip(&self.pages) {
            if versions.begun.load(Ordering::Acquire) > 0 {
                pager.write(page, 0, &self.content.of(page, 0)).await?;
            }
        }
        Ok(pager.flush().await?)
    }

    /// Looks whether these bytes are the last version of a page. Nobody writes meanwhile.
    ///
    /// # Errors
    ///
    /// [`Verdict::Wrong`].
    pub fn is_last(&self, page: u64, bytes: &[u8; PAGE]) -> Result<(), Verdict> {
        let last = self.versions(page)?.done.load(Ordering::Acquire);
        self.check(page, bytes, last..=last)
    }

    fn check(
        &self,
        page: u64,
        bytes: &[u8; PAGE],
        versions: RangeInclusive<u64>,
    ) -> Result<(), Verdict> {
        if versions.clone().any(|version| self.content.of(page, version) == *bytes) {
            return Ok(());
        }
        let old =
            (0..*versions.start()).rev().find(|&version| self.content.of(page, version) == *bytes);
        let other =
            || (0..self.pages.len() as u64).find(|&page| self.content.of(page, 0) == *bytes);
        let what = match (old, other()) {
            (Some(version), _) => format!("the old version {version}"),
            (None, Some(other)) => format!("page {other}"),
            (None, None) => "nothing that was ever written as a whole".to_owned(),
        };
        Err(Verdict::Wrong { page, versions, what })
    }

    fn versions(&self, page: u64) -> Result<&Versions, PagerError> {
        let pages = self.pages.len() as u64;
        let known = usize::try_from(page).ok().and_then(|page| self.pages.get(page));
        known.ok_or(PagerError::NoPage { page, pages })
    }
}
