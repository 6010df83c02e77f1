use std::fmt;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use crate::error::{SetupError, VerbError};
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{AddressVector, Gid, LinkLayer, Qkey};
use crate::verbs::{AddressHandle, ProtectionDomain};
use rdma_provider::cm_contract::{CmChannel as _, CmDatagram, CmId as _};

use super::endpoint::{Endpoint, with_deadline};
use super::error::{ConnectError, ConnectStep};
use super::inbox::Inbox;
use super::router::Router;

const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The membership of a queue pair in a multicast group, see [`QueuePair::join_multicast`]. Dropping
/// it detaches the queue pair and leaves the group. Destroying the queue pair only detaches it.
pub struct MulticastGroup {
    endpoint: Endpoint,
    queue_pair: WeakQueuePair,
    group: CmDatagram,
}

impl QueuePair {
    /// Joins a multicast group, `rdma_join_multicast(3)`, from the queue pair's own address, and
    /// attaches the queue pair, `ibv_attach_mcast(3)`. Until the returned [`MulticastGroup`] is
    /// dropped, the queue pair receives each datagram that any host sends to the group with its
    /// Q_Key. Join a group once for each queue pair: the first drop leaves it.
    ///
    /// Programs in C, such as `mckey(1)`, use the Q_Key [`Qkey::RDMA_UDP`]; on InfiniBand, the
    /// group has it, so the queue pair needs it, too. On the software device and on RoCE, members
    /// may agree on another one. Receive buffers need 40 more bytes, for the routing header, whose
    /// destination is the group. An own datagram arrives, too, except on adapters that do not loop
    /// it back.
    ///
    /// On RoCE, a sender need not be a member: an [`AddressHandle`] for the GID of the group
    /// suffices.
    ///
    /// ```
    /// use tokio_rdma::types::Qpn;
    /// # use tokio_rdma::*;
    ///
    /// # async fn example(speaker: &QueuePair, listener: &QueuePair, pool: &Pool)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let group = listener.join_multicast("239.1.2.3".parse()?).await?;
    /// let received = listener.recv(pool.try_alloc(64)?);
    /// let to_group = group.address_handle(speaker.protection_domain())?;
    /// speaker.send_to(pool.copy_from(b"news")?, &to_group, Qpn::MULTICAST, group.qkey()).await?;
    /// assert_eq!(received.await?.buffer[40..], *b"news");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`ConnectError::Setup`] with [`SetupError::NotMulticast`] if `group` is another address,
    ///   with [`SetupError::Mismatch`] for a group of another address family or a queue pair of
    ///   another transport, with [`SetupError::GroupsFull`] beyond a limit of the device, or with
    ///   [`SetupError::Unsupported`] on InfiniBand;
    /// - [`ConnectError::AddressNotAvailable`] if the connection manager does not know the address;
    /// - [`ConnectError::TimedOut`] if the network does not answer within 5 s;
    /// - [`ConnectError::Verb`] if it refuses. Linux (6.1) refuses IPv6 groups on RoCE v2 with
    ///   EOPNOTSUPP; the software device has them.
    /// - [`ConnectError::NoRuntime`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the group.
    pub async fn join_multicast(&self, group: IpAddr) -> Result<MulticastGroup, ConnectError> {
        let local = self.local();
        if local.link_layer == LinkLayer::InfiniBand {
            let what = "the GID of an InfiniBand port is no IP address; use MulticastGroup::join \
                        with the address of its IPoIB interface";
            return Err(SetupError::Unsupported { what }.into());
        }
        let mut from = SocketAddr::new(local.gid.gid.to_ip(), 0);
        if let (SocketAddr::V6(v6), Some(interface)) = (from, local.gid.interface) {
            from = SocketAddrV6::new(*v6.ip(), 0, 0, interface).into();
        }
        MulticastGroup::join(self, group, from).await
    }
}

