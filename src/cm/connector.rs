//! The active side: resolve, connect.

use std::fmt;
use std::net::SocketAddr;
use std::time::Instant;

use tokio::net::{ToSocketAddrs, lookup_host};

use crate::error::{SetupError, VerbError};
use crate::op::{QueuePair, QueuePairBuilder};
use crate::types::{Gid, PortNum};
use crate::verbs::Device;
use rdma_provider::cm_contract::{CmId as _, MAX_REQUEST_DATA};

use super::endpoint::{Endpoint, Halfway, within};
use super::error::{ConnectError, Step};
use super::keepalive::Keepalive;
use super::link::Link;
use super::options::Options;
use super::path::{Path, Reads, make_ready};
use super::router::Router;

/// Connects to a listener: to the first of the addresses that answers. `make` makes a queue pair for a route, mostly by
/// [`Route::prepare`], anew for each address that is tried.
///
/// # Errors
///
/// That of the last address: as [`resolve`] and [`Route::connect`], and what `make` gives. [`ConnectError::NoRuntime`] outside
/// of a Tokio runtime with an I/O driver.
///
/// # Cancel safety
///
/// Dropping the future takes the request back; the queue pair made for it is in the error state.
pub async fn connect(
    device: &Device,
    address: impl ToSocketAddrs,
    options: &Options,
    mut make: impl FnMut(&Route) -> Result<QueuePair, SetupError>,
) -> Result<(QueuePair, Link), ConnectError> {
    let mut last = no_address();
    for address in lookup(address, options).await? {
        let attempt = async {
            let route = resolve_one(device, address, options).await?;
            let unprepared = |error| ConnectError::from(error).during(Step::Prepare, address);
            let queue_pair = make(&route).map_err(unprepared)?;
            let link = route.connect(&queue_pair, options).await?;
            Ok((queue_pair, link))
        };
        match attempt.await {
            Ok(connected) => return Ok(connected),
            Err(error) => last = ConnectError::during(error, Step::Resolve, address),
        }
    }
    Err(last)
}

/// The way to a listener, with default [`Options`].
///
/// # Errors
///
/// As [`resolve_with`].
///
/// # Cancel safety
///
/// As [`resolve_with`]: dropping the future leaves nothing behind.
pub async fn resolve(device: &Device, address: impl ToSocketAddrs) -> Result<Route, ConnectError> {
    resolve_with(device, address, &Options::default()).await
}

/// The way to a listener: `rdma_resolve_addr(3)` and `rdma_resolve_route(3)`. Of several addresses the first to which
/// there is one.
///
/// # Errors
///
/// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver, [`ConnectError::Lookup`] for a host
/// name that means nothing, [`ConnectError::Resolve`] if no device leads there,
/// [`ConnectError::OtherDevice`] if another one than `device` does, [`ConnectError::AddressNotAvailable`] if
/// [`Options::source`] is not ours, [`ConnectError::Setup`] if that is of another family, [`ConnectError::TimedOut`] after
/// [`Options::resolve_timeout`].
///
/// # Cancel safety
///
/// Dropping the future leaves nothing behind.
pub async fn resolve_with(
    device: &Device,
    address: impl ToSocketAddrs,
    options: &Options,
) -> Result<Route, ConnectError> {
    let mut last = no_address();
    for address in lookup(address, options).await? {
        match resolve_one(device, address, options).await {
            Ok(route) => return Ok(route),
            Err(error) => last = error.during(Step::Resolve, address),
        }
    }
    Err(last)
}

/// What a lookup without an error and without an address comes to.
pub(super) fn no_address() -> ConnectError {
    ConnectError::Lookup {
        kind: std::io::ErrorKind::NotFound,
        message: "the host has no address".to_owned(),
    }
}

/// All addresses, looked up by Tokio's resolver.
pub(super) async fn lookup(
    address: impl ToSocketAddrs,
    options: &Options,
) -> Result<Vec<SocketAddr>, ConnectError> {
    within(options.time_to_resolve(), Step::Lookup, async {
        let found = lookup_host(address).await.map_err(|error| ConnectError::lookup(&error))?;
        Ok(found.collect())
    })
    .await
}

