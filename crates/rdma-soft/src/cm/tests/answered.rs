//! Tests of auto-accepted requests: memory, eviction, and notification of the program.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_provider::locks::Mutex;

use super::*;
use crate::cm::connection::Connection;
use crate::cm::limits::{MAX_HALF_OPEN, MAX_HALF_OPEN_PER_PEER};
use crate::cm::message::{About, Private, Rej, Req};
use crate::roce::partition::DEFAULT_PKEY;
use rdma_provider::cm_contract::{Admit, CmAnswer, Verdict};
use rdma_provider::types::RejectReason;

/// Accepts all requests except those from rejected addresses.
#[derive(Debug, Default)]
struct Admission {
    rejects: Mutex<Vec<IpAddr>>,
    evicted: Mutex<u32>,
}

impl Admit for Admission {
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

    fn evicted(&self) {
        *self.evicted.lock() += 1;
    }
}

fn answering() -> (Pair, Arc<Admission>) {
    let mut pair = Pair::new();
    let admission = Arc::new(Admission::default());
    assert!(pair.b.answer(LISTENER, admission.clone()));
    (pair, admission)
}

/// Returns a request from `gid` with numbers derived from `number`.
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
fn program_gets_auto_accepted_request_once_the_peer_confirms() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    assert_eq!((out.kinds(), out.requests.len()), (vec!["REP"], 0));
    let response = pair.a.connection(ours).unwrap();
    assert_eq!(&response.params.as_ref().unwrap().private_data[..8], b"welcome\0");
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
    assert_eq!((pair.b.half_open.total(), pair.b.evictable.is_empty()), (0, true));
    // The program's `accept` sends no message.
    pair.b.accept(pair.now, theirs, &params(0x200, b"late")).unwrap();
    let out = Out::of(&mut pair.b);
    assert_eq!((out.names(), out.sent.len()), (vec!["established"], 0));
    assert_eq!(pair.b.listeners[&LISTENER].waiting, 0);
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
fn early_packet_confirms_and_gets_rnr_nak() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    let (number, first) = {
        let response = pair.a.connection(ours).unwrap();
        (response.remote_qpn.unwrap(), response.sq_psn)
    };
    let early =
        |pair: &mut Pair, from, number, psn| pair.b.on_early(from, number, psn, DEFAULT_PKEY);
    assert_eq!(early(&mut pair, stranger(1), number, first), None, "from another peer");
    assert_eq!(early(&mut pair, A, number, first.add(1)), None, "not the first packet");
    assert_eq!(early(&mut pair, A, Qpn(7), first), None, "number not reserved");
    assert_eq!(pair.b.on_early(A, number, first, 0x8001), None, "another partition");
    assert_eq!(Out::of(&mut pair.b).requests.len(), 0);
    // The packet overtakes the RTU.
    assert_eq!(early(&mut pair, A, number, first), Some(Qpn(0x100)));
    assert_eq!(Out::of(&mut pair.b).requests.len(), 1);
    assert_eq!(early(&mut pair, A, number, first), Some(Qpn(0x100)), "every retransmission");
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    assert_eq!(Out::of(&mut pair.b).requests.len(), 0, "the program is notified once");
}

// Shows S4.
#[test]
fn oldest_of_the_peer_with_most_is_evicted_and_others_stay() {
    let (mut pair, admission) = answering();
    let honest = pair.connect(0x50);
    pair.deliver_to_b();
    let template = forged(&mut pair, stranger(0), 1);
    // First from one source, then from 200, far more than the limit.
    for number in 0..3 * MAX_HALF_OPEN {
        let gid = stranger(if number < MAX_HALF_OPEN { 0 } else { 1 + number % 200 });
        let Message::Req(request) = template.message.clone() else { panic!() };
        let request =
            Req { local_gid: gid, local_id: number + 1, qpn: Qpn(0x1000 + number), ..*request };
        let mad = Mad { transaction: 1, message: Message::Req(Box::new(request)) };
        // Advances time so that the answer limit does not apply.
        pair.now += 1_000_000;
        pair.b.on_message(pair.now, gid, mad, psn);
        for (to, mad) in Out::of(&mut pair.b).sent {
            if to == A {
                pair.a.on_message(pair.now, B, mad, psn);
            }
        }
        assert!(pair.b.half_open.total() <= MAX_HALF_OPEN);
        if number + 1 == MAX_HALF_OPEN {
            assert_eq!(
                pair.b.half_open.total(),
                MAX_HALF_OPEN_PER_PEER + 1,
                "half-open connections of one source"
            );
        }
    }
    assert_eq!(pair.b.half_open.total(), MAX_HALF_OPEN);
    assert_eq!(pair.b.connections.len() as u32, MAX_HALF_OPEN, "no other state");
    assert_eq!(pair.b.reserved.len() as u32, MAX_HALF_OPEN);
    assert_eq!(*admission.evicted.lock(), 3 * MAX_HALF_OPEN + 1 - MAX_HALF_OPEN);
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
        (pair.b.half_open.total(), pair.b.reserved.len(), pair.b.evictable.is_empty()),
        (0, 0, true)
    );
}

#[test]
fn evicted_peer_gets_rej_when_it_confirms() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    assert!(pair.b.evict_for(stranger(1), true));
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    assert_eq!(pair.deliver_to_a().kinds(), ["REJ"]);
    let out = Out::of(&mut pair.a);
    assert!(
        matches!(out.events[..], [(_, Event::Rejected(RejectReason::INVALID_COMM_ID, _))]),
        "{out:?}"
    );
}

