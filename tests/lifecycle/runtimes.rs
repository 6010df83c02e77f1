//! Operations driven by several runtimes on one completion queue, by a stopped one, or by none.

use std::cell::Cell;
use std::future::Future;
use std::net::IpAddr;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use crate::torture::{
    Flavour, LONG, Mode, block_on, bounded, connect, device, pair, slow_network, soon,
};
use tokio::runtime::Builder;
use tokio_rdma::cm::{self, ConnectConfig, ConnectError};
use tokio_rdma::error::NoRuntime;
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device,
    EstablishError, ExposedRegion, Listener, MessageError, Pool, QueuePair, RemoteRegion,
};

/// A connected pair on a slow network, so that operations wait.
struct Setup {
    ours: QueuePair,
    theirs: QueuePair,
    queue: CompletionQueue,
    pool: Pool,
    region: ExposedRegion,
}

impl Setup {
    fn new(mode: Mode) -> Self {
        let (device, pd) = device(&slow_network(3));
        let queue =
            CompletionQueue::builder(&device).capacity(2048).mode(mode.make()).build().unwrap();
        let (ours, theirs) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 64).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        Self { ours, theirs, queue, pool, region }
    }

    fn word(&self) -> RemoteRegion {
        self.region.grant().slice(0..8).unwrap()
    }

    async fn exchange(&self, rounds: u32) {
        for round in 0..rounds {
            let bytes = round.to_le_bytes();
            let receive = self.theirs.recv(self.pool.try_alloc(64).unwrap());
            let send = self.ours.send(self.pool.copy_from(&bytes).unwrap());
            send.await.unwrap();
            assert_eq!(receive.await.unwrap().buffer[..], bytes);
            let before = self.region.load(0).unwrap();
            assert_eq!(self.ours.fetch_add(self.word(), 1).await.unwrap(), before);
        }
    }
}

#[test]
fn thread_without_a_runtime_drives_its_own_operations() {
    for mode in Mode::ALL {
        bounded("no runtime", LONG, move || block_on(Setup::new(mode).exchange(50)));
    }
}

#[test]
fn runtime_without_an_io_driver_polls_for_completions() {
    for mode in Mode::ALL {
        bounded("no I/O driver", LONG, move || {
            let runtime = Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(soon("exchange", Setup::new(mode).exchange(50)));
        });
    }
}

#[test]
fn objects_work_after_their_first_runtime_is_dropped() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("a second runtime", 2 * LONG, move || {
            let setup = Setup::new(mode);
            for _ in 0..4 {
                let runtime = flavour.runtime();
                runtime.block_on(soon("exchange", setup.exchange(10)));
                let receive = setup.ours.recv(setup.pool.try_alloc(64).unwrap());
                let add = setup.ours.fetch_add(setup.word(), 1);
                runtime.spawn(async move {
                    let _ = add.await;
                    let _ = receive.await;
                });
                runtime.block_on(tokio::task::yield_now());
                drop(runtime);
                flavour.runtime().block_on(soon("exchange", setup.exchange(10)));
            }
            assert_eq!(setup.region.load(0), Ok(84));
        });
    }
}

#[test]
fn operation_moves_between_runtimes() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("moved", LONG, move || {
            let setup = Setup::new(mode);
            let mut receive = setup.theirs.recv(setup.pool.try_alloc(64).unwrap());
            for _ in 0..3 {
                flavour.runtime().block_on(async {
                    let waited = tokio::time::timeout(Duration::from_millis(1), &mut receive).await;
                    assert!(waited.is_err(), "nothing was sent");
                });
            }
            let sent = setup.ours.send(setup.pool.copy_from(b"late").unwrap());
            let received = flavour.runtime().block_on(soon("the receive", receive)).unwrap();
            assert_eq!(received.buffer[..], *b"late");
            flavour.runtime().block_on(soon("the send", sent)).unwrap();
        });
    }
}

