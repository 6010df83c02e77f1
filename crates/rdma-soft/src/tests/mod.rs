//! Tests through the device's verbs.

mod admission;
mod campaign;
mod congestion;
mod cost;
mod dc;
mod dc_campaign;
mod dc_machines;
mod error_texts;
mod errors;
mod first_free;
mod keys;
mod machines;
mod pace;
mod partitions;
mod post_state;
mod posting_threads;
mod queues;
mod rc;
mod requesting;
mod responding;
mod sources;
mod unreliable;
mod windows;

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use crate::UdpError;
use crate::roce::partition::DEFAULT_PKEY;
use rdma_provider::contract::{
    Context as _, Cq as _, CqInit, Mr as _, Pd as _, PostError, Qp as _, QpInit,
};
use rdma_provider::types::{
    Access, AckTimeout, AddressVector, AsyncEvent, Data, DirectConfig, Lkey, Mtu, PortNum, Psn,
    Qkey, QpAttr, QpCaps, QpState, Qpn, RecvWr, RemoteAddr, Rkey, RnrTimer, SendFlags, SendOp,
    SendWr, Sge, Transport, UdTarget, WorkCompletion, WrId,
};

use super::*;

/// The time after which a test concludes that something hangs. It is so long that a busy machine
/// fails no test.
pub(crate) const HANG: Duration = Duration::from_secs(600);

/// A registered buffer that frees its memory after the deregistration.
struct Buffer {
    mr: Option<Mr>,
    base: NonNull<u8>,
    len: usize,
}

impl Buffer {
    fn new(pd: &Pd, len: usize, access: Access) -> Self {
        // Words, so that offset 0 is aligned for atomics.
        let words = vec![0_u64; len.div_ceil(8).max(1)].into_boxed_slice();
        let base = NonNull::new(Box::into_raw(words).cast::<u8>()).unwrap();
        // SAFETY: freed in `drop`, after the registration; touched only through the pointer.
        let mr = unsafe { pd.register(base, len, base.as_ptr() as u64, access, false) }.unwrap();
        Self { mr: Some(mr), base, len }
    }

    fn deregister(&mut self) {
        self.mr = None;
    }

    fn lkey(&self) -> Lkey {
        self.mr.as_ref().unwrap().lkey()
    }

    fn rkey(&self) -> Rkey {
        self.mr.as_ref().unwrap().rkey()
    }

    fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr() + offset as u64, length: len as u32, lkey: self.lkey() }
    }

    fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.addr() + offset as u64, rkey: self.rkey() }
    }

    fn fill(&self, bytes: impl IntoIterator<Item = u8>) {
        self.fill_at(0, bytes);
    }

    fn fill_at(&self, start: usize, bytes: impl IntoIterator<Item = u8>) {
        for (offset, byte) in (start..self.len).zip(bytes) {
            // SAFETY: within the allocation; no work is in flight that touches it.
            unsafe { self.base.as_ptr().add(offset).write_volatile(byte) }
        }
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len.div_ceil(8) * 8);
        // SAFETY: as in `fill`.
        (offset..offset + len)
            .map(|at| unsafe { self.base.as_ptr().add(at).read_volatile() })
            .collect()
    }

    fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.deregister();
        let words = std::ptr::slice_from_raw_parts_mut(
            self.base.as_ptr().cast::<u64>(),
            self.len.div_ceil(8).max(1),
        );
        // SAFETY: made in `new` with this length; not registered any more.
        drop(unsafe { Box::from_raw(words) });
    }
}

#[derive(Clone, Copy)]
struct Options {
    transport: Transport,
    traffic_class: u8,
    mtu: Mtu,
    psn: u32,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    rnr_timer: u8,
    rd_atomic: u8,
    dest_rd_atomic: u8,
    access: Access,
    caps: QpCaps,
    cqe: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            transport: Transport::Rc,
            traffic_class: 0,
            mtu: Mtu::Mtu1024,
            psn: 0xff_fff0,
            timeout: 12,
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: 1,
            rd_atomic: 4,
            dest_rd_atomic: 4,
            access: Access::REMOTE_ALL,
            caps: QpCaps {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 128,
            },
            cqe: 256,
        }
    }
}

/// One end of a connection. Fields drop in this order.
struct End {
    qp: Qp,
    cq: Cq,
    pd: Pd,
    context: Context,
    network: Network,
}

const QKEY: Qkey = Qkey(0x1234);

impl End {
    fn new(network: &Network, name: &str, options: &Options) -> Self {
        let context = network.open(name).unwrap();
        let pd = context.create_pd().unwrap();
        let cq = context.create_cq(&CqInit::new(options.cqe)).unwrap();
        let init = QpInit {
            transport: options.transport,
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            caps: options.caps,
            direct: DirectConfig::DEFAULT,
        };
        let qp = pd.create_qp(&init).unwrap();
        Self { qp, cq, pd, context, network: network.clone() }
    }

    fn address(&self) -> AddressVector {
        AddressVector::new(PortNum(1), 0, self.context.port(PortNum(1)).unwrap().gids[0].gid)
    }

    fn buffer(&self, len: usize) -> Buffer {
        Buffer::new(&self.pd, len, Access::LOCAL_WRITE | Access::REMOTE_ALL)
    }

