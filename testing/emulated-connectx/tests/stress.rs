//! Several threads with their own queue pairs, on a shared context and on contexts of their own.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;

const THREADS: usize = 4;
const PAIRS: usize = 12;
const TIME: Duration = Duration::from_secs(2);

/// Writes from each queue pair to its own place and verifies the data; returns the number of
/// writes.
fn work(context: &Arc<Context>, deadline: Instant) -> u64 {
    let pd = Pd::new(context);
    let cq = Cq::new(context, 255);
    let pairs: Vec<_> = (0..PAIRS)
        .map(|_| {
            let (a, b) = (Qp::new(&pd, RC, Queues::one(&cq)), Qp::new(&pd, RC, Queues::one(&cq)));
            a.connect(b.number(), context.route(), |_| {});
            b.connect(a.number(), context.route(), |_| {});
            (a, b)
        })
        .collect();
    let (mut source, target) = (Mr::new(&pd, 64 * PAIRS, LOCAL), Mr::new(&pd, 64 * PAIRS, ALL));
    let mut round = 0;
    while Instant::now() < deadline || round == 0 {
        round += 1;
        (0..PAIRS).for_each(|at| source.set_word(8 * at, round << 8 | at as u64));
        for (at, (a, _)) in pairs.iter().enumerate() {
            // Inline data goes through the doorbell register, which some queue pairs share.
            let write =
                Work::write(at as u64, vec![source.sge(64 * at, 8)], &target, 64 * at as u64);
            a.post(write.flags(if round % 2 == 0 { SIGNALED } else { SIGNALED | INLINE }));
        }
        let mut done = [false; PAIRS];
        for _ in 0..PAIRS {
            let wc = cq.next();
            assert_eq!(wc.status, 0);
            assert!(!std::mem::replace(&mut done[wc.wr_id as usize], true), "twice");
        }
        (0..PAIRS).for_each(|at| assert_eq!(target.word(8 * at), round << 8 | at as u64));
    }
    round * PAIRS as u64
}

#[test]
fn threads_share_a_context_and_have_their_own() {
    let device = start(|_| {});
    let deadline = Instant::now() + TIME;
    let shared = Context::open(0);
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, total) = (&shared, &total);
            scope.spawn(move || {
                let context = if thread % 2 == 0 { shared.clone() } else { Context::open(0) };
                total.fetch_add(work(&context, deadline), Ordering::Relaxed);
            });
        }
    });
    let total = total.into_inner();
    println!("{total} writes");
    assert!(total >= (THREADS * PAIRS) as u64);
    device.assert_clean();
}