// Shows C2.
#[test]
fn idle_runtime_blocks_no_other_on_the_same_queue() {
    for mode in Mode::ALL {
        bounded("a sleeping runtime", LONG, move || {
            let setup = Setup::new(mode);
            let asleep = Flavour::CurrentThread.runtime();
            let receive = setup.ours.recv(setup.pool.try_alloc(64).unwrap());
            let waiting = asleep.spawn(receive);
            // Registers the receive. The runtime then stays idle while the others work.
            asleep.block_on(tokio::task::yield_now());
            for flavour in Flavour::ALL {
                flavour.runtime().block_on(soon("exchange", setup.exchange(100)));
            }
            let sent = setup.theirs.send(setup.pool.copy_from(b"hello").unwrap());
            Flavour::CurrentThread.runtime().block_on(soon("send", sent)).unwrap();
            let received = asleep.block_on(soon("receive", waiting)).unwrap().unwrap();
            assert_eq!(received.buffer[..], *b"hello");
        });
    }
}

#[test]
fn two_runtimes_share_a_queue() {
    for mode in Mode::ALL {
        bounded("two runtimes", LONG, move || {
            let setup = Setup::new(mode);
            thread::scope(|scope| {
                for flavour in Flavour::ALL {
                    let pd = setup.ours.protection_domain();
                    let (ours, theirs) = pair(pd, &setup.queue);
                    let pool = Pool::new(pd, 64, 4).unwrap();
                    let region = ExposedRegion::new(pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                    let mine = Setup { ours, theirs, queue: setup.queue.clone(), pool, region };
                    scope.spawn(move || {
                        flavour.runtime().block_on(soon("exchange", mine.exchange(200)))
                    });
                }
            });
            assert_eq!(setup.queue.counters().waiting, 0);
        });
    }
}

/// Covers a recursion: Tokio wakes a task without budget, and the library's waker for the reactor
/// polls the completion channel inside `wake`.
#[test]
fn first_wait_without_coop_budget_does_not_recurse() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("no budget", LONG, move || {
            let setup = Setup::new(mode);
            flavour.runtime().block_on(async {
                let receive = setup.theirs.recv(setup.pool.try_alloc(64).unwrap());
                let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
                (0..1000).for_each(|number| sender.send(number).unwrap());
                while tokio::task::coop::has_budget_remaining() {
                    receiver.recv().await.unwrap();
                }
                let sent = setup.ours.send(setup.pool.copy_from(b"x").unwrap());
                assert_eq!(soon("the receive", receive).await.unwrap().len, 1);
                soon("the send", sent).await.unwrap();
            });
        });
    }
}

/// Waits in `Handle::block_on` while another thread drops the runtime.
#[test]
fn wait_outlives_the_runtime_of_its_reactor() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("a reactor that ends", LONG, move || {
            let (device, pd) = device(&slow_network(4));
            // Only the receive polls its completion queue.
            let [mine, other] =
                [mode, mode].map(|mode| CompletionQueue::new(&device, mode.make()).unwrap());
            let (ours, theirs) =
                (QueuePair::new(&pd, &other).unwrap(), QueuePair::new(&pd, &mine).unwrap());
            connect(&ours, &theirs);
            let pool = Pool::new(&pd, 64, 2).unwrap();
            let runtime = flavour.runtime();
            let mut receive = theirs.recv(pool.try_alloc(64).unwrap());
            let (handle, (waits, began)) = (runtime.handle().clone(), channel());
            let waiter = thread::spawn(move || {
                handle.block_on(async move {
                    let first = std::future::poll_fn(|context| {
                        let first = std::pin::Pin::new(&mut receive).poll(context);
                        std::task::Poll::Ready(first)
                    });
                    assert!(first.await.is_pending());
                    waits.send(()).unwrap();
                    receive.await
                })
            });
            began.recv().unwrap();
            drop(runtime);
            block_on(ours.send(pool.copy_from(b"still there").unwrap())).unwrap();
            assert_eq!(waiter.join().unwrap().unwrap().buffer[..], *b"still there");
        });
    }
}

/// Objects with which each awaitable call of the connection interfaces can be made.
struct Awaited {
    devices: [Device; 2],
    ip: IpAddr,
    listener: Listener,
    cm_listener: cm::Listener,
    request: cm::ConnectionRequest,
    refused: cm::ConnectionRequest,
    route: cm::Route,
    qps: [QueuePair; 2],
    link: cm::CmConnection,
    _peer: cm::CmConnection,
    _linked: [QueuePair; 2],
}

