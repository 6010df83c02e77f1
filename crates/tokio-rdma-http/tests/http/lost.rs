//! Servers that are lost in the middle of a body.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, put};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::CONTENT_LENGTH;
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioExecutor;
use tokio::runtime::Runtime;

use crate::{Devices, run, soon};

/// How the server is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Its network.
    Port,
    /// Its runtime, and so the task that writes the body.
    Runtime,
}

const LOSSES: [Loss; 2] = [Loss::Port, Loss::Runtime];

/// Returns a body without an end.
fn endless() -> Body {
    let block = || Ok::<_, Infallible>(Bytes::from_static(&[7; 10_000]));
    Body::from_stream(futures::stream::repeat_with(block))
}

/// A server in a runtime of its own.
struct Server {
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Server {
    fn new(devices: &Devices) -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
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
            scope.spawn(|| runtime.block_on(serving)).join().unwrap()
        });
        Self { address, runtime: Some(runtime) }
    }

    fn lose(&mut self, loss: Loss, devices: &Devices) {
        match loss {
            Loss::Port => devices.network.control("server").unwrap().set_port(false),
            Loss::Runtime => self.end(),
        }
    }

    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
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
                        server.lose(loss, &devices);
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
                            server.lose(loss, &devices);
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
