use super::*;

const MTU: Mtu = Mtu::Mtu4096;
/// Packets underway to a peer.
const FULL: u32 = TO_PEER / 4096;

/// A queue pair as its place sees it.
struct Pair {
    place: Place,
    sent: u64,
    /// Packets that it asks for.
    asks: u32,
}

impl Pair {
    fn new(link: &Arc<PeerLink>) -> Self {
        Self::asking(link, 1)
    }

    fn asking(link: &Arc<PeerLink>, asks: u32) -> Self {
        Self { place: link.place(Weak::new()), sent: 0, asks }
    }

    /// With nothing underway; `heard`: as it was answered. What it may send.
    fn begin(&self, heard: bool) -> Option<Flow> {
        self.place.go(Some(Asks { least: self.asks, turn: self.asks }), heard, MTU)
    }

    /// With something underway.
    fn go_on(&self) -> Flow {
        self.place.go(None, false, MTU).unwrap()
    }

    /// So many packets are underway, of which it has just sent some.
    fn send(&mut self, underway: u32) {
        self.sent += 1;
        self.place.tell(underway, self.sent, MTU);
    }

    /// Some were acknowledged.
    fn hear(&mut self, underway: u32) {
        self.place.tell(underway, self.sent, MTU);
    }
}

fn link() -> Arc<PeerLink> {
    Arc::new(PeerLink::new(&Scheduler::virtual_time()))
}

fn underway(link: &PeerLink) -> u32 {
    link.state.lock().pages.total().0
}

/// Nobody is on the way or waits, and nothing is to be done.
fn assert_idle(link: &PeerLink) {
    while link.scheduler.step(u64::MAX) {}
    let state = link.state.lock();
    assert_eq!((state.pages.total(), state.line.len(), state.watched), ((0, 0), 0, None));
    assert_eq!(state.free.len(), state.entries.len());
}

#[test]
fn queue_pairs_share_equally() {
    let link = link();
    let mut first = Pair::new(&link);
    assert_eq!(first.begin(false), Some(Flow::of(32)));
    assert_eq!(first.place.go(None, false, Mtu::Mtu256), Some(Flow::of(64)));
    first.send(8);
    let mut more: Vec<_> = (0..3).map(|_| Pair::new(&link)).collect();
    for one in &mut more {
        assert!(one.begin(false).is_some());
        one.send(1);
    }
    assert_eq!(first.go_on(), Flow::of(8));
    drop(more);
    assert_eq!(first.go_on(), Flow::of(32));
    drop(first);
    assert_idle(&link);
}

#[test]
fn who_finds_no_room_waits_for_the_shares_of_the_others_to_shrink() {
    let link = link();
    let (mut first, mut second) = (Pair::new(&link), Pair::new(&link));
    first.begin(false).unwrap();
    first.send(FULL);
    assert_eq!(second.begin(false), None, "all there is has been taken");
    assert!(!second.place.is_on());
    assert_eq!(first.go_on(), Flow::of(FULL / 2), "one waits");
    first.hear(20);
    assert!(second.place.is_on(), "it was let in");
    assert_eq!(second.begin(false), Some(Flow::of(12)));
    second.send(12);
    first.hear(4);
    assert_eq!(
        (first.go_on(), second.go_on()),
        (Flow::of(16), Flow::of(16)),
        "no more than its equal share"
    );
    drop(first);
    assert_eq!(second.go_on(), Flow::of(32));
    second.place.rest(true);
    drop(second);
    assert_idle(&link);
}

#[test]
fn crowd_takes_turns_in_order_and_the_bound_is_kept() {
    const PAIRS: usize = 1000;
    let link = link();
    // Some READ.
    let mut pairs: Vec<_> =
        (0..PAIRS).map(|at| Pair::asking(&link, if at % 7 == 0 { 8 } else { 1 })).collect();
    let mut served = vec![0; PAIRS];
    // In the order in which the peer takes them, and who waits, in the order in which they came.
    let (mut sent, mut waiting) = (VecDeque::new(), VecDeque::new());
    for (at, pair) in pairs.iter_mut().enumerate() {
        if pair.begin(false).is_some() {
            pair.send(pair.asks);
            sent.push_back(at);
        } else {
            waiting.push_back(at);
        }
    }
    for _ in 0..50 * PAIRS {
        assert!(underway(&link) <= TO_PEER);
        let at = sent.pop_front().expect("somebody is on the way");
        served[at] += 1;
        // It has more to do, and others wait.
        assert_eq!(pairs[at].begin(true), None);
        waiting.push_back(at);
        while let Some(&first) = waiting.front().filter(|at| pairs[**at].place.is_on()) {
            waiting.pop_front();
            let pair = &mut pairs[first];
            assert!(pair.begin(false).is_some());
            pair.send(pair.asks);
            sent.push_back(first);
        }
        assert!(
            waiting.iter().all(|at| !pairs[*at].place.is_on()),
            "nobody is let in before who came first"
        );
    }
    assert!(served.iter().all(|times| (49..=51).contains(times)), "{served:?}");
    drop(pairs);
    assert_idle(&link);
}

