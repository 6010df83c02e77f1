//! HTTP/1.1: keep-alive, pipelining and half close.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::ConnectInfo;
use axum::routing::{get, post};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rdma_http::{PeerAddr, RdmaConnector};

use crate::{config, pattern, run, soon};

fn echo() -> Router {
    Router::new().route("/", post(async |body: Bytes| body))
}

#[test]
fn requests_of_a_connection_are_answered_in_order() {
    run(async |devices| {
        let (address, serving) = devices.serve(echo()).await;
        let io = devices.connect_io(address).await;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        let connection = tokio::spawn(connection);
        for round in 0..50 {
            let body = pattern([0, 1, 1000, 100_000][round % 4], round as u64);
            let request = Request::post("/").body(Full::<Bytes>::from(body.clone())).unwrap();
            soon("ready", sender.ready()).await.unwrap();
            let response = soon("response", sender.send_request(request)).await.unwrap();
            let answer = response.into_body().collect().await.unwrap().to_bytes();
            assert!(answer == body, "round {round}");
        }
        drop(sender);
        soon("end", connection).await.unwrap().unwrap();
        serving.abort();
    });
}

#[test]
fn pipelined_requests_are_all_answered() {
    run(async |devices| {
        let count = Arc::new(AtomicU32::new(0));
        let number = move || {
            let count = count.clone();
            async move { format!("<{}>", count.fetch_add(1, Ordering::Relaxed)) }
        };
        let (address, serving) = devices.serve(Router::new().route("/", get(number))).await;
        let mut stream = devices.connect(address).await;
        let requests = "GET / HTTP/1.1\r\nHost: here\r\n\r\n".repeat(19)
            + "GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
        stream.write_all(requests.as_bytes()).await.unwrap();
        let mut answers = String::new();
        soon("answers", stream.read_to_string(&mut answers)).await.unwrap();
        let bodies: Vec<&str> = answers.split(['<', '>']).skip(1).step_by(2).collect();
        let expected: Vec<String> = (0..20).map(|number| number.to_string()).collect();
        assert_eq!(bodies, expected);
        serving.abort();
    });
}

#[test]
fn client_of_hyper_reuses_its_connections() {
    run(async |devices| {
        let peer = async |ConnectInfo(PeerAddr(peer)): ConnectInfo<PeerAddr>| peer.to_string();
        let service = Router::new().route("/", get(peer));
        let listener = devices.listen().await;
        let address = listener.local_addr().unwrap();
        let service = service.into_make_service_with_connect_info::<PeerAddr>();
        let serving = tokio::spawn(async { axum::serve(listener, service).await });
        let connector = RdmaConnector::with_config(&devices.client, &config());
        let client = Client::builder(TokioExecutor::new()).build::<_, Full<Bytes>>(connector);
        let mut peers = Vec::new();
        for _ in 0..20 {
            let uri = format!("http://{address}/").parse().unwrap();
            let response = soon("response", client.get(uri)).await.unwrap();
            peers.push(response.into_body().collect().await.unwrap().to_bytes());
        }
        // A connection returns to the client's pool shortly after its response.
        peers.sort();
        peers.dedup();
        assert!(peers.len() <= 3, "{peers:?}");
        serving.abort();
    });
}

#[test]
fn client_that_has_shut_down_its_side_gets_the_answer() {
    run(async |devices| {
        let listener = devices.listen().await.into_inner();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let echo = service_fn(async |request: Request<Incoming>| {
                let body = request.into_body().collect().await?.to_bytes();
                Ok::<_, hyper::Error>(hyper::Response::new(Full::<Bytes>::from(body)))
            });
            let mut server = hyper::server::conn::http1::Builder::new();
            server.half_close(true).serve_connection(TokioIo::new(stream), echo).await
        });
        let mut stream = devices.connect(address).await;
        let body = pattern(200_000, 3);
        let head =
            format!("POST / HTTP/1.1\r\nHost: here\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        soon("answer", stream.read_to_end(&mut answer)).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n") && answer.ends_with(&body));
        soon("server", serving).await.unwrap().unwrap();
    });
}