impl MulticastGroup {
    /// Joins a group like [`QueuePair::join_multicast`], on the network interface with the address
    /// `local`, whose port is usually 0.
    ///
    /// # Errors
    ///
    /// As for `join_multicast`; [`ConnectError::OtherDevice`] if the address belongs to another
    /// device.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the group.
    pub async fn join(
        queue_pair: &QueuePair,
        group: IpAddr,
        local: SocketAddr,
    ) -> Result<Self, ConnectError> {
        const VERB: &str = "rdma_join_multicast";
        let device = queue_pair.protection_domain().device();
        let (address, step) = (SocketAddr::new(group, 0), ConnectStep::Join);
        let misfit = |error: SetupError| ConnectError::from(error).during(step, address);
        let gid = Gid::from(group);
        queue_pair.check_group(gid).map_err(misfit)?;
        queue_pair.check_family(gid).map_err(misfit)?;
        let router = Router::of(device).await?;
        let endpoint = Endpoint::new(&router, router.create_datagram_id()?, Inbox::new(None));
        let joined = with_deadline(JOIN_TIMEOUT, step, address, async || {
            let blocks = router.channel.may_block();
            let bound = endpoint.call_blocking(blocks, move |id| {
                id.bind(local)?;
                Ok(id.join_multicast(group)?)
            });
            bound.await.map_err(|error| match error {
                ConnectError::Verb { error, .. } if error.errno == VerbError::EADDRNOTAVAIL => {
                    let source = Some(local.ip());
                    ConnectError::AddressNotAvailable { address, source, step }
                }
                error => error,
            })?;
            let joined = endpoint.wait_for(|state| {
                let lost = || state.end.as_ref().map(|_| Err(VerbError::ENODEV));
                state.joined.take().or_else(lost)
            });
            joined.await.map_err(|errno| VerbError::new(VERB, errno).into())
        });
        let group = joined.await?;
        if let Some(route) = endpoint.id().route()
            && route.device != device.name()
        {
            return Err(ConnectError::OtherDevice { address, device: route.device.into_owned() });
        }
        let AddressVector { dgid, dlid, .. } = group.address;
        queue_pair.attach_multicast(dgid, dlid).map_err(misfit)?;
        Ok(Self { endpoint, queue_pair: queue_pair.downgrade(), group })
    }

    /// Returns the GID of the group. An IPv4 group 239.1.2.3 has ::ffff:239.1.2.3 on RoCE v2.
    #[must_use]
    pub const fn gid(&self) -> Gid {
        self.group.address.dgid
    }

    /// Returns the route to the group.
    #[must_use]
    pub const fn address(&self) -> &AddressVector {
        &self.group.address
    }

    /// Returns the Q_Key of the group for the connection manager, [`Qkey::RDMA_UDP`].
    #[must_use]
    pub const fn qkey(&self) -> Qkey {
        self.group.qkey
    }

    /// Creates an address handle for datagrams to the group, which go to queue pair number
    /// [`Qpn::MULTICAST`](crate::types::Qpn::MULTICAST).
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`].
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle, SetupError> {
        Ok(pd.address_handle(&self.group.address)?)
    }
}

impl Drop for MulticastGroup {
    fn drop(&mut self) {
        let Some(queue_pair) = self.queue_pair.upgrade() else { return };
        let AddressVector { dgid, dlid, .. } = self.group.address;
        if let Err(error) = queue_pair.detach_multicast(dgid, dlid)
            && error != SetupError::Closed
        {
            rdma_provider::warn!(
                qpn = %queue_pair.qpn(),
                group = %dgid,
                %error,
                "failed to detach queue pair from a multicast group; it may receive its datagrams"
            );
        }
    }
}

impl fmt::Debug for MulticastGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MulticastGroup")
            .field("gid", &self.gid())
            .field("local", &self.endpoint.id().local_addr())
            .finish_non_exhaustive()
    }
}
