//! HTTP/1.1, HTTP/2, WebSockets, TLS and gRPC over byte streams, on a network without loss and over
//! UDP with a loss of 1 % of the packets, and with peers that are lost.
//!
//! `TOKIO_RDMA_HTTP_MIB` sets the size of uploads and downloads.

mod bodies;
mod grpc;
mod hostile;
mod http1;
mod http2;
mod lost;
mod tls;
#[allow(dead_code, reason = "tests of tokio-rdma use the rest")]
#[path = "../../../../tests/common/udp.rs"]
mod udp;
mod websocket;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use hyper_util::rt::TokioIo;
use tokio::task::JoinHandle;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{ConnectionConfig, Device, RdmaStream};
use tokio_rdma_http::{HttpListener, HttpStream};

/// The longest wait for an answer.
const LONG: Duration = Duration::from_secs(600);

/// A server's and a client's device.
struct Devices {
    network: Network,
    server: Device,
    client: Device,
    lossy: bool,
}

impl Devices {
    /// Opens devices in the process, or over UDP with loss.
    fn new(lossy: bool) -> Self {
        let names = ["server", "client"];
        let network = if lossy { udp::network(&names) } else { Network::new() };
        let loss = if lossy { 0.01 } else { 0.0 };
        network.set_faults(Faults::none().loss(loss));
        let [server, client] = names.map(|name| Device::software_in(&network, name).unwrap());
        Self { server, client, network, lossy }
    }

    async fn listen(&self) -> HttpListener {
        let at = self.server.default_path().unwrap().1.gid.to_ip();
        HttpListener::bind_with(&self.server, (at, 0), &config()).await.unwrap()
    }

    /// Serves `service`. Returns the address.
    async fn serve(&self, service: Router) -> (SocketAddr, JoinHandle<()>) {
        let listener = self.listen().await;
        let address = listener.local_addr().unwrap();
        let serving = async move { axum::serve(listener, service).await.unwrap() };
        (address, tokio::spawn(serving))
    }

    async fn connect(&self, address: SocketAddr) -> RdmaStream {
        let config = config();
        let connecting = RdmaStream::connect_with(&self.client, address, &config);
        soon("connect", connecting).await.unwrap()
    }

    /// Connects a stream for clients of hyper.
    async fn connect_io(&self, address: SocketAddr) -> TokioIo<HttpStream> {
        TokioIo::new(self.connect(address).await.into())
    }
}

/// Returns settings that notice a lost peer within a second, and survive loss.
fn config() -> ConnectionConfig {
    let retries = RetryConfig {
        timeout: AckTimeout::from_code(11),
        retry_count: 7,
        ..RetryConfig::default()
    };
    // A lost peer does not acknowledge the ping, which is noticed long before the answer is due.
    let keepalive = Some((Duration::from_millis(200), Duration::from_secs(20)));
    ConnectionConfig::for_streams().retries(retries).keepalive(keepalive)
}

/// Returns a body without an end.
fn endless() -> Body {
    let block = || Ok::<_, Infallible>(Bytes::from_static(&[7; 10_000]));
    Body::from_stream(futures::stream::repeat_with(block))
}

/// Runs `test` without loss on one thread, and with loss on several.
fn run<F: Future<Output = ()>>(test: impl Fn(Devices) -> F) {
    for lossy in [false, true] {
        let runtime = match lossy {
            false => tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            true => tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap(),
        };
        runtime.block_on(soon("test", test(Devices::new(lossy))));
    }
}

/// Awaits `future`; panics if it hangs.
async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(2 * LONG, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: hangs"),
    }
}

/// Returns `len` bytes that depend on `seed`.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}
