//! Random work between two processes. Both derive it from a seed, so each can check the work of the
//! other.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;

use tokio_rdma::types::{Mtu, Transport};
use tokio_rdma::{Device, Imm, RemoteRegion};

use super::shim::Chance;
use super::{End, LARGEST, Meeting, Role, patient, pattern};

/// Operations per side.
const OPERATIONS: usize = 60;
/// Operations in flight at once, per side.
const DEPTH: usize = 6;
/// Layout of a region: a range for each WRITE, then bytes to READ, then a counter.
const WRITTEN: usize = 0;
const READABLE: usize = LARGEST / 2;
const COUNTER: u64 = LARGEST as u64;

#[derive(Debug, Clone, Copy)]
enum Work {
    Send { imm: Option<Imm> },
    Write { imm: Option<Imm> },
    Read,
    Add,
    Swap,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    work: Work,
    len: usize,
    seed: u8,
    /// Offset of the target of a WRITE.
    at: usize,
}

fn plan(seed: u64, of: Role) -> Vec<Step> {
    // Around the packet sizes of each MTU.
    const AROUND: [usize; 6] = [0, 256, 1024, 4096, 8192, 16384];
    let mut chance = Chance::new(seed * 2 + u64::from(of == Role::Client));
    let mut at = WRITTEN;
    (0..OPERATIONS)
        .map(|_| {
            let len = AROUND[chance.below(6) as usize] + chance.below(3) as usize;
            // The bytes to READ must not be written.
            let len = if at + len > READABLE { 0 } else { len };
            let imm = (chance.below(2) == 0).then(|| Imm(chance.next() as u32));
            let work = match chance.below(8) {
                0..3 => Work::Send { imm },
                3..5 => Work::Write { imm },
                5 => Work::Read,
                6 => Work::Add,
                _ => Work::Swap,
            };
            let step = Step { work, len: len.max(1), seed: chance.next() as u8, at };
            if matches!(work, Work::Write { .. }) {
                at += step.len;
            }
            step
        })
        .collect()
}

/// Returns the steps that consume a receive.
fn arrivals(steps: &[Step]) -> VecDeque<Step> {
    let takes =
        |step: &&Step| matches!(step.work, Work::Send { .. } | Work::Write { imm: Some(_) });
    steps.iter().filter(takes).copied().collect()
}

/// Does the work of one side, which alone changes its counter.
async fn work(end: &End, steps: &[Step]) {
    let word = end.remote.slice(COUNTER..COUNTER + 8).unwrap();
    let mut counter = 0_u64;
    let mut in_flight: VecDeque<Pin<Box<dyn Future<Output = ()> + Send>>> = VecDeque::new();
    for step in steps.iter().copied() {
        if in_flight.len() == DEPTH
            && let Some(first) = in_flight.pop_front()
        {
            first.await;
        }
        let bytes = pattern(step.len, step.seed);
        let range = |at: usize| -> RemoteRegion {
            end.remote.slice(at as u64..(at + step.len) as u64).unwrap()
        };
        let qp = &end.qp;
        in_flight.push_back(match step.work {
            Work::Send { imm: None } => done(qp.send(end.buffer(&bytes))),
            Work::Send { imm: Some(imm) } => done(qp.with_imm(imm).send(end.buffer(&bytes))),
            Work::Write { imm: None } => done(qp.write(end.buffer(&bytes), range(step.at))),
            Work::Write { imm: Some(imm) } => {
                done(qp.with_imm(imm).write(end.buffer(&bytes), range(step.at)))
            }
            Work::Read => {
                let read = qp.read(end.alloc(step.len), range(READABLE));
                let expected = pattern(step.len, 0xaa);
                Box::pin(async move { assert_eq!(&read.await.unwrap()[..], expected, "{step:?}") })
            }
            Work::Add => {
                let (add, before) = (u64::from(step.seed), counter);
                counter += add;
                let added = qp.fetch_add(word, add);
                Box::pin(async move {
                    assert_eq!(added.await.unwrap(), before, "{step:?}: once, and in order")
                })
            }
            Work::Swap => {
                let (before, swap) = (counter, counter + 1000);
                counter = swap;
                let swapped = qp.compare_swap(word, before, swap);
                Box::pin(async move {
                    assert_eq!(swapped.await.unwrap(), before, "{step:?}: once, and in order")
                })
            }
        });
    }
    for last in in_flight {
        last.await;
    }
}

fn done<T: Send, E: std::fmt::Debug + Send>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move { drop(work.await.unwrap()) })
}

