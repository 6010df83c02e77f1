//! The invariant CRC (ICRC) of RoCE v2.
//!
//! The CRC-32 of IEEE 802.3 covers eight bytes of ones, in place of InfiniBand's LRH (IBTA
//! A17.3.3), and all bytes from the IP header on. Type of service, hop limit, both checksums and
//! the congestion bits of the BTH count as ones. It is stored least significant byte first.
//!
//! It covers the IPv4 identification, which a socket can neither choose nor read:
//!
//! - Sending: Linux writes known values, see [`Header::check`].
//! - Receiving: 16 bits of identification and "do not fragment" are unknown. CRCs are linear, so
//!   these bits change the ICRC within a space of 17 dimensions, all of which [`Header::verify`]
//!   accepts. One in 2^15 damaged packets passes, besides the checksums of UDP and Ethernet.
//!
//! IPv6 has no unknown bits.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;

use crc32fast::Hasher;

pub(crate) const CHECK: usize = 4;
const BTH: usize = 12;
/// Offset of the congestion bits.
const CONGESTION: usize = 4;
/// Bytes of ones before the IP header.
const DUMMY: usize = 8;
const UDP: usize = 8;
const IPV4: usize = 20;
const IPV6: usize = 40;
/// Maximum length of the headers.
const LONGEST: usize = DUMMY + IPV6 + UDP + BTH;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) source: IpAddr,
    pub(crate) source_port: u16,
    pub(crate) destination: IpAddr,
    pub(crate) destination_port: u16,
}

/// Appends the ICRC of a packet between ports 4791 of two addresses.
pub(crate) fn seal(source: IpAddr, destination: IpAddr, image: &mut Vec<u8>) {
    let header = Header { source, source_port: 4791, destination, destination_port: 4791 };
    let check = header.check(image, 0);
    image.extend_from_slice(&check.to_le_bytes());
}

impl Header {
    /// Returns the ICRC of `covered`, from BTH to padding, sent by Linux from a socket that is not
    /// connected and never fragments.
    ///
    /// The identification is `segment`, the index in the segmentation-offload batch.
    pub(crate) fn check(&self, covered: &[u8], segment: u16) -> u32 {
        let mut front = [0xff; LONGEST];
        let length = (covered.len() + CHECK + UDP) as u16;
        let udp = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                ipv4(&mut front, source, destination, length, segment)
            }
            (source, destination) => ipv6(&mut front, to_v6(source), to_v6(destination), length),
        };
        put(&mut front, udp, &self.source_port.to_be_bytes());
        put(&mut front, udp + 2, &self.destination_port.to_be_bytes());
        put(&mut front, udp + 4, &length.to_be_bytes());
        let bth = udp + UDP;
        let (head, rest) = covered.split_at(covered.len().min(BTH));
        put(&mut front, bth, head);
        front[bth + CONGESTION] = 0xff;
        let mut hasher = Hasher::new();
        hasher.update(&front[..bth + head.len()]);
        hasher.update(rest);
        hasher.finalize()
    }

    /// Returns whether `check` can be the ICRC of `covered`, see the [module](self).
    ///
    /// `segment` is the likely identification, as in [`check`](Self::check): the answer is the same
    /// for any, but faster for the right one.
    pub(crate) fn verify(&self, covered: &[u8], check: u32, segment: u16) -> bool {
        // Too short for the masked byte.
        if covered.len() < BTH {
            return false;
        }
        let difference = self.check(covered, segment) ^ check;
        difference == 0 || self.is_ipv4() && Unknown::get().can_cause(difference, covered.len())
    }

    const fn is_ipv4(&self) -> bool {
        matches!((self.source, self.destination), (IpAddr::V4(_), IpAddr::V4(_)))
    }
}

/// Returns the offset of UDP.
fn ipv4(
    front: &mut [u8; LONGEST],
    source: Ipv4Addr,
    destination: Ipv4Addr,
    udp_length: u16,
    segment: u16,
) -> usize {
    let total = udp_length + IPV4 as u16;
    put(front, DUMMY, &[0x45]);
    put(front, DUMMY + 2, &total.to_be_bytes());
    put(front, DUMMY + 4, &segment.to_be_bytes());
    // "Do not fragment", a time to live of ones, and UDP.
    put(front, DUMMY + 6, &[0x40, 0x00, 0xff, 17]);
    put(front, DUMMY + 12, &source.octets());
    put(front, DUMMY + 16, &destination.octets());
    DUMMY + IPV4
}

/// Returns the offset of UDP.
fn ipv6(
    front: &mut [u8; LONGEST],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    udp_length: u16,
) -> usize {
    put(front, DUMMY, &[0x6f]);
    put(front, DUMMY + 4, &udp_length.to_be_bytes());
    put(front, DUMMY + 6, &[17]);
    put(front, DUMMY + 8, &source.octets());
    put(front, DUMMY + 24, &destination.octets());
    DUMMY + IPV6
}

fn put(front: &mut [u8; LONGEST], at: usize, bytes: &[u8]) {
    front[at..at + bytes.len()].copy_from_slice(bytes);
}

fn to_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

#[derive(Debug)]
struct Unknown {
    /// Differences of each bit if the message ends after the three bytes that contain them. Each
    /// leading bit is absent from later elements.
    basis: [u32; BITS],
    /// Element `n` is x^(-8n), which moves a difference back over `n` bytes.
    back: Vec<u32>,
}

const BITS: usize = 17;
/// Bytes between those three and the transport packet.
const AFTER: usize = IPV4 - 7 + UDP;
/// More than the largest MTU and all headers.
const LONGEST_PACKET: usize = 4096 + 64;

