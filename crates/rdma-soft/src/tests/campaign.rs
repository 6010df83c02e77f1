//! Seeded campaigns on faulty networks: every byte arrives once and in order.

use super::*;
use rdma_provider::types::{Imm, WcOpcode, WcStatus};

const SLOT: usize = 6000;
const COUNT: usize = 24;

#[derive(Debug, PartialEq, Eq)]
struct Trace {
    completions: Vec<(u64, u32)>,
    link: LinkCounters,
    end: Duration,
    sums: u64,
}

fn faults(random: &mut fastrand::Rng) -> Faults {
    let mut probability = |most: f64| if random.bool() { random.f64() * most } else { 0.0 };
    Faults::none()
        .loss(probability(0.1))
        .duplicate(probability(0.2))
        .reorder(probability(0.2))
        .corrupt(probability(0.05))
        .delay(Duration::from_micros(1)..Duration::from_micros(20))
}

fn run(seed: u64) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let network = Network::simulated(seed, faults(&mut random));
    let options = Options {
        mtu: Mtu::ALL[random.usize(..3)],
        psn: 0x100_0000 - random.u32(0..40),
        timeout: 6,
        rnr_timer: 5,
        rd_atomic: random.u8(1..=4),
        dest_rd_atomic: 4,
        ..Options::default()
    };
    let (a, b) = connected(&network, &options);
    let (source, target) = (a.buffer(SLOT * COUNT), b.buffer(SLOT * COUNT));
    let (result, remote) = (a.buffer(SLOT * COUNT), b.buffer(SLOT * COUNT));
    let (counter, originals) = (b.buffer(8), a.buffer(8 * COUNT));
    source.fill((0..).map(|at: usize| (at * 31 % 251) as u8));
    remote.fill((0..).map(|at: usize| (at * 17 % 241) as u8));
    let mut received = Vec::new();
    let (mut expected_receives, mut additions) = (Vec::new(), 0);
    let mut plan = Vec::new();
    for index in 0..COUNT {
        let (at, len) = (index * SLOT, random.usize(..SLOT));
        let kind = random.u8(..6);
        plan.push((kind, at, len));
        let fence = if random.u8(..4) == 0 { SendFlags::FENCE } else { SendFlags::empty() };
        let flags = SendFlags::SIGNALED | fence;
        let (op, sge) = match kind {
            0 => (SendOp::Send, source.sge(at, len)),
            1 => (SendOp::SendWithImm(Imm(index as u32)), source.sge(at, len)),
            2 => (SendOp::Write(target.remote(at)), source.sge(at, len)),
            3 => (SendOp::WriteWithImm(target.remote(at), Imm(index as u32)), source.sge(at, len)),
            4 => (SendOp::Read(remote.remote(at)), result.sge(at, len)),
            _ => (
                SendOp::FetchAdd { remote: counter.remote(0), add: 1 },
                originals.sge(index * 8, 8),
            ),
        };
        if matches!(kind, 0 | 1 | 3) {
            expected_receives.push((index as u64, len as u32));
            // Sometimes too late, so that the peer is not ready.
            b.recv(index as u64, &[target.sge(at, SLOT)]).unwrap();
        }
        a.send_with(index as u64, op, flags, Data::Sges(&[sge])).unwrap();
        for _ in 0..random.u8(..20) {
            network.step();
        }
        additions += u64::from(kind == 5);
    }
    let completions = a.wait(COUNT);
    received.extend(b.wait(expected_receives.len()));
    assert!(network.run_until_idle(Duration::from_secs(10)));
    assert_eq!(a.poll().len() + b.poll().len(), 0);
    for (index, done) in completions.iter().enumerate() {
        assert_eq!((done.wr_id.0, done.status), (index as u64, WcStatus::SUCCESS));
    }
    let got: Vec<_> = received.iter().map(|done| (done.wr_id.0, done.byte_len)).collect();
    assert_eq!(got, expected_receives);
    for done in received.iter().filter(|done| done.opcode == WcOpcode::RECV_RDMA_WITH_IMM) {
        assert_eq!(done.imm(), Some(Imm(done.wr_id.0 as u32)));
    }
    let mut previous = 0;
    for (index, &(kind, at, len)) in plan.iter().enumerate() {
        match kind {
            0..4 => assert_eq!(target.bytes(at, len), source.bytes(at, len)),
            4 => assert_eq!(result.bytes(at, len), remote.bytes(at, len)),
            _ => {
                assert_eq!(originals.word(index * 8), previous);
                previous += 1;
            }
        }
        if kind < 4 {
            assert!(target.bytes(at + len, SLOT - len).iter().all(|&byte| byte == 0));
        }
    }
    assert_eq!(counter.word(0), additions, "each atomic is executed exactly once");
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    let sums = a.qp.counters().0.packets * 1000 + a.qp.counters().0.retransmitted;
    Trace {
        completions: completions.iter().map(|done| (done.wr_id.0, done.byte_len)).collect(),
        link: network.counters(),
        end: network.now(),
        sums,
    }
}

#[test]
fn everything_arrives_once_and_in_order() {
    // TOKIO_RDMA_SEED selects one seed, TOKIO_RDMA_SEEDS the number of seeds.
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("TOKIO_RDMA_SEED") {
        run(seed);
        return;
    }
    let usual = if cfg!(debug_assertions) { 40 } else { 400 };
    let mut lost = 0;
    for seed in 0..number("TOKIO_RDMA_SEEDS").unwrap_or(usual) {
        let trace = std::panic::catch_unwind(|| run(seed));
        match trace {
            Ok(trace) => lost += trace.link.lost,
            Err(_) => panic!("seed {seed} fails: TOKIO_RDMA_SEED={seed} replays it"),
        }
    }
    assert!(lost > 0, "the campaign lost no packets");
}

#[test]
fn seed_determines_the_whole_run() {
    for seed in [3, 4] {
        assert_eq!(run(seed), run(seed));
    }
    assert_ne!(run(5), run(6));
}

#[test]
fn real_time_network_with_faults_delivers() {
    let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02).corrupt(0.02);
    let network = Network::with_faults(11, faults);
    let (a, b) = connected(&network, &Options { timeout: 8, ..Options::default() });
    let (from, to) = (a.buffer(100_000), b.buffer(100_000));
    from.fill((0..100_000).map(|at| at as u8));
    a.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 100_000)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(to.bytes(0, 100_000), from.bytes(0, 100_000));
    network.set_loss(1.0);
    a.send(2, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(2, WcStatus::RETRY_EXC_ERR)]);
}

#[test]
fn concurrent_atomics_over_a_direct_link_all_count() {
    let network = Network::new();
    let (a, b) = connected(&network, &Options::default());
    let counter = b.buffer(8);
    let mirror = a.buffer(8);
    let (there, back) = (counter.remote(0), mirror.remote(0));
    let side = |end: &End, remote: RemoteAddr| {
        let result = end.buffer(8);
        for _ in 0..2000 {
            end.send(1, SendOp::FetchAdd { remote, add: 1 }, &[result.sge(0, 8)]).unwrap();
            assert_eq!(end.wait(1)[0].status, WcStatus::SUCCESS);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| side(&a, there));
        side(&b, back);
    });
    assert_eq!((counter.word(0), mirror.word(0)), (2000, 2000));
}
