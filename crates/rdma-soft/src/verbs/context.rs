//! Contexts and the objects created from them.

// Implements an `unsafe fn` of the contract; its obligation passes to `dma`.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, CqInit, DctInit, DmaBufRange, QpInit};
use rdma_provider::types::{
    Access, AddressVector, AsyncEvent, DeviceAttr, GidEntry, GidKind, Lkey, PortAttr, PortNum, Qpn,
    Rkey, SrqCaps, Timestamp,
};

use crate::Soft;
use crate::cm::CmChannel;
use crate::device::completion_channel::{Channel, Mailbox, os_error};
use crate::device::completion_queue::CqInner;
use crate::device::events::Events;
use crate::device::shared_receive_queue::SrqInner;
use crate::device::{DeviceInner, MAX_MR_SIZE, dma_buf};
use crate::error::OpenError;
use crate::memory::PAGE;
use crate::memory::dma::Memory;
use crate::net::Network;
use crate::net::node::PORT;
use crate::roce::requester::MAX_MESSAGE;

use super::cq::Cq;
use super::dct::{self, Dct};
use super::qp::{self, Qp};
use super::srq::Srq;

/// An open device, see [`contract::Context`].
#[derive(Debug)]
pub struct Context {
    device: Arc<DeviceInner>,
    events: Arc<Events>,
}

impl Context {
    /// Returns true if the device reaches only devices of its own network, within this process.
    #[must_use]
    pub fn is_in_process(&self) -> bool {
        !self.device.network.is_udp()
    }
}

impl Network {
    /// Opens device `name`, and creates it if necessary. Over UDP only configured devices exist.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the device is unknown or lost, or the network's thread cannot be started.
    pub fn open(&self, name: &str) -> Result<Context, OpenError> {
        let network = &self.0;
        let failed = OpenError::of(name);
        // Without its thread nothing would be retransmitted.
        network.scheduler.start().map_err(|error| failed(VerbError::no_thread(&error)))?;
        let device = {
            let mut names = network.names.lock();
            let gid = network.address_of(&mut names, name)?;
            match DeviceInner::at(network, gid) {
                Some(device) => device,
                None => DeviceInner::new(name, gid, network).map_err(&failed)?,
            }
        };
        device.check_alive("ibv_open_device").map_err(&failed)?;
        let events =
            device.add_events().map_err(|error| failed(os_error("ibv_open_device", &error)))?;
        Ok(Context { device, events })
    }
}

impl contract::Context<Soft> for Context {
    fn reports_last_receive(&self) -> bool {
        true
    }

    fn may_block(&self) -> bool {
        false
    }

    fn random(&self) -> Result<u64, VerbError> {
        self.device.network.random()
    }

