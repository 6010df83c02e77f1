use super::*;

const MTU: Mtu = Mtu::Mtu4096;
const FULL: u32 = WINDOW / 4096;

struct Pair {
    slot: WindowSlot,
    sent: u64,
    /// Packets requested.
    requested: u32,
}

impl Pair {
    fn new(link: &Arc<PeerLink>) -> Self {
        Self::asking(link, 1)
    }

    fn asking(link: &Arc<PeerLink>, requested: u32) -> Self {
        Self { slot: link.slot(Weak::<PeerLink>::new()), sent: 0, requested }
    }

    /// Begins with nothing in flight; `acknowledged`: all was answered.
    fn begin(&self, acknowledged: bool) -> Option<Flow> {
        self.slot.request(
            Some(WindowRequest { min: self.requested, quantum: self.requested }),
            acknowledged,
            MTU,
        )
    }

    fn quota(&self) -> Flow {
        self.slot.request(None, false, MTU).unwrap()
    }

    fn send(&mut self, in_flight: u32) {
        self.sent += 1;
        self.slot.update(in_flight, self.sent, MTU);
    }

    fn acknowledge(&mut self, in_flight: u32) {
        self.slot.update(in_flight, self.sent, MTU);
    }
}

fn link() -> Arc<PeerLink> {
    Arc::new(PeerLink::new(&Scheduler::virtual_time()))
}

fn in_flight(link: &PeerLink) -> u32 {
    link.state.lock().epochs.total().0
}

fn assert_idle(link: &PeerLink) {
    while link.scheduler.step(u64::MAX) {}
    let state = link.state.lock();
    assert_eq!(
        (state.epochs.total(), state.wait_queue.len(), state.watched_epoch),
        ((0, 0), 0, None)
    );
    assert_eq!(state.free_entries.len(), state.entries.len());
}

#[test]
fn queue_pairs_get_equal_quotas() {
    let link = link();
    let mut first = Pair::new(&link);
    assert_eq!(first.begin(false), Some(Flow::with_window(32)));
    assert_eq!(first.slot.request(None, false, Mtu::Mtu256), Some(Flow::with_window(64)));
    first.send(8);
    let mut more: Vec<_> = (0..3).map(|_| Pair::new(&link)).collect();
    for one in &mut more {
        assert!(one.begin(false).is_some());
        one.send(1);
    }
    assert_eq!(first.quota(), Flow::with_window(8));
    drop(more);
    assert_eq!(first.quota(), Flow::with_window(32));
    drop(first);
    assert_idle(&link);
}

#[test]
fn queue_pair_without_window_waits_until_other_quotas_shrink() {
    let link = link();
    let (mut first, mut second) = (Pair::new(&link), Pair::new(&link));
    first.begin(false).unwrap();
    first.send(FULL);
    assert_eq!(second.begin(false), None, "the window is full");
    assert!(!second.slot.is_admitted());
    assert_eq!(first.quota(), Flow::with_window(FULL / 2), "one is queued");
    first.acknowledge(20);
    assert!(second.slot.is_admitted(), "it was admitted");
    assert_eq!(second.begin(false), Some(Flow::with_window(12)));
    second.send(12);
    first.acknowledge(4);
    assert_eq!(
        (first.quota(), second.quota()),
        (Flow::with_window(16), Flow::with_window(16)),
        "equal quotas"
    );
    drop(first);
    assert_eq!(second.quota(), Flow::with_window(32));
    second.slot.release(true);
    drop(second);
    assert_idle(&link);
}

#[test]
fn thousand_queue_pairs_are_admitted_in_order_within_the_window() {
    const PAIRS: usize = 1000;
    let link = link();
    // Some READ.
    let mut pairs: Vec<_> =
        (0..PAIRS).map(|at| Pair::asking(&link, if at % 7 == 0 { 8 } else { 1 })).collect();
    let mut served = vec![0; PAIRS];
    // In order of arrival at the peer, and of queueing.
    let (mut sent, mut waiting) = (VecDeque::new(), VecDeque::new());
    for (at, pair) in pairs.iter_mut().enumerate() {
        if pair.begin(false).is_some() {
            pair.send(pair.requested);
            sent.push_back(at);
        } else {
            waiting.push_back(at);
        }
    }
    for _ in 0..50 * PAIRS {
        assert!(in_flight(&link) <= WINDOW);
        let at = sent.pop_front().expect("a queue pair is sending");
        served[at] += 1;
        // It has more to send.
        assert_eq!(pairs[at].begin(true), None);
        waiting.push_back(at);
        while let Some(&first) = waiting.front().filter(|at| pairs[**at].slot.is_admitted()) {
            waiting.pop_front();
            let pair = &mut pairs[first];
            assert!(pair.begin(false).is_some());
            pair.send(pair.requested);
            sent.push_back(first);
        }
        assert!(
            waiting.iter().all(|at| !pairs[*at].slot.is_admitted()),
            "queue pairs are admitted in order"
        );
    }
    assert!(served.iter().all(|times| (49..=51).contains(times)), "{served:?}");
    drop(pairs);
    assert_idle(&link);
}

