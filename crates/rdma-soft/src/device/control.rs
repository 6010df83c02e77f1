//! Control of a device, and its injected faults.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_provider::types::AsyncEvent;

use super::DeviceInner;
use crate::net::Network;
use crate::net::node::{Node, PORT};

impl Network {
    /// Returns a control of device `name`, if open.
    #[must_use]
    pub fn control(&self, name: &str) -> Option<DeviceControl> {
        DeviceInner::at(&self.0, self.gid_of(name).ok()?).map(DeviceControl)
    }
}

/// A control of a device, for tests of programs that must survive its failure.
#[derive(Debug, Clone)]
pub struct DeviceControl(pub(crate) Arc<DeviceInner>);

impl DeviceControl {
    /// Removes the device: it raises `DEVICE_FATAL`, queue pairs enter ERR and flush, and verbs
    /// fail. Once its objects are dropped, its name opens a new device.
    pub fn kill(&self) {
        Arc::clone(&self.0).kill();
    }

    /// Sets the port up or down; while down, it loses all packets.
    pub fn set_port(&self, up: bool) {
        self.0.set_port(up);
    }

    /// Sets the partition key table of the port, which a subnet manager does on InfiniBand; by
    /// default it has one entry, 0xffff. The highest bit of an entry is set for a full member of
    /// the partition in the other bits, and two limited members do not reach each other. An entry
    /// whose other bits are 0 is empty. At most 65,535 entries count. Contexts get
    /// [`AsyncEvent::PkeyChange`].
    ///
    /// Queue pairs and DC targets keep the P_Key that their index selected when they were modified.
    /// Messages of the connection manager are sent with the first entry that is not empty.
    pub fn set_pkeys(&self, table: &[u16]) {
        self.0.pkeys.set(table);
        self.0.announce(AsyncEvent::PkeyChange(PORT));
    }

    /// Raises `event` in every context, without other effects. An unplugged adapter raises
    /// [`AsyncEvent::DeviceFatal`] like this, then nothing.
    pub fn announce(&self, event: AsyncEvent) {
        self.0.announce(event);
    }

    /// Returns the number of queue pairs.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.0.queue_pair_count()
    }

    /// Returns the number of connections, including unconfirmed ones and TIMEWAIT.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.cm.connections()
    }

    /// Starts or stops refusing to destroy objects: a fault of a driver.
    ///
    /// While it refuses, destroying a registration, a window, a queue pair or a shared receive
    /// queue fails with EBUSY. The layers above must leak the memory that the device may still
    /// access.
    pub fn refuse_destroy(&self, refuse: bool) {
        self.0.refusals.destroy.store(refuse, Ordering::Relaxed);
    }

    /// Starts or stops ignoring transitions of queue pairs to ERR: a fault of a device.
    ///
    /// Work continues without flush until its queue pair is destroyed.
    pub fn ignore_errors(&self, ignore: bool) {
        self.0.refusals.flush.store(ignore, Ordering::Relaxed);
    }

    /// Starts or stops landing payload out of order in memory registered from now on with
    /// [`RELAXED_ORDERING`](rdma_provider::types::Access::RELAXED_ORDERING), as adapters may: each
    /// contiguous piece of a packet in blocks of 64 bytes, the last one first, with a pause for
    /// other threads after it. A program that polls the last byte instead of waiting for a
    /// completion then reads bytes that have not arrived.
    pub fn reorder_relaxed(&self, reorder: bool) {
        self.0.keys.reorders.store(reorder, Ordering::Relaxed);
    }

    /// Accepts `posted` more sends, then refuses one with ENOMEM: a fault of a driver.
    ///
    /// Later requests in the same list are not posted.
    pub fn refuse_send(&self, posted: u32) {
        self.0.refusals.set_send(posted);
    }
}
