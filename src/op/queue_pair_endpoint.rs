//! What two ends tell each other to connect, over whatever they talk by: a request of HTTP, a message queue, a file.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use crate::error::LimitError;
use crate::types::{AckTimeout, Gid, LinkLayer, Mtu, Psn, Qpn, RnrTimer, Transport};

/// What a peer needs to know to connect to a queue pair.
///
/// It travels as [`to_bytes`](Self::to_bytes), or with feature `serde` by any format: as named fields where that is read by
/// people, as those bytes where not. Whatever arrives is checked before it becomes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairEndpoint {
    /// Service type.
    pub transport: Transport,
    /// Queue pair number.
    pub qpn: Qpn,
    /// First packet sequence number it sends.
    pub psn: Psn,
    /// Address of its port.
    pub gid: Gid,
    /// Local identifier of its port (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// What its port is attached to.
    pub link_layer: LinkLayer,
    /// Largest packet payload; the smaller of both ends is used.
    pub mtu: Mtu,
    /// READ and atomic requests it serves at once.
    pub reads: u8,
}

/// Of [`QueuePairEndpoint::to_bytes`]; another layout will have another one.
const VERSION: u8 = 1;

impl QueuePairEndpoint {
    /// Bytes of the compact form.
    pub const ENCODED_LEN: usize = 32;

    /// The compact form, numbers big-endian.
    ///
    /// ```text
    ///  0        1          2           3        4      5    8    9    12   14        16     32
    ///  version  transport  link layer  MTU code reads  qpn  zero psn  lid  zero (2)  gid
    /// ```
    ///
    /// Transports are 0 (RC), 1 (UC) and 2 (UD), link layers 1 (InfiniBand) and 2 (Ethernet), MTU codes 1 (256) to 5 (4096).
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0; Self::ENCODED_LEN];
        bytes[..4].copy_from_slice(&[
            VERSION,
            transport_code(self.transport),
            link_code(self.link_layer),
            self.mtu as u8,
        ]);
        bytes[4..8].copy_from_slice(&self.qpn.0.to_be_bytes());
        bytes[4] = self.reads;
        bytes[8..12].copy_from_slice(&self.psn.value().to_be_bytes());
        bytes[12..14].copy_from_slice(&self.lid.to_be_bytes());
        bytes[16..].copy_from_slice(&self.gid.0);
        bytes
    }

    /// What [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    ///
    /// [`EndpointError`] with the field that cannot be: the length, the version, or a value out of its range.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EndpointError> {
        let Ok(bytes) = <&[u8; Self::ENCODED_LEN]>::try_from(bytes) else {
            return Err(EndpointError { field: "length", found: bytes.len() as u64, allowed: "32 bytes" });
        };
        let &[version, transport, link_layer, mtu, reads, q0, q1, q2, zero, p0, p1, p2, l0, l1, z0, z1, ref gid @ ..] =
            bytes;
        within("version", version.into(), 1..=1, "1")?;
        within("reserved bytes", u32::from_be_bytes([0, zero, z0, z1]), 0..=0, "0")?;
        Ok(Self {
            transport: transport_of(transport)?,
            qpn: qpn_of("queue pair number", u32::from_be_bytes([0, q0, q1, q2]))?,
            psn: Psn::new(u32::from_be_bytes([0, p0, p1, p2])),
            gid: Gid(*gid),
            lid: u16::from_be_bytes([l0, l1]),
            link_layer: link_of(link_layer)?,
            mtu: mtu_of(mtu)?,
            reads,
        })
    }
}

fn transport_code(transport: Transport) -> u8 {
    match transport {
        Transport::Rc => 0,
        Transport::Uc => 1,
        Transport::Ud => 2,
        // Not an end that anybody connects to, and refused by whoever is told.
        Transport::Dci => 3,
    }
}

fn transport_of(code: u8) -> Result<Transport, EndpointError> {
    match code {
        0 => Ok(Transport::Rc),
        1 => Ok(Transport::Uc),
        2 => Ok(Transport::Ud),
        _ => Err(EndpointError { field: "transport", found: code.into(), allowed: "0 (RC), 1 (UC) or 2 (UD)" }),
    }
}

/// Codes of `ibv_query_port(3)`.
pub(crate) fn link_code(link_layer: LinkLayer) -> u8 {
    match link_layer {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
        LinkLayer::Other(code) => code,
    }
}

pub(crate) fn link_of(code: u8) -> Result<LinkLayer, EndpointError> {
    match code {
        1 => Ok(LinkLayer::InfiniBand),
        2 => Ok(LinkLayer::Ethernet),
        // Two ends that agree on it may know what it is.
        3.. => Ok(LinkLayer::Other(code)),
        0 => Err(EndpointError { field: "link layer", found: 0, allowed: "1 (InfiniBand), 2 (Ethernet) or more" }),
    }
}

pub(crate) fn mtu_of(code: u8) -> Result<Mtu, EndpointError> {
    Mtu::from_code(code).ok_or(EndpointError { field: "MTU code", found: code.into(), allowed: "1 to 5" })
}

