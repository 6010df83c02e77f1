//! Tests of the requester state machine, packet by packet.

use super::machines::{Log, PD, PSN, memory};
use super::*;
use rdma_provider::types::WcStatus;

use super::super::memory::dma::{Gather, Payload};
use super::super::memory::keys::Keys;
use super::super::roce::packet::{Aeth, Body, Nak, Packet, Part, Reth, Syndrome};
use super::super::roce::requester::{Flow, Requester, SendConfig, WindowRequest};

struct Requesting {
    machine: Requester,
    keys: Keys,
    base: u64,
    key: u32,
    log: Log,
    now: u64,
    deadline: Option<u64>,
}

impl Requesting {
    fn new() -> Self {
        Self::with(3, 2)
    }

    fn with(retry_count: u8, max_rd_atomic: u8) -> Self {
        let (keys, base, key) = memory();
        let mut machine = Requester::new(SendConfig {
            transport: Transport::Rc,
            qpn: Qpn(3),
            pd: PD,
            dest: Qpn(2),
            mtu: Mtu::Mtu256,
            timeout: AckTimeout::from_code(1),
            retry_count,
            rnr_retry: 1,
            max_rd_atomic,
            qkey: Qkey(0),
            pkey: DEFAULT_PKEY,
            flow: Flow::MEMORY,
        });
        let mut log = Log::default();
        machine.start(PSN);
        machine.set_state(QpState::Rts, &mut log);
        Self { machine, keys, base, key, log, now: 0, deadline: None }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, len: u32, flags: SendFlags) {
        let sges = [Sge { addr: self.base, length: len, lkey: Lkey(self.key) }];
        let flags = flags | SendFlags::SIGNALED;
        let wr = SendWr { wr_id: WrId(wr_id), op, flags, data: Data::Sges(&sges), target: None };
        self.machine.post(&wr, len, &mut self.log);
    }

    fn packets(&mut self) -> Vec<(i32, Body)> {
        let mut gather = Gather::new();
        let mut all = Vec::new();
        while let Some(outgoing) = self.machine.next_packet(&self.keys, &mut gather, &mut self.log)
        {
            gather.clear();
            all.push((outgoing.packet.psn.distance_from(PSN), outgoing.packet.body));
        }
        self.deadline = self.machine.settle(|| self.now);
        all
    }

    fn steps(&mut self) -> Vec<i32> {
        self.packets().into_iter().map(|(step, _)| step).collect()
    }

    fn respond(&mut self, step: u32, body: Body, payload: &[u8]) {
        self.respond_in(DEFAULT_PKEY, step, body, payload);
    }

    fn respond_in(&mut self, pkey: u16, step: u32, body: Body, payload: &[u8]) {
        let packet = Packet {
            transport: Transport::Rc,
            pkey,
            dest: Qpn(3),
            psn: PSN.add(step),
            solicited: false,
            ack_request: false,
            body,
        };
        self.machine.on_response(&packet, &Payload::Bytes(payload), &self.keys, &mut self.log);
    }

    fn ack(&mut self, step: u32, syndrome: Syndrome) {
        self.respond(step, Body::Acknowledge(Aeth { syndrome, msn: 0 }), &[]);
    }

    fn data(&mut self, step: u32, part: Part, len: usize) {
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
        self.respond(step, Body::ReadResponse { part, aeth }, &vec![7; len]);
    }

    fn expire(&mut self) {
        self.now = self.deadline.expect("a deadline is set");
        self.machine.on_timer(self.now, &mut self.log);
    }
}

const NONE: SendFlags = SendFlags::empty();
const FAR: RemoteAddr = RemoteAddr { addr: 0x1000, rkey: Rkey(5) };

#[test]
fn response_of_another_partition_is_dropped() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0]);
    let ack = Body::Acknowledge(Aeth { syndrome: Syndrome::ACK, msn: 0 });
    it.respond_in(0x8001, 0, ack, &[]);
    assert_eq!((it.machine.counters.responses, it.log.bad_pkeys), (0, 1));
    assert_eq!(it.log.completions, []);
    it.respond_in(0x7fff, 0, ack, &[]);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
}

