//! Was every answer right?
//!
//! A history is what clients have asked and been told, with the times between which each call was under way. It is right if
//! one can find, for each call, an instant within its time at which it took effect at once, such that each GET tells what
//! the last PUT or DELETE before it has left: if it is *linearizable* (Herlihy and Wing, 1990). For histories in
//! general that is hard to decide. Here each PUT and DELETE comes back with a version, and each GET with the version of what
//! it found, so that the order is known, and only has to be looked at:
//!
//! 1. No two writes of a key have the same version, and what a GET found is what the write of that version has put.
//! 2. A call that began when another one of the same key was over does not have a lower version than that; and a write has a
//!    higher one.
//!
//! With both, the order "by version; a write before the GETs that found it; those as they began" is such a choice of instants:
//! (1) says that GETs tell the truth in it, (2) that it does not contradict time. Without one of them there is none that
//! agrees with the versions. Keys do not matter to each other: a history is linearizable if that of each key is.
//!
//! A GET that found nothing has no version. It is given the lowest that does not contradict (2) of those at which the key was
//! not there. A lower one is ruled out, and a higher one could only rule out more of what comes later.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use thiserror::Error;

use crate::stamp::{Mixed, Stamp};

/// A call that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Number of the key.
    pub key: u32,
    /// Before it was made, in nanoseconds of a clock that all events of the history share.
    pub start: u64,
    /// After it was answered, on the same clock.
    pub end: u64,
    /// What was asked, and answered.
    pub what: What,
}

/// What was asked, and answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A PUT of a value made of the stamp has made this version.
    Put {
        /// The answer.
        version: u64,
        /// Of the value.
        stamp: Stamp,
    },
    /// A DELETE has made this version.
    Deleted {
        /// The answer.
        version: u64,
    },
    /// A GET has found this.
    Found {
        /// The answer.
        version: u64,
        /// What became of reading the stamp of the value.
        value: Result<Stamp, Mixed>,
    },
    /// A GET or a DELETE has found nothing.
    Absent,
}

/// How a history is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Wrong {
    /// A value was found that nobody has put.
    #[error("torn: {mixed}, by {event:?}")]
    Torn {
        /// How it is none.
        mixed: Mixed,
        /// Who has found it.
        event: Box<Event>,
    },
    /// Two writes have made the same version.
    #[error("one version for two writes: {0:?} and {1:?}")]
    SameVersion(Box<Event>, Box<Event>),
    /// A version was found that nobody has made, or that has another value.
    #[error("found what was not put: {found:?}; the write of that version: {write:?}")]
    NotPut {
        /// The GET.
        found: Box<Event>,
        /// The write of that version, if there is one.
        write: Option<Box<Event>>,
    },
    /// Nothing was found when there must have been something.
    #[error("found nothing after {after:?}, and nobody had deleted it: {absent:?}")]
    Vanished {
        /// Who has found nothing.
        absent: Box<Event>,
        /// What was over before it began.
        after: Box<Event>,
    },
    /// A call went back behind what was over before it began.
    #[error("back in time: {later:?} has begun when {earlier:?} was over")]
    Back {
        /// Was over.
        earlier: Box<Event>,
        /// Began after that, and has a lower version.
        later: Box<Event>,
    },
}

/// Looks at all of it. Keys have no version before they are put the first time, and are not there.
///
/// # Errors
///
/// The first thing that is [`Wrong`].
pub fn check(history: &[Event]) -> Result<(), Wrong> {
    let mut keys: BTreeMap<u32, Vec<&Event>> = BTreeMap::new();
    for event in history {
        keys.entry(event.key).or_default().push(event);
    }
    keys.into_values().try_for_each(check_key)
}

/// Looks at the events of one key.
fn check_key(mut events: Vec<&Event>) -> Result<(), Wrong> {
    events.sort_by_key(|event| event.start);
    let writes = writes(&events)?;
    let absences: BTreeSet<u64> =
        writes.values().filter_map(|event| event.deleted()).chain(std::iter::once(0)).collect();

    let mut over: Vec<_> = (0..events.len()).collect();
    // None is over before it began.
    let end = |index: usize| events[index].end.max(events[index].start);
    over.sort_by_key(|&index| end(index));
    let mut over = over.into_iter().peekable();
    // By index of the event: that of whatever began before is known.
    let mut versions: Vec<u64> = Vec::with_capacity(events.len());
    // Of all that was over when the event began.
    let mut latest: Option<(u64, &Event)> = None;
    for event in &events {
        while let Some(index) = over.next_if(|&index| end(index) < event.start) {
            if latest.is_none_or(|(version, _)| version < versions[index]) {
                latest = Some((versions[index], events[index]));
            }
        }
        let floor = latest.map_or(0, |(version, _)| version);
        let version = match &event.what {
            What::Put { version, .. } | What::Deleted { version } => *version,
            What::Found { version, value } => {
                let stamp = value.as_ref().map_err(|mixed| torn(mixed, event))?;
                match writes.get(version) {
                    Some(Event { what: What::Put { stamp: put, .. }, .. }) if put == stamp => {
                        *version
                    }
                    other => {
                        return Err(Wrong::NotPut {
                            found: boxed(event),
                            write: other.map(|event| boxed(event)),
                        });
                    }
                }
            }
            What::Absent => match (absences.range(floor..).next(), latest) {
                (Some(&version), _) => version,
                (None, Some((_, after))) => {
                    return Err(Wrong::Vanished { absent: boxed(event), after: boxed(after) });
                }
                (None, None) => unreachable!("it was absent at first"),
            },
        };
        if let Some((floor, earlier)) = latest
            && (version < floor || version == floor && event.writes())
        {
            return Err(Wrong::Back { earlier: boxed(earlier), later: boxed(event) });
        }
        versions.push(version);
    }
    Ok(())
}

/// Writes by their version.
fn writes<'a>(events: &[&'a Event]) -> Result<HashMap<u64, &'a Event>, Wrong> {
    let mut writes: HashMap<u64, &Event> = HashMap::new();
    for event in events {
        if let What::Put { version, .. } | What::Deleted { version } = event.what
            && let Some(other) = writes.insert(version, event)
        {
            return Err(Wrong::SameVersion(boxed(other), boxed(event)));
        }
    }
    Ok(writes)
}

impl Event {
    fn writes(&self) -> bool {
        matches!(self.what, What::Put { .. } | What::Deleted { .. })
    }

    fn deleted(&self) -> Option<u64> {
        match self.what {
            What::Deleted { version } => Some(version),
            _ => None,
        }
    }
}

fn torn(mixed: &Mixed, event: &Event) -> Wrong {
    Wrong::Torn { mixed: mixed.clone(), event: boxed(event) }
}

fn boxed(event: &Event) -> Box<Event> {
    Box::new(event.clone())
}
