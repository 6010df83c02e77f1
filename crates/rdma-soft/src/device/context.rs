//! Contexts and the objects created from them.

// Implements an `unsafe fn` of the contract; its obligation passes to `dma`.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::mem;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, DctInit, DmaBufRange, QpInit};
use rdma_provider::types::{
    Access, AddressVector, AsyncEvent, DeviceAttr, GidEntry, GidKind, Lkey, PortAttr, PortNum, Qpn,
    Rkey, SrqCaps,
};

use super::{DeviceInner, MAX_MR_SIZE, PORT};
use super::{dct, dma_buf, queue_pair};
use crate::Soft;
use crate::cm::CmChannel;
use crate::device::completion_channel::{Channel, Mailbox, os_error};
use crate::device::completion_queue::Cq;
use crate::device::dct::Dct;
use crate::device::queue_pair::Qp;
use crate::device::shared_receive_queue::Srq;
use crate::memory::dma::Memory;
use crate::roce::requester::MAX_MESSAGE;

#[derive(Debug)]
pub(crate) struct ContextInner {
    device: Arc<DeviceInner>,
    events: Mailbox<AsyncEvent>,
}

impl ContextInner {
    pub(crate) const fn device(&self) -> &Arc<DeviceInner> {
        &self.device
    }

    pub(crate) fn event(&self, event: AsyncEvent) {
        rdma_provider::info!(device = self.device.attr.name, ?event, "asynchronous event");
        self.events.push(event);
    }
}

/// An open device, see [`contract::Context`].
#[derive(Debug)]
pub struct Context(Arc<ContextInner>);

impl Context {
    /// Returns true if the device reaches only devices of its own network, within this process.
    #[must_use]
    pub fn is_in_process(&self) -> bool {
        !self.0.device.network.is_udp()
    }

    pub(crate) fn open(device: Arc<DeviceInner>) -> Result<Self, VerbError> {
        device.check_alive("ibv_open_device")?;
        let events = Mailbox::new().map_err(|error| os_error("ibv_open_device", &error))?;
        let inner = Arc::new(ContextInner { device, events });
        inner.device.add_context(&inner);
        Ok(Self(inner))
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
        self.0.device.network.random()
    }

    fn attr(&self) -> &DeviceAttr {
        &self.0.device.attr
    }

    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        self.0.device.check_alive("ibv_query_port")?;
        if port != PORT {
            return Err(VerbError::new("ibv_query_port", VerbError::EINVAL));
        }
        let mut attr =
            PortAttr::ethernet(PORT, vec![GidEntry::new(0, self.0.device.gid, GidKind::RoceV2)]);
        attr.state = self.0.device.port_state();
        attr.active_mtu = self.0.device.mtu;
        attr.max_msg_size = MAX_MESSAGE;
        Ok(attr)
    }

    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        self.port(port)?;
        // The default partition, full member.
        Ok(vec![0xffff])
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        self.0.device.check_alive("ibv_alloc_pd")?;
        let id = self.0.device.pd_numbers.lock().take();
        let id = id.ok_or(VerbError::new("ibv_alloc_pd", VerbError::ENOMEM))?;
        Ok(Pd { context: Arc::clone(&self.0), id })
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        const VERB: &str = "ibv_create_comp_channel";
        self.0.device.check_alive(VERB)?;
        Mailbox::new()
            .map(|mailbox| Channel(Arc::new(mailbox)))
            .map_err(|error| os_error(VERB, &error))
    }

    fn create_cq(
        &self,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Cq, VerbError> {
        let attr = &self.0.device.attr;
        self.0.device.check_alive("ibv_create_cq")?;
        if capacity == 0 || capacity > attr.max_cqe || vector >= attr.completion_vectors {
            return Err(VerbError::new("ibv_create_cq", VerbError::EINVAL));
        }
        let cq = Cq::new(self.0.device.id(), capacity, Arc::clone(&self.0), channel, cookie);
        self.0.device.add_completion_queue(&cq);
        Ok(cq)
    }

    fn create_cm_channel(&self) -> Result<CmChannel, VerbError> {
        CmChannel::new(&self.0.device)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.events.fd()
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        match self.0.events.pop() {
            None if self.0.device.is_dead() => {
                Err(VerbError::new("ibv_get_async_event", VerbError::ENODEV))
            }
            event => Ok(event),
        }
    }

    fn inlet(&self) -> Option<BorrowedFd<'_>> {
        self.0.device.endpoint().map(|endpoint| endpoint.fd())
    }

    fn serve(&self) -> bool {
        self.0.device.endpoint().is_some_and(|endpoint| endpoint.serve())
    }

    fn stop_serving(&self) {
        if let Some(endpoint) = self.0.device.endpoint() {
            endpoint.stop_serving();
        }
    }
}

