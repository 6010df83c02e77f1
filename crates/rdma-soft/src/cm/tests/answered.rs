//! Requests that the manager answers in the name of a listener: what is remembered, what gives way, when the program hears.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::cm::connection::Connection;
use crate::cm::limits::{HALF_OPEN, HALF_OPEN_OF_PEER};
use crate::cm::message::Req;
use rdma_provider::cm_contract::{Admit, CmAnswer, Verdict};
use rdma_provider::types::RejectReason;

/// Answers all but those from addresses to reject.
#[derive(Debug, Default)]
struct Door {
    rejects: Mutex<Vec<IpAddr>>,
    gave_way: Mutex<u32>,
}

impl Admit for Door {
    fn admit(&self, source: IpAddr, _: &[u8]) -> Verdict {
        if self.rejects.lock().contains(&source) {
            return Verdict::Reject(b"full".to_vec());
        }
        let private_data = b"welcome".to_vec();
        Verdict::Answer(CmAnswer {
            private_data,
            responder_resources: 9,
            initiator_depth: 1,
            retry_count: 7,
            rnr_retry: 7,
        })
    }

    fn gave_way(&self) {
        *self.gave_way.lock() += 1;
    }
}

fn answering() -> (Pair, Arc<Door>) {
    let mut pair = Pair::new();
    let door = Arc::new(Door::default());
    assert!(pair.b.answer(LISTENER, door.clone()));
    (pair, door)
}

/// A request from `gid`, with other numbers each time.
fn forged(pair: &mut Pair, gid: Gid, number: u32) -> Mad {
    pair.connect(0x100);
    let Message::Req(request) = Out::of(&mut pair.a).sent.remove(0).1.message else { panic!() };
    let request = Req { local_gid: gid, local_id: number, qpn: Qpn(0x100 + number), ..*request };
    Mad { transaction: u64::from(number), message: Message::Req(Box::new(request)) }
}

fn stranger(number: u32) -> Gid {
    Gid(u128::from(0x77_0000 + number).to_be_bytes())
}

#[test]
fn program_hears_of_a_peer_once_that_has_confirmed_the_answer() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    assert_eq!((out.kinds(), out.requests.len()), (vec!["REP"], 0));
    let response = pair.a.connection(ours).unwrap();
    assert_eq!(&response.params.as_ref().unwrap().private_data[..8], b"welcome\0");
    // No more than either side has, as the program would answer.
    assert_eq!((response.responder_resources, response.initiator_depth), (1, 2));
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    let out = Out::of(&mut pair.b);
    assert_eq!((out.requests.len(), out.names().len(), out.sent.len()), (1, 0, 0));
    let theirs = out.requests[0];
    assert!(
        pair.b.connection(theirs).unwrap().qp_attr(rdma_provider::types::QpState::Rtr).is_some()
    );
    assert_eq!(pair.b.listeners[&LISTENER].waiting, 1);
    assert_eq!((pair.b.half_open.total(), pair.b.yielding.is_empty()), (0, true));
    // The program's yes is no message.
    pair.b.accept(pair.now, theirs, &params(0x200, b"late")).unwrap();
    let out = Out::of(&mut pair.b);
    assert_eq!((out.names(), out.sent.len()), (vec!["established"], 0));
    assert_eq!(pair.b.listeners[&LISTENER].waiting, 0);
    // The number is free again when the connection is forgotten.
    let number = pair.b.connection(theirs).unwrap().local_qpn;
    pair.b.release(pair.now, theirs);
    pair.deliver_to_a();
    pair.deliver_to_b();
    let mut released = Vec::new();
    while pair.next_deadline() {
        released.extend(Out::of(&mut pair.b).released);
    }
    assert_eq!((released, pair.b.reserved.len(), pair.b.sizes()), (vec![number], 0, [0; 4]));
}

#[test]
fn packet_before_the_queue_pair_is_ready_confirms_and_is_put_off() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    let (number, first) = {
        let response = pair.a.connection(ours).unwrap();
        (response.remote_qpn.unwrap(), response.sq_psn)
    };
    let early = |pair: &mut Pair, from, number, psn| pair.b.on_early(from, number, psn);
    assert_eq!(early(&mut pair, stranger(1), number, first), None, "another peer's");
    assert_eq!(early(&mut pair, A, number, first.add(1)), None, "not its first");
    assert_eq!(early(&mut pair, A, Qpn(7), first), None, "no peer was told that number");
    assert_eq!(Out::of(&mut pair.b).requests.len(), 0);
    // The confirmation is overtaken.
    assert_eq!(early(&mut pair, A, number, first), Some(Qpn(0x100)));
    assert_eq!(Out::of(&mut pair.b).requests.len(), 1);
    assert_eq!(early(&mut pair, A, number, first), Some(Qpn(0x100)), "each time it is repeated");
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    assert_eq!(Out::of(&mut pair.b).requests.len(), 0, "the program hears once");
}