impl Awaited {
    async fn new() -> Self {
        let network = Network::new();
        let devices =
            ["active", "passive"].map(|name| Device::software_in(&network, name).unwrap());
        let ip = devices[1].default_path().unwrap().1.gid.to_ip();
        let listener = Listener::bind(&devices[1], (ip, 0)).await.unwrap();
        let cm_listener = cm::Listener::bind(&devices[1], (ip, 0)).await.unwrap();
        let options = ConnectConfig::default();
        let builders = devices.each_ref().map(|device| {
            let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
            QueuePair::builder(&device.protection_domain().unwrap(), &queue)
                .max_send_wr(8)
                .max_recv_wr(8)
        });
        let resolve = async || cm::resolve(&devices[0], cm_listener.local_addr()).await.unwrap();
        let active = async {
            let route = resolve().await;
            let qp = route.prepare(builders[0].clone()).build().unwrap();
            (route.connect(&qp, &options).await.unwrap(), qp)
        };
        let passive = async {
            let request = cm_listener.accept().await.unwrap();
            let qp = request.prepare(builders[1].clone()).build().unwrap();
            (request.accept(&qp, &options).await.unwrap(), qp)
        };
        let ((link, ours), (peer, theirs)) = tokio::join!(active, passive);
        let asking = || {
            let (device, to, builder) =
                (devices[0].clone(), cm_listener.local_addr(), builders[0].clone());
            tokio::spawn(async move {
                let route = cm::resolve(&device, to).await.unwrap();
                let qp = route.prepare(builder).build().unwrap();
                drop(route.connect(&qp, &ConnectConfig::default()).await);
            })
        };
        let _asking = [asking(), asking()];
        let (request, refused) =
            (cm_listener.accept().await.unwrap(), cm_listener.accept().await.unwrap());
        let route = resolve().await;
        let qps = [route.prepare(builders[0].clone()), request.prepare(builders[1].clone())];
        let qps = qps.map(|builder| builder.build().unwrap());
        let _linked = [ours, theirs];
        Self {
            devices,
            ip,
            listener,
            cm_listener,
            request,
            refused,
            route,
            qps,
            link,
            _peer: peer,
            _linked,
        }
    }

    /// Makes each call, and returns the runtime or driver that its error reports as missing.
    async fn missed(self) -> Vec<(&'static str, NoRuntime)> {
        fn of_cm<T>(result: Result<T, ConnectError>) -> NoRuntime {
            match result.err() {
                Some(ConnectError::NoRuntime(missing)) => missing,
                other => panic!("{other:?}"),
            }
        }
        fn of<T>(result: Result<T, EstablishError>) -> NoRuntime {
            match result.err() {
                Some(EstablishError::NoRuntime(missing)) => missing,
                other => panic!("{other:?}"),
            }
        }
        let ([device, passive], options, ip) = (&self.devices, ConnectConfig::default(), self.ip);
        let to = self.listener.local_addr().unwrap();
        let fresh = Device::software_in(&Network::new(), "fresh").unwrap();
        let make = |_: &cm::Route| panic!("no route without a runtime");
        vec![
            ("connect", of(Connection::connect(device, to).await)),
            ("connect by name", of(Connection::connect(device, "localhost:1").await)),
            ("bind", of(Listener::bind(passive, (ip, 0)).await)),
            (
                "bind on a device that has never connected",
                of(Listener::bind(&fresh, "127.0.0.1:0").await),
            ),
            ("accept", of(self.listener.accept().await)),
            ("request", of(self.listener.request().await)),
            ("cm connect", of_cm(cm::connect(device, to, &options, make).await)),
            ("cm resolve", of_cm(cm::resolve(device, to).await)),
            ("cm bind", of_cm(cm::Listener::bind(passive, (ip, 0)).await)),
            ("cm accept", of_cm(self.cm_listener.accept().await)),
            ("cm route", of_cm(self.route.connect(&self.qps[0], &options).await)),
            ("cm request", of_cm(self.request.accept(&self.qps[1], &options).await)),
            ("cm reject", of_cm(self.refused.reject(b"no").await)),
            ("cm disconnect", of_cm(self.link.disconnect().await)),
            ("cm drained", of_cm(self.link.drained().await)),
        ]
    }
}

