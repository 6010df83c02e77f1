//! Unreliable connections and datagrams: messages may be lost, but not damaged.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::time::Duration;

use fastrand::Rng;
use tokio_rdma::Imm;
use tokio_rdma::software::{LinkCounters, Network};
use tokio_rdma::types::{
    Data, Mtu, QpState, RecvWr, SendFlags, SendOp, SendWr, Transport, WcFlags, WcOpcode, WcStatus,
    WrId,
};

use super::campaign::{Trace, seeds};
use super::chance::{LARGEST, Mix, noise, size};
use super::memory::Memory;
use super::setup::{QKEY, Side, Terms, activate, connect, fail, is, number};

const MESSAGES: usize = 40;
const SLOTS: usize = 16;
const RECEIVE: u64 = 1 << 63;
const HEADER: usize = 40;

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    hash: u64,
    now: Duration,
    link: LinkCounters,
    sent: usize,
    arrived: usize,
}

/// A message, identified by the position of its bytes in the noise.
#[derive(Debug, Clone, Copy)]
struct Message {
    kind: u8,
    at: usize,
    len: usize,
    /// The target offset of a WRITE, unique to the message.
    to: usize,
}

impl Message {
    fn bytes(&self) -> &'static [u8] {
        &noise()[self.at..self.at + self.len]
    }
}

fn receive(qp: &tokio_rdma::verbs::Qp, memory: &Memory, slot: usize, number: u64, size: usize) {
    let sges = [memory.sge(slot * size, size)];
    let wr = RecvWr { wr_id: WrId(RECEIVE | number << 16 | slot as u64), sges: &sges };
    // SAFETY: the memory outlives the queue pair and is read only after the completion.
    unsafe { qp.post_recv(&[wr]) }.unwrap();
}

