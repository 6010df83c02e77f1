//! The table of registrations: keys that have ended, uses that have not, what others reach at the same time.

use super::machines::{ALL, PD, memory};
use crate::provider::soft::dma::Memory;
use crate::types::Access;

#[test]
fn stale_keys_name_nothing() {
    let (keys, base, key) = memory();
    // SAFETY: the leaked buffer of `memory`.
    let same = || unsafe { Memory::new(base as *mut u8, 8192, base) };
    let mut old = vec![key];
    keys.remove(key);
    for _ in 0..300 {
        let fresh =
            keys.insert(same(), ALL, false, PD, (old.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).unwrap();
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
fn registration_is_released_only_when_no_copy_runs() {
    let (keys, base, key) = memory();
    let held = keys.resolve(key, PD, base, 8, ALL).unwrap();
    let released = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            keys.remove(key);
            released.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        // Closed to others at once, still held by us.
        while keys.resolve(key, PD, base, 8, ALL).is_ok() {
            std::thread::yield_now();
        }
        assert!(!released.load(std::sync::atomic::Ordering::SeqCst));
        drop(held);
    });
    assert!(released.into_inner());
}

#[test]
fn memory_that_its_owner_shares_is_reached_by_atomic_accesses_without_any_remote_right() {
    let (keys, base, _) = memory();
    for (shared, access) in [(true, Access::LOCAL_WRITE), (false, ALL), (false, Access::LOCAL_WRITE)] {
        // SAFETY: the leaked buffer of `memory`.
        let memory = unsafe { Memory::new(base as *mut u8, 8192, base) };
        let key = keys.insert(memory, access, shared, PD, 7).unwrap();
        let segment = keys.resolve(key, PD, base, 8, Access::LOCAL_WRITE).unwrap();
        assert_eq!(segment.is_shared(), shared || access.is_remote());
        assert!(keys.resolve(key, PD, base, 8, Access::REMOTE_READ).is_ok() == access.is_remote());
    }
}

#[test]
fn memory_is_found_by_the_name_that_work_has_for_it() {
    let (keys, base, _) = memory();
    // SAFETY: the leaked buffer of `memory`.
    let named = unsafe { Memory::new(base as *mut u8, 8192, 100) };
    let key = keys.insert(named, ALL, false, PD, 7).unwrap();
    for (addr, len, found) in [(100, 8192, true), (8292, 0, true), (99, 1, false), (100, 8193, false), (8293, 0, false)]
    {
        assert_eq!(keys.resolve(key, PD, addr, len, ALL).is_ok(), found, "{len} bytes from {addr}");
    }
    assert!(keys.resolve(key, PD, base, 8, ALL).is_err(), "its address is not its name");
}
