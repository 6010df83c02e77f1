//! What a route asks of a queue pair, and how it is made ready.

use std::time::Duration;

use crate::dispatch::CmId;
use crate::error::{LimitError, SetupError};
use crate::op::{ConnectOptions, QueuePair};
use crate::types::{Gid, PortNum, QpState, TransitionError, Transport};
use crate::verbs::Device;
use rdma_provider::cm_contract::{CmAnswer, CmId as _, CmParams, CmPeer, CmRoute};

use super::error::ConnectError;
use super::options::Options;

/// Port and GID that a queue pair has to send from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Path {
    pub(super) port: PortNum,
    pub(super) gid: Gid,
    pub(super) gid_index: u8,
}

impl Path {
    /// The entry of the device's GID table that the manager means.
    pub(super) fn find(device: &Device, route: &CmRoute) -> Result<Self, ConnectError> {
        let ranked = device.gids(route.port, Some(route.destination))?;
        let entry = ranked.iter().find(|other| other.entry.gid == route.source);
        let entry = entry.ok_or(SetupError::NoGid { port: route.port.0 })?.entry;
        Ok(Self { port: route.port, gid: entry.gid, gid_index: entry.index })
    }

    /// Refuses queue pairs that cannot be connected over it.
    pub(super) fn check(&self, device: &Device, queue_pair: &QueuePair) -> Result<(), SetupError> {
        let mismatch =
            |what, ours: String, theirs: String| Err(SetupError::Mismatch { what, ours, theirs });
        if !queue_pair.protection_domain().device().same(device) {
            return Err(SetupError::Foreign { what: "queue pair" });
        }
        if queue_pair.transport() != Transport::Rc {
            return mismatch("transport", format!("{:?}", queue_pair.transport()), "Rc".to_owned());
        }
        let (port, entry) = queue_pair.path();
        if port != self.port {
            return mismatch(
                "port of the queue pair (see prepare)",
                port.to_string(),
                self.port.to_string(),
            );
        }
        if entry.gid != self.gid {
            return mismatch(
                "GID of the queue pair (see prepare)",
                entry.gid.to_string(),
                self.gid.to_string(),
            );
        }
        match queue_pair.query()?.0 {
            QpState::Init => Ok(()),
            actual => Err(TransitionError::NotInState { claimed: QpState::Init, actual }.into()),
        }
    }
}

/// Retries proposed to the peer's queue pair. A peer without options of its own takes them over: SoftRoCE would take 7 for
/// without end and never notice that we are gone.
const PEER_RETRIES: u8 = 6;
/// Without end: how long this side takes to post a receive is for deadlines of the service.
const PEER_RNR_RETRIES: u8 = 7;

/// READs and atomics that we serve and issue at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reads {
    pub(super) serve: u8,
    pub(super) issue: u8,
}

impl Reads {
    /// As many as `options` ask for, or as the device can.
    pub(super) fn of(device: &Device, options: &Options) -> Result<Self, LimitError> {
        let (serve, issue) = (device.attr().max_qp_rd_atom, device.attr().max_qp_init_rd_atom);
        let Some(asked) = options.reads_asked() else { return Ok(Self { serve, issue }) };
        LimitError::check("reads", asked.into(), serve.min(issue).into())?;
        Ok(Self { serve: asked, issue: asked })
    }

    /// No more than the peer asks for, or can.
    pub(super) fn agreed(self, peer: &CmPeer) -> Self {
        Self {
            serve: self.serve.min(peer.responder_resources),
            issue: self.issue.min(peer.initiator_depth),
        }
    }

    /// What travels: none of our [`ConnectOptions`], which are about what this side waits for.
    pub(super) fn params<'a>(
        self,
        queue_pair: &QueuePair,
        private_data: &'a [u8],
        deadline: Duration,
    ) -> CmParams<'a> {
        CmParams {
            qpn: queue_pair.qpn(),
            private_data,
            responder_resources: self.serve,
            initiator_depth: self.issue,
            retry_count: PEER_RETRIES,
            rnr_retry: PEER_RNR_RETRIES,
            // The layer above ends earlier, and has the better error.
            timeout: deadline.saturating_add(Duration::from_secs(1)),
            srq: queue_pair.shares_receives(),
        }
    }
}

impl Reads {
    /// What the provider answers in place of the program, with the same numbers as [`params`](Self::params).
    pub(super) const fn answer(self, private_data: Vec<u8>) -> CmAnswer {
        CmAnswer {
            private_data,
            responder_resources: self.serve,
            initiator_depth: self.issue,
            retry_count: PEER_RETRIES,
            rnr_retry: PEER_RNR_RETRIES,
        }
    }
}

/// Takes a queue pair from INIT to RTS, by the manager's attributes and our own timers.
pub(super) fn make_ready(
    id: &CmId,
    queue_pair: &QueuePair,
    reads: Reads,
    transport: ConnectOptions,
) -> Result<(), ConnectError> {
    let mut receive = id.qp_attr(QpState::Rtr)?;
    receive.min_rnr_timer = Some(transport.rnr_timer);
    receive.max_dest_rd_atomic = Some(reads.serve);
    queue_pair.modify(&receive)?;
    let mut send = id.qp_attr(QpState::Rts)?;
    send.timeout = Some(transport.timeout);
    send.retry_count = Some(transport.retry_count);
    send.rnr_retry = Some(transport.rnr_retry);
    send.max_rd_atomic = Some(reads.issue);
    queue_pair.modify(&send)?;
    Ok(())
}
