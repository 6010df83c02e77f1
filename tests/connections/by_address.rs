//! Connections by address: establishment, refusal and disconnection.
//!
//! Uses the device under test, or the software device where a test needs device failures or several
//! addresses.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::StreamExt;

use crate::connected;
use crate::torture::{
    self, Flavour, HANG, LONG, Mode, bounded, eventually, hardware, scaled, soon,
};
use tokio_rdma::cm::{
    self, CmConnection, ConnectAttempt, ConnectConfig, ConnectError, ConnectStep,
    ConnectionRequest, Disconnection, ListenConfig, Listener, RejectReason,
};
use tokio_rdma::error::LimitError;
use tokio_rdma::op::QueuePairBuilder;
use tokio_rdma::peers::{Reconnect, ReconnectPolicy, ReconnectState};
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AckTimeout, QpAttr, QpState, Rkey, TransitionError, Transport};
use tokio_rdma::{
    Access, CompletionQueue, Connection, ConnectionConfig, Device, Pool, ProtectionDomain,
    QueuePair, RdmaStream, RemoteRegion, SetupError,
};

#[derive(Clone)]
struct Side {
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
}

impl Side {
    fn new(device: &Device) -> Self {
        Self::with_capacity(device, 8192)
    }

    /// Makes a side with a small completion queue. A queue pair reserves four entries, and a leaked
    /// one never releases them.
    fn with_capacity(device: &Device, completions: u32) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::builder(device).capacity(completions).build().unwrap();
        let pool = Pool::builder(&pd).buffer_size(256).buffers(64).growing(true).build().unwrap();
        Self { device: device.clone(), pd, queue, pool }
    }

    fn builder(&self) -> tokio_rdma::op::QueuePairBuilder {
        QueuePair::builder(&self.pd, &self.queue).max_send_wr(2).max_recv_wr(2)
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.ip(), 0)
    }

    fn ip(&self) -> IpAddr {
        self.device.default_address().unwrap()
    }

    /// Returns true if private data is not padded.
    fn is_iwarp(&self) -> bool {
        self.device.attr().is_iwarp()
    }

    async fn listen(&self) -> Listener {
        Listener::bind(&self.device, self.address()).await.unwrap()
    }

    async fn connect(
        &self,
        to: SocketAddr,
        options: &ConnectConfig,
    ) -> Result<(QueuePair, CmConnection), ConnectError> {
        cm::connect(&self.device, to, options, |route| route.prepare(self.builder()).build()).await
    }

    async fn accept(
        &self,
        request: ConnectionRequest,
        options: &ConnectConfig,
    ) -> Result<(QueuePair, CmConnection), ConnectError> {
        let queue_pair = request.prepare(self.builder()).build().unwrap();
        let link = request.accept(&queue_pair, options).await?;
        Ok((queue_pair, link))
    }

    async fn exchange(&self, ours: &QueuePair, peer: &Self, theirs: &QueuePair) {
        let receives = (
            ours.recv(self.pool.alloc(64).await.unwrap()),
            theirs.recv(peer.pool.alloc(64).await.unwrap()),
        );
        let sends = (
            ours.send(self.pool.copy_from(b"from ours").unwrap()),
            theirs.send(peer.pool.copy_from(b"from theirs").unwrap()),
        );
        let (a, b) = soon("receives", async { tokio::join!(receives.0, receives.1) }).await;
        assert_eq!(&a.unwrap().buffer[..11], b"from theirs");
        assert_eq!(&b.unwrap().buffer[..9], b"from ours");
        sends.0.await.unwrap();
        sends.1.await.unwrap();
    }
}

fn sides() -> (Side, Side) {
    match hardware() {
        Some(name) => {
            let open = || {
                Side::new(&Device::open(&name).unwrap_or_else(|error| panic!("{name}: {error}")))
            };
            (open(), open())
        }
        None => of_network(&Network::new()),
    }
}

fn of_network(network: &Network) -> (Side, Side) {
    let open = |name| Side::new(&Device::software_in(network, name).unwrap());
    (open("active"), open("passive"))
}

fn run<F: Future<Output = ()>>(
    what: &'static str,
    scenario: impl Fn() -> F + Send + Copy + 'static,
) {
    connected::each(what, Flavour::ALL.map(|flavour| (Mode::Event, flavour)), scenario);
}

/// Returns whether the error reports a mismatch, in `property` if given.
fn is_mismatch(error: &ConnectError, property: Option<&str>) -> bool {
    let ConnectError::Setup { error, .. } = error else { return false };
    matches!(
        **error,
        SetupError::Mismatch { what, .. } if property.is_none_or(|property| property == what)
    )
}

fn state(queue_pair: &QueuePair) -> QpState {
    queue_pair.query().unwrap().0
}

/// Connects two sides and returns the active end and the passive end.
async fn connected(a: &Side, b: &Side) -> ((QueuePair, CmConnection), (QueuePair, CmConnection)) {
    connected_with(a, b, &ConnectConfig::default()).await
}

async fn connected_with(
    a: &Side,
    b: &Side,
    options: &ConnectConfig,
) -> ((QueuePair, CmConnection), (QueuePair, CmConnection)) {
    let listener = b.listen().await;
    let passive = async { b.accept(listener.accept().await?, options).await };
    soon("connection", async {
        tokio::try_join!(a.connect(listener.local_addr(), options), passive)
    })
    .await
    .unwrap()
}

#[test]
fn connect_exchanges_private_data_and_yields_working_queue_pairs() {
    run("connect", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let address = listener.local_addr();
        assert_eq!(address.ip(), b.ip());
        assert_ne!(address.port(), 0);
        let passive = async {
            let request = listener.accept().await.unwrap();
            let padded = if b.is_iwarp() { 8 } else { 56 };
            assert_eq!(
                (&request.private_data()[..8], request.private_data().len()),
                (&b"question"[..], padded)
            );
            assert!(request.private_data()[8..].iter().all(|&byte| byte == 0));
            assert_eq!((request.peer_addr().ip(), request.local_addr()), (a.ip(), address));
            assert!(request.reads_issued() > 0 && request.reads_served() > 0);
            b.accept(request, &ConnectConfig::default().private_data(*b"answer").reads(3))
                .await
                .unwrap()
        };
        let options = ConnectConfig::default().private_data(*b"question");
        let active = async { a.connect(address, &options).await.unwrap() };
        let ((ours, link), (theirs, other)) =
            soon("connection", async { tokio::join!(active, passive) }).await;
        let padded = if a.is_iwarp() { 6 } else { 196 };
        assert_eq!(
            (&link.private_data()[..6], link.private_data().len()),
            (&b"answer"[..], padded)
        );
        assert_eq!((link.peer_addr(), other.local_addr()), (address, address));
        assert_eq!(other.peer_addr(), link.local_addr());
        assert!(link.is_connected() && other.is_connected());
        a.exchange(&ours, &b, &theirs).await;
        if a.is_iwarp() {
            // It has neither packet numbers nor a path MTU.
            return;
        }
        let (ours, theirs) = (ours.query().unwrap().1, theirs.query().unwrap().1);
        // Each end serves at least as many READs as the other issues. SoftRoCE rounds up.
        assert!(
            ours.max_rd_atomic.unwrap() <= 4 && theirs.max_rd_atomic.unwrap() <= 4,
            "{ours:?} {theirs:?}"
        );
        assert!(
            ours.max_rd_atomic <= theirs.max_dest_rd_atomic
                && theirs.max_rd_atomic <= ours.max_dest_rd_atomic
        );
        assert_eq!((ours.sq_psn, ours.path_mtu), (theirs.rq_psn, theirs.path_mtu));
    });
}

