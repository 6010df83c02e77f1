//! The map of pages and nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tokio_rdma::RemoteRegion;

use crate::PAGE;

/// The pages that a node lends, as registered with the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Address of the node's listener.
    pub address: SocketAddr,
    /// Number of the first page.
    pub first: u64,
    /// The pages, consecutively.
    pub region: RemoteRegion,
    /// Number of the copy: pages are read from the lowest live one.
    pub replica: u32,
}

/// Why a share, received from a peer, is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The region is not a positive number of pages.
    #[error("region has {len} bytes, not a positive multiple of {PAGE}")]
    Length {
        /// Length of the region.
        len: u64,
    },
    /// The addresses or page numbers overflow.
    #[error("{field}: {first} + {len} exceeds 64 bits")]
    Range {
        /// The overflowing field.
        field: &'static str,
        /// The first number.
        first: u64,
        /// The length.
        len: u64,
    },
}

impl Share {
    /// Returns the numbers of its pages.
    ///
    /// # Errors
    ///
    /// If the share is invalid.
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

    /// Returns the region of a page, if it is part of this share.
    #[must_use]
    pub fn page(&self, number: u64) -> Option<RemoteRegion> {
        let start = number.checked_sub(self.first)?.checked_mul(PAGE as u64)?;
        self.region.slice(start..start.checked_add(PAGE as u64)?).ok()
    }
}

/// The identity of a coordinator. Each start has a new one, because it has no state of earlier
/// ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instance(pub u64);

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A client that writes, from its first change until it has [flushed](crate::Pager::flush).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WriterId(pub u64);

/// All shares by node name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    /// The coordinator of the map.
    pub instance: Instance,
    /// A client died while writing: copies may differ.
    pub unclean: bool,
    /// The shares, validated by the coordinator and again by each receiver.
    pub shares: BTreeMap<String, Share>,
}

/// A client's requirements of the map.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Wanted {
    /// Pages from 0 on; 0: as many as there are.
    #[serde(default)]
    pub pages: u64,
    /// Nodes that have each page.
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
    /// Returns the number of pages from 0 on that at least `copies` nodes have.
    #[must_use]
    pub fn pages(&self, copies: usize) -> u64 {
        // The number of copies changes only where a share begins or ends.
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

    /// Returns whether the map has everything wanted.
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
    fn page_is_found_in_its_share_only() {
        let share = share(10, 2);
        assert_eq!(share.pages(), Ok(10..12));
        assert_eq!(share.page(11).unwrap().addr(), 0x2000);
        assert_eq!(share.page(11).unwrap().len(), PAGE as u64);
        for outside in [0, 9, 12, u64::MAX / PAGE as u64 + 11, u64::MAX] {
            assert_eq!(share.page(outside), None, "{outside}");
        }
    }

    #[test]
    fn invalid_shares_are_refused() {
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
