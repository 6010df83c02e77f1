//! Private data of rejections, by a listener or its application.

#![warn(missing_docs)]

use std::fmt;

use crate::handshake::{Handshake, Service};

/// The reason why a `Listener` refuses a valid request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The listener has reached `ListenerConfig::max_connections`.
    ListenerFull,
    /// The peer's address has reached `ListenerConfig::max_connections_per_source`.
    SourceFull,
    /// The listener shuts down.
    ShuttingDown,
    /// The listener has this service; the request asks for another.
    OtherService(Service),
    /// The listener's `BufferBudget` is used up.
    OutOfBuffers,
}

impl RefusalReason {
    const KIND: u8 = 2;

    /// Returns true if the listener may accept a later request like this one.
    #[must_use]
    pub const fn is_temporary(self) -> bool {
        match self {
            Self::ListenerFull | Self::SourceFull | Self::ShuttingDown | Self::OutOfBuffers => true,
            Self::OtherService(_) => false,
        }
    }

    /// Encodes the private data: magic, version, kind, code, zero.
    pub fn encode(self) -> Vec<u8> {
        let code = match self {
            Self::ListenerFull => 1,
            Self::SourceFull => 2,
            Self::ShuttingDown => 3,
            Self::OtherService(Service::Messages) => 4,
            Self::OtherService(Service::Bytes) => 5,
            Self::OutOfBuffers => 6,
        };
        [&Handshake::MAGIC[..], &[Handshake::VERSION, Self::KIND, code, 0]].concat()
    }

    /// Decodes private data; `None` if it is not a refusal.
    pub fn decode(private_data: &[u8]) -> Option<Self> {
        let (magic, rest) = private_data.split_first_chunk::<4>()?;
        let [Handshake::VERSION, Self::KIND, code, padding @ ..] = rest else { return None };
        let padded = !padding.is_empty() && padding.iter().all(|&byte| byte == 0);
        match (*magic == Handshake::MAGIC && padded, code) {
            (true, 1) => Some(Self::ListenerFull),
            (true, 2) => Some(Self::SourceFull),
            (true, 3) => Some(Self::ShuttingDown),
            (true, 4) => Some(Self::OtherService(Service::Messages)),
            (true, 5) => Some(Self::OtherService(Service::Bytes)),
            (true, 6) => Some(Self::OutOfBuffers),
            _ => None,
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ListenerFull => {
                "the listener has reached its limit ListenerConfig::max_connections"
            }
            Self::SourceFull => {
                "the listener has reached its limit ListenerConfig::max_connections_per_source \
                 for this address"
            }
            Self::ShuttingDown => "the listener shuts down",
            Self::OtherService(Service::Messages) => {
                "the listener carries messages; connect with Connection"
            }
            Self::OtherService(Service::Bytes) => {
                "the listener carries byte streams; connect with RdmaStream"
            }
            Self::OutOfBuffers => {
                "the listener's buffer budget is used up (ConnectionConfig::budget)"
            }
        })
    }
}

/// The maximum of private data in a rejection, in bytes.
pub const MAX_REJECT_DATA: usize = 148;

///
/// ```text
///  0        4         5      6          7
/// ┌────────┬─────────┬──────┬──────────┬──────┐
/// │ "tRDM" │ version │ 1    │ user len │ zero │ user bytes
/// └────────┴─────────┴──────┴──────────┴──────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rejection<'a> {
    /// User data.
    pub user_data: &'a [u8],
}

impl<'a> Rejection<'a> {
    const LEN: usize = 8;
    /// Maximum length of user data.
    pub const MAX_USER_DATA: usize = MAX_REJECT_DATA - Self::LEN;
    const KIND: u8 = 1;

    /// Encodes a rejection; `None` above [`MAX_USER_DATA`](Self::MAX_USER_DATA) bytes.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let len = self.user_data.len();
        if len > Self::MAX_USER_DATA {
            return None;
        }
        let mut bytes = Vec::with_capacity(Self::LEN + len);
        bytes.extend_from_slice(&Handshake::MAGIC);
        bytes.extend_from_slice(&[Handshake::VERSION, Self::KIND, len as u8, 0]);
        bytes.extend_from_slice(self.user_data);
        Some(bytes)
    }

    /// Decodes private data; `None` if it is not a rejection.
    pub fn decode(private_data: &'a [u8]) -> Option<Self> {
        let (magic, rest) = private_data.split_first_chunk::<4>()?;
        let (&[version, kind, user_len, zero], rest) = rest.split_first_chunk()?;
        let (user_data, padding) = rest.split_at_checked(user_len.into())?;
        let known = *magic == Handshake::MAGIC
            && (version, kind, zero) == (Handshake::VERSION, Self::KIND, 0);
        let padded = padding.iter().all(|&byte| byte == 0);
        (known && padded).then_some(Self { user_data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_rejection_decodes_to_user_data_of_the_same_length() {
        for len in [0, 1, 7, Rejection::MAX_USER_DATA] {
            let user_data: Vec<u8> = (0..len).map(|at| (at % 3) as u8).collect();
            let mut bytes = Rejection { user_data: &user_data }.encode().unwrap();
            bytes.resize(MAX_REJECT_DATA, 0);
            assert_eq!(Rejection::decode(&bytes).unwrap().user_data, user_data);
            bytes[4] += 1;
            assert_eq!(Rejection::decode(&bytes), None, "another version");
        }
        assert_eq!(Rejection { user_data: &[0; 141] }.encode(), None);
        let hello =
            Handshake { buffer_size: 8192, receives: 68, max_message: 1 << 30, grows: false };
        let refusal = RefusalReason::ListenerFull.encode();
        let hello = hello.encode(b"").unwrap();
        for other in [&b""[..], b"tRDM", &[0; MAX_REJECT_DATA], &refusal, &hello] {
            assert_eq!(Rejection::decode(other), None, "{other:?}");
        }
    }
}
