//! A model checker for two ends of a connection, slow applications and an in-order network, in
//! every interleaving.
//!
//! Each end is a real [`Protocol`](crate::protocol::Protocol). The model adds:
//!
//! - posted receives and frames in flight
//! - queue pairs that fail or close, and a network that is cut
//! - applications that send, notify, receive, finish, close, abort and drop at any time
//! - writes of streams that are held while frames are in flight, or without a credit
//! - ends that post more receives, or make the peer skip some
//!
//! Frames are acknowledged on arrival. A later acknowledgement differs only if it is lost with the
//! peer's queue pair or the network. Time passes only when neither end nor the network can make
//! progress.

mod side;
mod steps;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use self::side::{Call, Frame, Side};
use self::steps::{World, steps};
use crate::end::{End, TestReason};
use crate::flow::{RESERVE, max_frames};
use crate::lifecycle::{Phase, Stage};

const CLEAN: TestReason = TestReason::Protocol(End::Clean);
const DROPPED: TestReason = TestReason::Protocol(End::Dropped);

fn assert_over(world: &World) {
    assert!(world.sides.iter().all(Side::is_closed), "deadlock: {world:#?}");
    let reason = |own: usize| world.sides[own].protocol.phase().close_reason();
    for (own, side) in world.sides.iter().enumerate() {
        let peer = 1 - own;
        let alone = !world.cut && !world.sides[peer].disturbed;
        if alone && (!side.disturbed || reason(own) == Some(CLEAN)) {
            assert_eq!(reason(peer), Some(CLEAN), "both sides close cleanly: {world:#?}");
        }
        if reason(own) == Some(DROPPED) {
            assert_ne!(reason(peer), Some(CLEAN), "the peer considers it clean: {world:#?}");
        }
        if alone && side.aborted && !matches!(reason(own), Some(TestReason::Failed(_))) {
            let notified = [DROPPED, CLEAN].map(Some).contains(&reason(peer));
            assert!(notified, "an Abort did not notify the peer: {world:#?}");
        }
    }
}

/// Collisions of hashes among some million states are improbable.
fn key(world: &World) -> u64 {
    let mut key = Mix::default();
    key.add([world.cut, world.may_be_cut].map(u32::from));
    for (own, side) in world.sides.iter().enumerate() {
        key.add([side.unacknowledged, side.disturbed, side.aborted, side.may_fail].map(u32::from));
        key.add([side.sent, side.arrived].map(u32::from));
        key.add(match *side.protocol.phase() {
            Phase::Running(stage) => [0, stage as u32],
            Phase::Failing(stage, _) => [1, stage as u32],
            Phase::Terminated(outcome) => [2, number(outcome.reason)],
            Phase::Closed(outcome) => [3, number(outcome.reason)],
        });
        let peer = &world.sides[1 - own];
        key.add([peer.wire.len as u32]);
        if side.protocol.phase().close_reason().is_some() {
            continue;
        }
        key.add(side.protocol.flow.shape());
        key.add([side.protocol.incomplete_frames()]);
        key.add([side.data, side.offers, side.pings, side.inbox, side.reading].map(u32::from));
        key.add([side.notices, side.noticed].map(u32::from));
        key.add([side.stream.into(), side.held.into()]);
        key.add([side.posted, side.changes.len() as u32]);
        key.add(side.calls.map(u32::from));
        for frame in &peer.wire.frames[..peer.wire.len] {
            let (header, resize) = match *frame {
                Frame::Notification => {
                    key.add([u32::MAX; 4]);
                    continue;
                }
                Frame::Bare(header) => (header, None),
                Frame::Resize(header, resize) => (header, Some(resize)),
            };
            let (kind, fin_acked, released, done) = side.protocol.flow.shape_of(header);
            key.add([kind as u32, u32::from(fin_acked), released, done]);
            if let Some(counts) = resize {
                key.add(counts.map(u32::from));
            }
        }
    }
    key.0
}

fn number(reason: TestReason) -> u32 {
    match reason {
        TestReason::Protocol(End::Clean) => 0,
        TestReason::Protocol(End::Local) => 1,
        TestReason::Aborted => 2,
        TestReason::Protocol(End::Dropped) => 3,
        TestReason::Failed(_) => 4,
        TestReason::Protocol(End::Silent) => 5,
        other => unreachable!("{other:?}"),
    }
}

/// Fast without optimisation, unlike SipHash.
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

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }
}

