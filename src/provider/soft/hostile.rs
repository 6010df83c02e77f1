//! What a fuzzer feeds: packets, and sequences of requests into a responder, with what must hold whatever they are.

// Registers memory of its own, to see that nothing else changes.
#![allow(unsafe_code)]

use crate::types::{
    Access, AsyncEvent, Gid, Imm, Lkey, Mtu, Psn, Qkey, QpState, Qpn, RecvWr, RemoteAddr, Rkey, RnrTimer, Sge,
    Transport, WorkCompletion, WrId,
};

use super::dma::{Gather, Memory, Payload};
use super::keys::Keys;
use super::responder::{ReceiveConfig, ReceiveWqe, Receiver, Responder};
use super::wire::{AtomicOp, Body, Packet, Part, Reth, Tail};

/// Bytes that are registered, and on either side bytes that are not.
const REGION: usize = 4096;
const MARGIN: usize = 1024;
const MARK: u8 = 0xa5;
const PD: u32 = 1;
const MTU: Mtu = Mtu::Mtu256;

/// Bytes between UDP header and check. What is a packet encodes to one that is the same.
pub fn packet(bytes: &[u8]) {
    let Ok((packet, payload)) = Packet::parse(bytes) else { return };
    let mut again = Vec::new();
    packet.emit(payload.len(), &mut again, |out| out.extend_from_slice(payload));
    assert_eq!(Packet::parse(&again), Ok((packet, payload)));
}

/// A peer's requests, each of 16 bytes and a payload: what they say of kind, sequence, key, place and length is near to what
/// a peer may say, or beside it. Nothing but the region changes, and there are no more replies than what asks for one.
pub fn requests(bytes: &[u8]) {
    let mut memory = vec![MARK; MARGIN + REGION + MARGIN];
    let base = memory[MARGIN..].as_mut_ptr();
    let keys = Keys::new(7);
    // SAFETY: S1: the bytes outlive `keys`, and are looked at when all is done.
    let region = unsafe { Memory::new(base, REGION, base as u64) };
    let Some(key) = keys.insert(region, Access::LOCAL_WRITE | Access::REMOTE_ALL, false, PD, 3) else { return };
    let transport = if bytes.first().is_some_and(|first| first & 1 == 1) { Transport::Uc } else { Transport::Rc };
    let mut responder = Responder::new(ReceiveConfig {
        transport,
        qpn: Qpn(2),
        gid: Gid::default(),
        pd: PD,
        shared: false,
        receive_pd: PD,
        access: Access::REMOTE_ALL,
        mtu: MTU,
        peer: Qpn(3),
        peer_gid: Gid::default(),
        qkey: Qkey(0),
        min_rnr_timer: RnrTimer::from_code(1),
        max_dest_rd_atomic: 3,
    });
    let mut log = Log { taken: 0 };
    responder.start(Psn::new(0xff_fff0));
    responder.set_state(QpState::Rtr, &mut log);
    responder.set_state(QpState::Rts, &mut log);
    let mut next = Psn::new(0xff_fff0);
    let mut rest = bytes;
    let mut posted = 0;
    while let Some((head, behind)) = rest.split_first_chunk::<16>() {
        let length = usize::from(u16::from_be_bytes([head[14], head[15]]) % 300).min(behind.len());
        let (payload, behind) = behind.split_at(length);
        rest = behind;
        if head[1] & 0x10 != 0 {
            let sges =
                [Sge { addr: base as u64 + u64::from(head[2]), length: u32::from(head[3]) * 4, lkey: Lkey(key) }];
            responder.post(&RecvWr { wr_id: WrId(posted), sges: &sges }, &mut log);
            posted += 1;
        }
        let psn = if head[1] & 1 == 0 { next } else { next.add(u32::from(head[4])).sub(16) };
        let packet = Packet {
            transport,
            dest: Qpn(2),
            psn,
            solicited: head[1] & 2 != 0,
            ack_request: head[1] & 4 != 0,
            body: body(head, base as u64, key),
        };
        responder.on_request(&packet, Gid::default(), &Payload::Bytes(payload), &keys, &mut log);
        if psn == next {
            next = next.add(1);
        }
        if head[1] & 8 != 0 {
            drain(&mut responder, &keys, &mut log);
        }
    }
    drain(&mut responder, &keys, &mut log);
    assert!(log.taken <= posted, "a receive completes once");
    keys.remove(key);
    let outside = memory[..MARGIN].iter().chain(&memory[MARGIN + REGION..]);
    assert!(outside.copied().all(|byte| byte == MARK), "bytes changed that nobody exposed");
}

/// What a request says, from 16 bytes.
fn body(head: &[u8; 16], base: u64, key: u32) -> Body {
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let part = [Part::First, Part::Middle, Part::Last, Part::Only][usize::from(head[0] >> 1 & 3)];
    // Within the region, across its ends, or anywhere.
    let addr = match head[5] & 3 {
        0 => base + u64::from(word(6) % REGION as u32),
        1 => base.wrapping_sub(8) + u64::from(word(6) % 16),
        2 => base + REGION as u64 - u64::from(word(6) % 300),
        _ => u64::from(word(6)) << 32 | u64::from(word(2)),
    };
    let rkey = if head[5] & 4 == 0 { Rkey(key) } else { Rkey(word(10)) };
    let remote = RemoteAddr { addr, rkey };
    let length = match head[5] & 0x18 {
        0 => u32::from(head[10]),
        8 => u32::from(head[10]) * 16,
        0x10 => 256 + u32::from(head[10]),
        _ => word(10),
    };
    let imm = (part.ends() && head[5] & 0x20 != 0).then_some(Imm(word(10)));
    let reth = Reth { remote, length };
    match head[0] >> 3 & 7 {
        0 | 1 => {
            let tail = match imm {
                Some(imm) if head[5] & 0x40 == 0 => Tail::Imm(imm),
                Some(_) => Tail::Invalidate(rkey),
                None => Tail::None,
            };
            Body::Send { part, tail }
        }
        2 | 3 => Body::Write { part, reth: if part.begins() { reth } else { Reth::default() }, imm },
        4 | 5 => Body::ReadRequest(reth),
        6 => Body::Atomic { remote, op: AtomicOp::FetchAdd { add: u64::from(word(10)) } },
        _ => Body::Atomic {
            remote,
            op: AtomicOp::CompareSwap { compare: u64::from(head[11]), swap: u64::from(word(10)) },
        },
    }
}

fn drain(responder: &mut Responder, keys: &Keys, log: &mut Log) {
    let mut gather = Gather::new();
    // Three answers of READs at most, each of not more packets than the region has; and acknowledgements between them.
    for _ in 0..100 {
        if responder.next_reply(keys, &mut gather, log).is_none() {
            return;
        }
        gather.clear();
    }
    panic!("replies without end");
}

/// What is around the responder.
struct Log {
    taken: u64,
}

impl Receiver for Log {
    fn take_shared(&mut self, _: &mut ReceiveWqe) -> bool {
        false
    }

    fn complete(&mut self, _: u32, _: &WorkCompletion, _: bool) {
        self.taken += 1;
    }

    fn event(&mut self, _: AsyncEvent) {}

    fn failed(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_packets_and_requests_do_no_harm() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = (0..random.usize(0..600)).map(|_| random.u8(..)).collect();
            packet(&bytes);
            // Mostly short payloads, so that there are many requests.
            for head in bytes.chunks_mut(16) {
                if let [.., high, low] = head {
                    (*high, *low) = (0, *low % 24);
                }
            }
            requests(&bytes);
        }
    }
}
