//! Send work requests and their packets.

use rdma_provider::types::{
    Access, DcKey, Gid, Psn, Qkey, Qpn, RemoteAddr, SendFlags, SendOp, SendTarget, Sge, Transport,
    WcOpcode, WcStatus, WindowBind, WorkCompletion, WrId,
};

use crate::memory::dma::Gather;
use crate::memory::keys::Keys;
use crate::roce::ip_fields::IpFields;
use crate::roce::packet::{AtomicOp, Body, Part, Reth, Tail};

use super::{MAX_MESSAGE, SendConfig};

/// The destination of a datagram, or a DC target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) gid: Gid,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: Qkey,
    pub(crate) key: Option<DcKey>,
    pub(crate) ip_fields: IpFields,
}

impl Destination {
    pub(super) fn of(target: &SendTarget<'_>) -> Self {
        match target {
            SendTarget::Datagram(to) => {
                let ip_fields = IpFields::of(to.address);
                Self { gid: to.address.dgid, qpn: to.qpn, qkey: to.qkey, key: None, ip_fields }
            }
            SendTarget::Dc(to) => {
                let ip_fields = IpFields::of(to.address);
                let key = Some(to.key);
                Self { gid: to.address.dgid, qpn: to.number, qkey: Qkey(0), key, ip_fields }
            }
        }
    }
}

/// Inline bytes stored without allocation.
pub(super) const SHORT: usize = 64;

/// The fields that each operation uses come first, in two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct SendWqe {
    pub(super) wr_id: WrId,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
    pub(super) started: bool,
    pub(super) inline: bool,
    /// Number of earlier work requests. A completion frees the slots up to its own.
    pub(super) position: u32,
    pub(super) length: u32,
    pub(super) first_psn: Psn,
    pub(super) packets: u32,
    /// The only element, or an empty one.
    pub(super) one: Sge,
    /// All elements, if there are several.
    pub(super) several: Vec<Sge>,
    pub(super) bind: Option<Box<WindowBind>>,
    pub(super) to: Destination,
    /// Inline bytes that do not fit.
    pub(super) long: Vec<u8>,
    /// Inline bytes that fit.
    pub(super) short: [u8; SHORT],
}

impl Default for SendWqe {
    fn default() -> Self {
        Self {
            wr_id: WrId(0),
            op: SendOp::Send,
            flags: SendFlags::empty(),
            position: 0,
            length: 0,
            first_psn: Psn::new(0),
            packets: 0,
            started: false,
            inline: false,
            one: Sge::default(),
            several: Vec::new(),
            bind: None,
            short: [0; SHORT],
            long: Vec::new(),
            to: Destination::default(),
        }
    }
}

impl SendWqe {
    #[inline]
    pub(super) fn sges(&self) -> &[Sge] {
        if self.several.is_empty() { std::slice::from_ref(&self.one) } else { &self.several }
    }

    #[cold]
    pub(super) fn set_bind(&mut self, bind: &WindowBind) {
        self.inline = false;
        self.one = Sge::default();
        self.bind = Some(Box::new(*bind));
    }

    #[inline]
    pub(super) fn bytes(&self) -> &[u8] {
        let len = if self.inline { self.length as usize } else { 0 };
        self.short.get(..len).unwrap_or(&self.long)
    }

    pub(super) fn last_psn(&self) -> Psn {
        self.first_psn.add(self.packets - 1)
    }

    pub(super) fn end_psn(&self) -> Psn {
        self.first_psn.add(self.packets)
    }

    pub(super) fn completion(&self, status: WcStatus, qpn: Qpn) -> WorkCompletion {
        WorkCompletion {
            wr_id: self.wr_id,
            status,
            opcode: opcode_of(&self.op),
            byte_len: self.length,
            qpn,
            ..WorkCompletion::EMPTY
        }
    }
}

