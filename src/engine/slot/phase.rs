/// The phase of a slot.
///
/// ```text
///          claim             register               finish           free
///   Free ────────▶ Submitted ───────▶ Waiting ─────────────▶ Complete ────▶ Free
///                   │  │ └──────────── finish ───────────────▶ ▲
///                   │  │                │ └─ Waking ───────────┘ finish: takes the waker first
///                   │  │ ◀─ repoll ─────┘   │ detach ─▶ Detached
///                   │  └ detach         └ detach        finish, free
///                   │  └────────────────┴──▶ Detached ─────────────▶ Free
///                   └─ free: the device refused it ────────────────▶ Free
/// ```
///
/// `slot/tests.rs` lists the result of every step in every phase.
#[repr(u16)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Free = 0,
    Submitted = 1,
    Waiting = 2,
    Waking = 3,
    /// The outcome is available. One instruction tests this bit.
    Complete = 4,
    Detached = 8,
}