#[test]
fn connect_without_a_listener_is_refused() {
    run("refused", || async {
        let (a, b) = sides();
        let address = b.listen().await.local_addr();
        // The listener is dropped, so its address is unused.
        let options = ConnectConfig::default();
        let in_process = hardware().is_none();
        let (queue_pair, error) = loop {
            let route = cm::resolve(&a.device, address).await.unwrap();
            let queue_pair = route.prepare(a.builder()).build().unwrap();
            let error = soon("refusal", route.connect(&queue_pair, &options)).await.unwrap_err();
            // The kernel rejects requests that arrive while it destroys the listener.
            if in_process || !matches!(error, ConnectError::Rejected { .. }) {
                break (queue_pair, error);
            }
        };
        assert_eq!(error, ConnectError::Refused { address, in_process });
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::ConnectionRefused);
        assert_eq!(state(&queue_pair), QpState::Err);
    });
}

#[test]
fn address_of_a_dropped_listener_can_be_bound_at_once() {
    run("bound again", || async {
        let (a, b) = sides();
        // Both are the same adapter, opened twice, and compete for its addresses.
        let other = if hardware().is_some() { &a.device } else { &b.device };
        let mut listener = b.listen().await;
        for round in 0..scaled(100) {
            let address = listener.local_addr();
            drop(listener);
            let device = [other, &b.device][round as usize % 2];
            // A bind whose future is dropped may be at work on its thread, or have bound already.
            let polls = [0, 1, 2, 4][round as usize / 2 % 4];
            let mut dropped = Box::pin(Listener::bind(device, address));
            for _ in 0..polls {
                if dropped.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(dropped);
            listener = Listener::bind(device, address).await.unwrap();
            assert_eq!(listener.local_addr(), address);
        }
    });
}

#[test]
fn rejected_or_dropped_request_notifies_the_peer() {
    run("rejected", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let options = ConnectConfig::default();
        let passive = async {
            listener.accept().await.unwrap().reject(b"not today").await.unwrap();
            drop(listener.accept().await.unwrap());
            let long = [7; 149];
            let error = listener.accept().await.unwrap().reject(&long).await.unwrap_err();
            assert!(matches!(
                error,
                ConnectError::Limit(limit) if limit.asked == 149 && limit.allowed == 148
            ));
        };
        let active = async {
            let mut said = Vec::new();
            for _ in 0..3 {
                match a.connect(listener.local_addr(), &options).await {
                    Err(ConnectError::Rejected {
                        reason: RejectReason::CONSUMER,
                        private_data,
                        ..
                    }) => {
                        said.push(private_data);
                    }
                    other => panic!("{other:?}"),
                }
            }
            said
        };
        let (said, ()) = soon("rejections", async { tokio::join!(active, passive) }).await;
        let padded = if a.is_iwarp() { 9 } else { 148 };
        assert_eq!((&said[0][..9], said[0].len()), (&b"not today"[..], padded));
        assert!(said[1..].iter().flatten().all(|&byte| byte == 0));
    });
}

#[test]
fn bind_errors_name_the_address() {
    run("addresses", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let address = listener.local_addr();
        let error = Listener::bind(&b.device, address).await.unwrap_err();
        assert!(
            matches!(&error, ConnectError::AddressInUse { address: at, .. } if *at == address),
            "{error:?}"
        );
        assert_eq!(error.io_kind(), std::io::ErrorKind::AddrInUse);
        drop(listener);
        // A provider whose calls may block releases the address asynchronously.
        let again = soon("the address", async {
            loop {
                match Listener::bind(&b.device, address).await {
                    Err(ConnectError::AddressInUse { .. }) => tokio::task::yield_now().await,
                    other => break other.unwrap(),
                }
            }
        });
        assert_eq!(again.await.local_addr(), address);
        // A documentation address (RFC 5737), assigned to no host.
        let foreign: SocketAddr = "192.0.2.1:7471".parse().unwrap();
        let error = Listener::bind(&a.device, foreign).await.unwrap_err();
        assert_eq!(
            error,
            ConnectError::AddressNotAvailable {
                address: foreign,
                source: None,
                step: ConnectStep::Listen
            }
        );
    });
}

#[test]
fn address_in_use_error_names_the_device_of_the_listener() {
    run("names", || async {
        let address: SocketAddr = ([127, 0, 0, 1], 7471).into();
        let devices =
            ["first", "second"].map(|name| Device::software_in(&Network::new(), name).unwrap());
        let mut listeners = Vec::new();
        for device in &devices {
            listeners.push(Listener::bind(device, address).await.unwrap());
        }
        for device in &devices {
            let error = Listener::bind(device, address).await.unwrap_err();
            assert_eq!(
                error,
                ConnectError::AddressInUse { address, device: Some(device.name().to_owned()) }
            );
        }
        // The address is free in this network, although it is in use in the other.
        drop(listeners.remove(0));
        let _first = Listener::bind(&devices[0], address).await.unwrap();
    });
}