#[test]
fn acknowledgement_covers_all_before_it() {
    let mut it = Requesting::new();
    for wr_id in 0..3 {
        it.post(wr_id, SendOp::Send, 300, NONE);
    }
    assert_eq!(it.steps(), [0, 1, 2, 3, 4, 5]);
    it.ack(3, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)]);
    // An old acknowledgement and one for an unsent packet have no effect.
    it.ack(1, Syndrome::ACK);
    it.ack(6, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 2);
    it.ack(5, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 3);
    assert!(it.steps().is_empty());
    assert_eq!(it.deadline, None);
}

#[test]
fn sequence_nak_retransmits_only_missing_packets() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 300, NONE);
    it.post(1, SendOp::Write(FAR), 600, NONE);
    assert_eq!(it.steps().len(), 5);
    it.ack(3, Syndrome::Nak(Nak::Sequence));
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
    it.ack(3, Syndrome::Nak(Nak::Sequence));
    assert_eq!(it.machine.counters.sequence_naks, 1);
    let again = it.packets();
    assert_eq!(again.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 4]);
    assert!(matches!(again[0].1, Body::Write { part: Part::Middle, .. }));
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 2);
}

#[test]
fn partial_acknowledgement_causes_no_retransmission() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8192, NONE);
    it.post(1, SendOp::Send, 8192, NONE);
    it.post(2, SendOp::Send, 8192, NONE);
    assert_eq!(it.steps().len(), 64);
    it.ack(40, Syndrome::ACK);
    assert_eq!(it.steps(), (64..96).collect::<Vec<_>>());
    assert_eq!(it.machine.counters.retransmitted, 0);
}

#[test]
fn unanswered_packets_are_retried_up_to_the_limit() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0, 1]);
    for _ in 0..3 {
        it.expire();
        assert_eq!(it.steps(), [0, 1]);
    }
    it.ack(0, Syndrome::ACK);
    for _ in 0..4 {
        it.steps();
        it.expire();
    }
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::RETRY_EXC_ERR)]);
    assert_eq!((it.machine.state(), it.machine.settle(|| 0)), (QpState::Err, None));
}

#[test]
fn deadline_counts_from_the_last_progress() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    it.steps();
    let first = it.deadline.unwrap();
    it.now = 5000;
    it.ack(0, Syndrome::ACK);
    it.steps();
    assert_eq!(it.deadline, Some(first + 5000));
    it.machine.on_timer(first, &mut it.log);
    assert_eq!(it.machine.counters.timeouts, 0);
}

#[test]
fn receiver_not_ready_waits_for_exactly_its_timer() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    it.steps();
    assert_eq!(it.machine.in_flight(), 2);
    it.ack(0, Syndrome::RnrNak(3));
    assert!(it.steps().is_empty());
    assert_eq!(it.machine.in_flight(), 0, "the peer has dropped the packets");
    assert_eq!(it.deadline, Some(RnrTimer::from_code(3).nanoseconds()));
    it.expire();
    assert_eq!(it.steps(), [0, 1]);
    assert_eq!(it.machine.in_flight(), 2);
    it.ack(0, Syndrome::RnrNak(3));
    assert_eq!(it.log.completions, [(0, WcStatus::RNR_RETRY_EXC_ERR), (1, WcStatus::WR_FLUSH_ERR)]);
}

#[test]
fn reads_and_atomics_stall_at_their_limit_and_fences_wait_for_them() {
    let mut it = Requesting::new();
    let add = SendOp::FetchAdd { remote: FAR, add: 1 };
    it.post(0, SendOp::Read(FAR), 300, NONE);
    it.post(1, add, 8, NONE);
    it.post(2, add, 8, NONE);
    it.post(3, SendOp::Send, 8, SendFlags::FENCE);
    // The READ takes two numbers. The third request exceeds the limit and blocks later ones.
    assert_eq!(it.steps(), [0, 2]);
    it.data(0, Part::First, 256);
    it.data(1, Part::Last, 44);
    assert_eq!(it.steps(), [3]);
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
    it.respond(2, Body::AtomicAcknowledge { aeth, original: 1 }, &[]);
    assert!(it.steps().is_empty());
    it.respond(3, Body::AtomicAcknowledge { aeth, original: 2 }, &[]);
    assert_eq!(it.steps(), [4]);
    assert_eq!(it.log.completions.len(), 3);
}

