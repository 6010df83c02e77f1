//! The header of DC packets, between RC's extension headers and the payload.

use rdma_provider::types::Qpn;

use crate::roce::packet::WireError;

/// An initiator's session number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionNumber {
    /// Drawn when the initiator is created; distinguishes initiators that reuse a queue pair
    /// number.
    pub(crate) incarnation: u32,
    pub(crate) count: u32,
}

impl SessionNumber {
    /// Returns the next number. `random` starts a new incarnation when the count overflows.
    pub(crate) const fn next(self, random: u32) -> Self {
        match self.count.checked_add(1) {
            Some(count) => Self { count, ..self },
            None => Self { incarnation: random, count: 0 },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The sending queue pair or target; the BTH contains only the receiver.
    pub(crate) source: Qpn,
    pub(crate) session: SessionNumber,
    /// The target's number of the session; 0 before ACCEPT.
    pub(crate) cookie: u32,
}

impl Header {
    /// In bytes.
    pub(crate) const LEN: usize = 16;

    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        let Self { source, session: SessionNumber { incarnation, count }, cookie } = *self;
        for word in [source.0 & Qpn::MAX.0, incarnation, count, cookie] {
            out.extend_from_slice(&word.to_be_bytes());
        }
    }

    /// Splits the bytes into the header and the payload.
    pub(crate) fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let (words, payload) =
            bytes.split_first_chunk::<{ Self::LEN }>().ok_or(WireError::Truncated)?;
        let word = |at: usize| {
            u32::from_be_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]])
        };
        let session = SessionNumber { incarnation: word(4), count: word(8) };
        // The upper byte is reserved and ignored.
        Ok((Self { source: Qpn(word(0) & Qpn::MAX.0), session, cookie: word(12) }, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_in_16_bytes() {
        let session = SessionNumber { incarnation: 0x0102_0304, count: u32::MAX };
        let header = Header { source: Qpn(0xab_cdef), session, cookie: 7 };
        let mut image = Vec::new();
        header.append_to(&mut image);
        assert_eq!(image.len(), Header::LEN);
        image.extend_from_slice(b"payload");
        assert_eq!(Header::parse(&image), Ok((header, &b"payload"[..])));
        image[0] = 0xff;
        assert_eq!(
            Header::parse(&image),
            Ok((header, &b"payload"[..])),
            "reserved bits are ignored"
        );
        for len in 0..Header::LEN {
            assert_eq!(Header::parse(&image[..len]), Err(WireError::Truncated));
        }
    }

    #[test]
    fn session_number_overflow_starts_new_incarnation() {
        let number = SessionNumber { incarnation: 1, count: u32::MAX - 1 };
        let next = number.next(9);
        assert_eq!(next, SessionNumber { incarnation: 1, count: u32::MAX });
        assert_eq!(next.next(9), SessionNumber { incarnation: 9, count: 0 });
    }
}
