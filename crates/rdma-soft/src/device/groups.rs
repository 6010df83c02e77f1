//! Multicast groups of a device: which queue pairs are attached to them.
//!
//! Within a process, the sender delivers to the members of all devices. Over UDP, the device is a
//! member of the IP group as long as a queue pair is attached.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Weak};

use rdma_provider::VerbError;
use rdma_provider::locks::RwLock;
use rdma_provider::types::{Gid, Qpn};
use smallvec::SmallVec;

use crate::net::udp::Membership;

/// Maximum groups of a device. Over UDP, each has a socket and a thread.
pub(super) const MAX_GROUPS: u32 = 64;
/// Maximum queue pairs attached to a group: a packet causes as many copies.
pub(super) const MAX_MEMBERS: u32 = 256;

/// The groups of a device with queue pairs of type `Q`.
#[derive(Debug)]
pub(crate) struct Groups<Q>(RwLock<BTreeMap<Gid, Group<Q>>>);

#[derive(Debug)]
struct Group<Q> {
    members: BTreeMap<Qpn, Weak<Q>>,
    /// Over UDP, the membership in the IP group.
    _membership: Option<Membership>,
}

impl<Q> Groups<Q> {
    pub(super) fn new() -> Self {
        Self(RwLock::default())
    }

    /// Attaches a queue pair to a group, which `join` joins for its first queue pair. ENOMEM beyond
    /// a limit.
    pub(crate) fn attach(
        &self,
        group: Gid,
        (qpn, qp): (Qpn, &Arc<Q>),
        join: impl FnOnce() -> Result<Option<Membership>, VerbError>,
    ) -> Result<(), VerbError> {
        let full = VerbError::new("ibv_attach_mcast", VerbError::ENOMEM);
        let mut groups = self.0.write();
        let count = groups.len();
        let group = match groups.entry(group) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if count >= MAX_GROUPS as usize => return Err(full),
            Entry::Vacant(new) => {
                new.insert(Group { members: BTreeMap::new(), _membership: join()? })
            }
        };
        if group.members.len() >= MAX_MEMBERS as usize && !group.members.contains_key(&qpn) {
            return Err(full);
        }
        group.members.insert(qpn, Arc::downgrade(qp));
        Ok(())
    }

    /// Detaches a queue pair from a group. Returns false if it was not attached.
    pub(crate) fn detach(&self, group: Gid, qpn: Qpn) -> bool {
        let mut groups = self.0.write();
        let removed = groups.get_mut(&group).and_then(|group| group.members.remove(&qpn)).is_some();
        groups.retain(|_, group| !group.members.is_empty());
        removed
    }

    /// Detaches a queue pair from all groups.
    pub(crate) fn detach_all(&self, qpn: Qpn) {
        self.0.write().retain(|_, group| {
            group.members.remove(&qpn);
            !group.members.is_empty()
        });
    }

    /// Returns the queue pairs attached to a group.
    pub(super) fn members(&self, group: Gid) -> SmallVec<[Arc<Q>; 8]> {
        let groups = self.0.read();
        let members = groups.get(&group).into_iter().flat_map(|group| group.members.values());
        members.filter_map(Weak::upgrade).collect()
    }
}
