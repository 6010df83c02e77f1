//! The state of each page: present, absent, or moved by a task. A state machine without I/O.
//!
//! ```text
//!              start_fetch           finish                  write
//!   absent ─────────────▶ moving ───────────▶ present, clean ──────▶ present, dirty
//!      ▲                   │  ▲  ▲                 │                      │
//!      └───────────────────┘  │  └─────────────────┼──── evict, clean ────┘
//!      ▲   failed, removed    │                    │ evict
//!      └──────────────────────┼────────────────────┘
//! ```
//!
//! One task moves a page in either direction; all others wait for the end of that [`Flight`]. A
//! page is therefore fetched once for all waiters, and never read from a node during its
//! write-back.

use lru::LruCache;
use tokio::sync::watch;
use tokio_rdma::BufMut;

use crate::PagerError;

/// The result of a move, `None` until it ends.
pub(crate) type Flight = watch::Receiver<Option<Result<(), PagerError>>>;

/// The exclusive right to move a page. The holder must finish or remove it.
#[derive(Debug)]
#[must_use = "without an end, waiters for the page hang"]
pub(crate) struct Moving {
    pub(crate) page: u64,
    done: watch::Sender<Option<Result<(), PagerError>>>,
}

#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) bytes: BufMut,
    /// Whether the page's nodes have an older version.
    pub(crate) dirty: bool,
}

#[derive(Debug)]
enum Slot {
    Present(Frame),
    /// Moved by a task. `true` if the nodes may have an older version: the page is being written
    /// back, which may fail.
    Moving(Flight, bool),
}

/// The state of a page, as seen by a reader.
#[derive(Debug)]
pub(crate) enum Place<'a> {
    Present(&'a mut Frame),
    Moving(Flight),
    Absent,
}

/// A frame taken from another page.
#[derive(Debug)]
pub(crate) enum Evicted {
    /// The page's nodes have its content.
    Clean(BufMut),
    /// The content must be written back first.
    Dirty(Moving, BufMut),
}

/// The state of a page, as seen by a flush.
#[derive(Debug)]
pub(crate) enum Dirty {
    Present(Moving, BufMut),
    /// Another task moves the page; its write-back may fail.
    Moving(Flight),
    No,
}

/// All pages that are not absent, in LRU order. The pool bounds the number of frames.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: LruCache<u64, Slot>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self { slots: LruCache::unbounded() }
    }

    /// Returns the state of a page and marks it as used most recently.
    pub(crate) fn find(&mut self, page: u64) -> Place<'_> {
        match self.slots.get_mut(&page) {
            Some(Slot::Present(frame)) => Place::Present(frame),
            Some(Slot::Moving(flight, _)) => Place::Moving(flight.clone()),
            None => Place::Absent,
        }
    }

    pub(crate) fn is_absent(&self, page: u64) -> bool {
        !self.slots.contains(&page)
    }

    /// Marks an absent page as being fetched.
    pub(crate) fn start_fetch(&mut self, page: u64) -> (Moving, Flight) {
        debug_assert!(self.is_absent(page));
        let (done, flight) = watch::channel(None);
        self.slots.put(page, Slot::Moving(flight.clone(), false));
        (Moving { page, done }, flight)
    }

    /// Makes a page present: after a fetch, a failed write-back, or a write-back that keeps it.
    pub(crate) fn finish(&mut self, moving: Moving, frame: Frame) {
        if let Some(slot) = self.slots.peek_mut(&moving.page) {
            *slot = Slot::Present(frame);
        }
        moving.done.send_replace(Some(Ok(())));
    }

    /// Makes a page absent, after an eviction or a failed fetch. Waiters get `end`.
    pub(crate) fn remove(&mut self, moving: Moving, end: Result<(), PagerError>) {
        self.slots.pop(&moving.page);
        moving.done.send_replace(Some(end));
    }

    /// Takes the least recently used frame, a dirty one only if `dirty_too`. `None` if there is
    /// none.
    pub(crate) fn evict(&mut self, dirty_too: bool) -> Option<Evicted> {
        let frame_of = |(&page, slot): (&u64, &Slot)| match slot {
            Slot::Present(frame) => (dirty_too || !frame.dirty).then_some((page, frame.dirty)),
            Slot::Moving(..) => None,
        };
        let (page, dirty) = self.slots.iter().rev().find_map(frame_of)?;
        if dirty {
            return self.take(page).map(|(moving, frame)| Evicted::Dirty(moving, frame.bytes));
        }
        match self.slots.pop(&page) {
            Some(Slot::Present(frame)) => Some(Evicted::Clean(frame.bytes)),
            Some(Slot::Moving(..)) | None => None,
        }
    }

    /// Returns the pages that may differ from their nodes' versions.
    pub(crate) fn dirty(&self) -> Vec<u64> {
        self.dirty_pages().collect()
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty_pages().next().is_some()
    }

    fn dirty_pages(&self) -> impl Iterator<Item = u64> {
        let may_differ = |slot: &Slot| {
            matches!(slot, Slot::Moving(_, true) | Slot::Present(Frame { dirty: true, .. }))
        };
        self.slots.iter().filter(move |(_, slot)| may_differ(slot)).map(|(&page, _)| page)
    }

    /// Takes a dirty page for a write-back, after which it must become present again.
    pub(crate) fn find_dirty(&mut self, page: u64) -> Dirty {
        match self.slots.peek(&page) {
            Some(Slot::Moving(flight, _)) => Dirty::Moving(flight.clone()),
            Some(Slot::Present(Frame { dirty: true, .. })) => self
                .take(page)
                .map_or(Dirty::No, |(moving, frame)| Dirty::Present(moving, frame.bytes)),
            Some(Slot::Present(_)) | None => Dirty::No,
        }
    }

    fn take(&mut self, page: u64) -> Option<(Moving, Frame)> {
        let slot = self.slots.peek_mut(&page)?;
        let Slot::Present(Frame { dirty, .. }) = slot else { return None };
        let (dirty, (done, flight)) = (*dirty, watch::channel(None));
        match std::mem::replace(slot, Slot::Moving(flight, dirty)) {
            Slot::Present(frame) => Some((Moving { page, done }, frame)),
            Slot::Moving(..) => None,
        }
    }
}
