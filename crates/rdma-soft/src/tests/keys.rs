//! Tests of the registration table: stale keys, running copies and concurrent lookups.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::machines::{ALL, PD, memory};
use crate::memory::dma::{Memory, Payload};
use crate::memory::keys::{Keys, MAX_REGISTRATIONS};
use rdma_provider::types::{Access, Lkey, Qpn, Rkey, WindowBind};

#[test]
fn stale_keys_do_not_resolve() {
    let (keys, base, key) = memory();
    // SAFETY: `memory` leaks the buffer.
    let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
    let mut old = vec![key];
    keys.remove(key);
    for _ in 0..300 {
        let fresh = keys
            .insert(same(), ALL, false, PD, (old.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .unwrap();
        assert!(keys.resolve(fresh, PD, base, 8192, ALL).is_ok());
        assert!(keys.resolve(fresh, PD + 1, base, 8, ALL).is_err());
        assert!(keys.resolve(fresh, PD, base, 8193, ALL).is_err());
        assert!(keys.resolve(fresh, PD, u64::MAX, 2, ALL).is_err());
        for key in &old {
            assert!(keys.resolve(*key, PD, base, 8, Access::empty()).is_err());
        }
        keys.remove(fresh);
        old.push(fresh);
    }
}

#[test]
fn registration_is_released_after_running_copies() {
    let (keys, base, key) = memory();
    let held = keys.resolve(key, PD, base, 8, ALL).unwrap();
    let released = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            keys.remove(key);
            released.store(true, Ordering::SeqCst);
        });
        // New users are refused while our copy runs.
        while keys.resolve(key, PD, base, 8, ALL).is_ok() {
            std::thread::yield_now();
        }
        assert!(!released.load(Ordering::SeqCst));
        drop(held);
    });
    assert!(released.into_inner());
}

// Shows S2.
#[test]
fn shared_or_remotely_writable_memory_uses_atomic_accesses() {
    let (keys, base, _) = memory();
    let read = Access::LOCAL_WRITE | Access::REMOTE_READ;
    for (shared, access, atomic) in [
        (true, Access::LOCAL_WRITE, true),
        (false, ALL, true),
        (false, Access::LOCAL_WRITE | Access::REMOTE_WRITE, true),
        (false, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC, true),
        (false, read, false),
        (true, read, true),
        (false, Access::LOCAL_WRITE, false),
    ] {
        // SAFETY: `memory` leaks the buffer.
        let memory = unsafe { Memory::new(base as *mut u8, 8192, base) };
        let key = keys.insert(memory, access, shared, PD, 7).unwrap();
        let segment = keys.resolve(key, PD, base, 8, Access::LOCAL_WRITE).unwrap();
        assert_eq!(segment.is_shared(), atomic, "{shared} {access:?}");
        let readable = access.contains(Access::REMOTE_READ);
        assert_eq!(keys.resolve(key, PD, base, 8, Access::REMOTE_READ).is_ok(), readable);
    }
}

/// Makes a packet to the network from memory that the program reads meanwhile as `&[u8]`.
#[test]
fn memory_without_remote_writes_is_read_into_a_packet_beside_plain_reads() {
    let keys = Keys::new();
    let bytes: &'static [u8] = Box::leak((0..64).collect());
    let at = bytes.as_ptr().expose_provenance() as u64;
    // SAFETY: the buffer is leaked.
    let memory = unsafe { Memory::new(bytes.as_ptr().cast_mut(), bytes.len(), at) };
    let key = keys.insert(memory, Access::REMOTE_READ, false, PD, 7).unwrap();
    let segment = keys.resolve(key, PD, at + 3, 50, Access::REMOTE_READ).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>());
        let mut packet = vec![1];
        Payload::Segment(&segment).append_to(&mut packet);
        assert_eq!(packet, [&[1], &bytes[3..53]].concat());
        assert_eq!(reader.join().unwrap(), (0..64).sum());
    });
}

#[test]
fn memory_resolves_by_its_iova() {
    let (keys, base, _) = memory();
    // SAFETY: `memory` leaks the buffer.
    let named = unsafe { Memory::new(base as *mut u8, 8192, 100) };
    let key = keys.insert(named, ALL, false, PD, 7).unwrap();
    for (addr, len, found) in
        [(100, 8192, true), (8292, 0, true), (99, 1, false), (100, 8193, false), (8293, 0, false)]
    {
        assert_eq!(keys.resolve(key, PD, addr, len, ALL).is_ok(), found, "{len} bytes from {addr}");
    }
    assert!(keys.resolve(key, PD, base, 8, ALL).is_err(), "resolved by its address");
}

