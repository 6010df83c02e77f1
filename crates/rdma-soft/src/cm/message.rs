//! Messages of the connection manager, with the fields that mean something on RoCE (IBTA 12.6).
//!
//! Values only; [`mad`](super::mad) has their bytes. The field for private data has a fixed length on the wire, so the
//! receiver finds zeros behind what was written.

use std::net::{IpAddr, SocketAddr};

use rdma_provider::cm_contract::{MAX_REJECT_DATA, MAX_REQUEST_DATA, MAX_RESPONSE_DATA};
use rdma_provider::types::{AckTimeout, Gid, Mtu, Psn, Qkey, Qpn, RejectReason};

/// Most bytes of private data in a request to resolve a service.
const RESOLVE_DATA: usize = 216;
/// Most bytes of private data in the answer to it.
const RESOLVED_DATA: usize = 136;

/// Number that one side gives a connection; 0 in a rejection by someone who gave it none.
pub(super) type CommId = u32;

/// Time to wait for a message: 5 bits meaning 4.096 µs × 2^code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CmTimeout(pub(super) u8);

impl CmTimeout {
    pub(super) const fn nanoseconds(self) -> u64 {
        4096 << (self.0 & 31)
    }
}

/// Private data, filled up with zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Private<const N: usize>([u8; N]);

impl<const N: usize> Private<N> {
    /// `None` if it does not fit.
    pub(super) fn new(data: &[u8]) -> Option<Self> {
        let mut all = [0; N];
        all.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self(all))
    }

    /// All of it, as it travels.
    pub(super) const fn of(data: [u8; N]) -> Self {
        Self(data)
    }

    pub(super) const fn empty() -> Self {
        Self([0; N])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// What travels: the transaction number of the MAD header, which an answer repeats, and the message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mad {
    pub(super) transaction: u64,
    pub(super) message: Message,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// The large ones are boxed: most messages are small, and each connection keeps its last one.
    Req(Box<Req>),
    Mra(Mra),
    Rej(Box<Rej>),
    Rep(Box<Rep>),
    Rtu(Rtu),
    Dreq(Dreq),
    Drep(Drep),
    SidrReq(Box<SidrReq>),
    SidrRep(Box<SidrRep>),
}

/// Connection request, IBTA 12.6.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Req {
    pub(super) local_id: CommId,
    /// Port within TCP's port space: the low 16 bits of the service id.
    pub(super) service_port: u16,
    pub(super) guid: u64,
    pub(super) qpn: Qpn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// Time in which the passive side shall answer.
    pub(super) remote_timeout: CmTimeout,
    /// Time in which the active side answers a REP.
    pub(super) local_timeout: CmTimeout,
    /// What the passive side shall begin to send with.
    pub(super) starting_psn: Psn,
    pub(super) retry_count: u8,
    pub(super) mtu: Mtu,
    /// Of the passive side's queue pair.
    pub(super) rnr_retry: u8,
    pub(super) max_retries: u8,
    pub(super) srq: bool,
    pub(super) local_gid: Gid,
    pub(super) remote_gid: Gid,
    pub(super) traffic: Traffic,
    pub(super) ack_timeout: AckTimeout,
    /// Of the IP header in front of the private data.
    pub(super) source: SocketAddr,
    pub(super) destination: IpAddr,
    pub(super) private_data: Private<MAX_REQUEST_DATA>,
}

/// What the requester's packets carry, and wishes of ours to carry: the rest of the primary path of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Traffic {
    /// 20 bits. Linux draws it by lot and makes the UDP source port of it.
    pub(super) flow_label: u32,
    pub(super) traffic_class: u8,
    /// 4 bits.
    pub(super) service_level: u8,
    pub(super) hop_limit: u8,
    /// Code of a packet rate, 6 bits; 0 is that of the port.
    pub(super) rate: u8,
    /// No router is on the way.
    pub(super) subnet_local: bool,
}

impl Traffic {
    /// What we ask for: nothing special, through as many routers as IP goes.
    pub(super) const PLAIN: Self = Self {
        flow_label: 0,
        traffic_class: 0,
        service_level: 0,
        hop_limit: 64,
        rate: 0,
        subnet_local: false,
    };
}

/// Which message another one is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    Req = 0,
    Rep = 1,
    Other = 2,
}

/// Message receipt acknowledgement: the answer takes longer, IBTA 12.6.6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mra {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) about: About,
    pub(super) service_timeout: CmTimeout,
}

/// Rejection, IBTA 12.6.7.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rej {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) about: About,
    pub(super) reason: RejectReason,
    pub(super) private_data: Private<MAX_REJECT_DATA>,
}

/// Answer to a request, IBTA 12.6.8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rep {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) qpn: Qpn,
    /// What the active side shall begin to send with.
    pub(super) starting_psn: Psn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// Of the active side's queue pair.
    pub(super) rnr_retry: u8,
    pub(super) srq: bool,
    pub(super) guid: u64,
    /// Time that the passive side's device takes to acknowledge.
    pub(super) ack_delay: CmTimeout,
    pub(super) private_data: Private<MAX_RESPONSE_DATA>,
}

/// Ready to use, IBTA 12.6.9.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rtu {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
}

/// Request for disconnection, IBTA 12.6.10.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dreq {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    /// The receiver's queue pair.
    pub(super) remote_qpn: Qpn,
}

/// Answer to it, IBTA 12.6.11.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Drep {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
}

/// Asks which queue pair serves datagrams for a service, IBTA 12.11.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SidrReq {
    pub(super) request_id: u32,
    pub(super) service: u64,
    pub(super) private_data: Private<RESOLVE_DATA>,
}

/// Answer to it, IBTA 12.11.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SidrRep {
    pub(super) request_id: u32,
    pub(super) status: SidrStatus,
    pub(super) qpn: Qpn,
    pub(super) service: u64,
    pub(super) qkey: Qkey,
    pub(super) private_data: Private<RESOLVED_DATA>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SidrStatus(pub(super) u8);

impl SidrStatus {
    /// Nobody serves datagrams for it.
    pub(super) const UNSUPPORTED: Self = Self(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_filled_up_and_bounded() {
        let data = Private::<4>::new(b"ab");
        assert_eq!(data.as_ref().map(Private::bytes), Some(&b"ab\0\0"[..]));
        assert_eq!(Private::<4>::new(b"abcd").as_ref().map(Private::bytes), Some(&b"abcd"[..]));
        assert_eq!(Private::<4>::new(b"abcde"), None);
    }
}
