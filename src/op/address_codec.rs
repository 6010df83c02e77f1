//! The codec of the addresses that peers exchange, [`QueuePairEndpoint`](super::QueuePairEndpoint)
//! and [`DcAddress`](crate::dc::DcAddress): 32 bytes, or named fields in human-readable formats.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::RangeInclusive;

use crate::types::{Gid, LinkLayer, Mtu, Qpn};

pub(crate) const LEN: usize = 32;

pub(crate) trait Address: Sized {
    /// The first byte, different for each layout of each address.
    const VERSION: u8;
    const ALLOWED_VERSION: &'static str;

    fn write(&self, out: &mut Writer);

    fn read(bytes: &mut Reader<'_>) -> Result<Self, EndpointError>;
}

pub(crate) fn to_bytes<A: Address>(address: &A) -> [u8; LEN] {
    let mut out = Writer { bytes: [0; LEN], at: 0 };
    out.put(&[A::VERSION]);
    address.write(&mut out);
    out.bytes
}

pub(crate) fn from_bytes<A: Address>(bytes: &[u8]) -> Result<A, EndpointError> {
    let Ok(bytes) = <&[u8; LEN]>::try_from(bytes) else {
        return Err(EndpointError {
            field: "length",
            found: bytes.len() as u64,
            allowed: "32 bytes",
        });
    };
    let mut reader = Reader { rest: bytes };
    let version = reader.byte().into();
    within("version", version, A::VERSION.into()..=A::VERSION.into(), A::ALLOWED_VERSION)?;
    A::read(&mut reader)
}

pub(crate) struct Writer {
    bytes: [u8; LEN],
    at: usize,
}

impl Writer {
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    pub(crate) fn number(&mut self, number: u32) {
        self.put(&number.to_be_bytes()[1..]);
    }
}

pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else {
            unreachable!("layouts have 32 bytes")
        };
        self.rest = rest;
        *bytes
    }

    pub(crate) fn byte(&mut self) -> u8 {
        u8::from_be_bytes(self.take())
    }

    pub(crate) fn number(&mut self) -> u32 {
        let [high, middle, low] = self.take();
        u32::from_be_bytes([0, high, middle, low])
    }

    pub(crate) fn qpn(&mut self, field: &'static str) -> Result<Qpn, EndpointError> {
        qpn(field, self.number())
    }

    pub(crate) fn lid(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub(crate) fn link_layer(&mut self) -> Result<LinkLayer, EndpointError> {
        link_layer(self.byte())
    }

    pub(crate) fn mtu(&mut self) -> Result<Mtu, EndpointError> {
        let code = self.byte();
        Mtu::from_code(code).ok_or(EndpointError {
            field: "MTU code",
            found: code.into(),
            allowed: "1 to 5",
        })
    }

    pub(crate) fn gid(&mut self) -> Gid {
        Gid(self.take())
    }

    pub(crate) fn reserved<const N: usize>(&mut self) -> Result<(), EndpointError> {
        for byte in self.take::<N>() {
            within("reserved bytes", byte.into(), 0..=0, "0")?;
        }
        Ok(())
    }
}

pub(crate) fn link_code(link_layer: LinkLayer) -> u8 {
    match link_layer {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
        LinkLayer::Other(code) => code,
    }
}

pub(crate) fn link_layer(code: u8) -> Result<LinkLayer, EndpointError> {
    match code {
        1 => Ok(LinkLayer::InfiniBand),
        2 => Ok(LinkLayer::Ethernet),
        // Both peers may know a link layer that this crate does not.
        3.. => Ok(LinkLayer::Other(code)),
        0 => Err(EndpointError {
            field: "link layer",
            found: 0,
            allowed: "1 (InfiniBand), 2 (Ethernet) or more",
        }),
    }
}

pub(crate) fn qpn(field: &'static str, number: u32) -> Result<Qpn, EndpointError> {
    // 0 and 1 are the management queue pairs of a port; 0xffffff is the multicast number.
    within(field, number, 2..=Qpn::MAX.0 - 1, "2 to 0xfffffe").map(Qpn)
}

