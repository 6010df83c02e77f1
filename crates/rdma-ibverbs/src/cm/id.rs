//! Ids: one call of librdmacm per function.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::ffi::*;
use rdma_provider::locks::Mutex;

use super::Events;
use super::address::Address;
use super::multicast;
use crate::{convert, sys};
use rdma_provider::VerbError;
use rdma_provider::cm_contract::{
    self, CmEvent, CmEventKind, CmParams, CmRoute, MAX_FOUND_DATA, MAX_QUERY_DATA, MAX_REJECT_DATA,
    MAX_REQUEST_DATA, MAX_RESPONSE_DATA,
};
use rdma_provider::types::{Gid, Mtu, PortNum, QpAttr, QpState, RejectReason};

/// An id, `rdma_cm_id`, without a queue pair.
#[derive(Debug)]
pub struct CmId {
    raw: NonNull<rdma_cm_id>,
    /// The id's context, so released after the id is destroyed.
    context: Arc<IdContext>,
    events: Arc<Events>,
}

// SAFETY: S3: librdmacm is thread-safe for different ids; a lock serialises the calls on one.
unsafe impl Send for CmId {}
// SAFETY: S3: as above.
unsafe impl Sync for CmId {}

/// The state that calls and events of an id share. librdmacm holds its address as the id's context.
#[derive(Debug)]
pub(super) struct IdContext {
    pub(super) key: u64,
    /// Held during calls, because librdmacm modifies the id without a lock. True once the id is
    /// being destroyed: the kernel may then give its number to another id.
    pub(super) calls: Mutex<bool>,
    /// Locked briefly, by calls and when events are taken.
    pub(super) state: Mutex<IdState>,
}

impl IdContext {
    /// Returns the context for librdmacm.
    pub(super) fn as_ptr(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// Returns the context of an id.
    ///
    /// # Safety
    ///
    /// The id must have an unacknowledged event, and the result must not be used after its
    /// acknowledgement. Until then `rdma_destroy_id(3)` does not return, so [`CmId`] keeps the
    /// context.
    pub(super) unsafe fn of<'a>(id: *mut rdma_cm_id) -> &'a Self {
        // SAFETY: S3: its event keeps it alive, and its context.
        unsafe { &*(*id).context.cast::<Self>() }
    }

    /// Calls `call` while taking an event, unless the id is being destroyed.
    pub(super) fn call_for_event(&self, call: impl FnOnce() -> c_int) -> Option<c_int> {
        let destroyed = self.calls.lock();
        (!*destroyed).then(call)
    }
}

/// State of an id, from its calls and its events.
#[derive(Debug, Default)]
pub(super) struct IdState {
    pub(super) phase: Phase,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) route: Option<Route>,
    /// Timeout of the route's resolution in milliseconds; 0 before the address is to be resolved.
    pub(super) timeout: c_int,
    /// The id is of port space UDP.
    pub(super) datagrams: bool,
    /// The multicast group that the id joins or has joined.
    pub(super) group: Option<IpAddr>,
}

/// A route. Names its device by context, so that recording it copies no string.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    /// Open as long as the id.
    context: NonNull<ibv_context>,
    port: PortNum,
    source: Gid,
    destination: Gid,
    mtu: Option<Mtu>,
    iwarp: bool,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Route {}

/// Progress of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    /// Listens, or has no device yet.
    #[default]
    Idle,
    /// Active: has a device.
    AddressKnown,
    /// Active: may connect.
    RouteKnown,
    /// Active: waits for the answer.
    Connecting,
    /// Active: has an answer to confirm.
    Answered,
    /// Passive: has a request to answer.
    Asked,
    /// Passive: waits for the confirmation.
    Accepted,
    Connected,
    /// Was connected.
    Disconnected,
    /// Was never connected, and cannot be, as after the answer to a query for datagrams.
    Ended,
}