/// A protection domain, see [`contract::Pd`].
#[derive(Debug)]
pub struct Pd {
    context: Arc<ContextInner>,
    id: u32,
}

impl Drop for Pd {
    fn drop(&mut self) {
        self.context.device().pd_numbers.lock().release(self.id);
    }
}

pub(super) const MAX_PDS: u32 = 1 << 24;
// Owners of windows use numbers from 2^31, see `keys`.
const _: () = assert!(MAX_PDS < 1 << 31);

#[derive(Debug)]
pub(crate) struct PdNumbers {
    limit: u32,
    highest: u32,
    /// Oldest first.
    returned: VecDeque<u32>,
}

/// Minimum number of released numbers before one is reused, while unused ones are left.
const QUARANTINE: usize = 256;

impl PdNumbers {
    pub(super) const fn new(limit: u32) -> Self {
        Self { limit, highest: 0, returned: VecDeque::new() }
    }

    fn take(&mut self) -> Option<u32> {
        if self.returned.len() < QUARANTINE && self.highest < self.limit {
            self.highest += 1;
            return Some(self.highest);
        }
        self.returned.pop_front()
    }

    fn release(&mut self, number: u32) {
        self.returned.push_back(number);
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
        let device = self.context.device();
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
        access: Access,
        shared: bool,
    ) -> Result<Mr, VerbError> {
        const VERB: &str = "ibv_reg_mr";
        let device = self.context.device();
        device.check_alive(VERB)?;
        let wraps = addr.addr().get().checked_add(len).is_none() || isize::try_from(len).is_err();
        if wraps || len as u64 > MAX_MR_SIZE || !access.is_legal() {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        // SAFETY: the caller keeps the range allocated until the registration is dropped (S1), and
        // `Drop` below removes it from the keys.
        let memory = unsafe { Memory::new(addr.as_ptr(), len, addr.addr().get() as u64) };
        self.insert(VERB, memory, access, shared, None)
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Mr, VerbError> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        self.context.device().check_alive(VERB)?;
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
        self.context.device.check_alive("ibv_create_qp")?;
        queue_pair::create(&self.context, self.id, init, None)
    }

    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, Soft>) -> Result<Qp, VerbError> {
        self.context.device.check_alive("ibv_create_qp")?;
        queue_pair::create(&self.context, self.id, init, Some(number))
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        const VERB: &str = "ibv_alloc_mw";
        let device = self.context.device();
        device.check_alive(VERB)?;
        let random = device.network.random()?;
        let key = device
            .keys
            .add_window(self.id, random)
            .ok_or(VerbError::new(VERB, VerbError::ENOMEM))?;
        Ok(Mw { device: Arc::clone(device), key, destroyed: false })
    }

    fn create_dct(&self, init: &DctInit<'_, Soft>) -> Result<Dct, VerbError> {
        self.context.device.check_alive("mlx5dv_create_qp")?;
        dct::create(&self.context, self.id, init)
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        const VERB: &str = "ibv_create_srq";
        let device = self.context.device();
        device.check_alive(VERB)?;
        let attr = &device.attr;
        if caps.max_wr == 0 || caps.max_wr > attr.max_srq_wr || caps.max_sge > attr.max_srq_sge {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        Ok(Srq::new(device.id(), self.id, caps, Arc::clone(&self.context)))
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        const VERB: &str = "ibv_create_ah";
        self.context.device.check_alive(VERB)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pd_numbers_are_reused_and_never_shared() {
        let limit = if cfg!(miri) { 20 } else { 1000 };
        let mut numbers = PdNumbers::new(limit);
        let mut live: VecDeque<u32> = (0..limit).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(
            live.iter().copied().collect::<std::collections::BTreeSet<_>>().len(),
            limit as usize
        );
        assert_eq!(numbers.take(), None, "the limit is reached");
        for _ in 0..10 * limit {
            let gone = live.pop_front().unwrap();
            numbers.release(gone);
            let next = numbers.take().unwrap();
            assert!((1..=limit).contains(&next) && !live.contains(&next), "{next}");
            live.push_back(next);
        }
    }

    #[test]
    fn released_pd_number_is_quarantined_before_reuse() {
        let mut numbers = PdNumbers::new(MAX_PDS);
        let first = numbers.take().unwrap();
        numbers.release(first);
        let until = (1..).find(|_| {
            let next = numbers.take().unwrap();
            numbers.release(next);
            next == first
        });
        assert_eq!(until, Some(QUARANTINE));
    }
}
