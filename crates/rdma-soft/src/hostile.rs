//! Fuzzing entry points for packets, requests and DC sessions, with their invariants.

// Registers memory, to check that nothing else changes.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use rdma_provider::types::{
    Access, AsyncEvent, DcKey, Gid, Imm, Lkey, Mtu, Psn, Qkey, QpState, Qpn, RecvWr, RemoteAddr,
    Rkey, RnrTimer, Sge, Transport, WorkCompletion, WrId,
};

use super::dc::{Environment, Header, Outcome, SessionNumber, Target};
use super::memory::dma::{Gather, Memory, Payload};
use super::memory::keys::Keys;
use super::roce::ip_fields::Origin;
use super::roce::packet::{AtomicOp, Body, Packet, Part, Reth, Tail};
use super::roce::partition::DEFAULT_PKEY;
use super::roce::responder::{ReceiveConfig, ReceiveWqe, Receiver, Responder};

/// Registered bytes, and unregistered bytes on either side.
const REGION: usize = 4096;
const MARGIN: usize = 1024;
const MARK: u8 = 0xa5;
const PD: u32 = 1;
const MTU: Mtu = Mtu::Mtu256;

/// Parses the bytes between UDP header and ICRC; a valid packet survives encoding.
pub fn packet(bytes: &[u8]) {
    let Ok((packet, payload)) = Packet::parse(bytes) else { return };
    let mut again = Vec::new();
    packet.emit(payload.len(), &mut again, |out| out.extend_from_slice(payload));
    assert_eq!(Packet::parse(&again), Ok((packet, payload)));
    if let (Transport::Dci, Ok((header, payload))) = (packet.transport, Header::parse(payload)) {
        let mut again = Vec::new();
        header.append_to(&mut again);
        again.extend_from_slice(payload);
        assert_eq!(Header::parse(&again), Ok((header, payload)));
    }
}

/// A registered region between unregistered bytes.
struct Region {
    memory: Vec<u8>,
    base: *mut u8,
    keys: Keys,
    key: u32,
}

impl Region {
    fn new() -> Option<Self> {
        let mut memory = vec![MARK; MARGIN + REGION + MARGIN];
        let base = memory[MARGIN..].as_mut_ptr();
        let keys = Keys::new();
        // SAFETY: S1: the bytes are not freed before `check` removes the registration, and are read
        // only afterwards.
        let region = unsafe { Memory::new(base, REGION, base as u64) };
        let key = keys.insert(region, Access::LOCAL_WRITE | Access::REMOTE_ALL, false, PD, 3)?;
        Some(Self { memory, base, keys, key })
    }

    fn addr(&self) -> u64 {
        self.base as u64
    }

    /// Asserts that no byte outside the region changed.
    fn check(self) {
        self.keys.remove(self.key);
        let outside = self.memory[..MARGIN].iter().chain(&self.memory[MARGIN + REGION..]);
        assert!(outside.copied().all(|byte| byte == MARK), "a byte outside the region changed");
    }
}

/// Executes requests of a peer: 16 bytes of parameters each, which yield valid or nearly valid
/// kinds, sequence numbers, keys, addresses and lengths, and a payload. Only the region changes,
/// and only requests are answered.
pub fn requests(bytes: &[u8]) {
    let Some(region) = Region::new() else { return };
    let transport = if bytes.first().is_some_and(|first| first & 1 == 1) {
        Transport::Uc
    } else {
        Transport::Rc
    };
    let mut responder = Responder::new(config(transport, false));
    let mut log = Log::default();
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
            responder.post(&RecvWr { wr_id: WrId(posted), sges: &[sge(head, &region)] }, &mut log);
            posted += 1;
        }
        let psn = if head[1] & 1 == 0 { next } else { next.add(u32::from(head[4])).sub(16) };
        let packet = Packet {
            transport,
            pkey: DEFAULT_PKEY,
            dest: Qpn(2),
            psn,
            solicited: head[1] & 2 != 0,
            ack_request: head[1] & 4 != 0,
            body: body(head, region.addr(), region.key),
        };
        responder.on_request(
            &packet,
            Origin::default(),
            &Payload::Bytes(payload),
            &region.keys,
            &mut log,
        );
        if psn == next {
            next = next.add(1);
        }
        if head[1] & 8 != 0 {
            drain(
                |gather, log| responder.next_reply(&region.keys, gather, log).is_some(),
                &mut log,
            );
        }
    }
    drain(|gather, log| responder.next_reply(&region.keys, gather, log).is_some(), &mut log);
    assert!(log.taken <= posted, "a receive completes once");
    region.check();
}

