//! A piece of a peer's memory.

#![forbid(unsafe_code)]

use std::ops::RangeBounds;

use crate::error::OutOfBounds;
use crate::types::{RemoteAddr, Rkey};

/// A piece of a peer's memory that the peer granted access to.
///
/// It is the only way to aim an operation at remote memory, and a slice of it never reaches beyond it.
/// Whether the grant still holds only the peer's device knows: if not, the operation fails with
/// [`WcStatus::REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR).
///
/// ```
/// use tokio_rdma::RemoteRegion;
/// use tokio_rdma::types::Rkey;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let remote = RemoteRegion::new(0x1000, 4096, Rkey(7));
/// let upper = remote.slice(2048..)?;
/// assert_eq!((upper.addr(), upper.len()), (0x1800, 2048));
/// assert!(remote.slice(4000..5000).is_err());
/// assert_eq!(RemoteRegion::from_bytes(&remote.to_bytes()), Some(remote));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RemoteRegion {
    addr: u64,
    len: u64,
    rkey: Rkey,
}

impl RemoteRegion {
    /// Bytes of the fixed form.
    pub const ENCODED_LEN: usize = 20;

    /// A region as its owner describes it.
    #[must_use]
    pub const fn new(addr: u64, len: u64, rkey: Rkey) -> Self {
        Self { addr, len, rkey }
    }

    /// Address in the peer's registration.
    #[must_use]
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True without any byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The peer's key.
    #[must_use]
    pub const fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// A part of it, in bytes counted from its start.
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

    /// Address, length and key, big-endian, to hand to a peer over any channel.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0; Self::ENCODED_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes
    }

    /// What [`to_bytes`](Self::to_bytes) wrote; `None` if there are not exactly 20 bytes.
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

/// Its fixed form, to be sent as a message.
impl From<RemoteRegion> for bytes::Bytes {
    fn from(region: RemoteRegion) -> Self {
        Self::copy_from_slice(&region.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(reversed.unwrap_err().to_string(), "8..4 is no range within 16 bytes");
        assert!(region.slice(..=u64::MAX).is_err());
    }

    #[test]
    fn a_hostile_region_that_wraps_around_cannot_be_sliced_across_the_end() {
        let region = RemoteRegion::new(u64::MAX - 3, 16, Rkey(7));
        assert!(region.slice(8..).is_err());
    }

    #[test]
    fn encoding_is_twenty_bytes_and_reversible() {
        let region = RemoteRegion::new(0x0102_0304_0506_0708, 9, Rkey(0x0a0b_0c0d));
        assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()), Some(region));
        assert_eq!(RemoteRegion::from_bytes(&[0; 19]), None);
        assert_eq!(RemoteRegion::from_bytes(&[0; 21]), None);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn formats_of_serde_take_it() {
        let region = RemoteRegion::new(u64::MAX, 9, Rkey(0x0a0b_0c0d));
        let text = serde_json::to_string(&region).unwrap();
        assert_eq!(text, r#"{"addr":18446744073709551615,"len":9,"rkey":168496141}"#);
        assert_eq!(serde_json::from_str::<RemoteRegion>(&text).unwrap(), region);
    }
}
