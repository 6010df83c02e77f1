//! Servers and clients that are lost in the middle of a body.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post, put};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::CONTENT_LENGTH;
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_rdma::RdmaStream;

use crate::{Devices, config, endless, run, soon};

/// How a peer is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Its network.
    Port,
    /// Its runtime, and so the task that writes the body.
    Runtime,
}

const LOSSES: [Loss; 2] = [Loss::Port, Loss::Runtime];

/// A runtime of a peer that is lost.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn new() -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        Self(Some(builder.worker_threads(2).enable_all().build().unwrap()))
    }

    fn get(&self) -> &Runtime {
        self.0.as_ref().unwrap()
    }

    /// Loses the peer on the device `name`.
    fn lose(&mut self, loss: Loss, devices: &Devices, name: &str) {
        match loss {
            Loss::Port => devices.network.control(name).unwrap().set_port(false),
            Loss::Runtime => self.end(),
        }
    }

    fn end(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        self.end();
    }
}

/// A server in a runtime of its own.
struct Server {
    address: SocketAddr,
    runtime: OwnRuntime,
}

impl Server {
    fn new(devices: &Devices) -> Self {
        let runtime = OwnRuntime::new();
        let long = || Response::builder().header(CONTENT_LENGTH, 1_u64 << 40).body(endless());
        let upload = async |request: axum::extract::Request| {
            let mut body = request.into_body();
            while let Some(Ok(_)) = body.frame().await {}
        };
        let service = Router::new()
            .route("/unknown", get(async || Response::new(endless())))
            .route("/known", get(async move || long().unwrap()))
            .route("/upload", put(upload));
        let (address, _) = std::thread::scope(|scope| {
            let serving = devices.serve(service);
            scope.spawn(|| runtime.get().block_on(serving)).join().unwrap()
        });
        Self { address, runtime }
    }
}

/// Sends a request over a new connection.
async fn send(
    devices: &Devices,
    address: SocketAddr,
    version: Version,
    request: Request<Body>,
) -> hyper::Result<Response<Incoming>> {
    let io = devices.connect_io(address).await;
    if version == Version::HTTP_2 {
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut sender, connection) = builder.handshake(io).await?;
        tokio::spawn(connection);
        sender.send_request(request).await
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
        tokio::spawn(connection);
        sender.send_request(request).await
    }
}

#[test]
fn download_from_a_lost_server_ends_with_an_error() {
    run(async |devices| {
        for loss in LOSSES {
            for (path, version) in [
                ("http://here/unknown", Version::HTTP_11),
                ("http://here/known", Version::HTTP_11),
                ("http://here/unknown", Version::HTTP_2),
            ] {
                let mut server = Server::new(&devices);
                let request = Request::get(path).body(Body::empty()).unwrap();
                let response = send(&devices, server.address, version, request);
                let mut body = soon("response", response).await.unwrap().into_body();
                for frames in 0.. {
                    if frames == 20 {
                        server.runtime.lose(loss, &devices, "server");
                    }
                    match soon("frame", body.frame()).await {
                        Some(Ok(_)) => {}
                        Some(Err(_)) if frames >= 20 => break,
                        other => panic!("{loss:?}, {path}, {version:?}: {other:?} looks complete"),
                    }
                }
                devices.network.control("server").unwrap().set_port(true);
            }
        }
    });
}

#[test]
fn upload_to_a_lost_server_ends_with_an_error() {
    run(async |devices| {
        for loss in LOSSES {
            for version in [Version::HTTP_11, Version::HTTP_2] {
                let mut server = Server::new(&devices);
                let (blocks, body) = futures::channel::mpsc::channel(0);
                let request = Request::put("http://here/upload");
                let request = request.body(Body::from_stream(body)).unwrap();
                let answer = send(&devices, server.address, version, request);
                let writing = async {
                    let mut blocks = blocks;
                    for number in 0.. {
                        if number == 20 {
                            server.runtime.lose(loss, &devices, "server");
                        }
                        let block = Ok::<_, Infallible>(Bytes::from_static(&[7; 10_000]));
                        // Fails when the connection has ended.
                        if futures::SinkExt::send(&mut blocks, block).await.is_err() {
                            break;
                        }
                    }
                };
                let (answer, ()) = soon("end", async { tokio::join!(answer, writing) }).await;
                assert!(answer.is_err(), "{loss:?}, {version:?}: {answer:?}");
                devices.network.control("server").unwrap().set_port(true);
            }
        }
    });
}

#[test]
fn body_without_a_length_from_a_lost_server_ends_with_an_error() {
    // The end of the connection is the end of the body, as in all answers to HTTP/1.0.
    run(async |devices| {
        // The runtime drops the tasks of a connection in any order.
        for loss in [Loss::Port].into_iter().chain([Loss::Runtime; 16]) {
            let mut server = Server::new(&devices);
            let mut stream = devices.connect(server.address).await;
            stream.write_all(b"GET /unknown HTTP/1.0\r\n\r\n").await.unwrap();
            let mut block = vec![0; 10_000];
            soon("body", stream.read_exact(&mut block)).await.unwrap();
            server.runtime.lose(loss, &devices, "server");
            while let Ok(len) = soon("body", stream.read(&mut block)).await {
                assert!(len > 0, "{loss:?}: looks complete");
            }
            devices.network.control("server").unwrap().set_port(true);
        }
    });
}

#[test]
fn upload_of_a_lost_client_does_not_look_complete() {
    run(async |devices| {
        for loss in LOSSES {
            for length in ["Content-Length: 1000000000000", "Transfer-Encoding: chunked"] {
                let (events, mut observed) = mpsc::unbounded_channel();
                let upload = async move |request: axum::extract::Request| {
                    let mut body = request.into_body();
                    let mut frame = body.frame().await;
                    events.send(None).unwrap();
                    while let Some(Ok(_)) = frame {
                        frame = body.frame().await;
                    }
                    events.send(Some(frame.is_none())).unwrap();
                };
                let service = Router::new().route("/", post(upload));
                let (address, serving) = devices.serve(service).await;
                let (mut client, device) = (OwnRuntime::new(), devices.client.clone());
                client.get().spawn(async move {
                    let config = config();
                    let connecting = RdmaStream::connect_with(&device, address, &config);
                    let mut stream = connecting.await.unwrap();
                    let head = format!("POST / HTTP/1.1\r\nHost: here\r\n{length}\r\n\r\n");
                    stream.write_all(head.as_bytes()).await.unwrap();
                    // A chunk, if the body consists of chunks.
                    while stream.write_all(b"8\r\n12345678\r\n").await.is_ok() {
                        tokio::task::yield_now().await;
                    }
                });
                assert_eq!(soon("begin", observed.recv()).await, Some(None));
                client.lose(loss, &devices, "client");
                let complete = soon("end", observed.recv()).await;
                assert_eq!(complete, Some(Some(false)), "{loss:?}, {length}");
                devices.network.control("client").unwrap().set_port(true);
                serving.abort();
            }
        }
    });
}
