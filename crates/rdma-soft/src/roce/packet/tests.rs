//! Tests of packet encoding.

use super::*;
use crate::roce::partition::DEFAULT_PKEY;

fn packet(transport: Transport, body: Body) -> Packet {
    Packet {
        transport,
        pkey: DEFAULT_PKEY,
        dest: Qpn(0x11),
        psn: Psn::new(0x80_0010),
        solicited: false,
        ack_request: true,
        body,
    }
}

fn emitted(packet: &Packet, payload: &[u8]) -> Vec<u8> {
    let mut image = Vec::new();
    packet.emit(payload.len(), &mut image, |image| image.extend_from_slice(payload));
    image
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap())
        .collect()
}

/// Headers captured from Linux rxe, without IP, UDP and ICRC.
#[test]
fn images_match_rxe() {
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 1 };
    let reth = Reth { remote: RemoteAddr { addr: 0, rkey: Rkey(0x223) }, length: 0 };
    let none = Tail::None;
    let psn = Psn::new;
    let rc =
        |body, at, ack_request| Packet { psn: psn(at), ack_request, ..packet(Transport::Rc, body) };
    let cases = [
        (
            rc(Body::Send { part: Part::Only, tail: none }, 0x10, true),
            &[][..],
            "0400ffff0000001180000010",
        ),
        (
            Packet::congestion_notification(0xffff, Qpn(0x11)),
            &[],
            "8100ffff400000110000000000000000000000000000000000000000",
        ),
        (rc(Body::Acknowledge(aeth), 0x10, false), &[], "1100ffff00000011000000101f000001"),
        (
            rc(Body::Send { part: Part::Only, tail: none }, 0x10, true),
            &[0xff],
            "0430ffff0000001180000010ff000000",
        ),
        (
            rc(Body::ReadRequest(reth), 0x18, true),
            &[],
            "0c00ffff000000118000001800000000000000000000022300000000",
        ),
    ];
    for (packet, payload, expected) in cases {
        let image = emitted(&packet, payload);
        assert_eq!(image, hex(expected));
        assert_eq!(Packet::parse(&image), Ok((packet, payload)));
    }
}

fn every_kind() -> Vec<Packet> {
    let remote = RemoteAddr { addr: 0x0123_4567_89ab_cdef, rkey: Rkey(0xdead_beef) };
    let reth = Reth { remote, length: 0x0102_0304 };
    let imm = Imm(0x1122_3344);
    let mut all = Vec::new();
    for part in [Part::First, Part::Middle, Part::Last, Part::Only] {
        let shown = if part.begins() { reth } else { Reth::default() };
        let aeth = if part == Part::Middle { 0 } else { 0x00ab_cdef };
        for transport in [Transport::Rc, Transport::Uc, Transport::Dci] {
            all.push(packet(transport, Body::Send { part, tail: Tail::None }));
            all.push(packet(transport, Body::Write { part, reth: shown, imm: None }));
            if part.ends() {
                all.push(packet(transport, Body::Send { part, tail: Tail::Imm(imm) }));
                all.push(packet(transport, Body::Write { part, reth: shown, imm: Some(imm) }));
            }
        }
        if part.ends() {
            all.push(packet(Transport::Rc, Body::Send { part, tail: Tail::Invalidate(Rkey(7)) }));
        }
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: aeth };
        all.push(packet(Transport::Rc, Body::ReadResponse { part, aeth }));
    }
    all.push(packet(Transport::Rc, Body::ReadRequest(reth)));
    for op in
        [AtomicOp::CompareSwap { compare: 1, swap: u64::MAX }, AtomicOp::FetchAdd { add: 1 << 63 }]
    {
        all.push(packet(Transport::Rc, Body::Atomic { remote, op }));
    }
    for byte in 0..=0x7f {
        let aeth = Aeth { syndrome: Syndrome::from_byte(byte), msn: 3 };
        all.push(packet(Transport::Rc, Body::Acknowledge(aeth)));
        all.push(packet(Transport::Rc, Body::AtomicAcknowledge { aeth, original: 9 }));
    }
    for body in [
        Body::Open { key: DcKey(1 << 63 | 5), mtu: Mtu::Mtu512 },
        Body::Accept,
        Body::Gone,
        Body::Close,
    ] {
        all.push(packet(Transport::Dci, body));
    }
    all.push(packet(Transport::Dci, Body::ReadRequest(reth)));
    for imm in [None, Some(imm)] {
        all.push(packet(
            Transport::Ud,
            Body::Datagram { qkey: Qkey(0x8001_0000), source: Qpn(3), imm },
        ));
    }
    all
}

#[test]
fn every_packet_round_trips() {
    for packet in every_kind() {
        for len in 0..9 {
            let payload: Vec<u8> = (0..len).collect();
            let image = emitted(&packet, &payload);
            assert_eq!(image.len() % 4, 0);
            assert_eq!(Packet::parse(&image), Ok((packet, &payload[..])));
        }
    }
}

#[test]
fn dc_packets_use_manufacturer_opcodes() {
    for packet in every_kind() {
        let image = emitted(&packet, &[]);
        assert_eq!(image[0] >> 5 == 6, packet.transport == Transport::Dci, "{packet:?}");
        let dc_only =
            matches!(packet.body, Body::Open { .. } | Body::Accept | Body::Gone | Body::Close);
        if dc_only {
            // RC does not have these opcodes.
            let mut image = image;
            image[0] &= 31;
            assert_eq!(Packet::parse(&image), Err(WireError::Unsupported));
        }
    }
}

// Shows S4.
#[test]
fn random_images_parse_or_fail() {
    let mut random = fastrand::Rng::with_seed(1);
    for packet in every_kind() {
        let image = emitted(&packet, &[1, 2, 3]);
        // Truncated at every length, with one random byte.
        for len in 0..=image.len() {
            let mut cut = image[..len].to_vec();
            if let Some(byte) = cut.get_mut(random.usize(..len.max(1))) {
                *byte = random.u8(..);
            }
            if let Ok((parsed, payload)) = Packet::parse(&cut) {
                assert_eq!(Packet::parse(&emitted(&parsed, payload)), Ok((parsed, payload)));
            }
        }
    }
}

#[test]
fn unseal_detects_every_flipped_bit() {
    let mut sealed = emitted(&every_kind()[0], &[1, 2, 3]);
    let image = sealed.clone();
    seal(&mut sealed);
    assert_eq!(unseal(&sealed), Ok(&image[..]));
    for bit in 0..sealed.len() * 8 {
        let mut damaged = sealed.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(unseal(&damaged), Err(WireError::Checksum));
    }
    assert_eq!(unseal(&sealed[..3]), Err(WireError::Truncated));
}

#[test]
fn parse_keeps_the_partition_and_ignores_congestion_and_reserved_bits() {
    let packet = every_kind()[0];
    let mut image = emitted(&packet, &[1, 2, 3]);
    // Migration request, both congestion bits, reserved bits.
    image[1] |= 0x40;
    image[4] = 0xff;
    image[8] |= 0x7f;
    assert_eq!(Packet::parse(&image), Ok((packet, &[1, 2, 3][..])));
    image[2..4].copy_from_slice(&[0x12, 0x34]);
    let other = Packet { pkey: 0x1234, ..packet };
    assert_eq!(Packet::parse(&image), Ok((other, &[1, 2, 3][..])));
    image[1] |= 1;
    assert_eq!(Packet::parse(&image), Err(WireError::Unsupported), "another version");
}