#[test]
fn each_connect_error_names_the_address_and_the_step() {
    run("named failures", || async {
        let network = Network::new();
        let (a, b) = of_network(&network);
        let listener = b.listen().await;
        let (taken, foreign) =
            (listener.local_addr(), "192.0.2.1:7471".parse::<SocketAddr>().unwrap());
        let unused = SocketAddr::new(taken.ip(), if taken.port() == 1 { 2 } else { 1 });
        let options = ConnectConfig::default();
        let failing =
            cm::connect(&a.device, taken, &options, |_| Err(SetupError::Closed)).await.map(drop);
        let datagram =
            |route: &cm::Route| route.prepare(a.builder()).transport(Transport::Ud).build();
        let other_queue_pair = cm::connect(&a.device, taken, &options, datagram).await.map(drop);
        let failures: [(Result<(), ConnectError>, ConnectStep, SocketAddr); 6] = [
            (Listener::bind(&b.device, taken).await.map(drop), ConnectStep::Listen, taken),
            (Listener::bind(&b.device, foreign).await.map(drop), ConnectStep::Listen, foreign),
            (cm::resolve(&a.device, foreign).await.map(drop), ConnectStep::Resolve, foreign),
            (a.connect(unused, &options).await.map(drop), ConnectStep::Response, unused),
            (failing, ConnectStep::Prepare, taken),
            (other_queue_pair, ConnectStep::Prepare, taken),
        ];
        for (result, step, address) in failures {
            let error = result.expect_err("it fails");
            assert_eq!((error.step(), error.address()), (Some(step), Some(address)), "{error}");
            assert!(
                error.to_string().starts_with(&ConnectAttempt { step, address }.to_string()),
                "{error}"
            );
        }
        let taken = Listener::bind(&b.device, taken).await.unwrap_err();
        assert!(
            taken.to_string().contains(&format!(
                "in use by another listener of this process, on device {}",
                b.device.name()
            )),
            "{taken}"
        );
    });
}

#[test]
fn device_within_a_process_names_the_remedy_without_a_listener() {
    run("wrong device", || async {
        let (a, _) = of_network(&Network::new());
        let (device, options, config) =
            (&a.device, ConnectConfig::default(), ConnectionConfig::default());
        // The listener would be one of another process.
        for address in ["127.0.0.1:7471", "[::1]:7471", "192.0.2.1:7471"] {
            let address: SocketAddr = address.parse().unwrap();
            let by_cm =
                cm::connect(device, address, &options, |route| route.prepare(a.builder()).build());
            let again = async {
                let policy = ReconnectPolicy::default();
                let client = Reconnect::new(device, address, &config, policy).unwrap();
                let mut states = client.states();
                loop {
                    if let Some(ReconnectState::Waiting { cause, .. }) = states.next().await {
                        return cause.to_string();
                    }
                }
            };
            let texts = [
                soon("cm", by_cm).await.unwrap_err().to_string(),
                soon("messages", Connection::connect(device, address))
                    .await
                    .unwrap_err()
                    .to_string(),
                soon("bytes", RdmaStream::connect(device, address)).await.unwrap_err().to_string(),
                soon("again", again).await,
            ];
            for text in texts {
                assert!(text.contains(&address.to_string()), "{text}");
                assert!(text.contains("the device reaches no other process"), "{text}");
                assert!(text.contains("Device::open_default_to"), "{text}");
            }
        }
    });
}

#[test]
fn unassigned_address_is_unreachable() {
    run("unreachable", || async {
        let (a, _) = of_network(&Network::new());
        let address: SocketAddr = "192.0.2.1:7471".parse().unwrap();
        let error = cm::resolve(&a.device, address).await.unwrap_err();
        assert_eq!(error, ConnectError::Resolve { address, errno: 113, in_process: true });
        assert!(error.to_string().contains("Device::open_default_to"), "{error}");
        assert_eq!(error.io_kind(), std::io::ErrorKind::HostUnreachable);
    });
}

#[test]
fn source_address_is_seen_by_the_peer_or_refused() {
    run("source", || async {
        let (a, b) = sides();
        let (listener, options) = (b.listen().await, ConnectConfig::default());
        let address = listener.local_addr();
        let passive = async {
            let request = listener.accept().await.unwrap();
            assert_eq!(request.peer_addr().ip(), a.ip());
            b.accept(request, &options).await.unwrap()
        };
        let from = options.clone().source(a.ip());
        let active = async { a.connect(address, &from).await.unwrap() };
        let ((_, link), _) = soon("connection", async { tokio::join!(active, passive) }).await;
        assert_eq!(link.local_addr().ip(), a.ip());

        // A documentation address (RFC 5737), assigned to no host.
        let foreign: SocketAddr = "192.0.2.1:0".parse().unwrap();
        let error = cm::resolve_with(&a.device, address, &options.clone().source(foreign.ip()))
            .await
            .unwrap_err();
        let source = Some(foreign.ip());
        assert_eq!(
            error,
            ConnectError::AddressNotAvailable { address, source, step: ConnectStep::Resolve }
        );
        let text = format!(
            "resolving a route to {address}: the source address 192.0.2.1 does not belong to the \
             device"
        );
        assert_eq!((error.to_string(), error.address()), (text, Some(address)));
        let other = if address.is_ipv4() { "::1" } else { "127.0.0.1" };
        let error = cm::resolve_with(&a.device, address, &options.source(other.parse().unwrap()))
            .await
            .unwrap_err();
        assert!(is_mismatch(&error, None), "{error:?}");
    });
}

// Shows E2.
#[test]
fn connect_without_an_answer_times_out() {
    run("timeout", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let after = Duration::from_millis(300);
        let route = cm::resolve(&a.device, listener.local_addr()).await.unwrap();
        let queue_pair = route.prepare(a.builder()).build().unwrap();
        let error =
            soon("deadline", route.connect(&queue_pair, &ConnectConfig::default().timeout(after)))
                .await
                .unwrap_err();
        let address = listener.local_addr();
        assert_eq!(error, ConnectError::TimedOut { address, step: ConnectStep::Response, after });
        assert_eq!(state(&queue_pair), QpState::Err);
        // The first request is cancelled.
        let options = ConnectConfig::default().private_data(*b"second");
        let passive = async {
            loop {
                // The cancellation may arrive after the request was accepted.
                let request = listener.accept().await.unwrap();
                if request.private_data().starts_with(b"second") {
                    break b.accept(request, &ConnectConfig::default()).await.unwrap();
                }
            }
        };
        let active = async { a.connect(listener.local_addr(), &options).await.unwrap() };
        soon("second", async { tokio::join!(active, passive) }).await;
    });
}

#[test]
fn cancelled_request_cannot_be_accepted() {
    run("taken back", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let route = cm::resolve(&a.device, listener.local_addr()).await.unwrap();
        let ours = route.prepare(a.builder()).build().unwrap();
        let options = ConnectConfig::default();
        let request = {
            let mut connecting = std::pin::pin!(route.connect(&ours, &options));
            tokio::select! {
                result = &mut connecting => panic!("{result:?}"),
                request = soon("request", listener.accept()) => request.unwrap(),
            }
        };
        // The connect future was dropped after it had sent its request.
        assert_eq!(state(&ours), QpState::Err);
        let theirs = request.prepare(b.builder()).build().unwrap();
        let error = soon("answer", request.accept(&theirs, &options)).await.unwrap_err();
        let reasons =
            [RejectReason::TIMEOUT, RejectReason::CONSUMER, RejectReason::INVALID_COMM_ID];
        assert!(
            matches!(&error, ConnectError::Rejected { reason, .. } if reasons.contains(reason)),
            "{error:?}"
        );
        assert_eq!(state(&theirs), QpState::Err);
    });
}

