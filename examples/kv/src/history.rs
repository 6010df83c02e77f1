//! A checker for linearizability.
//!
//! A history lists the calls of all clients, with their results and times. It is *linearizable*
//! (Herlihy and Wing, 1990) if every call can take effect at one instant within its time, such that
//! each GET returns the result of the last PUT or DELETE before it. In general that is hard to
//! decide. Here every PUT, DELETE and successful GET returns a version, so the order is known and
//! only needs to be checked:
//!
//! 1. Two writes of a key have different versions, and a GET finds the value that the write of its
//!    version put.
//! 2. A call that begins after another call of the key has ended has no lower version; a write has
//!    a higher one.
//!
//! If both hold, the following order explains all results: by version; a write before the GETs that
//! found it; GETs of one version by start time. By (1) the GETs return correct values, and by (2)
//! the order agrees with the times. If (1) or (2) fails, no order agrees with the versions. Keys
//! are independent.
//!
//! A GET that found nothing gets the lowest version that (2) permits among those at which the key
//! was absent. A higher one could only exclude more of the later calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use thiserror::Error;

use crate::stamp::{Mixed, Stamp};

/// A completed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The number of the key.
    pub key: u32,
    /// The time before the call, in nanoseconds of a clock that all events share.
    pub start: u64,
    /// The time after the answer.
    pub end: u64,
    /// The operation and its result.
    pub outcome: Outcome,
}

/// The operation of a call, and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A PUT created a version.
    Put {
        /// The version.
        version: u64,
        /// The stamp of the value.
        stamp: Stamp,
    },
    /// A DELETE created a version.
    Deleted {
        /// The version.
        version: u64,
    },
    /// A GET found a value.
    Found {
        /// The version.
        version: u64,
        /// The stamp of the value, or the error of decoding it.
        value: Result<Stamp, Mixed>,
    },
    /// A GET or a DELETE found nothing.
    Absent,
}

/// A proof that a history is not linearizable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// A GET found a value that was never put.
    #[error("torn value found ({mixed}): {event:?}")]
    Torn {
        /// The error of decoding the value.
        mixed: Mixed,
        /// The GET.
        event: Box<Event>,
    },
    /// Two writes created the same version.
    #[error("two writes have the same version: {0:?} and {1:?}")]
    SameVersion(Box<Event>, Box<Event>),
    /// A GET found a version that was never created, or has another value.
    #[error("version or value found that was not put: {found:?}; write of the version: {write:?}")]
    NotPut {
        /// The GET.
        found: Box<Event>,
        /// The write of that version.
        write: Option<Box<Event>>,
    },
    /// A call found nothing although the key was present.
    #[error("key absent after {after:?} without a DELETE: {absent:?}")]
    Vanished {
        /// The call.
        absent: Box<Event>,
        /// A call that ended before it.
        after: Box<Event>,
    },
    /// A call has a lower version than a call that ended before it.
    #[error("{later:?} began after {earlier:?} ended but has an older version")]
    OutOfOrder {
        /// The call that ended first.
        earlier: Box<Event>,
        /// The later call.
        later: Box<Event>,
    },
}

/// Checks a history. Initially every key is absent and has version 0.
///
/// # Errors
///
/// The first [`Violation`] found.
pub fn check(history: &[Event]) -> Result<(), Violation> {
    let mut keys: BTreeMap<u32, Vec<&Event>> = BTreeMap::new();
    for event in history {
        keys.entry(event.key).or_default().push(event);
    }
    keys.into_values().try_for_each(check_key)
}

fn check_key(mut events: Vec<&Event>) -> Result<(), Violation> {
    events.sort_by_key(|event| event.start);
    let writes = writes(&events)?;
    let absences: BTreeSet<u64> =
        writes.values().filter_map(|event| event.deleted()).chain(std::iter::once(0)).collect();

    let mut by_end: Vec<_> = (0..events.len()).collect();
    // An event ends no earlier than it starts.
    let end = |index: usize| events[index].end.max(events[index].start);
    by_end.sort_by_key(|&index| end(index));
    let mut by_end = by_end.into_iter().peekable();
    // By index, for the events that started before.
    let mut versions: Vec<u64> = Vec::with_capacity(events.len());
    // The highest version among the events that ended before this one started.
    let mut latest: Option<(u64, &Event)> = None;
    for event in &events {
        while let Some(index) = by_end.next_if(|&index| end(index) < event.start) {
            if latest.is_none_or(|(version, _)| version < versions[index]) {
                latest = Some((versions[index], events[index]));
            }
        }
        let floor = latest.map_or(0, |(version, _)| version);
        let version = match &event.outcome {
            Outcome::Put { version, .. } | Outcome::Deleted { version } => *version,
            Outcome::Found { version, value } => {
                let stamp = value.as_ref().map_err(|mixed| torn(mixed, event))?;
                match writes.get(version) {
                    Some(Event { outcome: Outcome::Put { stamp: put, .. }, .. })
                        if put == stamp =>
                    {
                        *version
                    }
                    other => {
                        return Err(Violation::NotPut {
                            found: boxed(event),
                            write: other.map(|event| boxed(event)),
                        });
                    }
                }
            }
            Outcome::Absent => match (absences.range(floor..).next(), latest) {
                (Some(&version), _) => version,
                (None, Some((_, after))) => {
                    return Err(Violation::Vanished { absent: boxed(event), after: boxed(after) });
                }
                (None, None) => unreachable!("initially the key is absent"),
            },
        };
        if let Some((floor, earlier)) = latest
            && (version < floor || version == floor && event.writes())
        {
            return Err(Violation::OutOfOrder { earlier: boxed(earlier), later: boxed(event) });
        }
        versions.push(version);
    }
    Ok(())
}

fn writes<'a>(events: &[&'a Event]) -> Result<HashMap<u64, &'a Event>, Violation> {
    let mut writes: HashMap<u64, &Event> = HashMap::new();
    for event in events {
        if let Outcome::Put { version, .. } | Outcome::Deleted { version } = event.outcome
            && let Some(other) = writes.insert(version, event)
        {
            return Err(Violation::SameVersion(boxed(other), boxed(event)));
        }
    }
    Ok(writes)
}

impl Event {
    fn writes(&self) -> bool {
        matches!(self.outcome, Outcome::Put { .. } | Outcome::Deleted { .. })
    }

    fn deleted(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Deleted { version } => Some(version),
            _ => None,
        }
    }
}

fn torn(mixed: &Mixed, event: &Event) -> Violation {
    Violation::Torn { mixed: mixed.clone(), event: boxed(event) }
}

fn boxed(event: &Event) -> Box<Event> {
    Box::new(event.clone())
}