/// Attacks keys as a peer could. If the upper bits were `(n + 256 v) * f` modulo 2^24 for a counter
/// `n`, four bits `v` and a secret odd `f`, four keys would reveal `f`.
// Shows S4.
#[test]
fn granted_keys_do_not_predict_the_next_one() {
    const FAMILY: u32 = (1 << 24) - 1;
    let (_, base, _) = memory();
    for seed in 0..16 {
        let mut random = fastrand::Rng::with_seed(seed);
        let keys = Keys::new();
        // SAFETY: `memory` leaks the buffer.
        let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
        let mut register = || keys.insert(same(), ALL, false, PD, random.u64(..)).unwrap() >> 8;
        let granted: Vec<u32> = (0..1_000).map(|_| register()).collect();
        let secret = register();
        // Newton's iteration for the inverse of an odd number.
        let inverse =
            |x: u32| (0..5).fold(x, |y, _| y.wrapping_mul(2_u32.wrapping_sub(x.wrapping_mul(y))));
        let steps =
            || (0..31).map(|v: u32| 1_u32.wrapping_add(v.wrapping_sub(15).wrapping_mul(256)));
        let factors = |pair: &[u32]| -> HashSet<u32> {
            let difference = pair[1].wrapping_sub(pair[0]);
            steps().map(|step| difference.wrapping_mul(inverse(step)) & FAMILY).collect()
        };
        // Tries each factor that explains a quarter of the first hundred differences.
        let mut explained: HashMap<u32, u32> = HashMap::new();
        for factor in granted[..101].windows(2).flat_map(factors) {
            *explained.entry(factor).or_default() += 1;
        }
        let last = granted[granted.len() - 1];
        let mut guesses: HashSet<u32> = HashSet::new();
        for (factor, _) in explained.into_iter().filter(|&(_, count)| count >= 25) {
            guesses
                .extend(steps().map(|step| last.wrapping_add(factor.wrapping_mul(step)) & FAMILY));
        }
        // Also tries neighbours of the last key and the distances between granted keys.
        for near in 1..1_000 {
            guesses.extend([
                last.wrapping_add(near) & FAMILY,
                last.wrapping_sub(near) & FAMILY,
                last ^ near,
            ]);
        }
        for pair in granted.windows(2) {
            guesses.extend([
                last.wrapping_add(pair[1].wrapping_sub(pair[0])) & FAMILY,
                last ^ pair[0] ^ pair[1],
            ]);
        }
        // 5,000 random guesses find one of 2^24 keys with probability 0.0003.
        assert!(guesses.len() < 5_100, "seed {seed}: {}", guesses.len());
        assert!(
            !guesses.contains(&secret),
            "seed {seed}: found with {} guesses of 2^24",
            guesses.len()
        );
    }
}

/// Checks that each bit of keys and of their differences is set half of the time, and that no
/// difference recurs more often than by chance.
// Shows S4.
#[test]
fn consecutive_keys_are_statistically_independent() {
    const COUNT: usize = 8_192;
    let (_, base, _) = memory();
    let mut random = fastrand::Rng::with_seed(5);
    let keys = Keys::new();
    // SAFETY: `memory` leaks the buffer.
    let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
    let made: Vec<u32> =
        (0..COUNT).map(|_| keys.insert(same(), ALL, false, PD, random.u64(..)).unwrap()).collect();
    let differences = made.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
    let changes = made.windows(2).map(|pair| pair[1] ^ pair[0]).collect();
    for (what, values) in [("keys", made), ("differences", differences), ("exclusive ors", changes)]
    {
        let count = values.len() as f64;
        for bit in 0..32 {
            let set = values.iter().filter(|&&value| value >> bit & 1 == 1).count() as f64;
            assert!(
                (set - count / 2.0).abs() < 6.0 * count.sqrt() / 2.0,
                "{what}: bit {bit} is set {set} times"
            );
        }
        for shift in [0, 8, 16, 24] {
            let mut cells = [0_f64; 256];
            values.iter().for_each(|value| cells[(value >> shift & 255) as usize] += 1.0);
            let expected = count / 256.0;
            let chi: f64 = cells.iter().map(|seen| (seen - expected).powi(2) / expected).sum();
            // 255 degrees of freedom: mean 255, six standard deviations of 22.6.
            assert!((119.0..391.0).contains(&chi), "{what}: bits from {shift}: {chi}");
        }
        // 8,192 random values of 2^32 contain 0.008 equal pairs on average.
        let distinct: HashSet<u32> = values.iter().copied().collect();
        assert!(
            values.len() - distinct.len() <= 1,
            "{what}: {} repeat",
            values.len() - distinct.len()
        );
    }
}

