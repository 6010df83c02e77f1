//! One connection, as its manager knows it.

use std::net::SocketAddr;

use rdma_provider::cm_contract::CmPeer;
use rdma_provider::types::{
    AckTimeout, AddressVector, Gid, Mtu, Psn, QpAttr, QpState, Qpn, RnrTimer,
};

use super::super::device::PORT;
use super::message::{CommId, Message, Rep, Req, Traffic};

/// Where it is in the handshake (IBTA 12.9.5, without the states of messages that RoCE and rdma_cm do not use).
///
/// ```text
///        active                                       passive
///   REQ ◀── connect                                    REQ arrives
///     ReqSent ── REJ, timeout ──▶ gone                   ReqRcvd ── REJ ──▶ Withdrawn ── release ──▶ gone
///        │ REP arrives                                      │  └── reject ──▶ Refused ── later ──▶ gone
///     RepRcvd ── REJ ──▶ gone                               │ accept ──▶ REP
///        │ establish ──▶ RTU                             RepSent ── REJ, timeout ──▶ gone
///        ▼                                                  │ RTU arrives, or a packet of the connection
///     Established ◀─────────────────────────────────────────┘
///        │ disconnect ──▶ DREQ         │ DREQ arrives ──▶ DREP
///     DreqSent ── DREP, timeout ──▶ TimeWait ── later ──▶ gone
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
    /// A request that was rejected: repeated ones get the same answer.
    Refused,
    /// A request that the peer has taken back. It counts against the backlog until the program lets go of it: peers that
    /// come and go must not fill the channel of a program that does not look.
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
    /// Somebody holds an id of it and wants its events.
    pub(super) owned: bool,
    /// A request that counts against the backlog of this listener.
    pub(super) waiting_at: Option<u64>,
    /// The manager has answered it, and no program has seen it.
    pub(super) unseen: bool,
    /// Its place among those that give way.
    pub(super) yielding: Option<u64>,
    /// `local_qpn` was reserved for a queue pair that is made later, or was made.
    pub(super) reserved: bool,
    /// It counts among those that its peer has begun and not completed.
    pub(super) half_open: bool,
    pub(super) transaction: u64,
    pub(super) peer: Gid,
    /// 0 as long as it is not known; nobody gives that number.
    pub(super) remote_id: CommId,
    pub(super) local_qpn: Qpn,
    pub(super) remote_qpn: Option<Qpn>,
    /// What we begin to send with, once it is known.
    pub(super) sq_psn: Psn,
    /// What the peer begins to send with.
    pub(super) rq_psn: Psn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    /// Of our queue pair.
    pub(super) rnr_retry: u8,
    pub(super) mtu: Mtu,
    /// What our packets carry.
    pub(super) traffic: Traffic,
    pub(super) ack_timeout: AckTimeout,
    /// Time to wait before a response is repeated, and how often it is.
    pub(super) response_timeout: u64,
    pub(super) retries: u8,
    /// Repetitions of what was sent last.
    pub(super) repeated: u8,
    /// When the program gives up its request, if there is no answer.
    pub(super) give_up: u64,
    pub(super) deadline: Option<u64>,
    /// Sent last; sent again when its answer does not come, or the peer repeats what it answers.
    pub(super) last: Option<Message>,
    /// What the peer said of itself.
    pub(super) params: Option<CmPeer>,
    pub(super) addresses: (SocketAddr, SocketAddr),
}

impl Connection {
    /// Takes what a request says.
    pub(super) fn of_request(
        req: &Req,
        transaction: u64,
        rq_psn: Psn,
        response_timeout: u64,
    ) -> Self {
        Self {
            state: State::ReqRcvd,
            owned: true,
            waiting_at: None,
            unseen: false,
            yielding: None,
            reserved: false,
            half_open: true,
            transaction,
            peer: req.local_gid,
            remote_id: req.local_id,
            local_qpn: Qpn(0),
            remote_qpn: Some(req.qpn),
            sq_psn: req.starting_psn,
            rq_psn,
            // What the peer issues is what we serve, and the reverse.
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry: req.rnr_retry,
            mtu: req.mtu,
            traffic: req.traffic,
            ack_timeout: req.ack_timeout,
            response_timeout,
            retries: req.max_retries & 15,
            repeated: 0,
            give_up: u64::MAX,
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

    /// Takes what a response says.
    pub(super) fn on_response(&mut self, rep: &Rep) {
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

    /// Attributes for RTR and RTS; `None` where the peer is not known or the connection over.
    pub(super) fn qp_attr(&self, state: QpState) -> Option<QpAttr> {
        let known = matches!(
            self.state,
            State::RepRcvd | State::ReqRcvd | State::RepSent | State::Established
        );
        let dest_qpn = self.remote_qpn.filter(|_| known)?;
        match state {
            QpState::Rtr => Some(QpAttr {
                address: Some(AddressVector {
                    service_level: self.traffic.service_level,
                    traffic_class: self.traffic.traffic_class,
                    flow_label: self.traffic.flow_label,
                    // How far it is the peer does not know better.
                    ..AddressVector::new(PORT, 0, self.peer)
                }),
                path_mtu: Some(self.mtu),
                dest_qpn: Some(dest_qpn),
                rq_psn: Some(self.rq_psn),
                max_dest_rd_atomic: Some(self.responder_resources),
                // As the kernel's: 655 ms, for the layer above to replace.
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
