//! Events: taken, copied, applied to their ids, acknowledged.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use crate::ffi::*;
use rdma_provider::locks::Mutex;

use super::id::{ECONNRESET, IdContext, IdState, Phase, addresses, route_may_block, route_of};
use super::{CmId, Events};
use crate::{Ibverbs, convert, sys};
use rdma_provider::VerbError;
use rdma_provider::cm_contract::{CmDatagram, CmEvent, CmEventKind, CmPeer};
use rdma_provider::types::{Qkey, Qpn, RejectReason};

// The binding declares these structures by hand, so they are compared with `rdma_cma.h` of
// rdma-core 44.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<rdma_cm_event>() == 80 && align_of::<rdma_cm_event>() == 8);
    assert!(
        mem::offset_of!(rdma_cm_event, listen_id) == 8
            && mem::offset_of!(rdma_cm_event, event) == 16
    );
    assert!(
        mem::offset_of!(rdma_cm_event, status) == 20 && mem::offset_of!(rdma_cm_event, param) == 24
    );
    assert!(
        size_of::<rdma_conn_param>() == 24
            && mem::offset_of!(rdma_conn_param, private_data_len) == 8
    );
    assert!(
        mem::offset_of!(rdma_conn_param, srq) == 14
            && mem::offset_of!(rdma_conn_param, qp_num) == 16
    );
    assert!(mem::offset_of!(rdma_ud_param, private_data_len) == 8);
    assert!(size_of::<rdma_ud_param>() == 56 && size_of::<rdma_event_channel>() == 4);
    assert!(size_of::<rdma_cm_id>() == 416 && mem::offset_of!(rdma_cm_id, context) == 16);
    assert!(
        mem::offset_of!(rdma_cm_id, route) == 32 && mem::offset_of!(rdma_cm_id, port_num) == 348
    );
    assert!(size_of::<rdma_addr>() == 296 && mem::offset_of!(rdma_addr, dst_addr_union) == 128);
    assert!(mem::offset_of!(rdma_addr, addr) == 256 && size_of::<rdma_ib_addr>() == 40);
    assert!(size_of::<rdma_route>() == 312 && mem::offset_of!(rdma_route, path_rec) == 296);
    assert!(
        mem::offset_of!(rdma_route, num_paths) == 304 && mem::offset_of!(rdma_ib_addr, dgid) == 16
    );
    assert!(size_of::<ibv_sa_path_rec>() == 64 && mem::offset_of!(ibv_sa_path_rec, mtu) == 58);
};

/// An event not yet acknowledged. Its ids are not destroyed until its drop acknowledges it.
pub(super) struct UnackedEvent<'a> {
    raw: NonNull<rdma_cm_event>,
    events: &'a Arc<Events>,
}

