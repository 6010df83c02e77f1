use std::future::{Future, ready};

use crate::connection::Connection;
use crate::dc::DcPoolPeer;

/// A link to a peer in a [`PeerSet`](super::PeerSet): a [`Connection`], a [`DcPoolPeer`], or your
/// own type, for example with a task that dispatches answers.
///
/// ```
/// use tokio_rdma::Connection;
/// use tokio_rdma::peers::PeerLink;
///
/// struct Session(Connection, Vec<u8>);
///
/// impl PeerLink for Session {
///     fn has_ended(&self) -> bool {
///         self.0.has_ended()
///     }
///
///     async fn close(&self) {
///         PeerLink::close(&self.0).await;
///     }
/// }
/// ```
pub trait PeerLink: Send + Sync + 'static {
    /// Returns true if the next [`get`](super::PeerSet::get) must make another link. Called with a
    /// lock held, so it must neither block nor use the set.
    fn has_ended(&self) -> bool;

    /// Closes an idle link that the set has removed, or a link that has ended and may have guards.
    /// Does nothing by default.
    ///
    /// The set drops a link without this call if its last guard finds it ended, if it was
    /// [disconnected](super::PeerSet::disconnect) while a guard existed, or while
    /// [`max_peers`](super::PeerSetConfig::max_peers) other links are being closed.
    fn close(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// Ends a link, which may have guards, when the set is dropped. Does nothing by default.
    fn abort(&self) {}
}

/// Ends when it has a [`close_reason`](Connection::close_reason).
impl PeerLink for Connection {
    fn has_ended(&self) -> bool {
        self.close_reason().is_some()
    }

    async fn close(&self) {
        // The connection logs the reason of an unclean end.
        drop(Self::close(self).await);
    }

    fn abort(&self) {
        Self::abort(self);
    }
}

/// Ends when it [has failed](DcPoolPeer::has_failed). Has nothing to close, so guards remain usable
/// after the set is dropped.
impl PeerLink for DcPoolPeer {
    fn has_ended(&self) -> bool {
        self.has_failed()
    }
}
