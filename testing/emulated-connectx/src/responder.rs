//! The responder: receives, memory access, datagrams.

use crate::abi::{access, event};
use crate::control::{Link, Status};
use crate::cqe::{Arrived, Cqe, Opcode};
use crate::memory::Buffer;
use crate::objects::{Handle, Kind, Qp};
use crate::port::Port;
use crate::state::State;
use crate::wqe::{self, GlobalRoute, Local};

/// Length of the header before a datagram: a GRH, or an IPv4 header in its last 20 bytes.
pub(crate) const GRH: u64 = 40;

#[derive(Debug)]
pub(crate) enum Receive {
    None,
    Taken { wqe: u16, buffers: Vec<Buffer>, capacity: u64 },
    Refused { wqe: u16 },
}

#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Done,
    /// Nothing is posted; the requester retries.
    NotReady,
    Failed(Status),
    /// The receive failed with an error that has no negative acknowledgement.
    Silent,
}

impl State {
    /// Returns the memory of `local`, if protection domain `pd` permits access `wanted`.
    pub(crate) fn local(&self, pd: Handle, local: &Local, wanted: u32) -> Option<Buffer> {
        self.region(pd, local.key, local.address, local.len, wanted)
    }

    pub(crate) fn region(
        &self,
        pd: Handle,
        key: u32,
        address: u64,
        len: u64,
        wanted: u32,
    ) -> Option<Buffer> {
        let mr = self.mr_by_key.get(&key).and_then(|mr| self.mrs.get(mr))?;
        (mr.pd == pd && mr.access & wanted == wanted).then(|| mr.part(address, len)).flatten()
    }

    pub(crate) fn take_receive(&mut self, target: Handle) -> Receive {
        let Some(qp) = self.qps.get_mut(&target) else { return Receive::None };
        let (wqe, segments) = if let Some(srq) = qp.srq {
            let Some(srq) = self.srqs.get_mut(&srq) else { return Receive::None };
            if srq.posted() == 0 {
                return Receive::None;
            }
            let mut entry = vec![0; 1 << srq.shift];
            let wqe = srq.head;
            srq.ring.read(u64::from(wqe) << srq.shift, &mut entry);
            // Each WQE names the next.
            srq.head = u16::from_be_bytes([entry[2], entry[3]]);
            srq.used = srq.used.wrapping_add(1);
            (wqe, entry[16..].to_vec())
        } else {
            let Some(rq) = qp.rq.as_mut().filter(|rq| rq.posted() != 0) else {
                return Receive::None;
            };
            let mut entry = vec![0; 1 << rq.shift];
            let wqe = rq.index;
            rq.memory.read(rq.offset(wqe), &mut entry);
            rq.index = wqe.wrapping_add(1);
            (wqe, entry)
        };
        let (pd, shared) = match qp.srq {
            Some(srq) => (self.srqs[&srq].pd, Some(srq)),
            None => (qp.pd, None),
        };
        if let Some(srq) = shared {
            self.watch_limit(srq);
        }
        let buffers: Option<Vec<_>> = wqe::receive(&segments)
            .iter()
            .map(|local| self.local(pd, local, access::LOCAL_WRITE))
            .collect();
        match buffers {
            Some(buffers) => {
                Receive::Taken { wqe, capacity: buffers.iter().map(Buffer::len).sum(), buffers }
            }
            None => Receive::Refused { wqe },
        }
    }

    /// Sends the limit event of a shared receive queue that runs low, once per arming.
    pub(crate) fn watch_limit(&mut self, handle: Handle) {
        let Some(srq) = self.srqs.get_mut(&handle) else { return };
        if u32::from(srq.posted()) < srq.limit {
            srq.limit = 0;
            self.srq_event(handle, event::SRQ_LIMIT_REACHED);
        }
    }

    /// Delivers a message into a receive of `target`: first `header`, then `payload`.
    pub(crate) fn deliver(
        &mut self,
        target: Handle,
        opcode: Opcode,
        mut arrived: Arrived,
        header: &[u8],
        payload: &[u8],
    ) -> Answer {
        let receive = self.take_receive(target);
        let qp = &self.qps[&target];
        let (cq, number, uidx, kind) = (qp.recv_cq, qp.number, qp.uidx, qp.kind);
        let limit = qp.scatter[1];
        let broken = |state: &mut Self, wqe, status, answer| {
            let cqe = Cqe::error(uidx, Opcode::ResponseError, number, wqe, 0, status);
            state.complete(cq, number, cqe);
            // A failed datagram fails only its receive.
            if kind != Kind::Ud {
                state.fail_qp(target);
            }
            Answer::Failed(answer)
        };
        match receive {
            Receive::None => Answer::NotReady,
            Receive::Refused { wqe } => {
                broken(self, wqe, Status::LocalProtection, Status::RemoteOperation)
            }
            Receive::Taken { wqe, capacity, .. }
                if capacity < (header.len() + payload.len()) as u64 =>
            {
                broken(self, wqe, Status::LocalLength, Status::RemoteInvalidRequest)
            }
            Receive::Taken { wqe, .. }
                if opcode == Opcode::SendInvalidate
                    && !self.invalidate(number, u32::from_be_bytes(arrived.immediate)) =>
            {
                let status = Status::RemoteInvalidRequest;
                broken(self, wqe, status, status);
                Answer::Silent
            }
            Receive::Taken { wqe, buffers, .. } => {
                let len = if opcode == Opcode::WriteImm {
                    payload.len()
                } else {
                    header.len() + payload.len()
                };
                let inside = opcode != Opcode::WriteImm && (1..=limit).contains(&len);
                if opcode != Opcode::WriteImm && !inside {
                    scatter(&buffers, &[header, payload].concat());
                }
                // The length of a datagram includes its header.
                arrived.bytes = len as u32;
                debug_assert!(kind == Kind::Ud || header.is_empty());
                let mut cqe = Cqe::receive(uidx, opcode, number, wqe, &arrived);
                if inside {
                    cqe.scatter(payload, limit);
                }
                self.complete(cq, number, cqe);
                Answer::Done
            }
        }
    }

