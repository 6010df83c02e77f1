use crate::op::EndpointError;
use crate::op::address_codec::{self, Address, Reader, Writer, link_code};
use crate::types::{DcKey, Gid, LinkLayer, Mtu, Qpn};

/// The address of a [`DcTarget`](super::DcTarget), the same for all peers. It contains the access
/// key, so keep it secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DcAddress {
    /// The DC target number.
    pub number: Qpn,
    /// The access key.
    pub key: DcKey,
    /// The GID of its port.
    pub gid: Gid,
    /// The local identifier of its port (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// The link layer of its port.
    pub link_layer: LinkLayer,
    /// The largest accepted packet payload.
    pub mtu: Mtu,
}

impl DcAddress {
    /// The length of the compact form in bytes.
    pub const ENCODED_LEN: usize = address_codec::LEN;

    /// Returns the compact form, with big-endian numbers.
    ///
    /// ```text
    ///  0        1           2         3       6    8    16   32
    ///  version  link layer  MTU code  number  lid  key  gid
    /// ```
    ///
    /// The version is 0x41. [`QueuePairEndpoint::to_bytes`](crate::QueuePairEndpoint::to_bytes)
    /// explains the codes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        address_codec::to_bytes(self)
    }

    /// Decodes the compact form.
    ///
    /// # Errors
    ///
    /// [`EndpointError`] names the invalid field.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EndpointError> {
        address_codec::from_bytes(bytes)
    }
}

impl Address for DcAddress {
    // Differs from those of queue pair endpoints, which have the same length.
    const VERSION: u8 = 0x41;
    const ALLOWED_VERSION: &'static str = "65";

    fn write(&self, out: &mut Writer) {
        out.put(&[link_code(self.link_layer), self.mtu as u8]);
        out.number(self.number.0);
        out.put(&self.lid.to_be_bytes());
        out.put(&self.key.0.to_be_bytes());
        out.put(&self.gid.0);
    }

    fn read(bytes: &mut Reader<'_>) -> Result<Self, EndpointError> {
        let (link_layer, mtu) = (bytes.link_layer()?, bytes.mtu()?);
        let (number, lid) = (bytes.qpn("target number")?, bytes.lid());
        let key = DcKey(u64::from_be_bytes(bytes.take()));
        Ok(Self { number, key, gid: bytes.gid(), lid, link_layer, mtu })
    }
}

#[cfg(feature = "serde")]
mod form {
    use std::net::Ipv6Addr;

    use serde::{Deserialize, Serialize};

    use super::address_codec::{link_layer, mtu_of_bytes, qpn};
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Fields {
        number: u32,
        /// In hexadecimal, because some formats have no 64-bit integers.
        key: String,
        gid: Ipv6Addr,
        #[serde(default)]
        lid: u16,
        link_layer: u8,
        mtu: u16,
    }

    impl From<&DcAddress> for Fields {
        fn from(address: &DcAddress) -> Self {
            Self {
                number: address.number.0,
                key: format!("{:016x}", address.key.0),
                gid: Ipv6Addr::from(address.gid.0),
                lid: address.lid,
                link_layer: link_code(address.link_layer),
                mtu: address.mtu.bytes() as u16,
            }
        }
    }

    impl TryFrom<Fields> for DcAddress {
        type Error = EndpointError;

        fn try_from(fields: Fields) -> Result<Self, EndpointError> {
            // `from_str_radix` accepts a sign.
            let digits =
                fields.key.len() == 16 && fields.key.bytes().all(|digit| digit.is_ascii_hexdigit());
            let key = u64::from_str_radix(&fields.key, 16).ok().filter(|_| digits);
            let found = fields.key.len() as u64;
            Ok(Self {
                number: qpn("target number", fields.number)?,
                key: DcKey(key.ok_or(EndpointError {
                    field: "key",
                    found,
                    allowed: "16 hexadecimal digits",
                })?),
                gid: Gid(fields.gid.octets()),
                lid: fields.lid,
                link_layer: link_layer(fields.link_layer)?,
                mtu: mtu_of_bytes(fields.mtu)?,
            })
        }
    }

    address_codec::serde_address!(DcAddress, Fields);
}

#[cfg(test)]
mod tests {
    use super::address_codec::tests::{
        assert_fields_are_named, assert_numbers_are_checked, assert_other_lengths_are_refused,
        assert_random_bytes_are_refused_or_round_trip,
    };
    use super::*;
    use crate::op::QueuePairEndpoint;

    fn address() -> DcAddress {
        DcAddress {
            number: Qpn(0x12_3456),
            key: DcKey(0x0102_0304_0506_0708),
            gid: Gid::from(std::net::Ipv4Addr::new(10, 9, 0, 1)),
            lid: 0x0708,
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::Mtu4096,
        }
    }

    #[test]
    fn compact_form_is_as_documented() {
        let expected = [
            0x41, 2, 5, 0x12, 0x34, 0x56, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, //
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1,
        ];
        assert_eq!(address().to_bytes(), expected);
        assert_eq!(DcAddress::from_bytes(&expected), Ok(address()));
        assert_eq!(QueuePairEndpoint::from_bytes(&expected).unwrap_err().field, "version");
    }

    #[test]
    fn each_bad_field_is_named() {
        let cases = [
            (0, 1, "version"),
            (0, 0x42, "version"),
            (1, 0, "link layer"),
            (2, 0, "MTU code"),
            (2, 6, "MTU code"),
        ];
        assert_fields_are_named(&address(), &cases);
        assert_numbers_are_checked(&address(), 3, "target number");
        assert_other_lengths_are_refused::<DcAddress>();
    }

    #[test]
    fn random_bytes_are_refused_or_round_trip() {
        assert_random_bytes_are_refused_or_round_trip(&address());
    }

    #[test]
    fn key_is_not_printed() {
        let (other, text) = (DcAddress { key: DcKey(9), ..address() }, format!("{:?}", address()));
        assert_eq!(text, format!("{other:?}"));
        assert!(text.contains("0x123456"), "{text}");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_uses_named_fields_in_readable_formats() {
        let text = serde_json::to_string(&address()).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"number":1193046,"key":"0102030405060708","gid":"::ffff:10.9.0.1","#,
                r#""lid":1800,"link_layer":2,"mtu":4096}"#
            )
        );
        assert_eq!(serde_json::from_str::<DcAddress>(&text).unwrap(), address());
        for (field, from, to) in [
            ("MTU", "4096", "4095"),
            ("target number", "1193046", "16777215"),
            ("key", "0102030405060708", "010203040506070"),
            ("key", "0102030405060708", "+102030405060708"),
            ("key", "0102030405060708", "010203040506070g"),
            ("link layer", "\"link_layer\":2", "\"link_layer\":0"),
            ("IPv6", "::ffff:10.9.0.1", "10.9.0"),
        ] {
            let error =
                serde_json::from_str::<DcAddress>(&text.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(field), "{field}: {error}");
        }
    }
}
