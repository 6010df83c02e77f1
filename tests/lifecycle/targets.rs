//! DC targets and initiators that are dropped, fail or are repaired while messages arrive.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use crate::torture::{self, Flavour, LONG, Mode, bounded, software, soon};
use tokio_rdma::dc::{DcAddress, DcInitiator, DcTarget};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::Network;
use tokio_rdma::types::{AckTimeout, AsyncEvent, DcKey, Mtu, QpState, Qpn, WcStatus};
use tokio_rdma::{
    Access, Batch, CompletionMode, CompletionQueue, ExposedRegion, OpErrorKind, Pool,
    ProtectionDomain, SharedReceiveQueue,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn queue(pd: &ProtectionDomain) -> CompletionQueue {
    CompletionQueue::new(pd.device(), CompletionMode::Event).unwrap()
}

/// Returns a network that completes work at the post, or later if `slow`.
fn network(slow: bool) -> Network {
    if slow { torture::slow_network(7) } else { Network::new() }
}

fn short_timeouts() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(6), retry_count: 1, ..Default::default() }
}

fn initiator_with_short_timeouts(pd: &ProtectionDomain, queue: &CompletionQueue) -> DcInitiator {
    DcInitiator::builder(pd, queue).retries(short_timeouts()).build().unwrap()
}

/// A subscriber that calls a function within the code that logs `message`.
struct OnEvent<F> {
    message: &'static str,
    level: Level,
    callback: F,
}

impl<F: Fn(&str) + Send + Sync + 'static> OnEvent<F> {
    /// Calls `scenario` with this subscriber. Calls are serialised, since subscribers change the
    /// global maximum level.
    fn during<T>(self, scenario: impl FnOnce() -> T) -> T {
        // With a single dispatcher, `tracing` asks only the first thread that reaches an event, and
        // caches its answer. A thread without a subscriber would disable the event.
        static SECOND_DISPATCH: LazyLock<Dispatch> =
            LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
        LazyLock::force(&SECOND_DISPATCH);
        static SERIAL: Mutex<()> = Mutex::new(());
        let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
        tracing::subscriber::with_default(self, scenario)
    }
}

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        use std::fmt::Write as _;
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl<F: Fn(&str) + Send + Sync + 'static> Subscriber for OnEvent<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level && metadata.target().starts_with("tokio_rdma")
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.level.into())
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        if line.0.contains(&format!("message={}", self.message)) {
            (self.callback)(&line.0);
        }
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Fails the completion queue first. Its receives are returned, but the device still has them.
// Shows S1.
#[test]
fn target_is_unreachable_before_its_completion_queue_knows_it() {
    bounded("target", LONG, || {
        let network = Network::new();
        let (_device, pd) = software(&network);
        let (own, other) = (queue(&pd), queue(&pd));
        let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
        let pool = Pool::new(&pd, 64, 8).unwrap();
        let key = DcKey(7);
        let known = DcTarget::builder(&pd, &srq).key(key).build().unwrap().address();
        let initiator = initiator_with_short_timeouts(&pd, &other);
        let mut receive = srq.recv(pool.copy_from(b"untouched").unwrap());
        network.control("torture0").unwrap().announce(AsyncEvent::CqError { cq: own.id() });
        let buffer = loop {
            poll_raw(&own);
            if let Poll::Ready(ended) = poll(&mut receive) {
                break ended.unwrap_err().into_buffer();
            }
        };
        let reached = Arc::new(AtomicBool::new(false));
        let on_event = OnEvent {
            message: "DC target changed state",
            level: Level::DEBUG,
            callback: {
                let reached = reached.clone();
                move |line: &str| {
                    let Some((_, digits)) = line.split_once("number=Some(") else { return };
                    let digits: String = digits
                        .trim_start_matches(|c: char| c != 'x')
                        .chars()
                        .skip(1)
                        .take_while(char::is_ascii_hexdigit)
                        .collect();
                    let number = Qpn(u32::from_str_radix(&digits, 16).unwrap());
                    let peer = initiator.peer(&DcAddress { number, ..known }).unwrap();
                    reached.store(true, Ordering::Relaxed);
                    let _ = poll(&mut initiator.to(&peer).send_inline(b"overwrite"));
                }
            },
        };
        let made = on_event.during(|| DcTarget::builder(&pd, &srq).key(key).build());
        assert!(made.is_err(), "its completion queue is dead");
        assert_eq!(&buffer[..], b"untouched", "a returned buffer was written");
        assert!(!reached.load(Ordering::Relaxed), "the target entered RTR");
    });
}

