//! Two connected ends of the verbs layer, which posts what the operation layer refuses.

#![allow(unsafe_code)]

use std::cell::RefCell;

use tokio_rdma::types::{
    Access, AckTimeout, AddressVector, AsyncEvent, Data, Mtu, PortNum, Psn, Qkey, QpAttr, QpCaps,
    QpState, Qpn, RecvWr, RnrTimer, SendFlags, SendOp, SendWr, Sge, Transport, UdTarget, WcStatus,
    WorkCompletion, WrId,
};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::verbs::{Channel, Cq, PostError, Qp, QpConfig, Srq};
use tokio_rdma::{Device, ProtectionDomain};

use super::{Memory, Setup, events, eventually, rxe};

pub(crate) const QKEY: Qkey = Qkey(0x1234);

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) transport: Transport,
    pub(crate) mtu: Mtu,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rd_atomic: u8,
    pub(crate) dest_rd_atomic: u8,
    pub(crate) access: Access,
    pub(crate) caps: QpCaps,
    pub(crate) send_cqe: u32,
    pub(crate) recv_cqe: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            transport: Transport::Rc,
            mtu: Mtu::Mtu1024,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            rd_atomic: 4,
            dest_rd_atomic: 4,
            access: Access::REMOTE_ALL,
            caps: QpCaps {
                max_send_wr: 32,
                max_recv_wr: 32,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
            send_cqe: 128,
            recv_cqe: 128,
        }
    }
}

impl Options {
    pub(crate) fn of(transport: Transport) -> Self {
        Self { transport, ..Self::default() }
    }
}

/// The first packet sequence number, shortly before it wraps.
const PSN: Psn = Psn::new(0xff_fffe);

/// One end with a completion queue for each direction. The order of fields is the drop order.
pub(crate) struct End {
    pub(crate) qp: Qp,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    /// Memory for receives whose contents are not checked, for a datagram's header and 24 bytes.
    pub(crate) scratch: Memory,
    /// The address handles of posted datagrams, which must stay until these are sent.
    routes: RefCell<Vec<AddressHandle>>,
    pub(crate) pd: ProtectionDomain,
    pub(crate) device: Device,
}

impl End {
    pub(crate) fn new(device: &Device, options: &Options) -> Self {
        Self::with(device, options, None, None)
    }

    /// Creates an end with a channel for receive completions or a shared receive queue, whose
    /// protection domain it uses.
    pub(crate) fn with(
        device: &Device,
        options: &Options,
        channel: Option<&Channel>,
        srq: Option<&Srq>,
    ) -> Self {
        let send_cq = Cq::new(device, options.send_cqe, None, 1).unwrap();
        let recv_cq = Cq::new(device, options.recv_cqe, channel, 2).unwrap();
        Self::on(device, options, send_cq, recv_cq, srq)
    }

    pub(crate) fn on(
        device: &Device,
        options: &Options,
        send_cq: Cq,
        recv_cq: Cq,
        srq: Option<&Srq>,
    ) -> Self {
        let pd = match srq {
            Some(srq) => srq.protection_domain().clone(),
            None => device.protection_domain().unwrap(),
        };
        Self::within(&pd, options, send_cq, recv_cq, srq)
    }

    fn within(
        pd: &ProtectionDomain,
        options: &Options,
        send_cq: Cq,
        recv_cq: Cq,
        srq: Option<&Srq>,
    ) -> Self {
        let mut caps = options.caps;
        if srq.is_some() {
            caps.max_recv_wr = 0;
        }
        let qp =
            Qp::new(pd, &send_cq, &recv_cq, srq, &QpConfig::new(options.transport, caps)).unwrap();
        let scratch = Memory::new(pd, 64);
        Self {
            qp,
            send_cq,
            recv_cq,
            scratch,
            routes: RefCell::default(),
            pd: pd.clone(),
            device: pd.device().clone(),
        }
    }

    /// Creates an end in the protection domain of another.
    pub(crate) fn beside(other: &Self, options: &Options) -> Self {
        let send_cq = Cq::new(&other.device, options.send_cqe, None, 1).unwrap();
        let recv_cq = Cq::new(&other.device, options.recv_cqe, None, 2).unwrap();
        Self::within(&other.pd, options, send_cq, recv_cq, None)
    }

