//! `ibv_rc_pingpong(1)`, `ibv_uc_pingpong(1)`, `ibv_ud_pingpong(1)` and `ibv_srq_pingpong(1)` of libibverbs, in Rust: talks to
//! those in C, as client and as server.
//!
//! ```text
//! pingpong [rc | uc | ud] [--udp ADDRESS] [-q COUNT] [-s SIZE] [-n COUNT] [-p PORT] [HOST]
//! ```
//!
//! Without HOST it is the server. The two meet over TCP, where each tells the other its queue pairs: the protocol that these
//! programs have, and an example of one of your own. Then the client sends SIZE bytes (4096; of datagrams 1024), the server as
//! many, and so on, COUNT times (1,000). `ibv_srq_pingpong` is met with `-q 16`: so many queue pairs at once. The device is a
//! software device that speaks RoCE v2 over UDP from the address that --udp names, or else that of `TOKIO_RDMA_DEVICE`, or the
//! first there is. Exits with 0 if all went well.

use std::error::Error;
use std::net::{IpAddr, Ipv6Addr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::op::{ConnectOptions, Recv};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{AckTimeout, AddressVector, Gid, Mtu, PortNum, Psn, Qkey, Qpn, Transport};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, Device, Pool, ProtectionDomain, QueuePair,
    QueuePairEndpoint,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A peer that is there answers long before.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long a server waits for its client.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than a peer waits before it repeats what was not acknowledged.
const LINGER: Duration = Duration::from_secs(1);
/// Of the programs in C.
const QKEY: Qkey = Qkey(0x1111_1111);
/// Bytes in front of a datagram.
const ROUTING: usize = 40;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: pingpong [rc | uc | ud] [--udp ADDRESS] [-q COUNT] [-s SIZE] [-n COUNT] [-p PORT] [HOST]"
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
        None => Device::open_default()?,
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
            tokio::time::timeout(PATIENCE, listener.accept()).await??.0
        }
    };
    let peer = stream.peer_addr()?.ip().to_canonical();
    let ends = Ends::new(&device, peer, options)?;
    let routes = tokio::time::timeout(DEADLINE, ends.meet(&mut stream, options)).await??;
    ends.play(&routes, options).await
}

/// Our queue pairs, with a receive posted for each message that may come.
struct Ends {
    pd: ProtectionDomain,
    pool: Pool,
    queue_pairs: Vec<QueuePair>,
    /// Two of each, so that one is there while the other one is looked at.
    receives: Vec<[Recv<BufMut>; 2]>,
}

/// Where messages of a queue pair go: to its peer, or of datagrams each by this route.
type Route = Option<(AddressHandle, Qpn)>;