/// Sends a message while the target is being destroyed.
#[test]
fn acknowledged_message_is_not_lost_with_the_target() {
    bounded("target", LONG, || {
        let (_device, pd) = software(&Network::new());
        let (own, other) = (queue(&pd), queue(&pd));
        let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
        let pool = Pool::new(&pd, 64, 8).unwrap();
        let target = DcTarget::new(&pd, &srq).unwrap();
        let initiator = initiator_with_short_timeouts(&pd, &other);
        let peer = initiator.peer(&target.address()).unwrap();
        let mut receives: Vec<_> = (0..3).map(|_| srq.recv(pool.try_alloc(8).unwrap())).collect();
        torture::block_on(initiator.to(&peer).send_inline(b"first")).unwrap();
        let late = Arc::new(Mutex::new(None));
        let on_event = OnEvent {
            message: "completed",
            level: Level::TRACE,
            callback: {
                let (late, initiator, peer) = (late.clone(), initiator.clone(), peer.clone());
                move |_: &str| {
                    late.lock()
                        .unwrap()
                        .get_or_insert_with(|| initiator.to(&peer).send_inline(b"late"));
                }
            },
        };
        on_event.during(|| drop(target));
        let late =
            late.lock().unwrap().take().expect("dropping the target polls the first completion");
        let acknowledged = torture::block_on(late).is_ok();
        let arrived = receives.iter_mut().map(poll).filter(Poll::is_ready).count();
        assert_eq!(arrived, 1 + usize::from(acknowledged), "acknowledged: {acknowledged}");
    });
}

#[test]
fn next_target_finds_receives_after_targets_ended_under_load() {
    bounded("targets", 2 * LONG, || {
        let network = Network::new();
        let (_device, pd) = software(&network);
        let own = queue(&pd);
        let srq = SharedReceiveQueue::new(&pd, &own, 16, 1).unwrap();
        let pool = Pool::new(&pd, 64, 32).unwrap();
        let place: Arc<Mutex<Option<DcAddress>>> = Arc::default();
        let (acknowledged, arrived) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let sender = {
            let (pd, place, acknowledged, stop) =
                (pd.clone(), place.clone(), acknowledged.clone(), stop.clone());
            thread::spawn(move || {
                let initiator = initiator_with_short_timeouts(&pd, &queue(&pd));
                while !stop.load(Ordering::Relaxed) {
                    let address = *place.lock().unwrap();
                    let Some(address) = address else { continue };
                    let peer = initiator.peer(&address).unwrap();
                    while place.lock().unwrap().is_some_and(|now| now.number == address.number) {
                        match torture::block_on(initiator.to(&peer).send_inline(b"hello")) {
                            Ok(()) => _ = acknowledged.fetch_add(1, Ordering::Relaxed),
                            Err(_) => _ = initiator.repair().unwrap(),
                        }
                    }
                }
            })
        };
        let rounds = thread::spawn({
            let (pd, srq, stop) = (pd.clone(), srq.clone(), stop.clone());
            move || {
                for _ in 0..200 {
                    let target = DcTarget::new(&pd, &srq).unwrap();
                    *place.lock().unwrap() = Some(target.address());
                    thread::sleep(Duration::from_micros(500));
                    drop(target);
                }
                *place.lock().unwrap() = None;
                stop.store(true, Ordering::Relaxed);
            }
        });
        let mut receives: Vec<_> = (0..16).map(|_| srq.recv(pool.try_alloc(8).unwrap())).collect();
        while !sender.is_finished() || !rounds.is_finished() {
            for receive in &mut receives {
                if let Poll::Ready(received) = poll(receive) {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    *receive = srq.recv(received.unwrap().buffer);
                }
            }
            thread::yield_now();
        }
        sender.join().unwrap();
        rounds.join().unwrap();
        let left = receives.iter_mut().map(poll).filter(Poll::is_ready).count() as u64;
        let (sent, got) =
            (acknowledged.load(Ordering::Relaxed), arrived.load(Ordering::Relaxed) + left);
        assert!(sent > 100, "only {sent} messages were acknowledged");
        assert!(got >= sent, "{sent} acknowledged, {got} arrived");
    });
}

