//! Devices: list, open, query, asynchronous events.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env::VarError;
use std::ffi::{CStr, OsStr, c_int};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use crate::ffi::*;

use super::ibv_channel::Channel;
use super::ibv_cq::Cq;
use super::ibv_pd::Pd;
use super::ibv_qp::Qp;
use super::mlx5::dc_attributes;
use super::mlx5::direct::Device;
use super::posting::Posting;
use super::vendor::{SIW, SOFT_ROCE};
use super::{Ibverbs, convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, Context as _, CqInit, Pd as _, QpInit};
use rdma_provider::types::{
    AsyncEvent, AtomicCapability, ClockAttr, DeviceAttr, DirectConfig, GidEntry, GidKind, PortAttr,
    PortNum, QpCaps, Qpn, SrqCaps, Timestamp, Transport, WireProtocol,
};

/// The device list of `ibv_get_device_list(3)`, freed on drop.
struct List {
    first: NonNull<*mut ibv_device>,
    len: usize,
}

impl List {
    fn new() -> Result<Self, VerbError> {
        let mut len = 0;
        // SAFETY: S3: `len` outlives the call.
        let first = unsafe { ibv_get_device_list(&raw mut len) };
        let first = sys::handle("ibv_get_device_list", first)?;
        Ok(Self { first, len: usize::try_from(len).unwrap_or(0) })
    }

    fn iter(&self) -> impl Iterator<Item = (*mut ibv_device, String)> {
        (0..self.len).filter_map(|index| {
            // SAFETY: S3: the list has `len` pointers to devices that live as long as it.
            let device = unsafe { *self.first.add(index).as_ptr() };
            // SAFETY: S3: as above.
            let name = NonNull::new(unsafe { ibv_get_device_name(device) }.cast_mut())?;
            // SAFETY: S3: NUL-terminated, and lives as long as the device.
            let name = unsafe { CStr::from_ptr(name.as_ptr()) };
            Some((device, name.to_string_lossy().into_owned()))
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: S3: from `ibv_get_device_list`, not used again. Open devices stay valid.
        unsafe { ibv_free_device_list(self.first.as_ptr()) };
    }
}

/// Returns the names of the devices that libibverbs finds.
///
/// EOPNOTSUPP if the library could not be loaded, ENOSYS if the kernel's RDMA support is missing.
pub fn devices() -> Result<Vec<String>, VerbError> {
    Ok(List::new()?.iter().map(|(_, name)| name).collect())
}

/// The error of another value of `TOKIO_RDMA_CQE_COMPRESSION`.
const BAD_COMPRESSION: VerbError =
    VerbError::new("TOKIO_RDMA_CQE_COMPRESSION (must be 0 or 1)", VerbError::EINVAL);

/// Returns whether the environment requests compressed completion queue entries.
fn wants_compression() -> Result<bool, VerbError> {
    match std::env::var("TOKIO_RDMA_CQE_COMPRESSION").as_deref() {
        Ok("1") => Ok(true),
        Ok("0") | Err(VarError::NotPresent) => Ok(false),
        Ok(_) | Err(VarError::NotUnicode(_)) => Err(BAD_COMPRESSION),
    }
}

/// An open device, `ibv_context`.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<ibv_context>,
    attr: DeviceAttr,
    /// Number of GID table entries of all ports.
    gids: usize,
    posting: Posting,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Context {}
// SAFETY: S3: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither close it nor take its asynchronous events.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_context> {
        self.raw
    }

    /// Opens the device called `name`. Returns `None` if it does not exist.
    pub fn open(name: &str) -> Result<Option<Self>, VerbError> {
        let list = List::new()?;
        let Some((device, _)) = list.iter().find(|(_, found)| found == name) else {
            return Ok(None);
        };
        // SAFETY: S3: the device is in a live list.
        let raw = sys::handle("ibv_open_device", unsafe { ibv_open_device(device) })?;
        // From here on, an error closes the context.
        let mut context =
            Self { raw, attr: DeviceAttr::named(name), gids: 0, posting: Posting::Chain };
        sys::set_nonblocking(context.event_fd())?;
        context.attr = context.query(name)?;
        for port in 1..=context.attr.ports {
            let entries = context.query_port(PortNum(port))?.gid_tbl_len;
            context.gids += usize::try_from(entries).unwrap_or(0);
        }
        context.attr.max_inline = context.probe_inline();
        context.attr.dma_buf = context.create_pd()?.supports_dma_bufs();
        context.attr.dc = dc_attributes::query(raw, &context.attr);
        context.posting = context.choose_posting()?;
        context.attr.data_path = context.posting.data_path();
        // Libraries copy received data from completion queue entries or inline buffers, libmlx5 for
        // example (scatter to CQE). The direct data path does not if there are dma-bufs.
        let direct = context.posting.direct().is_some();
        context.attr.places_by_key =
            context.attr.vendor_id == SOFT_ROCE || direct && context.attr.dma_buf;
        Ok(Some(context))
    }

