use std::fmt;
use std::net::SocketAddr;

use tokio::net::ToSocketAddrs;

use crate::error::SetupError;
use crate::op::{PathConfig, QueuePair, QueuePairBuilder};
use crate::types::{AddressVector, Qkey, Qpn, Transport};
use crate::verbs::{AddressHandle, Device, ProtectionDomain};
use rdma_provider::cm_contract::{CmDatagram, CmId as _, CmParams, MAX_FOUND_DATA, MAX_QUERY_DATA};

use super::config::{ConnectConfig, ListenConfig, check_private_data};
use super::connector::{Route, lookup, no_address, resolve_one};
use super::endpoint::with_deadline;
use super::error::{ConnectError, ConnectStep};
use super::listener::{ConnectionRequest, Listener};
use super::path::LocalSource;
use super::router::Router;

/// A service of datagrams, which clients find by its address (port space UDP, SIDR). Nothing is
/// connected: one queue pair can serve all clients, and [`Received::sender`] says whom to answer.
/// Dropping the service releases the address and refuses requests that were not accepted.
///
/// [`Received::sender`]: crate::op::Received::sender
///
/// ```
/// use tokio_rdma::cm::{ConnectConfig, DatagramListener, resolve_datagrams};
/// use tokio_rdma::types::{Qkey, Transport};
/// use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let pd = device.protection_domain()?;
/// let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// let pool = Pool::new(&pd, 64, 4)?;
/// let new = || {
///     QueuePair::builder(&pd, &queue).transport(Transport::Ud).qkey(Qkey::RDMA_UDP).build()
/// };
/// let (client, server) = (new()?, new()?);
/// client.activate()?;
/// server.activate()?;
///
/// let listener = DatagramListener::bind(&device, "127.0.0.1:0").await?;
/// let config = ConnectConfig::default();
/// let resolving = resolve_datagrams(&device, listener.local_addr(), &config);
/// let accepting = async { listener.accept().await?.accept(&server, b"") };
/// let (peer, ()) = tokio::try_join!(resolving, accepting)?;
///
/// let received = server.recv(pool.try_alloc(64)?);
/// let route = peer.address_handle(&pd)?;
/// client.send_to(pool.copy_from(b"question")?, &route, peer.qpn(), peer.qkey()).await?;
///
/// let received = received.await?;
/// assert_eq!(received.buffer[40..], *b"question");
/// let sender = received.sender().ok_or("no header")?;
/// let answer = client.recv(pool.try_alloc(64)?);
/// let route = sender.address_handle(&pd)?;
/// server.send_to(pool.copy_from(b"answer")?, &route, sender.qpn, Qkey::RDMA_UDP).await?;
/// assert_eq!(answer.await?.buffer[40..], *b"answer");
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
///
/// A dropped future of `bind` leaves no listener behind, and one of `accept` loses no request.
#[derive(Debug)]
pub struct DatagramListener(Listener);

impl DatagramListener {
    /// Calls [`bind_with`](Self::bind_with) with default [`ListenConfig`].
    ///
    /// # Errors
    ///
    /// As for [`Listener::bind_with`].
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> Result<Self, ConnectError> {
        Self::bind_with(device, address, &ListenConfig::default()).await
    }

    /// Serves at the first available of the addresses, `rdma_listen(3)`. Ports of datagrams are
    /// apart from those of a [`Listener`]. Port 0 selects a free port.
    ///
    /// # Errors
    ///
    /// As for [`Listener::bind_with`].
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: &ListenConfig,
    ) -> Result<Self, ConnectError> {
        Listener::bind_by(device, address, config, Router::create_datagram_id).await.map(Self)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.0.device()
    }

    /// Returns the address, with the actual port.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Returns the next request, in the order of arrival. A client whose answer is lost sends
    /// another one.
    ///
    /// # Errors
    ///
    /// [`ConnectError::DeviceRemoved`] if no more requests can arrive.
    pub async fn accept(&self) -> Result<DatagramRequest, ConnectError> {
        self.0.accept().await.map(DatagramRequest)
    }
}

/// A client's request for the queue pair that serves it. Dropping it refuses the request.
pub struct DatagramRequest(ConnectionRequest);

impl DatagramRequest {
    /// Returns the client's address. Over UDP, the software device has checked that it is the
    /// sender's; otherwise a client can forge it.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.0.peer_addr()
    }

    /// Returns the address to which the request was sent.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Returns the request's private data, padded with zeros to 180 bytes.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        self.0.private_data()
    }

    /// Sets the builder's port, GID and partition to the destination of the request.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        self.0.prepare(builder)
    }

    /// Answers with the number of `queue_pair` and with private data, at most 136 bytes,
    /// `rdma_accept(3)`. The client may send as soon as it has the answer, so
    /// [activate](QueuePair::activate) the queue pair and post receives first.
    ///
    /// The queue pair needs the Q_Key [`Qkey::RDMA_UDP`], which the kernel's connection manager
    /// sends, and the port and GID of the request.
    ///
    /// # Errors
    ///
    /// Any error refuses the request.
    ///
    /// - [`ConnectError::Setup`] for a queue pair that does not fit;
    /// - [`ConnectError::Limit`] for more private data;
    /// - [`ConnectError::Verb`] if the connection manager fails.
    pub fn accept(self, queue_pair: &QueuePair, private_data: &[u8]) -> Result<(), ConnectError> {
        let (device, address) = (self.0.device(), self.peer_addr());
        let misfit =
            |error: SetupError| ConnectError::from(error).during(ConnectStep::Prepare, address);
        let source = self.0.local_source();
        source.check_source(device, queue_pair, Transport::Ud).map_err(misfit)?;
        let qkey = queue_pair.query().map_err(misfit)?.1.qkey.unwrap_or_default();
        queue_pair
            .require_equal(
                "Q_Keys of the queue pair and the connection manager (use Qkey::RDMA_UDP)",
                qkey,
                Qkey::RDMA_UDP,
            )
            .map_err(misfit)?;
        check_private_data(private_data, MAX_FOUND_DATA)?;
        let params = params(queue_pair.qpn(), private_data, &ConnectConfig::default());
        let accepted = self.0.endpoint().id().accept(&params);
        accepted.map_err(|error| ConnectError::from(error).during(ConnectStep::Accept, address))
    }
}