    fn to_init(&self, options: &Options) {
        let mut attr = QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            ..QpAttr::to_state(QpState::Init)
        };
        if options.transport == Transport::Ud {
            attr.qkey = Some(QKEY);
        } else {
            attr.access = Some(options.access);
        }
        self.qp.modify(&attr).unwrap();
    }

    fn to_rtr(&self, options: &Options, peer: &Self) {
        let mut attr = QpAttr::to_state(QpState::Rtr);
        if options.transport != Transport::Ud {
            let traffic_class = options.traffic_class;
            attr.address = Some(AddressVector { traffic_class, ..peer.address() });
            attr.path_mtu = Some(options.mtu);
            attr.dest_qpn = Some(peer.qp.qpn());
            attr.rq_psn = Some(Psn::new(options.psn));
        }
        if options.transport == Transport::Rc {
            attr.max_dest_rd_atomic = Some(options.dest_rd_atomic);
            attr.min_rnr_timer = Some(RnrTimer::from_code(options.rnr_timer));
        }
        self.qp.modify(&attr).unwrap();
    }

    fn to_rts(&self, options: &Options) {
        let mut attr =
            QpAttr { sq_psn: Some(Psn::new(options.psn)), ..QpAttr::to_state(QpState::Rts) };
        if options.transport == Transport::Rc {
            attr.timeout = Some(AckTimeout::from_code(options.timeout));
            attr.retry_count = Some(options.retry_count);
            attr.rnr_retry = Some(options.rnr_retry);
            attr.max_rd_atomic = Some(options.rd_atomic);
        }
        self.qp.modify(&attr).unwrap();
    }

    fn state(&self) -> QpState {
        self.qp.query().unwrap().0
    }

    fn send(&self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<(), PostError> {
        self.send_with(wr_id, op, SendFlags::SIGNALED, Data::Sges(sges))
    }

    fn send_with(
        &self,
        wr_id: u64,
        op: SendOp,
        flags: SendFlags,
        data: Data<'_>,
    ) -> Result<(), PostError> {
        let wr = SendWr { wr_id: WrId(wr_id), op, flags, data, target: None };
        // SAFETY: buffers of a test outlive its queue pairs' work.
        unsafe { self.qp.post_send([wr]) }
    }

    fn send_to(
        &self,
        wr_id: u64,
        to: &Self,
        qpn: Qpn,
        qkey: Qkey,
        sges: &[Sge],
    ) -> Result<(), PostError> {
        self.send_at(wr_id, &to.address(), (qpn, qkey), sges)
    }

    fn send_at(
        &self,
        wr_id: u64,
        address: &AddressVector,
        (qpn, qkey): (Qpn, Qkey),
        sges: &[Sge],
    ) -> Result<(), PostError> {
        let target = Some(UdTarget { address, handle: 0, qpn, qkey }.into());
        let wr = SendWr {
            wr_id: WrId(wr_id),
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(sges),
            target,
        };
        // SAFETY: as in `send_with`.
        unsafe { self.qp.post_send([wr]) }
    }

    fn recv(&self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        // SAFETY: as in `send_with`.
        unsafe { self.qp.post_recv(&[RecvWr { wr_id: WrId(wr_id), sges }]) }
    }

    fn poll(&self) -> Vec<WorkCompletion> {
        let mut out = [WorkCompletion::default(); 16];
        let mut all = Vec::new();
        loop {
            let count = self.cq.poll(&mut out).unwrap();
            all.extend_from_slice(&out[..count]);
            if count < out.len() {
                return all;
            }
        }
    }

    /// Returns completions, driving virtual time or waiting for the network.
    fn wait(&self, count: usize) -> Vec<WorkCompletion> {
        let mut all = self.poll();
        let start = Instant::now();
        while all.len() < count {
            if !self.network.step() {
                assert!(start.elapsed() < HANG, "missing completions: {all:?}");
                std::thread::yield_now();
            }
            all.extend(self.poll());
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }

    fn events(&self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.context.next_event().unwrap_or(None)).collect()
    }
}

fn outcome(completions: &[WorkCompletion]) -> Vec<(u64, rdma_provider::types::WcStatus)> {
    completions.iter().map(|completion| (completion.wr_id.0, completion.status)).collect()
}

pub(super) fn over_udp(names: &[&str]) -> Network {
    for _ in 0..100 {
        let random = getrandom::u64().unwrap();
        let config = UdpConfig::new().port(10_000 + (random >> 50) as u16);
        let first = u32::from_be_bytes([127, 32, 0, 1]) + (random as u32 & 0x0007_fff0);
        let address = |at: usize| std::net::Ipv4Addr::from(first + at as u32).into();
        let config = names
            .iter()
            .enumerate()
            .fold(config, |config, (at, name)| config.device(name, address(at)));
        match Network::udp(&config) {
            Ok(network) => return network,
            Err(UdpError::PortTaken { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no free port in 100 attempts");
}

fn connected(network: &Network, options: &Options) -> (End, End) {
    let (a, b) = (End::new(network, "a", options), End::new(network, "b", options));
    connect(&a, &b, options);
    (a, b)
}

fn connect(a: &End, b: &End, options: &Options) {
    for end in [a, b] {
        end.to_init(options);
    }
    a.to_rtr(options, b);
    b.to_rtr(options, a);
    for end in [a, b] {
        end.to_rts(options);
    }
}