impl Ends {
    fn new(device: &Device, peer: IpAddr, options: &Options) -> Result<Self> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(device, CompletionMode::Event)?;
        let pool = Pool::builder(&pd)
            .buffer_size(ROUTING + options.size)
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
        // Before the peer knows of them: a datagram that finds none is lost.
        let room = || pool.try_alloc(pool.buffer_size());
        let mut receives = Vec::new();
        for qp in &queue_pairs {
            receives.push([qp.recv(room()?), qp.recv(room()?)]);
        }
        Ok(Self { pd, pool, queue_pairs, receives })
    }

    /// Both tell their queue pairs, and connect them.
    async fn meet(&self, stream: &mut TcpStream, options: &Options) -> Result<Vec<Route>> {
        let mut lines = String::new();
        for qp in &self.queue_pairs {
            lines.push_str(&line(&qp.endpoint()));
        }
        // The program with several tells as many as it could have.
        if self.queue_pairs.len() > 1 {
            lines.extend(
                (self.queue_pairs.len()..MOST).map(|_| format!("0000:000000:000000:{:032}\0", 0)),
            );
        }
        let mut theirs = vec![0; lines.len()];
        // The server connects before it answers: its receives are there when the first message comes.
        if options.host.is_some() {
            stream.write_all(lines.as_bytes()).await?;
            stream.read_exact(&mut theirs).await?;
        } else {
            stream.read_exact(&mut theirs).await?;
        }
        let mut routes = Vec::new();
        for (qp, theirs) in self.queue_pairs.iter().zip(theirs.chunks(LINE)) {
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
        // Half a second: the other end may be a process that has to wait for a processor.
        let options =
            ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() };
        qp.connect_with(&peer, &options)?;
        Ok(None)
    }

    /// Sends and answers until as many messages as there are rounds have gone either way, and says how many.
    async fn play(self, routes: &[Route], options: &Options) -> Result<()> {
        let start = Instant::now();
        let (sent, received) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let over = || sent.get() >= options.rounds && received.get() >= options.rounds;
        let Self { pool, queue_pairs, receives, .. } = self;
        let one = async |qp: &QueuePair,
                         route: &Route,
                         mut receives: [Recv<BufMut>; 2]|
               -> Result<()> {
            let mut turn = options.host.is_some();
            while !over() {
                if turn {
                    let message = pool.copy_from(&pattern(options.size))?;
                    match route {
                        Some((route, qpn)) => drop(qp.send_to(message, route, *qpn, QKEY).await?),
                        None => drop(qp.send(message).await?),
                    }
                    sent.set(sent.get() + 1);
                } else {
                    let message = (&mut receives[0]).await?;
                    let routing = if route.is_some() { ROUTING } else { 0 };
                    if message.buffer.len() != routing + options.size {
                        return Err(format!(
                            "{} bytes instead of {}",
                            message.buffer.len() - routing,
                            options.size
                        )
                        .into());
                    }
                    received.set(received.get() + 1);
                    receives[0] = qp.recv(message.buffer);
                    receives.swap(0, 1);
                }
                turn = !turn;
            }
            Ok(())
        };
        let ends = queue_pairs.iter().zip(routes).zip(receives);
        let all = ends.map(|((qp, route), receives)| Box::pin(one(qp, route, receives)));
        let all = futures::future::select_all(all);
        // The first to see that it is over ends it: the others may wait for a peer that has left.
        tokio::time::timeout(DEADLINE, all).await?.0?;
        println!(
            "{} messages sent and {} received in {:.1?}",
            sent.get(),
            received.get(),
            start.elapsed()
        );
        // A message is here before its acknowledgement leaves, and that may be lost: who repeats the last one is still answered.
        tokio::time::sleep(LINGER).await;
        Ok(())
    }
}

fn pattern(size: usize) -> Vec<u8> {
    vec![0x7b; size]
}

/// Bytes of a queue pair on TCP: LID, number, first PSN and GID in hexadecimal, and a zero.
const LINE: usize = "0000:000000:000000:00000000000000000000000000000000\0".len();

/// Queue pairs of `ibv_srq_pingpong` at most.
const MOST: usize = 256;

fn line(end: &QueuePairEndpoint) -> String {
    let gid: String = end.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{:04x}:{:06x}:{:06x}:{gid}\0", end.lid, end.qpn.0, end.psn.value())
}

fn parse(line: &[u8], peer: &mut QueuePairEndpoint) -> Result<()> {
    let text = std::str::from_utf8(line)?.trim_end_matches('\0');
    let [lid, qpn, psn, gid] = text.split(':').collect::<Vec<_>>()[..] else {
        return Err(format!("{text:?} is no queue pair").into());
    };
    peer.lid = u16::from_str_radix(lid, 16)?;
    peer.qpn = Qpn(u32::from_str_radix(qpn, 16)?);
    peer.psn = Psn::new(u32::from_str_radix(psn, 16)?);
    peer.gid = Gid(u128::from_str_radix(gid, 16)?.to_be_bytes());
    // Unless they are told otherwise.
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
        // Those of the programs in C.
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
        if options.queue_pairs > MOST {
            return Err(format!("-q takes at most {MOST}").into());
        }
        if options.queue_pairs == 0 || options.size == 0 || options.rounds == 0 {
            return Err("-q, -s and -n take at least 1".into());
        }
        Ok(options)
    }
}
