//! Queries for the queue pair that serves datagrams (SIDR, IBTA 12.11): a request and its answer.
//!
//! The passive side forgets a query when it has answered. If the answer is lost, the peer repeats
//! the request, and the program answers again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use rdma_provider::VerbError;
use rdma_provider::cm_contract::{CmParams, CmPeer};
use rdma_provider::types::{Gid, Mtu, Qkey, Qpn, RejectReason};

use super::machine::{Destination, Event, Listener, Machine, Output, backoff, invalid};
use super::mad::UDP_SERVICE;
use super::message::{CommId, Mad, Message, Private, SidrRep, SidrReq, SidrStatus};
use crate::net::ports::covers;

/// The services of this side, and the queries of both sides.
#[derive(Debug, Default)]
pub(super) struct Sidr {
    services: BTreeMap<u64, Listener>,
    /// Sent by this side, until they are answered.
    queries: BTreeMap<CommId, Query>,
    /// Received from peers, until the program answers.
    requests: BTreeMap<CommId, Request>,
    /// The requests by the peer's id, to recognise duplicates.
    by_peer: BTreeMap<(Gid, CommId), CommId>,
    timers: BTreeSet<(u64, CommId)>,
}

#[derive(Debug)]
struct Query {
    peer: Gid,
    transaction: u64,
    request: SidrReq,
    retransmissions: u8,
    deadline: u64,
    gives_up_at: u64,
}

#[derive(Debug)]
struct Request {
    service: u64,
    listener: u64,
    peer: Gid,
    request_id: CommId,
    transaction: u64,
    addresses: (SocketAddr, SocketAddr),
}

impl Sidr {
    pub(super) fn contains(&self, id: CommId) -> bool {
        self.queries.contains_key(&id) || self.requests.contains_key(&id)
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        self.timers.first().map(|&(at, _)| at)
    }

    pub(super) fn stop_serving(&mut self, listener: u64) {
        self.services.remove(&listener);
    }

    /// Returns the addresses and the peer of a request that the program has not answered.
    pub(super) fn request(&self, id: CommId) -> Option<((SocketAddr, SocketAddr), Gid)> {
        self.requests.get(&id).map(|request| (request.addresses, request.peer))
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 4] {
        [self.queries.len(), self.requests.len(), self.by_peer.len(), self.timers.len()]
    }
}

impl Machine {
    /// Announces requests at a UDP port to the program.
    pub(super) fn serve(&mut self, listener: u64, address: SocketAddr, backlog: u32) {
        let service = Listener { address, backlog, waiting: 0, admit: None };
        self.sidr.services.insert(listener, service);
    }

    /// Asks for the queue pair that serves datagrams at an address.
    pub(super) fn query(
        &mut self,
        now: u64,
        to: Destination,
        params: &CmParams<'_>,
    ) -> Result<CommId, VerbError> {
        let private_data = Private::new(params.private_data).ok_or(invalid("rdma_connect"))?;
        let (id, transaction) = (self.new_id(), self.new_transaction());
        let request = SidrReq {
            request_id: id,
            pkey: to.pkey,
            service: UDP_SERVICE | u64::from(to.peer.port()),
            addresses: Some((to.local, to.peer.ip())),
            private_data,
        };
        let timeout = u64::try_from(params.timeout.as_nanos()).unwrap_or(u64::MAX);
        let query = Query {
            peer: to.gid,
            transaction,
            request,
            retransmissions: 0,
            deadline: 0,
            gives_up_at: now.saturating_add(timeout),
        };
        self.sidr.queries.insert(id, query);
        self.send_query(now, id);
        Ok(id)
    }

    /// Sends a query, and schedules its repetition.
    fn send_query(&mut self, now: u64, id: CommId) {
        let Some(query) = self.sidr.queries.get_mut(&id) else { return };
        let wait = backoff(id, query.retransmissions);
        query.deadline = now.saturating_add(wait).min(query.gives_up_at);
        self.sidr.timers.insert((query.deadline, id));
        let message = Message::SidrReq(Box::new(query.request.clone()));
        let mad = Mad { transaction: query.transaction, message };
        self.out.push_back(Output::Send { to: query.peer, mad });
    }

    pub(super) fn on_query_timer(&mut self, now: u64) {
        while let Some(&(at, id)) = self.sidr.timers.first() {
            if at > now {
                return;
            }
            self.sidr.timers.pop_first();
            let Some(query) = self.sidr.queries.get_mut(&id) else { continue };
            query.retransmissions = query.retransmissions.saturating_add(1);
            if now < query.gives_up_at {
                self.send_query(now, id);
            } else {
                self.end_query(id, Event::Unreachable);
            }
        }
    }

    /// Reports the end of a query to the program.
    fn end_query(&mut self, id: CommId, event: Event) {
        self.forget_query(id);
        self.out.push_back(Output::Event { connection: id, event });
    }

    fn forget_query(&mut self, id: CommId) {
        if let Some(query) = self.sidr.queries.remove(&id) {
            self.sidr.timers.remove(&(query.deadline, id));
        }
    }

