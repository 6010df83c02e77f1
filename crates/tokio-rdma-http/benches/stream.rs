//! gRPC over byte streams, beside TCP and bare verbs: `cargo bench -p tokio-rdma-http --features
//! tonic --bench stream -- rounds=20000 mode=event`.
//!
//! Both ends are tasks on one thread of this process. The device is the one that
//! `TOKIO_RDMA_DEVICE` names, or the software device; TCP uses the same address.
//!
//! | Row | A call |
//! |---|---|
//! | `verbs` | SEND and RECV futures of a queue pair: 64 B there and back |
//! | `rdma` | unary call of tonic's health service over an `RdmaStream` |
//! | `tcp` | the same over a `TcpStream` without delay |
//!
//! With 1 and 64 calls in flight: time of a call, p50 and p99, calls per second, and the CPU time
//! of all threads of the process per call, both ends together.

#[path = "../../../benches/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use hdrhistogram::Histogram;
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::op::Recv;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, ConnectionConfig, Device, Pool, QueuePair,
};
use tokio_rdma_http::{HttpListener, RdmaConnector};
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use common::{address, cpu};

const DEPTHS: [usize; 2] = [1, 64];

/// The bytes of a message of bare verbs.
const MESSAGE: usize = 64;

/// The service whose health is checked.
const SERVICE: &str = "bench";

struct Measurement {
    times: Histogram<u64>,
    start: Instant,
    before: Duration,
}

impl Measurement {
    fn new() -> Self {
        let times = Histogram::new(3).expect("a histogram");
        Self { times, start: Instant::now(), before: cpu() }
    }

    fn record(&mut self, time: Duration) {
        self.times.record(time.as_nanos() as u64).expect("within range");
    }

    fn print(&self, name: &str, depth: usize) {
        let (elapsed, spent) = (self.start.elapsed(), cpu().saturating_sub(self.before));
        let p = |quantile| Duration::from_nanos(self.times.value_at_quantile(quantile));
        let calls = self.times.len();
        println!(
            "{name:>6}  {depth:>3} in flight  p50 {:>10.2?}  p99 {:>10.2?}  {:>9.0}/s  cpu \
             {:>9.2?}",
            p(0.5),
            p(0.99),
            calls as f64 / elapsed.as_secs_f64(),
            spent / calls as u32
        );
    }
}

/// A queue pair with posted receives.
struct Verbs {
    qp: QueuePair,
    pool: Pool,
    received: VecDeque<Recv<BufMut>>,
}

impl Verbs {
    fn new(device: &Device, mode: &CompletionMode, depth: usize) -> Self {
        let pd = device.protection_domain().expect("a protection domain");
        let queue = CompletionQueue::new(device, mode.clone()).expect("a completion queue");
        let qp = QueuePair::builder(&pd, &queue).max_send_wr(128).max_recv_wr(128);
        let pool = Pool::new(&pd, MESSAGE, 2 * depth + 1).expect("buffers");
        Self { qp: qp.build().expect("a queue pair"), pool, received: VecDeque::new() }
    }

    fn connect(&mut self, peer: &Self, depth: usize) {
        self.qp.connect(&peer.qp.endpoint()).expect("connects");
        (0..depth).for_each(|_| self.post());
    }

    fn post(&mut self) {
        self.received.push_back(self.qp.recv(self.pool.try_alloc(MESSAGE).expect("free")));
    }

    async fn recv(&mut self) {
        let receive = self.received.pop_front().expect("posted");
        drop(receive.await.expect("receives"));
        self.post();
    }

    async fn send(&self) {
        let message = self.pool.try_alloc(MESSAGE).expect("free");
        self.qp.send(message).await.expect("sends");
    }
}

async fn verbs(device: &Device, mode: &CompletionMode, calls: usize, depth: usize) {
    let [mut ours, mut theirs] = [(); 2].map(|()| Verbs::new(device, mode, depth));
    ours.connect(&theirs, depth);
    theirs.connect(&ours, depth);
    let answering = tokio::task::spawn_local(async move {
        loop {
            theirs.recv().await;
            theirs.send().await;
        }
    });
    let mut measurement = Measurement::new();
    let mut begun = VecDeque::new();
    for call in 0..calls + depth {
        if begun.len() == depth || call >= calls {
            let Some(start) = begun.pop_front() else { break };
            ours.recv().await;
            measurement.record(Instant::elapsed(&start));
        }
        if call < calls {
            begun.push_back(Instant::now());
            ours.send().await;
        }
    }
    measurement.print("verbs", depth);
    answering.abort();
}

async fn grpc(client: &HealthClient<Channel>, name: &str, calls: usize, depth: usize) {
    let mut measurement = Measurement::new();
    let mut finished = stream::iter(0..calls)
        .map(|_| async {
            let start = Instant::now();
            let request = HealthCheckRequest { service: SERVICE.to_owned() };
            client.clone().check(request).await.expect("an answer");
            start.elapsed()
        })
        .buffer_unordered(depth);
    while let Some(time) = finished.next().await {
        measurement.record(time);
    }
    measurement.print(name, depth);
}

/// Serves the connections of `incoming` until the runtime ends.
async fn serve<S>(incoming: impl Stream<Item = io::Result<S>> + Send + 'static)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    S: tonic::transport::server::Connected<ConnectInfo: Clone + Send + Sync>,
{
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status(SERVICE, ServingStatus::Serving).await;
    tokio::spawn(Server::builder().add_service(health).serve_with_incoming(incoming));
}

async fn all(device: &Device, mode: &CompletionMode, rounds: u32) {
    let config = ConnectionConfig::for_streams().mode(mode.clone());
    let listener = HttpListener::bind_with(device, address(device), &config).await;
    let listener = listener.expect("listens");
    let endpoint = |address| {
        Endpoint::from_shared(format!("http://{address}")).expect("an address").tcp_nodelay(true)
    };
    let to = endpoint(listener.local_addr().expect("an address"));
    serve(listener).await;
    let connector = RdmaConnector::with_config(device, &config);
    let rdma = to.connect_with_connector(connector).await.expect("connects");

    let listener = TcpListener::bind(address(device)).await.expect("listens");
    let to = endpoint(listener.local_addr().expect("an address"));
    let accept = async |listener: TcpListener| {
        let accepted: io::Result<TcpStream> = async {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            Ok(socket)
        }
        .await;
        Some((accepted, listener))
    };
    serve(stream::unfold(listener, accept)).await;
    let tcp = to.connect().await.expect("connects");

    for depth in DEPTHS {
        verbs(device, mode, rounds as usize, depth).await;
        for (name, channel) in [("rdma", &rdma), ("tcp", &tcp)] {
            let client = HealthClient::new(channel.clone());
            grpc(&client, name, rounds as usize, depth).await;
        }
    }
}

fn main() {
    common::on_one_thread(all);
}
