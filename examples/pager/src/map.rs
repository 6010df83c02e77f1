//! Who has which pages.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tokio_rdma::RemoteRegion;

use crate::PAGE;

/// Pages that a node lends: what it registers with the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Where its listener is.
    pub address: SocketAddr,
    /// Number of the first page.
    pub first: u64,
    /// The pages, one after the other.
    pub region: RemoteRegion,
    /// Which copy of them this is: pages are read from the lowest that lives.
    pub replica: u32,
}

/// Why a share cannot be. It comes from a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// Its memory is not a number of pages.
    #[error("region: {len} bytes are not one or more pages of {PAGE}")]
    Length {
        /// Bytes.
        len: u64,
    },
    /// Its memory, or its pages, have no numbers.
    #[error("{field}: {len} from {first} on are more than there are numbers")]
    Range {
        /// Which.
        field: &'static str,
        /// The first.
        first: u64,
        /// How many.
        len: u64,
    },
}

impl Share {
    /// Numbers of its pages.
    ///
    /// # Errors
    ///
    /// If there cannot be such a share.
    pub fn pages(&self) -> Result<Range<u64>, ShareError> {
        let (first, len) = (self.first, self.region.len());
        if len == 0 || !len.is_multiple_of(PAGE as u64) {
            return Err(ShareError::Length { len });
        }
        let range = |field, first: u64, len| {
            first.checked_add(len).ok_or(ShareError::Range { field, first, len })
        };
        range("region", self.region.addr(), len)?;
        Ok(first..range("pages", first, len / PAGE as u64)?)
    }

    /// Where a page is, if it is one of these.
    #[must_use]
    pub fn page(&self, number: u64) -> Option<RemoteRegion> {
        let start = number.checked_sub(self.first)?.checked_mul(PAGE as u64)?;
        self.region.slice(start..start.checked_add(PAGE as u64)?).ok()
    }
}

/// Which coordinator it is: each that is started has a number of its own, as it knows nothing of what those before it knew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instance(pub u64);

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A client that writes, from when it begins until it has [flushed](crate::Pager::flush).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WriterId(pub u64);

/// All shares, by the name of their node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    /// Of which coordinator.
    pub instance: Instance,
    /// A client has begun to write and was not heard of any more: copies may differ.
    pub unclean: bool,
    /// Each of them has been checked, by the coordinator and again by whoever gets them from there.
    pub shares: BTreeMap<String, Share>,
}

/// What a client needs the map to have.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Wanted {
    /// Pages, from 0 on; 0: as many as there are.
    #[serde(default)]
    pub pages: u64,
    /// Nodes that have each of them.
    #[serde(default = "one")]
    pub copies: usize,
}

fn one() -> usize {
    1
}

impl Default for Wanted {
    fn default() -> Self {
        Self { pages: 0, copies: one() }
    }
}

impl Map {
    /// Pages from 0 on that at least `copies` nodes have.
    #[must_use]
    pub fn pages(&self, copies: usize) -> u64 {
        // Copies change where a share begins or ends, and nowhere else.
        let mut changes = BTreeMap::<u64, isize>::new();
        for pages in self.shares.values().filter_map(|share| share.pages().ok()) {
            *changes.entry(pages.start).or_default() += 1;
            *changes.entry(pages.end).or_default() -= 1;
        }
        let (mut there, mut end) = (0_isize, 0);
        for (at, change) in changes {
            if there.cast_unsigned() < copies && at > 0 {
                break;
            }
            (there, end) = (there + change, at);
        }
        end
    }

    /// Has all that is wanted.
    #[must_use]
    pub fn has(&self, wanted: Wanted) -> bool {
        self.pages(wanted.copies.max(1)) >= wanted.pages.max(1)
    }
}

#[cfg(test)]
mod tests {
    use tokio_rdma::types::Rkey;

    use super::*;

    fn share(first: u64, pages: u64) -> Share {
        let region = RemoteRegion::new(0x1000, pages * PAGE as u64, Rkey(1));
        Share { address: ([127, 0, 0, 1], 1).into(), first, region, replica: 0 }
    }

    fn map(shares: &[(u64, u64)]) -> Map {
        let named = |(number, &(first, pages)): (usize, &(u64, u64))| {
            (number.to_string(), share(first, pages))
        };
        let shares = shares.iter().enumerate().map(named).collect();
        Map { instance: Instance(1), unclean: false, shares }
    }

    #[test]
    fn pages_are_counted_up_to_the_first_that_has_too_few_copies() {
        for (shares, once, twice) in [
            (&[][..], 0, 0),
            (&[(0, 8)], 8, 0),
            (&[(1, 8)], 0, 0),
            (&[(0, 8), (8, 8)], 16, 0),
            (&[(0, 8), (9, 8)], 8, 0),
            (&[(0, 8), (0, 8)], 8, 8),
            (&[(0, 8), (0, 4)], 8, 4),
            (&[(0, 8), (4, 8)], 12, 0),
            (&[(0, 8), (4, 8), (0, 4), (8, 9)], 17, 12),
        ] {
            let map = map(shares);
            assert_eq!((map.pages(1), map.pages(2)), (once, twice), "{shares:?}");
            assert_eq!(map.has(Wanted::default()), once > 0);
            assert!(map.has(Wanted { pages: once, copies: 1 }) || once == 0);
            assert!(!map.has(Wanted { pages: twice + 1, copies: 2 }));
        }
    }

    #[test]
    fn a_page_is_found_in_its_share_only() {
        let share = share(10, 2);
        assert_eq!(share.pages(), Ok(10..12));
        assert_eq!(share.page(11).unwrap().addr(), 0x2000);
        assert_eq!(share.page(11).unwrap().len(), PAGE as u64);
        for outside in [0, 9, 12, u64::MAX / PAGE as u64 + 11, u64::MAX] {
            assert_eq!(share.page(outside), None, "{outside}");
        }
    }

    #[test]
    fn shares_that_cannot_be_are_refused() {
        let with = |first, addr, len| Share {
            first,
            region: RemoteRegion::new(addr, len, Rkey(1)),
            ..share(0, 1)
        };
        for len in [0, 1, 4095, 4097] {
            assert_eq!(with(0, 0, len).pages(), Err(ShareError::Length { len }));
        }
        assert!(matches!(
            with(u64::MAX, 0, 4096).pages(),
            Err(ShareError::Range { field: "pages", .. })
        ));
        assert!(matches!(
            with(0, u64::MAX, 4096).pages(),
            Err(ShareError::Range { field: "region", .. })
        ));
    }
}