#[test]
fn who_has_waited_has_a_turn_of_several_packets() {
    let link = link();
    let mut crowd: Vec<_> = (0..FULL).map(|_| Pair::new(&link)).collect();
    let asks = Some(Asks { least: 1, turn: 8 });
    for pair in &mut crowd {
        assert!(pair.place.go(asks, false, MTU).is_some(), "nobody waits");
        pair.send(1);
    }
    crowd.push(Pair::new(&link));
    assert!(
        crowd.iter().rev().all(|pair| pair.place.go(asks, true, MTU).is_none()),
        "the last was one too many"
    );
    assert_eq!(crowd.iter().filter(|pair| pair.place.is_on()).count() as u32, FULL / 8);
    let last = crowd.last_mut().unwrap();
    assert_eq!(last.place.go(asks, false, MTU), Some(Flow::of(8)));
    last.send(8);
    // No more than these.
    assert_eq!(last.go_on(), Flow::of(1));
    drop(crowd);
    assert_idle(&link);
}

#[test]
fn long_transfers_make_room_for_a_read() {
    let link = link();
    // Two packets of each are always underway: none ever begins again.
    let mut long: Vec<_> = (0..FULL / 2).map(|_| Pair::new(&link)).collect();
    for pair in &mut long {
        pair.begin(false).unwrap();
        pair.send(2);
    }
    let read = Pair::asking(&link, 8);
    assert_eq!(read.begin(false), None);
    for pair in &mut long {
        assert_eq!(pair.go_on(), Flow::of(1));
        pair.hear(1);
        if read.place.is_on() {
            return;
        }
    }
    panic!("there is room for no READ");
}

#[test]
fn who_waits_and_goes_does_not_keep_out_others() {
    let link = link();
    let mut first = Pair::new(&link);
    first.begin(false).unwrap();
    first.send(FULL);
    let mut waiting: Vec<_> = (0..100).map(|_| Pair::new(&link)).collect();
    assert!(waiting.iter().all(|pair| pair.begin(false).is_none()));
    // Ended, or with nothing left to do.
    let mut at = 0;
    waiting.retain(|pair| {
        at += 1;
        if at % 3 == 0 {
            pair.place.leave();
        }
        at % 2 == 0
    });
    first.place.rest(true);
    let mut entered = 0;
    while let Some(at) = waiting.iter().position(|pair| pair.place.is_on()) {
        // It may be let in and find that it can send nothing.
        let pair = waiting.swap_remove(at);
        entered += 1;
        match entered % 3 {
            0 => pair.place.rest(false),
            1 => drop(pair),
            _ => assert!(pair.begin(false).is_some()),
        }
    }
    assert_eq!((entered, waiting.len()), (34, 16), "those that are left have left the line");
    drop((first, waiting));
    assert_idle(&link);
}

#[test]
fn silent_queue_pairs_do_not_keep_out_others() {
    let link = link();
    let pairs = || (0..FULL).map(|_| Pair::new(&link)).collect::<Vec<_>>();
    let (mut silent, mut live) = (pairs(), pairs());
    for _ in 0..3 {
        // They try again and again.
        for pair in &mut silent {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
        assert!(live.iter().all(|pair| pair.begin(true).is_none()));
        let begin = link.scheduler.now();
        while !live.iter().all(|pair| pair.place.is_on()) {
            assert!(link.scheduler.step(u64::MAX), "somebody is to end the wait");
        }
        let waited = link.scheduler.now() - begin;
        assert!((PATIENCE..=3 * PATIENCE).contains(&waited), "{waited}");
        for pair in &mut live {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
        live.iter().for_each(|pair| pair.place.rest(true));
    }
    drop((silent, live));
    assert_idle(&link);
}

#[test]
fn crowd_that_nobody_answers_finds_out_in_time() {
    let link = link();
    let mut crowd: Vec<_> = (0..1000).map(|_| Pair::new(&link)).collect();
    for pair in &mut crowd {
        if pair.begin(false).is_some() {
            pair.send(1);
        }
    }
    while let Some(last) = crowd.iter().rposition(|pair| !pair.place.is_on()) {
        assert!(link.scheduler.step(u64::MAX), "somebody is to end the wait of {last}");
        for pair in crowd.iter_mut().filter(|pair| pair.sent == 0 && pair.place.is_on()) {
            assert!(pair.begin(false).is_some());
            pair.send(1);
        }
    }
    assert!(link.scheduler.now() < 500_000_000, "{}", link.scheduler.now());
    drop(crowd);
    assert_idle(&link);
}

#[test]
fn answer_to_one_says_that_what_was_sent_before_it_has_arrived() {
    let link = link();
    let (mut silent, mut live) = (Pair::new(&link), Pair::new(&link));
    silent.begin(false).unwrap();
    silent.send(FULL - 2);
    for round in 0..3 {
        assert!(live.begin(round > 0).is_some());
        live.send(1);
    }
    live.place.rest(true);
    assert_eq!(underway(&link), 0);
    // What was let in and has not been sent counts all the same.
    let entered = Pair::new(&link);
    entered.begin(false).unwrap();
    for _ in 0..3 {
        live.begin(false).unwrap();
        live.send(1);
        live.place.rest(true);
    }
    assert_eq!(underway(&link), 4096);
    drop((silent, live, entered));
    assert_idle(&link);
}