#[test]
fn keys_resolve_only_to_their_own_memory() {
    let (keys, base, _) = memory();
    let place = |number: u32| base + 8 * u64::from(number);
    let drawn = |number: u32| 0x1234_5007 + (number << 12);
    let made: Vec<u32> = (0..200)
        .map(|number| {
            // SAFETY: 8 bytes of the buffer that `memory` leaks.
            let word = unsafe { Memory::new(place(number) as *mut u8, 8, place(number)) };
            keys.insert(word, ALL, false, PD, drawn(number).into()).unwrap()
        })
        .collect();
    let is_open = |number: u32| {
        let key = made[number as usize];
        assert_eq!(key, drawn(number));
        for other in [key ^ 1, key ^ 0x80, key ^ 0x100, key ^ 0x800] {
            assert!(
                keys.resolve(other, PD, place(number), 8, ALL).is_err(),
                "another key at the same place"
            );
        }
        assert!(keys.resolve(key, PD, place(number) + 8, 8, ALL).is_err(), "another's memory");
        keys.resolve(key, PD, place(number), 8, ALL).is_ok()
    };
    assert!((0..200).all(is_open));
    let ended = [199, 0, 100, 101, 99];
    ended.iter().for_each(|&number| keys.remove(made[number as usize]));
    (0..200).for_each(|number| assert_eq!(is_open(number), !ended.contains(&number), "{number}"));
    // Other keys are removed meanwhile, and their slots reused.
    for round in 0..1_000 {
        // SAFETY: `memory` leaks the buffer.
        let all = || unsafe { Memory::new(base as *mut u8, 8192, base) };
        let pair = [7, 8].map(|which| {
            keys.insert(all(), ALL, false, PD, (which + 2 * (round % 20)) << 12).unwrap()
        });
        pair.iter().for_each(|&key| assert!(keys.resolve(key, PD, base, 8192, ALL).is_ok()));
        pair.iter().for_each(|&key| keys.remove(key));
        pair.iter().for_each(|&key| assert!(keys.resolve(key, PD, base, 8192, ALL).is_err()));
    }
    (0..200).for_each(|number| assert_eq!(is_open(number), !ended.contains(&number), "{number}"));
}

#[test]
fn used_and_recently_removed_keys_are_not_issued() {
    let (keys, base, _) = memory();
    // SAFETY: `memory` leaks the buffer.
    let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
    let first = keys.insert(same(), ALL, false, PD, 0x1234_5678).unwrap();
    assert_eq!(first, 0x1234_5678);
    // Nor with another tag: a window could be bound to that key.
    let second = keys.insert(same(), ALL, false, PD, 0x1234_5600).unwrap();
    assert_ne!(first >> 8, second >> 8);
    keys.remove(first);
    for number in 0..255 {
        let third = keys.insert(same(), ALL, false, PD, 0x1234_5678).unwrap();
        assert_ne!(first >> 8, third >> 8, "{number} keys removed since");
        assert!(keys.resolve(first, PD, base, 8, ALL).is_err());
        keys.remove(third);
    }
    // Later it may be reused: quarantined slots do not accumulate.
    let mut later = (0..300).map(|_| {
        let key = keys.insert(same(), ALL, false, PD, 0x1234_5678).unwrap();
        keys.remove(key);
        key
    });
    assert!(later.any(|key| key == first));
    // An uninitialised key's number resolves with no tag.
    assert_ne!(keys.insert(same(), ALL, false, PD, 0xff).unwrap() >> 8, 0);
    assert!((0..256).all(|key| keys.resolve(key, PD, base, 8, ALL).is_err()));
}

#[test]
fn concurrent_lookups_never_find_memory_of_another_key() {
    const ROUNDS: u64 = if cfg!(miri) { 50 } else { 2_000 };
    let (keys, base, _) = memory();
    // SAFETY: `memory` leaks the buffer.
    let half = |at: u64| unsafe { Memory::new((base + at) as *mut u8, 4096, base + at) };
    let (key, done) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(3);
            for round in 0..ROUNDS {
                // Alternates between the halves; one bit of the key selects the half.
                let which = round % 2;
                let next = keys
                    .insert(half(which * 4096), ALL, false, PD, random.u64(..) & !1 | which)
                    .unwrap();
                if u64::from(next & 1) == which {
                    key.store(next, Ordering::Release);
                }
                keys.remove(next);
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            let seen = key.load(Ordering::Acquire);
            let (own, other) = (u64::from(seen & 1) * 4096, u64::from(!seen & 1) * 4096);
            let _maybe = keys.resolve(seen, PD, base + own, 8, ALL);
            assert!(
                keys.resolve(seen, PD, base + other, 8, ALL).is_err(),
                "the memory of another key"
            );
        }
    });
}

