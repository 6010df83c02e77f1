//! HTTP/2: concurrent streams, slow readers and graceful shutdown.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http2;
use hyper_util::rt::TokioExecutor;
use tokio::sync::Notify;

use crate::{Devices, config, pattern, run, soon};

type Sender = http2::SendRequest<Full<Bytes>>;

async fn sender(devices: &Devices, address: std::net::SocketAddr) -> Sender {
    let io = devices.connect_io(address).await;
    let (sender, connection) =
        http2::Builder::new(TokioExecutor::new()).handshake(io).await.unwrap();
    tokio::spawn(connection);
    sender
}

#[test]
fn hundred_concurrent_streams_share_a_connection() {
    run(async |devices| {
        let service = Router::new().route("/", post(async |body: Bytes| body));
        let (address, serving) = devices.serve(service).await;
        let sender = sender(&devices, address).await;
        let mut requests = Vec::new();
        for number in 0..100_u64 {
            let mut sender = sender.clone();
            requests.push(tokio::spawn(async move {
                let body = pattern([10, 1000, 40_000, 200_000][number as usize % 4], number);
                let uri = "http://here/";
                let request = Request::post(uri).body(Full::<Bytes>::from(body.clone())).unwrap();
                let response = sender.send_request(request).await.unwrap();
                let answer = response.into_body().collect().await.unwrap().to_bytes();
                assert!(answer == body, "stream {number}");
            }));
        }
        for request in requests {
            soon("stream", request).await.unwrap();
        }
        serving.abort();
    });
}

#[test]
fn slow_reader_delays_its_own_stream_only() {
    run(async |devices| {
        const LEN: usize = 4 << 20;
        let long = get(async || Body::from(pattern(LEN, 1)));
        let service = Router::new().route("/long", long).route("/short", get(async || "short"));
        let (address, serving) = devices.serve(service).await;
        let mut sender = sender(&devices, address).await;
        let request = |path| Request::get(path).body(Full::default()).unwrap();
        let long = sender.send_request(request("http://here/long")).await.unwrap();
        let (mut body, mut received) = (long.into_body(), Vec::new());
        while let Some(frame) = soon("frame", body.frame()).await {
            received.extend_from_slice(&frame.unwrap().into_data().unwrap());
            if received.len() < LEN / 8 {
                let short = sender.send_request(request("http://here/short"));
                let short = soon("short", short).await.unwrap();
                assert_eq!(short.into_body().collect().await.unwrap().to_bytes(), "short");
            }
        }
        assert!(received == pattern(LEN, 1));
        serving.abort();
    });
}

#[test]
fn graceful_shutdown_completes_requests_in_flight() {
    run(async |devices| {
        let [begun, proceed, stop] = [(); 3].map(|()| Arc::new(Notify::new()));
        let slow = {
            let (begun, proceed) = (begun.clone(), proceed.clone());
            move || async move {
                begun.notify_one();
                proceed.notified().await;
                "done"
            }
        };
        let service = Router::new().route("/", get(slow));
        let listener = devices.listen().await;
        let address = listener.local_addr().unwrap();
        let signal = stop.clone();
        let serving = tokio::spawn(async move {
            axum::serve(listener, service)
                .with_graceful_shutdown(async move { signal.notified().await })
                .await
        });
        let mut sender = sender(&devices, address).await;
        let request = Request::get("http://here/").body(Full::default()).unwrap();
        let response = tokio::spawn(sender.send_request(request));
        soon("request", begun.notified()).await;
        stop.notify_one();
        proceed.notify_one();
        let response = soon("response", response).await.unwrap().unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "done");
        soon("server", serving).await.unwrap().unwrap();
        drop(sender);
        let config = config();
        let connecting = tokio_rdma::RdmaStream::connect_with(&devices.client, address, &config);
        assert!(soon("refusal", connecting).await.is_err(), "the address is released");
    });
}
