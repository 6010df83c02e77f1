//! Private data of connection requests and answers.

#![warn(missing_docs)]

use std::fmt;

use crate::flow::RESERVE;
use crate::frame::{MAX_RECEIVES, OFFER_LEN};
use crate::window::{FIRST_SIZE, first_receives};

/// The receive limits announced while connecting.
///
/// ```text
///  0        4         5       6          7      8             12         16          24
/// ┌────────┬─────────┬───────┬──────────┬──────┬─────────────┬──────────┬───────────┐
/// │ "tRDM" │ version │ flags │ user len │ zero │ buffer size │ receives │ max msg   │ user bytes
/// └────────┴─────────┴───────┴──────────┴──────┴─────────────┴──────────┴───────────┘
/// ```
///
/// Flag 1 stands for [`Service::Bytes`], flag 2 for [`grows`](Self::grows). Numbers are big-endian.
/// The user data has a length because private data is padded with zeros. A request has space for 32
/// bytes of user data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handshake {
    /// Bytes of each receive buffer; may exceed `max_message`.
    pub buffer_size: u32,
    /// Receives, including four for control frames.
    pub receives: u32,
    /// Longest accepted message, in bytes.
    pub max_message: u64,
    /// True if the sender starts with at most eight receives of 384 bytes and announces changes.
    /// `buffer_size` and `receives` are then maximums; while it shrinks, it may post eight more
    /// receives.
    pub grows: bool,
}

/// The service of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Service {
    /// Messages: `Connection` and `Listener`.
    #[default]
    Messages,
    /// Bytes: `RdmaStream` and `RdmaListener`.
    Bytes,
}

impl Service {
    fn flags(self) -> u8 {
        match self {
            Self::Messages => 0,
            Self::Bytes => 1,
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "messages",
            Self::Bytes => "byte streams",
        })
    }
}

impl Handshake {
    /// Encoded length without user data.
    pub const LEN: usize = 24;

    /// The only protocol version.
    pub const VERSION: u8 = 3;

    /// Maximum length of user data.
    pub const MAX_USER_DATA: usize = u8::MAX as usize;

    /// The first bytes of all private data.
    pub const MAGIC: [u8; 4] = *b"tRDM";

    const GROWS: u8 = 2;

    /// Encodes the handshake of a connection that carries messages, with user data.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::UserData`] above [`MAX_USER_DATA`](Self::MAX_USER_DATA) bytes.
    pub fn encode(&self, user: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        self.encode_for(Service::Messages, user)
    }

    /// Encodes the handshake like [`encode`](Self::encode), for `service`.
    ///
    /// # Errors
    ///
    /// As for `encode`.
    pub fn encode_for(&self, service: Service, user: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        let too_long = HandshakeError::UserData { len: user.len(), allowed: Self::MAX_USER_DATA };
        let user_len = u8::try_from(user.len()).map_err(|_| too_long)?;
        let mut bytes = Vec::with_capacity(Self::LEN + user.len());
        bytes.extend_from_slice(&Self::MAGIC);
        let flags = service.flags() | if self.grows { Self::GROWS } else { 0 };
        bytes.extend_from_slice(&[Self::VERSION, flags, user_len, 0]);
        bytes.extend_from_slice(&self.buffer_size.to_be_bytes());
        bytes.extend_from_slice(&self.receives.to_be_bytes());
        bytes.extend_from_slice(&self.max_message.to_be_bytes());
        bytes.extend_from_slice(user);
        Ok(bytes)
    }

    /// Returns the number of first receives, including four for control frames, and their size.
    pub fn first_receives(&self) -> (u32, u32) {
        if self.grows {
            (first_receives(self.receives), FIRST_SIZE.min(self.buffer_size))
        } else {
            (self.receives, self.buffer_size)
        }
    }

