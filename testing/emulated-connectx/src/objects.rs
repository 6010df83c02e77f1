//! Objects that commands create: protection domains, regions, queues, queue pairs.

use std::time::Instant;

use crate::abi::{QpCap, QpDest, state};
use crate::memory::Buffer;

/// The number by which commands name an object.
pub(crate) type Handle = u32;
pub(crate) type ContextId = u32;

#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// Descriptor of its asynchronous events.
    pub(crate) events: Option<i32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Pd {
    pub(crate) context: ContextId,
}

#[derive(Clone, Debug)]
pub(crate) struct Mr {
    pub(crate) context: ContextId,
    pub(crate) pd: Handle,
    pub(crate) key: u32,
    /// The address of the first byte in requests.
    pub(crate) iova: u64,
    pub(crate) access: u32,
    pub(crate) memory: Buffer,
}

impl Mr {
    /// The memory behind `len` bytes from `address`.
    pub(crate) fn part(&self, address: u64, len: u64) -> Option<Buffer> {
        self.memory.part(address.checked_sub(self.iova)?, len)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Cq {
    pub(crate) context: ContextId,
    pub(crate) number: u32,
    pub(crate) user_handle: u64,
    pub(crate) ring: Buffer,
    /// Doorbell records: consumer index and arm.
    pub(crate) records: Buffer,
    pub(crate) entries: u32,
    pub(crate) entry_size: u32,
    pub(crate) page: u32,
    pub(crate) channel: Option<i32>,
    pub(crate) produced: u32,
    /// CQEs written up to the last solicited or error CQE.
    pub(crate) solicited: u32,
    pub(crate) armed: Option<Arm>,
    pub(crate) last_arm: Option<u32>,
    /// Events sent to the channel.
    pub(crate) completion_events: u32,
    /// Asynchronous events sent.
    pub(crate) async_events: u32,
    pub(crate) overrun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arm {
    Any,
    Solicited,
}

#[derive(Clone, Debug)]
pub(crate) struct Srq {
    pub(crate) context: ContextId,
    pub(crate) pd: Handle,
    pub(crate) user_handle: u64,
    pub(crate) ring: Buffer,
    pub(crate) records: Buffer,
    pub(crate) shift: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) head: u16,
    /// Receives used.
    pub(crate) used: u16,
    /// Number of posted receives below which the limit event is sent; 0: never.
    pub(crate) limit: u32,
    pub(crate) async_events: u32,
}

impl Srq {
    pub(crate) fn posted(&self) -> u16 {
        (self.records.record(0) as u16).wrapping_sub(self.used)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Rc,
    Uc,
    Ud,
    Dci,
    Dct,
}

#[derive(Clone, Debug)]
pub(crate) struct Qp {
    pub(crate) context: ContextId,
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// 0 for a DC target without a number yet.
    pub(crate) number: u32,
    pub(crate) user_handle: u64,
    /// User index, by which CQEs name it.
    pub(crate) uidx: u32,
    pub(crate) pd: Handle,
    pub(crate) send_cq: Handle,
    pub(crate) recv_cq: Handle,
    pub(crate) srq: Option<Handle>,
    pub(crate) page: u32,
    pub(crate) sq: Option<Ring>,
    pub(crate) rq: Option<Ring>,
    pub(crate) dc_key: u64,
    pub(crate) cap: QpCap,
    pub(crate) state: u8,
    pub(crate) attr: Attr,
    pub(crate) attempt: Attempt,
    pub(crate) async_events: u32,
    /// Whether the first message has arrived.
    pub(crate) established: bool,
    /// In SQD: whether to send an event when the send queue is drained.
    pub(crate) notify_drained: bool,
    /// In SQD: whether the request at the head is still in flight.
    pub(crate) draining: bool,
    /// When the doorbell record was first found ahead of the doorbells.
    pub(crate) doorbell_missing_since: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) memory: Buffer,
    /// Doorbell record with the producer index.
    pub(crate) record: Buffer,
    /// WQEs, or basic blocks of 64 bytes.
    pub(crate) entries: u32,
    pub(crate) shift: u32,
    /// Index of the next WQE.
    pub(crate) index: u16,
}

impl Ring {
    pub(crate) fn posted(&self) -> u16 {
        (self.record.record(0) as u16).wrapping_sub(self.index)
    }

    pub(crate) fn offset(&self, index: u16) -> u64 {
        u64::from(u32::from(index) & (self.entries - 1)) << self.shift
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Attr {
    pub(crate) dest: QpDest,
    pub(crate) dest_qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) access: u32,
    pub(crate) pkey_index: u16,
    pub(crate) path_mtu: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
}

/// Retry state of the request at the head of a send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Attempt {
    pub(crate) rnr_naks: u32,
    pub(crate) timeouts: u32,
    pub(crate) not_before: Option<Instant>,
}

impl Qp {
    pub(crate) fn responds(&self) -> bool {
        matches!(self.state, state::RTR | state::RTS | state::SQD | state::SQE)
    }

    pub(crate) fn reset(&mut self) {
        for ring in [&mut self.sq, &mut self.rq].into_iter().flatten() {
            ring.index = 0;
        }
        self.attempt = Attempt::default();
        (self.established, self.draining) = (false, false);
        self.doorbell_missing_since = None;
    }
}
