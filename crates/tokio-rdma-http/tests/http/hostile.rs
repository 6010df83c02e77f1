//! Clients that vanish, reset, hang or do not read.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use futures::FutureExt;
use http_body_util::BodyExt;
use hyper::Request;
use hyper::client::conn::http2;
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio_rdma::RdmaStream;

use crate::{Devices, config, endless, pattern, run, soon};

/// Counts handlers that run.
#[derive(Clone)]
struct Running(watch::Sender<usize>);

impl Running {
    fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    fn enter(&self) -> impl Drop + Send + use<> {
        struct Left(watch::Sender<usize>);
        impl Drop for Left {
            fn drop(&mut self) {
                self.0.send_modify(|running| *running -= 1);
            }
        }
        self.0.send_modify(|running| *running += 1);
        Left(self.0.clone())
    }

    /// Waits until as many handlers run.
    async fn reach(&self, number: usize) {
        let mut changes = self.0.subscribe();
        soon("handlers", changes.wait_for(|running| *running == number)).await.unwrap();
    }
}

const LONG: usize = 64 << 10;

fn service(running: &Running) -> Router {
    let running = running.clone();
    let hang = move || {
        let running = running.clone();
        async move {
            let _running = running.enter();
            std::future::pending::<()>().await;
        }
    };
    Router::new()
        .route("/endless", get(async || endless()))
        .route("/hang", get(hang))
        .route("/long", get(async || pattern(LONG, 1)))
        .route("/short", get(async || "short"))
        .route("/upload", post(async |body: Bytes| body.len().to_string()))
}

fn request(path: &str) -> Request<Body> {
    Request::get(format!("http://here{path}")).body(Body::empty()).unwrap()
}

/// Connects a client of HTTP/2, which ends when its senders are dropped.
async fn connect(devices: &Devices, address: SocketAddr) -> http2::SendRequest<Body> {
    let io = devices.connect_io(address).await;
    let (sender, connection) =
        http2::Builder::new(TokioExecutor::new()).handshake(io).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn get_short(sender: &mut http2::SendRequest<Body>) {
    let response = soon("response", sender.send_request(request("/short"))).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "short");
}

/// The progress of a client at the time at which it is lost.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Head,
    Upload,
    Download,
    Hang,
    Idle,
    Http2Download,
    Http2Hang,
    Http2Idle,
}

const PHASES: [Phase; 8] = [
    Phase::Head,
    Phase::Upload,
    Phase::Download,
    Phase::Hang,
    Phase::Idle,
    Phase::Http2Download,
    Phase::Http2Hang,
    Phase::Http2Idle,
];

/// Brings a client to `phase`. It stays there until the result is dropped.
async fn client(
    devices: &Devices,
    address: SocketAddr,
    phase: Phase,
    running: &Running,
) -> Box<dyn Send> {
    let head = match phase {
        Phase::Head => "GET /sho",
        Phase::Upload => "POST /upload HTTP/1.1\r\nHost: here\r\nContent-Length: 9000\r\n\r\nabc",
        Phase::Download => "GET /endless HTTP/1.1\r\nHost: here\r\n\r\n",
        Phase::Hang => "GET /hang HTTP/1.1\r\nHost: here\r\n\r\n",
        Phase::Idle => "GET /short HTTP/1.1\r\nHost: here\r\n\r\n",
        Phase::Http2Download | Phase::Http2Hang | Phase::Http2Idle => {
            let mut sender = connect(devices, address).await;
            get_short(&mut sender).await;
            if let Phase::Http2Hang = phase {
                let mut hanging = JoinSet::new();
                hanging.spawn(sender.send_request(request("/hang")));
                running.reach(1).await;
                return Box::new((hanging, sender));
            }
            let Phase::Http2Download = phase else { return Box::new(sender) };
            let response = soon("response", sender.send_request(request("/endless"))).await;
            return Box::new((response.unwrap(), sender));
        }
    };
    let mut stream = devices.connect(address).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    match phase {
        Phase::Download | Phase::Idle => {
            soon("response", stream.read(&mut [0; 200])).await.unwrap();
        }
        Phase::Hang => running.reach(1).await,
        _ => {}
    }
    Box::new(stream)
}