    pub(crate) fn address(&self) -> AddressVector {
        address_of(&self.device)
    }

    pub(crate) fn init(&self, options: &Options) {
        self.qp.modify(&init(options)).unwrap();
    }

    pub(crate) fn rtr(&self, options: &Options, peer: &Self) {
        self.qp.modify(&rtr(options, peer)).unwrap();
    }

    pub(crate) fn rts(&self, options: &Options) {
        self.qp.modify(&rts(options)).unwrap();
    }

    pub(crate) fn to(&self, state: QpState) {
        self.qp.modify(&QpAttr::to_state(state)).unwrap();
    }

    pub(crate) fn state(&self) -> QpState {
        self.qp.query().unwrap().0
    }

    pub(crate) fn memory(&self, len: usize) -> Memory {
        Memory::new(&self.pd, len)
    }

    pub(crate) fn send(&self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<(), PostError> {
        self.send_with(wr_id, op, SendFlags::SIGNALED, Data::Sges(sges))
    }

    pub(crate) fn send_with(
        &self,
        wr_id: u64,
        op: SendOp,
        flags: SendFlags,
        data: Data<'_>,
    ) -> Result<(), PostError> {
        self.post(&[request(wr_id, op, flags, data)])
    }

    pub(crate) fn send_to(
        &self,
        wr_id: u64,
        to: &Self,
        qpn: Qpn,
        qkey: Qkey,
        sges: &[Sge],
    ) -> Result<(), PostError> {
        self.send_at(wr_id, &to.address(), qpn, qkey, sges)
    }

    /// Posts a datagram to an address, which may belong to another process.
    pub(crate) fn send_at(
        &self,
        wr_id: u64,
        to: &AddressVector,
        qpn: Qpn,
        qkey: Qkey,
        sges: &[Sge],
    ) -> Result<(), PostError> {
        let handle = self.pd.address_handle(to).unwrap();
        self.routes.borrow_mut().push(handle.clone());
        let target = UdTarget { qpn, ..handle.target(qpn, qkey) };
        let (op, flags, data) = (SendOp::Send, SendFlags::SIGNALED, Data::Sges(sges));
        self.post(&[SendWr { wr_id: WrId(wr_id), op, flags, data, target: Some(target.into()) }])
    }

    pub(crate) fn post(&self, list: &[SendWr<'_>]) -> Result<(), PostError> {
        // SAFETY: no device accesses memory after deregistration; tests access it only by copies
        // through the registration's owner.
        unsafe { self.qp.post_send(list) }
    }

    pub(crate) fn recv(&self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        // SAFETY: as in `post`.
        unsafe { self.qp.post_recv(&[RecvWr { wr_id: WrId(wr_id), sges }]) }
    }

    /// Posts a receive in the error state, which flushes it.
    pub(crate) fn recv_late(&self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let result = self.recv(wr_id, sges);
        if rxe::known(&self.device, &rxe::LATE_RECEIVES) {
            self.to(QpState::Err);
        }
        result
    }

    /// Waits until the send queue has drained, on devices that require it.
    pub(crate) fn drained(&self) {
        if rxe::known(&self.device, &rxe::WAITS_FOR_DRAINED)
            && rxe::known(&self.device, &rxe::DRAINED_UNASKED)
        {
            let drained = AsyncEvent::SendQueueDrained(self.qp.qpn());
            eventually("the drained event", || {
                events(&self.device).contains(&drained).then_some(())
            });
        }
    }

    pub(crate) fn sent(&self, count: usize) -> Vec<WorkCompletion> {
        take(&self.send_cq, count)
    }

    /// Returns the completions of receives so far.
    pub(crate) fn received_now(&self) -> Vec<WorkCompletion> {
        poll(&self.recv_cq)
    }

    pub(crate) fn received(&self, count: usize) -> Vec<WorkCompletion> {
        take(&self.recv_cq, count)
    }
}

/// Returns the address of the default port, as a peer of the same network names it.
pub(crate) fn address_of(device: &Device) -> AddressVector {
    let (port, gid) = device.default_path().unwrap();
    AddressVector { dlid: port.lid, ..AddressVector::new(port.port, gid.index, gid.gid) }
}

/// Returns a work request for the connected peer.
pub(crate) fn request(wr_id: u64, op: SendOp, flags: SendFlags, data: Data<'_>) -> SendWr<'_> {
    SendWr { wr_id: WrId(wr_id), op, flags, data, target: None }
}

pub(crate) fn post_shared(srq: &Srq, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
    // SAFETY: as in `End::post`.
    unsafe { srq.post_recv(&[RecvWr { wr_id: WrId(wr_id), sges }]) }
}

pub(crate) fn poll(cq: &Cq) -> Vec<WorkCompletion> {
    let mut all = Vec::new();
    let mut out = [WorkCompletion::default(); 16];
    loop {
        let count = cq.poll(&mut out).unwrap();
        all.extend_from_slice(&out[..count]);
        if count < out.len() {
            return all;
        }
    }
}

pub(crate) fn take(cq: &Cq, count: usize) -> Vec<WorkCompletion> {
    let mut all = Vec::new();
    eventually(&format!("{count} completions"), || {
        all.extend(poll(cq));
        (all.len() >= count).then_some(())
    });
    assert_eq!(all.len(), count, "{all:?}");
    all
}

pub(crate) fn outcome(completions: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|completion| (completion.wr_id.0, completion.status)).collect()
}

pub(crate) fn init(options: &Options) -> QpAttr {
    let datagram = options.transport == Transport::Ud;
    QpAttr {
        pkey_index: Some(0),
        port: Some(PortNum(1)),
        access: (!datagram).then_some(options.access),
        qkey: datagram.then_some(QKEY),
        ..QpAttr::to_state(QpState::Init)
    }
}

pub(crate) fn rtr(options: &Options, peer: &End) -> QpAttr {
    rtr_to(options, peer.address(), peer.qp.qpn())
}

pub(crate) fn rtr_to(options: &Options, address: AddressVector, qpn: Qpn) -> QpAttr {
    let connected = options.transport != Transport::Ud;
    let reliable = options.transport == Transport::Rc;
    QpAttr {
        address: connected.then_some(address),
        path_mtu: connected.then_some(options.mtu),
        dest_qpn: connected.then_some(qpn),
        rq_psn: connected.then_some(PSN),
        max_dest_rd_atomic: reliable.then_some(options.dest_rd_atomic),
        // 0.01 ms.
        min_rnr_timer: reliable.then_some(RnrTimer::from_code(1)),
        ..QpAttr::to_state(QpState::Rtr)
    }
}

pub(crate) fn rts(options: &Options) -> QpAttr {
    let reliable = options.transport == Transport::Rc;
    QpAttr {
        sq_psn: Some(PSN),
        timeout: reliable.then(|| AckTimeout::from_code(options.timeout)),
        retry_count: reliable.then_some(options.retry_count),
        rnr_retry: reliable.then_some(options.rnr_retry),
        max_rd_atomic: reliable.then_some(options.rd_atomic),
        ..QpAttr::to_state(QpState::Rts)
    }
}

pub(crate) fn connect(a: &End, b: &End, options: &Options) {
    for end in [a, b] {
        end.init(options);
    }
    a.rtr(options, b);
    b.rtr(options, a);
    for end in [a, b] {
        end.rts(options);
    }
}

/// Returns two ends in RTS and the setup, which outlives them.
pub(crate) fn connected(options: &Options) -> (End, End, Setup) {
    let setup = Setup::new();
    let (a, b) = (End::new(&setup.a, options), End::new(&setup.b, options));
    connect(&a, &b, options);
    (a, b, setup)
}

/// Waits until earlier packets have arrived, because packets between two ports stay in order.
pub(crate) fn settle(from: &Device, to: &Device) {
    let options = Options::default();
    let (first, last) = (End::new(from, &options), End::new(to, &options));
    connect(&first, &last, &options);
    last.recv(0, &[]).unwrap();
    first.send(0, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&first.sent(1)), [(0, WcStatus::SUCCESS)]);
}
