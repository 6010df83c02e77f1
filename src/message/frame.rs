//! What travels beside and in a SEND: the immediate is the header, the payload is the message and nothing else.
//!
//! ```text
//!  31      29  28  27            14 13             0
//! ┌──────────┬───┬────────────────┬────────────────┐
//! │ kind     │ h │ released       │ done           │   released, done: counts since the start, modulo 2^14
//! └──────────┴───┴────────────────┴────────────────┘   h: the receiver's Fin was heard
//! ```

use super::error::Violation;
use crate::memory::RemoteRegion;
use crate::types::Imm;

/// Bits of a count in a header. Counts never differ by more than receives, of which there are less than half as many.
const COUNT_BITS: u32 = 14;

/// Takes the low bits of a count.
pub(super) const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;

/// Most receives that counts can tell apart, with a bit to spare.
pub(super) const MAX_RECEIVES: u32 = COUNT_MASK / 2;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A message: the payload, from nothing to a receive.
    Data,
    /// A message that waits in the sender's memory to be READ: the payload says where.
    Offer,
    /// Nothing but the counts.
    Ack,
    /// Asks for an `Ack`.
    Ping,
    /// No message comes after it.
    Fin,
    /// The sender is gone, and has not finished.
    Abort,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Data, Self::Offer, Self::Ack, Self::Ping, Self::Fin, Self::Abort];

    /// True if it carries a message, and thus keeps its receive until that is consumed.
    pub(super) fn is_message(self) -> bool {
        matches!(self, Self::Data | Self::Offer)
    }
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// The sender knows that the receiver has finished.
    pub(super) heard: bool,
    /// Receives posted again so far, low bits.
    pub(super) released: u32,
    /// Offers done so far, low bits.
    pub(super) done: u32,
}

impl Header {
    pub(super) fn encode(self) -> Imm {
        let kind = Kind::ALL.iter().position(|&kind| kind == self.kind).unwrap_or_default() as u32;
        Imm(kind << 29
            | u32::from(self.heard) << 28
            | (self.released & COUNT_MASK) << COUNT_BITS
            | (self.done & COUNT_MASK))
    }

    /// A peer's header.
    pub(super) fn decode(imm: Imm) -> Result<Self, Violation> {
        let &kind =
            Kind::ALL.get((imm.0 >> 29) as usize).ok_or(Violation::Header { header: imm.0 })?;
        let heard = imm.0 & (1 << 28) != 0;
        Ok(Self {
            kind,
            heard,
            released: imm.0 >> COUNT_BITS & COUNT_MASK,
            done: imm.0 & COUNT_MASK,
        })
    }
}

/// Bytes of an offer: a [`RemoteRegion`].
pub(super) const OFFER_LEN: usize = RemoteRegion::ENCODED_LEN;

/// A peer's offer: 1 to `max_message` bytes that lie in one piece in its address space.
pub(super) fn decode_offer(payload: &[u8], max_message: u64) -> Result<RemoteRegion, Violation> {
    let region =
        RemoteRegion::from_bytes(payload).ok_or(Violation::FrameLength { len: payload.len() })?;
    if region.is_empty() || region.addr().checked_add(region.len()).is_none() {
        return Err(Violation::Offer { addr: region.addr(), len: region.len() });
    }
    if region.len() > max_message {
        return Err(Violation::TooLong { len: region.len(), allowed: max_message });
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Rkey;

    #[test]
    fn headers_are_reversible_and_anything_else_is_refused() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let header =
                Header { kind, heard: number % 2 == 0, released: COUNT_MASK - 5, done: 77 };
            assert_eq!(Header::decode(header.encode()), Ok(header));
        }
        for bad in [6 << 29, 7 << 29, u32::MAX] {
            assert_eq!(Header::decode(Imm(bad)), Err(Violation::Header { header: bad }));
        }
    }

    #[test]
    fn whatever_decodes_encodes_to_the_same_bits() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..if cfg!(miri) { 1_000 } else { 100_000 } {
            let imm = Imm(random.u32(..));
            if let Ok(header) = Header::decode(imm) {
                assert_eq!(header.encode(), imm);
            }
        }
    }

    #[test]
    fn offers_are_not_empty_not_too_long_and_do_not_wrap_around() {
        let offer =
            |addr, len| decode_offer(&RemoteRegion::new(addr, len, Rkey(1)).to_bytes(), 100);
        assert_eq!(offer(8, 100).map(|region| region.len()), Ok(100));
        assert_eq!(offer(8, 101), Err(Violation::TooLong { len: 101, allowed: 100 }));
        assert_eq!(offer(8, 0), Err(Violation::Offer { addr: 8, len: 0 }));
        assert_eq!(offer(u64::MAX - 9, 10), Err(Violation::Offer { addr: u64::MAX - 9, len: 10 }));
        assert_eq!(decode_offer(&[0; 19], 100), Err(Violation::FrameLength { len: 19 }));
    }
}
