//! Membership of a device in an IP group.
//!
//! A socket that is bound to the device's address receives no multicast, and one that is bound to
//! all addresses would receive other devices' packets. So each group has a socket of its own, bound
//! to the group's address, which several devices and processes may share, and a thread.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::{fmt, io, thread};

use rdma_provider::VerbError;
use rdma_provider::types::Gid;

use super::endpoint::{Endpoint, PanicGuard, RETRY_DELAY};
use super::interface::index_of;
use super::socket::{Inbox, Socket};

const VERB: &str = "ibv_attach_mcast";
/// `EAFNOSUPPORT` of `errno(3)`.
const OTHER_FAMILY: i32 = 97;

/// A device's membership, which ends when it is dropped.
pub(crate) struct Membership(Arc<GroupSocket>);

struct GroupSocket {
    socket: Socket,
    group: IpAddr,
    left: AtomicBool,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Membership").field(&self.0.group).finish()
    }
}

impl Endpoint {
    /// Joins the IP group on the device's network interface. EAFNOSUPPORT if the device's address
    /// is of the other family.
    pub(crate) fn join(self: &Arc<Self>, group: Gid) -> Result<Membership, VerbError> {
        let (own, group) = (self.local(), group.to_ip());
        if own.is_ipv4() != group.is_ipv4() {
            return Err(VerbError::new(VERB, OTHER_FAMILY));
        }
        let system =
            |error: io::Error| VerbError::new(VERB, error.raw_os_error().unwrap_or(VerbError::EIO));
        let interface = index_of(own.ip());
        let socket = Socket::join(SocketAddr::new(group, own.port()), own.ip(), interface);
        let socket = socket.map_err(system)?;
        let joined = Arc::new(GroupSocket { socket, group, left: AtomicBool::new(false) });
        let (endpoint, of_thread) = (Arc::downgrade(self), Arc::clone(&joined));
        thread::Builder::new()
            .name("rdma-soft-group".into())
            .spawn(move || of_thread.work(&endpoint))
            .map_err(|error| VerbError::no_thread(&error))?;
        Ok(Membership(joined))
    }
}

impl GroupSocket {
    /// Receives until the device leaves the group.
    fn work(&self, endpoint: &Weak<Endpoint>) {
        let mut inbox = Inbox::new();
        while !self.left.load(Ordering::Acquire) {
            let received = self.socket.receive(&mut inbox, true);
            let Some(endpoint) = endpoint.upgrade() else { return };
            let _guard = PanicGuard::new(&endpoint);
            match received {
                Ok(()) if self.left.load(Ordering::Acquire) => return,
                Ok(()) => endpoint.on_group_inbox(&inbox, self.socket.local()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    rdma_provider::debug!(
                        group = %self.group,
                        %error,
                        "failed to receive packets of a multicast group; retrying"
                    );
                    thread::sleep(RETRY_DELAY);
                }
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let Self(joined) = self;
        joined.left.store(true, Ordering::Release);
        // The thread ends at once, and with it the socket and the membership. This thread may be
        // that one, so it does not wait.
        joined.socket.close();
    }
}
