//! The messages between client and server.
//!
//! ```text
//! request   number: 8  kind: 1  GET, DELETE: key    PUT: key length: 2, key, value
//! answer    number: 8  kind: 1  see `Answer`
//! ```
//!
//! Numbers are little-endian. The last key or value extends to the end of the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::error::{ProtocolError, Refusal};
use crate::table::Versioned;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    Get(&'a [u8]),
    Put(&'a [u8], &'a [u8]),
    Delete(&'a [u8]),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The result of GET.
    Found(Versioned),
    /// The result of GET and DELETE: the key is absent.
    Absent,
    /// The result of PUT and DELETE: the new version.
    Done(u64),
    /// The table is unchanged.
    Refused(Refusal),
}

/// Number and kind.
const HEADER: usize = 9;

/// The maximum length of a request or answer without its key and value.
pub(crate) const OVERHEAD: usize = HEADER + 16;

const GET: u8 = 1;
const PUT: u8 = 2;
const DELETE: u8 = 3;

const FOUND: u8 = 1;
const ABSENT: u8 = 2;
const DONE: u8 = 3;
const KEY_LENGTH: u8 = 4;
const VALUE_LENGTH: u8 = 5;
const FULL: u8 = 6;

impl<'a> Request<'a> {
    pub(crate) fn encode(&self, number: u64) -> Bytes {
        match *self {
            Self::Get(key) => message(number, GET, &[key]),
            Self::Delete(key) => message(number, DELETE, &[key]),
            // The length was checked: at most 1024.
            Self::Put(key, value) => {
                message(number, PUT, &[&(key.len() as u16).to_le_bytes(), key, value])
            }
        }
    }

    pub(crate) fn decode(message: &'a [u8]) -> Result<(u64, Self), ProtocolError> {
        let (number, kind, mut rest) = split(message)?;
        let length = || ProtocolError::Length { len: message.len() };
        let request = match kind {
            GET => Self::Get(rest),
            DELETE => Self::Delete(rest),
            PUT => {
                let key_len = rest.try_get_u16_le().map_err(|_| length())?;
                let (key, value) = rest.split_at_checked(key_len.into()).ok_or_else(length)?;
                Self::Put(key, value)
            }
            kind => return Err(ProtocolError::Kind(kind)),
        };
        Ok((number, request))
    }
}

impl Answer {
    pub(crate) fn encode(&self, number: u64) -> Bytes {
        let two =
            |kind, a: u64, b: u64| message(number, kind, &[&a.to_le_bytes(), &b.to_le_bytes()]);
        match self {
            Self::Found(found) => {
                message(number, FOUND, &[&found.version.to_le_bytes(), &found.value])
            }
            Self::Absent => message(number, ABSENT, &[]),
            Self::Done(version) => message(number, DONE, &[&version.to_le_bytes()]),
            Self::Refused(Refusal::KeyLength { len, allowed }) => two(KEY_LENGTH, *len, *allowed),
            Self::Refused(Refusal::ValueLength { len, allowed }) => {
                two(VALUE_LENGTH, *len, *allowed)
            }
            Self::Refused(Refusal::Full { slots }) => {
                message(number, FULL, &[&slots.to_le_bytes()])
            }
        }
    }

    /// Decodes an answer and its number. A value shares the message's memory.
    pub(crate) fn decode(message: &Bytes) -> Result<(u64, Self), ProtocolError> {
        let (number, kind, rest) = split(message)?;
        let mut rest = message.slice_ref(rest);
        let length = || ProtocolError::Length { len: message.len() };
        let mut next = || rest.try_get_u64_le().map_err(|_| length());
        let answer = match kind {
            FOUND => {
                let version = next()?;
                let value = std::mem::take(&mut rest);
                Self::Found(Versioned { version, value })
            }
            ABSENT => Self::Absent,
            DONE => Self::Done(next()?),
            KEY_LENGTH => Self::Refused(Refusal::KeyLength { len: next()?, allowed: next()? }),
            VALUE_LENGTH => Self::Refused(Refusal::ValueLength { len: next()?, allowed: next()? }),
            FULL => Self::Refused(Refusal::Full { slots: next()? }),
            kind => return Err(ProtocolError::Kind(kind)),
        };
        if rest.is_empty() { Ok((number, answer)) } else { Err(length()) }
    }
}

fn message(number: u64, kind: u8, parts: &[&[u8]]) -> Bytes {
    let mut message =
        BytesMut::with_capacity(HEADER + parts.iter().map(|part| part.len()).sum::<usize>());
    message.put_u64_le(number);
    message.put_u8(kind);
    parts.iter().for_each(|part| message.put_slice(part));
    message.freeze()
}

fn split(message: &[u8]) -> Result<(u64, u8, &[u8]), ProtocolError> {
    let (mut header, rest) =
        message.split_at_checked(HEADER).ok_or(ProtocolError::Length { len: message.len() })?;
    Ok((header.get_u64_le(), header.get_u8(), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_are_read_as_they_were_written() {
        for request in [
            Request::Get(b"k"),
            Request::Delete(b""),
            Request::Put(b"key", b""),
            Request::Put(b"k", b"value"),
        ] {
            assert_eq!(Request::decode(&request.encode(9)), Ok((9, request)));
        }
        for answer in answers() {
            assert_eq!(Answer::decode(&answer.encode(u64::MAX)), Ok((u64::MAX, answer)));
        }
    }

    #[test]
    fn answers_that_are_cut_or_prolonged_are_refused() {
        for answer in answers() {
            let bytes = answer.encode(1);
            let has_value = matches!(answer, Answer::Found(_));
            for len in 0..bytes.len() {
                assert!(
                    Answer::decode(&bytes.slice(..len)).is_err() || has_value && len >= HEADER + 8
                );
            }
            let longer = Bytes::from([&bytes[..], &[0]].concat());
            assert!(Answer::decode(&longer).is_err() || has_value);
        }
    }

    #[test]
    fn hostile_bytes_are_refused_or_understood() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..100_000 {
            let mut bytes: Vec<u8> = (0..random.usize(0..40)).map(|_| random.u8(..)).collect();
            if bytes.len() > 8 {
                bytes[8] %= 8;
            }
            if let Ok((number, request)) = Request::decode(&bytes) {
                assert_eq!(request.encode(number), bytes);
            }
            let bytes = Bytes::from(bytes);
            if let Ok((number, answer)) = Answer::decode(&bytes) {
                assert_eq!(answer.encode(number), bytes);
            }
        }
    }

    fn answers() -> [Answer; 6] {
        [
            Answer::Found(Versioned { version: 5, value: Bytes::from_static(b"value") }),
            Answer::Absent,
            Answer::Done(1 << 60),
            Answer::Refused(Refusal::KeyLength { len: 0, allowed: 8 }),
            Answer::Refused(Refusal::ValueLength { len: 9, allowed: 8 }),
            Answer::Refused(Refusal::Full { slots: 4 }),
        ]
    }
}