async fn resolve_one(
    device: &Device,
    address: SocketAddr,
    options: &Options,
) -> Result<Route, ConnectError> {
    /// Of `errno(3)`.
    const ENETUNREACH: i32 = 101;
    /// Of `errno(3)`.
    const EHOSTUNREACH: i32 = 113;
    let source = options.source_to(address)?;
    let endpoint = Endpoint::create(&Router::of(device).await?)?;
    let (timeout, start) = (options.time_to_resolve(), Instant::now());
    let unresolved = move |errno| ConnectError::Resolve { address, errno };
    within(timeout, Step::Resolve, async {
        // The provider's own timeouts end later than ours, which has the better error.
        endpoint
            .call(move |id| {
                id.resolve_addr(source, address, timeout).map_err(|error| {
                    match (error.errno, source) {
                        (VerbError::EADDRNOTAVAIL, Some(source)) => {
                            let source = Some(source.ip());
                            ConnectError::AddressNotAvailable {
                                address,
                                source,
                                step: Step::Resolve,
                            }
                        }
                        // Found out at once.
                        (ENETUNREACH | EHOSTUNREACH | VerbError::ENODEV, _) => {
                            unresolved(error.errno)
                        }
                        _ => error.into(),
                    }
                })
            })
            .await?;
        endpoint
            .until(|happened| {
                happened.address.or_else(|| happened.end.as_ref().map(|_| Err(VerbError::ENODEV)))
            })
            .await
            .map_err(unresolved)?;
        let left = timeout.saturating_sub(start.elapsed());
        endpoint.call(move |id| Ok(id.resolve_route(left)?)).await?;
        endpoint
            .until(|happened| {
                happened.route.or_else(|| happened.end.as_ref().map(|_| Err(VerbError::ENODEV)))
            })
            .await
            .map_err(unresolved)
    })
    .await?;
    let route = endpoint.route().ok_or(unresolved(VerbError::ENODEV))?;
    if route.device != device.name() {
        return Err(ConnectError::OtherDevice { address, device: route.device });
    }
    let path = Path::find(device, &route)?;
    Ok(Route { endpoint, path, destination: route.destination, address })
}

/// The way to a listener, found by [`resolve`].
pub struct Route {
    endpoint: Endpoint,
    path: Path,
    destination: Gid,
    address: SocketAddr,
}

impl Route {
    /// Makes a queue pair to be described by `builder` send from the port and GID of this route.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        builder.source(self.path.port, self.path.gid_index)
    }

    /// Port that it leaves from.
    #[must_use]
    pub const fn port(&self) -> PortNum {
        self.path.port
    }

    /// Index of the GID that it leaves from, in the table of that port.
    #[must_use]
    pub const fn gid_index(&self) -> u8 {
        self.path.gid_index
    }

    /// GID at the other end.
    #[must_use]
    pub const fn destination(&self) -> Gid {
        self.destination
    }

    /// Address of the listener.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.address
    }

    /// Connects `queue_pair`, which is in INIT and sends from the port and GID of this route. It is ready to use when
    /// this returns.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver, [`ConnectError::Refused`] if
    /// no listener has the address, [`ConnectError::Rejected`] if the listener rejects the request,
    /// [`ConnectError::TimedOut`] after [`Options::timeout`], [`ConnectError::Limit`] for private data of more than 56
    /// bytes or more [`Options::reads`] than the device can, [`ConnectError::Setup`] for a queue pair that does not fit. The queue
    /// pair is in the error state then,
    /// unless it did not fit.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future takes the request back, and the queue pair goes to the error state.
    pub async fn connect(
        self,
        queue_pair: &QueuePair,
        options: &Options,
    ) -> Result<Link, ConnectError> {
        let Self { endpoint, path, address, .. } = self;
        endpoint.ready()?;
        let device = endpoint.router().device().clone();
        let (_, transport) = options.checked(MAX_REQUEST_DATA)?;
        let misfit = |error| ConnectError::from(error).during(Step::Prepare, address);
        path.check(&device, queue_pair).map_err(misfit)?;
        Keepalive::check(options.probes(), transport.timeout, queue_pair).map_err(misfit)?;
        let halfway = Halfway::new(queue_pair);
        let reads = Reads::of(&device, options)?;
        let peer = within(options.deadline(), Step::Response, async {
            let (ours, options) = (queue_pair.clone(), options.clone());
            endpoint
                .call(move |id| {
                    let (private_data, _) = options.checked(MAX_REQUEST_DATA)?;
                    Ok(id.connect(&reads.params(&ours, private_data, options.deadline()))?)
                })
                .await
                .map_err(|error| error.during(Step::Request, address))?;
            let peer = endpoint
                .until(|happened| match (&happened.end, &happened.response) {
                    (Some(end), _) => Some(Err(ConnectError::ended(end, Step::Response, address))),
                    (None, Some(peer)) => Some(Ok(peer.clone())),
                    (None, None) => None,
                })
                .await?;
            endpoint.inbox().tie(queue_pair);
            let (ours, reads) = (queue_pair.clone(), reads.agreed(&peer));
            let confirmed = endpoint
                .call(move |id| {
                    make_ready(id, &ours, reads, transport)?;
                    Ok(id.establish()?)
                })
                .await;
            endpoint.blame(confirmed, Step::Confirm, address).await?;
            Ok(peer)
        })
        .await
        .map_err(|error| error.during(Step::Response, address))?;
        halfway.arrived();
        let local = endpoint.local_addr().unwrap_or(SocketAddr::new(path.gid.to_ip(), 0));
        let link = Link::new(endpoint, peer.private_data, (local, address), options.deadline());
        Ok(link.with_keepalive(options.probes(), queue_pair)?)
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route")
            .field("peer", &self.address)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}