#[test]
fn clients_that_vanish_in_any_phase_leave_nothing_behind() {
    run(async |devices| {
        let running = Running::new();
        let (address, serving) = devices.serve(service(&running)).await;
        let mut other = connect(&devices, address).await;
        for round in 0..40 {
            // In the middle of connecting.
            let config = config();
            let connecting = RdmaStream::connect_with(&devices.client, address, &config);
            drop(tokio::time::timeout(Duration::from_micros(50 * round), connecting).await);
        }
        for phase in PHASES {
            drop(client(&devices, address, phase, &running).await);
            get_short(&mut other).await;
            running.reach(0).await;
        }
        serving.abort();
    });
}

#[test]
fn graceful_shutdown_ends_when_its_clients_are_lost() {
    run(async |devices| {
        for phase in PHASES {
            let running = Running::new();
            let listener = devices.listen().await;
            let address = listener.local_addr().unwrap();
            let (stop, stopped) = oneshot::channel::<()>();
            let service = service(&running);
            let serving = tokio::spawn(async move {
                axum::serve(listener, service).with_graceful_shutdown(stopped.map(drop)).await
            });
            let client = client(&devices, address, phase, &running).await;
            devices.network.control("client").unwrap().set_port(false);
            stop.send(()).unwrap();
            soon(&format!("{phase:?}"), serving).await.unwrap().unwrap();
            running.reach(0).await;
            devices.network.control("client").unwrap().set_port(true);
            drop(client);
        }
    });
}

#[test]
fn streams_reset_rapidly_end_only_their_own_connection() {
    run(async |devices| {
        let running = Running::new();
        let (address, serving) = devices.serve(service(&running)).await;
        let mut other = connect(&devices, address).await;
        for path in ["/hang", "/endless", "/short"] {
            let mut stream = devices.connect(address).await;
            // The preface and empty settings.
            let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            stream.write_all(preface).await.unwrap();
            for number in 0..3000_u32 {
                // The server may have ended the connection.
                if stream.write_all(&opened_and_reset(2 * number + 1, path)).await.is_err() {
                    break;
                }
            }
            let mut answers = Vec::new();
            // Ends by GOAWAY, or with an error if the server has closed before it has read all.
            let _ = soon("end", stream.read_to_end(&mut answers)).await;
            get_short(&mut other).await;
        }
        running.reach(0).await;
        serving.abort();
    });
}

/// Returns frames that open a stream with a request, and reset it.
fn opened_and_reset(stream: u32, path: &str) -> Vec<u8> {
    let mut headers = vec![0x82, 0x86, 0x04, path.len() as u8];
    headers.extend_from_slice(path.as_bytes());
    headers.extend_from_slice(b"\x41\x01h");
    let (id, len) = (stream.to_be_bytes(), headers.len() as u8);
    [&[0, 0, len, 1, 5], &id[..], &headers, &[0, 0, 4, 3, 0], &id, &[0, 0, 0, 8]].concat()
}

#[test]
fn requests_at_their_deadline_end_their_handlers() {
    run(async |devices| {
        let running = Running::new();
        let (address, serving) = devices.serve(service(&running)).await;
        let sender = connect(&devices, address).await;
        for _ in 0..3 {
            let hanging = (0..100).map(|_| sender.clone().send_request(request("/hang")));
            // A server refuses a client that resets many requests before their handlers run.
            tokio::select! {
                ends = futures::future::join_all(hanging) => panic!("{ends:?}"),
                () = running.reach(100) => {}
            }
            running.reach(0).await;
        }
        get_short(&mut sender.clone()).await;
        serving.abort();
    });
}

#[test]
fn many_streams_of_a_slow_reader_complete_beside_readers_that_have_stopped() {
    run(async |devices| {
        let running = Running::new();
        let (address, serving) = devices.serve(service(&running)).await;
        let mut stopped = Vec::new();
        for _ in 0..4 {
            stopped.push(client(&devices, address, Phase::Download, &running).await);
        }
        let mut sender = connect(&devices, address).await;
        let mut bodies = Vec::new();
        for _ in 0..100 {
            let response = soon("response", sender.send_request(request("/long"))).await.unwrap();
            bodies.push((response.into_body(), Vec::new()));
        }
        // One stream after the other; those behind it fill the connection's window.
        while let Some((mut body, mut received)) = bodies.pop() {
            let frame = tokio::time::timeout(Duration::from_millis(5), body.frame()).await;
            match frame {
                Ok(None) => {
                    assert!(received == pattern(LONG, 1));
                    continue;
                }
                Ok(Some(frame)) => {
                    received.extend_from_slice(&frame.unwrap().into_data().unwrap());
                }
                // Others have the window.
                Err(_) => {}
            }
            bodies.insert(0, (body, received));
        }
        drop(stopped);
        serving.abort();
    });
}
