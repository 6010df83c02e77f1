//! The phases of a slot.

/// The phase of a slot.
///
/// ```text
///          claim             register               finish           free
///   Free ────────▶ Submitted ───────▶ Waiting ─────────────▶ Complete ────▶ Free
///                   │  │ └──────────── finish ───────────────▶ ▲
///                   │  │  ◀─ rouse ──── │ └─ Waking ───────────┘ finish: takes the waker first
///                   │  │                │
///                   │  └ detach         └ detach        finish, free
///                   │  └────────────────┴──▶ Detached ─────────────▶ Free
///                   └─ free: the device refused it ────────────────▶ Free
/// ```
///
/// `slot/tests.rs` lists the result of every step in every phase.
#[repr(u16)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No operation has claimed it.
    Free = 0,
    /// Its work request is in flight or queued; no waker is registered.
    Submitted = 1,
    /// Its work request is in flight or queued; the waker of a task is in the slot.
    Waiting = 2,
    /// The drainer is taking the waker.
    Waking = 3,
    /// The outcome is available. One instruction tests this bit.
    Complete = 4,
    /// The operation was abandoned: the drainer drops its buffers.
    Detached = 8,
}
