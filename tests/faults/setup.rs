//! Devices and connected queue pairs of the verbs layer.

use fastrand::Rng;
use tokio_rdma::software::Network;
use tokio_rdma::types::{
    AckTimeout, AddressVector, Mtu, PortNum, Psn, Qkey, QpAttr, QpCaps, QpState, Qpn, RnrTimer,
    Transport, WorkCompletion,
};
use tokio_rdma::verbs::{Cq, Qp, QpConfig, Srq};
use tokio_rdma::{Access, Device, ProtectionDomain};

pub(crate) const QKEY: Qkey = Qkey(0x1234);

#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) cq: Cq,
    pub(crate) pd: ProtectionDomain,
    pub(crate) device: Device,
}

impl Side {
    pub(crate) fn new(network: &Network, name: &str) -> Self {
        let device = Device::software_in(network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        Self { cq: Cq::new(&device, 2048, None, 0).unwrap(), pd, device }
    }

    pub(crate) fn address(&self) -> AddressVector {
        AddressVector::new(PortNum(1), 0, self.device.default_path().unwrap().1.gid)
    }

    pub(crate) fn queue_pair(&self, transport: Transport, srq: Option<&Srq>, caps: QpCaps) -> Qp {
        Qp::new(&self.pd, &self.cq, &self.cq, srq, &QpConfig::new(transport, caps)).unwrap()
    }

    pub(crate) fn poll(&self) -> Vec<WorkCompletion> {
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
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) mtu: Mtu,
    pub(crate) psn: Psn,
    pub(crate) timeout: AckTimeout,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rnr_timer: RnrTimer,
    pub(crate) rd_atomic: u8,
    pub(crate) caps: QpCaps,
}

impl Terms {
    /// Returns attributes with the maximum number of retries.
    pub(crate) fn usual() -> Self {
        Self {
            mtu: Mtu::Mtu1024,
            psn: Psn::new(0xff_fff0),
            timeout: AckTimeout::from_code(8),
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: RnrTimer::from_code(5),
            rd_atomic: 4,
            caps: QpCaps {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
        }
    }

    pub(crate) fn draw(random: &mut Rng, mtu: Mtu) -> Self {
        // Mostly shortly before it wraps.
        let psn =
            if random.u8(..4) == 0 { random.u32(..) } else { 0x100_0000 - random.u32(0..200) };
        Self {
            mtu,
            psn: Psn::new(psn),
            timeout: AckTimeout::from_code(random.u8(5..9)),
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: RnrTimer::from_code(random.u8(1..9)),
            rd_atomic: random.u8(1..=16),
            caps: QpCaps {
                max_send_wr: random.u32(2..40),
                max_recv_wr: random.u32(1..24),
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 128,
            },
        }
    }
}

pub(crate) fn connect(ends: [(&Side, &Qp, &Terms); 2]) {
    for (_, qp, _) in ends {
        qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            access: Some(Access::REMOTE_ALL),
            ..QpAttr::to_state(QpState::Init)
        })
        .unwrap();
    }
    for (this, that) in [(ends[0], ends[1]), (ends[1], ends[0])] {
        let ((_, qp, terms), (there, peer, theirs)) = (this, that);
        let reliable = qp.transport() == Transport::Rc;
        qp.modify(&QpAttr {
            address: Some(there.address()),
            path_mtu: Some(terms.mtu),
            dest_qpn: Some(peer.qpn()),
            rq_psn: Some(theirs.psn),
            max_dest_rd_atomic: reliable.then_some(theirs.rd_atomic),
            min_rnr_timer: reliable.then_some(terms.rnr_timer),
            ..QpAttr::to_state(QpState::Rtr)
        })
        .unwrap();
    }
    for (_, qp, terms) in ends {
        let reliable = qp.transport() == Transport::Rc;
        qp.modify(&QpAttr {
            sq_psn: Some(terms.psn),
            timeout: reliable.then_some(terms.timeout),
            retry_count: reliable.then_some(terms.retry_count),
            rnr_retry: reliable.then_some(terms.rnr_retry),
            max_rd_atomic: reliable.then_some(terms.rd_atomic),
            ..QpAttr::to_state(QpState::Rts)
        })
        .unwrap();
    }
}

pub(crate) fn activate(qp: &Qp, psn: Psn) {
    qp.modify(&QpAttr {
        pkey_index: Some(0),
        port: Some(PortNum(1)),
        qkey: Some(QKEY),
        ..QpAttr::to_state(QpState::Init)
    })
    .unwrap();
    qp.modify(&QpAttr::to_state(QpState::Rtr)).unwrap();
    qp.modify(&QpAttr { sq_psn: Some(psn), ..QpAttr::to_state(QpState::Rts) }).unwrap();
}

/// Moves a queue pair to ERR, which flushes its work.
pub(crate) fn fail(qp: &Qp) {
    qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
}

pub(crate) fn is(qp: &Qp, state: QpState) -> bool {
    qp.query().unwrap().0 == state
}

pub(crate) fn number(qpn: Qpn) -> u64 {
    qpn.0.into()
}