/// Executes packets of initiators at a DC target, encoded as for [`requests`], in existing or other
/// sessions. Only the region changes, the session limit holds, and no receive is lost.
pub fn sessions(bytes: &[u8]) {
    const LIMIT: usize = 4;
    const KEY: DcKey = DcKey(5);
    let Some(region) = Region::new() else { return };
    let mut target = Target::new(config(Transport::Rc, true), KEY, LIMIT);
    let mut log = Log::default();
    target.set_state(QpState::Rtr, &mut log);
    // Session, cookie and next PSN of eight initiators.
    let mut known = [(0_u32, 0_u32, Psn::new(0)); 8];
    let mut rest = bytes;
    let mut posted = 0;
    while let Some((head, behind)) = rest.split_first_chunk::<16>() {
        let length = usize::from(u16::from_be_bytes([head[14], head[15]]) % 300).min(behind.len());
        let (payload, behind) = behind.split_at(length);
        rest = behind;
        log.now += u64::from(head[13]) << 26;
        if head[1] & 0x10 != 0 {
            let mut receive = ReceiveWqe::default();
            receive.assign(&RecvWr { wr_id: WrId(posted), sges: &[sge(head, &region)] }, 0);
            log.receives.push_back(receive);
            posted += 1;
        }
        let which = usize::from(head[12] & 7);
        let (count, cookie, next) = &mut known[which];
        let (body, psn) = match head[1] >> 5 {
            0 => {
                *count = count.wrapping_add(u32::from(head[4] & 1));
                *next = Psn::new(u32::from(head[4]) << 16);
                let key = if head[4] & 0x1e == 0 { DcKey(6) } else { KEY };
                (
                    Body::Open { key, mtu: if head[4] & 0xe0 == 0 { Mtu::Mtu512 } else { MTU } },
                    *next,
                )
            }
            1 if head[4] & 3 == 0 => (Body::Close, *next),
            _ if head[1] & 1 == 0 => (body(head, region.addr(), region.key), *next),
            _ => (body(head, region.addr(), region.key), next.add(u32::from(head[4])).sub(16)),
        };
        let lies = head[12] & 0x78 == 0;
        let session = SessionNumber { incarnation: u32::from(head[12] >> 7), count: *count };
        let header = Header {
            source: Qpn(which as u32),
            session,
            cookie: cookie.wrapping_add(u32::from(lies)),
        };
        let packet = Packet {
            ack_request: head[1] & 4 != 0,
            ..Packet::dc_control(DEFAULT_PKEY, Qpn(2), psn, body)
        };
        if psn == *next {
            *next = psn.add(1);
        }
        let payload = Payload::Bytes(payload);
        match target.on_request(
            (&packet, &header),
            Gid::default(),
            &payload,
            &region.keys,
            &mut log,
        ) {
            Outcome::Nothing => {}
            Outcome::Answer((answer, header)) => {
                if answer.body == Body::Accept {
                    *cookie = header.cookie;
                }
            }
            Outcome::Session(key) => target.put_due(key),
        }
        assert!(target.counters().open <= LIMIT as u64, "more sessions than the target takes");
        if head[1] & 8 != 0 {
            while let Some(key) = target.take_due() {
                drain(
                    |gather, log| target.next_reply(&key, &region.keys, gather, log).is_some(),
                    &mut log,
                );
            }
        }
    }
    target.set_state(QpState::Err, &mut log);
    assert_eq!(
        log.taken + log.receives.len() as u64,
        posted,
        "each receive completes once or remains posted"
    );
    region.check();
}

fn config(transport: Transport, shared: bool) -> ReceiveConfig {
    ReceiveConfig {
        transport,
        qpn: Qpn(2),
        gid: Gid::default(),
        pd: PD,
        shared,
        receive_pd: PD,
        access: Access::REMOTE_ALL,
        mtu: MTU,
        peer: Qpn(3),
        peer_gid: Gid::default(),
        qkey: Qkey(0),
        pkey: DEFAULT_PKEY,
        min_rnr_timer: RnrTimer::from_code(1),
        max_dest_rd_atomic: 3,
    }
}

fn sge(head: &[u8; 16], region: &Region) -> Sge {
    Sge {
        addr: region.addr() + u64::from(head[2]),
        length: u32::from(head[3]) * 4,
        lkey: Lkey(region.key),
    }
}

/// Derives a request body from 16 bytes.
fn body(head: &[u8; 16], base: u64, key: u32) -> Body {
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let part = [Part::First, Part::Middle, Part::Last, Part::Only][usize::from(head[0] >> 1 & 3)];
    // Inside the region, across its bounds, or anywhere.
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
        2 | 3 => {
            Body::Write { part, reth: if part.begins() { reth } else { Reth::default() }, imm }
        }
        4 | 5 => Body::ReadRequest(reth),
        6 => Body::Atomic { remote, op: AtomicOp::FetchAdd { add: u64::from(word(10)) } },
        _ => Body::Atomic {
            remote,
            op: AtomicOp::CompareSwap { compare: u64::from(head[11]), swap: u64::from(word(10)) },
        },
    }
}

fn drain<'k>(mut next_reply: impl FnMut(&mut Gather<'k>, &mut Log) -> bool, log: &mut Log) {
    let mut gather = Gather::new();
    // At most three READ responses, each within the region, and acknowledgements.
    for _ in 0..100 {
        if !next_reply(&mut gather, log) {
            return;
        }
        gather.clear();
    }
    panic!("replies without end");
}

/// A receiver that records completions.
#[derive(Default)]
struct Log {
    taken: u64,
    receives: VecDeque<ReceiveWqe>,
    now: u64,
    drawn: u64,
}

impl Receiver for Log {
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool {
        self.receives.pop_front().map(|receive| *into = receive).is_some()
    }

    fn complete(&mut self, _: u32, _: &WorkCompletion, _: bool) {
        self.taken += 1;
    }

    fn event(&mut self, _: AsyncEvent) {}

    fn count_bad_pkey(&mut self) {}

    fn failed(&mut self) {}
}

impl Environment for Log {
    fn return_receive(&mut self, receive: &mut ReceiveWqe) {
        self.receives.push_back(std::mem::take(receive));
    }

    fn now(&mut self) -> u64 {
        self.now
    }

    fn random(&mut self) -> Option<u64> {
        self.drawn += 1;
        Some(self.drawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows S4.
    #[test]
    fn random_packets_and_requests_do_no_harm() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..if cfg!(debug_assertions) { 4_000 } else { 40_000 } {
            let mut bytes: Vec<u8> = (0..random.usize(0..600)).map(|_| random.u8(..)).collect();
            packet(&bytes);
            // Mostly short payloads, for many requests.
            for head in bytes.chunks_mut(16) {
                if let [.., high, low] = head {
                    (*high, *low) = (0, *low % 24);
                }
            }
            requests(&bytes);
            sessions(&bytes);
        }
    }
}
