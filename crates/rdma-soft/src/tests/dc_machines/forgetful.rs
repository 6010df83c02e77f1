//! Targets that evict sessions, and packets that arrive after the eviction.

use super::*;

/// A network that may deliver a packet long after its session was evicted.
#[derive(Default)]
struct Slow {
    in_flight: Vec<(u64, usize, bool, Packet, Header)>,
}

impl Slow {
    fn send(
        &mut self,
        now: u64,
        random: &mut fastrand::Rng,
        index: usize,
        to_target: bool,
        packet: (Packet, Header),
    ) {
        for _ in 0..[0, 1, 1, 1, 1, 1, 2, 3][random.usize(..8)] {
            let delay =
                if random.u8(..8) == 0 { random.u64(..30 * SECOND) } else { random.u64(..20_000) };
            self.in_flight.push((now + delay, index, to_target, packet.0, packet.1));
        }
    }

    fn next(&self) -> Option<usize> {
        (0..self.in_flight.len()).min_by_key(|&at| self.in_flight[at].0)
    }
}

#[derive(Debug, Default)]
struct Done {
    evicted: u64,
    succeeded: usize,
    failed: usize,
}

/// Runs more initiators than the table holds, with pauses longer than the eviction time and late
/// duplicates. Each word must be incremented once per success and at most once per failure.
fn forgetful(seed: u64) -> Done {
    const PEERS: usize = 9;
    const ROUNDS: u64 = 20;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut target = TargetEnd::new();
    target.machine.config.min_rnr_timer = RnrTimer::from_code(0);
    for wr_id in 0..10_000 {
        target.recv(wr_id, 8);
    }
    let mut peers: Vec<_> = (0..PEERS)
        .map(|index| {
            let mut it = InitiatorEnd::new();
            it.machine.config.qpn = Qpn(3 + index as u32);
            it.machine.config.timeout = AckTimeout::from_code(12);
            (it.machine.config.retry_count, it.machine.config.rnr_retry) = (random.u8(..3), 7);
            it.machine.reset_retries();
            it.side.drawn = random.u64(..);
            it
        })
        .collect();
    let (mut network, mut now) = (Slow::default(), 0);
    let mut wake: Vec<u64> = (0..PEERS).map(|_| random.u64(..SECOND)).collect();
    // Counts of posted and completed requests, and the results of atomics.
    let (mut posted, mut seen) = ([0_u64; PEERS], [0_usize; PEERS]);
    let mut originals = vec![Vec::new(); PEERS];
    let (mut failed, mut sends) = ([0_u64; PEERS], [0_u64; 2]);
    loop {
        let timers =
            (0..PEERS).filter_map(|at| peers[at].deadline.map(|deadline| (deadline, at, 1)));
        let wakes = (0..PEERS).filter(|&at| posted[at] < 2 * ROUNDS).map(|at| (wake[at], at, 0));
        let arrival = network.next().map(|at| (network.in_flight[at].0, at, 2));
        let Some((time, at, kind)) = timers.chain(wakes).chain(arrival).min() else { break };
        now = time.max(now);
        target.side.now = now;
        peers.iter_mut().for_each(|peer| peer.side.now = now);
        let index = match kind {
            0 => {
                let it = &mut peers[at];
                wake[at] = now
                    + [1_000, 100_000, SECOND, 15 * SECOND][random.usize(..4)]
                    + random.u64(..1_000_000);
                if it.machine.state() == QpState::Err {
                    if random.bool()
                        && let Some(header) = it.machine.header()
                        && let Some(close) = it.machine.close_session()
                    {
                        network.send(now, &mut random, at, true, (close.packet, header));
                    }
                    it.machine.set_state(QpState::Reset, &mut it.side);
                    it.machine.reset_retries();
                    it.machine.set_state(QpState::Rts, &mut it.side);
                }
                if seen[at] as u64 == posted[at] {
                    let local = [Sge { addr: it.base + 64, length: 8, lkey: Lkey(it.key) }];
                    let remote = target.remote(8 * at as u64);
                    let address = AddressVector::new(PortNum(1), 0, Gid::default());
                    for (op, sges) in
                        [(SendOp::FetchAdd { remote, add: 1 }, &local[..]), (SendOp::Send, &[])]
                    {
                        let to =
                            DctTarget { address: &address, handle: 0, number: NUMBER, key: KEY };
                        let (wr_id, flags, data) =
                            (WrId(posted[at]), SendFlags::SIGNALED, Data::Sges(sges));
                        let wr = SendWr { wr_id, op, flags, data, target: Some(to.into()) };
                        it.machine.post(&wr, if sges.is_empty() { 0 } else { 8 }, &mut it.side);
                        posted[at] += 1;
                    }
                }
                at
            }
            1 => {
                let InitiatorEnd { machine, side, .. } = &mut peers[at];
                machine.on_timer(now, side);
                at
            }
            _ => {
                let (_, index, to_target, packet, header) = network.in_flight.swap_remove(at);
                let payload = Payload::Bytes(&[]);
                if to_target {
                    let framed = (&packet, &header);
                    let it = &mut target;
                    match it.machine.on_request(
                        framed,
                        Gid::default(),
                        &payload,
                        &it.keys,
                        &mut it.side,
                    ) {
                        Outcome::Nothing => {}
                        Outcome::Answer(answer) => {
                            network.send(now, &mut random, index, false, answer)
                        }
                        Outcome::Session(key) => {
                            let mut gather = Gather::new();
                            while let Some(reply) =
                                it.machine.next_reply(&key, &it.keys, &mut gather, &mut it.side)
                            {
                                network.send(now, &mut random, index, false, reply);
                            }
                        }
                    }
                } else {
                    let it = &mut peers[index];
                    it.machine.on_answer(
                        (&packet, &header),
                        Gid::default(),
                        &payload,
                        &it.keys,
                        &mut it.side,
                    );
                }
                index
            }
        };
        for packet in peers[index].packets() {
            network.send(now, &mut random, index, true, packet);
        }
        let it = &mut peers[index];
        for &(wr_id, status) in &it.side.completions[seen[index]..] {
            assert_eq!(wr_id, seen[index] as u64, "in posting order");
            seen[index] += 1;
            match (status, wr_id % 2) {
                (WcStatus::SUCCESS, 0) => {
                    // SAFETY: the buffer is leaked; no other thread accesses it.
                    originals[index]
                        .push(unsafe { ((it.base + 64) as *const u64).read_volatile() });
                }
                (WcStatus::SUCCESS, _) => sends[0] += 1,
                (_, 0) => failed[index] += 1,
                _ => sends[1] += 1,
            }
        }
    }
    let mut done = Done { evicted: target.machine.counters().evicted, ..Done::default() };
    for (at, originals) in originals.iter().enumerate() {
        assert_eq!(seen[at] as u64, posted[at], "each request completes");
        assert!(originals.is_sorted_by(|a, b| a < b), "a result occurs twice: {originals:?}");
        // SAFETY: the buffer is leaked; no other thread accesses it.
        let word = unsafe { ((target.base + 8 * at as u64) as *const u64).read_volatile() };
        let (least, most) = (originals.len() as u64, originals.len() as u64 + failed[at]);
        assert!(
            (least..=most).contains(&word),
            "{word} additions; {least} succeeded and {} failed",
            failed[at]
        );
        done.succeeded += originals.len();
        done.failed += failed[at] as usize;
    }
    let arrived = target.side.completions.len() as u64;
    assert!(
        (sends[0]..=sends[0] + sends[1]).contains(&arrived),
        "{arrived} messages arrived of {sends:?}"
    );
    done
}

#[test]
fn evicted_sessions_execute_nothing_twice() {
    let seeds =
        std::env::var("TOKIO_RDMA_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let mut all = Done::default();
    for seed in 0..seeds {
        let done = std::panic::catch_unwind(|| forgetful(seed))
            .unwrap_or_else(|_| panic!("seed {seed} fails"));
        all.evicted += done.evicted;
        all.succeeded += done.succeeded;
        all.failed += done.failed;
    }
    assert!(
        all.evicted > seeds && all.succeeded > 1000 && all.failed > 20,
        "the campaign exercised too little: {all:?}"
    );
}