    /// Chooses how queues post: as environment variable `TOKIO_RDMA_POST` says, otherwise directly
    /// if possible.
    fn choose_posting(&self) -> Result<Posting, VerbError> {
        const INVALID: &str = "TOKIO_RDMA_POST (must be direct, extended or chain)";
        let wanted = std::env::var_os("TOKIO_RDMA_POST");
        match wanted.as_deref().map(OsStr::to_str) {
            Some(Some("chain")) => Ok(Posting::Chain),
            Some(Some("extended")) => Ok(Posting::Extended),
            Some(Some("direct")) => self.direct(),
            Some(_) => Err(VerbError::new(INVALID, VerbError::EINVAL)),
            None => match self.direct() {
                Ok(direct) => Ok(direct),
                Err(BAD_COMPRESSION) => Err(BAD_COMPRESSION),
                Err(reason) => {
                    self.log_fallback(reason);
                    // SoftRoCE's `ibv_wr_*` lose the inline flag and all but the first length of a
                    // list (rdma-core 44).
                    let has_extended = self.attr.vendor_id != SOFT_ROCE;
                    Ok(if has_extended { Posting::Extended } else { Posting::Chain })
                }
            },
        }
    }

    /// Logs why the device does not post directly: at debug if it is not meant to.
    fn log_fallback(&self, reason: VerbError) {
        const FALLBACK: &str = "direct data path unavailable; posting through libibverbs";
        let device = &self.attr.name;
        if Device::EXPECTED.contains(&reason) {
            rdma_provider::debug!(device, %reason, "{FALLBACK}");
        } else {
            rdma_provider::info!(device, %reason, "{FALLBACK}");
        }
    }

    /// Returns the direct data path of the device, or an error that names what it lacks. Creates a
    /// queue of each kind, because only that shows whether the device has doorbell registers left,
    /// and rings of a known format.
    fn direct(&self) -> Result<Posting, VerbError> {
        // A registered dma-buf has addresses that are not this process's.
        let mut device = Device::new(self.raw, !self.attr.dma_buf)?;
        if wants_compression()? {
            device.compressed = device.offers_compression;
            if !device.compressed {
                rdma_provider::warn!(
                    device = self.attr.name,
                    "adapter or libmlx5 does not compress completion queue entries; \
                     ignoring TOKIO_RDMA_CQE_COMPRESSION=1"
                );
            }
        }
        let pd = Pd::new(self.raw, self.attr.clone(), Posting::Direct(device))?;
        let cq = Cq::new(self.raw, &CqInit::new(2), Some(device))?;
        let srq = match self.attr.max_srq {
            0 => None,
            _ => Some(pd.create_srq(SrqCaps { max_wr: 1, max_sge: 1 })?),
        };
        drop(smallest_qp(&pd, &cq, 0)?);
        drop(srq);
        Ok(Posting::Direct(device))
    }

