//! The doorbell registers that queue pairs get.

use std::collections::{BTreeMap, BTreeSet};

use rdma_ibverbs::contract::Qp as _;
use rdma_ibverbs::types::{QpCaps, SendOp, Transport};

use crate::direct::Direct;
use crate::library::{Library, Way};
use crate::memory::{Cqe, HALF, Memory, REGISTER};
use crate::requests::{Payload, REMOTE, Request, sge};
use crate::world::{World, blue_flame};

const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 1, max_send_sge: 16, max_recv_sge: 1, max_inline: 0 };
const SILENT: u8 = 0x5a;

fn write(sges: u32) -> Request {
    let list = (0..sges).map(|number| sge(number, 8)).collect();
    Request::new(SendOp::Write(REMOTE), Payload::List(list))
}

/// Returns the page of a register.
fn page(register: &Memory) -> Memory {
    let start = register.start.map_addr(|address| address & !4095);
    Memory::new(start.cast(), 4096)
}

// Shows S3.
#[test]
fn queue_pairs_share_no_register_with_those_of_libmlx5() {
    let world = World::new();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for number in 0..40 {
        // Both orders of creation.
        if number % 2 == 0 {
            ours.push(Direct::new(&world, Transport::Rc, CAPS, None));
        }
        let way = if number % 3 == 0 { Way::Chain } else { Way::Extended };
        theirs.push(Library::new(&world, Transport::Rc, way, CAPS, None));
        if number % 2 == 1 {
            ours.push(Direct::new(&world, Transport::Rc, CAPS, None));
        }
    }
    let registers = |all: &mut dyn Iterator<Item = &Memory>| -> Vec<usize> {
        all.map(|register| register.start.addr()).collect()
    };
    let mine = registers(&mut ours.iter().map(|direct| &direct.rings.register));
    let other: BTreeSet<_> =
        registers(&mut theirs.iter().map(|library| &library.rings.register)).into_iter().collect();
    for register in &mine {
        assert!(
            other.iter().all(|&theirs| theirs.abs_diff(*register) >= REGISTER),
            "{register:#x} is also libmlx5's"
        );
    }
    let mut users = BTreeMap::<usize, Vec<&Direct>>::new();
    for (register, direct) in mine.iter().zip(&ours) {
        users.entry(*register).or_default().push(direct);
    }
    let alone = users.values().filter(|users| users.len() == 1).count();
    assert_eq!((users.len(), alone), (24, 16), "16 registers of one queue pair, 8 shared ones");
    // Queue pairs of a register use its halves in turn, whichever of them posts.
    for users in users.values() {
        let mut last = None;
        for round in 0..4 {
            for direct in users {
                let register = direct.rings.register;
                page(&register).fill(SILENT);
                if round % 2 == 0 {
                    direct.post(&[write(1)]).unwrap();
                } else {
                    assert!(direct.post_plain(write(1).plain().unwrap()));
                }
                let half = written(&register, &[]);
                let expected = match last {
                    Some(last) if blue_flame() => 1 - last,
                    Some(last) => last,
                    None => half,
                };
                assert_eq!(half, expected);
                last = Some(half);
            }
        }
    }
}

/// Returns the half of a register that was written. All other bytes of its page are untouched.
#[track_caller]
fn written(register: &Memory, expected: &[u8]) -> usize {
    let bytes = register.read();
    let half = usize::from(bytes[..HALF].iter().all(|&byte| byte == SILENT));
    if !expected.is_empty() {
        let mut whole = expected.to_vec();
        whole.resize(HALF, SILENT);
        assert_eq!(bytes[half * HALF..][..HALF], whole[..], "the half that was written");
    }
    let page = page(register);
    let from = register.start.addr() - page.start.addr();
    let mut all = page.read();
    all[from + half * HALF..from + (half + 1) * HALF].fill(SILENT);
    assert!(all.iter().all(|&byte| byte == SILENT), "stores outside of the half");
    half
}

#[test]
fn doorbells_and_copies_take_the_halves_in_turn() {
    let world = World::new();
    let mut direct = Direct::new(&world, Transport::Rc, CAPS, None);
    let (mut next, mut last) = (0, None);
    // Buffers of each request: up to 2 fit one block, up to 14 four blocks.
    let lists: [&[u32]; 12] =
        [&[1], &[2], &[3], &[1, 1], &[6], &[10], &[1, 2, 14], &[14], &[15], &[16], &[14], &[1]];
    for list in lists.iter().cycle().take(120) {
        let requests: Vec<_> = list.iter().map(|&sges| write(sges)).collect();
        page(&direct.rings.register).fill(SILENT);
        let first: u32 = next;
        match (&requests[..], requests[0].plain()) {
            ([_], Some(wr)) if first.is_multiple_of(2) => {
                assert!(direct.post_plain(wr));
            }
            (all, _) => direct.post(all).unwrap(),
        }
        let blocks: Vec<u32> = list.iter().map(|sges| (sges + 2).div_ceil(4)).collect();
        next += blocks.iter().sum::<u32>();
        let place = next - blocks.last().unwrap();
        let copied = blue_flame() && list.len() == 1 && blocks[0] <= 4;
        let length = if copied { blocks[0] as usize * 64 } else { 8 };
        let entry = direct.rings.from(place);
        let half = written(&direct.rings.register, &entry[..length]);
        let turn = last.is_none_or(|last| half == if blue_flame() { 1 - last } else { last });
        assert!(turn, "half {half} again for {list:?}");
        last = Some(half);
        direct.put(&Cqe::new(0).operation(8).counter(place as u16));
        assert!(direct.poll().unwrap().is_some());
    }
}

#[test]
fn register_of_a_destroyed_queue_pair_is_used_again() {
    let world = World::new();
    let mut seen = BTreeSet::new();
    for _ in 0..100 {
        let direct = Direct::new(&world, Transport::Rc, CAPS, None);
        seen.insert(direct.rings.register.start.addr());
        let mut qp = direct.qp;
        qp.destroy().unwrap();
    }
    assert_eq!(seen.len(), 1);
    let all: Vec<_> = (0..60).map(|_| Direct::new(&world, Transport::Rc, CAPS, None)).collect();
    let registers: BTreeSet<_> =
        all.iter().map(|direct| direct.rings.register.start.addr()).collect();
    assert_eq!(registers.len(), 24);
}