fn connection(seed: u64, verbose: bool) -> Outcome {
    let mut random = Rng::with_seed(seed);
    let mix = Mix::draw(&mut random);
    let network = Network::simulated(seed, mix.faults(&mut random));
    let mut trace = Trace::new(verbose);
    let sides = [Side::new(&network, "a"), Side::new(&network, "b")];
    let mtu = Mtu::ALL[random.usize(..5)];
    let mut terms = [Terms::draw(&mut random, mtu), Terms::draw(&mut random, mtu)];
    let mut plans: [Vec<Message>; 2] = Default::default();
    let mut largest = [8, 8];
    let mut area = [8, 8];
    for side in 0..2 {
        (terms[side].caps.max_recv_wr, terms[side].caps.max_send_wr) =
            (SLOTS as u32, MESSAGES as u32);
        for _ in 0..MESSAGES {
            let (kind, len) = (random.u8(..4), size(&mut random, mtu, 8 * mtu.bytes()).max(8));
            plans[side].push(Message { kind, at: random.usize(..LARGEST), len, to: area[side] });
            area[side] += len;
            largest[side] = largest[side].max(len);
        }
    }
    let targets = [1, 0].map(|to: usize| Memory::new(&sides[to].pd, area[1 - to]));
    let receives = [0, 1].map(|to: usize| Memory::new(&sides[to].pd, SLOTS * largest[1 - to]));
    let sources = [0, 1].map(|side: usize| Memory::new(&sides[side].pd, 2 * LARGEST));
    sources.iter().for_each(|source| source.fill(0, &noise()[..2 * LARGEST]));
    let qps =
        [0, 1].map(|side: usize| sides[side].queue_pair(Transport::Uc, None, terms[side].caps));
    connect([(&sides[0], &qps[0], &terms[0]), (&sides[1], &qps[1], &terms[1])]);
    let eager = random.u8(10..=100);
    let (mut next, mut done, mut arrived, mut posted) = ([0; 2], [0; 2], [0; 2], [0_u64; 2]);
    let mut newest: [Option<usize>; 2] = [None, None];
    let mut free = [0, 1].map(|_| (0..SLOTS).collect::<Vec<_>>());
    let mut last_received = [0; 2];
    let mut idle = false;
    while done != [MESSAGES; 2] || !idle {
        for side in 0..2 {
            while random.u8(..100) < eager {
                let Some(slot) = free[side].pop() else { break };
                posted[side] += 1;
                receive(&qps[side], &receives[side], slot, posted[side], largest[1 - side]);
            }
            if next[side] < MESSAGES && random.bool() {
                let index = next[side];
                let Message { kind, at, len, to } = plans[side][index];
                let (remote, imm) = (targets[side].remote(to), Imm(index as u32));
                let op = match kind {
                    0 | 1 => SendOp::SendWithImm(imm),
                    2 => SendOp::WriteWithImm(remote, imm),
                    _ => SendOp::Write(remote),
                };
                let sges = [sources[side].sge(at, len)];
                let data = Data::Sges(&sges);
                let wr = SendWr {
                    wr_id: WrId(index as u64),
                    op,
                    flags: SendFlags::SIGNALED,
                    data,
                    target: None,
                };
                // SAFETY: the sources outlive the queue pairs and are never written.
                unsafe { qps[side].post_send(&[wr]) }.unwrap();
                next[side] += 1;
            }
        }
        if mix == Mix::Changing && random.u8(..10) == 0 {
            network.set_faults(mix.faults(&mut random));
        }
        idle = true;
        for _ in 0..random.u8(..30) {
            idle &= !network.step();
        }
        idle = idle && network.run_until_idle(Duration::ZERO);
        for side in 0..2 {
            for wc in sides[side].poll() {
                let now = network.now().as_nanos() as u64;
                trace.add(&[
                    now,
                    side as u64,
                    wc.wr_id.0,
                    wc.status.0.into(),
                    wc.byte_len.into(),
                    number(wc.qpn),
                ]);
                trace.print(|| format!("{now} ns, side {side}: {wc:?}"));
                idle = false;
                assert_eq!(
                    wc.status,
                    WcStatus::SUCCESS,
                    "an unreliable connection reported a network fault"
                );
                if wc.wr_id.0 & RECEIVE == 0 {
                    assert_eq!(wc.wr_id.0, done[side] as u64);
                    done[side] += 1;
                    continue;
                }
                let order = wc.wr_id.0 & !RECEIVE;
                assert!(order >> 16 > last_received[side], "receives complete in order");
                last_received[side] = order >> 16;
                let slot = (order & 0xffff) as usize;
                let index = wc.imm().expect("each message has immediate data").0 as usize;
                assert!(
                    newest[side].is_none_or(|newest| newest < index),
                    "{index} after {newest:?}: duplicate or late"
                );
                assert!(index < next[1 - side], "{index} was never sent");
                newest[side] = Some(index);
                arrived[side] += 1;
                let message = plans[1 - side][index];
                assert_eq!(wc.byte_len as usize, message.len);
                let found = if message.kind == 2 {
                    assert_eq!(wc.opcode, WcOpcode::RECV_RDMA_WITH_IMM);
                    targets[1 - side].bytes(message.to, message.len)
                } else {
                    assert_eq!(wc.opcode, WcOpcode::RECV);
                    receives[side].bytes(slot * largest[1 - side], message.len)
                };
                assert!(found == message.bytes(), "{index} has wrong contents: {message:?}");
                free[side].push(slot);
            }
        }
    }
    assert!(network.run_until_idle(Duration::from_secs(1)));
    for side in 0..2 {
        assert!(is(&qps[side], QpState::Rts));
        // Each byte is written correctly or unchanged.
        for message in &plans[side] {
            let found = targets[side].bytes(message.to, message.len);
            let wrote = message.kind >= 2;
            let right = found
                .iter()
                .zip(message.bytes())
                .all(|(&found, &sent)| found == 0 || wrote && found == sent);
            assert!(right, "{message:?}");
        }
        fail(&qps[side]);
        let flushed = sides[side].poll();
        assert_eq!(flushed.len(), SLOTS - free[side].len());
        assert!(flushed.iter().all(|wc| wc.status == WcStatus::WR_FLUSH_ERR));
        assert!(flushed.is_sorted_by_key(|wc| wc.wr_id.0), "flushed in order");
    }
    let link = network.counters();
    let sent = plans.iter().flatten().filter(|message| message.kind < 3).count();
    Outcome { hash: trace.hash(), now: network.now(), link, sent, arrived: arrived.iter().sum() }
}

