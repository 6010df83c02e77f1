//! Objects that commands create: protection domains, regions, queues, queue pairs.

use std::collections::VecDeque;
use std::time::Instant;

use crate::abi::{QpCap, QpDest, state};
use crate::cqe::Cqe;
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
    /// Maximum number of CQEs in a compressed session; 0: the program did not ask for compression.
    pub(crate) max_session: u32,
    /// CQEs to write in one session.
    pub(crate) run: Vec<Cqe>,
    /// The consumer index up to which owner bits were checked.
    pub(crate) checked: u32,
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
    pub(crate) history: History,
    /// The longest data that a CQE carries: of requests that return data, and of receives.
    pub(crate) scatter: [usize; 2],
}

/// Send WQEs by their index, to check doorbells.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// WQEs executed last: their doorbells may be seen later.
    executed: VecDeque<u16>,
    /// The first blocks of the latest of them.
    blocks: VecDeque<[u8; 64]>,
    /// Copies of posted WQEs, made at their doorbells.
    copies: VecDeque<(u16, Vec<u8>)>,
}

impl History {
    /// More than the device executes between two looks at the registers.
    const LEN: usize = 256;
    const BLOCKS: usize = 32;

    pub(crate) fn execute(&mut self, index: u16, block: [u8; 64]) {
        if self.blocks.len() == Self::BLOCKS {
            self.blocks.pop_front();
        }
        self.blocks.push_back(block);
        if self.executed.len() == Self::LEN {
            self.executed.pop_front();
        }
        self.executed.push_back(index);
        if self.copies.front().is_some_and(|&(of, _)| of == index) {
            self.copies.pop_front();
        }
    }

    /// Returns whether a WQE executed lately had `bytes` at `offset` of its first block.
    pub(crate) fn had(&self, offset: usize, bytes: [u8; 8]) -> bool {
        self.blocks.iter().any(|block| block[offset..offset + 8] == bytes)
    }

    pub(crate) fn has_executed(&self, index: u16) -> bool {
        self.executed.contains(&index)
    }

    pub(crate) fn has_copy(&self, index: u16) -> bool {
        self.copies.iter().any(|&(of, _)| of == index)
    }

    pub(crate) fn copy(&mut self, index: u16, entry: Vec<u8>) {
        self.copies.push_back((index, entry));
    }

    /// Returns the copy of the WQE at the head of the queue.
    pub(crate) fn copy_of(&self, index: u16) -> Option<&[u8]> {
        self.copies.front().filter(|&&(of, _)| of == index).map(|(_, entry)| entry.as_slice())
    }
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
        self.history = History::default();
    }
}