#[test]
fn oldest_of_the_largest_share_gives_way_and_others_stay() {
    let (mut pair, door) = answering();
    let honest = pair.connect(0x50);
    pair.deliver_to_b();
    let template = forged(&mut pair, stranger(0), 1);
    // One source, then 200, far beyond what is remembered.
    for number in 0..3 * HALF_OPEN {
        let gid = stranger(if number < HALF_OPEN { 0 } else { 1 + number % 200 });
        let Message::Req(request) = template.message.clone() else { panic!() };
        let request =
            Req { local_gid: gid, local_id: number + 1, qpn: Qpn(0x1000 + number), ..*request };
        let mad = Mad { transaction: 1, message: Message::Req(Box::new(request)) };
        // So that answers are not bounded.
        pair.now += 1_000_000;
        pair.b.on_message(pair.now, gid, mad, psn);
        for (to, mad) in Out::of(&mut pair.b).sent {
            if to == A {
                pair.a.on_message(pair.now, B, mad, psn);
            }
        }
        assert!(pair.b.half_open.total() <= HALF_OPEN);
        if number + 1 == HALF_OPEN {
            assert_eq!(pair.b.half_open.total(), HALF_OPEN_OF_PEER + 1, "of one source");
        }
    }
    assert_eq!(pair.b.half_open.total(), HALF_OPEN);
    assert_eq!(pair.b.connections.len() as u32, HALF_OPEN, "and nothing else is remembered");
    assert_eq!(pair.b.reserved.len() as u32, HALF_OPEN);
    assert_eq!(*door.gave_way.lock(), 3 * HALF_OPEN + 1 - HALF_OPEN);
    // The one that asked before all of them is still there.
    pair.a.establish(honest).unwrap();
    pair.deliver_to_b();
    let taken = Out::of(&mut pair.b).requests;
    assert_eq!(taken.len(), 1);
    pair.b.release(pair.now, taken[0]);
    while pair.next_deadline() {
        Out::of(&mut pair.b);
        Out::of(&mut pair.a);
    }
    assert_eq!(
        (pair.b.half_open.total(), pair.b.reserved.len(), pair.b.yielding.is_empty()),
        (0, 0, true)
    );
}

#[test]
fn peer_whose_handshake_gave_way_is_told_when_it_confirms() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    assert!(pair.b.give_way_to(stranger(1), true));
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    assert_eq!(pair.deliver_to_a().kinds(), ["REJ"]);
    let out = Out::of(&mut pair.a);
    assert!(
        matches!(out.events[..], [(_, Event::Rejected(RejectReason::INVALID_COMM_ID, _))]),
        "{out:?}"
    );
}

/// Has `count` requests like `template` arrive at B, from 200 sources of which `first` is the first; how many reach the program.
fn flood(pair: &mut Pair, template: &Mad, first: u32, count: u32) -> u32 {
    let mut taken = 0;
    for number in 0..count {
        let Message::Req(request) = template.message.clone() else { panic!() };
        let gid = stranger(first + number % 200);
        let request =
            Req { local_gid: gid, local_id: number + 1, qpn: Qpn(0x1000 + number), ..*request };
        // So that answers are not bounded.
        pair.now += 100_000;
        pair.b.on_message(
            pair.now,
            gid,
            Mad { transaction: 1, message: Message::Req(Box::new(request)) },
            psn,
        );
        taken += Out::of(&mut pair.b).requests.len() as u32;
    }
    taken
}

/// Bytes that a hash table takes: at most 7 of 8 buckets are in use, and each has a byte of control.
fn table<K, V>(table: &HashMap<K, V>) -> usize {
    (table.capacity() * 8).div_ceil(7).next_power_of_two() * (size_of::<(K, V)>() + 1)
}

/// Bytes that a tree takes at most: its nodes are half full.
fn tree<T>(entries: usize) -> usize {
    2 * entries * size_of::<T>()
}

/// The number in docs/messages.md, and what a listener's memory is bounded by.
#[test]
fn record_of_a_half_open_connection_takes_no_more_than_is_documented() {
    const DOCUMENTED: usize = 1280;
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    flood(&mut pair, &template, 1, HALF_OPEN);
    let machine = &pair.b;
    assert_eq!(machine.half_open.total(), HALF_OPEN);
    let [connections, _, _, timers] = machine.sizes();
    let tables = table(&machine.connections)
        + table(&machine.requests)
        + table(&machine.queue_pairs)
        + table(&machine.reserved)
        + tree::<(u64, CommId)>(timers)
        // By age, by share, and how many there are of each source, of which there are 200.
        + tree::<(u64, CommId)>(connections)
        + 200 * 2 * (size_of::<(usize, u64, Gid)>() + 2 * size_of::<(Gid, [usize; 4])>());
    let owned = |connection: &Connection| {
        let last = match &connection.last {
            Some(Message::Rep(response)) => size_of_val(&**response),
            other => panic!("{other:?}"),
        };
        last + connection.params.as_ref().map_or(0, |params| params.private_data.capacity())
    };
    let records: usize = machine.connections.values().map(owned).sum();
    let each = (tables + records) / connections;
    println!(
        "{each} bytes for each half-open connection, {} of them the record",
        size_of::<Connection>()
    );
    assert!(each <= DOCUMENTED, "{each}");
    // What a request carries does not make it larger: neither can be longer than the message.
    assert!(machine.connections.values().all(|connection| owned(connection) <= 512));
}