fn datagrams(seed: u64, verbose: bool) -> Outcome {
    const EACH: usize = 2;
    let mut random = Rng::with_seed(seed);
    let mix = Mix::draw(&mut random);
    let network = Network::simulated(seed, mix.faults(&mut random));
    let mut trace = Trace::new(verbose);
    let sides = [Side::new(&network, "a"), Side::new(&network, "b")];
    let size = HEADER + 4096;
    let mut caps = Terms::usual().caps;
    (caps.max_recv_wr, caps.max_send_wr) = (SLOTS as u32, 4 * MESSAGES as u32);
    let sources = [0, 1].map(|side: usize| Memory::new(&sides[side].pd, LARGEST));
    sources.iter().for_each(|source| source.fill(0, &noise()[..LARGEST]));
    let memories: Vec<_> =
        (0..2 * EACH).map(|end| Memory::new(&sides[end % 2].pd, SLOTS * size)).collect();
    let qps: Vec<_> =
        (0..2 * EACH).map(|end| sides[end % 2].queue_pair(Transport::Ud, None, caps)).collect();
    qps.iter().for_each(|qp| activate(qp, Terms::draw(&mut random, Mtu::Mtu4096).psn));
    let handles = [0, 1].map(|from: usize| {
        sides.each_ref().map(|to| sides[from].pd.address_handle(&to.address()).unwrap())
    });
    let eager = random.u8(10..=100);
    // The sender, receiver and contents of each message, and how often it arrived.
    let mut sent: Vec<(usize, usize, Message)> = Vec::new();
    let mut copies: HashMap<usize, u64> = HashMap::new();
    let mut free = vec![(0..SLOTS).collect::<Vec<_>>(); 2 * EACH];
    let (mut posted, mut done, mut idle) = (0_u64, 0, false);
    while done < MESSAGES || !idle {
        for end in 0..2 * EACH {
            while random.u8(..100) < eager {
                let Some(slot) = free[end].pop() else { break };
                posted += 1;
                receive(&qps[end], &memories[end], slot, posted, size);
            }
        }
        if sent.len() < MESSAGES && random.bool() {
            let (from, to) = (random.usize(..2 * EACH), random.usize(..2 * EACH));
            let len = if random.bool() {
                random.usize(..=4096)
            } else {
                [0, 1, 255, 256, 4095, 4096][random.usize(..6)]
            };
            let message = Message { kind: 0, at: random.usize(..LARGEST - 4096), len, to: 0 };
            let index = sent.len();
            let sges = [sources[from % 2].sge(message.at, len)];
            let wr = SendWr {
                wr_id: WrId(index as u64),
                op: SendOp::SendWithImm(Imm(index as u32)),
                flags: SendFlags::SIGNALED,
                data: Data::Sges(&sges),
                target: Some(handles[from % 2][to % 2].target(qps[to].qpn(), QKEY).into()),
            };
            // SAFETY: the sources outlive the queue pairs and are never written.
            unsafe { qps[from].post_send(&[wr]) }.unwrap();
            sent.push((from, to, message));
        }
        if mix == Mix::Changing && random.u8(..10) == 0 {
            network.set_faults(mix.faults(&mut random));
        }
        idle = true;
        for _ in 0..random.u8(..30) {
            idle &= !network.step();
        }
        idle = idle && network.run_until_idle(Duration::ZERO);
        for (side, here) in sides.iter().enumerate() {
            for wc in here.poll() {
                let now = network.now().as_nanos() as u64;
                trace.add(&[
                    now,
                    side as u64,
                    wc.wr_id.0,
                    wc.status.0.into(),
                    wc.byte_len.into(),
                    number(wc.qpn),
                ]);
                trace.print(|| format!("{now} ns, side {side}: {wc:?}"));
                idle = false;
                assert_eq!(wc.status, WcStatus::SUCCESS);
                if wc.wr_id.0 & RECEIVE == 0 {
                    done += 1;
                    continue;
                }
                let end = qps.iter().position(|qp| qp.qpn() == wc.qpn).unwrap();
                let slot = (wc.wr_id.0 & 0xffff) as usize;
                let index = wc.imm().expect("each message has immediate data").0 as usize;
                let (from, to, message) = *sent.get(index).expect("a received message was sent");
                assert_eq!((end, wc.src_qpn), (to, qps[from].qpn()));
                assert!(wc.flags.contains(WcFlags::GRH));
                assert_eq!(wc.byte_len as usize, HEADER + message.len);
                let found = memories[end].bytes(slot * size + HEADER, message.len);
                assert!(found == message.bytes(), "datagram {index} has wrong contents");
                *copies.entry(index).or_default() += 1;
                free[end].push(slot);
            }
        }
    }
    let link = network.counters();
    let extra: u64 = copies.values().map(|&count| count - 1).sum();
    assert!(
        copies.values().all(|&count| count <= 2) && extra <= link.duplicated,
        "more copies than the network made"
    );
    assert_eq!(link.sent, MESSAGES as u64, "one packet for each message");
    if mix == Mix::None && eager == 100 {
        assert!(!copies.is_empty());
    }
    qps.iter().for_each(|qp| assert!(is(qp, QpState::Rts)));
    let arrived = copies.values().sum::<u64>() as usize;
    Outcome { hash: trace.hash(), now: network.now(), link, sent: MESSAGES, arrived }
}

fn campaign(test: &str, run: fn(u64, bool) -> Outcome) {
    let Some(outcomes) = seeds(test, 1.0, |seed, verbose| {
        let outcome = run(seed, verbose);
        if verbose || seed % 8 == 0 {
            assert_eq!(run(seed, false), outcome, "a seed determines the whole run");
        }
        outcome
    }) else {
        return;
    };
    let sent: usize = outcomes.iter().map(|one| one.sent).sum();
    let arrived: usize = outcomes.iter().map(|one| one.arrived).sum();
    println!("{test}: {arrived} of {sent} messages arrived");
    assert!(arrived * 3 > sent, "most messages are lost: {arrived} of {sent}");
}

#[test]
fn unreliable_connections_deliver_only_correct_data() {
    campaign("unreliable::unreliable_connections_deliver_only_correct_data", connection);
}

#[test]
fn datagrams_deliver_only_sent_data() {
    campaign("unreliable::datagrams_deliver_only_sent_data", datagrams);
}
