//! Where the two ends are, and with which devices.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig};

use crate::{Result, in_time};

/// How a lab was started.
#[derive(Debug)]
pub(crate) struct Arguments {
    /// `--quick`: as little as shows that it works.
    pub(crate) quick: bool,
    pub(crate) place: Place,
}

/// Which ends this process is.
#[derive(Debug)]
pub(crate) enum Place {
    /// Both. `--udp`: they speak over UDP on loopback, so that their packets can be captured.
    Here { udp: bool },
    /// The server, at this address.
    Listen(SocketAddr),
    /// The client of the server at this address.
    Connect(SocketAddr),
}

impl Arguments {
    pub(crate) fn parse() -> Result<Self> {
        use lexopt::prelude::{Long, ValueExt};
        let (mut quick, mut udp, mut listen, mut connect) = (false, false, None, None);
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Long("quick") => quick = true,
                Long("udp") => udp = true,
                Long("listen") => listen = Some(arguments.value()?.parse()?),
                Long("connect") => connect = Some(arguments.value()?.parse()?),
                other => return Err(format!("{}; {USAGE}", other.unexpected()).into()),
            }
        }
        let place = match (udp, listen, connect) {
            (udp, None, None) => Place::Here { udp },
            (false, Some(address), None) => Place::Listen(address),
            (false, None, Some(address)) => Place::Connect(address),
            _ => return Err(USAGE.into()),
        };
        Ok(Self { quick, place })
    }
}

const USAGE: &str =
    "a lab takes --quick, and one of --udp, --listen ADDRESS:PORT and --connect ADDRESS:PORT";

/// Of end number `index` of two in this process: with `udp` a software device of its own, at 127.0.73.1 and 127.0.73.2, else
/// the one that `TOKIO_RDMA_DEVICE` names, or the first there is.
pub(crate) fn device_here(udp: bool, index: u8) -> Result<Device> {
    if !udp {
        return Ok(Device::open_default()?);
    }
    let address = IpAddr::V4(Ipv4Addr::new(127, 0, 73, index + 1));
    let network = Network::udp(&UdpConfig::new().address(address))?;
    Ok(Device::software_in(&network, &address.to_string())?)
}

/// Where a client in this process finds the server.
pub(crate) fn listen_here() -> Result<(std::net::TcpListener, SocketAddr)> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// The client in this process.
pub(crate) async fn answer(listener: std::net::TcpListener) -> Result<TcpStream> {
    let listener = TcpListener::from_std(listener)?;
    Ok(in_time("the client's call", listener.accept()).await?.0)
}

/// The server.
pub(crate) async fn call(address: SocketAddr) -> Result<TcpStream> {
    let called = in_time("the call", TcpStream::connect(address)).await;
    called.map_err(|error| format!("no server at {address}: {error}").into())
}