#[test]
fn read_waits_until_its_responses_fit_the_window() {
    let mut it = Requesting::with(3, 8);
    it.machine.config.flow = Flow::with_window(8);
    it.post(0, SendOp::Read(FAR), 4 * 256, NONE);
    it.post(1, SendOp::Read(FAR), 5 * 256, NONE);
    it.post(2, SendOp::Write(FAR), 256, NONE);
    assert_eq!(it.steps(), [0], "nine packets would be in flight");
    it.data(0, Part::First, 256);
    assert_eq!(it.steps(), [4]);
    it.data(1, Part::Middle, 256);
    assert_eq!(it.steps(), [9]);
    // The window is now smaller than a READ request, which must wait until nothing is in flight.
    it.machine.config.flow = Flow::with_window(1);
    it.post(3, SendOp::Read(FAR), 8 * 256, NONE);
    it.data(2, Part::Middle, 256);
    it.data(3, Part::Last, 256);
    it.data(4, Part::First, 256);
    (5..8).for_each(|step| it.data(step, Part::Middle, 256));
    it.data(8, Part::Last, 256);
    assert!(it.steps().is_empty());
    it.ack(9, Syndrome::ACK);
    assert_eq!(it.steps(), [10]);
    assert_eq!(it.machine.in_flight(), 8);
}

#[test]
fn retries_are_not_consumed_while_waiting_for_the_window() {
    let mut it = Requesting::with(1, 8);
    it.machine.config.flow = Flow::with_window(8);
    assert_eq!(it.machine.window_request(), None, "nothing to send");
    it.post(0, SendOp::Write(FAR), 600, NONE);
    it.post(1, SendOp::Read(FAR), 20 * 256, NONE);
    let asks = |min, quantum| Some(WindowRequest { min, quantum });
    assert_eq!(it.machine.window_request(), asks(1, 3));
    assert_eq!(it.steps(), [0, 1, 2]);
    assert_eq!(it.machine.window_request(), None, "all is in flight");
    it.expire();
    assert!(it.machine.has_timed_out());
    assert_eq!(it.machine.window_request(), asks(1, 1), "all packets, one at a time");
    it.machine.set_awaiting_window(true);
    assert_eq!(it.machine.settle(|| 0), None, "the timer is stopped");
    it.machine.set_awaiting_window(false);
    assert_eq!(it.steps(), [0, 1, 2]);
    it.ack(2, Syndrome::ACK);
    assert!(!it.machine.has_timed_out() && it.machine.all_acknowledged());
    // The window for one request of the READ.
    assert_eq!(it.machine.window_request(), asks(16, 16));
    assert_eq!(it.steps(), [3]);
    it.data(3, Part::First, 256);
    it.expire();
    assert_eq!(it.machine.window_request(), asks(15, 15));
}

#[test]
fn unanswered_read_requests_a_single_packet() {
    let mut it = Requesting::with(2, 8);
    it.machine.config.flow = Flow::with_window(8);
    it.post(0, SendOp::Read(FAR), 20 * 256, NONE);
    let all = Some(WindowRequest { min: 16, quantum: 16 });
    for _ in 0..2 {
        assert_eq!((it.machine.window_request(), it.machine.in_flight()), (all, 0));
        assert_eq!(it.steps(), [0]);
        assert_eq!(it.machine.in_flight(), 16);
        it.expire();
    }
    assert_eq!(it.machine.window_request(), Some(WindowRequest { min: 1, quantum: 1 }));
    assert_eq!(it.steps(), [0]);
    assert_eq!(it.machine.in_flight(), 1);
    it.data(0, Part::First, 256);
    assert_eq!(it.machine.in_flight(), 15);
}