#[test]
fn dropped_accepts_lose_no_request_and_reject_once_begun() {
    run("cancelled", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        for _ in 0..20 {
            let waiting = tokio::time::timeout(Duration::ZERO, listener.accept());
            assert!(waiting.await.is_err(), "no request was sent");
        }
        let options = ConnectConfig::default();
        let active = a.connect(listener.local_addr(), &options);
        let passive = async {
            let request = loop {
                // Most of these accepts are dropped before the request arrives.
                if let Ok(request) =
                    tokio::time::timeout(Duration::from_micros(50), listener.accept()).await
                {
                    break request.unwrap();
                }
            };
            let theirs = request.prepare(b.builder()).build().unwrap();
            {
                let mut accepting = Box::pin(request.accept(&theirs, &options));
                // One poll sends the reply.
                let polled =
                    std::future::poll_fn(|context| Poll::Ready(accepting.as_mut().poll(context)))
                        .await;
                assert!(polled.is_pending() || matches!(polled, Poll::Ready(Ok(_))));
            }
            assert_eq!(state(&theirs), QpState::Err);
        };
        let (result, ()) = soon("end", async { tokio::join!(active, passive) }).await;
        match result {
            Err(ConnectError::Rejected { .. } | ConnectError::Disconnected { .. }) => {}
            // The reply arrived before the rejection, so the peer sees a disconnect.
            Ok((_, link)) => {
                assert_eq!(soon("disconnection", link.disconnected()).await, Disconnection::Peer)
            }
            Err(other) => panic!("{other:?}"),
        }
    });
}

#[test]
fn disconnect_by_either_end_flushes_both_queue_pairs() {
    run("disconnect", || async {
        let (a, b) = sides();
        for active_first in [true, false] {
            let ((ours, link), (theirs, other)) = connected(&a, &b).await;
            a.exchange(&ours, &b, &theirs).await;
            let pending = [
                ours.recv(a.pool.alloc(8).await.unwrap()),
                theirs.recv(b.pool.alloc(8).await.unwrap()),
            ];
            let (first, second) = if active_first { (&link, &other) } else { (&other, &link) };
            soon("disconnect", first.disconnect()).await.unwrap();
            assert_eq!(soon("local", first.disconnected()).await, Disconnection::Local);
            assert_eq!(soon("peer", second.disconnected()).await, Disconnection::Peer);
            assert!(!first.is_connected() && !second.is_connected());
            first.disconnect().await.unwrap();
            second.disconnect().await.unwrap();
            for receive in pending {
                if hardware().is_none() {
                    assert!(soon("flush", receive).await.is_err());
                }
            }
            assert_eq!((state(&ours), state(&theirs)), (QpState::Err, QpState::Err));
            if hardware().is_none() {
                soon("drained", async { tokio::try_join!(first.drained(), second.drained()) })
                    .await
                    .unwrap();
            }
        }
    });
}

#[test]
fn both_ends_disconnect_at_once() {
    run("simultaneous disconnect", || async {
        let (a, b) = sides();
        let ((_ours, link), (_theirs, other)) = connected(&a, &b).await;
        let (first, second) =
            soon("disconnects", async { tokio::join!(link.disconnect(), other.disconnect()) })
                .await;
        first.unwrap();
        second.unwrap();
        assert!(!link.is_connected() && !other.is_connected());
    });
}

#[test]
fn dropped_connection_disconnects_the_peer() {
    run("drop", || async {
        let (a, b) = sides();
        let ((ours, link), (theirs, other)) = connected(&a, &b).await;
        drop(link);
        assert_eq!(state(&ours), QpState::Err);
        assert_eq!(soon("disconnection", other.disconnected()).await, Disconnection::Peer);
        eventually("the peer's queue pair", || state(&theirs) == QpState::Err).await;
    });
}

#[test]
fn dropped_listener_rejects_requests_and_keeps_connections() {
    run("listener", || async {
        let (a, b) = sides();
        let (listener, options) = (b.listen().await, ConnectConfig::default());
        let address = listener.local_addr();
        let passive = async { b.accept(listener.accept().await?, &options).await };
        let (active, passive) =
            soon("first", async { tokio::try_join!(a.connect(address, &options), passive) })
                .await
                .unwrap();
        let mut waiting = Box::pin(a.connect(address, &options));
        let request = tokio::select! {
            result = &mut waiting => panic!("{result:?}"),
            request = soon("request", listener.accept()) => request.unwrap(),
        };
        drop(request);
        assert!(matches!(soon("rejection", waiting).await, Err(ConnectError::Rejected { .. })));
        let late = async {
            let result = a.connect(address, &options).await;
            assert!(
                matches!(result, Err(ConnectError::Rejected { .. } | ConnectError::Refused { .. })),
                "{:?}",
                result.err()
            );
        };
        let dropped = async {
            tokio::task::yield_now().await;
            drop(listener);
        };
        soon("late", async { tokio::join!(late, dropped) }).await;
        assert!(active.1.is_connected() && passive.1.is_connected());
        a.exchange(&active.0, &b, &passive.0).await;
    });
}

#[test]
fn unsuitable_private_data_and_queue_pairs_are_refused_unchanged() {
    run("misfits", || async {
        let (a, b) = sides();
        let listener = b.listen().await;
        let address = listener.local_addr();
        let to = || cm::resolve(&a.device, address);
        let fresh = |route: &cm::Route| route.prepare(a.builder()).build().unwrap();

        let route = to().await.unwrap();
        let queue_pair = fresh(&route);
        let error = route
            .connect(&queue_pair, &ConnectConfig::default().private_data([1; 57]))
            .await
            .unwrap_err();
        assert!(
            matches!(error, ConnectError::Limit(limit) if (limit.asked, limit.allowed) == (57, 56))
        );
        assert_eq!(state(&queue_pair), QpState::Init);

        let route = to().await.unwrap();
        let datagrams = route.prepare(a.builder()).transport(Transport::Ud).build().unwrap();
        let error = route.connect(&datagrams, &ConnectConfig::default()).await.unwrap_err();
        let property = "transports of the queue pair and the connection manager";
        assert!(is_mismatch(&error, Some(property)), "{error:?}");

        let route = to().await.unwrap();
        queue_pair.modify(&QpAttr::to_state(QpState::Err)).unwrap();
        let error = route.connect(&queue_pair, &ConnectConfig::default()).await.unwrap_err();
        let expected = TransitionError::NotInState { claimed: QpState::Init, actual: QpState::Err };
        let attempt = Some(ConnectAttempt { step: ConnectStep::Prepare, address });
        let prepare = |error: SetupError| ConnectError::Setup { attempt, error: error.into() };
        assert_eq!(error, prepare(SetupError::Transition(expected)));

        let route = to().await.unwrap();
        let foreign = b.builder().build().unwrap();
        let error = route.connect(&foreign, &ConnectConfig::default()).await.unwrap_err();
        assert_eq!(error, prepare(SetupError::Foreign { what: "queue pair" }));
        let route = to().await.unwrap();
        let (port, gid) = a.device.default_path().unwrap();
        match port.gids.iter().find(|other| other.gid != gid.gid) {
            None => assert!(hardware().is_none() || port.gids.len() == 1),
            Some(other) => {
                let elsewhere = a.builder().source(route.port(), other.index).build().unwrap();
                let error = route.connect(&elsewhere, &ConnectConfig::default()).await.unwrap_err();
                assert!(is_mismatch(&error, None), "{error:?}");
            }
        }
        // None of the connects has sent a request.
        assert!(tokio::time::timeout(Duration::from_millis(20), listener.accept()).await.is_err());
    });
}