fn establish() -> Result<[Connection; 2], EstablishError> {
    let pd = Device::software_in(&Network::new(), "prepared").unwrap().protection_domain().unwrap();
    let [a, b] = [(); 2].map(|()| Connection::prepare(&pd, &ConnectionConfig::default()).unwrap());
    let ends = [a.endpoint(), b.endpoint()];
    let hellos = [a.handshake(b"").unwrap(), b.handshake(b"").unwrap()];
    Ok([a.establish(&ends[1], &hellos[1])?, b.establish(&ends[0], &hellos[0])?])
}

#[test]
fn errors_name_the_missing_runtime_or_driver() {
    bounded("no runtime", LONG, || {
        let full = Flavour::MultiThread.runtime();
        let awaited = || full.block_on(Awaited::new());
        let check = |missed: Vec<(&str, NoRuntime)>, expected: NoRuntime| {
            missed.iter().for_each(|&(what, missing)| assert_eq!(missing, expected, "{what}"));
        };
        check(block_on(awaited().missed()), NoRuntime::Outside);
        assert_eq!(establish().unwrap_err(), EstablishError::NoRuntime(NoRuntime::Outside));
        let device = Device::software().unwrap();
        let kind = |result: std::io::Result<_>| result.map(drop).unwrap_err().kind();
        assert_eq!(kind(device.events()), std::io::ErrorKind::Unsupported);

        let without_io = Builder::new_current_thread().enable_time().build().unwrap();
        check(without_io.block_on(awaited().missed()), NoRuntime::Io);
        without_io
            .block_on(async { assert_eq!(kind(device.events()), std::io::ErrorKind::Unsupported) });
    });
}

thread_local! {
    static REPORTED: Cell<usize> = const { Cell::new(0) };
}

#[test]
fn panic_hook_runs_at_most_once_for_a_runtime_without_io() {
    bounded("no I/O driver", LONG, || {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            REPORTED.set(REPORTED.get() + 1);
            hook(panic);
        }));
        let (full, without_io) =
            (Flavour::MultiThread.runtime(), Builder::new_current_thread().enable_time().build());
        let (without_io, device) = (without_io.unwrap(), Device::software().unwrap());
        for _ in 0..2 {
            let awaited = full.block_on(Awaited::new());
            assert!(!without_io.block_on(awaited.missed()).is_empty());
            without_io.block_on(async { device.events().map(drop).unwrap_err() });
            without_io.block_on(soon("exchange", Setup::new(Mode::Event).exchange(2)));
        }
        assert_eq!(REPORTED.get(), 1, "Tokio offers no check for an I/O driver but a panic");
    });
}

#[test]
fn deadlines_work_in_a_runtime_without_a_time_driver() {
    bounded("no time driver", LONG, || {
        Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
            let (device, _) = device(&Network::new());
            let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
            let brief = ConnectionConfig::default().close_timeout(BRIEF);
            let connect = Connection::connect_with(&device, listener.local_addr().unwrap(), &brief);
            let (a, b) = tokio::join!(connect, listener.accept());
            let (a, b) = (a.unwrap(), b.unwrap());
            a.send("hello").await.unwrap();
            assert_eq!(b.recv().await.unwrap().unwrap(), "hello");
            assert_eq!(a.close().await, CLOSE_TIMEOUT);
        });
    });
}

const BRIEF: Duration = Duration::from_millis(50);

const CLOSE_TIMEOUT: Result<(), MessageError> =
    Err(MessageError::Closed(CloseReason::CloseTimeout));

/// The place to which a future moves after its first poll, and the state of its first runtime.
#[derive(Debug, Clone, Copy)]
enum Moved {
    /// Another runtime. The first is dropped.
    Dropped,
    /// Another runtime. The first is alive but not driven.
    Asleep,
    /// No runtime. The first is dropped.
    Outside,
}

/// Polls `future` once in a runtime, then to completion elsewhere.
fn moved<F: Future>(future: F, to: Moved) -> F::Output {
    let (mut future, first) = (Box::pin(future), Flavour::CurrentThread.runtime());
    let polled =
        first.block_on(std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))));
    assert!(polled.is_pending(), "{to:?}: ready at the first poll");
    let second = Flavour::CurrentThread.runtime();
    match to {
        Moved::Dropped => {
            drop(first);
            second.block_on(future)
        }
        Moved::Asleep => second.block_on(future),
        Moved::Outside => {
            drop(first);
            block_on(future)
        }
    }
}