    pub(super) fn on_sidr_rep(&mut self, from: Gid, transaction: u64, rep: &SidrRep) {
        let id = rep.request_id;
        let Some(query) = self.sidr.queries.get(&id) else { return };
        if (query.peer, query.transaction) != (from, transaction) {
            return;
        }
        let event = match rep.status {
            SidrStatus::VALID if rep.qpn.0 > 1 && rep.qpn != Qpn::MULTICAST => {
                Event::ServiceFound {
                    peer: from,
                    qpn: rep.qpn,
                    qkey: rep.qkey,
                    private_data: rep.private_data.bytes().to_vec(),
                }
            }
            // A queue pair that cannot serve.
            SidrStatus::VALID => Event::Rejected(RejectReason::NO_QP, Vec::new()),
            status => Event::Rejected(RejectReason::of_sidr(status.0), Vec::new()),
        };
        self.end_query(id, event);
    }

    /// Ends a query to a host at which no process has the port.
    pub(super) fn on_query_refusal(&mut self, from: Gid, transaction: u64, id: CommId) {
        let query = self.sidr.queries.get(&id);
        if query.is_some_and(|query| (query.peer, query.transaction) == (from, transaction)) {
            self.end_query(id, Event::PortClosed);
        }
    }

    /// Passes a request to the program, or answers that no service has its id. Beyond a limit, the
    /// request is treated as lost: the peer repeats it.
    pub(super) fn on_sidr_req(
        &mut self,
        from: Gid,
        transaction: u64,
        req: &SidrReq,
        drawn: impl FnOnce() -> Option<CommId>,
    ) {
        if req.request_id == 0 || self.sidr.by_peer.contains_key(&(from, req.request_id)) {
            return;
        }
        let service = req.addresses.and_then(|(source, destination)| {
            let port = u16::try_from(req.service.checked_sub(UDP_SERVICE)?).ok()?;
            let mut services = self.sidr.services.iter_mut();
            let (&key, service) = services.find(|(_, service)| {
                service.address.port() == port && covers(service.address.ip(), destination)
            })?;
            Some((key, service, (SocketAddr::new(destination, port), source)))
        });
        let Some((listener, service, addresses)) = service else {
            let rep = SidrRep {
                request_id: req.request_id,
                status: SidrStatus::UNSUPPORTED,
                qpn: Qpn(0),
                service: req.service,
                qkey: Qkey(0),
                private_data: Private::empty(),
            };
            return self.send_to(from, transaction, Message::SidrRep(Box::new(rep)));
        };
        if service.waiting >= service.backlog || !self.half_open.open(from) {
            return;
        }
        service.waiting += 1;
        let id = self.new_id_from(drawn());
        self.sidr.by_peer.insert((from, req.request_id), id);
        let request = Request {
            service: req.service,
            listener,
            peer: from,
            request_id: req.request_id,
            transaction,
            addresses,
        };
        self.sidr.requests.insert(id, request);
        let peer = CmPeer {
            private_data: req.private_data.bytes().to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            srq: false,
        };
        self.out.push_back(Output::Request { listener, connection: id, peer });
    }

    /// Answers a request with the queue pair that serves datagrams.
    pub(super) fn answer_query(
        &mut self,
        id: CommId,
        (qpn, qkey): (Qpn, Qkey),
        private_data: &[u8],
    ) -> Result<(), VerbError> {
        let private_data = Private::new(private_data).ok_or(invalid("rdma_accept"))?;
        let answered = self.end_request(id, SidrStatus::VALID, (qpn, qkey), private_data);
        if answered { Ok(()) } else { Err(invalid("rdma_accept")) }
    }

    /// Refuses a request. Returns false if there is none.
    pub(super) fn refuse_query(&mut self, id: CommId) -> bool {
        self.end_request(id, SidrStatus::REJECTED, (Qpn(0), Qkey(0)), Private::empty())
    }

    /// Handles the drop of the program's id. Returns false if it is no query's.
    pub(super) fn release_query(&mut self, id: CommId) -> bool {
        let known = self.sidr.contains(id);
        self.forget_query(id);
        self.refuse_query(id);
        known
    }

    fn end_request(
        &mut self,
        id: CommId,
        status: SidrStatus,
        (qpn, qkey): (Qpn, Qkey),
        private_data: Private<{ rdma_provider::cm_contract::MAX_FOUND_DATA }>,
    ) -> bool {
        let Some(request) = self.sidr.requests.remove(&id) else { return false };
        let Request { service, listener, peer, request_id, transaction, .. } = request;
        self.sidr.by_peer.remove(&(peer, request_id));
        self.half_open.close(peer);
        if let Some(listener) = self.sidr.services.get_mut(&listener) {
            listener.waiting -= 1;
        }
        let rep = SidrRep { request_id, status, qpn, service, qkey, private_data };
        self.send_to(peer, transaction, Message::SidrRep(Box::new(rep)));
        true
    }

    fn send_to(&mut self, to: Gid, transaction: u64, message: Message) {
        self.out.push_back(Output::Send { to, mad: Mad { transaction, message } });
    }

    /// Returns the addresses of a request of a peer, its GID and the path MTU.
    pub(super) fn request_path(
        &self,
        id: CommId,
    ) -> Option<((SocketAddr, SocketAddr), (Gid, Mtu))> {
        match self.connection(id) {
            Some(known) => Some((known.addresses, (known.peer, known.mtu))),
            None => self.sidr.request(id).map(|(addresses, peer)| (addresses, (peer, self.mtu))),
        }
    }
}
