//! The location of the ends, and their devices.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig};

use crate::{Result, in_time};

#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) quick: bool,
    pub(crate) place: Place,
}

/// The ends that this process runs.
#[derive(Debug)]
pub(crate) enum Place {
    /// Both. With `udp` their packets can be captured on loopback.
    Here { udp: bool },
    /// The server, listening at this address.
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

const USAGE: &str = "usage: [--quick] [--udp | --listen ADDRESS:PORT | --connect ADDRESS:PORT]";

/// Opens the device of end 0 or 1. With `udp` that is a software device at 127.0.73.1 or
/// 127.0.73.2.
pub(crate) fn device_here(udp: bool, index: u8) -> Result<Device> {
    if !udp {
        return Ok(Device::open_default_or_software()?);
    }
    let address = IpAddr::V4(Ipv4Addr::new(127, 0, 73, index + 1));
    let network = Network::udp(&UdpConfig::new().address(address))?;
    Ok(Device::software_in(&network, &address.to_string())?)
}

/// Opens the listener for a client in this process.
pub(crate) fn listen_here() -> Result<(std::net::TcpListener, SocketAddr)> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

pub(crate) async fn accept(listener: std::net::TcpListener) -> Result<TcpStream> {
    let listener = TcpListener::from_std(listener)?;
    Ok(in_time("the client's connection", listener.accept()).await?.0)
}

pub(crate) async fn connect(address: SocketAddr) -> Result<TcpStream> {
    let connected = in_time("the connection", TcpStream::connect(address)).await;
    connected.map_err(|error| format!("no server at {address}: {error}").into())
}
