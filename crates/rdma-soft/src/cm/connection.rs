//! The record of one connection.

use std::net::SocketAddr;

use rdma_provider::cm_contract::CmPeer;
use rdma_provider::types::{
    AckTimeout, AddressVector, Gid, Mtu, Psn, QpAttr, QpState, Qpn, RnrTimer,
};

use super::message::{CommId, Message, PathFields, Rep, Req};
use crate::net::node::PORT;

/// The state in the handshake (IBTA 12.9.5, without states that RoCE and rdma_cm do not use).
///
/// ```text
///       active                               passive
///  REQ ◀── connect                            REQ arrives
///    ReqSent ── REJ, timeout ──▶ gone           ReqRcvd ── REJ ──▶ Withdrawn ── release ──▶ gone
///       │ REP arrives                              │  └── reject ──▶ Refused ── later ──▶ gone
///    RepRcvd ── REJ ──▶ gone                       │ accept ──▶ REP
///       │ establish ──▶ RTU                     RepSent ── REJ, timeout ──▶ gone
///       ▼                                          │ RTU arrives, or a packet of the connection
///    Established ◀─────────────────────────────────┘
///       │ disconnect ──▶ DREQ         │ DREQ arrives ──▶ DREP
///    DreqSent ── DREP, timeout ──▶ TimeWait ── later ──▶ gone
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum State {
    ReqSent,
    RepRcvd,
    ReqRcvd,
    RepSent,
    Established,
    DreqSent,
    TimeWait,
    /// A rejected request. Duplicate REQs get the same REJ.
    Refused,
    /// A request that the peer has withdrawn. It counts against the backlog until the program
    /// releases it, or withdrawn requests could fill an unread channel.
    Withdrawn,
}

impl State {
    #[cfg(test)]
    pub(super) const ALL: [Self; 9] = [
        Self::ReqSent,
        Self::RepRcvd,
        Self::ReqRcvd,
        Self::RepSent,
        Self::Established,
        Self::DreqSent,
        Self::TimeWait,
        Self::Refused,
        Self::Withdrawn,
    ];
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) state: State,
    /// The program holds its id and receives its events.
    pub(super) owned: bool,
    /// The listener whose backlog counts the request, at once or after an auto-accept is confirmed.
    pub(super) listener: Option<u64>,
    /// The manager has accepted it, and the program does not know it yet.
    pub(super) auto_accepted: bool,
    /// The number in [`Evictable`](super::limits::Evictable).
    pub(super) evictable: Option<u64>,
    /// `local_qpn` was reserved before its queue pair existed.
    pub(super) reserved: bool,
    pub(super) half_open: bool,
    pub(super) transaction: u64,
    pub(super) peer: Gid,
    /// 0 until it is known; never assigned.
    pub(super) remote_id: CommId,
    pub(super) local_qpn: Qpn,
    pub(super) remote_qpn: Option<Qpn>,
    pub(super) sq_psn: Psn,
    pub(super) rq_psn: Psn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) mtu: Mtu,
    /// The P_Key of the active side.
    pub(super) pkey: u16,
    pub(super) path: PathFields,
    pub(super) ack_timeout: AckTimeout,
    /// Retransmission timeout of a REP in nanoseconds, and retry limit.
    pub(super) response_timeout: u64,
    pub(super) retries: u8,
    /// Retransmissions of `last`.
    pub(super) retransmissions: u8,
    /// The time at which an unanswered REQ fails.
    pub(super) gives_up_at: u64,
    pub(super) deadline: Option<u64>,
    /// The last message, for retransmission on a timeout or a duplicate.
    pub(super) last: Option<Message>,
    pub(super) params: Option<CmPeer>,
    pub(super) addresses: (SocketAddr, SocketAddr),
}

impl Connection {
    pub(super) fn from_request(
        req: &Req,
        transaction: u64,
        rq_psn: Psn,
        response_timeout: u64,
    ) -> Self {
        Self {
            state: State::ReqRcvd,
            owned: true,
            listener: None,
            auto_accepted: false,
            evictable: None,
            reserved: false,
            half_open: true,
            transaction,
            peer: req.local_gid,
            remote_id: req.local_id,
            local_qpn: Qpn(0),
            remote_qpn: Some(req.qpn),
            sq_psn: req.starting_psn,
            rq_psn,
            // The peer's initiator depth is the local responder resources, and vice versa.
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry: req.rnr_retry,
            mtu: req.mtu,
            pkey: req.pkey,
            path: req.path,
            ack_timeout: req.ack_timeout,
            response_timeout,
            retries: req.max_retries & 15,
            retransmissions: 0,
            gives_up_at: u64::MAX,
            deadline: None,
            last: None,
            params: Some(CmPeer {
                private_data: req.private_data.bytes().to_vec(),
                responder_resources: req.initiator_depth,
                initiator_depth: req.responder_resources,
                srq: req.srq,
            }),
            addresses: (SocketAddr::new(req.destination, req.service_port), req.source),
        }
    }

    pub(super) fn on_rep(&mut self, rep: &Rep) {
        self.remote_id = rep.local_id;
        self.remote_qpn = Some(rep.qpn);
        self.sq_psn = rep.starting_psn;
        self.responder_resources = rep.initiator_depth;
        self.initiator_depth = rep.responder_resources;
        self.rnr_retry = rep.rnr_retry;
        self.params = Some(CmPeer {
            private_data: rep.private_data.bytes().to_vec(),
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            srq: rep.srq,
        });
    }

    /// Returns attributes for RTR or RTS. `None` if the peer is unknown or the connection has
    /// ended.
    pub(super) fn qp_attr(&self, state: QpState) -> Option<QpAttr> {
        let known = matches!(
            self.state,
            State::RepRcvd | State::ReqRcvd | State::RepSent | State::Established
        );
        let dest_qpn = self.remote_qpn.filter(|_| known)?;
        match state {
            QpState::Rtr => Some(QpAttr {
                address: Some(AddressVector {
                    service_level: self.path.service_level,
                    traffic_class: self.path.traffic_class,
                    flow_label: self.path.flow_label,
                    // The hop limit stays the default: the peer does not know the distance.
                    ..AddressVector::new(PORT, 0, self.peer)
                }),
                path_mtu: Some(self.mtu),
                dest_qpn: Some(dest_qpn),
                rq_psn: Some(self.rq_psn),
                max_dest_rd_atomic: Some(self.responder_resources),
                // 655 ms, as the kernel sets; the layer above replaces it.
                min_rnr_timer: Some(RnrTimer::from_code(0)),
                ..QpAttr::to_state(QpState::Rtr)
            }),
            QpState::Rts => Some(QpAttr {
                sq_psn: Some(self.sq_psn),
                timeout: Some(self.ack_timeout),
                retry_count: Some(self.retry_count),
                rnr_retry: Some(self.rnr_retry),
                max_rd_atomic: Some(self.initiator_depth),
                ..QpAttr::to_state(QpState::Rts)
            }),
            _ => None,
        }
    }
}