#[test]
fn peer_with_a_smaller_mtu_is_refused() {
    bounded("peer", LONG, || {
        let (_device, pd) = software(&Network::new());
        let completions = queue(&pd);
        let srq = SharedReceiveQueue::new(&pd, &completions, 8, 1).unwrap();
        let target = DcTarget::builder(&pd, &srq).mtu(Mtu::Mtu1024).build().unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 8], Access::REMOTE_ALL).unwrap();
        let small = DcInitiator::builder(&pd, &completions).mtu(Mtu::Mtu1024).build().unwrap();
        let large = DcInitiator::builder(&pd, &completions).mtu(Mtu::Mtu4096).build().unwrap();
        let peer = small.peer(&target.address()).unwrap();
        torture::block_on(small.to(&peer).write_inline(b"12345678", region.grant())).unwrap();
        let refused = torture::block_on(large.to(&peer).write_inline(b"12345678", region.grant()))
            .unwrap_err()
            .kind();
        assert!(matches!(refused, OpErrorKind::Limit(_)), "{refused:?}");
        assert_eq!(large.query().unwrap().0, QpState::Rts);
    });
}

/// Uses a peer with a wrong key. Each task repairs the initiator after a failure.
#[test]
fn every_operation_ends_while_its_initiator_is_reset_repeatedly() {
    for mode in Mode::ALL {
        for (flavour, slow) in [
            (Flavour::CurrentThread, false),
            (Flavour::MultiThread, false),
            (Flavour::MultiThread, true),
        ] {
            bounded("repair", 2 * LONG, move || {
                flavour.runtime().block_on(async {
                    let (device, pd) = software(&network(slow));
                    let completions = CompletionQueue::new(&device, mode.make()).unwrap();
                    let srq = SharedReceiveQueue::new(&pd, &completions, 8, 1).unwrap();
                    let target = DcTarget::new(&pd, &srq).unwrap();
                    let pool = Pool::new(&pd, 4096, 64).unwrap();
                    let region =
                        ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL).unwrap();
                    let initiator = DcInitiator::builder(&pd, &completions)
                        .max_send_wr(4)
                        .retries(short_timeouts())
                        .build()
                        .unwrap();
                    let good = initiator.peer(&target.address()).unwrap();
                    let wrong_key = DcKey(!target.address().key.0);
                    let bad =
                        initiator.peer(&DcAddress { key: wrong_key, ..target.address() }).unwrap();
                    let mut tasks = tokio::task::JoinSet::new();
                    for task in 0..8 {
                        let (initiator, good, bad, pool) =
                            (initiator.clone(), good.clone(), bad.clone(), pool.clone());
                        let grant = region.grant();
                        tasks.spawn(async move {
                            let mut done = [0_u32; 3];
                            for round in 0..150 {
                                let buffer = pool.copy_from(&[task as u8; 4000]).unwrap();
                                let peer = if task == 0 && round % 8 == 7 { &bad } else { &good };
                                let write = initiator.to(peer).write(buffer, grant);
                                if task == 5 && round % 3 == 0 {
                                    drop(write);
                                    continue;
                                }
                                match soon("a write", write).await {
                                    Ok(_) => done[0] += 1,
                                    Err(error) => {
                                        let kind = error.kind();
                                        // On a busy machine, the device's thread may not run in
                                        // time.
                                        let known = matches!(
                                            kind,
                                            OpErrorKind::Closed
                                                | OpErrorKind::Post(_)
                                                | OpErrorKind::State { .. }
                                        ) || kind.status()
                                            == Some(WcStatus::WR_FLUSH_ERR)
                                            || kind.status() == Some(WcStatus::RETRY_EXC_ERR)
                                                && slow
                                            || kind.status() == Some(WcStatus::REM_ACCESS_ERR)
                                                && task == 0;
                                        assert!(known, "{mode:?}: {kind:?}");
                                        done[1] += 1;
                                        initiator.repair().unwrap();
                                    }
                                }
                                if task == 7 && round % 16 == 15 {
                                    initiator.reset().unwrap();
                                    done[2] += 1;
                                }
                            }
                            done
                        });
                    }
                    let mut all = [0; 3];
                    while let Some(done) = tasks.join_next().await {
                        done.unwrap().iter().zip(&mut all).for_each(|(one, all)| *all += one);
                    }
                    assert!(all[0] > 100 && all[1] > 10, "{mode:?}: {all:?}");
                    initiator.repair().unwrap();
                    let word = region.grant().slice(..8).unwrap();
                    soon("a last write", initiator.to(&good).write_inline(b"12345678", word))
                        .await
                        .unwrap();
                    torture::eventually("buffers", || pool.available() == pool.total()).await;
                });
            });
        }
    }
}

