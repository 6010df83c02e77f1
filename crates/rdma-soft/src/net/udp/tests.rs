//! Captures and published packets are parsed, verified, and encoded to the same bytes.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use crate::roce::packet::{Packet, WireError};

use crate::roce::icrc::{CHECK, Header};

struct Datagram {
    header: Header,
    /// IPv4 identification and flags.
    identification: Option<(u16, u8)>,
    payload: Vec<u8>,
}

/// Returns the RoCE v2 datagram, if any.
fn datagram(ip: &[u8]) -> Option<Datagram> {
    let word = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
    let (source, destination, start, total, identification) = if ip[0] >> 4 == 4 {
        let address =
            |at| IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap()));
        assert_eq!(ip[0] & 15, 5, "no options");
        (ip[9] == 17)
            .then(|| (address(12), address(16), 20, usize::from(word(2)), Some((word(4), ip[6]))))?
    } else {
        let address =
            |at| IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap()));
        (ip[6] == 17).then(|| (address(8), address(24), 40, 40 + usize::from(word(4)), None))?
    };
    let header =
        Header { source, source_port: word(start), destination, destination_port: word(start + 2) };
    let payload = ip[start + 8..total].to_vec();
    (header.destination_port == 4791).then_some(Datagram { header, identification, payload })
}

/// Parses, verifies and encodes; `normal` maps the bytes to this crate's encoding.
fn check(datagram: &Datagram, normal: impl FnOnce(&mut Vec<u8>)) -> Result<Packet, WireError> {
    let (covered, check) = datagram.payload.split_last_chunk::<CHECK>().unwrap();
    let check = u32::from_le_bytes(*check);
    assert!(datagram.header.verify(covered, check, 0), "the check holds");
    let found = datagram.header.check(covered, 0);
    match datagram.identification {
        // With "don't fragment", only the identification is unknown.
        Some((identification, 0x40)) => {
            assert_eq!(datagram.header.check(covered, identification), check)
        }
        Some(_) => assert_ne!(found, check),
        None => assert_eq!(found, check),
    }
    for at in [0, covered.len() - 1] {
        let mut damaged = covered.to_vec();
        damaged[at] ^= 1;
        assert!(!datagram.header.verify(&damaged, check, 0), "damage at {at} is found");
    }
    let (packet, payload) = Packet::parse(covered)?;
    let mut again = Vec::new();
    packet.emit(payload.len(), &mut again, |out| out.extend_from_slice(payload));
    let mut expected = covered.to_vec();
    normal(&mut expected);
    assert_eq!(again, expected, "{packet:?}");
    Ok(packet)
}

fn captures() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
    let all = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> =
        all.filter(|path| path.extension().is_some_and(|extension| extension == "pcap")).collect();
    all.sort();
    all
}

/// Reads an Ethernet capture.
fn packets(path: &Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(path).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(
        (word(0), word(20)),
        (0xa1b2_c3d4, 1),
        "{}: Ethernet, little-endian",
        path.display()
    );
    let (mut at, mut found) = (24, Vec::new());
    while at + 16 <= bytes.len() {
        let length = word(at + 8) as usize;
        let frame = &bytes[at + 16..at + 16 + length];
        if matches!(frame[12..14], [0x08, 0x00] | [0x86, 0xdd]) {
            found.push(frame[14..].to_vec());
        }
        at += 16 + length;
    }
    found
}

#[test]
fn captures_are_parsed_and_written_again() {
    let mut count = 0;
    let files = captures();
    for path in &files {
        let all: Vec<_> = packets(path).iter().filter_map(|ip| datagram(ip)).collect();
        assert!(!all.is_empty(), "{}: nothing of RoCE v2", path.display());
        for one in &all {
            if let Err(error) = check(one, |_| {}) {
                panic!("{}: {error:?}", path.display());
            }
        }
        count += all.len();
    }
    // All captures were read.
    assert_eq!((files.len(), count), (29, 258));
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap())
        .collect()
}

// SoftRoCE packets, and a congestion notification of a ConnectX-4 Lx.
#[test]
fn published_packets_are_verified() {
    let known = [
        "4500002c988b400040118e210a0900010a090002c12112b7001800000400ffff0000001180001000c2bee445",
        "45000030c60d40004011609b0a0900020a090001c12112b7001c00001100ffff00000011000010001f000001\
         9323f422",
        "45000030988c400040118e1c0a0900010a090002c12112b7001c00000430ffff000000118000100100000000\
         f3f23045",
        "4500003c98c8400040118dd40a0900010a090002c12112b7002800000c00ffff000000118000101800000000\
         33bbd00000000223000000009c307f0c",
        "60000000001c1140fd000000000000000000000000000002fd000000000000000000000000000001c25812b7\
         001c00001100ffff00000019000010001f0000018778a524",
    ];
    for text in known {
        check(&datagram(&hex(text)).unwrap(), |_| {}).unwrap();
    }
    let congestion = "45c2003c718c4000401191610a0011010a001201000012b7002800008100ffff400001180000\
                      00000000000000000000000000000000000082fd002a";
    check(&datagram(&hex(congestion)).unwrap(), |_| {}).unwrap();
}

// From scapy (`roce.uts`), with a migration request.
#[test]
fn migration_request_is_not_repeated() {
    let text = "45010040047840004011b4d5c0a80007c0a80007c00012b7002caca22460ffff000000d300cf171046\
                30818be28935d90e9a95505401be885e50000078f353f3";
    check(&datagram(&hex(text)).unwrap(), |image| image[1] &= !0x40).unwrap();
}
