//! Events: read, copied, filed with their ids, acknowledged.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_sys::*;

use super::id::{Known, Phase, ends, path};
use super::{CmId, Events};
use crate::ibv_context::EAGAIN;
use crate::{Ibverbs, sys};
use rdma_provider::VerbError;
use rdma_provider::cm_contract::{CmEvent, CmEventKind, CmPeer};
use rdma_provider::types::RejectReason;

// The binding's structures are made by hand: as `rdma_cma.h` of rdma-core 44 has them where pointers have 64 bits.
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

/// An event that was read and not yet acknowledged: until its drop, its ids are not destroyed.
pub(super) struct Taken<'a> {
    raw: NonNull<rdma_cm_event>,
    events: &'a Arc<Events>,
}

impl<'a> Taken<'a> {
    pub(super) fn next(events: &'a Arc<Events>) -> Result<Option<Self>, VerbError> {
        const VERB: &str = "rdma_get_cm_event";
        let mut raw = ptr::null_mut();
        // SAFETY: S3: the channel is open, the result ours.
        let result = unsafe { rdma_get_cm_event(events.raw.as_ptr(), &raw mut raw) };
        match sys::status(VERB, result) {
            Ok(()) => Ok(Some(Self { raw: sys::handle(VERB, raw)?, events })),
            Err(error) if error.errno == EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Files it with its id and says what it means.
    pub(super) fn file(self) -> CmEvent<Ibverbs> {
        use CmEventKind as Kind;
        use rdma_cm_event_type as code;
        // SAFETY: S3: the event lives until it is acknowledged.
        let (id, listener, event, status) = unsafe {
            let raw = self.raw.as_ptr();
            ((*raw).id, (*raw).listen_id, (*raw).event, (*raw).status)
        };
        // Before anything else sets `errno`.
        let errno = errno(status);
        if event == code::RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: S3: an id with an event that is not acknowledged is alive, here that which listens.
            let key = unsafe { key_of(listener) };
            return CmEvent { key: key as u64, kind: self.request(id) };
        }
        // SAFETY: S3: as above.
        let key = unsafe { key_of(id) };
        // Unknown if its id is being destroyed: nobody looks at what is filed then.
        let known = self.events.find(key).unwrap_or_default();
        let kind = match event {
            code::RDMA_CM_EVENT_ADDR_RESOLVED => {
                self.learn(id, &known, Phase::AddressKnown);
                Kind::AddressResolved
            }
            code::RDMA_CM_EVENT_ADDR_ERROR => Kind::AddressError(errno),
            code::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                self.learn(id, &known, Phase::RouteKnown);
                Kind::RouteResolved
            }
            code::RDMA_CM_EVENT_ROUTE_ERROR => Kind::RouteError(errno),
            code::RDMA_CM_EVENT_CONNECT_RESPONSE => {
                known.lock().phase = Phase::Answered;
                Kind::ConnectResponse(self.peer())
            }
            code::RDMA_CM_EVENT_ESTABLISHED => {
                known.lock().phase = Phase::Connected;
                Kind::Established
            }
            code::RDMA_CM_EVENT_REJECTED => {
                known.lock().end();
                // Reasons have 16 bits, and here no sign.
                let reason = RejectReason(u16::try_from(status).unwrap_or(u16::MAX));
                Kind::Rejected { reason, private_data: self.peer().private_data }
            }
            code::RDMA_CM_EVENT_UNREACHABLE => {
                known.lock().end();
                Kind::Unreachable(errno)
            }
            code::RDMA_CM_EVENT_CONNECT_ERROR => {
                known.lock().end();
                Kind::ConnectError(errno)
            }
            code::RDMA_CM_EVENT_DISCONNECTED => {
                known.lock().phase = Phase::Disconnected;
                // The answer to a goodbye, which the peer repeats until it has one; of ours, there is none to give.
                // SAFETY: S3: as above; it was connected, so it has a device.
                let answer = sys::status("rdma_disconnect", unsafe { rdma_disconnect(id) });
                if let Err(error) = answer {
                    tracing::debug!(%error, "goodbye that was not answered");
                }
                Kind::Disconnected
            }
            code::RDMA_CM_EVENT_TIMEWAIT_EXIT => Kind::TimewaitExit,
            code::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                known.lock().end();
                Kind::DeviceRemoval
            }
            code::RDMA_CM_EVENT_ADDR_CHANGE => Kind::AddressChange,
            other => Kind::Other(other),
        };
        CmEvent { key: key as u64, kind }
    }

    /// Makes the id of a request ours.
    fn request(&self, id: *mut rdma_cm_id) -> CmEventKind<Ibverbs> {
        // SAFETY: S3: made with this event, and destroyed by us alone.
        let (known, id) = unsafe {
            let (local, peer) = ends(id);
            let known = Known { phase: Phase::Asked, local, peer, route: path(id) };
            (known, NonNull::new_unchecked(id))
        };
        let (key, known) = self.events.enter(known);
        // SAFETY: S3: nobody else has the id yet, and its context, the listener's until now, is read here only.
        unsafe { (*id.as_ptr()).context = ptr::without_provenance_mut(key) };
        CmEventKind::ConnectRequest {
            id: CmId::new(id, key, known, Arc::clone(self.events)),
            peer: self.peer(),
        }
    }

    /// Notes what librdmacm has found out; it writes that down while an event is taken, or by calls before.
    fn learn(&self, id: *mut rdma_cm_id, known: &Mutex<Known>, phase: Phase) {
        // SAFETY: S3: alive until the event is acknowledged.
        let ((local, _), route) = unsafe { (ends(id), path(id)) };
        let mut known = known.lock();
        (known.local, known.route, known.phase) = (local, route, phase);
    }

    /// What the peer said, copied: it is gone with the event.
    fn peer(&self) -> CmPeer {
        // SAFETY: S4: an event of a connection has these parameters: numbers of any value.
        let said = unsafe { &(*self.raw.as_ptr()).param.conn };
        let private_data = if said.private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: S4: so many bytes came with the event, of any value.
            unsafe {
                slice::from_raw_parts(said.private_data.cast::<u8>(), said.private_data_len.into())
            }
            .to_vec()
        };
        CmPeer {
            private_data,
            responder_resources: said.responder_resources,
            initiator_depth: said.initiator_depth,
            srq: said.srq != 0,
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // SAFETY: S3: read by us, acknowledged once.
        sys::freed("rdma_ack_cm_event", unsafe { rdma_ack_cm_event(self.raw.as_ptr()) });
    }
}

/// The number that an id was made with.
///
/// # Safety
///
/// The id has an event that is not acknowledged.
unsafe fn key_of(id: *mut rdma_cm_id) -> usize {
    // SAFETY: S3: alive, as the caller says.
    unsafe { (*id).context }.addr()
}

/// Of a status: an `errno` without its sign. librdmacm's own failures are -1 with `errno` set.
fn errno(status: c_int) -> i32 {
    sys::status("rdma_get_cm_event", status).err().map_or(VerbError::EIO, |error| error.errno)
}
