//! Uploads and downloads with checksums.

use std::convert::Infallible;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::routing::{get, put};
use crc32fast::Hasher;
use futures::stream;
use http_body_util::BodyExt;
use hyper::{Request, Response};
use hyper_util::rt::TokioExecutor;

use crate::{Devices, pattern, run, soon};

/// The bytes of a block.
const BLOCK: usize = 1 << 16;

/// Returns how many blocks a body has.
fn blocks(lossy: bool) -> usize {
    let mebibytes = std::env::var("TOKIO_RDMA_HTTP_MIB");
    let mebibytes = mebibytes.map_or(if lossy { 2 } else { 64 }, |number| number.parse().unwrap());
    mebibytes * (1 << 20) / BLOCK
}

fn body(blocks: usize) -> impl futures::Stream<Item = Result<Bytes, Infallible>> + Send {
    let block = Bytes::from(pattern(BLOCK, 5));
    stream::iter((0..blocks).map(move |number| {
        // Blocks differ, so that a lost or repeated one is noticed.
        let start = number % 1000;
        Ok(block.slice(start..BLOCK - (number + 7) % 1000))
    }))
}

fn checksum(blocks: usize) -> u32 {
    let mut hasher = Hasher::new();
    let all = futures::StreamExt::map(body(blocks), |block| hasher.update(&block.unwrap()));
    futures::executor::block_on(futures::StreamExt::collect::<Vec<()>>(all));
    hasher.finalize()
}

async fn checked<B>(mut body: B) -> u32
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Debug,
{
    let mut hasher = Hasher::new();
    while let Some(frame) = soon("frame", body.frame()).await {
        if let Ok(data) = frame.unwrap().into_data() {
            hasher.update(&data);
        }
    }
    hasher.finalize()
}

fn service() -> Router {
    let download = async |Path(blocks): Path<usize>| Response::new(Body::from_stream(body(blocks)));
    let upload =
        async |request: axum::extract::Request| checked(request.into_body()).await.to_string();
    Router::new().route("/down/{blocks}", get(download)).route("/up", put(upload))
}

async fn transfer(devices: Devices, version: hyper::Version) {
    let (address, serving) = devices.serve(service()).await;
    let blocks = blocks(devices.lossy);
    let expected = checksum(blocks);
    let io = devices.connect_io(address).await;
    let down = Request::get(format!("http://here/down/{blocks}")).body(Body::empty()).unwrap();
    let up = Request::put("http://here/up").body(Body::from_stream(body(blocks))).unwrap();
    let (downloaded, uploaded) = match version {
        hyper::Version::HTTP_2 => {
            let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
            let (mut sender, connection) = builder.handshake(io).await.unwrap();
            tokio::spawn(connection);
            let downloaded = checked(sender.send_request(down).await.unwrap().into_body()).await;
            (downloaded, sender.send_request(up).await.unwrap())
        }
        _ => {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            tokio::spawn(connection);
            let downloaded = checked(sender.send_request(down).await.unwrap().into_body()).await;
            soon("ready", sender.ready()).await.unwrap();
            (downloaded, sender.send_request(up).await.unwrap())
        }
    };
    assert_eq!(downloaded, expected, "{version:?}: download of {blocks} blocks");
    let uploaded = uploaded.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(uploaded, expected.to_string(), "{version:?}: upload of {blocks} blocks");
    serving.abort();
}

#[test]
fn long_bodies_arrive_complete_over_http1() {
    run(|devices| transfer(devices, hyper::Version::HTTP_11));
}

#[test]
fn long_bodies_arrive_complete_over_http2() {
    run(|devices| transfer(devices, hyper::Version::HTTP_2));
}