/// Resets the initiator while parts of batches wait for a free slot.
#[test]
fn queued_batches_do_not_fail_an_initiator_that_is_reset() {
    for mode in Mode::ALL {
        bounded("batches", 2 * LONG, move || {
            Flavour::MultiThread.runtime().block_on(async {
                let (device, pd) = software(&Network::new());
                let completions = CompletionQueue::new(&device, mode.make()).unwrap();
                let srq = SharedReceiveQueue::new(&pd, &completions, 8, 1).unwrap();
                let target = DcTarget::new(&pd, &srq).unwrap();
                let pool = Pool::new(&pd, 64, 64).unwrap();
                let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                let initiator =
                    DcInitiator::builder(&pd, &completions).max_send_wr(4).build().unwrap();
                let peer = initiator.peer(&target.address()).unwrap();
                let stop = Arc::new(AtomicBool::new(false));
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..6 {
                    let (initiator, peer, pool, stop) =
                        (initiator.clone(), peer.clone(), pool.clone(), stop.clone());
                    let grant = region.grant();
                    tasks.spawn(async move {
                        let mut done = 0_u32;
                        while !stop.load(Ordering::Relaxed) {
                            let mut batch = Batch::new();
                            for _ in 0..3 {
                                batch.write(pool.copy_from(b"a word").unwrap(), grant);
                            }
                            let ended =
                                soon("a batch", initiator.to(&peer).post_batch(batch)).await;
                            done += u32::from(ended.is_ok());
                            if initiator.query().is_err() {
                                break;
                            }
                        }
                        done
                    });
                }
                let other = initiator.clone();
                tokio::task::spawn_blocking(move || {
                    for _ in 0..2000 {
                        other.reset().expect("a reset of a working initiator");
                    }
                })
                .await
                .unwrap();
                stop.store(true, Ordering::Relaxed);
                let mut done = 0;
                while let Some(more) = tasks.join_next().await {
                    done += more.unwrap();
                }
                initiator.repair().unwrap();
                soon("a write", initiator.to(&peer).write_inline(b"12345678", region.grant()))
                    .await
                    .unwrap();
                println!("{mode:?}: {done} batches");
            });
        });
    }
}

