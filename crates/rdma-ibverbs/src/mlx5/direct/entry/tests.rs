//! The bytes of each shape of WQE, against encodings written by hand.

use rdma_provider::types::{Lkey, Rkey};

use super::super::layout::{BLOCK, control};
use super::super::ring::Block;
use super::*;

const QPN: u32 = 0xab_cdef;
const ONE: Sge = Sge { addr: 0x1122_3344_5566_7788, length: 0x99, lkey: Lkey(0xaabb_ccdd) };
const EMPTY: Sge = Sge { addr: 1, length: 0, lkey: Lkey(2) };
const TWO: Sge = Sge { addr: 2, length: 3, lkey: Lkey(4) };

fn header() -> Header {
    Header { qpn: QPN, flags: control::SIGNALED | control::FENCE, immediate: 0x0102_0304 }
}

/// Builds an entry at block `index` of four, and returns its segments and the ring's bytes from
/// there on.
fn build(index: u32, make: impl FnOnce(&Ring<'_>) -> u32) -> (u32, Vec<u8>) {
    let mut memory = vec![Block([0xee; BLOCK]); 4];
    let segments = make(&Ring::new(&mut memory));
    let bytes: Vec<_> = memory.iter().flat_map(|block| block.0).collect();
    let start = (index % 4) as usize * BLOCK;
    (segments, [&bytes[start..], &bytes[..start]].concat())
}

/// Checks an entry: its control segment and `rest`; all bytes behind it are as before.
fn check(make: impl Fn(&Ring<'_>, u32) -> u32, opcode: u8, rest: &[&[u8]]) {
    let rest = rest.concat();
    for index in [0, 3, 0x1_0002, u32::MAX] {
        let (segments, bytes) = build(index, |ring| make(ring, index));
        let length = 16 + rest.len().next_multiple_of(16);
        assert_eq!(segments as usize, length / 16);
        let [.., high, low] = index.to_be_bytes();
        let mut expected = vec![0, high, low, opcode];
        expected.extend([0xab, 0xcd, 0xef, segments as u8, 0, 0, 0, 0x88, 1, 2, 3, 4]);
        expected.extend(&rest);
        // The padding of inline data is not written.
        expected.resize(bytes.len(), 0xee);
        assert_eq!(bytes, expected, "index {index:#x}");
    }
}

const DATA_ONE: [u8; 16] =
    [0, 0, 0, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88];
const DATA_TWO: [u8; 16] = [0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2];
const REMOTE: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0, 0, 0];
const ADDRESS: u64 = 0x0001_0203_0405_0607;
const KEY: u32 = 0x0809_0a0b;

#[test]
fn sends_have_a_list_without_empty_buffers() {
    for opcode in [Opcode::Send, Opcode::SendWithImm, Opcode::SendInvalidate] {
        let make = |ring: &Ring<'_>, index| {
            Entry::connected(ring, index).send(opcode).data(&[ONE, EMPTY, TWO]).finish(&header())
        };
        check(make, opcode as u8, &[&DATA_ONE, &DATA_TWO]);
    }
    let empty = |ring: &Ring<'_>, index| {
        Entry::connected(ring, index).send(Opcode::Send).data(&[]).finish(&header())
    };
    check(empty, 0x0a, &[]);
}

#[test]
fn inline_data_follow_their_length_and_wrap_around() {
    let bytes: Vec<u8> = (0..=200).collect();
    for length in [0, 1, 12, 13, 28, 44, 45, 108, 200] {
        let bytes = &bytes[..length];
        let make = |ring: &Ring<'_>, index| {
            let entry = Entry::connected(ring, index).write(Opcode::WriteWithImm);
            entry.remote(ADDRESS, KEY).inline(bytes).finish(&header())
        };
        let marker = [0x80, 0, 0, length as u8];
        let marker = if length == 0 { &[][..] } else { &marker };
        check(make, 0x09, &[&REMOTE, marker, bytes]);
    }
}

