//! Histories made by hand: the checker takes those that are right, and finds what is wrong with the others. And all small
//! histories, beside a checker that tries every order.

use kv::history::{Event, What, Wrong, check};
use kv::stamp::{Mixed, Stamp};

const fn stamp(sequence: u64) -> Stamp {
    Stamp { key: 0, writer: 0, sequence }
}

const fn event(start: u64, end: u64, what: What) -> Event {
    Event { key: 0, start, end, what }
}

/// A PUT; the stamp is the version unless said otherwise.
const fn put(start: u64, end: u64, version: u64) -> Event {
    event(start, end, What::Put { version, stamp: stamp(version) })
}

const fn deleted(start: u64, end: u64, version: u64) -> Event {
    event(start, end, What::Deleted { version })
}

const fn found(start: u64, end: u64, version: u64) -> Event {
    event(start, end, What::Found { version, value: Ok(stamp(version)) })
}

const fn absent(start: u64, end: u64) -> Event {
    event(start, end, What::Absent)
}

#[test]
fn right_histories_are_right() {
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
        // While a PUT is under way, either is right, also after its end has not been seen.
        vec![put(0, 1, 1), put(2, 9, 2), found(3, 4, 1), found(5, 6, 2), found(7, 8, 2)],
        vec![put(0, 1, 1), put(2, 9, 2), found(3, 8, 2), found(4, 7, 1)],
        // Writes that overlap may come in any order.
        vec![put(0, 5, 2), put(1, 6, 1), found(7, 8, 2)],
        // Absent between two PUTs, or before the first, while that is under way.
        vec![put(0, 9, 1), absent(1, 2), found(3, 4, 1)],
        vec![
            put(0, 1, 1),
            deleted(2, 9, 2),
            put(3, 9, 3),
            found(4, 5, 1),
            absent(5, 6),
            found(7, 8, 3),
        ],
        // Other keys do not matter.
        vec![put(0, 1, 1), Event { key: 1, ..absent(2, 3) }],
    ] {
        assert_eq!(check(&history), Ok(()), "{history:?}");
    }
}

#[test]
fn wrong_histories_are_found_out() {
    let mixed = Mixed { len: 20, stamp: Some(stamp(1)), at: 18 };
    let torn = event(2, 3, What::Found { version: 1, value: Err(mixed) });
    let other_value = event(2, 3, What::Found { version: 1, value: Ok(stamp(9)) });
    type Kind = fn(&Wrong) -> bool;
    let cases: [(Vec<Event>, Kind); 13] = [
        (vec![put(0, 1, 1), torn], |wrong| matches!(wrong, Wrong::Torn { .. })),
        (vec![put(0, 1, 1), put(0, 1, 1)], |wrong| matches!(wrong, Wrong::SameVersion(..))),
        (vec![put(0, 1, 1), deleted(0, 1, 1)], |wrong| matches!(wrong, Wrong::SameVersion(..))),
        (vec![put(0, 1, 1), other_value], |wrong| {
            matches!(wrong, Wrong::NotPut { write: Some(_), .. })
        }),
        (vec![put(0, 1, 1), found(2, 3, 2)], |wrong| {
            matches!(wrong, Wrong::NotPut { write: None, .. })
        }),
        (vec![deleted(0, 1, 1), found(2, 3, 1)], |wrong| matches!(wrong, Wrong::NotPut { .. })),
        // Stale: the second PUT was over.
        (vec![put(0, 1, 1), put(2, 3, 2), found(4, 5, 1)], |wrong| {
            matches!(wrong, Wrong::Back { .. })
        }),
        // Of two GETs the later one sees the older value.
        (vec![put(0, 1, 1), put(2, 9, 2), found(3, 4, 2), found(5, 6, 1)], |wrong| {
            matches!(wrong, Wrong::Back { .. })
        }),
        // From the future.
        (vec![found(0, 1, 1), put(2, 3, 1)], |wrong| matches!(wrong, Wrong::Back { .. })),
        // Writes against time.
        (vec![put(0, 1, 2), put(2, 3, 1)], |wrong| matches!(wrong, Wrong::Back { .. })),
        // There, and yet not.
        (vec![put(0, 1, 1), absent(2, 3)], |wrong| matches!(wrong, Wrong::Vanished { .. })),
        // Absent because of a DELETE that had not begun.
        (vec![put(0, 1, 1), absent(2, 3), deleted(4, 5, 2)], |wrong| {
            matches!(wrong, Wrong::Back { .. })
        }),
        // Absent, found in between, and absent again without a DELETE.
        (vec![put(0, 9, 1), absent(1, 2), found(3, 4, 1), absent(5, 6)], |wrong| {
            matches!(wrong, Wrong::Vanished { .. })
        }),
    ];
    for (history, expected) in cases {
        let wrong = check(&history).expect_err("it is wrong");
        assert!(expected(&wrong), "{history:?}: {wrong}");
    }
}

/// 200,000 small histories, most of them wrong, beside the definition: some order in which each call is between its start and
/// its end, versions of writes go up, and each call tells what is there.
#[test]
fn checker_agrees_with_trying_every_order() {
    let mut random = fastrand::Rng::with_seed(5);
    let (mut right, mut wrong) = (0, 0);
    for _ in 0..200_000 {
        let history: Vec<_> = (0..random.usize(1..6)).map(|_| any(&mut random)).collect();
        let expected = some_order_is_right(&mut Vec::new(), &history);
        assert_eq!(check(&history).is_ok(), expected, "{history:?}");
        *if expected { &mut right } else { &mut wrong } += 1;
    }
    assert!(right > 10_000 && wrong > 10_000, "{right} are right, {wrong} are wrong");
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
    let there = order.iter().rev().find_map(|event| match event.what {
        What::Put { version, stamp } => Some((version, Some(stamp))),
        What::Deleted { version } => Some((version, None)),
        _ => None,
    });
    let latest = there.map_or(0, |(version, _)| version);
    (0..rest.len()).any(|index| {
        let next = &rest[index];
        let possible = rest.iter().all(|other| other.end >= next.start);
        let right = match &next.what {
            What::Put { version, .. } | What::Deleted { version } => *version > latest,
            What::Found { version, value } => {
                there == Some((*version, value.clone().ok())) && value.is_ok()
            }
            What::Absent => there.is_none_or(|(_, stamp)| stamp.is_none()),
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
