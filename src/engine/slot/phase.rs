//! The life cycle of a slot.

/// Where a slot is in its life.
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
/// The table in `slot/tests.rs` has every phase and step.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// No operation has it.
    Free = 0,
    /// Its work request is in flight or waits for capacity, and no task waits for it.
    Submitted = 1,
    /// As `Submitted`; a task waits, and its waker is in the slot.
    Waiting = 2,
    /// The drainer takes the waker.
    Waking = 3,
    /// The outcome is there. A bit of its own, to be asked for in one instruction.
    Complete = 4,
    /// The operation was abandoned: the drainer frees what it held.
    Detached = 8,
}
