//! A client that measures a server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rdma::{Device, RdmaStream};

use crate::Result;
use crate::service::{BULK, PING};

/// The pings of a measurement, and the longest that it may take.
const PINGS: usize = 500;
const LIMIT: Duration = Duration::from_secs(30);

/// The figures of both transports.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Figures {
    pub(crate) rdma: Transport,
    pub(crate) tcp: Transport,
}

/// The figures of a transport.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Transport {
    /// Latency of a request, in microseconds.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Throughput of a long body, in MB/s.
    pub(crate) throughput_mb_s: f64,
    /// Measurements in all.
    pub(crate) requests: u64,
}

/// A server.
#[derive(Debug)]
pub(crate) enum Target {
    Rdma(Device, SocketAddr),
    Tcp(SocketAddr),
}

/// Measures a server over a new connection.
pub(crate) async fn measure(target: &Target) -> Result<Transport> {
    let measured = async {
        match target {
            Target::Rdma(device, address) => {
                over(RdmaStream::connect(device, *address).await?).await
            }
            Target::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                over(stream).await
            }
        }
    };
    match timeout(LIMIT, measured).await {
        Ok(result) => result,
        Err(_) => Err(format!("the server did not answer within {LIMIT:?}").into()),
    }
}

async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Transport> {
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut times = Histogram::<u64>::new(3)?;
    for _ in 0..PINGS {
        let start = Instant::now();
        get(&mut sender, PING).await?;
        times.record(start.elapsed().as_nanos() as u64)?;
    }
    let start = Instant::now();
    let bytes = get(&mut sender, BULK).await?;
    let elapsed = start.elapsed();
    drop(sender);
    connection.await??;
    let quantile = |quantile| times.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Transport {
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        throughput_mb_s: bytes as f64 / 1e6 / elapsed.as_secs_f64(),
        requests: PINGS as u64 + 1,
    })
}

/// Returns the length of the body.
async fn get(sender: &mut SendRequest<Empty<Bytes>>, path: &str) -> Result<usize> {
    sender.ready().await?;
    let response = sender.send_request(Request::get(path).body(Empty::new())?).await?;
    if !response.status().is_success() {
        return Err(format!("{path}: {}", response.status()).into());
    }
    let (mut body, mut len) = (response.into_body(), 0);
    while let Some(frame) = body.frame().await {
        len += frame?.data_ref().map_or(0, Bytes::len);
    }
    Ok(len)
}