fn explore(start: World) -> usize {
    let mut seen: HashMap<u64, usize, BuildHasherDefault<Mix>> = HashMap::default();
    seen.insert(key(&start), 0);
    let mut after: Vec<Vec<usize>> = vec![Vec::new()];
    let mut ahead = vec![(0, start)];
    while let Some((number, world)) = ahead.pop() {
        let (next, engine) = steps(&world);
        if !engine
            && world
                .sides
                .iter()
                .all(|side| side.stage().is_some_and(|stage| stage != Stage::Aborting))
        {
            // A side learns without any call of a service that its offers were fetched.
            let notified =
                world.cut || world.sides.iter().all(|side| side.protocol.flow.all_fetched());
            assert!(notified, "a done offer was not announced: {world:#?}");
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

/// Asserts that no state can recur, so every order of steps terminates.
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
    assert_eq!(ended, after.len(), "the states contain a cycle");
}

fn assert_holds(a: Side, b: Side) {
    assert_explored(World { sides: [a, b], may_be_cut: false, cut: false });
}

fn assert_explored(world: World) {
    let states = explore(world);
    println!("{states} states");
    assert!(states > 500, "{states} states");
}

/// All worlds take a minute without optimisation. Debug builds explore worlds with fewer messages,
/// offers, notifications or possible calls, but with each kind that the test is about.
const ALL_WORLDS: bool = !cfg!(debug_assertions);

#[test]
fn both_sides_send_with_the_smallest_windows() {
    let side = |data| Side::new(RESERVE + 1, RESERVE + 1, data, 0);
    assert_holds(side(2), side(1));
    if ALL_WORLDS {
        assert_holds(side(4), side(4));
    }
}

#[test]
fn both_sides_send_messages_and_one_sends_pings() {
    let side = |pings, data| Side { pings, ..Side::new(RESERVE + 1, RESERVE + 1, data, 0) };
    assert_holds(side(1, 1), side(0, 1));
    if ALL_WORLDS {
        assert_holds(side(1, 1), side(0, 2));
    }
}

#[test]
fn sides_with_different_windows() {
    assert_holds(
        Side::new(RESERVE + 1, RESERVE + 5, 3, 0),
        Side::new(RESERVE + 5, RESERVE + 1, 1, 0),
    );
}

#[test]
fn messages_of_as_many_frames_as_the_window_permits_arrive() {
    let windows: &[u32] = if ALL_WORLDS { &[1, 2, 3, 4, 5] } else { &[1, 5] };
    for &window in windows {
        let frames = max_frames(RESERVE + window);
        let side = |data| Side {
            frames: frames as u8,
            ..Side::new(RESERVE + window, RESERVE + window, data, 0)
        };
        assert_holds(side(1), side(1));
        assert_holds(Side { pings: 1, ..side(0) }, side(1));
        if ALL_WORLDS {
            assert_holds(side(2), side(2));
            assert_holds(Side { pings: 1, ..side(1) }, side(3));
        }
    }
}

#[test]
fn only_one_side_sends() {
    assert_holds(
        Side::new(RESERVE + 1, RESERVE + 2, if ALL_WORLDS { 16 } else { 8 }, 0),
        Side::new(RESERVE + 2, RESERVE + 1, 0, 0),
    );
}

#[test]
fn offers_are_announced_done_while_the_peer_service_receives_nothing() {
    assert_holds(
        Side::new(RESERVE + 1, RESERVE + 2, 0, if ALL_WORLDS { 2 } else { 1 }),
        Side::new(RESERVE + 2, RESERVE + 1, 0, 0),
    );
}

#[test]
fn both_sides_send_offers() {
    let side = || Side::new(RESERVE + 1, RESERVE + 1, 0, 1);
    assert_holds(side(), side());
}

#[test]
fn one_side_sends_offers_and_the_other_messages() {
    assert_holds(
        Side::new(RESERVE + 1, RESERVE + 1, 0, if ALL_WORLDS { 2 } else { 1 }),
        Side::new(RESERVE + 1, RESERVE + 1, 1, 0),
    );
}

#[test]
fn both_sides_notify_each_other_with_the_smallest_windows() {
    let side = |data, notices| Side { notices, ..Side::new(RESERVE + 1, RESERVE + 1, data, 0) };
    assert_holds(side(0, 2), side(0, 1));
    assert_holds(side(1, 1), side(0, 1));
    if ALL_WORLDS {
        assert_holds(side(0, 4), side(0, 4));
        assert_holds(side(1, 2), side(2, 1));
    }
}

#[test]
fn notifications_end_with_the_messages_of_their_side() {
    let calls: &[Call] = if ALL_WORLDS {
        &[Call::Finish, Call::Close, Call::Drop]
    } else {
        &[Call::Finish, Call::Close]
    };
    let side = |data, notices| Side { notices, ..Side::calling(data, 0, calls) };
    assert_holds(side(0, 1), side(1, 0));
}

#[test]
fn windows_grow_and_shrink_at_any_time() {
    let side = |data, changes| Side { changes, ..Side::new(RESERVE + 1, RESERVE + 1, data, 0) };
    assert_holds(side(0, &[(1, 0)]), side(2, &[]));
    assert_holds(side(0, &[(0, 1), (1, 0)]), side(1, &[]));
    let fewer = |data, changes| Side { changes, ..Side::new(RESERVE + 3, RESERVE + 3, data, 0) };
    assert_holds(fewer(0, &[(0, 2)]), fewer(1, &[]));
    if ALL_WORLDS {
        assert_holds(fewer(0, &[(0, 2)]), fewer(2, &[]));
    }
    if ALL_WORLDS {
        assert_holds(side(1, &[(1, 0)]), side(2, &[]));
        assert_holds(side(0, &[(0, 1), (1, 0)]), side(2, &[]));
        assert_holds(Side { pings: 1, ..side(0, &[(0, 1), (1, 0)]) }, side(1, &[]));
    }
}

#[test]
fn messages_of_many_frames_wait_for_no_window_that_shrinks() {
    let side =
        |data, changes| Side { frames: 2, changes, ..Side::new(RESERVE + 3, RESERVE + 3, data, 0) };
    assert_holds(side(0, &[(0, 1)]), side(2, &[]));
    if ALL_WORLDS {
        assert_holds(side(1, &[(0, 1)]), side(1, &[]));
    }
}

#[test]
fn windows_change_while_sides_close_or_drop() {
    let side = |data, changes| Side {
        changes,
        ..Side::calling(data, 0, &[Call::Finish, Call::Close, Call::Drop])
    };
    assert_holds(side(0, &[(1, 0)]), side(0, &[]));
    let end = |data, changes| Side { changes, ..Side::stream(data, 0, &[Call::FinishAtEnd]) };
    assert_holds(end(0, &[(0, 1), (1, 0)]), end(1, &[]));
    if ALL_WORLDS {
        assert_holds(side(0, &[(0, 1), (1, 0)]), side(1, &[]));
        assert_holds(end(0, &[(0, 1), (1, 0)]), end(2, &[]));
    }
}

#[test]
fn both_sides_terminate_after_finish_close_and_drop_in_any_order() {
    let side = |data| Side::calling(data, 0, &[Call::Finish, Call::Close, Call::Drop]);
    assert_holds(side(1), side(0));
    if ALL_WORLDS {
        assert_holds(side(1), side(1));
    }
}

#[test]
fn side_that_closes_discards_messages_and_closes_cleanly_when_the_peer_finishes() {
    let closes = |data, offers| Side::calling(data, offers, &[Call::Close]);
    assert_holds(closes(0, 0), Side::new(RESERVE + 1, RESERVE + 1, 1, 1));
    assert_holds(closes(1, 1), Side::new(RESERVE + 1, RESERVE + 1, 0, 0));
    assert_holds(closes(1, 0), closes(0, 1));
}

#[test]
fn abort_and_drop_at_any_time_notify_the_peer() {
    let side =
        |offers| Side::calling(0, offers, &[Call::Finish, Call::Close, Call::Abort, Call::Drop]);
    assert_holds(side(0), side(0));
    if ALL_WORLDS {
        assert_holds(side(1), side(0));
    }
}

#[test]
fn failure_of_a_side_or_of_the_network_terminates_both() {
    let calls = [Call::Finish, Call::Close, Call::Abort, Call::Drop];
    let side = |data| Side { may_fail: true, ..Side::calling(data, 0, &calls) };
    let explore = |sides| assert_explored(World { sides, may_be_cut: true, cut: false });
    explore([side(0), side(0)]);
    if ALL_WORLDS {
        explore([side(1), side(0)]);
    }
}

#[test]
fn both_ends_of_a_stream_write_with_the_smallest_windows() {
    let end = |data| Side::stream(data, 0, &[Call::FinishAtEnd]);
    assert_holds(end(1), end(1));
    if ALL_WORLDS {
        assert_holds(end(3), end(2));
    }
}

#[test]
fn pieces_of_memory_follow_held_bytes() {
    let end = |data, offers| Side::stream(data, offers, &[Call::FinishAtEnd]);
    assert_holds(end(1, 1), end(0, 0));
    if ALL_WORLDS {
        assert_holds(end(2, 1), end(1, 0));
    }
}

#[test]
fn finished_and_dropped_streams_deliver_held_bytes() {
    let end = |data| Side::stream(data, 0, &[Call::Finish, Call::Drop]);
    assert_holds(end(1), end(1));
    if ALL_WORLDS {
        assert_holds(end(2), end(1));
    }
    assert_holds(end(3), Side::stream(0, 0, &[Call::FinishAtEnd]));
}

#[test]
fn failure_of_an_end_or_of_the_network_terminates_both_ends_of_a_stream() {
    let calls: &[Call] = if ALL_WORLDS {
        &[Call::Finish, Call::Abort, Call::Drop]
    } else {
        &[Call::Finish, Call::Drop]
    };
    let end = |data| Side { may_fail: true, ..Side::stream(data, 0, calls) };
    let explore = |sides| assert_explored(World { sides, may_be_cut: true, cut: false });
    explore([end(1), end(0)]);
    if ALL_WORLDS {
        explore([end(2), end(0)]);
    }
}