pub(crate) fn qpn_of(field: &'static str, number: u32) -> Result<Qpn, EndpointError> {
    // 0 and 1 manage the port, the last one stands for many.
    within(field, number, 2..=Qpn::MAX.0 - 1, "2 to 0xfffffe").map(Qpn)
}

/// From bytes.
#[cfg(feature = "serde")]
pub(crate) fn mtu_of_bytes(bytes: u16) -> Result<Mtu, EndpointError> {
    let mtu = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == usize::from(bytes));
    mtu.ok_or(EndpointError { field: "MTU", found: bytes.into(), allowed: "256, 512, 1024, 2048 or 4096" })
}

pub(crate) fn within(
    field: &'static str,
    found: u32,
    range: std::ops::RangeInclusive<u32>,
    allowed: &'static str,
) -> Result<u32, EndpointError> {
    if range.contains(&found) { Ok(found) } else { Err(EndpointError { field, found: found.into(), allowed }) }
}

/// A description of a queue pair or DC target that cannot be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointError {
    /// Which part of it.
    pub field: &'static str,
    /// What was found there.
    pub found: u64,
    /// What may be there.
    pub allowed: &'static str,
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of the endpoint is {}, allowed: {}", self.field, self.found, self.allowed)
    }
}

impl std::error::Error for EndpointError {}

impl From<EndpointError> for io::Error {
    fn from(error: EndpointError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// Timeouts and retries of a reliable connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Time to wait for an acknowledgement. 67 ms unless set, code 14, as librdmacm and most applications do: far
    /// above the latency of a loaded network, and six retries notice a dead peer within some seconds.
    pub timeout: AckTimeout,
    /// Repetitions of what was not acknowledged, 0 to 7. 6 unless set: to the kernel's SoftRoCE 7 means for ever, and a
    /// dead peer would never be noticed.
    pub retry_count: u8,
    /// Repetitions of what found no receive posted, 0 to 6, or 7 for ever. For ever unless set: the peer is there
    /// and slow, which deadlines of the service should decide about.
    pub rnr_retry: u8,
    /// Time that a peer waits before it repeats what found no receive posted here. 0.64 ms unless set.
    pub rnr_timer: RnrTimer,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { timeout: AckTimeout::from_code(14), retry_count: 6, rnr_retry: 7, rnr_timer: RnrTimer::from_code(12) }
    }
}

impl ConnectOptions {
    /// Checks that all of it is possible.
    pub(crate) fn check(&self) -> Result<(), LimitError> {
        LimitError::check("retry_count", self.retry_count.into(), 7)?;
        LimitError::check("rnr_retry", self.rnr_retry.into(), 7)
    }
}

/// For people as named fields, for programs as the compact form.
#[cfg(feature = "serde")]
mod form {
    use std::net::Ipv6Addr;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Fields {
        transport: Service,
        qpn: u32,
        psn: u32,
        gid: Ipv6Addr,
        #[serde(default)]
        lid: u16,
        /// Code of `ibv_query_port(3)`.
        link_layer: u8,
        /// Bytes.
        mtu: u16,
        reads: u8,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    enum Service {
        Rc,
        Uc,
        Ud,
        #[serde(skip_deserializing)]
        Dci,
    }

    impl From<&QueuePairEndpoint> for Fields {
        fn from(endpoint: &QueuePairEndpoint) -> Self {
            Self {
                transport: match endpoint.transport {
                    Transport::Rc => Service::Rc,
                    Transport::Uc => Service::Uc,
                    Transport::Ud => Service::Ud,
                    Transport::Dci => Service::Dci,
                },
                qpn: endpoint.qpn.0,
                psn: endpoint.psn.value(),
                gid: Ipv6Addr::from(endpoint.gid.0),
                lid: endpoint.lid,
                link_layer: link_code(endpoint.link_layer),
                mtu: endpoint.mtu.bytes() as u16,
                reads: endpoint.reads,
            }
        }
    }

    impl TryFrom<Fields> for QueuePairEndpoint {
        type Error = EndpointError;

        fn try_from(fields: Fields) -> Result<Self, EndpointError> {
            Ok(Self {
                transport: match fields.transport {
                    Service::Rc => Transport::Rc,
                    Service::Uc => Transport::Uc,
                    Service::Ud => Transport::Ud,
                    Service::Dci => transport_of(3)?,
                },
                qpn: qpn_of("queue pair number", fields.qpn)?,
                psn: within("packet sequence number", fields.psn, 0..=0x00ff_ffff, "24 bits").map(Psn::new)?,
                gid: Gid(fields.gid.octets()),
                lid: fields.lid,
                link_layer: link_of(fields.link_layer)?,
                mtu: mtu_of_bytes(fields.mtu)?,
                reads: fields.reads,
            })
        }
    }

    impl Serialize for QueuePairEndpoint {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            if serializer.is_human_readable() {
                Fields::from(self).serialize(serializer)
            } else {
                self.to_bytes().serialize(serializer)
            }
        }
    }