fn probing(interval: Duration) -> ConnectConfig {
    ConnectConfig::default().retries(connected::patient()).keepalive(Some(interval))
}

#[test]
fn keepalive_detects_a_lost_peer_of_an_idle_connection() {
    run("keepalive", || async {
        let network = Network::new();
        let (a, b) = of_network(&network);
        let (listener, plain) = (b.listen().await, ConnectConfig::default());
        let options = probing(Duration::from_millis(20));
        let passive = async { b.accept(listener.accept().await?, &plain).await };
        let ends = async { tokio::try_join!(a.connect(listener.local_addr(), &options), passive) };
        let ((ours, link), (theirs, peer)) = soon("connection", ends).await.unwrap();
        let waits = ours.recv(a.pool.alloc(64).await.unwrap());
        eventually("probes", || ours.send_counters().posted >= 3).await;
        assert!(link.is_connected() && peer.is_connected());
        assert_eq!(theirs.receive_counters().posted, 0);
        // The peer vanishes without a disconnect.
        network.control("passive").unwrap().set_port(false);
        let error = soon("the receive", waits).await.unwrap_err();
        assert_eq!(error.kind().status(), Some(tokio_rdma::types::WcStatus::WR_FLUSH_ERR));
        assert_eq!(soon("the end", link.disconnected()).await, Disconnection::Silent);
        assert_eq!(state(&ours), QpState::Err);
        // Without keepalive, the peer notices nothing.
        assert!(peer.is_connected() && state(&theirs) == QpState::Rts);
    });
}

#[test]
fn refused_keepalive_probe_disconnects_with_probe_failed() {
    run("keepalive refused", || async {
        let (a, b) = of_network(&Network::new());
        let (listener, options) = (b.listen().await, probing(Duration::from_millis(1)));
        let closed =
            |side: &Side| QueuePair::builder(&side.pd, &side.queue).access(Access::REMOTE_READ);
        let passive = async {
            let request = listener.accept().await?;
            let qp = request.prepare(closed(&b)).build()?;
            request.accept(&qp, &ConnectConfig::default()).await.map(|link| (qp, link))
        };
        let ends = async { tokio::try_join!(a.connect(listener.local_addr(), &options), passive) };
        let ((ours, link), (_theirs, _peer)) = soon("connection", ends).await.unwrap();
        assert_eq!(soon("the end", link.disconnected()).await, Disconnection::ProbeFailed);
        assert_eq!(state(&ours), QpState::Err);
    });
}

#[test]
fn keepalive_ends_the_connection_after_other_work_failed() {
    run("keepalive behind work", || async {
        let network = Network::new();
        let (a, b) = of_network(&network);
        let (listener, plain) = (b.listen().await, ConnectConfig::default());
        let options = probing(Duration::from_millis(20));
        let passive = async { b.accept(listener.accept().await?, &plain).await };
        let ends = async { tokio::try_join!(a.connect(listener.local_addr(), &options), passive) };
        let ((ours, link), (_theirs, peer)) = soon("connection", ends).await.unwrap();
        network.control("passive").unwrap().set_port(false);
        // The next probe waits until this send is no longer in flight.
        let error =
            soon("a send", ours.send(a.pool.copy_from(b"lost").unwrap())).await.unwrap_err();
        assert_eq!(error.kind().status(), Some(tokio_rdma::types::WcStatus::RETRY_EXC_ERR));
        let end = soon("the end", link.disconnected()).await;
        assert!(matches!(end, Disconnection::ProbeFailed | Disconnection::Silent), "{end:?}");
        // The disconnect reaches the peer once its port is up again.
        let short = tokio::time::timeout(Duration::from_millis(50), link.disconnect()).await;
        assert!(short.is_err(), "the peer cannot have answered: {short:?}");
        assert!(peer.is_connected());
        network.control("passive").unwrap().set_port(true);
        assert_eq!(soon("the disconnection", peer.disconnected()).await, Disconnection::Peer);
        soon("the reply", link.disconnect()).await.unwrap();
    });
}

#[test]
fn keepalive_detects_a_queue_pair_broken_by_the_peer() {
    run("keepalive of a broken queue pair", || async {
        let network = Network::new();
        let (a, b) = of_network(&network);
        let (listener, plain) = (b.listen().await, ConnectConfig::default());
        let options = probing(Duration::from_millis(20));
        let passive = async { b.accept(listener.accept().await?, &options).await };
        let ends = async { tokio::try_join!(a.connect(listener.local_addr(), &plain), passive) };
        let ((ours, _link), (theirs, server)) = soon("connection", ends).await.unwrap();
        // The passive end has no work in flight, and the killed device sends no disconnect.
        let wrong = RemoteRegion::new(0x1000, 8, Rkey(0x1234_5678));
        soon("a READ", ours.read(a.pool.alloc(8).await.unwrap(), wrong)).await.unwrap_err();
        network.control("active").unwrap().kill();
        assert_eq!(soon("the end", server.disconnected()).await, Disconnection::ProbeFailed);
        assert_eq!(state(&theirs), QpState::Err);
    });
}

