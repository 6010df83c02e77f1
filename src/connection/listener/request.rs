use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select};
use rdma_message_proto::handshake::Handshake;
use rdma_message_proto::refusal::Rejection;
use rdma_provider::cm_contract::{Admit as _, MAX_RESPONSE_DATA};

use super::GRACE;
use super::backlog::Unaccepted;
use crate::clock;
use crate::cm;
use crate::connection::admission::Admission;
use crate::connection::config::ConnectionConfig;
use crate::connection::error::EstablishError;
use crate::connection::handle::{Connection, PreparedConnection};
use crate::connection::resources::ResourceCache;
use crate::error::LimitError;
use crate::verbs::Device;

/// A peer's request for a connection. Dropping it rejects the peer.
///
/// # Cancel safety
///
/// Dropping a future rejects the peer.
#[must_use = "dropping it rejects it"]
pub struct ConnectionRequest(State);

enum State {
    /// Boxed because it is long.
    Requested(Box<Requested>),
    /// The listener established the connection before the application asked for requests.
    Established(Unaccepted),
}

pub(super) struct Requested {
    pub(super) inner: cm::ConnectionRequest,
    pub(super) handshake: Handshake,
    pub(super) user_data: Bytes,
    pub(super) cache: Arc<ResourceCache>,
    pub(super) config: ConnectionConfig,
    pub(super) first_message_timeout: Option<Duration>,
    pub(super) admission: Arc<Admission>,
    /// One of the requests that wait at the listener may evict this one.
    pub(super) waiting: cm::PendingRequests,
}

impl ConnectionRequest {
    /// Returns the peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        match &self.0 {
            State::Requested(request) => request.peer_addr(),
            State::Established(connection) => connection.peer_addr(),
        }
    }

    /// Returns the device of the listener.
    #[must_use]
    pub fn device(&self) -> &Device {
        match &self.0 {
            State::Requested(request) => request.cache.device(),
            State::Established(connection) => connection.get().protection_domain().device(),
        }
    }

    /// Returns the user data that the peer has sent.
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        match &self.0 {
            State::Requested(request) => &request.user_data,
            State::Established(connection) => connection.get().user_data(),
        }
    }

    /// Returns the receive limits that the peer has announced.
    #[must_use]
    pub fn peer(&self) -> Handshake {
        match &self.0 {
            State::Requested(request) => request.handshake,
            State::Established(connection) => connection.get().peer(),
        }
    }

    /// Accepts with the settings of the listener, like [`accept_with`](Self::accept_with).
    ///
    /// # Errors
    ///
    /// As for `accept_with`.
    pub async fn accept(self) -> Result<Connection, EstablishError> {
        match self.0 {
            State::Requested(request) => {
                let config = request.config.clone();
                request.accept_with(&config).await
            }
            State::Established(connection) => Ok(connection.accept()),
        }
    }

    /// Accepts with these settings, within the limits of the listener. If the device or the
    /// listener has already answered the peer, all settings are the listener's.
    ///
    /// Waits for the confirmation for at most
    /// [`connect_timeout`](ConnectionConfig::connect_timeout). After 0.1 s, another request that
    /// has waited as long evicts and rejects this one, so that silent peers do not block others.
    /// For more than ten requests per second, accept each in its own task.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Refused`] at a connection limit; the peer gets that too, or
    /// [`CloseReason::Refused`](crate::connection::CloseReason::Refused) if already answered.
    /// [`EstablishError::Connect`] with [`cm::ConnectError::Disconnected`] if the peer has
    /// disconnected, or [`cm::ConnectError::TimedOut`] if unconfirmed or evicted. Otherwise as for
    /// [`Connection::connect_with`].
    pub async fn accept_with(
        self,
        config: &ConnectionConfig,
    ) -> Result<Connection, EstablishError> {
        match self.0 {
            State::Requested(request) => request.accept_with(config).await,
            State::Established(connection) => Ok(connection.accept()),
        }
    }

    /// Rejects the connection. The peer gets `user_data`, at most 140 bytes, in
    /// [`EstablishError::Rejected`]. If the device has already answered the peer, its connection
    /// closes with [`CloseReason::Rejected`](crate::connection::CloseReason::Rejected); if the
    /// listener has established it, with
    /// [`CloseReason::Dropped`](crate::connection::CloseReason::Dropped).
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] with [`cm::ConnectError::Limit`] for longer data; the peer is
    /// then rejected without data. Otherwise as for [`cm::ConnectionRequest::reject`].
    pub async fn reject(self, user_data: &[u8]) -> Result<(), EstablishError> {
        let (asked, allowed) = (user_data.len() as u64, Rejection::MAX_USER_DATA as u64);
        let too_long = LimitError { field: "user_data of a rejection", asked, allowed };
        let rejection = Rejection { user_data }.encode();
        let rejection = rejection.ok_or_else(|| cm::ConnectError::from(too_long))?;
        match self.0 {
            State::Requested(request) => request.inner.reject(&rejection).await?,
            State::Established(connection) => drop(connection),
        }
        Ok(())
    }
}

