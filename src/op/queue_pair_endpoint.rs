#![forbid(unsafe_code)]

use super::address_codec::{self, Address, EndpointError, Reader, Writer, link_code};
use crate::error::LimitError;
use crate::types::{AckTimeout, Gid, LinkLayer, Mtu, Psn, Qpn, RnrTimer, Transport};

/// The address that a peer needs to connect to a queue pair. Send it as
/// [`to_bytes`](Self::to_bytes) or by serde (feature `serde`): named fields in human-readable
/// formats, else the same bytes. Decoding validates every field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairEndpoint {
    /// The service type.
    pub transport: Transport,
    /// The queue pair number.
    pub qpn: Qpn,
    /// The first packet sequence number it sends.
    pub psn: Psn,
    /// The GID of its port.
    pub gid: Gid,
    /// The local identifier of its port (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// The link layer of its port.
    pub link_layer: LinkLayer,
    /// The largest packet payload; a connection uses the smaller of both.
    pub mtu: Mtu,
    /// The number of READs and atomics it serves at once.
    pub reads: u8,
}

impl QueuePairEndpoint {
    /// The length of the compact form in bytes.
    pub const ENCODED_LEN: usize = address_codec::LEN;

    /// Returns the compact form; numbers are big-endian.
    ///
    /// ```text
    ///  0        1          2           3        4      5    8    9    12   14        16     32
    ///  version  transport  link layer  MTU code reads  qpn  zero psn  lid  zero (2)  gid
    /// ```
    ///
    /// Transports are 0 (RC), 1 (UC) and 2 (UD); link layers 1 (InfiniBand) and 2 (Ethernet); MTU
    /// codes 1 (256 bytes) to 5 (4096).
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        address_codec::to_bytes(self)
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    ///
    /// [`EndpointError`] names the invalid field: the length, the version, or a value out of range.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EndpointError> {
        address_codec::from_bytes(bytes)
    }
}

impl Address for QueuePairEndpoint {
    const VERSION: u8 = 1;
    const ALLOWED_VERSION: &'static str = "1";

    fn write(&self, out: &mut Writer) {
        out.put(&[
            transport_code(self.transport),
            link_code(self.link_layer),
            self.mtu as u8,
            self.reads,
        ]);
        out.number(self.qpn.0);
        out.put(&[0]);
        out.number(self.psn.value());
        out.put(&self.lid.to_be_bytes());
        out.put(&[0; 2]);
        out.put(&self.gid.0);
    }

    fn read(bytes: &mut Reader<'_>) -> Result<Self, EndpointError> {
        let transport = transport_of(bytes.byte())?;
        let (link_layer, mtu, reads) = (bytes.link_layer()?, bytes.mtu()?, bytes.byte());
        let qpn = bytes.qpn("queue pair number")?;
        bytes.reserved::<1>()?;
        let (psn, lid) = (Psn::new(bytes.number()), bytes.lid());
        bytes.reserved::<2>()?;
        Ok(Self { transport, qpn, psn, gid: bytes.gid(), lid, link_layer, mtu, reads })
    }
}

fn transport_code(transport: Transport) -> u8 {
    match transport {
        Transport::Rc => 0,
        Transport::Uc => 1,
        Transport::Ud => 2,
        // Peers refuse this code.
        Transport::Dci => 3,
    }
}

fn transport_of(code: u8) -> Result<Transport, EndpointError> {
    match code {
        0 => Ok(Transport::Rc),
        1 => Ok(Transport::Uc),
        2 => Ok(Transport::Ud),
        _ => Err(EndpointError {
            field: "transport",
            found: code.into(),
            allowed: "0 (RC), 1 (UC) or 2 (UD)",
        }),
    }
}