    fn query(&self, name: &str) -> Result<DeviceAttr, VerbError> {
        let raw = self.raw.as_ptr();
        // SAFETY: S3: zeros are valid; the context is open; a null input is allowed.
        let all: ibv_device_attr_ex = unsafe {
            filled("ibv_query_device_ex", |all| ibv_query_device_ex(raw, ptr::null(), all))
        }?;
        let raw = &all.orig_attr;
        // Counts are signed in C but never negative.
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let small = |value: i32| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
        // SAFETY: S3: the context is open.
        let vectors = unsafe { self.raw.as_ref().num_comp_vectors };
        let mut attr = DeviceAttr::named(name);
        // SAFETY: S3: the context is open, and so is its device.
        if unsafe { (*self.raw.as_ref().device).transport_type }
            == ibv_transport_type::IBV_TRANSPORT_IWARP
        {
            attr.protocol = WireProtocol::Iwarp;
            // RFC 5040 has none, and no verb tells whether a device has those of RFC 7306.
            attr.immediate = false;
        }
        attr.iova = raw.vendor_id != SIW;
        attr.guid = u64::from_be(raw.node_guid);
        attr.ports = raw.phys_port_cnt;
        attr.max_qp = count(raw.max_qp);
        attr.max_qp_wr = count(raw.max_qp_wr);
        attr.max_sge = count(raw.max_sge);
        // siw would read to the first element only.
        attr.max_read_sge = if attr.is_iwarp() { count(raw.max_sge_rd) } else { attr.max_sge };
        attr.max_cq = count(raw.max_cq);
        attr.max_cqe = count(raw.max_cqe);
        attr.max_mr = count(raw.max_mr);
        attr.max_mr_size = raw.max_mr_size;
        attr.max_pd = count(raw.max_pd);
        attr.max_qp_rd_atom = small(raw.max_qp_rd_atom);
        attr.max_qp_init_rd_atom = small(raw.max_qp_init_rd_atom);
        attr.max_srq = count(raw.max_srq);
        attr.max_srq_wr = count(raw.max_srq_wr);
        attr.max_srq_sge = count(raw.max_srq_sge);
        attr.max_mcast_grp = count(raw.max_mcast_grp);
        attr.max_mcast_qp_attach = count(raw.max_mcast_qp_attach);
        attr.completion_vectors = count(vectors).max(1);
        attr.vendor_id = raw.vendor_id;
        attr.vendor_part_id = raw.vendor_part_id;
        // Ends at a NUL or at the end of the array.
        let firmware: Vec<u8> = raw
            .fw_ver
            .iter()
            .map(|&c| u8::from_ne_bytes(c.to_ne_bytes()))
            .take_while(|&c| c != 0)
            .collect();
        attr.firmware = String::from_utf8_lossy(&firmware).into_owned();
        let windows = ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A
            | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        attr.max_mw = if raw.device_cap_flags & windows.0 != 0 { count(raw.max_mw) } else { 0 };
        attr.clock = ClockAttr::new(all.hca_core_clock, all.completion_timestamp_mask);
        attr.on_demand_paging =
            all.odp_caps.general_caps & u64::from(ibv_odp_general_caps::IBV_ODP_SUPPORT.0) != 0;
        attr.atomic = match raw.atomic_cap {
            ibv_atomic_cap::IBV_ATOMIC_NONE => AtomicCapability::None,
            ibv_atomic_cap::IBV_ATOMIC_GLOB => AtomicCapability::Global,
            _ => AtomicCapability::Device,
        };
        Ok(attr)
    }

    fn query_port(&self, port: PortNum) -> Result<ibv_port_attr, VerbError> {
        // SAFETY: S3: zeros are valid; the context is open.
        unsafe { filled("ibv_query_port", |attr| ibv_query_port(self.raw.as_ptr(), port.0, attr)) }
    }

    /// Returns the used entries of `port`'s GID table.
    fn gid_table(&self, port: PortNum) -> Result<Vec<GidEntry>, VerbError> {
        let mut entries: Vec<ibv_gid_entry> = Vec::with_capacity(self.gids);
        // SAFETY: S3: the vector has the capacity that is passed.
        let found = unsafe {
            ibv_query_gid_table(self.raw.as_ptr(), entries.as_mut_ptr(), entries.capacity(), 0)
        };
        let found = sys::count("ibv_query_gid_table", found)?;
        // SAFETY: S4: the call has written `found` entries, at most the capacity.
        unsafe { entries.set_len(found.min(entries.capacity())) };
        let of_port = entries.iter().filter(|entry| entry.port_num == u32::from(port.0));
        // Paths name a GID by an 8-bit index.
        let reachable =
            of_port.filter_map(|entry| Some((u8::try_from(entry.gid_index).ok()?, entry)));
        Ok(reachable
            .map(|(index, entry)| {
                let kind = match entry.gid_type {
                    _ if self.attr.is_iwarp() => GidKind::Iwarp,
                    0 => GidKind::InfiniBand,
                    1 => GidKind::RoceV1,
                    _ => GidKind::RoceV2,
                };
                GidEntry::new(index, convert::gid_from(&entry.gid), kind)
                    .on_interface(entry.ndev_ifindex)
            })
            .collect())
    }

    /// Returns the maximum inline length, which no verb reports, by creating queue pairs.
    fn probe_inline(&self) -> u32 {
        let largest = || -> Result<u32, VerbError> {
            let (pd, cq) = (self.create_pd()?, self.create_cq(&CqInit::new(1))?);
            let granted = |max_inline| {
                smallest_qp(&pd, &cq, max_inline).map(|qp| contract::Qp::caps(&qp).max_inline)
            };
            Ok([1024, 512, 256, 220, 128, 64, 32]
                .into_iter()
                .find_map(|size| granted(size).ok())
                .unwrap_or(0))
        };
        largest().unwrap_or_else(|error| {
            rdma_provider::warn!(
                %error,
                "failed to find the maximum inline length; reporting 0"
            );
            0
        })
    }
}