/// On a busy machine the confirmation comes late, or is lost like the answers that are repeated meanwhile.
#[test]
fn confirmation_that_comes_late_counts_however_many_others_are_half_open() {
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    let ours = pair.connect(0x50);
    pair.deliver_to_b();
    pair.deliver_to_a();
    pair.a.establish(ours).unwrap();
    flood(&mut pair, &template, 1, HALF_OPEN - 1);
    let start = pair.now;
    while pair.b.deadline().is_some_and(|at| at < start + 10_000_000_000) {
        pair.now = pair.b.deadline().unwrap();
        pair.b.on_timer(pair.now);
        assert!(
            Out::of(&mut pair.b).sent.iter().all(|(_, mad)| matches!(mad.message, Message::Rep(_)))
        );
    }
    pair.deliver_to_b();
    assert_eq!(Out::of(&mut pair.b).requests.len(), 1);
    assert!(Out::of(&mut pair.a).events.is_empty());
}

#[test]
fn requests_that_the_program_answers_take_records_of_those_that_give_way() {
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    flood(&mut pair, &template, 1, HALF_OPEN);
    // From now on the program answers.
    pair.b.listen(LISTENER, address(2, PORT), HALF_OPEN);
    let taken = flood(&mut pair, &template, 1_000, HALF_OPEN);
    // Half of the records are left for those that the manager answers.
    assert_eq!((taken, pair.b.yielding.len()), (HALF_OPEN / 2, HALF_OPEN / 2));
    assert_eq!(pair.b.half_open.total(), HALF_OPEN);
}

#[test]
fn peer_that_is_refused_reads_why_and_is_not_remembered() {
    let (mut pair, door) = answering();
    door.rejects.lock().push(address(1, 0).ip());
    pair.connect(0x100);
    pair.deliver_to_b();
    assert_eq!(pair.b.sizes(), [0; 4]);
    pair.deliver_to_a();
    let out = Out::of(&mut pair.a);
    let Some((_, Event::Rejected(RejectReason::CONSUMER, data))) = out.events.first() else {
        panic!("{out:?}")
    };
    assert_eq!((&data[..5], data.len()), (&b"full\0"[..], 148));
    assert_eq!(pair.b.half_open.total(), 0);
}

#[test]
fn listener_that_is_gone_when_the_peer_confirms_gives_the_request_to_nobody() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    pair.b.stop_listening(LISTENER);
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    // As the manager does when it finds no owner.
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.release(pair.now, theirs);
    assert_eq!(pair.deliver_to_a().kinds(), ["DREQ"]);
    assert_eq!(Out::of(&mut pair.a).names(), ["disconnected"]);
}

/// Numbers that a test chooses.
struct Chosen(CommId);

impl Numbers for Chosen {
    fn psn(&mut self) -> Option<Psn> {
        psn()
    }

    fn id(&mut self) -> Option<CommId> {
        Some(self.0)
    }

    fn reserve(&mut self) -> Option<Qpn> {
        Some(Qpn(0x7000 + self.0))
    }
}

#[test]
fn requests_have_drawn_numbers_which_their_peers_must_know_to_confirm() {
    let (mut pair, _) = answering();
    let request = forged(&mut pair, A, 1);
    pair.b.on_message(pair.now, A, request, Chosen(0x51));
    assert_eq!(pair.b.connections.keys().collect::<Vec<_>>(), [&0x51]);
    // Numbers that are taken, or mean nothing, are not.
    for (number, drawn) in [(2, 0x51), (3, 0)] {
        let request = forged(&mut pair, A, number);
        pair.b.on_message(pair.now, A, request, Chosen(drawn));
        assert_eq!(pair.b.connections.len() as u32, number);
    }
    assert!(!pair.b.connections.contains_key(&0));
    Out::of(&mut pair.b);
    let confirm = |pair: &mut Pair, remote_id, local_id| {
        let message = Message::Rtu(crate::cm::message::Rtu { local_id, remote_id });
        pair.b.on_message(pair.now, A, Mad { transaction: 1, message }, psn);
        Out::of(&mut pair.b).requests.len()
    };
    assert_eq!((confirm(&mut pair, 0x52, 1), confirm(&mut pair, 0x51, 2)), (0, 0));
    assert_eq!(confirm(&mut pair, 0x51, 1), 1);
}