#[test]
fn queue_pair_that_waited_gets_a_quantum_of_several_packets() {
    let link = link();
    let mut pairs: Vec<_> = (0..FULL).map(|_| Pair::new(&link)).collect();
    let requested = Some(WindowRequest { min: 1, quantum: 8 });
    for pair in &mut pairs {
        assert!(pair.slot.request(requested, false, MTU).is_some(), "the queue is empty");
        pair.send(1);
    }
    pairs.push(Pair::new(&link));
    assert!(
        pairs.iter().rev().all(|pair| pair.slot.request(requested, true, MTU).is_none()),
        "the last one exceeded the window"
    );
    assert_eq!(pairs.iter().filter(|pair| pair.slot.is_admitted()).count() as u32, FULL / 8);
    let last = pairs.last_mut().unwrap();
    assert_eq!(last.slot.request(requested, false, MTU), Some(Flow::with_window(8)));
    last.send(8);
    // The quantum is not repeated.
    assert_eq!(last.quota(), Flow::with_window(1));
    drop(pairs);
    assert_idle(&link);
}

#[test]
fn long_transfers_yield_window_to_a_read() {
    let link = link();
    // Two packets of each stay in flight, so none queues again.
    let mut long: Vec<_> = (0..FULL / 2).map(|_| Pair::new(&link)).collect();
    for pair in &mut long {
        pair.begin(false).unwrap();
        pair.send(2);
    }
    let read = Pair::asking(&link, 8);
    assert_eq!(read.begin(false), None);
    for pair in &mut long {
        assert_eq!(pair.quota(), Flow::with_window(1));
        pair.acknowledge(1);
        if read.slot.is_admitted() {
            return;
        }
    }
    panic!("the READ is never admitted");
}

#[test]
fn withdrawn_waiters_do_not_block_the_queue() {
    let link = link();
    let mut first = Pair::new(&link);
    first.begin(false).unwrap();
    first.send(FULL);
    let mut waiting: Vec<_> = (0..100).map(|_| Pair::new(&link)).collect();
    assert!(waiting.iter().all(|pair| pair.begin(false).is_none()));
    // Some are dropped, some withdraw.
    let mut at = 0;
    waiting.retain(|pair| {
        at += 1;
        if at % 3 == 0 {
            pair.slot.withdraw();
        }
        at % 2 == 0
    });
    first.slot.release(true);
    let mut admitted = 0;
    while let Some(at) = waiting.iter().position(|pair| pair.slot.is_admitted()) {
        // An admitted queue pair may have nothing to send.
        let pair = waiting.swap_remove(at);
        admitted += 1;
        match admitted % 3 {
            0 => pair.slot.release(false),
            1 => drop(pair),
            _ => assert!(pair.begin(false).is_some()),
        }
    }
    assert_eq!((admitted, waiting.len()), (34, 16), "withdrawn queue pairs are not queued");
    drop((first, waiting));
    assert_idle(&link);
}

#[test]
fn silent_queue_pairs_do_not_block_others() {
    let link = link();
    let pairs = || (0..FULL).map(|_| Pair::new(&link)).collect::<Vec<_>>();
    let (mut silent, mut live) = (pairs(), pairs());
    for _ in 0..3 {
        for pair in &mut silent {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
        assert!(live.iter().all(|pair| pair.begin(true).is_none()));
        let begin = link.scheduler.now();
        while !live.iter().all(|pair| pair.slot.is_admitted()) {
            assert!(link.scheduler.step(u64::MAX), "a tick is scheduled");
        }
        let waited = link.scheduler.now() - begin;
        assert!((EPOCH_TIMEOUT..=3 * EPOCH_TIMEOUT).contains(&waited), "{waited}");
        for pair in &mut live {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
        live.iter().for_each(|pair| pair.slot.release(true));
    }
    drop((silent, live));
    assert_idle(&link);
}

#[test]
fn unanswered_queue_pairs_are_all_admitted_in_time() {
    let link = link();
    let mut pairs: Vec<_> = (0..1000).map(|_| Pair::new(&link)).collect();
    for pair in &mut pairs {
        if pair.begin(false).is_some() {
            pair.send(1);
        }
    }
    while let Some(last) = pairs.iter().rposition(|pair| !pair.slot.is_admitted()) {
        assert!(link.scheduler.step(u64::MAX), "a tick is scheduled while {last} waits");
        for pair in pairs.iter_mut().filter(|pair| pair.sent == 0 && pair.slot.is_admitted()) {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
    }
    assert!(link.scheduler.now() < 500_000_000, "{}", link.scheduler.now());
    drop(pairs);
    assert_idle(&link);
}

#[test]
fn acknowledgement_advances_the_epoch_and_drops_earlier_bytes() {
    let link = link();
    let (mut silent, mut live) = (Pair::new(&link), Pair::new(&link));
    silent.begin(false).unwrap();
    silent.send(FULL - 2);
    for round in 0..3 {
        assert!(live.begin(round > 0).is_some());
        live.send(1);
    }
    live.slot.release(true);
    assert_eq!(in_flight(&link), 0);
    // Admitted, unsent bytes count.
    let admitted = Pair::new(&link);
    admitted.begin(false).unwrap();
    for _ in 0..3 {
        live.begin(false).unwrap();
        live.send(1);
        live.slot.release(true);
    }
    assert_eq!(in_flight(&link), 4096);
    drop((silent, live, admitted));
    assert_idle(&link);
}