#[cfg(feature = "serde")]
pub(crate) fn mtu_of_bytes(bytes: u16) -> Result<Mtu, EndpointError> {
    let mtu = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == usize::from(bytes));
    mtu.ok_or(EndpointError {
        field: "MTU",
        found: bytes.into(),
        allowed: "256, 512, 1024, 2048 or 4096",
    })
}

pub(crate) fn within(
    field: &'static str,
    found: u32,
    range: RangeInclusive<u32>,
    allowed: &'static str,
) -> Result<u32, EndpointError> {
    if range.contains(&found) {
        Ok(found)
    } else {
        Err(EndpointError { field, found: found.into(), allowed })
    }
}

/// An invalid field of an encoded address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointError {
    /// The name of the field.
    pub field: &'static str,
    /// The value of the field.
    pub found: u64,
    /// The allowed values.
    pub allowed: &'static str,
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, found, allowed } = self;
        write!(f, "invalid QueuePairEndpoint or DcAddress: {field} is {found}, allowed: {allowed}")
    }
}

impl std::error::Error for EndpointError {}

impl From<EndpointError> for io::Error {
    fn from(error: EndpointError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

#[cfg(feature = "serde")]
macro_rules! serde_address {
    ($address:ty, $fields:ty) => {
        impl serde::Serialize for $address {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    <$fields>::from(self).serialize(serializer)
                } else {
                    self.to_bytes().serialize(serializer)
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $address {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let address = if deserializer.is_human_readable() {
                    Self::try_from(<$fields>::deserialize(deserializer)?)
                } else {
                    Self::from_bytes(&<[u8; Self::ENCODED_LEN]>::deserialize(deserializer)?)
                };
                address.map_err(serde::de::Error::custom)
            }
        }
    };
}

#[cfg(feature = "serde")]
pub(crate) use serde_address;

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Debug;

    use super::{Address, EndpointError, LEN, from_bytes, to_bytes};

    pub(crate) fn assert_other_lengths_are_refused<A: Address + Debug>() {
        for len in (0..LEN).chain(LEN + 1..70) {
            assert_eq!(from_bytes::<A>(&vec![A::VERSION; len]).unwrap_err().field, "length");
        }
    }

    pub(crate) fn assert_random_bytes_are_refused_or_round_trip<A: Address>(address: &A) {
        let (mut random, mut taken) = (fastrand::Rng::with_seed(7), 0);
        for _ in 0..100_000 {
            let mut bytes = to_bytes(address);
            for _ in 0..random.usize(1..4) {
                bytes[random.usize(..LEN)] = random.u8(..);
            }
            if let Ok(address) = from_bytes::<A>(&bytes) {
                assert_eq!(to_bytes(&address), bytes);
                taken += 1;
            }
        }
        assert!(taken > 1000, "{taken} taken");
    }

    pub(crate) fn assert_fields_are_named<A: Address + Debug>(
        address: &A,
        cases: &[(usize, u8, &str)],
    ) {
        for &(at, value, field) in cases {
            let mut bytes = to_bytes(address);
            bytes[at] = value;
            let error: Result<A, EndpointError> = from_bytes(&bytes);
            assert_eq!(error.unwrap_err().field, field, "byte {at} is {value}");
        }
    }

    /// Asserts that reserved numbers are refused in the 24 bits from byte `at`.
    pub(crate) fn assert_numbers_are_checked<A: Address + Debug>(
        address: &A,
        at: usize,
        field: &str,
    ) {
        for number in [0u32, 1, 0x00ff_ffff] {
            let mut bytes = to_bytes(address);
            bytes[at..at + 3].copy_from_slice(&number.to_be_bytes()[1..]);
            assert_eq!(from_bytes::<A>(&bytes).unwrap_err().field, field);
        }
    }
}