#[test]
fn keepalive_with_one_send_slot_lets_work_proceed() {
    run("keepalive beside work", || async {
        let (a, b) = of_network(&Network::new());
        let (listener, options) = (b.listen().await, probing(Duration::from_millis(1)));
        let small = |side: &Side| {
            QueuePair::builder(&side.pd, &side.queue).max_send_wr(1).max_recv_wr(1).max_inline(0)
        };
        let active = cm::connect(&a.device, listener.local_addr(), &options, |route| {
            route.prepare(small(&a)).build()
        });
        let passive = async {
            let request = listener.accept().await?;
            let qp = request.prepare(small(&b)).build()?;
            Ok((request.accept(&qp, &options).await?, qp))
        };
        let ((ours, link), (peer, theirs)) =
            soon("connection", async { tokio::try_join!(active, passive) }).await.unwrap();
        for round in 0..20 {
            a.exchange(&ours, &b, &theirs).await;
            let posted = ours.send_counters().posted;
            if round % 5 == 0 {
                eventually("a probe", || ours.send_counters().posted > posted).await;
            }
        }
        assert!(link.is_connected() && peer.is_connected());
        soon("disconnect", link.disconnect()).await.unwrap();
        assert_eq!(soon("disconnection", peer.disconnected()).await, Disconnection::Peer);
        assert_eq!(link.disconnected().await, Disconnection::Local);
    });
}

#[test]
fn invalid_keepalive_settings_are_refused_by_name() {
    run("keepalive settings", || async {
        let (a, b) = of_network(&Network::new());
        let listener = b.listen().await;
        let refused = async |interval, builder: QueuePairBuilder, timeout: u8| {
            let transport = tokio_rdma::op::RetryConfig {
                timeout: AckTimeout::from_code(timeout),
                ..Default::default()
            };
            let options = ConnectConfig::default().retries(transport).keepalive(Some(interval));
            let to = listener.local_addr();
            let asked = cm::connect(&a.device, to, &options, |route| {
                route.prepare(builder.clone()).build()
            });
            match soon("refusal", asked).await.map(drop) {
                Err(ConnectError::Setup { error, .. }) => *error,
                other => panic!("{other:?}"),
            }
        };
        let least = |field| SetupError::TooSmall { field, asked: 0, least: 1 };
        assert_eq!(
            refused(Duration::from_micros(999), a.builder(), 14).await,
            least("keepalive in milliseconds")
        );
        let none = QueuePair::builder(&a.pd, &a.queue).max_send_wr(0);
        assert_eq!(
            refused(Duration::from_secs(1), none, 14).await,
            least("max_send_wr with keepalive")
        );
        let endless = "timeout with keepalive, code of ibv_modify_qp(3)";
        assert_eq!(refused(Duration::from_secs(1), a.builder(), 0).await, least(endless));
    });
}

#[test]
fn invalid_connection_settings_are_refused_and_not_adjusted() {
    run("settings", || async {
        let (a, b) = sides();
        let none =
            Listener::bind_with(&b.device, b.address(), &ListenConfig::default().backlog(0)).await;
        let least = SetupError::TooSmall { field: "backlog", asked: 0, least: 1 };
        assert_eq!(
            none.map(drop).unwrap_err(),
            ConnectError::Setup { attempt: None, error: least.into() }
        );
        let attr = a.device.attr();
        let most = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom);
        let listener = b.listen().await;
        let too_many = ConnectConfig::default().reads(most + 1);
        let refused = LimitError { field: "reads", asked: (most + 1).into(), allowed: most.into() };
        let error = soon("refusal", a.connect(listener.local_addr(), &too_many))
            .await
            .map(drop)
            .unwrap_err();
        assert_eq!(error, ConnectError::Limit(refused));
        let options = ConnectConfig::default().reads(most);
        let passive = async { b.accept(listener.accept().await?, &options).await };
        let ends = async { tokio::try_join!(a.connect(listener.local_addr(), &options), passive) };
        let ((ours, _link), _theirs) = soon("connection", ends).await.unwrap();
        assert_eq!(ours.query().unwrap().1.max_rd_atomic, Some(most));
    });
}

#[test]
fn thousand_simultaneous_connects_are_each_accepted_once() {
    bounded("storm", 5 * LONG, || {
        for backlog in [1024, 16] {
            if backlog == 16 && hardware().is_some() {
                torture::skipped("a small backlog: the kernel counts only requests not read yet");
                continue;
            }
            Flavour::MultiThread.runtime().block_on(storm(scaled(1000) as u32, backlog));
        }
    });
}

async fn storm(count: u32, backlog: u32) {
    let (a, b) = sides();
    let options = ListenConfig::default().backlog(backlog);
    let listener = Arc::new(Listener::bind_with(&b.device, b.address(), &options).await.unwrap());
    let address = listener.local_addr();
    let patient = ConnectConfig::default().timeout(HANG);
    let acceptors: Vec<_> = (0..8)
        .map(|_| {
            let (listener, b, patient) = (listener.clone(), b.clone(), patient.clone());
            tokio::spawn(async move {
                let mut links = Vec::new();
                loop {
                    let request = listener.accept().await.unwrap();
                    let number = request.private_data()[..4].to_vec();
                    if number == [0xff; 4] {
                        return links;
                    }
                    let options = patient.clone().private_data(number);
                    links.push(b.accept(request, &options).await.unwrap());
                }
            })
        })
        .collect();
    let connectors: Vec<_> = (0..count)
        .map(|number| {
            let (a, options) = (a.clone(), patient.clone().private_data(number.to_be_bytes()));
            tokio::spawn(async move {
                let (queue_pair, link) = a.connect(address, &options).await.unwrap();
                assert_eq!(link.private_data()[..4], number.to_be_bytes());
                (queue_pair, link)
            })
        })
        .collect();
    let mut links = Vec::new();
    for connector in connectors {
        links.push(soon("connector", connector).await.unwrap());
    }
    for _ in &acceptors {
        let last = a.connect(address, &patient.clone().private_data([0xff; 4])).await;
        assert!(matches!(last, Err(ConnectError::Rejected { .. })));
    }
    let mut accepted = 0;
    let mut theirs = Vec::new();
    for acceptor in acceptors {
        let links = soon("acceptor", acceptor).await.unwrap();
        accepted += links.len();
        theirs.extend(links);
    }
    assert_eq!((accepted, links.len()), (count as usize, count as usize));
    assert!(links.iter().chain(&theirs).all(|(_, link)| link.is_connected()));
}