/// Creates a reliable connection of one work request with one element, to find out what the device
/// permits.
fn smallest_qp(pd: &Pd, cq: &Cq, max_inline: u32) -> Result<Qp, VerbError> {
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline };
    let transport = Transport::Rc;
    pd.create_qp(&QpInit {
        transport,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        caps,
        direct: DirectConfig::DEFAULT,
    })
}

/// Returns the structure that `query` fills in.
///
/// # Safety
///
/// All zero must be a valid `T`, and `query` must accept a pointer to one.
unsafe fn filled<T>(
    verb: &'static str,
    query: impl FnOnce(*mut T) -> c_int,
) -> Result<T, VerbError> {
    let mut value = MaybeUninit::zeroed();
    sys::status(verb, query(value.as_mut_ptr()))?;
    // SAFETY: S3: zeros are valid, and `query` has filled them in.
    Ok(unsafe { value.assume_init() })
}

impl contract::Context<Ibverbs> for Context {
    fn may_block(&self) -> bool {
        true
    }

    fn reports_last_receive(&self) -> bool {
        // SoftRoCE never does, but has processed earlier arrivals when the state change returns.
        self.attr.vendor_id != SOFT_ROCE
    }

    fn flushes_late_work(&self) -> bool {
        // siw flushes its rings when the state changes, and looks at neither of them afterwards.
        self.attr.vendor_id != SIW
    }

    fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    fn random(&self) -> Result<u64, VerbError> {
        getrandom::u64().map_err(|error| {
            VerbError::new("getrandom", error.raw_os_error().unwrap_or(VerbError::EIO))
        })
    }

    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        let raw = self.query_port(port)?;
        let mut attr = PortAttr::ethernet(port, self.gid_table(port)?);
        attr.state = convert::port_state(raw.state);
        attr.physical_state = convert::physical_state(raw.phys_state);
        attr.lanes = convert::lanes(raw.active_width);
        attr.lane_mbps = convert::lane_mbps(raw.active_speed);
        attr.link_layer = convert::link_layer(raw.link_layer);
        attr.max_mtu = convert::mtu_from(raw.max_mtu);
        attr.active_mtu = convert::mtu_from(raw.active_mtu);
        attr.max_msg_size = raw.max_msg_sz;
        attr.lid = raw.lid;
        attr.pkeys = raw.pkey_tbl_len;
        attr.bad_pkeys = raw.bad_pkey_cntr;
        Ok(attr)
    }

    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        let read = |index| {
            let mut pkey = 0;
            // SAFETY: S3: the context is open, the result local.
            let result = unsafe { ibv_query_pkey(self.raw.as_ptr(), port.0, index, &raw mut pkey) };
            sys::status("ibv_query_pkey", result).map(|()| u16::from_be(pkey))
        };
        (0..i32::from(self.query_port(port)?.pkey_tbl_len)).map(read).collect()
    }

    fn port_counters(&self, port: PortNum) -> Result<BTreeMap<String, u64>, VerbError> {
        self.query_port(port)?;
        let of_port = format!("/sys/class/infiniband/{}/ports/{}", self.attr.name, port.0);
        let directories = ["counters", "hw_counters"].map(|kind| format!("{of_port}/{kind}"));
        Ok(directories.iter().flat_map(|directory| numbers(directory)).collect())
    }

    fn create_pd(&self) -> Result<Pd, VerbError> {
        Pd::new(self.raw, self.attr.clone(), self.posting)
    }

    fn create_channel(&self) -> Result<Channel, VerbError> {
        Channel::new(self.raw)
    }

    fn create_cq(&self, init: &CqInit<'_, Ibverbs>) -> Result<Cq, VerbError> {
        Cq::new(self.raw, init, self.posting.direct())
    }

    fn read_clock(&self) -> Result<Timestamp, VerbError> {
        const VERB: &str = "ibv_query_rt_values_ex";
        let raw_clock = ibv_values_mask::IBV_VALUES_MASK_RAW_CLOCK.0;
        // SAFETY: S3: zeros are valid; the context is open.
        let values: ibv_values_ex = unsafe {
            filled(VERB, |values: *mut ibv_values_ex| {
                (*values).comp_mask = raw_clock;
                ibv_query_rt_values_ex(self.raw.as_ptr(), values)
            })
        }?;
        if values.comp_mask & raw_clock == 0 {
            return Err(VerbError::new(VERB, VerbError::EOPNOTSUPP));
        }
        // libmlx5 puts all bits of its clock into the nanoseconds.
        let seconds = (values.raw_clock.tv_sec as u64).wrapping_mul(1_000_000_000);
        Ok(Timestamp(seconds.wrapping_add(values.raw_clock.tv_nsec as u64)))
    }

    fn create_cm_channel(&self) -> Result<super::cm::CmChannel, VerbError> {
        super::cm::CmChannel::new()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: S3: the descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().async_fd) }
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        let mut raw = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: S3: the context is open, the event local.
        let result = unsafe { ibv_get_async_event(self.raw.as_ptr(), raw.as_mut_ptr()) };
        match sys::status("ibv_get_async_event", result) {
            Ok(()) => {}
            Err(error) if error.errno == sys::EAGAIN => return Ok(None),
            // All events have been read and the device was removed.
            Err(error) if error.errno == VerbError::EIO => {
                return Err(VerbError::new("ibv_get_async_event", VerbError::ENODEV));
            }
            Err(error) => return Err(error),
        }
        // SAFETY: S4: written by the successful call; the code is an integer, so any value is
        // valid.
        let mut event = unsafe { raw.assume_init() };
        // SAFETY: S3: the object cannot be destroyed before its event is acknowledged.
        let converted = unsafe { meaning(&event) };
        // SAFETY: S3: taken above, acknowledged once.
        unsafe { ibv_ack_async_event(&raw mut event) };
        Ok(Some(converted))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: S3: opened by this object; everything created from it is gone.
        sys::log_failure("ibv_close_device", unsafe { ibv_close_device(self.raw.as_ptr()) });
    }
}