/// Receives the expected messages: each once, in order, complete.
async fn receive(end: &End, mut expected: VecDeque<Step>) {
    // Fewer receives than operations in flight, so some wait for a receive.
    const POSTED: usize = 3;
    let mut posted: VecDeque<_> =
        (0..POSTED.min(expected.len())).map(|_| end.qp.recv(end.alloc(20_000))).collect();
    while let (Some(receive), Some(step)) = (posted.pop_front(), expected.pop_front()) {
        let received = receive.await.unwrap();
        match step.work {
            Work::Send { imm } => {
                assert_eq!((received.imm, received.written), (imm, false), "{step:?}");
                assert_eq!(&received.buffer[..], pattern(step.len, step.seed), "{step:?}");
            }
            Work::Write { imm } => {
                assert_eq!(
                    (received.imm, received.written, received.len),
                    (imm, true, step.len),
                    "{step:?}"
                );
                let mut bytes = vec![0; step.len];
                end.region.read(step.at, &mut bytes).unwrap();
                assert_eq!(bytes, pattern(step.len, step.seed), "{step:?}");
            }
            _ => unreachable!("{step:?} takes no receive"),
        }
        if posted.len() < expected.len() {
            posted.push_back(end.qp.recv(end.alloc(20_000)));
        }
    }
}

fn sum(steps: &[Step]) -> u64 {
    let part = |step: &Step| match step.work {
        Work::Add => u64::from(step.seed),
        Work::Swap => 1000,
        _ => 0,
    };
    steps.iter().map(part).sum()
}

async fn reliable(device: &Device, meeting: &mut Meeting, role: Role, seed: u64) {
    let mtu = [Mtu::Mtu256, Mtu::Mtu1024, Mtu::Mtu4096][seed as usize % 3];
    let end = End::new(device, meeting, Transport::Rc, mtu, &patient()).await;
    end.region.write(READABLE, &pattern(20_000, 0xaa)).unwrap();
    let (ours, theirs) = match role {
        Role::Client => (plan(seed, Role::Client), plan(seed, Role::Server)),
        Role::Server => (plan(seed, Role::Server), plan(seed, Role::Client)),
    };
    meeting.meet().await;
    tokio::join!(work(&end, &ours), receive(&end, arrivals(&theirs)));
    meeting.meet().await;
    for step in theirs.iter().filter(|step| matches!(step.work, Work::Write { .. })) {
        let mut bytes = vec![0; step.len];
        end.region.read(step.at, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(step.len, step.seed), "{step:?}");
    }
    assert_eq!(end.region.load(LARGEST).unwrap(), sum(&theirs), "each atomic once");
    meeting.meet().await;
}

/// Checks that no message is duplicated, reordered or partial.
async fn unreliable(device: &Device, meeting: &mut Meeting, role: Role, seed: u64) {
    const MESSAGES: u32 = 60;
    const LEN: usize = 3000;
    let end = End::new(device, meeting, Transport::Uc, Mtu::Mtu1024, &patient()).await;
    let active = (role == Role::Client) == seed.is_multiple_of(2);
    if active {
        meeting.meet().await;
        let send = |number: u32| {
            end.qp.with_imm(Imm(number)).send(end.buffer(&pattern(LEN, number as u8)))
        };
        for number in 0..MESSAGES {
            send(number).await.unwrap();
        }
        // Repeats an end marker until one arrives.
        let last = async {
            loop {
                send(MESSAGES).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = meeting.meet() => {}
            () = last => {}
        }
    } else {
        let mut receives: VecDeque<_> =
            (0..MESSAGES + 1).map(|_| end.qp.recv(end.alloc(LEN))).collect();
        meeting.meet().await;
        let mut before = None;
        while let Some(receive) = receives.pop_front() {
            let received = receive.await.unwrap();
            let number = received.imm.unwrap().0;
            assert!(before < Some(number), "{number} after {before:?}");
            assert_eq!(&received.buffer[..], pattern(LEN, number as u8));
            before = Some(number);
            if number == MESSAGES {
                break;
            }
        }
        assert_eq!(before, Some(MESSAGES));
        meeting.meet().await;
    }
    meeting.meet().await;
}

pub(super) async fn campaign(
    device: &Device,
    meeting: &mut Meeting,
    role: Role,
    seeds: impl Iterator<Item = u64>,
) {
    for seed in seeds {
        eprintln!("campaign: TOKIO_RDMA_SEED={seed}, {role:?}");
        reliable(device, meeting, role, seed).await;
        unreliable(device, meeting, role, seed).await;
    }
}
