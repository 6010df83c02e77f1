//! Frames: SENDs with a header as immediate data or, on iWARP devices, which have none, as the last
//! four bytes in big-endian order. The payload is a message, an offer, a change of receives or
//! nothing.
//!
//! ```text
//!  31      29  28  27            14 13             0
//! ┌──────────┬───┬────────────────┬────────────────┐
//! │ kind     │ f │ released       │ done           │   f: `fin_acked`; released, done: counts
//! └──────────┴───┴────────────────┴────────────────┘   since the start, modulo 2^14
//! ```

use crate::Violation;

const COUNT_BITS: u32 = 14;

pub const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;

/// The maximum of an end's receives. A count cannot advance further from one frame to the next.
pub const MAX_RECEIVES: u32 = COUNT_MASK / 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Data,
    /// The location of a message, which the peer must READ.
    Offer,
    Ack,
    Ping,
    /// The end of the sender's messages.
    Fin,
    /// The end of the connection without a clean shutdown.
    Abort,
    /// Part of a message. The next frame continues it: a `Part`, or `Data` with the last bytes.
    Part,
    /// A change of the sender's receives, or without payload, a frame that only uses up a receive.
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

    pub fn has_payload(self) -> bool {
        self.is_message() || self == Self::Resize
    }

    /// Their receives are released when the application has the message.
    pub fn is_message(self) -> bool {
        matches!(self, Self::Data | Self::Part | Self::Offer)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    pub kind: Kind,
    /// True if the sender has received the peer's `Fin`.
    pub fin_acked: bool,
    /// The count of released receives.
    pub released: u32,
    /// The count of fetched or discarded offers.
    pub done: u32,
}

impl Header {
    pub fn encode(self) -> u32 {
        let kind = Kind::ALL.iter().position(|&kind| kind == self.kind).unwrap_or_default() as u32;
        kind << 29
            | u32::from(self.fin_acked) << 28
            | (self.released & COUNT_MASK) << COUNT_BITS
            | (self.done & COUNT_MASK)
    }

    pub fn decode(header: u32) -> Self {
        Self {
            kind: Kind::ALL[(header >> 29) as usize],
            fin_acked: header & (1 << 28) != 0,
            released: header >> COUNT_BITS & COUNT_MASK,
            done: header & COUNT_MASK,
        }
    }
}

pub const TRAILER: usize = 4;

/// Address, length and key.
pub const OFFER_LEN: usize = 20;

/// Requires 1 to `max_message` bytes within the address space.
pub(crate) fn check_offer(addr: u64, len: u64, max_message: u64) -> Result<(), Violation> {
    if len == 0 || addr.checked_add(len).is_none() {
        return Err(Violation::Offer { addr, len });
    }
    if len > max_message {
        return Err(Violation::TooLong { len, allowed: max_message });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let header = random.u32(..);
            assert_eq!(Header::decode(header).encode(), header);
        }
    }

    #[test]
    fn offers_are_not_empty_not_too_long_and_do_not_wrap_around() {
        assert_eq!(check_offer(8, 100, 100), Ok(()));
        assert_eq!(check_offer(8, 101, 100), Err(Violation::TooLong { len: 101, allowed: 100 }));
        assert_eq!(check_offer(8, 0, 100), Err(Violation::Offer { addr: 8, len: 0 }));
        let end = u64::MAX - 9;
        assert_eq!(check_offer(end, 10, 100), Err(Violation::Offer { addr: end, len: 10 }));
    }
}
