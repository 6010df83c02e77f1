use std::fmt;
use std::io;
use std::net::SocketAddr;

use smallvec::SmallVec;
use tokio::net::{ToSocketAddrs, lookup_host};

use crate::clock;
use crate::dispatch::CmId;
use crate::error::{NoRuntime, SetupError, VerbError};
use crate::op::{QueuePair, QueuePairBuilder};
use crate::types::{Gid, PortNum};
use crate::verbs::Device;
use rdma_provider::cm_contract::{CmId as _, CmParams, MAX_REQUEST_DATA};

use super::config::ConnectConfig;
use super::connection::CmConnection;
use super::endpoint::{Endpoint, FailUnlessConnected, with_deadline};
use super::error::{ConnectError, ConnectStep};
use super::keepalive::Keepalive;
use super::path::{LocalSource, Reads, make_ready};
use super::router::{CreateId, Router};

/// Connects to the first of the addresses that answers. `make` builds a queue pair for each route,
/// usually with [`Route::prepare`].
///
/// # Errors
///
/// The error of [`resolve_with`], [`Route::connect`] or `make` for the last address.
///
/// # Cancel safety
///
/// As for [`Route::connect`].
pub async fn connect(
    device: &Device,
    address: impl ToSocketAddrs + fmt::Debug,
    config: &ConnectConfig,
    mut make: impl FnMut(&Route) -> Result<QueuePair, SetupError>,
) -> Result<(QueuePair, CmConnection), ConnectError> {
    let mut last = None;
    for address in lookup(address, config).await? {
        let attempt = async {
            let route = resolve_one(device, address, config, Router::create_id).await?;
            let queue_pair = make(&route)
                .map_err(|error| ConnectError::from(error).during(ConnectStep::Prepare, address))?;
            let link = route.connect(&queue_pair, config).await?;
            Ok((queue_pair, link))
        };
        match attempt.await {
            Ok(connected) => return Ok(connected),
            Err(error) => {
                last = Some(ConnectError::during(error, ConnectStep::Resolve, address));
            }
        }
    }
    Err(last.unwrap_or_else(no_address))
}

/// Calls [`resolve_with`] with default [`ConnectConfig`].
///
/// # Errors
///
/// As for `resolve_with`.
///
/// # Cancel safety
///
/// Dropping the future has no effect.
pub async fn resolve(
    device: &Device,
    address: impl ToSocketAddrs + fmt::Debug,
) -> Result<Route, ConnectError> {
    resolve_with(device, address, &ConnectConfig::default()).await
}

/// Resolves a route to the first reachable address, `rdma_resolve_addr(3)` and
/// `rdma_resolve_route(3)`.
///
/// # Errors
///
/// - [`ConnectError::Lookup`] for an unknown host name, or if the lookup exceeds
///   [`ConnectConfig::resolve_timeout`];
/// - [`ConnectError::TimedOut`] if resolving the route exceeds it;
/// - [`ConnectError::Resolve`] if no device reaches the address;
/// - [`ConnectError::OtherDevice`] if the route goes through another device than `device`;
/// - [`ConnectError::AddressNotAvailable`] if `device` lacks [`ConnectConfig::source`];
/// - [`ConnectError::Setup`] if the source address is of another family.
///
/// # Cancel safety
///
/// Dropping the future has no effect.
pub async fn resolve_with(
    device: &Device,
    address: impl ToSocketAddrs + fmt::Debug,
    config: &ConnectConfig,
) -> Result<Route, ConnectError> {
    let mut last = None;
    for address in lookup(address, config).await? {
        match resolve_one(device, address, config, Router::create_id).await {
            Ok(route) => return Ok(route),
            Err(error) => last = Some(error.during(ConnectStep::Resolve, address)),
        }
    }
    Err(last.unwrap_or_else(no_address))
}

pub(super) fn no_address() -> ConnectError {
    ConnectError::Lookup {
        host: None,
        kind: io::ErrorKind::NotFound,
        message: "the host has no address".to_owned(),
    }
}

pub(super) async fn lookup(
    address: impl ToSocketAddrs + fmt::Debug,
    config: &ConnectConfig,
) -> Result<SmallVec<[SocketAddr; 1]>, ConnectError> {
    NoRuntime::or_current()?;
    let limit = config.resolve_timeout;
    let found = clock::timeout(limit, lookup_host(&address)).await;
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("timed out after {limit:?}"));
    let failed = |error| ConnectError::lookup(Some(format!("{address:?}")), &error);
    Ok(found.unwrap_or_else(|| Err(late())).map_err(failed)?.collect())
}