#[test]
fn close_moved_to_another_runtime_keeps_its_deadline() {
    for to in [Moved::Dropped, Moved::Asleep, Moved::Outside] {
        bounded("a close that moves", LONG, move || {
            let home = Flavour::MultiThread.runtime();
            let config = ConnectionConfig::default().close_timeout(BRIEF);
            let (a, _b) = home.block_on(async { crate::connected::pair(&config) });
            // The peer never finishes, so the deadline ends the close.
            assert_eq!(moved(a.close(), to), CLOSE_TIMEOUT, "{to:?}");
        });
    }
}

#[test]
fn moved_connect_continues_or_reports_a_missing_runtime() {
    for to in [Moved::Dropped, Moved::Asleep, Moved::Outside] {
        bounded("a connect that moves", LONG, move || {
            let home = Flavour::MultiThread.runtime();
            // Nothing else reads the events of these devices.
            let network = slow_network(6);
            let [one, two] =
                ["one", "two"].map(|name| Device::software_in(&network, name).unwrap());
            let ip = two.default_path().unwrap().1.gid.to_ip();
            let listener = home.block_on(Listener::bind(&two, (ip, 0))).unwrap();
            let to_there = listener.local_addr().unwrap();
            // Accepts late, so that the connect is still pending when it moves.
            let accepting = home.spawn(async move {
                tokio::time::sleep(BRIEF).await;
                listener.accept().await
            });
            let connected = moved(Connection::connect(&one, to_there), to);
            if let Moved::Outside = to {
                assert_eq!(connected.unwrap_err(), EstablishError::NoRuntime(NoRuntime::Outside));
            } else {
                connected.unwrap();
            }
            // The peer was closed with its runtime, so the accept may skip it.
            accepting.abort();
        });
    }
}

#[test]
fn moved_accept_continues_or_reports_a_missing_runtime() {
    for to in [Moved::Dropped, Moved::Asleep, Moved::Outside] {
        bounded("an accept that moves", LONG, move || {
            let (home, (device, _)) = (Flavour::MultiThread.runtime(), device(&Network::new()));
            let listener = home.block_on(Listener::bind(&device, "127.0.0.1:0")).unwrap();
            let to_there = listener.local_addr().unwrap();
            let connect = async || Connection::connect(&device, to_there).await;
            let (mut accept, first) =
                (Box::pin(listener.accept()), Flavour::CurrentThread.runtime());
            let polled = first.block_on(std::future::poll_fn(|context| {
                Poll::Ready(accept.as_mut().poll(context))
            }));
            assert!(polled.is_pending());
            // The software device answers the request before it is accepted.
            let peer = home.block_on(connect()).unwrap();
            let accepted = match to {
                Moved::Dropped => {
                    drop(first);
                    Flavour::CurrentThread.runtime().block_on(accept)
                }
                Moved::Asleep => Flavour::CurrentThread.runtime().block_on(accept),
                Moved::Outside => {
                    let refused = block_on(accept).unwrap_err();
                    assert_eq!(refused, EstablishError::NoRuntime(NoRuntime::Outside));
                    home.block_on(listener.accept())
                }
            };
            assert_eq!(
                accepted.unwrap().peer_addr().unwrap(),
                peer.local_addr().unwrap(),
                "{to:?}"
            );
        });
    }
}

#[test]
fn moved_disconnected_future_resolves() {
    for to in [Moved::Dropped, Moved::Asleep, Moved::Outside] {
        bounded("a link whose future moves", LONG, move || {
            let home = Flavour::MultiThread.runtime();
            let Awaited { link, _peer: peer, .. } = home.block_on(Awaited::new());
            // Now only the runtimes that poll the future read events.
            drop(home);
            let ended = thread::spawn(move || {
                thread::sleep(BRIEF);
                drop(peer);
            });
            assert_eq!(moved(link.disconnected(), to), cm::Disconnection::Peer);
            ended.join().unwrap();
        });
    }
}