impl fmt::Debug for DatagramRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramRequest")
            .field("local", &self.local_addr())
            .field("peer", &self.peer_addr())
            .finish_non_exhaustive()
    }
}

fn params<'a>(qpn: Qpn, private_data: &'a [u8], config: &ConnectConfig) -> CmParams<'a> {
    CmParams {
        qpn,
        private_data,
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry: 0,
        timeout: config.timeout,
        srq: false,
    }
}

/// Finds the queue pair that serves datagrams at the first of the addresses that answers:
/// `rdma_resolve_addr(3)`, `rdma_resolve_route(3)` and `rdma_connect(3)` in port space UDP (SIDR).
/// [`DatagramListener`] has an example.
///
/// Of `config`, it uses the source address, both time limits, the private data (at most 180 bytes)
/// and, for [`DatagramPeer::address`], the path. The request itself is sent in the partition that
/// the connection manager selects, on the software device the first of the port's table: a peer of
/// another partition does not answer.
///
/// # Errors
///
/// - those of [`resolve_with`](super::resolve_with);
/// - [`ConnectError::Refused`] if nothing serves datagrams at the address;
/// - [`ConnectError::Rejected`] if the service refuses the request;
/// - [`ConnectError::Unreachable`], or [`ConnectError::TimedOut`] after
///   [`ConnectConfig::timeout`], if the peer does not answer;
/// - [`ConnectError::Limit`] for more private data.
///
/// # Cancel safety
///
/// Dropping the future has no effect, except that the service may have seen the request.
pub async fn resolve_datagrams(
    device: &Device,
    address: impl ToSocketAddrs + fmt::Debug,
    config: &ConnectConfig,
) -> Result<DatagramPeer, ConnectError> {
    let private_data = config.checked(MAX_QUERY_DATA)?;
    let mut last = None;
    for address in lookup(address, config).await? {
        let attempt = async {
            let route = resolve_one(device, address, config, Router::create_datagram_id).await?;
            query(route, address, private_data, config).await
        };
        match attempt.await {
            Ok(peer) => return Ok(peer),
            Err(error) => last = Some(error.during(ConnectStep::Resolve, address)),
        }
    }
    Err(last.unwrap_or_else(no_address))
}

async fn query(
    route: Route,
    address: SocketAddr,
    private_data: &[u8],
    config: &ConnectConfig,
) -> Result<DatagramPeer, ConnectError> {
    let Route { endpoint, local_source, .. } = route;
    let device = endpoint.router.device.clone();
    let found = with_deadline(config.timeout, ConnectStep::Response, address, async || {
        let params = params(Qpn(0), private_data, config);
        endpoint
            .id()
            .connect(&params)
            .map_err(|error| ConnectError::from(error).during(ConnectStep::Request, address))?;
        endpoint
            .wait_for(|state| match (state.found.take(), &state.end) {
                (Some(found), _) => Some(Ok(found)),
                (None, Some(end)) => {
                    Some(Err(ConnectError::from_end(end, ConnectStep::Response, address)))
                }
                (None, None) => None,
            })
            .await
    });
    let (service, private_data) = found.await.map_err(|error| error.through(&device))?;
    Ok(DatagramPeer { service, private_data, local_source, path: config.path })
}

/// The queue pair of a peer that serves datagrams, found by [`resolve_datagrams`].
#[derive(Debug, Clone)]
pub struct DatagramPeer {
    service: CmDatagram,
    private_data: Vec<u8>,
    local_source: LocalSource,
    path: PathConfig,
}

impl DatagramPeer {
    /// Returns the number of the peer's queue pair.
    #[must_use]
    pub const fn qpn(&self) -> Qpn {
        self.service.qpn
    }

    /// Returns the Q_Key of the peer's queue pair, usually [`Qkey::RDMA_UDP`], and usually that of
    /// its answers, which your queue pair needs.
    #[must_use]
    pub const fn qkey(&self) -> Qkey {
        self.service.qkey
    }

    /// Returns the private data of the answer, padded with zeros to 136 bytes.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the route to the peer, with the [path](ConnectConfig::path) of the settings.
    #[must_use]
    pub fn address(&self) -> AddressVector {
        self.path.applied(self.service.address)
    }

    /// Creates an address handle from the port and GID of the route.
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`].
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle, SetupError> {
        Ok(pd.address_handle(&self.address())?)
    }

    /// Sets the builder's port, GID and, if the connection manager selects it, partition, from the
    /// route.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        self.local_source.prepare(builder)
    }
}
