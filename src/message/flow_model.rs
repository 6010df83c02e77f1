//! Two ends of a connection, a network that delivers in order, and services that are slow: every interleaving.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::flow_control::{Flow, RESERVE};
use super::frame::{Header, Kind};

/// One end and what its service has still to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct End {
    flow: Flow,
    /// Messages still to be sent, by kind.
    data: u8,
    offers: u8,
    pings: u8,
    finish: bool,
    /// Receives that are posted.
    posted: u32,
    /// Messages that have arrived and were not taken.
    inbox: u8,
    /// Offers that have arrived and are being read.
    reading: u8,
    /// On the way to the peer.
    wire: VecDeque<Header>,
}

impl End {
    fn new(receives: u32, window: u32, data: u8, offers: u8) -> Self {
        Self {
            flow: Flow::new(receives, window),
            data,
            offers,
            pings: 0,
            finish: true,
            posted: receives,
            inbox: 0,
            reading: 0,
            wire: VecDeque::new(),
        }
    }

    fn send(&mut self, kind: Kind) {
        let header = self.flow.send(kind);
        self.wire.push_back(header);
    }

    /// Everything is sent, and known to have been taken.
    fn is_done(&self) -> bool {
        self.data == 0 && self.offers == 0 && self.flow.is_over() && self.inbox == 0 && self.reading == 0
    }
}

type World = [End; 2];

/// All that can happen next; the second: what the engines do by themselves, without the services.
fn steps(world: &World) -> (Vec<World>, bool) {
    let mut next = Vec::new();
    let mut engine = false;
    for own in 0..2 {
        let end = &world[own];
        let mut step = |change: &dyn Fn(&mut World)| {
            let mut world = world.clone();
            change(&mut world);
            next.push(world);
        };
        if end.data > 0 && end.flow.may_send(Kind::Data) {
            step(&|world| {
                world[own].data -= 1;
                world[own].send(Kind::Data);
            });
        }
        if end.offers > 0 && end.flow.may_send(Kind::Offer) {
            step(&|world| {
                world[own].offers -= 1;
                world[own].send(Kind::Offer);
            });
        }
        if end.pings > 0 && end.flow.may_send(Kind::Ping) && !end.flow.peer_has_finished() {
            step(&|world| {
                world[own].pings -= 1;
                world[own].send(Kind::Ping);
            });
        }
        if end.inbox > 0 && end.inbox > end.reading {
            step(&|world| {
                world[own].inbox -= 1;
                world[own].posted += 1;
                world[own].flow.release_message();
            });
        }
        // From here on: engine.
        if end.finish && end.data == 0 && end.offers == 0 && end.flow.may_send(Kind::Fin) {
            engine = true;
            step(&|world| {
                world[own].finish = false;
                world[own].send(Kind::Fin);
            });
        }
        if end.reading > 0 {
            engine = true;
            step(&|world| {
                world[own].reading -= 1;
                world[own].flow.done();
            });
        }
        if end.flow.ack_due() {
            engine = true;
            step(&|world| world[own].send(Kind::Ack));
        }
        if !world[1 - own].wire.is_empty() {
            engine = true;
            step(&|world| {
                let Some(header) = world[1 - own].wire.pop_front() else { unreachable!("checked above") };
                let end = &mut world[own];
                assert!(end.posted > 0, "receiver not ready");
                end.posted -= 1;
                end.flow.receive(header).expect("no peer of ours is refused");
                if header.kind.is_message() {
                    end.inbox += 1;
                    end.reading += u8::from(header.kind == Kind::Offer);
                } else {
                    end.posted += 1;
                    end.flow.release_control();
                }
            });
        }
    }
    (next, engine)
}

/// What tells states apart that can go on differently, as a number that no two of some millions share by chance.
fn key(world: &World) -> (u64, u64) {
    let mut hashers = [Seeded::with(1), Seeded::with(2)];
    for hasher in &mut hashers {
        for (own, end) in world.iter().enumerate() {
            end.flow.shape().hash(hasher);
            (end.data, end.offers, end.pings, end.finish, end.posted, end.inbox, end.reading).hash(hasher);
            end.wire.len().hash(hasher);
            for &header in &end.wire {
                world[1 - own].flow.shape_of(header).hash(hasher);
            }
        }
    }
    let [a, b] = hashers;
    (a.finish(), b.finish())
}

/// Seeded hashers.
struct Seeded;

impl Seeded {
    fn with(seed: u64) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        seed.hash(&mut hasher);
        hasher
    }
}

/// Goes through all states that can be reached; how many there are.
fn explore(start: World) -> usize {
    let mut seen = HashMap::from([(key(&start), 0)]);
    // For each state, those that come after it.
    let mut after: Vec<Vec<usize>> = vec![Vec::new()];
    let mut ahead = vec![(0, start)];
    while let Some((number, world)) = ahead.pop() {
        let (next, engine) = steps(&world);
        for (own, end) in world.iter().enumerate() {
            let in_use = world[1 - own].wire.len() as u32;
            assert!(in_use <= end.posted, "frames on the way find a receive: {world:#?}");
        }
        if !engine {
            // With services that do nothing, what was read is known to have been.
            let told = world.iter().all(|end| end.flow.all_fetched());
            assert!(told, "an offer is done and its owner is not told: {world:#?}");
        }
        if next.is_empty() {
            assert!(world.iter().all(End::is_done), "nobody can do anything, and not all is done: {world:#?}");
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

/// No state comes after itself: whatever happens, it comes to an end.
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

/// Explores, and sees that it was not over before it had begun.
fn holds(a: End, b: End) {
    let states = explore([a, b]);
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