#[test]
fn host_names_and_ipv6_addresses_reach_the_listener() {
    run("names", || async {
        let (a, b) = of_network(&Network::new());
        for bound in ["127.0.0.1:0", "[::1]:0", "localhost:0", "[::]:0", "0.0.0.0:0"] {
            let listener = Listener::bind(&b.device, bound).await.unwrap();
            let port = listener.local_addr().port();
            let hosts: &[&str] = match bound {
                // Not every machine resolves `localhost` to ::1.
                "[::1]:0" => &["::1"],
                "[::]:0" => &["localhost", "::1", "127.0.0.1", "::ffff:127.0.0.1"],
                "0.0.0.0:0" => &["localhost", "127.0.0.1"],
                _ => &["localhost"],
            };
            let own = bound.contains("[::]") || bound.starts_with("0.0.0.0");
            let of_device = b.ip().to_string();
            for host in hosts.iter().copied().chain(own.then_some(of_device.as_str())) {
                let options = ConnectConfig::default();
                let passive =
                    async { b.accept(listener.accept().await.unwrap(), &options).await.unwrap() };
                let active = async {
                    cm::connect(&a.device, (host, port), &options, |route| {
                        route.prepare(a.builder()).build()
                    })
                    .await
                    .unwrap_or_else(|error| panic!("{host} of {bound}: {error}"))
                };
                let (ours, theirs) =
                    soon("connection", async { tokio::join!(active, passive) }).await;
                assert_eq!(ours.1.peer_addr().ip().to_canonical(), theirs.1.local_addr().ip());
                a.exchange(&ours.0, &b, &theirs.0).await;
            }
        }
        for host in ["no.such.host.invalid:1", "no port"] {
            let error = cm::resolve(&a.device, host).await.unwrap_err();
            match &error {
                ConnectError::Lookup { .. } => assert!(error.to_string().contains(host), "{error}"),
                other => panic!("{other:?}"),
            }
        }
        // Nearly always, the time is over before the other thread has the answer.
        let options = ConnectConfig::default().resolve_timeout(Duration::ZERO);
        let host = "no.such.host.invalid:1";
        let late = async {
            loop {
                let error = cm::resolve_with(&a.device, host, &options).await.unwrap_err();
                if error.io_kind() == std::io::ErrorKind::TimedOut {
                    break error.to_string();
                }
            }
        };
        let expected = format!("looking up the host name of \"{host}\": timed out after 0ns");
        assert_eq!(soon("a lookup that takes too long", late).await, expected);
    });
}

#[test]
fn lost_device_ends_listeners_connections_and_handshakes() {
    run("lost", || async {
        let network = Network::new();
        let (a, b) = of_network(&network);
        // Both the handshake and the disconnect of the active device wait as long for an answer.
        let options = ConnectConfig::default().timeout(Duration::from_secs(3));
        let ((_ours, link), (_theirs, other)) = connected_with(&a, &b, &options).await;
        let listener = b.listen().await;
        let route = cm::resolve(&a.device, listener.local_addr()).await.unwrap();
        let queue_pair = route.prepare(a.builder()).build().unwrap();
        let handshake = route.connect(&queue_pair, &options);
        let kill = async {
            let request = listener.accept().await.unwrap();
            network.control("passive").unwrap().kill();
            let error = listener.accept().await.unwrap_err();
            drop(request);
            error
        };
        let (handshake, error) = soon("kill", async { tokio::join!(handshake, kill) }).await;
        assert!(matches!(error, ConnectError::DeviceRemoved { .. }), "{error:?}");
        assert!(
            matches!(handshake, Err(ConnectError::TimedOut { step: ConnectStep::Response, .. })),
            "{:?}",
            handshake.err()
        );
        assert_eq!(soon("removal", other.disconnected()).await, Disconnection::DeviceRemoved);
        soon("drained", other.drained()).await.unwrap();
        assert!(link.is_connected(), "the active device is not affected");
        let error = cm::Listener::bind(&b.device, b_address()).await.unwrap_err();
        assert!(
            matches!(error, ConnectError::Verb { .. } | ConnectError::DeviceRemoved { .. }),
            "{error:?}"
        );
        // The disconnect ends after its retransmissions or at the deadline.
        assert!(matches!(
            soon("disconnect", link.disconnect()).await,
            Ok(()) | Err(ConnectError::TimedOut { step: ConnectStep::Disconnect, .. })
        ));
    });
}

fn b_address() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn connections_are_established_despite_packet_faults() {
    bounded("faults", 5 * LONG, || {
        let seed = torture::Seed::new("--test connections by_address");
        let faults = Faults::none().loss(0.1).duplicate(0.1).reorder(0.1).corrupt(0.05);
        let faults = faults.delay(Duration::ZERO..Duration::from_micros(200));
        let network = Network::with_faults(seed.value, faults);
        Flavour::MultiThread.runtime().block_on(async {
            let (a, b) = of_network(&network);
            let listener = Arc::new(b.listen().await);
            let (address, options) =
                (listener.local_addr(), ConnectConfig::default().timeout(HANG));
            let passive = {
                let (listener, b, options) = (listener.clone(), b.clone(), options.clone());
                tokio::spawn(async move {
                    let mut all = Vec::new();
                    loop {
                        let request = listener.accept().await.unwrap();
                        let number = request.private_data()[..4].to_vec();
                        if number == [0xff; 4] {
                            return all;
                        }
                        let (b, options) = (b.clone(), options.clone().private_data(number));
                        // The accept of a late duplicate of a request fails.
                        all.push(tokio::spawn(
                            async move { b.accept(request, &options).await.ok() },
                        ));
                    }
                })
            };
            let active: Vec<_> = (0..60_u32)
                .map(|number| {
                    let (a, options) =
                        (a.clone(), options.clone().private_data(number.to_be_bytes()));
                    tokio::spawn(async move {
                        let (queue_pair, link) = a.connect(address, &options).await.unwrap();
                        assert_eq!(link.private_data()[..4], number.to_be_bytes());
                        drop(queue_pair);
                        link.disconnect().await.unwrap();
                    })
                })
                .collect();
            for connection in active {
                soon("connection", connection).await.unwrap();
            }
            let last = a.connect(address, &options.clone().private_data([0xff; 4])).await;
            assert!(matches!(last, Err(ConnectError::Rejected { .. })), "{:?}", last.err());
            let (mut served, all) = (0, soon("acceptor", passive).await.unwrap());
            for accepted in all {
                if let Some((_, link)) = soon("accepted", accepted).await.unwrap() {
                    soon("disconnection", link.disconnected()).await;
                    served += 1;
                }
            }
            assert_eq!(served, 60);
            // Each fault affects 5 to 10 % of about 240 packets.
            let counters = network.counters();
            let each = [counters.lost, counters.duplicated, counters.reordered, counters.corrupted];
            assert!(each.iter().all(|&count| count > 0), "{counters:?}");
        });
    });
}

