//! Frames: SENDs with a header as immediate data. The payload is a message, an offer or a change of
//! receives alone; other frames have none.
//!
//! ```text
//!  31      29  28  27            14 13             0
//! ┌──────────┬───┬────────────────┬────────────────┐
//! │ kind     │ f │ released       │ done           │   f: `fin_acked`; released, done: counts
//! └──────────┴───┴────────────────┴────────────────┘   since the start, modulo 2^14
//! ```

use super::error::Violation;
use crate::memory::RemoteRegion;
use crate::types::Imm;

/// The number of bits of `released` and `done`.
const COUNT_BITS: u32 = 14;

pub(super) const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;

/// The maximum number of receives of a side, and so the maximum by which a count advances from one
/// frame to the next. A larger difference is a violation.
pub(super) const MAX_RECEIVES: u32 = COUNT_MASK / 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A message.
    Data,
    /// The location of a message that the peer must READ.
    Offer,
    /// An announcement of counts.
    Ack,
    /// A request for an `Ack`.
    Ping,
    /// The end of the sender's messages.
    Fin,
    /// The end of the connection without a clean shutdown.
    Abort,
    /// Part of a message that the next frame continues: a `Part`, or `Data` with the last bytes.
    Part,
    /// A change of the sender's receives. Without payload, it only uses up a receive, which is not
    /// posted again.
    Resize,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Data,
        Self::Offer,
        Self::Ack,
        Self::Ping,
        Self::Fin,
        Self::Abort,
        Self::Part,
        Self::Resize,
    ];

    /// Returns true if frames of this kind may have a payload.
    pub(super) fn has_payload(self) -> bool {
        self.is_message() || self == Self::Resize
    }

    /// Returns true for messages. Their receives count as released only when the service has
    /// received the message; receives of other frames do at once.
    pub(super) fn is_message(self) -> bool {
        matches!(self, Self::Data | Self::Part | Self::Offer)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// True if the sender has received the peer's `Fin`.
    pub(super) fin_acked: bool,
    /// Number of receives that the sender has released for new frames; the low bits.
    pub(super) released: u32,
    /// Number of the peer's offers that the sender has fetched or discarded; the low bits.
    pub(super) done: u32,
}

impl Header {
    pub(super) fn encode(self) -> Imm {
        let kind = Kind::ALL.iter().position(|&kind| kind == self.kind).unwrap_or_default() as u32;
        Imm(kind << 29
            | u32::from(self.fin_acked) << 28
            | (self.released & COUNT_MASK) << COUNT_BITS
            | (self.done & COUNT_MASK))
    }

    /// Decodes a header. All values are valid.
    pub(super) fn decode(imm: Imm) -> Self {
        Self {
            kind: Kind::ALL[(imm.0 >> 29) as usize],
            fin_acked: imm.0 & (1 << 28) != 0,
            released: imm.0 >> COUNT_BITS & COUNT_MASK,
            done: imm.0 & COUNT_MASK,
        }
    }
}

/// The payload length of an offer, an encoded [`RemoteRegion`].
pub(super) const OFFER_LEN: usize = RemoteRegion::ENCODED_LEN;

/// Decodes the payload of an offer. The message must have 1 to `max_message` bytes and must not
/// exceed the address space.
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
    fn headers_round_trip() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let header =
                Header { kind, fin_acked: number % 2 == 0, released: COUNT_MASK - 5, done: 77 };
            assert_eq!(Header::decode(header.encode()), header);
        }
    }

    #[test]
    fn decoded_headers_encode_to_the_same_bits() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..if cfg!(miri) { 1_000 } else { 100_000 } {
            let imm = Imm(random.u32(..));
            assert_eq!(Header::decode(imm).encode(), imm);
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
