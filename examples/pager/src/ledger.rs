//! Verification of page contents under concurrent reads and writes.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::{Content, PAGE, Pager, PagerError};

/// The versions written to each page. A READ must return a version between the last one complete
/// before the READ began and the last one begun before it ended.
#[derive(Debug)]
pub struct Ledger {
    content: Content,
    pages: Vec<Versions>,
}

#[derive(Debug, Default)]
struct Versions {
    /// Serialises the writers of a page.
    writing: Mutex<()>,
    begun: AtomicU64,
    done: AtomicU64,
}

/// Why the verification of a page failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Verdict {
    /// The page could not be accessed.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The page has the wrong content.
    #[error("page {page} is WRONG: expected a version in {versions:?}, found {what}")]
    Wrong {
        /// The page.
        page: u64,
        /// The permitted versions.
        versions: RangeInclusive<u64>,
        /// The content found.
        what: String,
    },
}

impl Ledger {
    /// Creates a ledger of pages 0 to `pages`, which have not been written to.
    #[must_use]
    pub fn new(content: Content, pages: u64) -> Self {
        Self { content, pages: (0..pages).map(|_| Versions::default()).collect() }
    }

    /// Reads and verifies a page.
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
    /// [`Verdict::Pager`]; the page is unchanged then.
    pub async fn write(&self, pager: &Pager, page: u64) -> Result<(), Verdict> {
        let versions = self.versions(page)?;
        let _alone = versions.writing.lock().await;
        let version = versions.done.load(Ordering::Acquire) + 1;
        versions.begun.store(version, Ordering::Release);
        pager.write(page, 0, &self.content.of(page, version)).await?;
        versions.done.store(version, Ordering::Release);
        Ok(())
    }

    /// Restores the initial content of all pages. No other task may access them during or after
    /// this.
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

    /// Verifies that `bytes` are the last version of a page. No task may write meanwhile.
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
            (Some(version), _) => format!("old version {version}"),
            (None, Some(other)) => format!("page {other}"),
            (None, None) => "content that was never written as a whole".to_owned(),
        };
        Err(Verdict::Wrong { page, versions, what })
    }

    fn versions(&self, page: u64) -> Result<&Versions, PagerError> {
        let pages = self.pages.len() as u64;
        let known = usize::try_from(page).ok().and_then(|page| self.pages.get(page));
        known.ok_or(PagerError::NoPage { page, pages })
    }
}
