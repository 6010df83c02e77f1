//! Requests of UC and UD, which are not acknowledged.

use std::net::IpAddr;

use rdma_provider::types::{Gid, WcFlags, WcOpcode, WcStatus, WorkCompletion};

use crate::memory::dma::Payload;
use crate::memory::keys::Keys;
use crate::roce::ip_fields::{IpFields, Origin};
use crate::roce::packet::{Body, Packet};

use super::{Piece, Receiver, Responder};

/// Length of the routing header before a datagram.
pub(super) const GRH: usize = 40;

/// Maximum PSN distance of a duplicate or reordered packet, which UC must detect. Farther behind,
/// the peer has restarted.
const RECENT: i32 = 1 << 16;

impl Responder {
    pub(super) fn on_unreliable(
        &mut self,
        packet: &Packet,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        self.counters.packets += 1;
        let part = match packet.body {
            Body::Send { part, .. } | Body::Write { part, .. } => part,
            _ => {
                self.counters.dropped += 1;
                return;
            }
        };
        let distance = packet.psn.distance_from(self.expected);
        if (-RECENT..0).contains(&distance) {
            // Duplicated or reordered: its message was delivered or abandoned.
            self.counters.duplicates += 1;
            return;
        }
        if distance != 0 {
            // A gap loses the message; the next first packet starts over (IBTA 9.8.2.2).
            self.counters.out_of_sequence += 1;
            self.message = None;
        }
        if part.begins() {
            self.message = None;
        } else if self.message.is_none() {
            self.expected = packet.psn.add(1);
            self.counters.dropped += 1;
            return;
        }
        let done = match packet.body {
            Body::Send { tail, .. } => {
                self.on_send(Piece::of(packet, part), tail, payload, keys, out)
            }
            Body::Write { reth, imm, .. } => {
                self.on_write(Piece::of(packet, part), reth, imm, payload, keys, out)
            }
            _ => return,
        };
        self.expected = packet.psn.add(1);
        // UC sends no replies.
        self.replies.clear();
        self.gap_reported = false;
        if let Err(refusal) = done {
            self.message = None;
            self.counters.dropped += 1;
            if self.receive_held && refusal.status != WcStatus::REM_INV_REQ_ERR {
                self.fail_receive(refusal.status, out);
            }
        }
    }

    /// Handles a datagram to a multicast group to which the queue pair is attached.
    pub(crate) fn on_multicast(
        &mut self,
        packet: &Packet,
        (origin, group): (Origin, Gid),
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        if self.admits(packet, out) {
            self.on_datagram(packet, (origin, group), payload, keys, out);
        }
    }

    pub(super) fn on_datagram(
        &mut self,
        packet: &Packet,
        (origin, destination): (Origin, Gid),
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        self.counters.packets += 1;
        let Body::Datagram { qkey, source: src_qpn, imm } = packet.body else {
            self.counters.dropped += 1;
            return;
        };
        if qkey != self.config.qkey || !self.take_receive(out) {
            self.counters.dropped += 1;
            return;
        }
        let len = payload.len();
        if self.receive.length < (GRH + len) as u64 {
            self.counters.dropped += 1;
            self.received = (GRH + len) as u32;
            self.fail_receive(WcStatus::LOC_LEN_ERR, out);
            return;
        }
        let header = routing_header(origin, destination, len);
        self.received = 0;
        let filled = self
            .fill_receive(&Payload::Bytes(&header), keys)
            .and_then(|()| self.fill_receive(payload, keys));
        if let Err(refusal) = filled {
            self.counters.dropped += 1;
            self.fail_receive(refusal.status, out);
            return;
        }
        let completion = WorkCompletion {
            byte_len: self.received,
            imm_or_rkey: imm.map_or(0, |imm| imm.0.to_be()),
            flags: if imm.is_some() { WcFlags::GRH | WcFlags::WITH_IMM } else { WcFlags::GRH },
            opcode: WcOpcode::RECV,
            src_qpn,
            ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
        };
        self.finish_receive(&completion, packet.solicited, out);
    }
}

/// Returns the IPv6 header, or 20 zero bytes and the IPv4 header (IBTA A17.4.5).
pub(super) fn routing_header(origin: Origin, destination: Gid, payload: usize) -> [u8; GRH] {
    // BTH 12, DETH 8, ICRC 4, UDP 8.
    const OVERHEAD: usize = 32;
    const UDP: u8 = 17;
    let Origin { gid: source, ip_fields } = origin;
    let IpFields { traffic_class, hop_limit, flow_label } = ip_fields;
    let mut header = [0; GRH];
    match (source.to_ip(), destination.to_ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = &mut header[20..];
            ip[0] = 0x45;
            ip[1] = traffic_class;
            ip[2..4].copy_from_slice(&((payload + OVERHEAD + 20) as u16).to_be_bytes());
            // Do not fragment.
            ip[6] = 0x40;
            ip[8] = hop_limit;
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&from.octets());
            ip[16..20].copy_from_slice(&to.octets());
            let sum: u32 = ip
                .chunks_exact(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        _ => {
            let first = 6 << 28 | u32::from(traffic_class) << 20 | flow_label;
            header[..4].copy_from_slice(&first.to_be_bytes());
            header[4..6].copy_from_slice(&((payload + OVERHEAD) as u16).to_be_bytes());
            header[6] = UDP;
            header[7] = hop_limit;
            header[8..24].copy_from_slice(&source.0);
            header[24..40].copy_from_slice(&destination.0);
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(ip: &str) -> Gid {
        Gid::from(ip.parse::<IpAddr>().unwrap())
    }

    fn origin(ip: &str, traffic_class: u8, hop_limit: u8, flow_label: u32) -> Origin {
        let ip_fields = IpFields { traffic_class, hop_limit, flow_label };
        Origin { gid: gid(ip), ip_fields }
    }

    #[test]
    fn routing_header_of_ipv4_has_its_length_and_checksum_behind_20_zero_bytes() {
        // Sums without carry, with one, and with a second one caused by the first.
        for (from, to, payload) in [
            ("10.0.0.1", "10.0.0.2", 100),
            ("192.168.255.254", "172.31.255.255", 1024),
            ("255.255.255.255", "58.188.255.255", 0),
        ] {
            let header = routing_header(origin(from, 104, 9, 0), gid(to), payload);
            assert_eq!(header[..20], [0; 20]);
            let length = (payload as u16 + 52).to_be_bytes();
            assert_eq!(header[20..30], [0x45, 104, length[0], length[1], 0, 0, 0x40, 0, 9, 17]);
            let address = |at: usize| {
                std::net::Ipv4Addr::from(*header[at..].first_chunk::<4>().unwrap()).to_string()
            };
            assert_eq!([address(32), address(36)], [from, to]);
            // RFC 1071: the ones' complement sum of a header with its checksum.
            let words =
                header[20..].chunks(2).map(|word| u64::from(word[0]) * 256 + u64::from(word[1]));
            assert_eq!(words.sum::<u64>() % 0xffff, 0, "{from} to {to}");
        }
    }

    #[test]
    fn routing_header_of_ipv6_has_its_length_and_addresses() {
        let (from, to) = (origin("fe80::1", 104, 8, 0x12345), gid("2001:db8::2"));
        let header = routing_header(from, to, 300);
        assert_eq!(header[..8], [0x66, 0x81, 0x23, 0x45, 1, 76, 17, 8]);
        assert_eq!((&header[8..24], &header[24..]), (&from.gid.0[..], &to.0[..]));
    }
}
