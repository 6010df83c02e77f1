//! Which pages are here, on their way here, or on their way out: a machine without I/O.
//!
//! ```text
//!              depart                land                   write
//!   absent ─────────────▶ moving ───────────▶ here, clean ─────────▶ here, dirty
//!      ▲                   │  ▲  ▲                 │                      │
//!      └───────────────────┘  │  └─────────────────┼──── evict, clean ────┘
//!      ▲   failed, left       │                    │ evict
//!      └──────────────────────┼────────────────────┘
//! ```
//!
//! A page that moves, one way or the other, is in the hands of one task, and everybody else who wants it waits for the end of
//! that [`Flight`]. So a page is fetched once however many ask for it, and it is never read from a node while it is being
//! written there.

use lru::LruCache;
use tokio::sync::watch;
use tokio_rdma::BufMut;

use crate::PagerError;

/// Tells those who wait how it ended; `None` until then.
pub(crate) type Flight = watch::Receiver<Option<Result<(), PagerError>>>;

/// A page in the hands of whoever has this.
#[derive(Debug)]
#[must_use = "a page that does not land moves for ever"]
pub(crate) struct Moving {
    pub(crate) page: u64,
    done: watch::Sender<Option<Result<(), PagerError>>>,
}

/// A page that is here.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) bytes: BufMut,
    /// Its nodes have an older one.
    pub(crate) dirty: bool,
}

#[derive(Debug)]
enum Slot {
    Here(Frame),
    /// Its nodes may have an older one, as it is on its way out or may have to stay.
    Moving(Flight, bool),
}

/// Where a page is.
#[derive(Debug)]
pub(crate) enum Place<'a> {
    Here(&'a mut Frame),
    Moving(Flight),
    Absent,
}

/// A frame that was taken from another page.
#[derive(Debug)]
pub(crate) enum Evicted {
    /// The page is at its nodes.
    Clean(BufMut),
    /// It has to be written to them first.
    Dirty(Moving, BufMut),
}

/// Whether there is something to write back.
#[derive(Debug)]
pub(crate) enum Dirty {
    Here(Moving, BufMut),
    /// Whoever moves it may fail to write it back.
    Moving(Flight),
    No,
}

/// All pages that are not absent, the one used last first. The frames are bounded by the pool that they are of.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: LruCache<u64, Slot>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self { slots: LruCache::unbounded() }
    }

    /// Looks for a page that is to be used now.
    pub(crate) fn find(&mut self, page: u64) -> Place<'_> {
        match self.slots.get_mut(&page) {
            Some(Slot::Here(frame)) => Place::Here(frame),
            Some(Slot::Moving(flight, _)) => Place::Moving(flight.clone()),
            None => Place::Absent,
        }
    }

    pub(crate) fn is_absent(&self, page: u64) -> bool {
        !self.slots.contains(&page)
    }

    /// An absent page is to be fetched.
    pub(crate) fn depart(&mut self, page: u64) -> (Moving, Flight) {
        debug_assert!(self.is_absent(page));
        let (done, flight) = watch::channel(None);
        self.slots.put(page, Slot::Moving(flight.clone(), false));
        (Moving { page, done }, flight)
    }

    /// A page is here: it was fetched, or could not be written back, or was and stays.
    pub(crate) fn land(&mut self, moving: Moving, frame: Frame) {
        if let Some(slot) = self.slots.peek_mut(&moving.page) {
            *slot = Slot::Here(frame);
        }
        moving.done.send_replace(Some(Ok(())));
    }

    /// A page is absent: it was written back, or could not be fetched, and those who wait are told why.
    pub(crate) fn vanish(&mut self, moving: Moving, end: Result<(), PagerError>) {
        self.slots.pop(&moving.page);
        moving.done.send_replace(Some(end));
    }

    /// Takes the frame that was used least lately, of those that have to be written back only if asked. `None` if there is none.
    pub(crate) fn evict(&mut self, dirty_too: bool) -> Option<Evicted> {
        let frame_of = |(&page, slot): (&u64, &Slot)| match slot {
            Slot::Here(frame) => (dirty_too || !frame.dirty).then_some((page, frame.dirty)),
            Slot::Moving(..) => None,
        };
        let (page, dirty) = self.slots.iter().rev().find_map(frame_of)?;
        if dirty {
            return self.take(page).map(|(moving, frame)| Evicted::Dirty(moving, frame.bytes));
        }
        match self.slots.pop(&page) {
            Some(Slot::Here(frame)) => Some(Evicted::Clean(frame.bytes)),
            Some(Slot::Moving(..)) | None => None,
        }
    }

    /// Pages that may differ from what their nodes have.
    pub(crate) fn dirty(&self) -> Vec<u64> {
        self.may_differ().collect()
    }

    /// There is such a page.
    pub(crate) fn is_dirty(&self) -> bool {
        self.may_differ().next().is_some()
    }

    fn may_differ(&self) -> impl Iterator<Item = u64> {
        let may_differ = |slot: &Slot| {
            matches!(slot, Slot::Moving(_, true) | Slot::Here(Frame { dirty: true, .. }))
        };
        self.slots.iter().filter(move |(_, slot)| may_differ(slot)).map(|(&page, _)| page)
    }

    /// Takes a page that differs, to be written back and to land again.
    pub(crate) fn find_dirty(&mut self, page: u64) -> Dirty {
        match self.slots.peek(&page) {
            Some(Slot::Moving(flight, _)) => Dirty::Moving(flight.clone()),
            Some(Slot::Here(Frame { dirty: true, .. })) => self
                .take(page)
                .map_or(Dirty::No, |(moving, frame)| Dirty::Here(moving, frame.bytes)),
            Some(Slot::Here(_)) | None => Dirty::No,
        }
    }

    fn take(&mut self, page: u64) -> Option<(Moving, Frame)> {
        let slot = self.slots.peek_mut(&page)?;
        let Slot::Here(Frame { dirty, .. }) = slot else { return None };
        let (dirty, (done, flight)) = (*dirty, watch::channel(None));
        match std::mem::replace(slot, Slot::Moving(flight, dirty)) {
            Slot::Here(frame) => Some((Moving { page, done }, frame)),
            Slot::Moving(..) => None,
        }
    }
}
