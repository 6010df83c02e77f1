//! Where the two ends are, and with which devices.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig, UdpError};

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

const USAGE: &str = "a lab takes --quick, and one of --udp, --listen ADDRESS:PORT and --connect ADDRESS:PORT";

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

/// Of an end whose peer is another process: the real device that is named, or a software device that speaks RoCE v2 over UDP
/// from the first of these addresses that is free.
pub(crate) fn device_of(addresses: impl IntoIterator<Item = IpAddr>) -> Result<Device> {
    if is_real() {
        return Ok(Device::open_default()?);
    }
    let mut last = "no address".into();
    for address in addresses {
        // Whoever names an address wants it to be reached.
        match Network::udp(&UdpConfig::new().address(address).expose()) {
            Ok(network) => return Ok(Device::software_in(&network, &address.to_string())?),
            Err(error @ UdpError::PortTaken { soft_roce: false, .. }) => last = error.into(),
            Err(error) => return Err(error.into()),
        }
    }
    Err(last)
}

/// True if a real device is named.
pub(crate) fn is_real() -> bool {
    std::env::var("TOKIO_RDMA_DEVICE").is_ok_and(|name| name != Device::SOFTWARE)
}

/// Addresses from which to reach `peer`, best first. Port 4791 has room for one program at each address, so that two of them
/// on loopback need two of its addresses.
pub(crate) fn sources(peer: SocketAddr) -> Result<Vec<IpAddr>> {
    let socket = UdpSocket::bind(if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(peer)?;
    Ok(match socket.local_addr()?.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => (2..=254).map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect(),
        ip => vec![ip],
    })
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