impl<'a> UnackedEvent<'a> {
    pub(super) fn next(events: &'a Arc<Events>) -> Result<Option<Self>, VerbError> {
        const VERB: &str = "rdma_get_cm_event";
        let mut raw = ptr::null_mut();
        // SAFETY: S3: the channel is open, the result local.
        let result = unsafe { rdma_get_cm_event(events.raw.as_ptr(), &raw mut raw) };
        match sys::status(VERB, result) {
            Ok(()) => Ok(Some(Self { raw: sys::handle(VERB, raw)?, events })),
            Err(error) if error.errno == sys::EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Applies the event to its id's state and converts it. Returns `None` if another event of the
    /// id follows instead, or it is being destroyed.
    pub(super) fn into_event(self) -> Option<CmEvent<Ibverbs>> {
        use CmEventKind as Kind;
        use rdma_cm_event_type as code;
        // SAFETY: S3: the event lives until it is acknowledged.
        let (id, listener, event, status) = unsafe {
            let raw = self.raw.as_ptr();
            ((*raw).id, (*raw).listen_id, (*raw).event, (*raw).status)
        };
        // Read before another call sets `errno`.
        let errno = errno(status);
        if event == code::RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: S3: the listening id is alive until its event is acknowledged.
            let listener = unsafe { IdContext::of(listener) };
            let datagrams = listener.state.lock().datagrams;
            return Some(CmEvent { key: listener.key, kind: self.request(id, datagrams) });
        }
        // SAFETY: S3: as above.
        let context = unsafe { IdContext::of(id) };
        let state = &context.state;
        let kind = match event {
            code::RDMA_CM_EVENT_ADDR_RESOLVED => {
                self.record_address(id, state, Phase::AddressKnown);
                if route_may_block() {
                    Kind::AddressResolved
                } else {
                    let timeout = state.lock().timeout;
                    // SAFETY: S3: as above; it has a device.
                    let result =
                        context.call_for_event(|| unsafe { rdma_resolve_route(id, timeout) })?;
                    match sys::status("rdma_resolve_route", result) {
                        Ok(()) => return None,
                        Err(error) => Kind::RouteError(error.errno),
                    }
                }
            }
            code::RDMA_CM_EVENT_ADDR_ERROR => Kind::AddressError(errno),
            code::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                self.record_address(id, state, Phase::RouteKnown);
                Kind::RouteResolved
            }
            code::RDMA_CM_EVENT_ROUTE_ERROR => Kind::RouteError(errno),
            code::RDMA_CM_EVENT_CONNECT_RESPONSE => {
                state.lock().phase = Phase::Answered;
                Kind::ConnectResponse(self.peer())
            }
            code::RDMA_CM_EVENT_ESTABLISHED if state.lock().datagrams => {
                state.lock().end();
                let private_data = self.private_data();
                Kind::ServiceFound { service: self.datagram(), private_data }
            }
            code::RDMA_CM_EVENT_ESTABLISHED => {
                let mut state = state.lock();
                // iWARP has no third message, so this is the peer's answer.
                let answered = state.phase == Phase::Connecting;
                state.phase = Phase::Connected;
                if answered { Kind::ConnectResponse(self.peer()) } else { Kind::Established }
            }
            code::RDMA_CM_EVENT_REJECTED => {
                state.lock().end();
                let reason = match u16::try_from(status) {
                    // Reject reasons have 16 bits.
                    Ok(reason) => RejectReason(reason),
                    // iWARP reports an `errno`: the peer has rejected or closed the connection, or
                    // has answered with another version or other options.
                    Err(_) if errno == ECONNRESET => RejectReason::CONSUMER,
                    Err(_) => RejectReason::UNSUPPORTED,
                };
                Kind::Rejected { reason, private_data: self.peer().private_data }
            }
            code::RDMA_CM_EVENT_UNREACHABLE => {
                let mut state = state.lock();
                state.end();
                match refusal(status).filter(|_| state.datagrams) {
                    Some(reason) => Kind::Rejected { reason, private_data: Vec::new() },
                    None => Kind::Unreachable(errno),
                }
            }
            code::RDMA_CM_EVENT_CONNECT_ERROR => {
                state.lock().end();
                Kind::ConnectError(errno)
            }
            code::RDMA_CM_EVENT_DISCONNECTED if state.lock().is_iwarp() => {
                state.lock().phase = Phase::Disconnected;
                // TCP waits instead, without the queue pair.
                let exit = CmEvent { key: context.key, kind: Kind::TimewaitExit };
                self.events.own.lock().push_back(exit);
                Kind::Disconnected
            }
            code::RDMA_CM_EVENT_DISCONNECTED => {
                state.lock().phase = Phase::Disconnected;
                // Answers the peer's disconnect request, which the peer retransmits until answered.
                // Fails if this event is the answer to our own.
                // SAFETY: S3: as above; it was connected, so it has a device.
                let answer = context.call_for_event(|| unsafe { rdma_disconnect(id) });
                if let Some(Err(error)) =
                    answer.map(|answer| sys::status("rdma_disconnect", answer))
                {
                    rdma_provider::debug!(
                        %error,
                        "failed to answer a disconnect request; the peer may retransmit it"
                    );
                }
                Kind::Disconnected
            }
            code::RDMA_CM_EVENT_MULTICAST_JOIN => {
                // SAFETY: S3: as above.
                let route = unsafe { route_of(id) };
                state.lock().route = route;
                Kind::Joined(self.datagram())
            }
            code::RDMA_CM_EVENT_MULTICAST_ERROR => Kind::JoinError(errno),
            code::RDMA_CM_EVENT_TIMEWAIT_EXIT => Kind::TimewaitExit,
            code::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                state.lock().end();
                Kind::DeviceRemoval
            }
            code::RDMA_CM_EVENT_ADDR_CHANGE => Kind::AddressChange,
            other => Kind::Other(other),
        };
        Some(CmEvent { key: context.key, kind })
    }

    /// Takes ownership of a request's id.
    fn request(&self, id: *mut rdma_cm_id, datagrams: bool) -> CmEventKind<Ibverbs> {
        // SAFETY: S3: created with this event, and destroyed only by this provider.
        let (state, id) = unsafe {
            let (local, peer) = addresses(id);
            let route = route_of(id);
            let phase = Phase::Asked;
            let state = IdState { phase, local, peer, route, datagrams, ..IdState::default() };
            (state, NonNull::new_unchecked(id))
        };
        let context = self.events.new_context(state);
        // SAFETY: S3: not shared yet; its context, so far the listener's, is read only here.
        unsafe { (*id.as_ptr()).context = context.as_ptr() };
        let id = CmId::new(id, context, Arc::clone(self.events));
        let peer = if datagrams {
            let private_data = self.private_data();
            CmPeer { private_data, responder_resources: 0, initiator_depth: 0, srq: false }
        } else {
            self.peer()
        };
        CmEventKind::ConnectRequest { id, peer }
    }

    /// Records the addresses and the route, as librdmacm has written them.
    fn record_address(&self, id: *mut rdma_cm_id, state: &Mutex<IdState>, phase: Phase) {
        // SAFETY: S3: alive until the event is acknowledged.
        let ((local, _), route) = unsafe { (addresses(id), route_of(id)) };
        let mut state = state.lock();
        (state.local, state.route, state.phase) = (local, route, phase);
    }

    /// Copies the parameters of a destination of datagrams.
    fn datagram(&self) -> CmDatagram {
        // SAFETY: S4: events of datagrams have these parameters, numbers of any value.
        let params = unsafe { &(*self.raw.as_ptr()).param.ud };
        CmDatagram {
            address: convert::address_from(&params.ah_attr),
            qpn: Qpn(params.qp_num & Qpn::MAX.0),
            qkey: Qkey(params.qkey),
        }
    }

    /// Copies the private data of a connection or of a query for datagrams.
    fn private_data(&self) -> Vec<u8> {
        // SAFETY: S4: both kinds of parameters begin with these fields, of any value.
        let (data, len) = unsafe {
            let params = &(*self.raw.as_ptr()).param.conn;
            (params.private_data, params.private_data_len)
        };
        if data.is_null() {
            return Vec::new();
        }
        // SAFETY: S4: the event has this many bytes, of any value.
        unsafe { slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
    }

    /// Copies the peer's parameters, which are freed with the event.
    fn peer(&self) -> CmPeer {
        // SAFETY: S4: connection events have these parameters, numbers of any value.
        let params = unsafe { &(*self.raw.as_ptr()).param.conn };
        CmPeer {
            private_data: self.private_data(),
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            srq: params.srq != 0,
        }
    }
}

impl Drop for UnackedEvent<'_> {
    fn drop(&mut self) {
        // SAFETY: S3: taken by this object, acknowledged once.
        sys::log_failure("rdma_ack_cm_event", unsafe { rdma_ack_cm_event(self.raw.as_ptr()) });
    }
}

/// Returns the reason of a status of SIDR (IBTA 12.11.2), which is positive.
fn refusal(status: c_int) -> Option<RejectReason> {
    let status = u8::try_from(status).ok().filter(|&status| status > 0)?;
    Some(RejectReason::of_sidr(status))
}

/// Returns the `errno` of a status: a negated `errno`, or -1 with `errno` set by librdmacm.
fn errno(status: c_int) -> i32 {
    sys::status("rdma_get_cm_event", status).err().map_or(VerbError::EIO, |error| error.errno)
}