    /// Decodes the handshake of a connection that carries messages, and its user data. Only zero
    /// padding may follow.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`] for any other bytes.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), HandshakeError> {
        Self::decode_for(Service::Messages, bytes)
    }

    /// Decodes the handshake like [`decode`](Self::decode), for `service`.
    ///
    /// # Errors
    ///
    /// As for `decode`.
    pub fn decode_for(service: Service, bytes: &[u8]) -> Result<(Self, &[u8]), HandshakeError> {
        let truncated = HandshakeError::Truncated { len: bytes.len() };
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(truncated)?;
        if *magic != Self::MAGIC {
            return Err(HandshakeError::Magic { found: *magic });
        }
        let (&[version, flags, user_len, zero], rest) =
            rest.split_first_chunk().ok_or(truncated)?;
        if version != Self::VERSION {
            return Err(HandshakeError::Version { theirs: version, ours: Self::VERSION });
        }
        let theirs = match flags & !Self::GROWS {
            0 => Service::Messages,
            1 => Service::Bytes,
            _ => return Err(HandshakeError::Reserved { flags, zero }),
        };
        if zero != 0 {
            return Err(HandshakeError::Reserved { flags, zero });
        }
        if theirs != service {
            return Err(HandshakeError::Service { theirs, ours: service });
        }
        let (buffer_size, rest) = rest.split_first_chunk().ok_or(truncated)?;
        let (receives, rest) = rest.split_first_chunk().ok_or(truncated)?;
        let (max_message, rest) = rest.split_first_chunk().ok_or(truncated)?;
        let handshake = Self {
            buffer_size: u32::from_be_bytes(*buffer_size),
            receives: u32::from_be_bytes(*receives),
            max_message: u64::from_be_bytes(*max_message),
            grows: flags & Self::GROWS != 0,
        };
        let (user, padding) = rest.split_at_checked(user_len.into()).ok_or(truncated)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(HandshakeError::Trailing { bytes: padding.len() });
        }
        let in_range = |field, value, min, max| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(HandshakeError::Range { field, value, min, max })
            }
        };
        in_range("receive buffer size", handshake.buffer_size.into(), OFFER_LEN as u64, 1 << 31)?;
        in_range("receives", handshake.receives.into(), (RESERVE + 1).into(), MAX_RECEIVES.into())?;
        Ok((handshake, user))
    }
}

/// A defect of a peer's [`Handshake`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// Too short.
    Truncated {
        /// Bytes.
        len: usize,
    },
    /// Not a handshake.
    Magic {
        /// First bytes.
        found: [u8; 4],
    },
    /// Different versions.
    Version {
        /// Peer's version.
        theirs: u8,
        /// Own version.
        ours: u8,
    },
    /// The two ends have different services.
    Service {
        /// Peer's service.
        theirs: Service,
        /// Own service.
        ours: Service,
    },
    /// Reserved bits set.
    Reserved {
        /// Flags.
        flags: u8,
        /// Byte that must be zero.
        zero: u8,
    },
    /// Out of range.
    Range {
        /// Name of the value.
        field: &'static str,
        /// Value.
        value: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// Nonzero bytes after the handshake.
    Trailing {
        /// Their number.
        bytes: usize,
    },
    /// User data too long for the handshake or its private data.
    UserData {
        /// Bytes.
        len: usize,
        /// Maximum.
        allowed: usize,
    },
}

impl HandshakeError {
    /// Returns true if the data is not a handshake of any version.
    pub const fn is_foreign(&self) -> bool {
        matches!(self, Self::Magic { .. } | Self::Truncated { .. })
    }
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { len: 0 } | Self::Magic { found: [0, 0, 0, 0] } => {
                f.write_str("the peer sent no handshake")
            }
            Self::Truncated { len } => {
                write!(f, "the peer's handshake is truncated to {len} bytes")
            }
            Self::Magic { found } => {
                write!(
                    f,
                    "the peer's private data is not a handshake: it starts with \"{}\"",
                    found.escape_ascii()
                )
            }
            Self::Version { theirs, ours } => {
                write!(
                    f,
                    "handshake versions do not match: {ours} here, {theirs} at the peer; use the \
                     same release of tokio-rdma on both sides"
                )
            }
            Self::Service { theirs, ours } => {
                write!(
                    f,
                    "the peer's connection carries {theirs}, this side's {ours}; use Connection \
                     and Listener, or RdmaStream and RdmaListener, on both sides"
                )
            }
            Self::Reserved { flags, zero } => {
                write!(
                    f,
                    "the peer's handshake sets reserved bits: flags {flags:#x}, reserved byte \
                     {zero:#x}"
                )
            }
            Self::Range { field, value, min, max } => {
                write!(
                    f,
                    "invalid value in the peer's handshake: {field} is {value}, allowed: {min} to \
                     {max}"
                )
            }
            Self::Trailing { bytes } => {
                write!(f, "the peer's handshake is followed by {bytes} bytes that are not all zero")
            }
            Self::UserData { len, allowed } => {
                write!(f, "user_data too long: {len} bytes, at most {allowed} fit in the handshake")
            }
        }
    }
}

