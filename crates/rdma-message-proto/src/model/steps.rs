use std::time::Instant;

use super::side::{Call, Frame, Side};
use crate::end::{End, TestReason};
use crate::frame::Kind;
use crate::lifecycle::{Event, Phase, Stage};

const FAILURE: TestReason = TestReason::Failed(0);

#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) sides: [Side; 2],
    pub(super) may_be_cut: bool,
    pub(super) cut: bool,
}

impl World {
    /// Returns true if frames of `own` are neither delivered nor acknowledged.
    fn is_lost(&self, own: usize) -> bool {
        self.cut
            || matches!(self.sides[1 - own].protocol.phase(), Phase::Failing(..) | Phase::Closed(_))
    }
}

struct Steps<'a> {
    world: &'a World,
    next: Vec<World>,
}

impl Steps<'_> {
    fn add(&mut self, own: usize, change: impl FnOnce(&mut Side, &mut Side)) {
        let mut world = self.world.clone();
        let [one, two] = &mut world.sides;
        if own == 0 {
            change(one, two)
        } else {
            change(two, one)
        }
        self.next.push(world);
    }
}

/// Also returns whether progress is possible without the applications.
pub(super) fn steps(world: &World) -> (Vec<World>, bool) {
    let mut steps = Steps { world, next: Vec::new() };
    for own in 0..2 {
        engine(&mut steps, own);
    }
    let engine = !steps.next.is_empty();
    for own in 0..2 {
        if !engine {
            time(&mut steps, own);
        }
        service(&mut steps, own);
    }
    if world.may_be_cut {
        for unacknowledged in [false, true] {
            let mut world = World { cut: true, may_be_cut: false, ..world.clone() };
            world.sides.iter_mut().for_each(|side| side.lose(unacknowledged));
            steps.next.push(world);
        }
    }
    (steps.next, engine)
}

fn engine(steps: &mut Steps<'_>, own: usize) {
    let world = steps.world;
    let (side, peer) = (&world.sides[own], &world.sides[1 - own]);
    let lost = world.is_lost(own);
    if !side.wire.is_empty() && !lost {
        // The device of a terminated side receives frames until its queue pair is closed.
        steps.add(own, |side, peer| {
            let frame = side.wire.pop();
            if peer.protocol.phase().close_reason().is_none() {
                peer.receive(frame);
            }
        });
    }
    match *side.protocol.phase() {
        Phase::Running(stage) => {
            let mut protocol = side.protocol.clone();
            let next = protocol.next_frame(side.held == 0, || true, Instant::now);
            assert!(next.is_none() || !side.protocol.is_quiet(), "{next:?} of a quiet side");
            if let Some((header, resize)) = next {
                let bare = Frame::Bare(header);
                let frame = resize.map_or(bare, |resize| {
                    Frame::Resize(header, [resize.receives, resize.skip].map(|count| count as u8))
                });
                steps.add(own, |side, _| {
                    side.protocol = protocol;
                    side.wire.push_any(frame);
                });
            }
            let waits = !side.is_flushed() && side.protocol.phase().check_open().is_ok();
            if side.held > 0 && (!waits || side.held > 1) && side.may_send(Kind::Data) {
                steps.add(own, |side, _| side.send_held());
            }
            if side.reading > 0 {
                steps.add(own, |side, _| {
                    side.reading -= 1;
                    side.protocol.flow.done();
                });
            }
            if !side.protocol.phase().takes_messages() && side.inbox > side.reading {
                steps.add(own, |side, _| side.take());
            }
            if !side.protocol.phase().takes_messages() && side.noticed > 0 {
                steps.add(own, |side, _| side.take_notice());
            }
            if side.is_flushed() && side.protocol.flow.is_over() {
                steps.add(own, |side, peer| {
                    side.on(Event::Terminate(End::Clean.into()));
                    assert_all_arrived(side, peer);
                });
            }
            if side.is_flushed() && stage == Stage::Aborting {
                steps.add(own, |side, _| side.on(Event::Terminate(End::Local.into())));
            }
            if !side.is_flushed() && lost {
                steps.add(own, |side, _| {
                    side.on(Event::Fail(FAILURE));
                    side.cut_off();
                });
            }
        }
        Phase::Failing(_, cause) => steps.add(own, |side, peer| {
            if side.protocol.flow.is_over() {
                side.on(Event::Terminate(End::Clean.into()));
                assert_all_arrived(side, peer);
            } else {
                side.on(Event::Terminate(cause));
            }
        }),
        // The driver awaits an `Abort`; other frames in flight are lost.
        Phase::Terminated(outcome) => {
            if outcome.reason != TestReason::Aborted || side.is_flushed() || lost {
                for unacknowledged in [false, true] {
                    steps.add(own, |side, peer| {
                        side.on(Event::QueuePairClosed);
                        side.cut_off();
                        peer.lose(unacknowledged);
                    });
                }
            }
        }
        Phase::Closed(_) => {}
    }
    let in_use = peer.wire.len as u32;
    assert!(
        side.stage().is_none() || in_use <= side.posted,
        "frames in flight without a receive: {world:#?}"
    );
}