    /// Returns the memory of `target` that a peer's request names.
    ///
    /// If an RC peer names memory that it may not access, `target` fails too, with an event unless
    /// a receive reports the error.
    pub(crate) fn remote(
        &mut self,
        target: Handle,
        remote: &wqe::Remote,
        len: u64,
        wanted: u32,
        takes_receive: bool,
    ) -> Result<Option<Buffer>, Status> {
        let qp = &self.qps[&target];
        let connected = qp.kind == Kind::Rc;
        let reads = wanted & (access::REMOTE_READ | access::REMOTE_ATOMIC) != 0;
        if qp.attr.access & wanted != wanted
            || reads && qp.kind == Kind::Rc && qp.attr.max_dest_rd_atomic == 0
        {
            if connected {
                self.qp_event(target, event::QP_REQ_ERR);
                self.fail_qp(target);
            }
            return Err(Status::RemoteInvalidRequest);
        }
        // An access to zero bytes checks neither key nor address.
        let found = match len {
            0 => Some(None),
            _ => self
                .region(qp.pd, remote.key, remote.address, len, wanted)
                .or_else(|| self.window(qp.number, remote, len, wanted))
                .map(Some),
        };
        match found {
            Some(memory) => Ok(memory),
            None => {
                if connected && !takes_receive {
                    self.qp_event(target, event::QP_ACCESS_ERR);
                    self.fail_qp(target);
                }
                Err(Status::RemoteAccess)
            }
        }
    }
}

pub(crate) fn scatter(buffers: &[Buffer], mut bytes: &[u8]) {
    for buffer in buffers {
        let (now, rest) = bytes.split_at(bytes.len().min(buffer.len() as usize));
        buffer.write(0, now);
        bytes = rest;
    }
}

/// Returns the 40 bytes before a datagram from `source` along `route`.
pub(crate) fn datagram_header(
    link: Link,
    source: &Port,
    route: Option<&GlobalRoute>,
    payload: usize,
) -> [u8; 40] {
    let mut header = [0; 40];
    let Some(route) = route else { return header };
    let gids = source.gids();
    let from = gids.get(usize::from(route.source_index)).map_or([0; 16], |&(gid, _)| gid);
    let is_v4 = |gid: &[u8; 16]| gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    if link == Link::Roce && is_v4(&route.gid) {
        // IPv4, UDP, BTH, DETH, padded payload, ICRC.
        let total = (20 + 8 + 12 + 8 + payload.next_multiple_of(4) + 4) as u16;
        let ip = &mut header[20..];
        ip[0] = 0x45;
        ip[1] = route.traffic_class;
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip[6] = 0x40;
        ip[8] = route.hop_limit;
        ip[9] = 17;
        ip[12..16].copy_from_slice(&from[12..]);
        ip[16..20].copy_from_slice(&route.gid[12..]);
        let sum: u32 =
            ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let check = !((folded & 0xffff) + (folded >> 16)) as u16;
        ip[10..12].copy_from_slice(&check.to_be_bytes());
        return header;
    }
    let first = 6 << 28 | u32::from(route.traffic_class) << 20 | route.flow_label;
    header[..4].copy_from_slice(&first.to_be_bytes());
    let next = if link == Link::Roce { 17 } else { 0x1b };
    let total =
        (12 + 8 + payload.next_multiple_of(4) + 4 + if link == Link::Roce { 8 } else { 0 }) as u16;
    header[4..6].copy_from_slice(&total.to_be_bytes());
    header[6] = next;
    header[7] = route.hop_limit;
    header[8..24].copy_from_slice(&from);
    header[24..].copy_from_slice(&route.gid);
    header
}

pub(crate) fn wanted(operation: wqe::Operation) -> u32 {
    match operation {
        wqe::Operation::Read => access::REMOTE_READ,
        operation if operation.is_atomic() => access::REMOTE_ATOMIC,
        _ => access::REMOTE_WRITE,
    }
}

/// Returns the RNR wait of `qp` in microseconds: `min_rnr_timer` of `ibv_modify_qp(3)`.
pub(crate) fn rnr_wait(qp: &Qp) -> u64 {
    /// In units of 10 µs, from code 1; code 0 is the longest wait.
    const TABLE: [u64; 31] = [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
        2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    match qp.attr.min_rnr_timer & 31 {
        0 => 655_360,
        timer => TABLE[usize::from(timer) - 1] * 10,
    }
}
