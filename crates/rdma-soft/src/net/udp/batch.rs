//! Packets that leave with one system call.

use std::net::SocketAddr;
use std::ops::Range;

use super::peer_link::{PACKETS, TO_PEER};
use crate::roce::icrc::Header;

/// Bytes of a message: what the kernel takes as one, less headers.
const MESSAGE: usize = 65_000;
/// Headers and check of a packet, at most.
const HEADERS: usize = 64;
/// The longest packet that is added, of the largest MTU.
const LONGEST: usize = 4096 + HEADERS;
/// Bytes of a batch: what a queue pair may have underway, and room for a packet that may be the longest.
const ROOM: usize = TO_PEER as usize + PACKETS as usize * HEADERS + LONGEST;
/// Messages of a batch.
pub(super) const GROUPS: usize = 16;
/// Datagrams that the kernel makes of one message (`UDP_MAX_SEGMENTS`).
const SEGMENTS: u16 = 64;

/// Datagrams to one address that the kernel gets as one message, to be cut: all of one length but a shorter last one.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) to: SocketAddr,
    bytes: Range<usize>,
    pub(super) segment: usize,
    pub(super) count: u16,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    groups: Vec<Group>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::with_capacity(ROOM), groups: Vec::with_capacity(GROUPS) }
    }

    /// True if it takes another packet.
    pub(super) fn has_room(&self) -> bool {
        self.groups.len() < GROUPS && self.bytes.len() + LONGEST <= ROOM
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

    /// Packets.
    pub(super) fn len(&self) -> u64 {
        self.groups.iter().map(|group| u64::from(group.count)).sum()
    }

    pub(super) fn bytes_of(&self, group: &Group) -> &[u8] {
        &self.bytes[group.bytes.clone()]
    }

    /// Adds a packet with its check, by itself.
    pub(super) fn push_sealed(&mut self, image: &[u8], to: SocketAddr) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(image);
        self.groups.push(Group {
            to,
            bytes: start..self.bytes.len(),
            segment: image.len(),
            count: 1,
        });
    }

    /// Adds a packet that `write` appends, without its check; `join`: the kernel may be asked to cut messages.
    pub(super) fn push(
        &mut self,
        header: &Header,
        to: SocketAddr,
        join: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = self.bytes.len();
        write(&mut self.bytes);
        let length = self.bytes.len() - start + crate::roce::icrc::CHECK;
        // Of its group every packet is as long as the first; a shorter one ends it.
        let open = |group: &Group| {
            let full = group.bytes.len() == group.segment * usize::from(group.count);
            let fits = group.count < SEGMENTS && group.bytes.len() + length <= MESSAGE;
            join && group.to == to && full && fits && length <= group.segment
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
            None => self.groups.push(Group { to, bytes: start..end, segment: length, count: 1 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lengths_share_a_message() {
        let header = Header {
            source: [127, 0, 0, 1].into(),
            source_port: 1,
            destination: [127, 0, 0, 2].into(),
            destination_port: 2,
        };
        let to: SocketAddr = "127.0.0.2:2".parse().unwrap();
        let other: SocketAddr = "127.0.0.3:2".parse().unwrap();
        let shape = |packets: &[(SocketAddr, usize)], join| {
            let mut batch = Batch::new();
            for &(to, length) in packets {
                batch.push(&header, to, join, |out| out.resize(out.len() + length, 0));
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
    }
}