#[test]
fn reads_and_writes_name_remote_memory() {
    let write = |ring: &Ring<'_>, index| {
        let entry = Entry::connected(ring, index).write(Opcode::Write);
        entry.remote(ADDRESS, KEY).data(&[ONE]).finish(&header())
    };
    check(write, 0x08, &[&REMOTE, &DATA_ONE]);
    let read = |ring: &Ring<'_>, index| {
        let entry = Entry::connected(ring, index).read().remote(ADDRESS, KEY);
        entry.buffer(&[TWO; 9]).finish(&header())
    };
    check(read, 0x10, &[&REMOTE, &DATA_TWO.repeat(9)]);
}

#[test]
fn atomics_have_operands() {
    let operands = [0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 8];
    for opcode in [Opcode::CompareSwap, Opcode::FetchAdd] {
        let make = |ring: &Ring<'_>, index| {
            let entry = Entry::connected(ring, index).atomic(opcode).remote(ADDRESS, KEY);
            entry.operands(7, 8).buffer(&[ONE]).finish(&header())
        };
        check(make, opcode as u8, &[&REMOTE, &operands, &DATA_ONE]);
    }
}

fn some_route() -> Route {
    Route {
        key: Be64::new(u64::MAX),
        number: Be32::new(u32::MAX),
        rate_service_level: 1,
        loopback_path_bits: 2,
        lid: Be16::new(0x0304),
        reserved: [0; 4],
        mac: [5, 6, 7, 8, 9, 10],
        traffic_class: 11,
        hop_limit: 12,
        source_flow: Be32::new(0x0d0e_0f10),
        gid: [17; 16],
    }
}

const ROUTED: [u8; 32] = [
    0, 1, 2, 3, 4, 5, 6, 7, 0x80, 0, 0x12, 0x34, 1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12,
    13, 14, 15, 16,
];

#[test]
fn datagrams_have_a_route_with_their_own_number_and_key() {
    let make = |ring: &Ring<'_>, index| {
        let entry = Entry::unconnected(ring, index).route(&some_route(), 0x1234, ADDRESS);
        entry.send(Opcode::Send).data(&[ONE, TWO]).finish(&header())
    };
    check(make, 0x0a, &[&ROUTED, &[17; 16], &DATA_ONE, &DATA_TWO]);
}

fn window() -> WindowBind {
    WindowBind {
        window: 0,
        region: 0,
        current: Rkey(0x100),
        rkey: Rkey(0x1f3),
        lkey: Lkey(0xaabb_ccdd),
        addr: ADDRESS,
        len: 1 << 31,
        access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    }
}

#[test]
fn binding_gives_the_window_its_key_memory_rights_and_owner() {
    let make = |ring: &Ring<'_>, index| {
        Entry::connected(ring, index).bind(QPN, &window()).finish(&header())
    };
    // Inline, fails unless free, from offset 0; one element, whose unit is four octowords.
    let umr = [&[0xb0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x20, 0x3c, 0x60, 0x41][..], &[0; 32]];
    let context = [0, 0, 0x50, 0, 0xab, 0xcd, 0xef, 0xf3, 0, 0, 0, 0, 0, 0, 0, 0];
    let range = [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0x80, 0, 0, 0];
    let memory = [0x80, 0, 0, 0, 0xaa, 0xbb, 0xcc, 0xdd, 0, 1, 2, 3, 4, 5, 6, 7];
    check(make, 0x25, &[&umr.concat(), &context, &range, &[0; 32], &memory, &[0; 48]]);
}

#[test]
fn invalidation_frees_the_key() {
    let make =
        |ring: &Ring<'_>, index| Entry::connected(ring, index).invalidate().finish(&header());
    let umr = [&[0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0x60, 0][..], &[0; 32]];
    let context = [&[0x40, 0, 0, 0, 0xff, 0xff, 0xff, 0][..], &[0; 56]];
    check(make, 0x25, &[&umr.concat(), &context.concat()]);
}

// It would cross the end of the ring.
#[test]
#[should_panic(expected = "crosses a block")]
fn binding_with_a_route_is_refused() {
    let mut memory = [Block([0; BLOCK]); 1];
    let ring = Ring::new(&mut memory);
    let entry = Entry::unconnected(&ring, 0).route(&some_route(), 1, 2);
    entry.bind(QPN, &window()).finish(&header());
}
