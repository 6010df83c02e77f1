//! Steps of the model: the states that follow a state.

use super::end::{Call, End};
use crate::error::{OpErrorKind, VerbError};
use crate::message::error::CloseReason;
use crate::message::frame::Kind;
use crate::message::lifecycle::{Event, Phase, Stage};

const FAILURE: OpErrorKind = OpErrorKind::Post(VerbError::new("ibv_post_send", VerbError::EIO));

/// Both ends, and the network between them.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) ends: [End; 2],
    /// The network may be cut.
    pub(super) may_be_cut: bool,
    /// The network delivers no more frames, in either direction.
    pub(super) cut: bool,
}

impl World {
    /// True if frames of `own` neither arrive nor are acknowledged.
    fn is_lost(&self, own: usize) -> bool {
        self.cut
            || matches!(self.ends[1 - own].protocol.phase(), Phase::Failing(..) | Phase::Closed(_))
    }
}

/// States that follow a state.
struct Steps<'a> {
    world: &'a World,
    next: Vec<World>,
}

impl Steps<'_> {
    fn add(&mut self, own: usize, change: impl FnOnce(&mut End, &mut End)) {
        let mut world = self.world.clone();
        let [one, two] = &mut world.ends;
        if own == 0 {
            change(one, two)
        } else {
            change(two, one)
        }
        self.next.push(world);
    }
}

/// Returns all states that follow `world`, and whether an end or the network can make progress without the services.
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
            world.ends.iter_mut().for_each(|end| end.lose(unacknowledged));
            steps.next.push(world);
        }
    }
    (steps.next, engine)
}

/// Adds the steps of an end, its driver and the network.
fn engine(steps: &mut Steps<'_>, own: usize) {
    let world = steps.world;
    let (end, peer) = (&world.ends[own], &world.ends[1 - own]);
    let lost = world.is_lost(own);
    if !end.wire.is_empty() && !lost {
        // The device of an end that has ended receives frames, too, until its queue pair is closed.
        steps.add(own, |end, peer| {
            let header = end.wire.pop();
            if peer.protocol.phase().ended().is_none() {
                peer.receive(header);
            }
        });
    }
    match *end.protocol.phase() {
        Phase::Running(stage) => {
            let mut protocol = end.protocol.clone();
            if let Some(header) = protocol.next_frame() {
                steps.add(own, |end, _| {
                    end.protocol = protocol;
                    end.wire.push(header);
                });
            }
            if end.reading > 0 {
                steps.add(own, |end, _| {
                    end.reading -= 1;
                    end.protocol.flow.done();
                });
            }
            if !end.protocol.phase().takes_messages() && end.inbox > end.reading {
                steps.add(own, |end, _| end.take());
            }
            if end.is_flushed() && end.protocol.flow.is_over() {
                steps.add(own, |end, peer| {
                    end.on(Event::End(CloseReason::Clean));
                    assert_all_arrived(end, peer);
                });
            }
            if end.is_flushed() && stage == Stage::Aborting {
                steps.add(own, |end, _| end.on(Event::End(CloseReason::Local)));
            }
            if !end.is_flushed() && lost {
                steps.add(own, |end, _| {
                    end.on(Event::Fail(FAILURE));
                    end.cut_off();
                });
            }
        }
        Phase::Failing(_, cause) => steps.add(own, |end, peer| {
            if end.protocol.flow.is_over() {
                end.on(Event::End(CloseReason::Clean));
                assert_all_arrived(end, peer);
            } else {
                end.on(Event::End(CloseReason::Operation(cause)));
            }
        }),
        // The driver awaits an `Abort`; all other frames in flight are lost.
        Phase::Ended(how) => {
            if how.reason != CloseReason::Aborted || end.is_flushed() || lost {
                for unacknowledged in [false, true] {
                    steps.add(own, |end, peer| {
                        end.on(Event::QueuePairClosed);
                        end.cut_off();
                        peer.lose(unacknowledged);
                    });
                }
            }
        }
        Phase::Closed(_) => {}
    }
    let in_use = peer.wire.len as u32;
    assert!(
        end.stage().is_none() || in_use <= end.posted,
        "frames in flight find a receive: {world:#?}"
    );
}

/// Adds the deadlines of an end.
fn time(steps: &mut Steps<'_>, own: usize) {
    match *steps.world.ends[own].protocol.phase() {
        Phase::Running(Stage::Lingering | Stage::Aborting) => {
            steps.add(own, |end, _| end.on(Event::End(CloseReason::Local)));
        }
        Phase::Running(_) if steps.world.is_lost(own) => {
            steps.add(own, |end, _| end.on(Event::End(CloseReason::Silent)));
        }
        _ => {}
    }
}

/// Adds the steps of a service.
fn service(steps: &mut Steps<'_>, own: usize) {
    let end = &steps.world.ends[own];
    let phase = end.protocol.phase();
    if phase.ended().is_some() {
        return;
    }
    for (kind, left) in [(Kind::Data, end.data), (Kind::Offer, end.offers)] {
        // The queue pair of an end that fails sends nothing.
        if left > 0
            && end.stage().is_some()
            && phase.check_open().is_ok()
            && end.protocol.flow.may_send(kind)
        {
            steps.add(own, |end, _| {
                *(if kind == Kind::Data { &mut end.data } else { &mut end.offers }) -= 1;
                end.send(kind);
            });
        }
    }
    // A peer that has finished may be gone; asking it means nothing.
    if end.pings > 0
        && end.protocol.flow.may_send(Kind::Ping)
        && !end.protocol.flow.peer_has_finished()
    {
        steps.add(own, |end, _| {
            end.pings -= 1;
            end.send(Kind::Ping);
        });
    }
    if phase.takes_messages() && end.inbox > end.reading {
        steps.add(own, |end, _| end.take());
    }
    let holds = !matches!(phase, Phase::Running(Stage::Lingering | Stage::Aborting));
    let received_all = matches!(
        phase,
        Phase::Running(Stage::ReceivedAll | Stage::Complete)
            | Phase::Failing(Stage::ReceivedAll | Stage::Complete, _)
    );
    if holds && phase.takes_messages() && end.is_at_end() && !received_all {
        steps.add(own, |end, peer| {
            end.on(Event::EndReceived);
            assert_eq!(
                (end.arrived, end.inbox),
                (peer.sent, 0),
                "the end comes after the last message"
            );
        });
    }
    for call in Call::ALL.into_iter().filter(|&call| end.calls[call as usize]) {
        if call != Call::FinishAtEnd || end.data == 0 && end.offers == 0 {
            steps.add(own, |end, _| end.call(call));
        }
    }
    if end.may_fail && end.stage().is_some() {
        steps.add(own, |end, _| {
            end.may_fail = false;
            end.on(Event::Fail(FAILURE));
            end.cut_off();
        });
    }
}

/// Asserts that an end that ends cleanly knows that all messages have arrived.
fn assert_all_arrived(end: &End, peer: &End) {
    assert_eq!(
        (end.sent, end.arrived),
        (peer.arrived, peer.sent),
        "a clean end: {end:#?} {peer:#?}"
    );
}