#[test]
fn timed_out_packets_are_not_in_flight_and_local_work_needs_no_window() {
    let mut it = Requesting::with(1, 8);
    it.machine.config.flow = Flow::with_window(8);
    it.post(0, SendOp::Write(FAR), 8 * 256, NONE);
    assert_eq!(it.steps(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(it.machine.in_flight(), 8);
    it.expire();
    assert_eq!(it.machine.in_flight(), 0);
    it.machine.config.flow = Flow::with_window(1);
    assert_eq!((it.steps().len(), it.machine.in_flight()), (1, 1));
    it.ack(7, Syndrome::ACK);
    assert_eq!((it.machine.in_flight(), it.log.completions.len()), (0, 1));
    it.post(1, SendOp::LocalInvalidate(Rkey(0)), 0, NONE);
    assert_eq!(it.machine.window_request(), None);
    it.post(2, SendOp::Read(FAR), 3 * 256, NONE);
    assert_eq!(it.machine.window_request(), Some(WindowRequest { min: 3, quantum: 3 }));
}

#[test]
fn each_request_of_a_long_read_counts_towards_the_limit() {
    // Each request covers 16 packets.
    for limit in [1, 2] {
        let mut it = Requesting::with(3, limit);
        it.machine.config.flow = Flow::with_window(64);
        it.post(0, SendOp::Read(FAR), 20 * 256, NONE);
        it.post(1, SendOp::FetchAdd { remote: FAR, add: 1 }, 8, NONE);
        it.post(2, SendOp::Read(FAR), 256, NONE);
        assert_eq!(it.steps(), [0, 16][..usize::from(limit)]);
        it.data(0, Part::First, 256);
        (1..15).for_each(|step| it.data(step, Part::Middle, 256));
        assert!(it.steps().is_empty(), "the first request is unanswered");
        it.data(15, Part::Last, 256);
        // The second request of the READ, or the atomic.
        assert_eq!(it.steps(), [[16], [20]][usize::from(limit) - 1]);
        it.data(16, Part::First, 256);
        (17..19).for_each(|step| it.data(step, Part::Middle, 256));
        assert!(it.steps().is_empty(), "as many requests as allowed are unanswered");
        it.data(19, Part::Last, 256);
        assert_eq!(it.steps(), [[20], [21]][usize::from(limit) - 1]);
        assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
    }
}

#[test]
fn acknowledgement_during_retransmission_skips_covered_packets() {
    let mut it = Requesting::with(1, 8);
    it.post(0, SendOp::Write(FAR), 8 * 256, NONE);
    assert_eq!(it.steps().len(), 8);
    it.expire();
    assert_eq!(it.steps(), [0, 1, 2, 3], "of a window of 64, four probe the path");
    it.ack(5, Syndrome::ACK);
    assert_eq!(it.steps(), [6, 7]);
    it.ack(7, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
}

#[test]
fn read_response_completes_sends_before_it_and_no_read() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 600, NONE);
    it.post(1, SendOp::Read(FAR), 8, NONE);
    it.post(2, SendOp::Read(FAR), 8, NONE);
    let all = [0, 1, 2, 3, 4];
    assert_eq!(it.steps(), all);
    it.data(1, Part::Only, 8);
    assert!(it.log.completions.is_empty(), "a response to a packet of the SEND");
    it.steps();
    it.data(4, Part::Only, 8);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)], "the first READ has no response");
    assert_eq!(it.steps(), all[3..]);
    it.data(3, Part::Only, 8);
    it.data(4, Part::Only, 8);
    it.post(3, SendOp::Send, 8, NONE);
    it.post(4, SendOp::Read(FAR), 8, NONE);
    assert_eq!(it.steps(), [5, 6]);
    it.data(6, Part::Only, 8);
    assert_eq!(it.log.completions, [0, 1, 2, 3, 4].map(|wr_id| (wr_id, WcStatus::SUCCESS)));
}

#[test]
fn lost_read_response_is_requested_again_from_the_gap() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Read(FAR), 1000, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0, 4]);
    it.data(0, Part::First, 256);
    // Response 1 is lost; the following ones and the acknowledgement cause one retry.
    it.data(2, Part::Middle, 256);
    it.data(3, Part::Last, 232);
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.machine.counters.sequence_naks, 1);
    let again = it.packets();
    let rest = Reth { remote: RemoteAddr { addr: FAR.addr + 256, ..FAR }, length: 744 };
    assert_eq!(again[0], (1, Body::ReadRequest(rest)));
    assert_eq!(again[1].0, 4);
    it.data(1, Part::First, 256);
    it.data(2, Part::Middle, 256);
    it.data(3, Part::Last, 232);
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)]);
}

#[test]
fn invalid_responses_fail_with_bad_response() {
    let cases: [fn(&mut Requesting); 4] = [
        |it| it.data(0, Part::First, 255),
        |it| it.data(0, Part::Only, 256),
        |it| it.ack(0, Syndrome::Nak(Nak::Other(17))),
        |it| {
            let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
            it.respond(0, Body::AtomicAcknowledge { aeth, original: 1 }, &[]);
        },
    ];
    for case in cases {
        let mut it = Requesting::new();
        it.post(0, SendOp::Read(FAR), 1000, NONE);
        it.steps();
        case(&mut it);
        assert_eq!(it.log.completions, [(0, WcStatus::BAD_RESP_ERR)]);
    }
}

