//! A global allocator that counts live bytes and calls an observer, for programs that include this
//! module.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Returns the bytes that Rust code has allocated and not freed.
pub(crate) fn bytes() -> usize {
    LIVE.load(Ordering::Relaxed)
}

static OBSERVER: OnceLock<fn(usize)> = OnceLock::new();

/// Calls `observer` with the size of each allocation from now on.
#[allow(dead_code, reason = "some programs count live bytes only")]
pub(crate) fn observe(observer: fn(usize)) {
    OBSERVER.set(observer).expect("one observer");
}

fn allocated(size: usize) {
    LIVE.fetch_add(size, Ordering::Relaxed);
    if let Some(observer) = OBSERVER.get() {
        observer(size);
    }
}

// SAFETY: all calls are forwarded to `System`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: forwarded.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        allocated(size);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
