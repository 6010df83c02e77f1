//! Tests of the CM state machine under virtual time, and of managers on a simulated network.

mod answered;
mod bytes;
mod campaign;
mod devices;
mod sidr;
mod table;
mod times;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rdma_provider::cm_contract::CmParams;
use rdma_provider::types::{Gid, Mtu, Psn, Qpn};

use super::connection::State;
use super::machine::{Destination, Event, Machine, Numbers, Output};
use super::message::{CommId, Mad, Message};

const A: Gid = Gid([0xa; 16]);
const B: Gid = Gid([0xb; 16]);
const LISTENER: u64 = 77;
const PORT: u16 = 7471;
/// The program's timeout for a request.
const PATIENCE: Duration = Duration::from_secs(15);

fn address(host: u8, port: u16) -> SocketAddr {
    SocketAddr::new([10, 0, 0, host].into(), port)
}

fn params(qpn: u32, data: &[u8]) -> CmParams<'_> {
    CmParams {
        qpn: Qpn(qpn),
        private_data: data,
        responder_resources: 4,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry: 7,
        timeout: PATIENCE,
        srq: false,
    }
}

/// A closure as the source of sequence numbers; queue pair numbers count up.
impl<F: FnMut() -> Option<Psn>> Numbers for F {
    fn psn(&mut self) -> Option<Psn> {
        self()
    }

    fn id(&mut self) -> Option<CommId> {
        None
    }

    fn reserve(&mut self) -> Option<Qpn> {
        static LAST: AtomicU32 = AtomicU32::new(0x1000);
        Some(Qpn(LAST.fetch_add(1, Ordering::Relaxed)))
    }
}

fn psn() -> Option<Psn> {
    Some(Psn::new(0x00be_ef00))
}

#[derive(Debug, Default)]
struct Out {
    sent: Vec<(Gid, Mad)>,
    events: Vec<(CommId, Event)>,
    requests: Vec<CommId>,
    released: Vec<Qpn>,
}

impl Out {
    fn of(machine: &mut Machine) -> Self {
        let mut out = Self::default();
        while let Some(output) = machine.next_output() {
            match output {
                Output::Send { to, mad } => {
                    assert_eq!(Mad::decode(&mad.encode()).as_ref(), Ok(&mad));
                    out.sent.push((to, mad));
                }
                Output::Release(number) => out.released.push(number),
                Output::Event { connection, event } => out.events.push((connection, event)),
                Output::Request { listener, connection, .. } => {
                    assert_eq!(listener, LISTENER);
                    out.requests.push(connection);
                }
            }
        }
        out
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.sent.iter().map(|(_, mad)| kind(&mad.message)).collect()
    }

    fn names(&self) -> Vec<&'static str> {
        self.events.iter().map(|(_, event)| name(event)).collect()
    }
}

fn kind(message: &Message) -> &'static str {
    match message {
        Message::Req(_) => "REQ",
        Message::Mra(_) => "MRA",
        Message::Rej(_) => "REJ",
        Message::Rep(_) => "REP",
        Message::Rtu(_) => "RTU",
        Message::Dreq(_) => "DREQ",
        Message::Drep(_) => "DREP",
        Message::SidrReq(_) => "SIDR_REQ",
        Message::SidrRep(_) => "SIDR_REP",
    }
}

fn name(event: &Event) -> &'static str {
    match event {
        Event::Response(_) => "response",
        Event::Established => "established",
        Event::Rejected(..) => "rejected",
        Event::Unreachable => "unreachable",
        Event::PortClosed => "port closed",
        Event::Disconnected => "disconnected",
        Event::TimewaitExit => "timewait exit",
        Event::ServiceFound { .. } => "service found",
    }
}

struct Pair {
    now: u64,
    a: Machine,
    b: Machine,
}

impl Pair {
    /// Creates the pair; `b` listens.
    fn new() -> Self {
        let a = Machine::new(A, 1, Mtu::Mtu4096, 0x1111_2222_3333_4444);
        let mut b = Machine::new(B, 2, Mtu::Mtu4096, 0x5555_6666_7777_8888);
        b.listen(LISTENER, address(2, PORT), 8);
        Self { now: 1_000, a, b }
    }

    fn connect(&mut self, qpn: u32) -> CommId {
        self.connect_within(qpn, PATIENCE)
    }

    fn connect_within(&mut self, qpn: u32, timeout: Duration) -> CommId {
        let to = Destination {
            gid: B,
            local: address(1, 40_000),
            peer: address(2, PORT),
            mtu: Mtu::Mtu4096,
            pkey: 0xffff,
        };
        let params = CmParams { timeout, ..params(qpn, b"request") };
        self.a.connect(self.now, to, &params, Psn::new(0x00aa_aa00)).unwrap()
    }