    impl<'de> Deserialize<'de> for QueuePairEndpoint {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            if deserializer.is_human_readable() {
                Self::try_from(Fields::deserialize(deserializer)?).map_err(de::Error::custom)
            } else {
                Self::from_bytes(&<[u8; Self::ENCODED_LEN]>::deserialize(deserializer)?).map_err(de::Error::custom)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> QueuePairEndpoint {
        QueuePairEndpoint {
            transport: Transport::Rc,
            qpn: Qpn(0x12_3456),
            psn: Psn::new(0xab_cdef),
            gid: Gid::from(std::net::Ipv4Addr::new(10, 9, 0, 1)),
            lid: 0x0708,
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::Mtu4096,
            reads: 16,
        }
    }

    #[test]
    fn compact_form_is_as_documented() {
        let expected = [
            1, 0, 2, 5, 16, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 7, 8, 0, 0, //
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1,
        ];
        assert_eq!(endpoint().to_bytes(), expected);
        assert_eq!(QueuePairEndpoint::from_bytes(&expected), Ok(endpoint()));
    }

    #[test]
    fn each_bad_field_is_named() {
        let cases: [(usize, u8, &str); 10] = [
            (0, 2, "version"),
            (1, 3, "transport"),
            (2, 0, "link layer"),
            (3, 0, "MTU code"),
            (3, 6, "MTU code"),
            (8, 1, "reserved bytes"),
            (14, 1, "reserved bytes"),
            (15, 1, "reserved bytes"),
            (0, 0, "version"),
            (1, 255, "transport"),
        ];
        for (at, value, field) in cases {
            let mut bytes = endpoint().to_bytes();
            bytes[at] = value;
            assert_eq!(QueuePairEndpoint::from_bytes(&bytes).unwrap_err().field, field, "byte {at} is {value}");
        }
        for qpn in [0u32, 1, 0x00ff_ffff] {
            let mut bytes = endpoint().to_bytes();
            bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
            assert_eq!(QueuePairEndpoint::from_bytes(&bytes).unwrap_err().field, "queue pair number");
        }
        for len in (0..32).chain(33..70) {
            assert_eq!(QueuePairEndpoint::from_bytes(&vec![1; len]).unwrap_err().field, "length");
        }
    }

    /// Whatever is taken is given back the same: nothing of it is overlooked.
    #[test]
    fn random_bytes_are_refused_or_come_back() {
        let (mut random, mut taken) = (fastrand::Rng::with_seed(7), 0);
        for _ in 0..100_000 {
            let mut bytes = endpoint().to_bytes();
            for _ in 0..random.usize(1..4) {
                bytes[random.usize(..32)] = random.u8(..);
            }
            if let Ok(endpoint) = QueuePairEndpoint::from_bytes(&bytes) {
                assert_eq!(endpoint.to_bytes(), bytes);
                taken += 1;
            }
        }
        assert!(taken > 1000, "{taken} taken");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn people_read_fields() {
        let text = serde_json::to_string(&endpoint()).unwrap();
        assert_eq!(
            text,
            r#"{"transport":"RC","qpn":1193046,"psn":11259375,"gid":"::ffff:10.9.0.1","lid":1800,"link_layer":2,"mtu":4096,"reads":16}"#
        );
        assert_eq!(serde_json::from_str::<QueuePairEndpoint>(&text).unwrap(), endpoint());
        for (field, from, to) in [
            ("MTU", "4096", "4095"),
            ("queue pair number", "1193046", "16777215"),
            ("packet sequence number", "11259375", "16777216"),
            ("link layer", "\"link_layer\":2", "\"link_layer\":0"),
            ("unknown variant", "RC", "XRC"),
            ("IPv6", "::ffff:10.9.0.1", "10.9.0"),
        ] {
            let error = serde_json::from_str::<QueuePairEndpoint>(&text.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(field), "{field}: {error}");
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn programs_read_the_compact_form() {
        use serde::de::value::{Error, SeqDeserializer};
        use serde::{Deserialize, Deserializer, forward_to_deserialize_any};

        /// The least that is not read by people: a list of bytes.
        struct Bytes([u8; 32]);

        impl<'de> Deserializer<'de> for Bytes {
            type Error = Error;

            fn deserialize_any<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
                visitor.visit_seq(SeqDeserializer::new(self.0.into_iter()))
            }

            fn is_human_readable(&self) -> bool {
                false
            }

            forward_to_deserialize_any! {
                bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
                newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
            }
        }

        assert_eq!(QueuePairEndpoint::deserialize(Bytes(endpoint().to_bytes())), Ok(endpoint()));
        let mut wrong = endpoint().to_bytes();
        wrong[0] = 9;
        assert!(QueuePairEndpoint::deserialize(Bytes(wrong)).unwrap_err().to_string().contains("version"));
    }
}
