//! Data in 64-byte completion queue entries, copied by the real libmlx5.

mod common;
mod scatter_suite;

use std::sync::{Mutex, MutexGuard, PoisonError};

use emulated_connectx::EmulatedConnectX;

/// The longest data in an entry.
const LIMIT: usize = 32;

/// The device, for one test at a time: counters are of the process.
struct Alone(EmulatedConnectX, #[allow(dead_code)] MutexGuard<'static, ()>);

impl std::ops::Deref for Alone {
    type Target = EmulatedConnectX;

    fn deref(&self) -> &EmulatedConnectX {
        &self.0
    }
}

fn device() -> Alone {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Alone(common::start(|_| {}), alone)
}