    fn deliver_to_b(&mut self) -> Out {
        let out = Out::of(&mut self.a);
        for (to, mad) in &out.sent {
            assert_eq!(*to, B);
            self.b.on_message(self.now, A, mad.clone(), psn);
        }
        out
    }

    fn deliver_to_a(&mut self) -> Out {
        let out = Out::of(&mut self.b);
        for (to, mad) in &out.sent {
            assert_eq!(*to, A);
            self.a.on_message(self.now, B, mad.clone(), psn);
        }
        out
    }

    /// Moves the clock to the earliest deadline. False if there is none.
    fn next_deadline(&mut self) -> bool {
        let Some(at) = [self.a.deadline(), self.b.deadline()].into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(at);
        self.a.on_timer(self.now);
        self.b.on_timer(self.now);
        true
    }

    fn established(&mut self, qpn: u32) -> (CommId, CommId) {
        let ours = self.connect(qpn);
        self.deliver_to_b();
        let theirs = self.deliver_to_a().requests[0];
        self.b.accept(self.now, theirs, &params(qpn + 1, b"response")).unwrap();
        self.deliver_to_a();
        self.a.establish(ours).unwrap();
        assert_eq!(self.deliver_to_b().names(), ["response"]);
        assert_eq!(Out::of(&mut self.b).names(), ["established"]);
        (ours, theirs)
    }
}

fn state(machine: &Machine, id: CommId) -> Option<State> {
    machine.connection(id).map(|connection| connection.state)
}

#[test]
fn handshake_and_disconnect_give_both_ends_matching_attributes() {
    let mut pair = Pair::new();
    let (ours, theirs) = pair.established(0x100);
    let (a, b) = (pair.a.connection(ours).unwrap(), pair.b.connection(theirs).unwrap());
    assert_eq!((a.remote_id, b.remote_id), (theirs, ours));
    assert_eq!((a.remote_qpn, b.remote_qpn), (Some(Qpn(0x101)), Some(Qpn(0x100))));
    assert_eq!((a.sq_psn, b.sq_psn), (b.rq_psn, a.rq_psn));
    assert_eq!(
        (a.initiator_depth, a.responder_resources),
        (b.responder_resources, b.initiator_depth)
    );
    assert_eq!(&a.params.as_ref().unwrap().private_data[..8], b"response");
    assert_eq!(a.params.as_ref().unwrap().private_data.len(), 196);
    assert_eq!(&b.params.as_ref().unwrap().private_data[..7], b"request");
    assert_eq!(b.params.as_ref().unwrap().private_data.len(), 56);
    assert_eq!(b.addresses, (address(2, PORT), address(1, 40_000)));

    pair.a.disconnect(pair.now, ours).unwrap();
    pair.deliver_to_b();
    assert_eq!(pair.deliver_to_a().names(), ["disconnected"]);
    assert_eq!(Out::of(&mut pair.a).names(), ["disconnected"]);
    while pair.next_deadline() {}
    assert_eq!(Out::of(&mut pair.a).names(), ["timewait exit"]);
    assert_eq!(Out::of(&mut pair.b).names(), ["timewait exit"]);
    assert_eq!((pair.a.sizes(), pair.b.sizes()), ([0; 4], [0; 4]));
}

#[test]
fn report_of_a_closed_port_ends_only_the_request_that_it_quotes() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    let transaction = Out::of(&mut pair.a).sent[0].1.transaction;
    for (from, transaction, id) in
        [(A, transaction, ours), (B, transaction + 1, ours), (B, transaction, ours + 1)]
    {
        pair.a.on_refusal(from, transaction, id);
        assert_eq!(state(&pair.a, ours), Some(State::ReqSent));
    }
    pair.a.on_refusal(B, transaction, ours);
    let out = Out::of(&mut pair.a);
    assert_eq!((out.names(), out.kinds()), (vec!["port closed"], vec![]));
    assert_eq!(pair.a.sizes(), [0; 4]);

    let (ours, _) = pair.established(0x100);
    let transaction = pair.a.connection(ours).unwrap().transaction;
    pair.a.on_refusal(B, transaction, ours);
    assert_eq!(state(&pair.a, ours), Some(State::Established));
}

#[test]
fn answers_repeat_the_transaction_id() {
    let mut pair = Pair::new();
    pair.connect(0x100);
    let request = pair.deliver_to_b().sent[0].1.transaction;
    let theirs = pair.deliver_to_a().requests[0];
    pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
    assert_eq!(pair.deliver_to_a().sent[0].1.transaction, request);
}

#[test]
fn every_state_has_a_row_in_the_table() {
    assert!(State::ALL.iter().all(|state| table::ROWS.iter().any(|row| row.state == *state)));
}