#[test]
fn local_memory_error_completes_after_earlier_work() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.key ^= 8;
    it.post(1, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0]);
    assert_eq!(it.log.completions, []);
    it.ack(0, Syndrome::ACK);
    assert!(it.steps().is_empty());
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::LOC_PROT_ERR)]);
}

#[test]
fn overlong_message_fails_without_sending() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Write(FAR), (1 << 30) + 1, NONE);
    assert!(it.steps().is_empty());
    assert_eq!(it.log.completions, [(0, WcStatus::LOC_LEN_ERR)]);
}

/// Checks the range from the oldest unacknowledged to the newest sent packet, across a wrap.
#[test]
fn responses_outside_the_in_flight_range_are_ignored() {
    const HALF: u32 = 1 << 23;
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 256, NONE);
    it.post(1, SendOp::Read(FAR), 512, NONE);
    it.post(2, SendOp::Send, 256, NONE);
    assert_eq!(it.steps(), [0, 1, 3]);
    it.ack(0, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
    let mut stale = it.machine.counters.stale;
    for step in [0, 2 * HALF - 1, 2 * HALF - 100, HALF + 1, HALF, 4, 5, 1_000, HALF - 1] {
        let acknowledgements = [
            Syndrome::ACK,
            Syndrome::Nak(Nak::Sequence),
            Syndrome::Nak(Nak::RemoteAccess),
            Syndrome::Nak(Nak::RemoteOperation),
            Syndrome::RnrNak(1),
        ];
        for syndrome in acknowledgements {
            it.ack(step, syndrome);
        }
        it.data(step, Part::Only, 256);
        it.data(step, Part::First, 256);
        it.respond(step, Body::AtomicAcknowledge { aeth, original: 7 }, &[]);
        stale += 8;
        assert_eq!(it.machine.counters.stale, stale, "{step}");
        assert_eq!(it.log.completions.len(), 1, "{step}");
        assert!(it.steps().is_empty() && it.machine.state() == QpState::Rts, "{step}");
    }
    it.data(1, Part::First, 256);
    it.data(2, Part::Last, 256);
    it.ack(3, Syndrome::ACK);
    assert_eq!(it.log.completions[1..], [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
}

#[test]
fn notification_halves_the_window_once_and_acknowledgements_widen_it() {
    let mut it = Requesting::new();
    let acknowledge = |msn| Body::Acknowledge(Aeth { syndrome: Syndrome::ACK, msn });
    let notify = |it: &mut Requesting| it.respond(0, Body::Congestion, &[]);
    // 32 packets each.
    for wr_id in 0..7 {
        it.post(wr_id, SendOp::Write(RemoteAddr::default()), 8192, SendFlags::empty());
    }
    assert_eq!(it.steps().len(), 64, "the window without congestion");
    notify(&mut it);
    // Of the same congestion.
    notify(&mut it);
    assert!(it.steps().is_empty());
    it.respond(31, acknowledge(1), &[]);
    assert_eq!((it.steps().len(), it.machine.in_flight()), (1, 33), "wider by one for 32");
    it.respond(63, acknowledge(2), &[]);
    assert_eq!((it.steps().len(), it.machine.in_flight()), (32, 33));
    // All packets of the first notification are acknowledged, so this is news.
    notify(&mut it);
    it.respond(95, acknowledge(3), &[]);
    assert_eq!((it.steps().len(), it.machine.in_flight()), (16, 17), "16, and one for 16");
    assert_eq!(it.machine.counters.congestion_notifications, 3);
}

#[test]
fn window_of_one_packet_makes_progress_whatever_is_notified() {
    let mut it = Requesting::new();
    for wr_id in 0..3 {
        it.post(wr_id, SendOp::Write(RemoteAddr::default()), 8192, SendFlags::empty());
    }
    let mut last = it.steps().len() as u32 - 1;
    while it.log.completions.len() < 3 {
        it.respond(0, Body::Congestion, &[]);
        let acknowledge = Body::Acknowledge(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        it.respond(last, acknowledge, &[]);
        let sent = it.steps().len() as u32;
        assert!(sent > 0 || last == 95, "stalled after packet {last}");
        last += sent;
    }
}
