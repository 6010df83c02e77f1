#![forbid(unsafe_code)]

use std::ops::RangeBounds;

use crate::error::OutOfBounds;
use crate::types::{RemoteAddr, Rkey};

/// A region of a peer's memory, to which the peer granted access. Slices stay within the region. If
/// the grant is revoked, operations fail with
/// [`WcStatus::REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR).
///
/// ```
/// use tokio_rdma::RemoteRegion;
/// use tokio_rdma::types::Rkey;
///
/// let remote = RemoteRegion::new(0x1000, 4096, Rkey(7));
/// let upper = remote.slice(2048..)?;
/// assert_eq!((upper.addr(), upper.len()), (0x1800, 2048));
/// assert!(remote.slice(4000..5000).is_err());
/// assert_eq!(RemoteRegion::from_bytes(&remote.to_bytes()), Some(remote));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RemoteRegion {
    addr: u64,
    len: u64,
    rkey: Rkey,
}

impl RemoteRegion {
    /// Length in bytes of the encoded form.
    pub const ENCODED_LEN: usize = 20;

    /// Creates a region from the values that its owner published.
    #[must_use]
    pub const fn new(addr: u64, len: u64, rkey: Rkey) -> Self {
        Self { addr, len, rkey }
    }

    /// Returns the address in the peer's registration.
    #[must_use]
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the peer's key.
    #[must_use]
    pub const fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// Returns a part of the region; offsets count from its start.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if the range ends before it starts or reaches beyond the region.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Self, OutOfBounds> {
        let (start, len) = OutOfBounds::resolve(range, self.len)?;
        let addr = self.addr.checked_add(start).ok_or(OutOfBounds {
            offset: start,
            len,
            size: self.len,
        })?;
        Ok(Self { addr, len, rkey: self.rkey })
    }

    /// Encodes address, length and key, big-endian, for transfer by any channel.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0; Self::ENCODED_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes
    }

    /// Decodes [`to_bytes`](Self::to_bytes). Returns `None` unless there are exactly 20 bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (addr, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let rkey: &[u8; 4] = rest.try_into().ok()?;
        Some(Self {
            addr: u64::from_be_bytes(*addr),
            len: u64::from_be_bytes(*len),
            rkey: Rkey(u32::from_be_bytes(*rkey)),
        })
    }

    pub(crate) const fn remote_addr(&self) -> RemoteAddr {
        RemoteAddr { addr: self.addr, rkey: self.rkey }
    }
}

impl From<RemoteRegion> for bytes::Bytes {
    fn from(region: RemoteRegion) -> Self {
        Self::copy_from_slice(&region.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows S3.
    #[test]
    fn slices_stay_within_the_region() {
        let region = RemoteRegion::new(0x1000, 16, Rkey(7));
        assert_eq!(region.slice(4..8).unwrap(), RemoteRegion::new(0x1004, 4, Rkey(7)));
        assert_eq!(region.slice(..).unwrap(), region);
        assert_eq!(region.slice(16..).unwrap().len(), 0);
        assert_eq!(region.slice(8..17).unwrap_err(), OutOfBounds { offset: 8, len: 9, size: 16 });
        assert!(region.slice(17..).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "that is the case under test")]
        let reversed = region.slice(8..4);
        assert_eq!(
            reversed.unwrap_err().to_string(),
            "invalid range 8..4 in a memory of 16 bytes: the end precedes the start"
        );
        assert!(region.slice(..=u64::MAX).is_err());
    }

    // Shows S3.
    #[test]
    fn slice_of_a_region_that_wraps_around_is_refused() {
        let region = RemoteRegion::new(u64::MAX - 3, 16, Rkey(7));
        assert!(region.slice(8..).is_err());
    }

    // Shows S4.
    #[test]
    fn encoding_is_20_bytes_and_reversible() {
        let region = RemoteRegion::new(0x0102_0304_0506_0708, 9, Rkey(0x0a0b_0c0d));
        assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()), Some(region));
        assert_eq!(RemoteRegion::from_bytes(&[0; 19]), None);
        assert_eq!(RemoteRegion::from_bytes(&[0; 21]), None);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn region_is_serialised_by_serde() {
        let region = RemoteRegion::new(u64::MAX, 9, Rkey(0x0a0b_0c0d));
        let text = serde_json::to_string(&region).unwrap();
        assert_eq!(text, r#"{"addr":18446744073709551615,"len":9,"rkey":168496141}"#);
        assert_eq!(serde_json::from_str::<RemoteRegion>(&text).unwrap(), region);
    }
}