/// Returns the numbers in the files of a directory of sysfs by name. A device without the directory
/// has none; a file that cannot be read, or says that it is not available, is no counter.
fn numbers(directory: &str) -> Vec<(String, u64)> {
    /// Not a counter: how long the values of the others are kept, in milliseconds.
    const LIFESPAN: &str = "lifespan";
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok().filter(|name| name != LIFESPAN)?;
        let value = fs::read_to_string(entry.path()).ok()?.trim().parse().ok()?;
        Some((name, value))
    });
    named.collect()
}

/// Converts an event.
///
/// # Safety
///
/// It comes from `ibv_get_async_event(3)` and is not acknowledged yet.
unsafe fn meaning(event: &ibv_async_event) -> AsyncEvent {
    use ibv_event_type as code;
    let element = event.element;
    // SAFETY: S3: the code determines the union's field, `ibv_get_async_event(3)`; a queue pair
    // lives until its events are acknowledged.
    let qpn = || Qpn(unsafe { (*element.qp).qp_num });
    // SAFETY: S3: as above; only the address is used.
    let cq = || unsafe { element.cq }.expose_provenance() as u64;
    // SAFETY: S3: as above; only the address is used.
    let srq = || unsafe { element.srq }.expose_provenance() as u64;
    // SAFETY: S3: as above.
    let port = || PortNum(u8::try_from(unsafe { element.port_num }).unwrap_or(0));
    match event.event_type {
        code::IBV_EVENT_CQ_ERR => AsyncEvent::CqError { cq: cq() },
        code::IBV_EVENT_QP_FATAL => AsyncEvent::QpFatal(qpn()),
        code::IBV_EVENT_QP_REQ_ERR => AsyncEvent::QpRequestError(qpn()),
        code::IBV_EVENT_QP_ACCESS_ERR => AsyncEvent::QpAccessError(qpn()),
        code::IBV_EVENT_COMM_EST => AsyncEvent::CommunicationEstablished(qpn()),
        code::IBV_EVENT_SQ_DRAINED => AsyncEvent::SendQueueDrained(qpn()),
        code::IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::LastWqeReached(qpn()),
        code::IBV_EVENT_SRQ_LIMIT_REACHED => AsyncEvent::SrqLimitReached { srq: srq() },
        code::IBV_EVENT_SRQ_ERR => AsyncEvent::SrqError { srq: srq() },
        code::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port()),
        code::IBV_EVENT_PORT_ERR => AsyncEvent::PortError(port()),
        code::IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange(port()),
        code::IBV_EVENT_LID_CHANGE => AsyncEvent::LidChange(port()),
        code::IBV_EVENT_PKEY_CHANGE => AsyncEvent::PkeyChange(port()),
        code::IBV_EVENT_SM_CHANGE => AsyncEvent::SubnetManagerChange(port()),
        code::IBV_EVENT_CLIENT_REREGISTER => AsyncEvent::ClientReregister(port()),
        code::IBV_EVENT_PATH_MIG => AsyncEvent::PathMigrated(qpn()),
        code::IBV_EVENT_PATH_MIG_ERR => AsyncEvent::PathMigrationFailed(qpn()),
        code::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        other => AsyncEvent::Other(other),
    }
}
