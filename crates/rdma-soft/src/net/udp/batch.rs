//! Packets sent by one system call.

use std::net::SocketAddr;
use std::ops::Range;

use super::peer_link::{MAX_PACKETS, WINDOW};
use crate::roce::icrc::Header;
use crate::roce::ip_fields::IpFields;

/// Maximum bytes of a message, less headers.
const MESSAGE: usize = 65_000;
/// Maximum headers and ICRC of a packet.
const HEADERS: usize = 64;
const MAX_PACKET: usize = 4096 + HEADERS;
/// A full window and one packet.
const CAPACITY: usize = WINDOW as usize + MAX_PACKETS as usize * HEADERS + MAX_PACKET;
/// Maximum messages.
pub(super) const GROUPS: usize = 16;
/// Maximum datagrams of a message (`UDP_MAX_SEGMENTS`).
const SEGMENTS: u16 = 64;

/// A message that the kernel segments; its last datagram may be shorter.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) to: SocketAddr,
    pub(super) ip_fields: IpFields,
    bytes: Range<usize>,
    pub(super) segment: usize,
    pub(super) count: u16,
}

#[derive(Debug)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    groups: Vec<Group>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::with_capacity(CAPACITY), groups: Vec::with_capacity(GROUPS) }
    }

    pub(crate) fn has_capacity(&self) -> bool {
        self.groups.len() < GROUPS && self.bytes.len() + MAX_PACKET <= CAPACITY
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.groups.clear();
    }

    pub(super) fn groups(&self) -> &[Group] {
        &self.groups
    }

    pub(super) fn len(&self) -> u64 {
        self.groups.iter().map(|group| u64::from(group.count)).sum()
    }

    pub(super) fn bytes_of(&self, group: &Group) -> &[u8] {
        &self.bytes[group.bytes.clone()]
    }

    /// Adds a complete packet as its own message.
    pub(super) fn push_sealed(&mut self, image: &[u8], (to, ip_fields): (SocketAddr, IpFields)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(image);
        self.groups.push(Group {
            to,
            ip_fields,
            bytes: start..self.bytes.len(),
            segment: image.len(),
            count: 1,
        });
    }

    /// Adds a packet without ICRC; `join`: several may form a message.
    pub(super) fn push(
        &mut self,
        header: &Header,
        (to, ip_fields): (SocketAddr, IpFields),
        join: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = self.bytes.len();
        write(&mut self.bytes);
        let length = self.bytes.len() - start + crate::roce::icrc::CHECK;
        // A shorter packet ends a group.
        let open = |group: &Group| {
            let full = group.bytes.len() == group.segment * usize::from(group.count);
            let fits = group.count < SEGMENTS && group.bytes.len() + length <= MESSAGE;
            let same = (group.to, group.ip_fields) == (to, ip_fields);
            join && same && full && fits && length <= group.segment
        };
        let joined = self.groups.last_mut().filter(|group| open(group));
        let segment = joined.as_ref().map_or(0, |group| group.count);
        let check = header.check(&self.bytes[start..], segment);
        self.bytes.extend_from_slice(&check.to_le_bytes());
        let end = self.bytes.len();
        match joined {
            Some(group) => {
                group.bytes.end = end;
                group.count += 1;
            }
            None => self.groups.push(Group {
                to,
                ip_fields,
                bytes: start..end,
                segment: length,
                count: 1,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_equal_length_are_joined_into_one_message() {
        let header = Header {
            source: [127, 0, 0, 1].into(),
            source_port: 1,
            destination: [127, 0, 0, 2].into(),
            destination_port: 2,
        };
        let to: SocketAddr = "127.0.0.2:2".parse().unwrap();
        let other: SocketAddr = "127.0.0.3:2".parse().unwrap();
        let plain = IpFields::default();
        let shape = |packets: &[(SocketAddr, usize)], join| {
            let mut batch = Batch::new();
            for &(to, length) in packets {
                batch.push(&header, (to, plain), join, |out| out.resize(out.len() + length, 0));
            }
            assert_eq!(batch.len(), packets.len() as u64);
            batch
                .groups()
                .iter()
                .map(|group| (group.count, batch.bytes_of(group).len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(shape(&[(to, 28), (to, 28), (to, 12)], true), [(3, 80)]);
        assert_eq!(
            shape(&[(to, 28), (to, 12), (to, 12)], true),
            [(2, 48), (1, 16)],
            "a shorter one is the last"
        );
        assert_eq!(
            shape(&[(to, 12), (to, 28), (to, 28)], true),
            [(1, 16), (2, 64)],
            "no longer one joins"
        );
        assert_eq!(shape(&[(to, 12), (other, 12), (to, 12)], true), [(1, 16), (1, 16), (1, 16)]);
        assert_eq!(shape(&[(to, 12), (to, 12)], false), [(1, 16), (1, 16)]);
        assert_eq!(shape(&[(to, 12); 65], true), [(64, 1024), (1, 16)]);
        assert_eq!(
            shape(&[(to, 4096); 16], true),
            [(15, 61_500), (1, 4100)],
            "as much as the kernel takes"
        );
        let mut batch = Batch::new();
        for traffic_class in [0, 104, 104] {
            let ip_fields = IpFields { traffic_class, ..plain };
            batch.push(&header, (to, ip_fields), true, |out| out.extend_from_slice(&[0; 12]));
        }
        assert_eq!(batch.groups().iter().map(|group| group.count).collect::<Vec<_>>(), [1, 2]);
    }
}