fn time(steps: &mut Steps<'_>, own: usize) {
    match *steps.world.sides[own].protocol.phase() {
        Phase::Running(Stage::Lingering | Stage::Aborting) => {
            steps.add(own, |side, peer| {
                if side.stream {
                    // The peer may continue to write.
                    side.disturbed = true;
                    let all = side.protocol.flow.peer_has_all();
                    assert!(
                        !all || side.sent == peer.arrived && side.held == 0,
                        "{side:#?} {peer:#?}"
                    );
                }
                side.on(Event::Terminate(End::Local.into()));
            });
        }
        Phase::Running(_) if steps.world.is_lost(own) => {
            steps.add(own, |side, _| side.on(Event::Terminate(End::Silent.into())));
        }
        _ => {}
    }
}

fn service(steps: &mut Steps<'_>, own: usize) {
    let side = &steps.world.sides[own];
    let phase = side.protocol.phase();
    if phase.close_reason().is_some() {
        return;
    }
    for (kind, left) in [(Kind::Data, side.data), (Kind::Offer, side.offers)] {
        // A failed queue pair sends nothing.
        let writes = left > 0 && side.stage().is_some() && phase.check_open().is_ok();
        if writes && kind == Kind::Data && side.may_hold() {
            steps.add(own, |side, _| {
                side.data -= 1;
                side.held = side.held.max(1);
            });
            // Without a credit, the bytes may fill the last frame and begin another.
            if side.held > 0 && !side.may_send(kind) {
                steps.add(own, |side, _| {
                    side.data -= 1;
                    side.held += 1;
                });
            }
        }
        if side.held > 0 {
            continue;
        }
        if writes && side.may_send(kind) {
            steps.add(own, |side, _| {
                *(if kind == Kind::Data { &mut side.data } else { &mut side.offers }) -= 1;
                side.send(kind);
            });
        }
    }
    // The bytes fill a frame, or the service flushes.
    if side.held > 0
        && side.stage().is_some()
        && phase.check_open().is_ok()
        && side.may_send(Kind::Data)
    {
        steps.add(own, |side, _| side.send_held());
    }
    if side.notices > 0
        && side.stage().is_some()
        && phase.check_open().is_ok()
        && side.protocol.flow.may_send(Kind::Data)
    {
        steps.add(own, |side, _| side.notify());
    }
    // A peer that has finished may be gone and not answer.
    if side.pings > 0
        && side.protocol.flow.may_send(Kind::Ping)
        && !side.protocol.flow.peer_has_finished()
    {
        steps.add(own, |side, _| {
            side.pings -= 1;
            side.send(Kind::Ping);
        });
    }
    if !side.changes.is_empty() && side.protocol.flow.may_resize() && side.stage().is_some() {
        steps.add(own, |side, _| side.resize());
    }
    if phase.takes_messages() && side.inbox > side.reading {
        steps.add(own, |side, _| side.take());
    }
    if phase.takes_messages() && side.noticed > 0 {
        steps.add(own, |side, _| side.take_notice());
    }
    let has_handle = !matches!(phase, Phase::Running(Stage::Lingering | Stage::Aborting));
    let received_all = matches!(
        phase,
        Phase::Running(Stage::ReceivedAll | Stage::Complete)
            | Phase::Failing(Stage::ReceivedAll | Stage::Complete, _)
    );
    if has_handle && phase.takes_messages() && side.is_at_end() && !received_all {
        steps.add(own, |side, peer| {
            side.on(Event::EndReceived);
            assert_eq!(
                (side.arrived, side.inbox),
                (peer.sent, 0),
                "end of messages before the last message"
            );
        });
    }
    for call in Call::ALL.into_iter().filter(|&call| side.calls[call as usize]) {
        let all_sent = [side.data, side.offers, side.notices] == [0; 3];
        if call != Call::FinishAtEnd || all_sent {
            steps.add(own, |side, _| side.call(call));
        }
    }
    if side.may_fail && side.stage().is_some() {
        steps.add(own, |side, _| {
            side.may_fail = false;
            side.on(Event::Fail(FAILURE));
            side.cut_off();
        });
    }
}

fn assert_all_arrived(side: &Side, peer: &Side) {
    assert_eq!(
        (side.sent, side.arrived),
        (peer.arrived, peer.sent),
        "clean close with messages missing: {side:#?} {peer:#?}"
    );
    assert!(side.held == 0 && peer.held == 0, "clean close with held bytes: {side:#?} {peer:#?}");
}
