//! `ibv_rc_pingpong(1)`, `ibv_uc_pingpong(1)`, `ibv_ud_pingpong(1)` and `ibv_srq_pingpong(1)` of
//! libibverbs in Rust. Client and server interoperate with the C programs.
//!
//! ```text
//! pingpong [rc | uc | ud] [--udp ADDRESS] [-q COUNT] [-s SIZE] [-n COUNT] [-p PORT] [HOST]
//! ```
//!
//! Without HOST the program is the server. The ends exchange queue pair addresses over TCP, then
//! send SIZE bytes (4096; 1024 for datagrams) to and fro in COUNT rounds (1,000). `-q 16` matches
//! `ibv_srq_pingpong`. With --udp the device is a software device that sends RoCE v2 from ADDRESS;
//! otherwise the one named by `TOKIO_RDMA_DEVICE`, or the first.

use std::error::Error;
use std::net::{IpAddr, Ipv6Addr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::op::{Recv, RetryConfig};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{AckTimeout, AddressVector, Gid, Mtu, PortNum, Psn, Qkey, Qpn, Transport};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, Device, Pool, ProtectionDomain, QueuePair,
    QueuePairEndpoint,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const DEADLINE: Duration = Duration::from_secs(60);
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than a peer's ACK timeout.
const LINGER: Duration = Duration::from_secs(1);
const QKEY: Qkey = Qkey(0x1111_1111);
/// The global routing header in front of a datagram.
const GRH_LEN: usize = 40;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: pingpong [rc | uc | ud] [--udp ADDRESS] [-q COUNT] [-s SIZE] \
                 [-n COUNT] [-p PORT] [HOST]"
            );
            return ExitCode::from(2);
        }
    };
    match run(&options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
    let device = match options.udp {
        Some(address) => {
            let network = Network::udp(&UdpConfig::new().address(address).expose())?;
            Device::software_in(&network, &address.to_string())?
        }
        None => Device::open_default_or_software()?,
    };
    let mut stream = match &options.host {
        Some(host) => {
            tokio::time::timeout(DEADLINE, TcpStream::connect((host.as_str(), options.port)))
                .await??
        }
        None => {
            let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, options.port)).await?;
            // Scripts wait for this line.
            println!("server: listening on {}", listener.local_addr()?);
            tokio::time::timeout(ACCEPT_TIMEOUT, listener.accept()).await??.0
        }
    };
    let peer = stream.peer_addr()?.ip().to_canonical();
    let local = LocalEnd::new(&device, peer, options)?;
    let routes =
        tokio::time::timeout(DEADLINE, local.exchange_addresses(&mut stream, options)).await??;
    local.run_rounds(&routes, options).await
}

struct LocalEnd {
    pd: ProtectionDomain,
    pool: Pool,
    queue_pairs: Vec<QueuePair>,
    /// Two per queue pair: one stays posted while the other is processed.
    receives: Vec<[Recv<BufMut>; 2]>,
}

/// The destination of datagrams; `None` for a connected queue pair.
type Route = Option<(AddressHandle, Qpn)>;

impl LocalEnd {
    fn new(device: &Device, peer: IpAddr, options: &Options) -> Result<Self> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(device, CompletionMode::Event)?;
        let pool = Pool::builder(&pd)
            .buffer_size(GRH_LEN + options.size)
            .buffers(4 * options.queue_pairs)
            .build()?;
        let make = |_| {
            let builder = QueuePair::builder(&pd, &queue).transport(options.transport).peer(peer);
            let builder = builder.max_send_wr(2).max_recv_wr(2);
            if options.transport == Transport::Ud {
                builder.qkey(QKEY).build()
            } else {
                builder.build()
            }
        };
        let queue_pairs =
            (0..options.queue_pairs).map(make).collect::<std::result::Result<Vec<_>, _>>()?;
        // Posted before the peer learns the addresses: a datagram without a receive is lost.
        let buffer = || pool.try_alloc(pool.buffer_size());
        let mut receives = Vec::new();
        for qp in &queue_pairs {
            receives.push([qp.recv(buffer()?), qp.recv(buffer()?)]);
        }
        Ok(Self { pd, pool, queue_pairs, receives })
    }

    async fn exchange_addresses(
        &self,
        stream: &mut TcpStream,
        options: &Options,
    ) -> Result<Vec<Route>> {
        let mut lines = String::new();
        for qp in &self.queue_pairs {
            lines.push_str(&line(&qp.endpoint()));
        }
        // `ibv_srq_pingpong` always sends its maximum number of addresses.
        if self.queue_pairs.len() > 1 {
            lines.extend(
                (self.queue_pairs.len()..MAX_QUEUE_PAIRS)
                    .map(|_| format!("0000:000000:000000:{:032}\0", 0)),
            );
        }
        let mut theirs = vec![0; lines.len()];
        // The server connects before it replies, so it is ready for the first message.
        if options.host.is_some() {
            stream.write_all(lines.as_bytes()).await?;
            stream.read_exact(&mut theirs).await?;
        } else {
            stream.read_exact(&mut theirs).await?;
        }
        let mut routes = Vec::new();
        for (qp, theirs) in self.queue_pairs.iter().zip(theirs.chunks(ADDRESS_LEN)) {
            routes.push(self.connect(qp, theirs)?);
        }
        if options.host.is_some() {
            stream.write_all(b"done\0").await?;
        } else {
            stream.write_all(lines.as_bytes()).await?;
            stream.read_exact(&mut [0; 5]).await?;
        }
        Ok(routes)
    }

    fn connect(&self, qp: &QueuePair, line: &[u8]) -> Result<Route> {
        let mut peer = qp.endpoint();
        parse(line, &mut peer)?;
        if qp.transport() == Transport::Ud {
            qp.activate()?;
            let index = self.pd.device().path_to(peer.gid)?.1.index;
            let route = self.pd.address_handle(&AddressVector::new(PortNum(1), index, peer.gid))?;
            return Ok(Some((route, peer.qpn)));
        }
        // 0.5 s: the peer may be a process that waits for a processor.
        let retries = RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() };
        qp.connect_with(&peer, &retries)?;
        Ok(None)
    }

    /// Sends and receives until the rounds are complete in both directions.
    async fn run_rounds(self, routes: &[Route], options: &Options) -> Result<()> {
        let start = Instant::now();
        let (sent, received) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let finished = || sent.get() >= options.rounds && received.get() >= options.rounds;
        let Self { pool, queue_pairs, receives, .. } = self;
        let ping_pong = async |qp: &QueuePair,
                               route: &Route,
                               mut receives: [Recv<BufMut>; 2]|
               -> Result<()> {
            let mut sending = options.host.is_some();
            while !finished() {
                if sending {
                    let message = pool.copy_from(&pattern(options.size))?;
                    match route {
                        Some((route, qpn)) => drop(qp.send_to(message, route, *qpn, QKEY).await?),
                        None => drop(qp.send(message).await?),
                    }
                    sent.set(sent.get() + 1);
                } else {
                    let message = (&mut receives[0]).await?;
                    let header = if route.is_some() { GRH_LEN } else { 0 };
                    if message.buffer.len() != header + options.size {
                        return Err(format!(
                            "{} bytes instead of {}",
                            message.buffer.len() - header,
                            options.size
                        )
                        .into());
                    }
                    received.set(received.get() + 1);
                    receives[0] = qp.recv(message.buffer);
                    receives.swap(0, 1);
                }
                sending = !sending;
            }
            Ok(())
        };
        let local = queue_pairs.iter().zip(routes).zip(receives);
        let all = local.map(|((qp, route), receives)| Box::pin(ping_pong(qp, route, receives)));
        let all = futures::future::select_all(all);
        // The first to finish ends the run: the others may wait for a peer that has exited.
        tokio::time::timeout(DEADLINE, all).await?.0?;
        println!(
            "{} messages sent and {} received in {:.1?}",
            sent.get(),
            received.get(),
            start.elapsed()
        );
        // The acknowledgement of the last message may be lost; a retransmission must still be
        // answered.
        tokio::time::sleep(LINGER).await;
        Ok(())
    }
}