impl IdState {
    /// Returns true if the event of an address or a route may follow. Only then must the drop of an
    /// id exclude the taking of events.
    ///
    /// librdmacm (44 and 64 were read) asks the kernel by the number of an id when it takes the
    /// event of a resolution: `ucma_process_addr_resolved` and `ucma_process_route_resolved` in its
    /// `cma.c`. The others carry the address of their id, which `rdma_destroy_id` frees only after
    /// their acknowledgement:
    ///
    /// - For a connection request, it asks by the number of the new id, which nothing else knows
    ///   before the event has been read, and not by the listener's.
    /// - An unanswered request has no events: the kernel drops them until `rdma_accept`.
    /// - For events of a connection, it asks only if the id has a queue pair of librdmacm, which
    ///   this crate never creates.
    fn is_resolving(&self) -> bool {
        self.timeout > 0 && matches!(self.phase, Phase::Idle | Phase::AddressKnown)
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.route.is_some_and(|route| route.iwarp)
    }

    pub(super) fn end(&mut self) {
        self.phase = match self.phase {
            Phase::Connected | Phase::Disconnected => Phase::Disconnected,
            _ => Phase::Ended,
        };
    }
}

impl CmId {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must not destroy it, take its events or change its context.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<rdma_cm_id> {
        self.raw
    }

    pub(super) fn new(
        raw: NonNull<rdma_cm_id>,
        context: Arc<IdContext>,
        events: Arc<Events>,
    ) -> Self {
        Self { raw, context, events }
    }

    fn call(
        &self,
        verb: &'static str,
        f: impl FnOnce(*mut rdma_cm_id) -> c_int,
    ) -> Result<(), VerbError> {
        let _one_at_a_time = self.context.calls.lock();
        sys::status(verb, f(self.raw.as_ptr()))
    }

    /// Calls librdmacm if the id is in phase `from`. On success the phase is `to`, or a later one
    /// set by events meanwhile.
    fn transition(
        &self,
        verb: &'static str,
        (from, to): (Phase, Phase),
        f: impl FnOnce(*mut rdma_cm_id) -> c_int,
    ) -> Result<(), VerbError> {
        let _one_at_a_time = self.context.calls.lock();
        {
            let mut state = self.context.state.lock();
            if state.phase != from {
                return Err(VerbError::new(verb, VerbError::EINVAL));
            }
            state.phase = to;
        }
        let result = sys::status(verb, f(self.raw.as_ptr()));
        if result.is_err() {
            let mut state = self.context.state.lock();
            if state.phase == to {
                state.phase = from;
            }
            drop(state);
            self.report_if_withdrawn(result);
        }
        result
    }

    /// Raises the event of a request that the peer has withdrawn, or that the kernel has rejected
    /// because a call failed.
    fn report_if_withdrawn(&self, result: Result<(), VerbError>) {
        if self.context.state.lock().phase != Phase::Asked {
            return;
        }
        // iWARP's manager tells only the call that answers.
        let reset = result.is_err_and(|error| error.errno == ECONNRESET);
        // SAFETY: S3: the id is alive; the caller holds the lock for calls.
        if reset || unsafe { init_qp_attr(self.raw.as_ptr(), QpState::Rtr) }.is_err() {
            self.context.state.lock().phase = Phase::Ended;
            // The reason that connection managers send when they withdraw a request.
            let kind =
                CmEventKind::Rejected { reason: RejectReason::TIMEOUT, private_data: Vec::new() };
            self.events.own.lock().push_back(CmEvent { key: self.context.key, kind });
        }
    }

    fn bound(&self) {
        // SAFETY: S3: alive; just written, under the lock for calls.
        let (local, _) = unsafe { addresses(self.raw.as_ptr()) };
        self.context.state.lock().local = local;
    }
}

/// ECONNRESET of `errno(3)`.
pub(super) const ECONNRESET: i32 = 104;

/// Whether librdmacm asks ibacm(8) for the routes of InfiniBand and RoCE, and waits for its answer.
/// The first resolution in a process decides for all, because only it tries to connect to ibacm.
static ASKS_IBACM: OnceLock<bool> = OnceLock::new();