impl From<Requested> for ConnectionRequest {
    fn from(request: Requested) -> Self {
        Self(State::Requested(Box::new(request)))
    }
}

impl From<Unaccepted> for ConnectionRequest {
    fn from(connection: Unaccepted) -> Self {
        Self(State::Established(connection))
    }
}

impl Requested {
    pub(super) fn peer_addr(&self) -> SocketAddr {
        self.inner.peer_addr()
    }

    async fn accept_with(self, config: &ConnectionConfig) -> Result<Connection, EstablishError> {
        let (address, admission, waiting) =
            (self.peer_addr(), self.admission.clone(), self.waiting.clone());
        let (start, confirmed) = (clock::now(), self.inner.reserved().is_some());
        let established = pin!(self.establish(config));
        if confirmed {
            return established.await;
        }
        match select(established, pin!(waiting.displaced(GRACE))).await {
            Either::Left((result, _)) => result,
            Either::Right(((), _)) => {
                admission.evicted();
                let (address, step) = (address, cm::ConnectStep::Establish);
                Err(cm::ConnectError::TimedOut { address, step, after: clock::since(start) }.into())
            }
        }
    }

    pub(super) async fn establish(
        self,
        config: &ConnectionConfig,
    ) -> Result<Connection, EstablishError> {
        let admission = self.admission.clone();
        let result = self.establish_uncounted(config).await;
        if let Err(EstablishError::Connect(_)) = &result {
            admission.count_failed();
        }
        result
    }

    async fn establish_uncounted(
        self,
        config: &ConnectionConfig,
    ) -> Result<Connection, EstablishError> {
        let address = self.peer_addr();
        let answered = self.inner.reserved().is_some();
        // The provider's answer has announced the listener's settings to the peer.
        let config = if answered { &self.config } else { config };
        // Before buffers are allocated. An unanswered peer may be forged, so it reserves a
        // connection only after its confirmation.
        let reservation = if answered {
            self.admission.reserve(address.ip()).map(Some)
        } else {
            self.admission.check(address.ip()).map(|()| None)
        };
        let reservation = match reservation {
            Ok(reservation) => reservation,
            Err(reason) => {
                self.inner.reject(&reason.encode()).await?;
                return Err(EstablishError::Refused { address, reason });
            }
        };
        let cm_config = config.cm_config(MAX_RESPONSE_DATA)?;
        config.check(self.cache.device())?;
        let path = (self.inner.port(), self.inner.gid_index());
        // Reported as `Connect`, because the peer's path does not fit: `accept` returns `Setup`
        // errors, but skips this peer.
        config
            .check_path(path, self.inner.source())
            .map_err(|error| self.inner.prepare_error(error))?;
        let prepare = || {
            let resources = config.resources(&self.cache)?;
            PreparedConnection::new(resources, config, |builder| self.inner.prepare(builder))
        };
        let mut prepared = match prepare() {
            Ok(prepared) => prepared,
            Err(error) => return Err(self.inner.explain_setup_error(error).await?.into()),
        };
        let link = self.inner.accept(&prepared.qp, &cm_config).await?;
        // If other peers have reached the limit meanwhile, dropping `link` disconnects this peer.
        let refused = |reason| EstablishError::Refused { address, reason };
        let admitted = match reservation {
            Some(admitted) => admitted,
            None => self.admission.reserve_prepared(address.ip()).map_err(refused)?,
        };
        prepared.set_first_message_timeout(self.first_message_timeout);
        prepared.start(self.handshake, self.user_data, Some(link), Some(admitted))
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest")
            .field("peer", &self.peer_addr())
            .field("handshake", &self.peer())
            .finish_non_exhaustive()
    }
}