    fn attr(&self) -> &DeviceAttr {
        self.device.attr()
    }

    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        self.device.check_alive("ibv_query_port")?;
        if port != PORT {
            return Err(VerbError::new("ibv_query_port", VerbError::EINVAL));
        }
        let mut attr =
            PortAttr::ethernet(PORT, vec![GidEntry::new(0, self.device.gid, GidKind::RoceV2)]);
        attr.state = self.device.port_state();
        attr.active_mtu = self.device.mtu;
        attr.max_msg_size = MAX_MESSAGE;
        // At most as many as `set_pkeys` takes.
        attr.pkeys = self.device.pkeys.table().len() as u16;
        attr.bad_pkeys = self.device.pkeys.violations();
        Ok(attr)
    }

    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        self.port(port)?;
        Ok(self.device.pkeys.table())
    }

    fn port_counters(&self, port: PortNum) -> Result<BTreeMap<String, u64>, VerbError> {
        let attr = self.port(port)?;
        let counters = self.device.port_counters().named();
        Ok(counters.chain([("bad_pkeys".to_owned(), attr.bad_pkeys.into())]).collect())
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        self.device.check_alive("ibv_alloc_pd")?;
        let id = self.device.pd_numbers.lock().take();
        let id = id.ok_or(VerbError::new("ibv_alloc_pd", VerbError::ENOMEM))?;
        Ok(Pd { device: Arc::clone(&self.device), events: Arc::clone(&self.events), id })
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        const VERB: &str = "ibv_create_comp_channel";
        self.device.check_alive(VERB)?;
        Mailbox::new()
            .map(|mailbox| Channel(Arc::new(mailbox)))
            .map_err(|error| os_error(VERB, &error))
    }

    fn create_cq(&self, init: &CqInit<'_, Soft>) -> Result<Cq, VerbError> {
        let attr = self.device.attr();
        self.device.check_alive("ibv_create_cq")?;
        let is_allowed = (1..=attr.max_cqe).contains(&init.capacity);
        if !is_allowed || init.vector >= attr.completion_vectors {
            return Err(VerbError::new("ibv_create_cq", VerbError::EINVAL));
        }
        let clock = init.timestamps.then_some(&self.device.network.scheduler);
        let CqInit { capacity, channel, cookie, .. } = *init;
        let queue = CqInner::new(self.device.id(), capacity, &self.events, channel, cookie, clock);
        self.device.add_completion_queue(&queue);
        Ok(Cq { queue, device: Arc::clone(&self.device) })
    }

    fn read_clock(&self) -> Result<Timestamp, VerbError> {
        self.device.check_alive("ibv_query_rt_values_ex")?;
        Ok(Timestamp(self.device.network.scheduler.now()))
    }

    fn create_cm_channel(&self) -> Result<CmChannel, VerbError> {
        CmChannel::new(&self.device)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.mailbox.fd()
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        match self.events.mailbox.pop() {
            None if self.device.is_dead() => {
                Err(VerbError::new("ibv_get_async_event", VerbError::ENODEV))
            }
            event => Ok(event),
        }
    }

    fn packet_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.endpoint().map(|endpoint| endpoint.fd())
    }

    fn process_packets(&self) -> bool {
        self.device.endpoint().is_some_and(|endpoint| endpoint.process_packets())
    }

    fn stop_processing(&self) {
        if let Some(endpoint) = self.device.endpoint() {
            endpoint.stop_processing();
        }
    }
}

/// A protection domain, see [`contract::Pd`].
#[derive(Debug)]
pub struct Pd {
    device: Arc<DeviceInner>,
    events: Arc<Events>,
    id: u32,
}

impl Drop for Pd {
    fn drop(&mut self) {
        self.device.pd_numbers.lock().release(self.id);
    }
}

impl Pd {
    fn insert(
        &self,
        verb: &'static str,
        memory: Memory,
        access: Access,
        shared: bool,
        mapping: Option<MmapRaw>,
    ) -> Result<Mr, VerbError> {
        let device = &self.device;
        let random = device.network.random()?;
        let key = device.keys.insert(memory, access, shared, self.id, random);
        let key = key.ok_or(VerbError::new(verb, VerbError::ENOMEM))?;
        Ok(Mr { device: Arc::clone(device), key, destroyed: false, mapping })
    }
}

