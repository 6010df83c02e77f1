//! Faults of the packets from one device to another.

use std::fmt;
use std::sync::Arc;

use rdma_provider::types::Gid;

use super::network::{Network, NetworkInner};
use crate::OpenError;

impl Network {
    /// Returns a control of the packets that device `from` sends to device `to`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let network = rdma_soft::Network::new();
    /// let (_a, _b) = (network.open("a")?, network.open("b")?);
    /// // Requests of `a` arrive, but not the answers, nor the second of the requests.
    /// network.link("b", "a")?.set_loss(1.0);
    /// network.link("a", "b")?.lose(2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`] for a name that was never opened in this network.
    pub fn link(&self, from: &str, to: &str) -> Result<LinkControl, OpenError> {
        let route = (self.gid_of(from)?, self.gid_of(to)?);
        Ok(LinkControl { network: Arc::clone(&self.0), route })
    }

    /// Loses all packets between devices `a` and `b`, in both directions, until
    /// [`heal`](Self::heal). Packets in flight still arrive. Other devices reach both.
    ///
    /// # Errors
    ///
    /// See [`link`](Self::link).
    pub fn partition(&self, a: &str, b: &str) -> Result<(), OpenError> {
        self.set_both(a, b, 1.0)
    }

    /// Ends a [`partition`](Self::partition).
    ///
    /// # Errors
    ///
    /// See [`link`](Self::link).
    pub fn heal(&self, a: &str, b: &str) -> Result<(), OpenError> {
        self.set_both(a, b, 0.0)
    }

    fn set_both(&self, a: &str, b: &str, loss: f64) -> Result<(), OpenError> {
        let links = [self.link(a, b)?, self.link(b, a)?];
        links.iter().for_each(|link| link.set_loss(loss));
        Ok(())
    }
}

/// A control of the packets from one device to another: loss in one direction, and loss of a
/// certain packet. The faults of the [network](Network::set_faults) apply, too.
///
/// It counts all packets, also management datagrams, acknowledgements and retransmissions. From its
/// first call on, the network encodes packets.
#[derive(Clone)]
pub struct LinkControl {
    network: Arc<NetworkInner>,
    route: (Gid, Gid),
}

impl LinkControl {
    /// Sets the probability of loss in this direction; 1 loses every packet. It is clamped to 0 to
    /// 1.
    pub fn set_loss(&self, probability: f64) {
        self.network.with_one_way(self.route, |way| way.loss = probability);
    }

    /// Loses the `n`th packet sent from now on; 1 is the next. Each call adds one.
    pub fn lose(&self, n: u64) {
        self.network.with_one_way(self.route, |way| {
            way.doomed.insert(way.sent.saturating_add(n));
        });
    }

    /// Returns the packets sent in this direction since the first call of a control of it. A test
    /// runs once to count them, then loses each in turn.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.network.with_one_way(self.route, |way| way.sent)
    }
}

impl fmt::Debug for LinkControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = self.route;
        f.debug_struct("LinkControl").field("from", &from).field("to", &to).finish_non_exhaustive()
    }
}
