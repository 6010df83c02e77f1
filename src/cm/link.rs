//! A connection, once it is there: who is at the other end, and how it ends.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::provider::cm_contract::CmId as _;

use super::endpoint::{Endpoint, within};
use super::error::{ConnectError, Step};
use super::router::End;

/// The manager's side of a connected queue pair, which somebody else holds.
///
/// When it ends, whoever ends it, the queue pair goes to the error state and all its work is flushed. What has arrived by
/// then stays: await what matters before saying goodbye, and the peer has it.
///
/// Dropping it says goodbye without waiting for an answer: best effort, as the goodbye, and what repeats it, may be lost.
/// A peer that never hears it finds out when it sends.
pub struct Link {
    endpoint: Endpoint,
    private_data: Vec<u8>,
    local: SocketAddr,
    peer: SocketAddr,
    deadline: Duration,
    ours: AtomicBool,
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disconnection {
    /// We said goodbye.
    Local,
    /// The peer did, or its manager takes the connection for dead.
    Peer,
    /// The device was taken away.
    DeviceRemoved,
    /// Our address was moved to another device.
    AddressChanged,
}

impl Link {
    pub(super) fn new(
        endpoint: Endpoint,
        private_data: Vec<u8>,
        (local, peer): (SocketAddr, SocketAddr),
        deadline: Duration,
    ) -> Self {
        tracing::debug!(%local, %peer, "link established");
        Self { endpoint, private_data, local, peer, deadline, ours: AtomicBool::new(false) }
    }

    /// Our address.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The peer's address.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// What the peer said when it connected or accepted, filled up with zeros to 56 or 196 bytes.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// True until it ends.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.endpoint.ended()
    }

    /// Says goodbye, and waits until the peer's manager has heard it. The queue pair is in the error state at once. Nothing
    /// happens if the connection is over.
    ///
    /// # Errors
    ///
    /// [`ConnectError::TimedOut`] if there is no answer within [`Options::timeout`](super::Options::timeout); the goodbye
    /// goes on being repeated for a while.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it goes on without the future.
    ///
    /// # Panics
    ///
    /// As [`Listener::accept`](super::Listener::accept).
    pub async fn disconnect(&self) -> Result<(), ConnectError> {
        if !self.is_connected() {
            return Ok(());
        }
        self.ours.store(true, Ordering::Release);
        self.endpoint.inbox().fail_queue_pair();
        within(self.deadline, Step::Disconnect, async {
            let said = self.endpoint.call(|id| Ok(id.disconnect()?)).await;
            match self.endpoint.blame(said, self.peer).await {
                // Over already.
                Err(_) if !self.is_connected() => return Ok(()),
                said => said?,
            }
            self.endpoint.until(|happened| happened.end.is_some().then_some(())).await;
            Ok(())
        })
        .await
    }

    /// Waits until the connection is over, and says how it ended. Any number of tasks may wait.
    ///
    /// That a peer is gone without a goodbye is not noticed here, but by operations that fail.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    ///
    /// # Panics
    ///
    /// As [`Listener::accept`](super::Listener::accept).
    pub async fn disconnected(&self) -> Disconnection {
        self.endpoint
            .until(|happened| match happened.end.as_ref()? {
                End::DeviceRemoval => Some(Disconnection::DeviceRemoved),
                End::AddressChange => Some(Disconnection::AddressChanged),
                _ if self.ours.load(Ordering::Acquire) => Some(Disconnection::Local),
                _ => Some(Disconnection::Peer),
            })
            .await
    }

    /// Waits until nothing of a connection that is over can be underway any more (the end of TIMEWAIT): then its queue
    /// pair may be reset and connected anew. Before, the peer's manager may reject it as stale.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    ///
    /// # Panics
    ///
    /// As [`Listener::accept`](super::Listener::accept).
    pub async fn drained(&self) {
        self.endpoint.until(|happened| happened.exited.then_some(())).await;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.endpoint.inbox().fail_queue_pair();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("local", &self.local)
            .field("peer", &self.peer)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}