#[test]
fn dc_operations_end_in_any_drop_order() {
    for mode in Mode::ALL {
        for order in 0..120 {
            bounded("drop", LONG, move || {
                Flavour::MultiThread.runtime().block_on(async {
                    let network = network(order % 3 == 0);
                    let (device, pd) = software(&network);
                    let completions = CompletionQueue::new(&device, mode.make()).unwrap();
                    let sending = CompletionQueue::new(&device, mode.make()).unwrap();
                    let srq = SharedReceiveQueue::new(&pd, &completions, 8, 1).unwrap();
                    let target = DcTarget::new(&pd, &srq).unwrap();
                    let pool = Pool::new(&pd, 1 << 16, 32).unwrap();
                    let initiator = DcInitiator::builder(&pd, &sending)
                        .retries(short_timeouts())
                        .max_send_wr(4)
                        .build()
                        .unwrap();
                    let peer = initiator.peer(&target.address()).unwrap();
                    let receives: Vec<_> = (0..8)
                        .map(|_| tokio::spawn(srq.recv(pool.try_alloc(1 << 16).unwrap())))
                        .collect();
                    let sends: Vec<_> = (0..12)
                        .map(|_| {
                            tokio::spawn(
                                initiator.to(&peer).send(pool.copy_from(&[1; 1 << 16]).unwrap()),
                            )
                        })
                        .collect();
                    let mut things: Vec<Box<dyn std::any::Any + Send>> = vec![
                        Box::new(target),
                        Box::new(srq),
                        Box::new((completions, sending)),
                        Box::new((pd, device)),
                        Box::new((initiator, peer)),
                    ];
                    let mut rest = order;
                    while !things.is_empty() {
                        let at = rest % things.len();
                        rest /= things.len();
                        drop(things.swap_remove(at));
                        if order % 2 == 0 {
                            tokio::task::yield_now().await;
                        }
                    }
                    for send in sends {
                        _ = soon("a send", send).await.unwrap();
                    }
                    for receive in receives {
                        _ = soon("a receive", receive).await.unwrap();
                    }
                    torture::eventually("buffers", || pool.available() == pool.total()).await;
                });
            });
        }
    }
}

#[test]
fn lost_device_ends_its_dynamic_connections() {
    for mode in Mode::ALL {
        for at in 0..20_u64 {
            bounded("kill", LONG, move || {
                Flavour::MultiThread.runtime().block_on(async {
                    let network = network(at % 2 == 0);
                    let (device, pd) = software(&network);
                    let completions = CompletionQueue::new(&device, mode.make()).unwrap();
                    let srq = SharedReceiveQueue::new(&pd, &completions, 8, 1).unwrap();
                    let target = DcTarget::new(&pd, &srq).unwrap();
                    let pool = Pool::new(&pd, 1 << 14, 64).unwrap();
                    let initiator =
                        DcInitiator::builder(&pd, &completions).max_send_wr(4).build().unwrap();
                    let peer = initiator.peer(&target.address()).unwrap();
                    let receives: Vec<_> = (0..4)
                        .map(|_| {
                            let (srq, pool) = (srq.clone(), pool.clone());
                            tokio::spawn(async move {
                                let mut buffer = pool.try_alloc(1 << 14).unwrap();
                                loop {
                                    match srq.recv(buffer).await {
                                        Ok(received) => buffer = received.buffer,
                                        Err(error) => break error.kind(),
                                    }
                                }
                            })
                        })
                        .collect();
                    let sends: Vec<_> = (0..8)
                        .map(|_| {
                            let (initiator, peer, pool) =
                                (initiator.clone(), peer.clone(), pool.clone());
                            tokio::spawn(async move {
                                let mut buffer = pool.copy_from(&[1; 1 << 14]).unwrap();
                                loop {
                                    match initiator.to(&peer).send(buffer).await {
                                        Ok(back) => buffer = back,
                                        Err(error) => break error.kind(),
                                    }
                                }
                            })
                        })
                        .collect();
                    tokio::time::sleep(Duration::from_micros(300 * at)).await;
                    network.control("torture0").unwrap().kill();
                    for work in sends.into_iter().chain(receives) {
                        soon("an operation", work).await.unwrap();
                    }
                    assert!(initiator.repair().is_err());
                    torture::eventually("buffers", || pool.available() == pool.total()).await;
                });
            });
        }
    }
}

/// Polls the completion queue, which detects its failure.
fn poll_raw(queue: &CompletionQueue) {
    queue.verbs().poll(&mut [tokio_rdma::types::WorkCompletion::EMPTY]).ok();
}
