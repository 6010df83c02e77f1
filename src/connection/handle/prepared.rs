use std::fmt;
use std::sync::Arc;

use std::time::Duration;

use bytes::Bytes;
use rdma_message_proto::handshake::{Handshake, HandshakeError};

use super::{Connection, Handle};
use crate::cm::CmConnection;
use crate::connection::admission::{Accepted as _, Admitted};
use crate::connection::budget::BudgetGuard;
use crate::connection::config::ConnectionConfig;
use crate::connection::driver::drive;
use crate::connection::error::{CloseReason, EstablishError};
use crate::connection::resources::ConnectionResources;
use crate::connection::shared::ConnectionInner;
use crate::connection::state::ConnectionState;
use crate::error::{NoRuntime, OpErrorKind, SetupError};
use crate::op::{QueuePair, QueuePairBuilder, QueuePairEndpoint};

/// A queue pair with posted receives, ready to be connected to the peer's.
#[must_use = "it is connected by establish"]
pub struct PreparedConnection {
    /// Boxed because futures that hold a prepared connection are moved.
    pub(in crate::connection) state: Box<ConnectionState>,
    pub(in crate::connection) qp: QueuePair,
    config: ConnectionConfig,
}

impl PreparedConnection {
    pub(in crate::connection) fn new(
        resources: ConnectionResources,
        config: &ConnectionConfig,
        describe: impl FnOnce(QueuePairBuilder) -> QueuePairBuilder,
    ) -> Result<Self, SetupError> {
        let budget = BudgetGuard::new(&config.budget, config.first_bytes())?;
        let (pd, pools) = (&resources.domain().clone(), resources.pools());
        let [sends, of_receives] = resources.queues();
        let describe = |builder| describe(builder).holding(resources);
        let builder = QueuePair::builder(pd, &sends).receive_completions(&of_receives);
        let builder = builder.max_send_wr(config.max_send_wr).max_recv_wr(config.most_receives());
        let builder = builder.path(config.path);
        let qp = describe(builder.max_sge(1).max_inline(config.max_inline).solicited().notifies())
            .build()?;
        let state = Box::new(ConnectionState::new(qp.clone(), config, pools, budget));
        match state.protocol.phase().failure() {
            Some(CloseReason::Operation(
                OpErrorKind::Post(error) | OpErrorKind::State { error, .. },
            )) => {
                return Err(error.into());
            }
            Some(_) => return Err(SetupError::Closed),
            None => {}
        }
        Ok(Self { state, qp, config: config.clone() })
    }

    /// Returns the endpoint to which the peer connects its queue pair.
    #[must_use]
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.qp.endpoint()
    }

    /// Returns the handshake for the peer, with `user_data` for its application.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::UserData`] above [`Handshake::MAX_USER_DATA`] bytes.
    pub fn handshake(&self, user_data: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        self.config.handshake().encode_for(self.config.service, user_data)
    }

    /// Connects to the peer, which must do the same. Messages may be sent before it has.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Handshake`] for an invalid handshake, [`EstablishError::Setup`] for
    /// incompatible peers, [`EstablishError::NoRuntime`] outside a Tokio runtime.
    pub fn establish(
        self,
        peer: &QueuePairEndpoint,
        handshake: &[u8],
    ) -> Result<Connection, EstablishError> {
        NoRuntime::or_current()?;
        let (handshake, user_data) = Handshake::decode_for(self.config.service, handshake)?;
        let user_data = Bytes::copy_from_slice(user_data);
        self.qp.connect_with(peer, &self.config.retries)?;
        self.start(handshake, user_data, None, None)
    }

    pub(in crate::connection) fn set_first_message_timeout(&mut self, timeout: Option<Duration>) {
        self.state.protocol.set_first_message_timeout(timeout);
    }

    pub(in crate::connection) fn start(
        mut self,
        peer: Handshake,
        user_data: Bytes,
        link: Option<CmConnection>,
        admitted: Option<Admitted>,
    ) -> Result<Connection, EstablishError> {
        let runtime = NoRuntime::or_current()?;
        let addresses = link.as_ref().map(|link| (link.local_addr(), link.peer_addr()));
        let link = link.map(Arc::new);
        self.state.set_peer(&peer, link.clone());
        // iWARP's first message must be of the side that connects (RFC 5044, 7.1.3).
        if self.config.is_iwarp(self.qp.protection_domain().device()) && link.is_some() {
            let flow = &mut self.state.protocol.flow;
            if admitted.is_some() { flow.wait_for_peer() } else { flow.greet() }
        }
        let shared = ConnectionInner::new(self.state, self.qp, runtime.clone(), admitted);
        if shared.is_draining() {
            shared.drain();
        }
        drop(runtime.spawn(drive(shared.clone(), link)));
        let handle = Arc::new(Handle {
            shared,
            close_timeout: self.config.close_timeout,
            buffer_size: self.config.receive_buffer_size as usize,
            peer,
            user_data,
            addresses,
            buffers: Default::default(),
        });
        Ok(Connection::new(handle))
    }
}

impl fmt::Debug for PreparedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedConnection")
            .field("qp", &self.qp)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
