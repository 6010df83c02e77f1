//! `mckey(1)` of rdmacm-utils in Rust: datagrams to a multicast group. Sender and receiver
//! interoperate with the C program.
//!
//! ```text
//! mckey -m GROUP [--udp ADDRESS] [-b ADDRESS] [-C COUNT] [-S SIZE]      receives
//! mckey -m GROUP [--udp ADDRESS] [-b ADDRESS] [-C COUNT] [-S SIZE] -s   sends
//! ```
//!
//! Both join GROUP on the device that has ADDRESS. The sender sends COUNT datagrams (10) of SIZE
//! bytes (100), with its queue pair number as immediate data; each receiver takes as many. With
//! --udp the device is a software device that sends RoCE v2 from ADDRESS.

use std::error::Error;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{Qkey, Qpn, Transport};
use tokio_rdma::{CompletionMode, CompletionQueue, Device, Imm, Pool, QueuePair};

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
                "{error}\nusage: mckey -m GROUP [--udp ADDRESS] [-b ADDRESS] [-C COUNT] [-S SIZE] \
                 [-s]"
            );
            return ExitCode::from(2);
        }
    };
    match run(&options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mckey: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
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
    let buffers = options.count as usize;
    let pool = Pool::builder(&pd).buffer_size(HEADER + options.size).buffers(buffers).build()?;
    // Posted before the queue pair receives.
    let receives = (0..options.count).map(|_| Ok(qp.recv(pool.try_alloc(HEADER + options.size)?)));
    let receives: Vec<_> =
        if options.sends { Vec::new() } else { receives.collect::<Result<_>>()? };
    qp.activate()?;
    let group = qp.join_multicast(options.group).await?;
    // Scripts wait for this line.
    println!("joined {} from queue pair {}", group.gid(), qp.qpn());
    if options.sends {
        let route = group.address_handle(&pd)?;
        for _ in 0..options.count {
            let data = pool.copy_from(&vec![0x5a; options.size])?;
            let send = qp.with_imm(Imm(qp.qpn().0));
            send.send_to(data, &route, Qpn::MULTICAST, group.qkey()).await?;
        }
    } else {
        let all = async {
            for receive in receives {
                let received = receive.await?;
                let sender = received.sender().ok_or("a datagram without its header")?;
                if sender.destination.is_some_and(|to| to != group.gid()) {
                    return Err(format!("a datagram to another group: {sender:?}").into());
                }
                if received.imm != Some(Imm(sender.qpn.0))
                    || received.buffer.len() != HEADER + options.size
                {
                    return Err(format!("another datagram than mckey sends: {received:?}").into());
                }
            }
            Result::Ok(())
        };
        tokio::time::timeout(DEADLINE, all).await??;
    }
    let done = if options.sends { "sent" } else { "received" };
    println!("{done} {} datagrams of {} bytes", options.count, options.size);
    Ok(())
}

struct Options {
    group: IpAddr,
    udp: Option<IpAddr>,
    bind: Option<IpAddr>,
    count: u32,
    size: usize,
    sends: bool,
}

impl Options {
    fn from_arguments() -> Result<Self> {
        let (mut group, mut udp, mut bind, mut sends) = (None, None, None, false);
        let (mut count, mut size) = (10, 100);
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match &*argument {
                "-m" => group = Some(value()?.parse()?),
                "--udp" => udp = Some(value()?.parse()?),
                "-b" => bind = Some(value()?.parse()?),
                "-C" => count = value()?.parse()?,
                "-S" => size = value()?.parse()?,
                "-s" => sends = true,
                _ => return Err(format!("unknown option {argument}").into()),
            }
        }
        let group = group.ok_or("-m GROUP is missing")?;
        Ok(Self { group, udp, bind, count, size, sends })
    }
}
