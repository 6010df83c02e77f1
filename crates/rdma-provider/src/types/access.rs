//! Who may do what with registered memory.

use bitflags::bitflags;

bitflags! {
    /// Access rights of a registration or a queue pair, `ibv_reg_mr(3)`.
    ///
    /// Reading by the local device is always allowed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local device may write: needed by receives, READ and atomic results.
        const LOCAL_WRITE = 1;
        /// A peer may WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may use atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to it.
        const MW_BIND = 1 << 4;
        /// Its pages are not pinned: the device asks for them when it touches them. Only where
        /// [`DeviceAttr::on_demand_paging`](super::DeviceAttr::on_demand_paging) says so; of a registration only.
        const ON_DEMAND = 1 << 5;
    }
}

impl Access {
    /// All that a peer can be granted.
    pub const REMOTE_ALL: Self =
        Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// True if a peer may reach the memory in any way, be it through a window bound later.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_ALL.union(Self::MW_BIND))
    }

    /// The rule of `ibv_reg_mr(3)`: whoever lets a peer change memory must let the local device too.
    #[must_use]
    pub const fn is_legal(self) -> bool {
        let remote_change = self.intersects(Self::REMOTE_WRITE.union(Self::REMOTE_ATOMIC));
        !remote_change || self.contains(Self::LOCAL_WRITE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_lets_peers_change_memory_lets_the_local_device_too() {
        assert!(!Access::REMOTE_WRITE.is_legal() && !Access::REMOTE_ATOMIC.is_legal());
        assert!(
            (Access::REMOTE_ALL | Access::LOCAL_WRITE).is_legal() && Access::REMOTE_READ.is_legal()
        );
    }

    #[test]
    fn memory_that_windows_may_be_bound_to_is_within_reach_of_peers() {
        assert!(
            Access::MW_BIND.is_remote()
                && Access::REMOTE_READ.is_remote()
                && !Access::LOCAL_WRITE.is_remote()
        );
    }
}