#[test]
fn removing_an_unknown_key_changes_nothing() {
    let (keys, base, key) = memory();
    // In the same slot, and in none.
    for other in [key ^ 0x100, key ^ 0x800, !key] {
        keys.remove(other);
        keys.remove_window(other);
        assert!(keys.resolve(key, PD, base, 8, ALL).is_ok());
    }
}

#[test]
fn full_table_refuses_keys_until_one_is_removed() {
    if cfg!(miri) {
        return;
    }
    let (keys, base, first) = memory();
    // SAFETY: `memory` leaks the buffer.
    let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
    let mut random = fastrand::Rng::with_seed(9);
    for _ in 1..MAX_REGISTRATIONS {
        keys.insert(same(), ALL, false, PD, random.u64(..)).unwrap();
    }
    assert!(keys.insert(same(), ALL, false, PD, random.u64(..)).is_none());
    assert!(keys.add_window(PD, random.u64(..)).is_none());
    keys.remove(first);
    let again = keys.insert(same(), ALL, false, PD, random.u64(..)).unwrap();
    assert!(
        keys.resolve(again, PD, base, 8, ALL).is_ok()
            && keys.resolve(first, PD, base, 8, ALL).is_err()
    );
    assert!(keys.insert(same(), ALL, false, PD, random.u64(..)).is_none());
}

/// Checks that each removal affects only its own windows.
#[test]
fn windows_end_with_registration_queue_pair_or_invalidation() {
    let (own, other) = (Qpn(2), Qpn(3));
    type End = fn(&Keys, [u32; 2], [u32; 2]);
    let ends: [(&str, End); 5] = [
        ("registration", |keys, regions, _| keys.remove(regions[0])),
        ("queue pair", |keys, _, _| keys.unbind_windows_of(Qpn(2))),
        ("window", |keys, _, windows| keys.remove_window(windows[0])),
        ("invalidation", |keys, _, windows| keys.invalidate(Rkey(windows[0]), Qpn(2)).unwrap()),
        ("nothing", |_, _, _| {}),
    ];
    for (what, end) in ends {
        let (keys, base, first) = memory();
        // SAFETY: `memory` leaks the buffer.
        let second = keys
            .insert(unsafe { Memory::new(base as *mut u8, 8192, base) }, ALL, false, PD, 8)
            .unwrap();
        let regions = [first, second];
        let made = [1 << 40 | 5, 2 << 40 | 6]
            .map(|random| keys.add_window(PD, random << 12 | 0x77).unwrap());
        let bind = |at: usize, rkey: u32, current: u32, len| WindowBind {
            window: made[at] as usize,
            region: regions[at] as usize,
            current: Rkey(current),
            rkey: Rkey(rkey),
            lkey: Lkey(regions[at]),
            addr: base,
            len,
            access: Access::REMOTE_READ,
        };
        let bound = made.map(|key| Rkey(key).next().0);
        assert!(keys.bind_window(own, PD, &bind(0, bound[0], made[0], 0)).is_err(), "zero length");
        assert!(
            keys.bind_window(own, PD + 1, &bind(0, bound[0], made[0], 8)).is_err(),
            "another protection domain"
        );
        for (at, qpn) in [own, other].into_iter().enumerate() {
            keys.bind_window(qpn, PD, &bind(at, bound[at], made[at], 8)).unwrap();
        }
        let is_open = |at: usize, qpn| {
            keys.resolve_remote(bound[at], (PD + 9, qpn), base, 8, Access::REMOTE_READ).is_ok()
        };
        assert!(is_open(0, own) && is_open(1, other) && !is_open(0, other) && !is_open(1, own));
        assert!(
            keys.resolve(bound[0], PD, base, 8, Access::REMOTE_READ).is_err(),
            "usable only remotely"
        );
        // Another queue pair, or another tag, cannot invalidate the window.
        assert!(keys.invalidate(Rkey(bound[0]), other).is_err());
        assert!(keys.invalidate(Rkey(bound[0]).next(), own).is_err());
        assert!(keys.invalidate(Rkey(first), own).is_err(), "a registration cannot be invalidated");
        assert!(is_open(0, own));
        end(&keys, regions, bound);
        assert_eq!((is_open(0, own), is_open(1, other)), (what == "nothing", true), "{what}");
    }
}