#[inline]
pub(super) const fn opcode_of(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => WcOpcode::SEND,
        SendOp::Write(_) | SendOp::WriteWithImm(..) => WcOpcode::RDMA_WRITE,
        SendOp::Read(_) => WcOpcode::RDMA_READ,
        SendOp::CompareSwap { .. } => WcOpcode::COMP_SWAP,
        SendOp::FetchAdd { .. } => WcOpcode::FETCH_ADD,
        SendOp::BindWindow => WcOpcode::BIND_MW,
        SendOp::LocalInvalidate(_) => WcOpcode::LOCAL_INV,
    }
}

/// Checks the local memory of a work request before its first packet, and returns the error.
pub(super) fn check_local(wqe: &SendWqe, config: &SendConfig, keys: &Keys) -> Option<WcStatus> {
    if wqe.length > MAX_MESSAGE {
        return Some(WcStatus::LOC_LEN_ERR);
    }
    let (len, need) = match wqe.op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if wqe.length < 8 => {
            return Some(WcStatus::LOC_LEN_ERR);
        }
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => (8, Access::LOCAL_WRITE),
        SendOp::Read(_) => (wqe.length as usize, Access::LOCAL_WRITE),
        _ => (wqe.length as usize, Access::empty()),
    };
    if wqe.inline {
        return None;
    }
    keys.gather(wqe.sges(), config.pd, 0, len, need, &mut Gather::new())
        .is_err()
        .then_some(WcStatus::LOC_PROT_ERR)
}

/// Returns the body of packet `number`, and the PSN after it and its responses.
#[inline]
pub(super) fn body_of(
    wqe: &SendWqe,
    part: Part,
    number: u32,
    psn: Psn,
    config: &SendConfig,
) -> (Body, Psn) {
    let next = psn.add(1);
    if config.transport == Transport::Ud {
        let imm = if let SendOp::SendWithImm(imm) = wqe.op { Some(imm) } else { None };
        // IBTA 10.2.5: the top bit selects the queue pair's own key.
        let qkey = if wqe.to.qkey.0 >> 31 != 0 { config.qkey } else { wqe.to.qkey };
        return (Body::Datagram { qkey, source: config.qpn, imm }, next);
    }
    let reth = |remote| Reth { remote, length: wqe.length };
    match wqe.op {
        SendOp::Send | SendOp::BindWindow | SendOp::LocalInvalidate(_) => {
            (Body::Send { part, tail: Tail::None }, next)
        }
        SendOp::SendWithImm(imm) => {
            (Body::Send { part, tail: if part.ends() { Tail::Imm(imm) } else { Tail::None } }, next)
        }
        SendOp::SendWithInvalidate(rkey) => (
            Body::Send {
                part,
                tail: if part.ends() { Tail::Invalidate(rkey) } else { Tail::None },
            },
            next,
        ),
        SendOp::Write(remote) => (Body::Write { part, reth: reth(remote), imm: None }, next),
        SendOp::WriteWithImm(remote, imm) => {
            (Body::Write { part, reth: reth(remote), imm: part.ends().then_some(imm) }, next)
        }
        // Retransmitted READs request only the rest (IBTA 9.4.4).
        SendOp::Read(remote) => {
            let mtu = config.mtu.bytes() as u32;
            let offset = number * mtu;
            let rest =
                RemoteAddr { addr: remote.addr.wrapping_add(u64::from(offset)), rkey: remote.rkey };
            let packets = (wqe.packets - number).min(left_in_request(number, config));
            let length = (wqe.length - offset).min(packets.saturating_mul(mtu));
            (Body::ReadRequest(Reth { remote: rest, length }), psn.add(packets))
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            (Body::Atomic { remote, op: AtomicOp::CompareSwap { compare, swap } }, next)
        }
        SendOp::FetchAdd { remote, add } => {
            (Body::Atomic { remote, op: AtomicOp::FetchAdd { add } }, next)
        }
    }
}

/// Returns the remaining response packets of the READ request that contains packet `number`.
#[inline]
pub(super) const fn left_in_request(number: u32, config: &SendConfig) -> u32 {
    config.flow.read_packets - number % config.flow.read_packets
}

/// Returns whether the operation consumes a receive; only then may it be solicited (IBTA 9.2.3).
pub(super) const fn consumes_receive(op: &SendOp) -> bool {
    !matches!(op, SendOp::Write(_)) && !op.reads_back()
}