impl contract::Pd<Soft> for Pd {
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        iova: u64,
        access: Access,
        shared: bool,
    ) -> Result<Mr, VerbError> {
        const VERB: &str = "ibv_reg_mr";
        let device = &self.device;
        device.check_alive(VERB)?;
        let wraps = addr.addr().get().checked_add(len).is_none()
            || iova.checked_add(len as u64).is_none()
            || isize::try_from(len).is_err();
        let apart = (addr.addr().get() as u64 ^ iova) & (PAGE - 1) != 0;
        if wraps || apart || len as u64 > MAX_MR_SIZE || !access.is_legal() {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        // SAFETY: the caller keeps the range allocated until the registration is dropped (S1), and
        // `Drop` below removes it from the keys.
        let memory = unsafe { Memory::new(addr.as_ptr(), len, iova) };
        self.insert(VERB, memory, access, shared, None)
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Mr, VerbError> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        self.device.check_alive(VERB)?;
        if range.len as u64 > MAX_MR_SIZE || !access.is_legal() {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        let mapping = dma_buf::map(fd, range).map_err(|errno| VerbError::new(VERB, errno))?;
        // SAFETY: the mapping has `len` bytes and moves into the registration, which removes it
        // from the keys before unmapping it (S1).
        let memory = unsafe { Memory::new(mapping.as_mut_ptr(), range.len, range.iova) };
        // Shared: other holders of the descriptor may have mapped the memory.
        self.insert(VERB, memory, access, true, Some(mapping))
    }

    fn create_qp(&self, init: &QpInit<'_, Soft>) -> Result<Qp, VerbError> {
        self.device.check_alive("ibv_create_qp")?;
        qp::create((&self.device, &self.events), self.id, init, None)
    }

    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, Soft>) -> Result<Qp, VerbError> {
        self.device.check_alive("ibv_create_qp")?;
        qp::create((&self.device, &self.events), self.id, init, Some(number))
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        const VERB: &str = "ibv_alloc_mw";
        let device = &self.device;
        device.check_alive(VERB)?;
        let random = device.network.random()?;
        let key = device
            .keys
            .add_window(self.id, random)
            .ok_or(VerbError::new(VERB, VerbError::ENOMEM))?;
        Ok(Mw { device: Arc::clone(device), key, destroyed: false })
    }

    fn create_dct(&self, init: &DctInit<'_, Soft>) -> Result<Dct, VerbError> {
        self.device.check_alive("mlx5dv_create_qp")?;
        dct::create((&self.device, &self.events), self.id, init)
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        const VERB: &str = "ibv_create_srq";
        let device = &self.device;
        device.check_alive(VERB)?;
        let attr = device.attr();
        if caps.max_wr == 0 || caps.max_wr > attr.max_srq_wr || caps.max_sge > attr.max_srq_sge {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        let queue = SrqInner::new(device.id(), self.id, caps, &self.events);
        Ok(Srq { queue, device: Arc::clone(device) })
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        const VERB: &str = "ibv_create_ah";
        self.device.check_alive(VERB)?;
        if address.port != PORT || address.sgid_index != 0 {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        Ok(Ah)
    }
}

/// A registration, see [`contract::Mr`]. One key is both lkey and rkey.
#[derive(Debug)]
pub struct Mr {
    device: Arc<DeviceInner>,
    key: u32,
    destroyed: bool,
    /// Mapping of a dma-buf, unmapped after deregistration.
    mapping: Option<MmapRaw>,
}

impl contract::Mr for Mr {
    fn lkey(&self) -> Lkey {
        Lkey(self.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.key)
    }

    fn handle(&self) -> usize {
        self.key as usize
    }

    fn deregister(&mut self) -> Result<(), VerbError> {
        if !self.destroyed {
            self.device.check_destroy("ibv_dereg_mr")?;
            self.device.keys.remove(self.key);
            self.destroyed = true;
        }
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if let Err(error) = contract::Mr::deregister(self) {
            rdma_provider::error!(
                key = self.key,
                %error,
                "failed to deregister memory; leaking the registration"
            );
            mem::forget(self.mapping.take());
        }
    }
}

/// A memory window, see [`contract::Mw`]. Removing its registration unbinds it.
#[derive(Debug)]
pub struct Mw {
    device: Arc<DeviceInner>,
    key: u32,
    destroyed: bool,
}

impl contract::Mw for Mw {
    fn rkey(&self) -> Rkey {
        Rkey(self.key)
    }

    fn handle(&self) -> usize {
        self.key as usize
    }

    fn deallocate(&mut self) -> Result<(), VerbError> {
        if !self.destroyed {
            self.device.check_destroy("ibv_dealloc_mw")?;
            self.device.keys.remove_window(self.key);
            self.destroyed = true;
        }
        Ok(())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        if let Err(error) = contract::Mw::deallocate(self) {
            rdma_provider::error!(
                rkey = self.key,
                %error,
                "failed to deallocate memory window; leaking it"
            );
        }
    }
}

/// An address handle, see [`contract::Ah`]. It is empty: work requests carry the address.
#[derive(Debug)]
pub struct Ah;

impl contract::Ah for Ah {
    fn handle(&self) -> usize {
        0
    }
}
