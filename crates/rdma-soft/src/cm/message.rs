//! Messages of the connection manager, with the fields that RoCE uses (IBTA 12.6). `mad.rs` encodes
//! and decodes them.
//!
//! The active side connects: it sends the REQ. The passive side listens: it answers with a REP.
//! Private data has a fixed length: the receiver reads zeros after the sender's bytes.

use std::net::{IpAddr, SocketAddr};

use rdma_provider::cm_contract::{
    MAX_FOUND_DATA, MAX_QUERY_DATA, MAX_REJECT_DATA, MAX_REQUEST_DATA, MAX_RESPONSE_DATA,
};
use rdma_provider::types::{AckTimeout, AddressVector, Gid, Mtu, Psn, Qkey, Qpn, RejectReason};

/// An id that one side assigned to the connection. 0 in an MRA or REJ from a side that assigned
/// none, and in a message to a peer whose id is unknown.
pub(super) type CommId = u32;

/// A duration of 4.096 µs × 2^code; the code has 5 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CmTimeout(pub(super) u8);

impl CmTimeout {
    pub(super) const fn nanoseconds(self) -> u64 {
        4096 << (self.0 & 31)
    }
}

/// Private data, padded with zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Private<const N: usize>([u8; N]);

impl<const N: usize> Private<N> {
    /// Returns `None` if `data` is longer than `N` bytes.
    pub(super) fn new(data: &[u8]) -> Option<Self> {
        let mut all = [0; N];
        all.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self(all))
    }

    pub(super) const fn from_wire(data: [u8; N]) -> Self {
        Self(data)
    }

    pub(super) const fn empty() -> Self {
        Self([0; N])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A management datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mad {
    /// An answer repeats the transaction id of the message that it answers.
    pub(super) transaction: u64,
    pub(super) message: Message,
}

/// A message. Large ones are boxed, because each connection stores its last one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
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

/// A connection request, IBTA 12.6.5.
///
/// `local_*` is the active side, `remote_*` the passive side. The sequence number, the retries and
/// the acknowledgement timeout are for the passive side's queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Req {
    pub(super) local_id: CommId,
    /// The port in TCP's port space: the low 16 bits of the service id.
    pub(super) service_port: u16,
    pub(super) guid: u64,
    pub(super) qpn: Qpn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// The time limit for the passive side's answer to this message.
    pub(super) remote_timeout: CmTimeout,
    /// The time limit for the active side's answer to a REP: the passive side's retransmission
    /// timeout.
    pub(super) local_timeout: CmTimeout,
    pub(super) starting_psn: Psn,
    pub(super) retry_count: u8,
    pub(super) mtu: Mtu,
    pub(super) rnr_retry: u8,
    /// Maximum retransmissions of a REP.
    pub(super) max_retries: u8,
    pub(super) srq: bool,
    /// The P_Key of the active side's queue pair, in whose partition the passive side's must be.
    pub(super) pkey: u16,
    pub(super) local_gid: Gid,
    pub(super) remote_gid: Gid,
    pub(super) path: PathFields,
    pub(super) ack_timeout: AckTimeout,
    /// The addresses are sent in rdma_cm's IP header, which precedes the private data.
    pub(super) source: SocketAddr,
    pub(super) destination: IpAddr,
    pub(super) private_data: Private<MAX_REQUEST_DATA>,
}

/// Attributes of the primary path, except for its addresses, MTU and timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PathFields {
    /// 20 bits. Linux derives the UDP source port from it.
    pub(super) flow_label: u32,
    pub(super) traffic_class: u8,
    /// 4 bits.
    pub(super) service_level: u8,
    pub(super) hop_limit: u8,
    /// 6 bits; 0 is the port's rate.
    pub(super) rate: u8,
    pub(super) subnet_local: bool,
}

impl PathFields {
    pub(super) const PLAIN: Self = Self {
        flow_label: 0,
        traffic_class: 0,
        service_level: 0,
        hop_limit: AddressVector::DEFAULT_HOP_LIMIT,
        rate: 0,
        subnet_local: false,
    };
}

/// The message to which an MRA or REJ refers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    Req = 0,
    Rep = 1,
    Other = 2,
}

/// A message receipt acknowledgement, IBTA 12.6.6: the message has arrived, and its answer follows
/// within the service timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mra {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) about: About,
    pub(super) service_timeout: CmTimeout,
}

/// A rejection, IBTA 12.6.7.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rej {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) about: About,
    pub(super) reason: RejectReason,
    pub(super) private_data: Private<MAX_REJECT_DATA>,
}

/// A reply to a request, IBTA 12.6.8. The sequence number and the retries are for the active side's
/// queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rep {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) qpn: Qpn,
    pub(super) starting_psn: Psn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) rnr_retry: u8,
    pub(super) srq: bool,
    pub(super) guid: u64,
    pub(super) ack_delay: CmTimeout,
    pub(super) private_data: Private<MAX_RESPONSE_DATA>,
}

/// A ready-to-use message, IBTA 12.6.9.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rtu {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
}

/// A disconnect request, IBTA 12.6.10.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dreq {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
    pub(super) remote_qpn: Qpn,
}

/// A disconnect reply, IBTA 12.6.11.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Drep {
    pub(super) local_id: CommId,
    pub(super) remote_id: CommId,
}

/// A query for the queue pair that serves datagrams of a service, IBTA 12.11.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SidrReq {
    /// The active side's id of the query, which the answer repeats.
    pub(super) request_id: CommId,
    pub(super) pkey: u16,
    pub(super) service: u64,
    /// The addresses in rdma_cm's IP header; `None` without such a header.
    pub(super) addresses: Option<(SocketAddr, IpAddr)>,
    pub(super) private_data: Private<MAX_QUERY_DATA>,
}

/// The answer to a query, IBTA 12.11.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SidrRep {
    pub(super) request_id: CommId,
    pub(super) status: SidrStatus,
    pub(super) qpn: Qpn,
    pub(super) service: u64,
    pub(super) qkey: Qkey,
    pub(super) private_data: Private<MAX_FOUND_DATA>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SidrStatus(pub(super) u8);

impl SidrStatus {
    pub(super) const VALID: Self = Self(0);
    /// No service has the id.
    pub(super) const UNSUPPORTED: Self = Self(1);
    pub(super) const REJECTED: Self = Self(2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_padded_and_bounded() {
        let data = Private::<4>::new(b"ab");
        assert_eq!(data.as_ref().map(Private::bytes), Some(&b"ab\0\0"[..]));
        assert_eq!(Private::<4>::new(b"abcd").as_ref().map(Private::bytes), Some(&b"abcd"[..]));
        assert_eq!(Private::<4>::new(b"abcde"), None);
    }
}