#[test]
fn rejection_of_a_request_that_was_answered_ends_no_connection() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    pair.a.establish(ours).unwrap();
    Out::of(&mut pair.a);
    let remote = pair.a.connection(ours).unwrap().remote_id;
    // Another process at the address has got a late duplicate of the REQ, and has the same ids.
    let rej = Rej {
        local_id: remote,
        remote_id: ours,
        about: About::Req,
        reason: RejectReason::CONSUMER,
        private_data: Private::empty(),
    };
    let mad = Mad { transaction: 1, message: Message::Rej(Box::new(rej)) };
    pair.a.on_message(pair.now, B, mad, psn);
    assert_eq!(state(&pair.a, ours), Some(State::Established));
    assert!(Out::of(&mut pair.a).events.is_empty());
}

/// Delivers `count` requests like `template` to B, from 200 sources starting with `first`. Returns
/// how many reach the program.
fn flood(pair: &mut Pair, template: &Mad, first: u32, count: u32) -> u32 {
    let mut taken = 0;
    for number in 0..count {
        let Message::Req(request) = template.message.clone() else { panic!() };
        let gid = stranger(first + number % 200);
        let request =
            Req { local_gid: gid, local_id: number + 1, qpn: Qpn(0x1000 + number), ..*request };
        // Advances time so that the answer limit does not apply.
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

/// Returns the maximum bytes of a table, which is a tree.
fn table<K, V>(table: &BTreeMap<K, V>) -> usize {
    tree::<(K, V)>(table.len())
}

/// Returns the maximum bytes of a tree, whose nodes are at least half full.
fn tree<T>(entries: usize) -> usize {
    2 * entries * size_of::<T>()
}

/// Checks the number in docs/messages.md, which bounds a listener's memory.
#[test]
fn half_open_record_fits_documented_size() {
    const DOCUMENTED: usize = 1280;
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    flood(&mut pair, &template, 1, MAX_HALF_OPEN);
    let machine = &pair.b;
    assert_eq!(machine.half_open.total(), MAX_HALF_OPEN);
    let [connections, _, _, timers] = machine.sizes();
    let tables = table(&machine.connections)
        + table(&machine.requests)
        + table(&machine.queue_pairs)
        + table(&machine.reserved)
        + tree::<(u64, CommId)>(timers)
        // By age, by rank, and the number of connections of each of the 200 sources.
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
    // A request's contents are bounded by the length of its message.
    assert!(machine.connections.values().all(|connection| owned(connection) <= 512));
}

/// Confirms late, as on a busy machine. Retransmitted REPs are lost meanwhile.
#[test]
fn late_confirmation_counts_while_many_are_half_open() {
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    let ours = pair.connect(0x50);
    pair.deliver_to_b();
    pair.deliver_to_a();
    pair.a.establish(ours).unwrap();
    flood(&mut pair, &template, 1, MAX_HALF_OPEN - 1);
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
fn program_answered_requests_evict_auto_accepted_ones() {
    let (mut pair, _) = answering();
    let template = forged(&mut pair, stranger(0), 1);
    flood(&mut pair, &template, 1, MAX_HALF_OPEN);
    pair.b.listen(LISTENER, address(2, PORT), MAX_HALF_OPEN);
    let taken = flood(&mut pair, &template, 1_000, MAX_HALF_OPEN);
    assert_eq!((taken, pair.b.evictable.len()), (MAX_HALF_OPEN / 2, MAX_HALF_OPEN / 2));
    assert_eq!(pair.b.half_open.total(), MAX_HALF_OPEN);
}

#[test]
fn rejected_peer_gets_reason_and_leaves_no_record() {
    let (mut pair, admission) = answering();
    admission.rejects.lock().push(address(1, 0).ip());
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
fn confirmed_request_of_closed_listener_is_disconnected() {
    let (mut pair, _) = answering();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    pair.deliver_to_a();
    pair.b.stop_listening(LISTENER);
    pair.a.establish(ours).unwrap();
    pair.deliver_to_b();
    // Released as the manager does when it finds no owner.
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.release(pair.now, theirs);
    assert_eq!(pair.deliver_to_a().kinds(), ["DREQ"]);
    assert_eq!(Out::of(&mut pair.a).names(), ["disconnected"]);
}

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
fn confirmation_requires_the_random_connection_id() {
    let (mut pair, _) = answering();
    let request = forged(&mut pair, A, 1);
    pair.b.on_message(pair.now, A, request, Chosen(0x51));
    assert_eq!(pair.b.connections.keys().collect::<Vec<_>>(), [&0x51]);
    // An id in use, or 0, is replaced.
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

/// A source that is out of numbers for queue pairs, and perhaps of all others.
struct Exhausted {
    has_psn: bool,
}

impl Numbers for Exhausted {
    fn psn(&mut self) -> Option<Psn> {
        psn().filter(|_| self.has_psn)
    }

    fn id(&mut self) -> Option<CommId> {
        None
    }

    fn reserve(&mut self) -> Option<Qpn> {
        None
    }
}

#[test]
fn request_without_free_numbers_leaves_no_record_and_its_repetition_is_answered() {
    for has_psn in [false, true] {
        let (mut pair, _) = answering();
        pair.connect(0x100);
        let request = Out::of(&mut pair.a).sent.remove(0).1;
        // A record that each of them left would be missing for later requests.
        for _ in 0..2 * MAX_HALF_OPEN_PER_PEER {
            pair.b.on_message(pair.now, A, request.clone(), Exhausted { has_psn });
        }
        let out = Out::of(&mut pair.b);
        assert!(out.sent.is_empty() && out.requests.is_empty(), "{out:?}");
        assert_eq!((pair.b.sizes(), pair.b.half_open.total()), ([0; 4], 0));
        pair.b.on_message(pair.now, A, request, psn);
        assert_eq!(pair.deliver_to_a().kinds(), ["REP"]);
    }
}
