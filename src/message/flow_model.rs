//! Model checker: two ends of a connection, a network that delivers in order, and slow services, in every interleaving.
//!
//! Each end is a real [`Protocol`](super::protocol::Protocol). The model adds its surroundings:
//!
//! - posted receives, and frames in flight
//! - queue pairs that fail or are closed, and a network that is cut
//! - services that send, receive, finish, close, abort and drop at any time
//!
//! A frame that arrives is acknowledged at once: a later acknowledgement differs only if it is lost, together with the peer's
//! queue pair or the network. Time passes only while no end and no network can make progress.

mod end;
mod steps;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use self::end::{Call, End};
use self::steps::{World, steps};
use super::error::CloseReason;
use super::flow_control::RESERVE;
use super::lifecycle::{Phase, Stage};

/// Asserts what holds in a state that no other state follows.
fn assert_over(world: &World) {
    assert!(
        world.ends.iter().all(End::is_closed),
        "nothing can happen, and not all is over: {world:#?}"
    );
    let reason = |own: usize| world.ends[own].protocol.phase().ended();
    for (own, end) in world.ends.iter().enumerate() {
        let peer = 1 - own;
        let alone = !world.cut && !world.ends[peer].disturbed;
        if alone && (!end.disturbed || reason(own) == Some(CloseReason::Clean)) {
            assert_eq!(
                reason(peer),
                Some(CloseReason::Clean),
                "both ends know of a clean end: {world:#?}"
            );
        }
        if reason(own) == Some(CloseReason::Dropped) {
            assert_ne!(
                reason(peer),
                Some(CloseReason::Clean),
                "one end is told otherwise: {world:#?}"
            );
        }
        if alone && end.aborted && !matches!(reason(own), Some(CloseReason::Operation(_))) {
            let told = [CloseReason::Dropped, CloseReason::Clean].map(Some).contains(&reason(peer));
            assert!(told, "an Abort was sent, and its peer is not told: {world:#?}");
        }
    }
}

/// Returns a number for everything that decides the states that follow. Among some millions of states two with the same
/// number are improbable.
fn key(world: &World) -> u64 {
    let mut key = Mix::default();
    key.add([world.cut, world.may_be_cut].map(u32::from));
    for (own, end) in world.ends.iter().enumerate() {
        key.add([end.unacknowledged, end.disturbed, end.aborted, end.may_fail].map(u32::from));
        key.add([end.sent, end.arrived].map(u32::from));
        key.add(match *end.protocol.phase() {
            Phase::Running(stage) => [0, stage as u32],
            Phase::Failing(stage, _) => [1, stage as u32],
            Phase::Ended(how) => [2, number(how.reason)],
            Phase::Closed(how) => [3, number(how.reason)],
        });
        let peer = &world.ends[1 - own];
        key.add([peer.wire.len as u32]);
        if end.protocol.phase().ended().is_some() {
            continue;
        }
        key.add(end.protocol.flow.shape());
        key.add([end.data, end.offers, end.pings, end.inbox, end.reading].map(u32::from));
        key.add([end.posted]);
        key.add(end.calls.map(u32::from));
        for &header in &peer.wire.frames[..peer.wire.len] {
            let (kind, heard, released, done) = end.protocol.flow.shape_of(header);
            key.add([kind as u32, u32::from(heard), released, done]);
        }
    }
    key.0
}

/// Numbers the reasons that occur here.
fn number(reason: CloseReason) -> u32 {
    match reason {
        CloseReason::Clean => 0,
        CloseReason::Local => 1,
        CloseReason::Aborted => 2,
        CloseReason::Dropped => 3,
        CloseReason::Operation(_) => 4,
        CloseReason::Silent => 5,
        other => unreachable!("{other:?}"),
    }
}

/// Hash function that is fast without optimisation, unlike SipHash.
#[derive(Default)]
struct Mix(u64);

impl Mix {
    fn add<const WORDS: usize>(&mut self, words: [u32; WORDS]) {
        for word in words {
            let mixed =
                (self.0 ^ u64::from(word)).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.0 = mixed ^ mixed >> 32;
        }
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    /// Takes a key, which is mixed already.
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }
}

