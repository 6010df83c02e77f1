//! What commands make: protection domains, regions, queues, queue pairs.

use std::time::Instant;

use crate::abi::{QpCap, QpDest, state};
use crate::memory::Buffer;

/// What commands name an object by.
pub(crate) type Handle = u32;
pub(crate) type ContextId = u32;

#[derive(Clone, Debug)]
pub(crate) struct Context {
    /// Index of the device.
    pub(crate) device: usize,
    /// Where its asynchronous events are read.
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
    /// The address that requests name its first byte by.
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
    /// Consumer index and arm record.
    pub(crate) records: Buffer,
    pub(crate) entries: u32,
    pub(crate) entry_size: u32,
    pub(crate) page: u32,
    pub(crate) channel: Option<i32>,
    /// Entries written.
    pub(crate) produced: u32,
    /// Entries written up to the last one that is solicited or an error.
    pub(crate) solicited: u32,
    pub(crate) armed: Option<Arm>,
    pub(crate) last_arm: Option<u32>,
    /// Records put into the channel, and events.
    pub(crate) completion_events: u32,
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
    /// Of the next receive to use.
    pub(crate) head: u16,
    /// Receives used.
    pub(crate) used: u16,
    /// Below which the event comes; 0 for never.
    pub(crate) limit: u32,
    pub(crate) async_events: u32,
}

impl Srq {
    /// Receives that are posted and not used.
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
    /// Index of the device.
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// 0: a target that has none yet.
    pub(crate) number: u32,
    pub(crate) user_handle: u64,
    /// By which completions name it.
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
    /// The first message has arrived.
    pub(crate) established: bool,
    /// In SQD: an event is asked for when the send queue is drained.
    pub(crate) tells_drained: bool,
    /// In SQD: the request at the head is still under way.
    pub(crate) draining: bool,
    /// When a record was seen to be ahead of the doorbells.
    pub(crate) unrung: Option<Instant>,
}

/// A send or receive queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) memory: Buffer,
    /// Which is the producer's.
    pub(crate) record: Buffer,
    /// Entries, or basic blocks of 64 bytes.
    pub(crate) entries: u32,
    pub(crate) shift: u32,
    /// Of the next entry to use.
    pub(crate) index: u16,
}

impl Ring {
    pub(crate) fn posted(&self) -> u16 {
        (self.record.record(0) as u16).wrapping_sub(self.index)
    }

    /// Where entry `index` is.
    pub(crate) fn offset(&self, index: u16) -> u64 {
        u64::from(u32::from(index) & (self.entries - 1)) << self.shift
    }
}

/// What `ibv_modify_qp` sets.
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

/// How the request at the head of a send queue fares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Attempt {
    pub(crate) rnr_naks: u32,
    pub(crate) timeouts: u32,
    pub(crate) not_before: Option<Instant>,
}

impl Qp {
    /// It takes requests of others.
    pub(crate) fn responds(&self) -> bool {
        matches!(self.state, state::RTR | state::RTS | state::SQD | state::SQE)
    }

    /// As after its creation.
    pub(crate) fn reset(&mut self) {
        for ring in [&mut self.sq, &mut self.rq].into_iter().flatten() {
            ring.index = 0;
        }
        self.attempt = Attempt::default();
        (self.established, self.draining) = (false, false);
        self.unrung = None;
    }
}