/// The files by which librdmacm finds ibacm.
const IBACM: [&str; 4] =
    ["/run/ibacm.sock", "/run/ibacm.port", "/var/run/ibacm.sock", "/var/run/ibacm.port"];

impl cm_contract::CmId for CmId {
    fn key(&self) -> u64 {
        self.context.key
    }

    fn bind(&self, address: SocketAddr) -> Result<(), VerbError> {
        let _one_at_a_time = self.context.calls.lock();
        let mut raw = Address::from(address);
        // SAFETY: S3: the id is alive, the address local and of its family's length.
        let result = unsafe { rdma_bind_addr(self.raw.as_ptr(), (&raw mut raw).cast()) };
        sys::status("rdma_bind_addr", result).map_err(address_not_available)?;
        self.bound();
        Ok(())
    }

    fn listen(&self, backlog: u32) -> Result<(), VerbError> {
        let _one_at_a_time = self.context.calls.lock();
        // The kernel reduces large values, and takes 0 for its maximum.
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX).max(1);
        // SAFETY: S3: the id is alive.
        sys::status("rdma_listen", unsafe { rdma_listen(self.raw.as_ptr(), backlog) })?;
        self.bound();
        Ok(())
    }

    fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbError> {
        let mut source = source.map(Address::from);
        let mut raw = Address::from(destination);
        let with_source = source.is_some();
        self.context.state.lock().timeout = milliseconds(timeout);
        let called = self.call("rdma_resolve_addr", |id| {
            let source =
                source.as_mut().map_or(ptr::null_mut(), |source| ptr::from_mut(source).cast());
            // SAFETY: S3: the id is alive, the addresses local and of their families' lengths.
            unsafe { rdma_resolve_addr(id, source, (&raw mut raw).cast(), milliseconds(timeout)) }
        });
        called.map_err(|error| if with_source { address_not_available(error) } else { error })?;
        self.context.state.lock().peer = Some(destination);
        Ok(())
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), VerbError> {
        if self.context.state.lock().phase != Phase::AddressKnown {
            return Err(VerbError::new("rdma_resolve_route", VerbError::EINVAL));
        }
        // SAFETY: S3: the id is alive and has a device.
        let result = self.call("rdma_resolve_route", |id| unsafe {
            rdma_resolve_route(id, milliseconds(timeout))
        });
        if ASKS_IBACM.get().is_none() {
            // SAFETY: S3: the id has a device, whose context stays open as long as the id.
            let transport = unsafe { (*(*(*self.raw.as_ptr()).verbs).device).transport_type };
            // librdmacm leaves iWARP's routes to the kernel.
            if transport == ibv_transport_type::IBV_TRANSPORT_IB {
                ASKS_IBACM.get_or_init(|| IBACM.iter().any(|file| Path::new(file).exists()));
            }
        }
        result
    }

    fn route_may_block(&self) -> bool {
        route_may_block()
    }

    fn connect_may_block(&self) -> bool {
        self.context.state.lock().is_iwarp()
    }

    fn connect(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        let datagrams = self.context.state.lock().datagrams;
        let most = if datagrams { MAX_QUERY_DATA } else { MAX_REQUEST_DATA };
        let mut raw = conn_param("rdma_connect", params, most)?;
        self.transition("rdma_connect", (Phase::RouteKnown, Phase::Connecting), |id| {
            // SAFETY: S3: the id is alive and has a device; the parameters are local, their data is
            // copied.
            unsafe { rdma_connect(id, &raw mut raw) }
        })
    }

    fn accept(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        let datagrams = self.context.state.lock().datagrams;
        let (most, then) = if datagrams {
            (MAX_FOUND_DATA, Phase::Ended)
        } else {
            (MAX_RESPONSE_DATA, Phase::Accepted)
        };
        let mut raw = conn_param("rdma_accept", params, most)?;
        self.transition("rdma_accept", (Phase::Asked, then), |id| {
            // SAFETY: S3: as above.
            unsafe { rdma_accept(id, &raw mut raw) }
        })
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), VerbError> {
        const VERB: &str = "rdma_reject";
        let len = data_len(VERB, private_data, MAX_REJECT_DATA)?;
        self.transition(VERB, (Phase::Asked, Phase::Ended), |id| {
            // SAFETY: S3: the id is alive; the data is copied.
            unsafe { rdma_reject(id, private_data.as_ptr().cast(), len) }
        })
    }

    fn establish(&self) -> Result<(), VerbError> {
        if self.context.state.lock().is_iwarp() {
            return Ok(());
        }
        self.transition("rdma_establish", (Phase::Answered, Phase::Connected), |id| {
            // SAFETY: S3: the id is alive and has no queue pair.
            unsafe { rdma_establish(id) }
        })
    }

    fn disconnect(&self) -> Result<(), VerbError> {
        match self.context.state.lock().phase {
            Phase::Connected => {}
            Phase::Disconnected => return Ok(()),
            _ => return Err(VerbError::new("rdma_disconnect", VerbError::EINVAL)),
        }
        // SAFETY: S3: the id is alive and has a device.
        self.call("rdma_disconnect", |id| unsafe { rdma_disconnect(id) })
    }

    fn join_multicast(&self, group: IpAddr) -> Result<(), VerbError> {
        {
            let mut state = self.context.state.lock();
            // The kernel joins any address.
            if state.group.is_some() || state.local.is_none() || !group.is_multicast() {
                return Err(VerbError::new("rdma_join_multicast", VerbError::EINVAL));
            }
            state.group = Some(group);
        }
        let _one_at_a_time = self.context.calls.lock();
        // SAFETY: S3: the id is alive.
        let result = unsafe { multicast::join(self.raw.as_ptr(), group) };
        if result.is_err() {
            self.context.state.lock().group = None;
        }
        result
    }

    fn qp_attr(&self, state: QpState) -> Result<QpAttr, VerbError> {
        let _one_at_a_time = self.context.calls.lock();
        // SAFETY: S3: the id is alive; the lock is held.
        let attr = unsafe { init_qp_attr(self.raw.as_ptr(), state) };
        if attr.is_err() {
            self.report_if_withdrawn(Ok(()));
        }
        attr
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.context.state.lock().local
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.context.state.lock().peer
    }

    fn route(&self) -> Option<CmRoute<'_>> {
        let Route { context, port, source, destination, mtu, .. } =
            self.context.state.lock().route?;
        // SAFETY: S3: the context stays open as long as the id; its device has a NUL-terminated
        // name.
        let device = unsafe { CStr::from_ptr(ibv_get_device_name(context.as_ref().device)) };
        let device = device.to_string_lossy();
        Some(CmRoute { device, port, source, destination, mtu })
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        *self.context.calls.lock() = true;
        let group = self.context.state.lock().group;
        if let Some(group) = group {
            // Only this frees librdmacm's record of the group.
            // SAFETY: S3: the id is alive. Waits while an event of the group is being processed.
            if let Err(error) = unsafe { multicast::leave(self.raw.as_ptr(), group) } {
                rdma_provider::debug!(%group, %error, "failed to leave a multicast group");
            }
        }
        let resolving = self.context.state.lock().is_resolving();
        let _no_event_is_taken = resolving.then(|| self.events.taking.lock());
        // SAFETY: S3: without another owner, not used again. Waits while an event of the id is
        // being processed, which takes only locks that no call holds any more.
        let result = unsafe { rdma_destroy_id(self.raw.as_ptr()) };
        sys::log_failure("rdma_destroy_id", result);
        if result != 0 {
            // Events may still arrive.
            mem::forget(Arc::clone(&self.context));
        }
    }
}