/// Timeouts and retries of a reliable connection.
///
/// ```
/// use tokio_rdma::op::RetryConfig;
/// use tokio_rdma::types::AckTimeout;
///
/// let timeout = AckTimeout::from_code(14); // 67 ms
/// let retries = RetryConfig { timeout, retry_count: 3, ..RetryConfig::default() };
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryConfig {
    /// The timeout of acknowledgements. Default: 1.07 s (code 18). With six retries, a connection
    /// outlasts an outage of 7 s, and a peer that does not answer is lost after 7.5 s. An adapter
    /// may take up to four times as long.
    ///
    /// A lost packet that others follow is retransmitted at once. One that nothing follows is
    /// retransmitted after the timeout, by the software device after 67 ms, and by adapters with
    /// adaptive retransmission (mlx5) perhaps earlier. On a network that loses packets, SoftRoCE
    /// recovers faster with a shorter timeout.
    pub timeout: AckTimeout,
    /// Retransmissions without acknowledgement, 0 to 7. Default: 6, because SoftRoCE takes 7 as
    /// infinite and would never detect a dead peer.
    pub retry_count: u8,
    /// Retries while the peer has no receive posted: 0 to 6, or 7 for infinite. Default: 7, because
    /// such a peer is alive; bound the wait by deadlines of your service.
    pub rnr_retry: u8,
    /// The delay before a peer retries when no receive is posted here. Default: 0.64 ms.
    pub rnr_timer: RnrTimer,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            timeout: AckTimeout::from_code(18),
            retry_count: 6,
            rnr_retry: 7,
            rnr_timer: RnrTimer::from_code(12),
        }
    }
}

impl RetryConfig {
    pub(crate) fn check(&self) -> Result<(), LimitError> {
        LimitError::check("retry_count", self.retry_count.into(), 7)?;
        LimitError::check("rnr_retry", self.rnr_retry.into(), 7)
    }
}

#[cfg(feature = "serde")]
mod form {
    use std::net::Ipv6Addr;

    use serde::{Deserialize, Serialize};

    use super::address_codec::{link_layer, mtu_of_bytes, qpn, within};
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Fields {
        transport: Service,
        qpn: u32,
        psn: u32,
        gid: Ipv6Addr,
        #[serde(default)]
        lid: u16,
        link_layer: u8,
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
                qpn: qpn("queue pair number", fields.qpn)?,
                psn: within("packet sequence number", fields.psn, 0..=0x00ff_ffff, "24 bits")
                    .map(Psn::new)?,
                gid: Gid(fields.gid.octets()),
                lid: fields.lid,
                link_layer: link_layer(fields.link_layer)?,
                mtu: mtu_of_bytes(fields.mtu)?,
                reads: fields.reads,
            })
        }
    }

    address_codec::serde_address!(QueuePairEndpoint, Fields);
}

#[cfg(test)]
mod tests {
    use super::address_codec::tests::{
        assert_fields_are_named, assert_numbers_are_checked, assert_other_lengths_are_refused,
        assert_random_bytes_are_refused_or_round_trip,
    };
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
        assert_fields_are_named(&endpoint(), &cases);
        assert_numbers_are_checked(&endpoint(), 5, "queue pair number");
        assert_other_lengths_are_refused::<QueuePairEndpoint>();
    }

    #[test]
    fn random_bytes_are_refused_or_round_trip() {
        assert_random_bytes_are_refused_or_round_trip(&endpoint());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_uses_named_fields_in_readable_formats() {
        let text = serde_json::to_string(&endpoint()).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"transport":"RC","qpn":1193046,"psn":11259375,"gid":"::ffff:10.9.0.1","#,
                r#""lid":1800,"link_layer":2,"mtu":4096,"reads":16}"#
            )
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
            let error = serde_json::from_str::<QueuePairEndpoint>(&text.replace(from, to))
                .unwrap_err()
                .to_string();
            assert!(error.contains(field), "{field}: {error}");
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_uses_the_compact_form_in_binary_formats() {
        use serde::de::value::{Error, SeqDeserializer};
        use serde::{Deserialize, Deserializer, forward_to_deserialize_any};

        /// A minimal binary format: a list of bytes.
        struct Bytes([u8; 32]);

        impl<'de> Deserializer<'de> for Bytes {
            type Error = Error;

            fn deserialize_any<V: serde::de::Visitor<'de>>(
                self,
                visitor: V,
            ) -> Result<V::Value, Error> {
                visitor.visit_seq(SeqDeserializer::new(self.0.into_iter()))
            }

            fn is_human_readable(&self) -> bool {
                false
            }

            forward_to_deserialize_any! {
                bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option
                unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
                ignored_any
            }
        }

        assert_eq!(QueuePairEndpoint::deserialize(Bytes(endpoint().to_bytes())), Ok(endpoint()));
        let mut wrong = endpoint().to_bytes();
        wrong[0] = 9;
        assert!(
            QueuePairEndpoint::deserialize(Bytes(wrong))
                .unwrap_err()
                .to_string()
                .contains("version")
        );
    }
}