impl std::error::Error for HandshakeError {}

impl From<HandshakeError> for std::io::Error {
    fn from(error: HandshakeError) -> Self {
        let kind = match error {
            HandshakeError::UserData { .. } => std::io::ErrorKind::InvalidInput,
            _ => std::io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Handshake =
        Handshake { buffer_size: 8192, receives: 68, max_message: 1 << 30, grows: false };

    #[test]
    fn encoded_handshake_decodes_with_user_data_and_padding() {
        let mut bytes = HELLO.encode(b"token").unwrap();
        assert_eq!(bytes.len(), Handshake::LEN + 5);
        assert_eq!(Handshake::decode(&bytes), Ok((HELLO, &b"token"[..])));
        bytes.resize(196, 0);
        assert_eq!(Handshake::decode(&bytes), Ok((HELLO, &b"token"[..])));
        let grows = Handshake { grows: true, ..HELLO };
        let bytes = grows.encode(b"token").unwrap();
        assert_eq!(Handshake::decode(&bytes), Ok((grows, &b"token"[..])));
        assert_eq!(
            HELLO.encode(&[0; 256]),
            Err(HandshakeError::UserData { len: 256, allowed: 255 })
        );
    }

    #[test]
    fn truncated_or_altered_handshakes_are_refused() {
        let bytes = HELLO.encode(b"token").unwrap();
        for len in 0..bytes.len() {
            assert_eq!(Handshake::decode(&bytes[..len]), Err(HandshakeError::Truncated { len }));
        }
        let with = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            Handshake::decode(&bytes).unwrap_err()
        };
        assert_eq!(with(0, b'T'), HandshakeError::Magic { found: *b"TRDM" });
        assert_eq!(with(4, 1), HandshakeError::Version { theirs: 1, ours: 3 });
        let other = HandshakeError::Service { theirs: Service::Bytes, ours: Service::Messages };
        assert_eq!(with(5, 1), other);
        assert_eq!(with(5, 4), HandshakeError::Reserved { flags: 4, zero: 0 });
        assert_eq!(with(7, 1), HandshakeError::Reserved { flags: 0, zero: 1 });
        assert_eq!(with(6, 4), HandshakeError::Trailing { bytes: 1 });
    }

    #[test]
    fn out_of_range_sizes_are_refused() {
        let refused =
            |handshake: Handshake| match Handshake::decode(&handshake.encode(b"").unwrap()) {
                Err(HandshakeError::Range { field, .. }) => field,
                other => panic!("{other:?}"),
            };
        assert_eq!(refused(Handshake { buffer_size: 19, ..HELLO }), "receive buffer size");
        assert_eq!(refused(Handshake { receives: 4, ..HELLO }), "receives");
        assert_eq!(refused(Handshake { receives: 8192, ..HELLO }), "receives");
        for max_message in [0, 8191, u64::MAX] {
            let handshake = Handshake { max_message, ..HELLO };
            assert_eq!(
                Handshake::decode(&handshake.encode(b"").unwrap()),
                Ok((handshake, &b""[..])),
                "any longest message is one"
            );
        }
    }

    #[test]
    fn decoded_handshakes_encode_to_the_same_bytes() {
        let mut taken = 0;
        for seed in 0..200_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = HELLO.encode(b"0123456789").unwrap();
            bytes.truncate(random.usize(..bytes.len() + 1));
            for _ in 0..random.usize(..4) {
                if let Some(at) = (!bytes.is_empty()).then(|| random.usize(..bytes.len())) {
                    bytes[at] = random.u8(..);
                }
            }
            if let Ok((handshake, user)) = Handshake::decode(&bytes) {
                let again = handshake.encode(user).unwrap();
                assert_eq!(bytes[..again.len()], again);
                taken += 1;
            }
        }
        assert!(taken > 1_000, "only {taken} decoded");
    }
}