pub(super) async fn resolve_one(
    device: &Device,
    address: SocketAddr,
    config: &ConnectConfig,
    create_id: CreateId,
) -> Result<Route, ConnectError> {
    const ENETUNREACH: i32 = 101;
    const EHOSTUNREACH: i32 = 113;
    let source = config.source_to(address)?;
    let endpoint = Endpoint::create(&Router::of(device).await?, create_id)?;
    let (timeout, start) = (config.resolve_timeout, clock::now());
    let unresolved =
        |errno| ConnectError::Resolve { address, errno, in_process: false }.through(device);
    with_deadline(timeout, ConnectStep::Resolve, address, async || {
        // Expires before the provider's own timeout, and has the more precise error.
        endpoint.id().resolve_addr(source, address, timeout).map_err(|error| {
            match (error.errno, source) {
                (VerbError::EADDRNOTAVAIL, Some(source)) => ConnectError::AddressNotAvailable {
                    address,
                    source: Some(source.ip()),
                    step: ConnectStep::Resolve,
                },
                // Returned by the call itself, without an event.
                (ENETUNREACH | EHOSTUNREACH | VerbError::ENODEV, _) => unresolved(error.errno),
                _ => error.into(),
            }
        })?;
        let is_routed = endpoint
            .wait_for(|state| match (state.route, state.address) {
                (Some(route), _) => Some(route.map(|()| true)),
                (None, Some(address)) => Some(address.map(|()| false)),
                (None, None) => state.end.as_ref().map(|_| Err(VerbError::ENODEV)),
            })
            .await
            .map_err(&unresolved)?;
        if is_routed {
            return Ok(());
        }
        let left = timeout.saturating_sub(clock::since(start));
        let blocks = endpoint.id().route_may_block();
        endpoint.call_blocking(blocks, move |id| Ok(id.resolve_route(left)?)).await?;
        endpoint
            .wait_for(|state| {
                state.route.or_else(|| state.end.as_ref().map(|_| Err(VerbError::ENODEV)))
            })
            .await
            .map_err(&unresolved)
    })
    .await?;
    let route = endpoint.id().route().ok_or(unresolved(VerbError::ENODEV))?;
    if route.device != device.name() {
        return Err(ConnectError::OtherDevice { address, device: route.device.into_owned() });
    }
    let (local_source, destination) =
        (LocalSource::find(device, endpoint.id(), &route)?, route.destination);
    Ok(Route { endpoint, local_source, destination, address })
}

/// A route to a listener, found by [`resolve`].
#[derive(Debug)]
pub struct Route {
    pub(super) endpoint: Endpoint,
    pub(super) local_source: LocalSource,
    destination: Gid,
    address: SocketAddr,
}

impl Route {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.endpoint.router.device
    }

    /// Sets the builder's port, GID and, if the connection manager selects it, partition, from this
    /// route. A [path](QueuePairBuilder::path) with another partition is then refused.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        self.local_source.prepare(builder)
    }

    /// Returns the local port of the route.
    #[must_use]
    pub const fn port(&self) -> PortNum {
        self.local_source.port
    }

    /// Returns the index of the source GID in that port's table.
    #[must_use]
    pub const fn gid_index(&self) -> u8 {
        self.local_source.entry.index
    }

    /// Returns the peer's GID.
    #[must_use]
    pub const fn destination(&self) -> Gid {
        self.destination
    }

    /// Returns the address of the listener.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.address
    }

    /// Connects `queue_pair`, which must be in INIT and send from the route's port and GID.
    ///
    /// # Errors
    ///
    /// Once the handshake has begun, any error leaves the queue pair in the error state.
    ///
    /// - [`ConnectError::Refused`] if no listener has the address;
    /// - [`ConnectError::Rejected`] if the listener rejects the request;
    /// - [`ConnectError::Unreachable`], or [`ConnectError::TimedOut`] after
    ///   [`ConnectConfig::timeout`], if the peer does not answer;
    /// - [`ConnectError::Limit`] for private data of more than 56 bytes, or for more
    ///   [`ConnectConfig::reads`] than the device supports;
    /// - [`ConnectError::Setup`] for a queue pair that does not fit.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the request; the queue pair goes to the error state.
    pub async fn connect(
        self,
        queue_pair: &QueuePair,
        config: &ConnectConfig,
    ) -> Result<CmConnection, ConnectError> {
        let Self { endpoint, local_source, address, .. } = self;
        endpoint.router.watch()?;
        let device = endpoint.router.device.clone();
        let private_data = config.checked(MAX_REQUEST_DATA)?;
        let misfit = |error| ConnectError::from(error).during(ConnectStep::Prepare, address);
        local_source.check(&device, queue_pair).map_err(misfit)?;
        local_source.join_partition(queue_pair, config).map_err(misfit)?;
        Keepalive::check(config.keepalive, config.retries.timeout, queue_pair).map_err(misfit)?;
        let guard = FailUnlessConnected::new(queue_pair);
        let reads = Reads::of(&device, config)?;
        let peer = with_deadline(config.timeout, ConnectStep::Response, address, async || {
            let params = reads.params(queue_pair, private_data, config.timeout);
            let requested = if endpoint.id().connect_may_block() {
                let (data, params) =
                    (private_data.to_vec(), CmParams { private_data: &[], ..params });
                let request =
                    move |id: &CmId| Ok(id.connect(&CmParams { private_data: &data, ..params })?);
                endpoint.call_blocking(true, request).await
            } else {
                endpoint.id().connect(&params).map_err(ConnectError::from)
            };
            requested.map_err(|error| error.of_request(address))?;
            let peer = endpoint
                .wait_for(|state| match &state.end {
                    Some(end) => {
                        Some(Err(ConnectError::from_end(end, ConnectStep::Response, address)))
                    }
                    None => state.response.take().map(Ok),
                })
                .await?;
            endpoint.inbox().attach_queue_pair(queue_pair);
            let ready = make_ready(endpoint.id(), queue_pair, reads.agreed(&peer), config);
            let confirmed = ready.and_then(|()| Ok(endpoint.id().establish()?));
            endpoint.explain(confirmed, ConnectStep::Confirm, address).await?;
            queue_pair.note_connected();
            Ok(peer)
        })
        .await
        .map_err(|error| error.through(&device))?;
        let local = endpoint
            .id()
            .local_addr()
            .unwrap_or(SocketAddr::new(local_source.entry.gid.to_ip(), 0));
        let (addresses, data) = ((local, address), peer.private_data);
        let connection = CmConnection::new(endpoint, data, addresses, config, queue_pair)?;
        guard.connected();
        Ok(connection)
    }
}