impl Unknown {
    fn get() -> &'static Self {
        static UNKNOWN: OnceLock<Unknown> = OnceLock::new();
        UNKNOWN.get_or_init(Self::new)
    }

    fn new() -> Self {
        let zero = crc32fast::hash(&[0; 3]);
        let mut basis = [0; BITS];
        // In wire order: 16 bits of identification, a reserved bit, "do not fragment".
        for (slot, bit) in basis.iter_mut().zip((0..16).chain([17])) {
            let mut message = [0_u8; 3];
            message[bit / 8] = 0x80 >> (bit % 8);
            *slot = crc32fast::hash(&message) ^ zero;
        }
        eliminate(&mut basis);
        // The polynomial is primitive: x^(2^32 - 1) = 1.
        let step = power(u32::MAX - 8);
        let mut back = vec![ONE];
        for at in 0..AFTER + LONGEST_PACKET {
            back.push(multiply(back[at], step));
        }
        Self { basis, back }
    }

    /// Returns whether unknown bits can cause `difference` in a packet of `length` covered bytes.
    fn can_cause(&self, difference: u32, length: usize) -> bool {
        let Some(&back) = self.back.get(length + AFTER) else { return false };
        let at_end = multiply(difference, back);
        let left = self.basis.iter().fold(at_end, |left, &base| left.min(left ^ base));
        left == 0
    }
}

/// Removes each element's leading bit from all later elements.
fn eliminate(basis: &mut [u32; BITS]) {
    for at in 0..BITS {
        basis[at..].sort_unstable_by(|a, b| b.cmp(a));
        let pivot = basis[at];
        for other in &mut basis[at + 1..] {
            *other = (*other).min(*other ^ pivot);
        }
    }
}

const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;

/// Multiplies modulo the polynomial of the CRC.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        // Masks instead of branches: the bits are unpredictable.
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = b >> 1 ^ POLYNOMIAL & (b & 1).wrapping_neg();
    }
    product
}

/// Returns x^exponent.
fn power(mut exponent: u32) -> u32 {
    let (mut result, mut square) = (ONE, ONE >> 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Header = Header {
        source: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
        source_port: 4791,
        destination: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
        destination_port: 4791,
    };

    fn bytes(random: &mut fastrand::Rng, len: usize) -> Vec<u8> {
        (0..len).map(|_| random.u8(..)).collect()
    }

    /// Computes the ICRC independently of `Header::check`.
    fn icrc_with(id: u16, fragment: u8, covered: &[u8]) -> u32 {
        let (IpAddr::V4(source), IpAddr::V4(destination)) = (V4.source, V4.destination) else {
            unreachable!()
        };
        let udp = (covered.len() + CHECK + UDP) as u16;
        let mut all = vec![0xff; DUMMY];
        all.extend_from_slice(&[0x45, 0xff]);
        all.extend_from_slice(&(udp + IPV4 as u16).to_be_bytes());
        all.extend_from_slice(&id.to_be_bytes());
        all.extend_from_slice(&[fragment, 0, 0xff, 17, 0xff, 0xff]);
        all.extend_from_slice(&source.octets());
        all.extend_from_slice(&destination.octets());
        all.extend_from_slice(&4791_u16.to_be_bytes());
        all.extend_from_slice(&4791_u16.to_be_bytes());
        all.extend_from_slice(&udp.to_be_bytes());
        all.extend_from_slice(&[0xff; 2]);
        let bth = all.len();
        all.extend_from_slice(covered);
        all[bth + CONGESTION] = 0xff;
        crc32fast::hash(&all)
    }

    #[test]
    fn verify_accepts_any_ipv4_identification() {
        let mut random = fastrand::Rng::with_seed(3);
        for len in [12, 16, 20, 28, 276, 1040, 4096 + 16] {
            let covered = bytes(&mut random, len);
            for _ in 0..200 {
                let id = random.u16(..);
                for fragment in [0x00, 0x40] {
                    assert!(
                        V4.verify(&covered, icrc_with(id, fragment, &covered), random.u16(..)),
                        "{len} {id:#x} {fragment:#x}"
                    );
                }
            }
            assert_eq!(V4.check(&covered, 7), icrc_with(7, 0x40, &covered));
        }
    }

    // Shows S4.
    #[test]
    fn verify_finds_damage_except_one_in_32768() {
        let mut random = fastrand::Rng::with_seed(4);
        let covered = bytes(&mut random, 64);
        let check = V4.check(&covered, 0);
        for bit in (0..covered.len() * 8).filter(|bit| bit / 8 != CONGESTION) {
            let mut damaged = covered.clone();
            damaged[bit / 8] ^= 0x80 >> (bit % 8);
            assert!(!V4.verify(&damaged, check, 0), "bit {bit}");
        }
        let accepted = (0..150_000).filter(|_| V4.verify(&covered, random.u32(..), 0)).count();
        assert!(accepted < 20, "{accepted} of 150000 random checks accepted");
    }

    #[test]
    fn ipv6_check_is_exact() {
        let v6 = Header {
            source: IpAddr::V6(Ipv6Addr::LOCALHOST),
            destination: IpAddr::V6(Ipv6Addr::LOCALHOST),
            ..V4
        };
        let covered = bytes(&mut fastrand::Rng::with_seed(5), 40);
        let check = v6.check(&covered, 0);
        assert!(v6.verify(&covered, check, 1));
        for bit in 0..32 {
            assert!(!v6.verify(&covered, check ^ 1 << bit, 0));
        }
        assert!(!v6.verify(&covered[..11], check, 0), "shorter than a BTH");
        assert!(!v6.verify(&[], check, 0));
    }
}
