//! Access rights of registered memory.

use bitflags::bitflags;

bitflags! {
    /// Access rights of a registration or a queue pair, `ibv_reg_mr(3)`.
    ///
    /// The local device may always read.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local device may write; required by receives, READ and atomic results.
        const LOCAL_WRITE = 1;
        /// A peer may WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may use atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the registration.
        const MW_BIND = 1 << 4;
        /// The pages are not pinned; the device faults them in on access. For registrations only,
        /// on devices with [`DeviceAttr::on_demand_paging`](super::DeviceAttr::on_demand_paging).
        const ON_DEMAND = 1 << 5;
        /// The device may write payload to the memory in any order, also that of successive
        /// requests: a byte of a WRITE may be visible before those in front of it, and what two
        /// writes without a completion between them leave in the same place is undefined. A
        /// completion still shows that all earlier data are in place, and no write overtakes an
        /// atomic. For registrations only; a device without the feature ignores it.
        const RELAXED_ORDERING = 1 << 6;
        /// The memory consists of huge pages, and faults bring them in whole. For registrations
        /// with [`ON_DEMAND`](Self::ON_DEMAND) only.
        const HUGE_PAGES = 1 << 7;
    }
}

impl Access {
    /// All rights that a peer can be granted.
    pub const REMOTE_ALL: Self =
        Self::REMOTE_WRITE.union(Self::REMOTE_READ).union(Self::REMOTE_ATOMIC);

    /// Returns true if a peer may access the memory in any way, including through a window bound
    /// later.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_ALL.union(Self::MW_BIND))
    }

    /// Returns true if the rights satisfy `ibv_reg_mr(3)`: remote write or atomic access requires
    /// `LOCAL_WRITE`, `HUGE_PAGES` requires `ON_DEMAND`, and all bits have names.
    #[must_use]
    pub const fn is_legal(self) -> bool {
        let remote_change = self.intersects(Self::REMOTE_WRITE.union(Self::REMOTE_ATOMIC));
        Self::all().contains(self)
            && (!remote_change || self.contains(Self::LOCAL_WRITE))
            && (!self.contains(Self::HUGE_PAGES) || self.contains(Self::ON_DEMAND))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_write_access_requires_local_write() {
        assert!(!Access::REMOTE_WRITE.is_legal() && !Access::REMOTE_ATOMIC.is_legal());
        assert!(
            (Access::REMOTE_ALL | Access::LOCAL_WRITE).is_legal() && Access::REMOTE_READ.is_legal()
        );
    }

    #[test]
    fn huge_pages_require_on_demand_paging() {
        assert!(!Access::HUGE_PAGES.is_legal() && !Access::from_bits_retain(1 << 30).is_legal());
        assert!((Access::HUGE_PAGES | Access::ON_DEMAND).is_legal());
    }

    #[test]
    fn memory_window_binding_counts_as_remote_access() {
        assert!(
            Access::MW_BIND.is_remote()
                && Access::REMOTE_READ.is_remote()
                && !Access::LOCAL_WRITE.is_remote()
        );
    }
}
