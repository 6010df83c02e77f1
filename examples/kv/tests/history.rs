//! Tests of the checker, with hand-made and random histories.

use kv::history::{Event, Outcome, Violation, check};
use kv::stamp::{Mixed, Stamp};

const fn stamp(sequence: u64) -> Stamp {
    Stamp { key: 0, writer: 0, sequence }
}

const fn event(start: u64, end: u64, outcome: Outcome) -> Event {
    Event { key: 0, start, end, outcome }
}

/// Returns a PUT whose stamp and version have the same number.
const fn put(start: u64, end: u64, version: u64) -> Event {
    event(start, end, Outcome::Put { version, stamp: stamp(version) })
}

const fn deleted(start: u64, end: u64, version: u64) -> Event {
    event(start, end, Outcome::Deleted { version })
}

const fn found(start: u64, end: u64, version: u64) -> Event {
    event(start, end, Outcome::Found { version, value: Ok(stamp(version)) })
}

const fn absent(start: u64, end: u64) -> Event {
    event(start, end, Outcome::Absent)
}

#[test]
fn correct_histories_pass() {
    for history in [
        vec![],
        vec![absent(0, 1)],
        vec![
            put(0, 1, 1),
            found(2, 3, 1),
            put(4, 5, 7),
            found(6, 7, 7),
            deleted(8, 9, 8),
            absent(10, 11),
        ],
        // While a PUT is in flight, GETs may find either value, even after another GET found the
        // new one.
        vec![put(0, 1, 1), put(2, 9, 2), found(3, 4, 1), found(5, 6, 2), found(7, 8, 2)],
        vec![put(0, 1, 1), put(2, 9, 2), found(3, 8, 2), found(4, 7, 1)],
        // Overlapping writes may take effect in any order.
        vec![put(0, 5, 2), put(1, 6, 1), found(7, 8, 2)],
        // A GET during the first PUT, or between a DELETE and the next PUT, may find nothing.
        vec![put(0, 9, 1), absent(1, 2), found(3, 4, 1)],
        vec![
            put(0, 1, 1),
            deleted(2, 9, 2),
            put(3, 9, 3),
            found(4, 5, 1),
            absent(5, 6),
            found(7, 8, 3),
        ],
        // Keys are independent.
        vec![put(0, 1, 1), Event { key: 1, ..absent(2, 3) }],
    ] {
        assert_eq!(check(&history), Ok(()), "{history:?}");
    }
}

#[test]
fn incorrect_histories_are_detected() {
    let mixed = Mixed { len: 20, stamp: Some(stamp(1)), at: 18 };
    let torn = event(2, 3, Outcome::Found { version: 1, value: Err(mixed) });
    let other_value = event(2, 3, Outcome::Found { version: 1, value: Ok(stamp(9)) });
    type Kind = fn(&Violation) -> bool;
    let cases: [(Vec<Event>, Kind); 13] = [
        (vec![put(0, 1, 1), torn], |violation| matches!(violation, Violation::Torn { .. })),
        (vec![put(0, 1, 1), put(0, 1, 1)], |violation| {
            matches!(violation, Violation::SameVersion(..))
        }),
        (vec![put(0, 1, 1), deleted(0, 1, 1)], |violation| {
            matches!(violation, Violation::SameVersion(..))
        }),
        (vec![put(0, 1, 1), other_value], |violation| {
            matches!(violation, Violation::NotPut { write: Some(_), .. })
        }),
        (vec![put(0, 1, 1), found(2, 3, 2)], |violation| {
            matches!(violation, Violation::NotPut { write: None, .. })
        }),
        (vec![deleted(0, 1, 1), found(2, 3, 1)], |violation| {
            matches!(violation, Violation::NotPut { .. })
        }),
        // The second PUT had ended.
        (vec![put(0, 1, 1), put(2, 3, 2), found(4, 5, 1)], |violation| {
            matches!(violation, Violation::OutOfOrder { .. })
        }),
        // The later of two GETs finds the older value.
        (vec![put(0, 1, 1), put(2, 9, 2), found(3, 4, 2), found(5, 6, 1)], |violation| {
            matches!(violation, Violation::OutOfOrder { .. })
        }),
        // From the future.
        (vec![found(0, 1, 1), put(2, 3, 1)], |violation| {
            matches!(violation, Violation::OutOfOrder { .. })
        }),
        // The versions contradict the times of the writes.
        (vec![put(0, 1, 2), put(2, 3, 1)], |violation| {
            matches!(violation, Violation::OutOfOrder { .. })
        }),
        // Absent after a PUT.
        (vec![put(0, 1, 1), absent(2, 3)], |violation| {
            matches!(violation, Violation::Vanished { .. })
        }),
        // Absent because of a DELETE that had not begun.
        (vec![put(0, 1, 1), absent(2, 3), deleted(4, 5, 2)], |violation| {
            matches!(violation, Violation::OutOfOrder { .. })
        }),
        // Absent, found, and absent again without a DELETE.
        (vec![put(0, 9, 1), absent(1, 2), found(3, 4, 1), absent(5, 6)], |violation| {
            matches!(violation, Violation::Vanished { .. })
        }),
    ];
    for (history, expected) in cases {
        let violation = check(&history).expect_err("an incorrect history");
        assert!(expected(&violation), "{history:?}: {violation}");
    }
}

/// Compares the checker with the definition on 200,000 small histories: some order places each call
/// between its start and its end, increases the versions of writes, and explains every result.
#[test]
fn checker_agrees_with_exhaustive_search() {
    let mut random = fastrand::Rng::with_seed(5);
    let (mut correct, mut incorrect) = (0, 0);
    for _ in 0..200_000 {
        let history: Vec<_> = (0..random.usize(1..6)).map(|_| any(&mut random)).collect();
        let expected = some_order_is_right(&mut Vec::new(), &history);
        assert_eq!(check(&history).is_ok(), expected, "{history:?}");
        *if expected { &mut correct } else { &mut incorrect } += 1;
    }
    assert!(correct > 10_000 && incorrect > 10_000, "{correct} correct, {incorrect} incorrect");
}

fn any(random: &mut fastrand::Rng) -> Event {
    let (a, b) = (random.u64(0..12), random.u64(0..12));
    let (start, end, version) = (a.min(b), a.max(b), random.u64(1..4));
    match random.u8(0..4) {
        0 => put(start, end, version),
        1 => deleted(start, end, version),
        2 => found(start, end, version),
        _ => absent(start, end),
    }
}

fn some_order_is_right(order: &mut Vec<Event>, rest: &[Event]) -> bool {
    if rest.is_empty() {
        return true;
    }
    let there = order.iter().rev().find_map(|event| match event.outcome {
        Outcome::Put { version, stamp } => Some((version, Some(stamp))),
        Outcome::Deleted { version } => Some((version, None)),
        _ => None,
    });
    let latest = there.map_or(0, |(version, _)| version);
    (0..rest.len()).any(|index| {
        let next = &rest[index];
        let possible = rest.iter().all(|other| other.end >= next.start);
        let right = match &next.outcome {
            Outcome::Put { version, .. } | Outcome::Deleted { version } => *version > latest,
            Outcome::Found { version, value } => {
                there == Some((*version, value.clone().ok())) && value.is_ok()
            }
            Outcome::Absent => there.is_none_or(|(_, stamp)| stamp.is_none()),
        };
        if !(possible && right) {
            return false;
        }
        let mut rest = rest.to_vec();
        order.push(rest.remove(index));
        let found = some_order_is_right(order, &rest);
        order.pop();
        found
    })
}