pub(super) fn route_may_block() -> bool {
    ASKS_IBACM.get() != Some(&false)
}

/// Calls `rdma_init_qp_attr(3)`.
///
/// # Safety
///
/// The id must be alive, without a concurrent call on it.
unsafe fn init_qp_attr(id: *mut rdma_cm_id, state: QpState) -> Result<QpAttr, VerbError> {
    // SAFETY: S3: zeros are valid.
    let (mut raw, mut mask) = (unsafe { mem::zeroed::<ibv_qp_attr>() }, 0);
    raw.qp_state = state as u32;
    // SAFETY: S3: the id is alive, both results are local.
    let result = unsafe { rdma_init_qp_attr(id, &raw mut raw, &raw mut mask) };
    sys::status("rdma_init_qp_attr", result)?;
    Ok(convert::qp_attr_given(&raw, mask.cast_unsigned()))
}

/// Returns the local and the peer's address, if librdmacm knows them.
///
/// # Safety
///
/// The id must be alive, and librdmacm must not modify it concurrently.
pub(super) unsafe fn addresses(id: *mut rdma_cm_id) -> (Option<SocketAddr>, Option<SocketAddr>) {
    // SAFETY: S4: both unions are as large as an address of either family; any bytes are valid.
    let (source, destination) = unsafe {
        let address = &raw const (*id).route.addr;
        (
            (&raw const (*address).src_addr_union).cast::<Address>().read(),
            (&raw const (*address).dst_addr_union).cast::<Address>().read(),
        )
    };
    (source.to_ip(), destination.to_ip())
}