fn pattern(size: usize) -> Vec<u8> {
    vec![0x7b; size]
}

/// LID, queue pair number, first PSN and GID in hexadecimal, and a zero byte.
const ADDRESS_LEN: usize = "0000:000000:000000:00000000000000000000000000000000\0".len();

/// The maximum of `ibv_srq_pingpong`.
const MAX_QUEUE_PAIRS: usize = 256;

fn line(end: &QueuePairEndpoint) -> String {
    let gid: String = end.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{:04x}:{:06x}:{:06x}:{gid}\0", end.lid, end.qpn.0, end.psn.value())
}

fn parse(line: &[u8], peer: &mut QueuePairEndpoint) -> Result<()> {
    let text = std::str::from_utf8(line)?.trim_end_matches('\0');
    let [lid, qpn, psn, gid] = text.split(':').collect::<Vec<_>>()[..] else {
        return Err(format!("invalid queue pair address {text:?}").into());
    };
    peer.lid = u16::from_str_radix(lid, 16)?;
    peer.qpn = Qpn(u32::from_str_radix(qpn, 16)?);
    peer.psn = Psn::new(u32::from_str_radix(psn, 16)?);
    peer.gid = Gid(u128::from_str_radix(gid, 16)?.to_be_bytes());
    // The default of the C programs.
    peer.mtu = Mtu::Mtu1024;
    Ok(())
}

struct Options {
    transport: Transport,
    udp: Option<IpAddr>,
    queue_pairs: usize,
    size: usize,
    rounds: u32,
    port: u16,
    host: Option<String>,
}

impl Options {
    fn from_arguments() -> std::result::Result<Self, lexopt::Error> {
        use lexopt::prelude::{Long, Short, Value, ValueExt};
        let (mut transport, mut size) = (None, None);
        // The defaults of the C programs.
        let mut options = Self {
            transport: Transport::Rc,
            udp: None,
            queue_pairs: 1,
            size: 4096,
            rounds: 1000,
            port: 18515,
            host: None,
        };
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Long("udp") => options.udp = Some(arguments.value()?.parse()?),
                Short('q') => options.queue_pairs = arguments.value()?.parse()?,
                Short('s') => size = Some(arguments.value()?.parse()?),
                Short('n') => options.rounds = arguments.value()?.parse()?,
                Short('p') => options.port = arguments.value()?.parse()?,
                Value(value) => match (value.to_str(), transport) {
                    (Some("rc"), None) => transport = Some(Transport::Rc),
                    (Some("uc"), None) => transport = Some(Transport::Uc),
                    (Some("ud"), None) => transport = Some(Transport::Ud),
                    _ => options.host = Some(value.string()?),
                },
                other => return Err(other.unexpected()),
            }
        }
        options.transport = transport.unwrap_or(Transport::Rc);
        options.size = size.unwrap_or(if options.transport == Transport::Ud { 1024 } else { 4096 });
        if options.queue_pairs > MAX_QUEUE_PAIRS {
            return Err(format!("-q: at most {MAX_QUEUE_PAIRS} queue pairs").into());
        }
        if options.queue_pairs == 0 || options.size == 0 || options.rounds == 0 {
            return Err("-q, -s and -n must be at least 1".into());
        }
        Ok(options)
    }
}
