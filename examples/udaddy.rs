//! `udaddy(1)` of rdmacm-utils in Rust: datagrams to a service that is found by its address. Client
//! and server interoperate with the C program.
//!
//! ```text
//! udaddy [--udp ADDRESS] [-b ADDRESS] [-p PORT] [-C COUNT] [-S SIZE]              serves a client
//! udaddy [--udp ADDRESS] [-b ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] -s ADDRESS   is the client
//! ```
//!
//! ```text
//!   client                                               server
//!     │ ─── query for the service ─────────────────────────▶ │
//!     │ ◀──────────────── queue pair number and Q_Key ────── │
//!     │ ─── COUNT datagrams of SIZE bytes ─────────────────▶ │
//!     │ ◀────────────────────────────────── the same back ── │
//! ```
//!
//! COUNT is 10, SIZE 100 bytes, PORT 7174. Each datagram carries its sender's queue pair number as
//! immediate data. With --udp the device is a software device that sends RoCE v2 from ADDRESS.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use tokio_rdma::cm::{ConnectConfig, DatagramListener, resolve_datagrams};
use tokio_rdma::op::{DatagramSender, Recv};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{Qkey, Qpn, Transport};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, Device, Imm, Pool, ProtectionDomain, QueuePair,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Time for all datagrams to arrive.
const DEADLINE: Duration = Duration::from_secs(60);
/// Length of the header in front of a received datagram.
const HEADER: usize = 40;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: udaddy [--udp ADDRESS] [-b ADDRESS] [-p PORT] [-C COUNT] \
                 [-S SIZE] [-s ADDRESS]"
            );
            return ExitCode::from(2);
        }
    };
    let done = match options.server {
        Some(server) => ask(&options, server).await,
        None => serve(&options).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("udaddy: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(options: &Options) -> Result<()> {
    let end = End::new(options)?;
    let ip = match options.udp.or(options.bind) {
        Some(ip) => ip,
        None => end.device.default_path()?.1.gid.to_ip(),
    };
    let address = SocketAddr::new(ip, options.port);
    let listener = DatagramListener::bind(&end.device, address).await?;
    // Scripts wait for this line.
    println!("listening at {}", listener.local_addr());
    // Posted first: the client sends as soon as it has the answer.
    let receives = end.receives(options)?;
    let request = tokio::time::timeout(DEADLINE, listener.accept()).await??;
    request.accept(&end.qp, b"")?;
    let sender = end.receive(receives, options).await?;
    let back = sender.address_handle(&end.pd)?;
    end.send(&back, sender.qpn, Qkey::RDMA_UDP, options).await
}

async fn ask(options: &Options, server: IpAddr) -> Result<()> {
    let end = End::new(options)?;
    let receives = end.receives(options)?;
    let config = ConnectConfig::default();
    let config = options.bind.into_iter().fold(config, ConnectConfig::source);
    let address = SocketAddr::new(server, options.port);
    let peer = resolve_datagrams(&end.device, address, &config).await?;
    end.send(&peer.address_handle(&end.pd)?, peer.qpn(), peer.qkey(), options).await?;
    let answered_by = end.receive(receives, options).await?.qpn;
    if answered_by != peer.qpn() {
        return Err(format!("answered by {answered_by} instead of {}", peer.qpn()).into());
    }
    Ok(())
}

struct End {
    qp: QueuePair,
    pool: Pool,
    pd: ProtectionDomain,
    device: Device,
}

impl End {
    fn new(options: &Options) -> Result<Self> {
        let device = match (options.udp, options.bind) {
            (Some(address), _) => {
                let network = Network::udp(&UdpConfig::new().address(address).expose())?;
                Device::software_in(&network, &address.to_string())?
            }
            (None, Some(address)) => Device::open_default_at(address)?,
            (None, None) => Device::open_default()?,
        };
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
        let builder = QueuePair::builder(&pd, &queue).transport(Transport::Ud).qkey(Qkey::RDMA_UDP);
        let qp = builder.max_recv_wr(options.count).build()?;
        qp.activate()?;
        let buffers = 2 * options.count as usize;
        let pool =
            Pool::builder(&pd).buffer_size(HEADER + options.size).buffers(buffers).build()?;
        Ok(Self { qp, pool, pd, device })
    }

    fn receives(&self, options: &Options) -> Result<Vec<Recv<BufMut>>> {
        let one = |_| Ok(self.qp.recv(self.pool.try_alloc(HEADER + options.size)?));
        (0..options.count).map(one).collect()
    }

    /// Receives all datagrams; returns the last one's sender.
    async fn receive(
        &self,
        receives: Vec<Recv<BufMut>>,
        options: &Options,
    ) -> Result<DatagramSender> {
        let all = async {
            let mut last = None;
            for receive in receives {
                let received = receive.await?;
                let sender = received.sender().ok_or("a datagram without its header")?;
                let length = received.buffer.len();
                if received.imm != Some(Imm(sender.qpn.0)) || length != HEADER + options.size {
                    return Err(format!("another datagram than udaddy sends: {received:?}").into());
                }
                last = Some(sender);
            }
            last.ok_or_else(|| "COUNT is 0".into())
        };
        let last = tokio::time::timeout(DEADLINE, all).await?;
        println!("received {} datagrams of {} bytes", options.count, options.size);
        last
    }

    async fn send(
        &self,
        route: &AddressHandle,
        to: Qpn,
        qkey: Qkey,
        options: &Options,
    ) -> Result<()> {
        for _ in 0..options.count {
            let data = self.pool.copy_from(&vec![0x5a; options.size])?;
            self.qp.with_imm(Imm(self.qp.qpn().0)).send_to(data, route, to, qkey).await?;
        }
        println!("sent {} datagrams of {} bytes", options.count, options.size);
        Ok(())
    }
}

struct Options {
    udp: Option<IpAddr>,
    bind: Option<IpAddr>,
    port: u16,
    count: u32,
    size: usize,
    server: Option<IpAddr>,
}

impl Options {
    fn from_arguments() -> Result<Self> {
        let (mut udp, mut bind, mut server) = (None, None, None);
        let (mut port, mut count, mut size) = (7174, 10, 100);
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match &*argument {
                "--udp" => udp = Some(value()?.parse()?),
                "-b" => bind = Some(value()?.parse()?),
                "-p" => port = value()?.parse()?,
                "-C" => count = value()?.parse()?,
                "-S" => size = value()?.parse()?,
                "-s" => server = Some(value()?.parse()?),
                _ => return Err(format!("unknown option {argument}").into()),
            }
        }
        Ok(Self { udp, bind, port, count, size, server })
    }
}