/// Returns the route, or `None` without a device.
///
/// # Safety
///
/// See [`addresses`].
pub(super) unsafe fn route_of(id: *mut rdma_cm_id) -> Option<Route> {
    // SAFETY: S3: the id is alive; `path_rec` has `num_paths` entries. S4: any 16 bytes are a GID.
    unsafe {
        let context = NonNull::new((*id).verbs)?;
        let route = &raw const (*id).route;
        let gids = &raw const (*route).addr.addr.ibaddr;
        let paths = (*route).path_rec;
        let known = (*route).num_paths > 0 && !paths.is_null();
        Some(Route {
            context,
            port: PortNum((*id).port_num),
            source: convert::gid_from(&(*gids).sgid),
            destination: convert::gid_from(&(*gids).dgid),
            // The code is in the lower 6 bits; 0 means none.
            mtu: known
                .then(|| (*paths).mtu & 0x3f)
                .filter(|&code| code != 0)
                .map(|code| convert::mtu_from(code.into())),
            iwarp: (*context.as_ref().device).transport_type
                == ibv_transport_type::IBV_TRANSPORT_IWARP,
        })
    }
}

/// Converts ENODEV, which the kernel returns for an address that no RDMA device has.
fn address_not_available(error: VerbError) -> VerbError {
    if error.errno == VerbError::ENODEV {
        VerbError::new(error.verb, VerbError::EADDRNOTAVAIL)
    } else {
        error
    }
}

fn conn_param(
    verb: &'static str,
    params: &CmParams<'_>,
    most: usize,
) -> Result<rdma_conn_param, VerbError> {
    Ok(rdma_conn_param {
        private_data: params.private_data.as_ptr().cast(),
        private_data_len: data_len(verb, params.private_data, most)?,
        responder_resources: params.responder_resources,
        initiator_depth: params.initiator_depth,
        // Ignored: it depends on the hardware.
        flow_control: 1,
        retry_count: params.retry_count,
        rnr_retry_count: params.rnr_retry,
        srq: u8::from(params.srq),
        qp_num: params.qpn.0,
    })
}

fn data_len(verb: &'static str, data: &[u8], most: usize) -> Result<u8, VerbError> {
    let len = u8::try_from(data.len()).ok().filter(|_| data.len() <= most);
    len.ok_or(VerbError::new(verb, VerbError::EINVAL))
}

fn milliseconds(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX).max(1)
}