#[test]
fn connection_works_outside_of_any_runtime() {
    bounded("outside", LONG, || {
        let runtime = Flavour::MultiThread.runtime();
        let [a, b] = runtime.block_on(async { establish().unwrap() });
        block_on(a.send(vec![1; 20_000])).unwrap();
        assert_eq!(block_on(b.recv()).unwrap().unwrap().len(), 20_000);
        block_on(a.flush()).unwrap();
        let peer = runtime.spawn(async move { b.close().await });
        block_on(a.close()).unwrap();
        runtime.block_on(peer).unwrap().unwrap();

        let Awaited { link, _peer: peer, .. } = runtime.block_on(Awaited::new());
        runtime.block_on(peer.disconnect()).unwrap();
        assert_eq!(block_on(link.disconnected()), cm::Disconnection::Peer);
    });
}

#[test]
fn paused_clock_does_not_affect_connections() {
    // Long enough for an idle runtime to advance its paused clock before an answer arrives.
    const DELAY: Duration = Duration::from_millis(20);
    // In cooperative mode, waiting operations keep the runtime busy, so its paused clock stands
    // still.
    for mode in [Mode::Event, Mode::BusyPoll, Mode::Hybrid] {
        bounded("paused clock", LONG, move || {
            let faults = tokio_rdma::software::Faults::none().delay(DELAY..2 * DELAY);
            let network = Network::with_faults(1, faults);
            let options = tokio_rdma::op::RetryConfig {
                timeout: tokio_rdma::types::AckTimeout::from_code(20),
                ..Default::default()
            };
            let config = ConnectionConfig::default().mode(mode.make()).retries(options);
            let config = config.receive_buffers(1).stall_timeout(Some(Duration::from_secs(1)));
            let runtime =
                Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let [one, two] =
                    ["one", "two"].map(|name| Device::software_in(&network, name).unwrap());
                let ip = two.default_path().unwrap().1.gid.to_ip();
                let listener = Listener::bind_with(&two, (ip, 0), &config).await.unwrap();
                let connect =
                    Connection::connect_with(&one, listener.local_addr().unwrap(), &config);
                let (a, b) = tokio::join!(connect, listener.accept());
                let (a, b) = (a.unwrap(), b.unwrap());
                // The sender waits for buffers, but for less than the stall timeout in real time.
                let sending = async {
                    for _ in 0..6 {
                        a.send(vec![1; 20_000]).await.unwrap();
                    }
                    a.flush().await.unwrap();
                };
                let receiving = async {
                    for _ in 0..6 {
                        assert_eq!(b.recv().await.unwrap().unwrap().len(), 20_000);
                    }
                };
                tokio::join!(sending, receiving);
                // The clock advances by hours while pings wait for answers.
                tokio::time::sleep(Duration::from_secs(3600)).await;
                let wait = thread::spawn(|| thread::sleep(5 * DELAY));
                while !wait.is_finished() {
                    tokio::time::sleep(Duration::from_secs(3600)).await;
                }
                b.send("still there").await.unwrap();
                assert_eq!(a.recv().await.unwrap().unwrap(), "still there");
                let (a_end, b_end) = tokio::join!(a.close(), b.close());
                a_end.unwrap();
                b_end.unwrap();
            });
        });
    }
}

#[test]
fn keepalive_uses_real_time_under_a_paused_clock() {
    bounded("silence", LONG, || {
        let network = Network::new();
        let times = [50, 100].map(Duration::from_millis);
        let config = ConnectionConfig::default().keepalive(Some((times[0], times[1])));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let [(_one, one), (_two, two)] = crate::connected::two(&network);
            let (a, _b) = crate::connected::pair_in(&one, &two, &config, &config);
            tokio::time::pause();
            let (paused, start) = (tokio::time::Instant::now(), std::time::Instant::now());
            network.control("two").unwrap().set_port(false);
            let error = a.recv().await.unwrap_err();
            let silent = tokio_rdma::CloseReason::Silent;
            assert_eq!(error, tokio_rdma::MessageError::Closed(silent));
            assert!(start.elapsed() >= times[1], "closed before the keepalive timeout");
            // Each timer that fires advances the clock. A timer that fires early and is set again
            // would advance it by hours.
            let advanced = paused.elapsed();
            assert!(advanced < Duration::from_secs(60), "timers were set for {advanced:?}");
        });
    });
}