#[test]
fn repeated_connections_leak_no_descriptor_or_address() {
    bounded("churn", 5 * LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (a, b) = sides();
            let (a, b) = (Side::with_capacity(&a.device, 64), Side::with_capacity(&b.device, 64));
            let listener = b.listen().await;
            let (address, options) = (listener.local_addr(), ConnectConfig::default());
            let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let mut before = None;
            for round in 0..scaled(1000) {
                let passive = async { b.accept(listener.accept().await?, &options).await };
                let (ours, theirs) = soon("connect", async {
                    tokio::try_join!(a.connect(address, &options), passive)
                })
                .await
                .unwrap();
                if round % 100 == 0 {
                    a.exchange(&ours.0, &b, &theirs.0).await;
                }
                if round % 2 == 0 {
                    soon("disconnect", ours.1.disconnect()).await.unwrap();
                    soon("disconnection", theirs.1.disconnected()).await;
                }
                drop((ours, theirs));
                if round == 10 {
                    before = Some(descriptors());
                }
            }
            // Other tests of this process open descriptors at the same time.
            if let Some(before) = before {
                let slack = 256;
                assert!(descriptors() <= before + slack, "{} of {before}", descriptors());
            }
        });
    });
}

/// Polls the future, and drops it instead of a poll after the given number.
async fn polled_at_most<T>(mut polls: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = Some(Box::pin(future));
    std::future::poll_fn(|context| {
        if polls == 0 {
            future = None;
            return Poll::Ready(None);
        }
        polls -= 1;
        future.as_mut().unwrap().as_mut().poll(context).map(Some)
    })
    .await
}

// Shows E2.
#[test]
fn cancelled_connects_and_accepts_hang_nothing_and_fail_their_queue_pairs() {
    bounded("giving up", 5 * LONG, || {
        let seed = torture::Seed::new("--test connections by_address");
        for (number, flavour) in Flavour::ALL.into_iter().enumerate() {
            let mut random = fastrand::Rng::with_seed(seed.value.wrapping_add(number as u64));
            flavour.runtime().block_on(async {
                let (a, b) = sides();
                // Suffices for two queue pairs per side, and for some that are not destroyed yet.
                let (a, b) =
                    (Side::with_capacity(&a.device, 64), Side::with_capacity(&b.device, 64));
                let listener = b.listen().await;
                let (address, options) = (listener.local_addr(), ConnectConfig::default());
                let mut outcomes = [0; 2];
                for _ in 0..scaled(400) {
                    let mut patience = || Duration::from_micros(random.u64(..2_000));
                    let (our_patience, their_patience) = (patience(), patience());
                    // A fast connection ends before the shortest timeout of Tokio, 1 ms.
                    let polls = random.u32(..16);
                    let (theirs, ours) = (Mutex::new(None), Mutex::new(None));
                    let active = polled_at_most(polls, async {
                        let made = cm::connect(&a.device, address, &options, |route| {
                            let queue_pair = route.prepare(a.builder()).build()?;
                            *ours.lock().unwrap() = Some(queue_pair.clone());
                            Ok(queue_pair)
                        });
                        tokio::time::timeout(our_patience, made).await.ok()
                    });
                    let passive = tokio::time::timeout(their_patience, async {
                        let request = listener.accept().await?;
                        let queue_pair = request.prepare(b.builder()).build().unwrap();
                        *theirs.lock().unwrap() = Some(queue_pair.clone());
                        request.accept(&queue_pair, &options).await
                    });
                    let (active, passive) =
                        soon("both", async { tokio::join!(active, passive) }).await;
                    let active = active.flatten().map(|made| made.map(|(_, link)| link));
                    for (link, queue_pair) in [
                        (active, ours.into_inner().unwrap()),
                        (passive.ok(), theirs.into_inner().unwrap()),
                    ] {
                        let ready = matches!(&link, Some(Ok(link)) if link.is_connected());
                        outcomes[usize::from(ready)] += 1;
                        if let Some(queue_pair) = queue_pair.filter(|_| !ready) {
                            assert_eq!(state(&queue_pair), QpState::Err);
                        }
                        drop(link);
                    }
                }
                assert!(outcomes[0] > 0, "no future was cancelled: {outcomes:?}");
                let late = async {
                    loop {
                        // Cancelled requests may still be queued.
                        let request = listener.accept().await.unwrap();
                        if request.private_data().starts_with(b"last") {
                            break b.accept(request, &options).await.unwrap();
                        }
                    }
                };
                let last = ConnectConfig::default().private_data(*b"last");
                let (ours, theirs) =
                    soon("last", async { tokio::join!(a.connect(address, &last), late) }).await;
                a.exchange(&ours.unwrap().0, &b, &theirs.0).await;
            });
        }
    });
}

#[test]
fn connection_works_in_a_runtime_other_than_its_first() {
    bounded("runtimes", LONG, || {
        let (first, second) = (Flavour::CurrentThread.runtime(), Flavour::MultiThread.runtime());
        let (a, b) = sides();
        let ((ours, link), (theirs, other)) = first.block_on(connected(&a, &b));
        drop(first);
        second.block_on(async {
            a.exchange(&ours, &b, &theirs).await;
            let waiting = tokio::spawn(async move { other.disconnected().await });
            soon("disconnect", link.disconnect()).await.unwrap();
            assert_eq!(soon("other", waiting).await.unwrap(), Disconnection::Peer);
        });
    });
}

/// A waker that polls its future inside `wake`, as some executors do.
struct Inline {
    future: Mutex<Option<Pin<Box<dyn Future<Output = Disconnection> + Send>>>>,
    ended: Mutex<Option<Disconnection>>,
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let Some(mut future) = self.future.lock().unwrap().take() else { return };
        match future.as_mut().poll(&mut Context::from_waker(&self.clone().into())) {
            Poll::Ready(how) => *self.ended.lock().unwrap() = Some(how),
            Poll::Pending => *self.future.lock().unwrap() = Some(future),
        }
    }
}

#[test]
fn waker_may_poll_its_future_inline() {
    run("inline", || async {
        let (a, b) = sides();
        let ((_ours, link), (_theirs, other)) = connected(&a, &b).await;
        let everything = async move {
            let how = other.disconnected().await;
            other.disconnect().await.unwrap();
            drop(other);
            how
        };
        let inline = Arc::new(Inline {
            future: Mutex::new(Some(Box::pin(everything))),
            ended: Mutex::default(),
        });
        inline.clone().wake();
        soon("disconnect", link.disconnect()).await.unwrap();
        eventually("the end", || inline.ended.lock().unwrap().is_some()).await;
        assert_eq!(*inline.ended.lock().unwrap(), Some(Disconnection::Peer));
    });
}

#[test]
fn connection_futures_are_send() {
    fn send<T: Send>(_: T) {}
    fn sync<T: Send + Sync + Unpin>() {}
    sync::<(Listener, ConnectionRequest, cm::Route, CmConnection, ConnectError)>();
    let (a, _) = of_network(&Network::new());
    let options = ConnectConfig::default();
    send(cm::connect(&a.device, b_address(), &options, |route| route.prepare(a.builder()).build()));
    send(Listener::bind(&a.device, b_address()));
}