/// Visits every state that can be reached, and returns their number.
fn explore(start: World) -> usize {
    let mut seen: HashMap<u64, usize, BuildHasherDefault<Mix>> = HashMap::default();
    seen.insert(key(&start), 0);
    // For each state, the states that follow it.
    let mut after: Vec<Vec<usize>> = vec![Vec::new()];
    let mut ahead = vec![(0, start)];
    while let Some((number, world)) = ahead.pop() {
        let (next, engine) = steps(&world);
        if !engine
            && world
                .ends
                .iter()
                .all(|end| end.stage().is_some_and(|stage| stage != Stage::Aborting))
        {
            // Even if the services make no calls, an end learns that its offers were fetched.
            let told = world.cut || world.ends.iter().all(|end| end.protocol.flow.all_fetched());
            assert!(told, "an offer is done and its owner is not told: {world:#?}");
        }
        if next.is_empty() {
            assert_over(&world);
        }
        for world in next {
            let new = after.len();
            let found = *seen.entry(key(&world)).or_insert(new);
            after[number].push(found);
            if found == new {
                after.push(Vec::new());
                ahead.push((new, world));
            }
        }
    }
    assert_ends(&after);
    after.len()
}

/// Asserts that no state follows itself: every order of steps comes to an end.
fn assert_ends(after: &[Vec<usize>]) {
    let mut before = vec![0; after.len()];
    after.iter().flatten().for_each(|&next| before[next] += 1);
    let mut first: Vec<usize> = (0..after.len()).filter(|&state| before[state] == 0).collect();
    let mut ended = 0;
    while let Some(state) = first.pop() {
        ended += 1;
        for &next in &after[state] {
            before[next] -= 1;
            if before[next] == 0 {
                first.push(next);
            }
        }
    }
    assert_eq!(ended, after.len(), "some states go round in circles");
}

/// Explores two ends on a network that is not cut.
fn holds(a: End, b: End) {
    explored(World { ends: [a, b], may_be_cut: false, cut: false });
}

/// Explores, and asserts that there was something to explore.
fn explored(world: World) {
    let states = explore(world);
    println!("{states} states");
    assert!(states > 1_000, "{states} states");
}

#[test]
fn both_send_at_once_with_the_smallest_windows() {
    let end = || End::new(RESERVE + 1, RESERVE + 1, 4, 0);
    holds(end(), end());
}

#[test]
fn both_send_at_once_and_ask_for_answers() {
    let end = |pings, data| End { pings, ..End::new(RESERVE + 1, RESERVE + 1, data, 0) };
    holds(end(1, 1), end(0, 2));
}

#[test]
fn windows_that_differ() {
    holds(End::new(RESERVE + 1, RESERVE + 5, 3, 0), End::new(RESERVE + 5, RESERVE + 1, 1, 0));
}

#[test]
fn one_sends_and_the_other_never_does() {
    holds(End::new(RESERVE + 1, RESERVE + 2, 16, 0), End::new(RESERVE + 2, RESERVE + 1, 0, 0));
}

#[test]
fn offers_are_told_done_while_the_other_service_takes_nothing() {
    holds(End::new(RESERVE + 1, RESERVE + 2, 0, 2), End::new(RESERVE + 2, RESERVE + 1, 0, 0));
}

#[test]
fn offers_both_ways() {
    let end = || End::new(RESERVE + 1, RESERVE + 1, 0, 1);
    holds(end(), end());
}

#[test]
fn offers_against_messages() {
    holds(End::new(RESERVE + 1, RESERVE + 1, 0, 2), End::new(RESERVE + 1, RESERVE + 1, 1, 0));
}

#[test]
fn ends_that_finish_close_and_drop_in_any_order_end_at_both_sides() {
    let end = |data| End::calling(data, 0, &[Call::Finish, Call::Close, Call::Drop]);
    holds(end(1), end(1));
}

#[test]
fn end_that_closes_discards_and_ends_cleanly_with_a_peer_that_finishes() {
    let closes = |data, offers| End::calling(data, offers, &[Call::Close]);
    holds(closes(0, 0), End::new(RESERVE + 1, RESERVE + 1, 1, 1));
    holds(closes(1, 1), End::new(RESERVE + 1, RESERVE + 1, 0, 0));
    holds(closes(1, 0), closes(0, 1));
}

#[test]
fn abort_and_drop_at_any_time_are_told_to_a_peer_that_does_anything() {
    let end =
        |offers| End::calling(0, offers, &[Call::Finish, Call::Close, Call::Abort, Call::Drop]);
    holds(end(1), end(0));
}

#[test]
fn failure_of_either_end_or_of_the_network_ends_both() {
    let calls = [Call::Finish, Call::Close, Call::Abort, Call::Drop];
    let end = |data| End { may_fail: true, ..End::calling(data, 0, &calls) };
    explored(World { ends: [end(1), end(0)], may_be_cut: true, cut: false });
}
