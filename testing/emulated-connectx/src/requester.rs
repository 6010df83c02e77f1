//! The requester: executes requests of send queues.

use std::time::{Duration, Instant};

use crate::abi::{access, state};
use crate::control::{self, Status};
use crate::cqe::{Arrived, Cqe, Opcode};
use crate::lint::Problem;
use crate::memory::Buffer;
use crate::objects::{Attempt, Handle, Kind, Qp, Ring};
use crate::port::{self, MAX_DATAGRAM, MAX_MESSAGE};
use crate::responder::{self, Answer};
use crate::state::State;
use crate::wqe::{BLOCK, Control, Data, Local, Operation, Send};

#[derive(Debug)]
enum Outcome {
    /// Success, with the number of bytes returned by the peer.
    Done(u32),
    /// Success; the CQE carries the data returned by the peer.
    Data(Vec<u8>),
    /// RNR NAK: the peer has no receive and asks for a wait of so many microseconds.
    NotReady(u64),
    NoAnswer,
    Failed(Status),
}

impl From<Status> for Outcome {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

impl State {
    /// Executes up to `limit` requests of `handle`; returns whether it made progress.
    ///
    /// `patient`: observe the waits between attempts.
    pub(crate) fn run_send_queue(&mut self, handle: Handle, limit: usize, patient: bool) -> bool {
        for done in 0..limit {
            if !self.run_request(handle, patient) {
                return done > 0;
            }
        }
        true
    }

    /// Makes one attempt at the request at the head; returns `false` if there is none or its wait
    /// is not over.
    fn run_request(&mut self, handle: Handle, patient: bool) -> bool {
        let Some(qp) = self.qps.get_mut(&handle) else { return false };
        // The history is long; the requester needs only the state of the queue pair.
        let history = std::mem::take(&mut qp.history);
        let copied = qp.clone();
        qp.history = history;
        let qp = copied;
        let runs = qp.state == state::RTS || qp.state == state::SQD && qp.draining;
        let Some(sq) = qp.sq.filter(|_| runs) else {
            self.ready.remove(&handle);
            return false;
        };
        let posted = sq.posted();
        if posted == 0 {
            self.ready.remove(&handle);
            return false;
        }
        if patient && qp.attempt.not_before.is_some_and(|at| at > Instant::now()) {
            return false;
        }
        if u32::from(posted) > sq.entries {
            let detail = format!("{posted} WQE blocks posted, capacity {}", sq.entries);
            self.lint.note(qp.number, Problem::QueueOverflow, detail);
        }
        let (control, entry) = read_entry(&sq);
        let blocks = control.blocks().min(posted);
        let history = self.qps.get(&handle).map(|qp| &qp.history);
        if let Some(copy) = history.and_then(|history| history.copy_of(sq.index)) {
            let now = read_blocks(&sq, sq.index, (copy.len() / BLOCK) as u16);
            if let Some(at) = copy.iter().zip(&now).position(|(was, is)| was != is) {
                let detail = format!("WQE {:#x} changed at byte {at}", sq.index);
                self.lint.note(qp.number, Problem::OverwrittenEntry, detail);
            }
        }
        let outcome = match control::fault(&mut self.faults, qp.number) {
            Some(status) => status.into(),
            None => self.attempt(handle, &qp, &control, &entry),
        };
        let (outcome, data) = match outcome {
            Outcome::Data(data) => (Outcome::Done(data.len() as u32), data),
            outcome => (outcome, Vec::new()),
        };
        let status = match outcome {
            Outcome::Done(bytes) => {
                self.advance(handle, blocks);
                if control.signaled {
                    let mut cqe = Cqe::request(qp.uidx, qp.number, sq.index, control.opcode, bytes);
                    if !data.is_empty() {
                        cqe.scatter(&data, qp.scatter[0]);
                    }
                    self.complete(qp.send_cq, qp.number, cqe);
                }
                if qp.draining {
                    self.drained(handle);
                }
                return true;
            }
            Outcome::Data(_) => unreachable!("replaced above"),
            Outcome::NotReady(wait) => {
                self.counters.rnr_naks += 1;
                let naks = qp.attempt.rnr_naks + 1;
                // 7 means infinite retries.
                if qp.attr.rnr_retry == 7 || naks <= u32::from(qp.attr.rnr_retry) {
                    let wait = Duration::from_micros(wait).min(self.options.longest_rnr_wait);
                    self.set_attempt(
                        handle,
                        Attempt {
                            rnr_naks: naks,
                            timeouts: 0,
                            not_before: Some(Instant::now() + wait),
                        },
                    );
                    return true;
                }
                Status::RnrRetryExceeded
            }
            Outcome::NoAnswer => {
                self.counters.timeouts += 1;
                let timeouts = qp.attempt.timeouts + 1;
                let longest = self.options.longest_timeout;
                let wait = ack_timeout(qp.attr.timeout).map_or(FOREVER, |wait| wait.min(longest));
                if timeouts <= u32::from(qp.attr.retry_cnt) + 1 {
                    // The first attempt has a timeout, like each retry.
                    let not_before = Some(Instant::now() + wait);
                    self.set_attempt(
                        handle,
                        Attempt { rnr_naks: qp.attempt.rnr_naks, timeouts, not_before },
                    );
                    return true;
                }
                Status::RetryExceeded
            }
            Outcome::Failed(status) => status,
        };
        self.advance(handle, blocks);
        let cqe =
            Cqe::error(qp.uidx, Opcode::RequestError, qp.number, sq.index, control.opcode, status);
        self.complete(qp.send_cq, qp.number, cqe);
        match is_unreliable(qp.kind) {
            // Receives continue.
            true => {
                if let Some(qp) = self.qps.get_mut(&handle) {
                    qp.state = state::SQE;
                }
                self.flush(handle);
            }
            false => self.fail_qp(handle),
        }
        true
    }

    fn advance(&mut self, handle: Handle, blocks: u16) {
        self.counters.requests += 1;
        // A queue pair that is its own peer may have failed and been flushed.
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        qp.attempt = Attempt::default();
        if let Some(sq) = &mut qp.sq {
            qp.history.execute(sq.index, read_block(sq, sq.index));
            sq.index = sq.index.wrapping_add(blocks);
        }
    }

    fn set_attempt(&mut self, handle: Handle, attempt: Attempt) {
        if let Some(qp) = self.qps.get_mut(&handle) {
            qp.attempt = attempt;
        }
    }

    fn attempt(&mut self, handle: Handle, qp: &Qp, control: &Control, entry: &[u8]) -> Outcome {
        let index = qp.sq.expect("the caller found a request").index;
        let addressed = matches!(qp.kind, Kind::Ud | Kind::Dci);
        let posted = qp.sq.map_or(0, |sq| sq.posted());
        let checked = check(control, index, qp.number, posted).and_then(|()| {
            Send::parse(control, entry, addressed).map_err(|malformed| malformed.to_string())
        });
        let request = match checked {
            Ok(request) => request,
            Err(detail) => {
                self.lint.note(
                    qp.number,
                    Problem::MalformedWqe,
                    format!("WQE {index:#x}: {detail}"),
                );
                return Status::LocalQueuePairOperation.into();
            }
        };
        if request.operation == Operation::Nop {
            return Outcome::Done(0);
        }
        let unsupported = match qp.kind {
            Kind::Ud => !matches!(request.operation, Operation::Send | Operation::SendImm),
            // SEND with invalidation exists for reliable transports only.
            Kind::Uc => {
                request.operation.writes_locally() || request.operation == Operation::SendInvalidate
            }
            Kind::Rc => request.operation.writes_locally() && qp.attr.max_rd_atomic == 0,
            Kind::Dci | Kind::Dct => false,
        };
        if unsupported {
            return Status::LocalQueuePairOperation.into();
        }
        if let Some(umr) = &request.umr {
            return self.change_window(qp, umr).map_or_else(Outcome::from, |()| Outcome::Done(0));
        }
        let (payload, local) = match self.gather(qp, &request) {
            Ok(data) => data,
            Err(status) => return status.into(),
        };
        let Some(target) = self.target(handle, qp, &request) else {
            return self.unreachable(qp);
        };
        self.establish(target);
        let outcome = self.transfer(qp, target, control, &request, &payload, &local);
        match outcome {
            // Without a CQE, the data goes to memory.
            Outcome::Data(data)
                if !control.signaled || data.is_empty() || data.len() > qp.scatter[0] =>
            {
                responder::scatter(&local, &data);
                Outcome::Done(data.len() as u32)
            }
            // An unreliable sender does not learn about failures.
            Outcome::NotReady(_) | Outcome::NoAnswer | Outcome::Failed(_)
                if is_unreliable(qp.kind) =>
            {
                self.unreachable(qp)
            }
            outcome => outcome,
        }
    }

    fn unreachable(&mut self, qp: &Qp) -> Outcome {
        if is_unreliable(qp.kind) {
            self.counters.dropped += 1;
            return Outcome::Done(0);
        }
        Outcome::NoAnswer
    }

    /// Returns the bytes to send, and the buffers for returned data.
    fn gather(&self, qp: &Qp, request: &Send) -> Result<(Vec<u8>, Vec<Buffer>), Status> {
        let wanted = if request.operation.writes_locally() { access::LOCAL_WRITE } else { 0 };
        let (mut payload, mut buffers, mut len) = (Vec::new(), Vec::new(), 0);
        let longest = if qp.kind == Kind::Ud { MAX_DATAGRAM } else { MAX_MESSAGE };
        for data in &request.data {
            let buffer = match data {
                Data::Inline(bytes) => {
                    len += bytes.len() as u64;
                    payload.extend_from_slice(bytes);
                    continue;
                }
                Data::Memory(local) => self.readable(qp, local, wanted)?,
            };
            len += buffer.len();
            // Checked before copying.
            if len > longest {
                return Err(Status::LocalLength);
            }
            match wanted {
                0 => payload.extend(buffer.bytes()),
                _ => buffers.push(buffer),
            }
        }
        match request.operation.is_atomic() && len != 8 {
            true => Err(Status::LocalLength),
            false => Ok((payload, buffers)),
        }
    }

    fn readable(&self, qp: &Qp, local: &Local, wanted: u32) -> Result<Buffer, Status> {
        self.local(qp.pd, local, wanted).ok_or(Status::LocalProtection)
    }

    /// Returns the peer, if it exists and accepts the request.
    fn target(&self, handle: Handle, qp: &Qp, request: &Send) -> Option<Handle> {
        if !self.port_up[qp.device] || self.lost[qp.device] {
            return None;
        }
        let (device, number) = match &request.address {
            Some(to) => (self.device_at(to.lid, to.route.as_ref().map(|route| &route.gid)), to.qpn),
            None => {
                let dest = &qp.attr.dest;
                (
                    self.device_at(dest.dlid, (dest.is_global != 0).then_some(&dest.dgid)),
                    qp.attr.dest_qpn,
                )
            }
        };
        let target = *self.qp_by_number.get(&number)?;
        let peer = &self.qps[&target];
        let expected = match qp.kind {
            Kind::Dci => Kind::Dct,
            kind => kind,
        };
        let knows = match qp.kind {
            Kind::Rc | Kind::Uc => peer.attr.dest_qpn == qp.number,
            Kind::Dci => request.address.is_some_and(|to| to.key == peer.dc_key),
            // The high bit of the Q_Key selects the sender's own.
            Kind::Ud => request.address.is_some_and(|to| {
                let given = (to.key >> 32) as u32;
                let key = if given >> 31 == 1 { qp.attr.qkey } else { given };
                key == peer.attr.qkey
            }),
            Kind::Dct => false,
        };
        let there =
            peer.kind == expected && peer.responds() && Some(peer.device) == device && knows;
        // RC, UC and UD queue pairs may address themselves: the checks above have shown that the
        // number is meant.
        (there && (target != handle || matches!(qp.kind, Kind::Rc | Kind::Uc | Kind::Ud)))
            .then_some(target)
    }

    fn transfer(
        &mut self,
        qp: &Qp,
        target: Handle,
        control: &Control,
        request: &Send,
        payload: &[u8],
        local: &[Buffer],
    ) -> Outcome {
        let arrived = Arrived {
            source_qpn: qp.number,
            source_lid: self.port(qp.device).lid(),
            service_level: request.address.map_or(qp.attr.dest.sl, |to| to.service_level),
            has_grh: request.address.is_some_and(|to| to.route.is_some()),
            immediate: control.immediate,
            bytes: 0,
            solicited: control.solicited,
        };
        match request.operation {
            // Executed without a peer.
            Operation::Nop | Operation::Umr => Outcome::Done(0),
            Operation::Send | Operation::SendImm | Operation::SendInvalidate => {
                let opcode = match request.operation {
                    Operation::SendImm => Opcode::SendImm,
                    Operation::SendInvalidate => Opcode::SendInvalidate,
                    _ => Opcode::Send,
                };
                let header = match qp.kind {
                    Kind::Ud => {
                        let route = request.address.and_then(|to| to.route);
                        let port = self.port(qp.device);
                        responder::datagram_header(
                            self.options.link,
                            &port,
                            route.as_ref(),
                            payload.len(),
                        )
                        .to_vec()
                    }
                    _ => Vec::new(),
                };
                debug_assert!(header.is_empty() || header.len() as u64 == responder::GRH);
                let answer = self.deliver(target, opcode, arrived, &header, payload);
                self.outcome(target, answer)
            }
            Operation::Write | Operation::WriteImm => {
                let remote = request.remote.expect("a WRITE has a remote address");
                let wanted = responder::wanted(request.operation);
                let takes_receive = request.operation == Operation::WriteImm;
                if takes_receive && !self.has_receive(target) {
                    return self.outcome(target, Answer::NotReady);
                }
                let memory =
                    match self.remote(target, &remote, payload.len() as u64, wanted, takes_receive)
                    {
                        Ok(memory) => memory,
                        Err(status) => {
                            if takes_receive && status == Status::RemoteAccess {
                                self.refuse_receive(target, Status::LocalAccess);
                            }
                            return status.into();
                        }
                    };
                if let Some(memory) = memory {
                    memory.write(0, payload);
                }
                if request.operation == Operation::Write {
                    return Outcome::Done(0);
                }
                let answer = self.deliver_immediate(target, arrived, payload.len());
                self.outcome(target, answer)
            }
            Operation::Read => {
                let remote = request.remote.expect("a READ has a remote address");
                let len: u64 = local.iter().map(Buffer::len).sum();
                match self.remote(target, &remote, len, responder::wanted(request.operation), false)
                {
                    Ok(memory) => {
                        Outcome::Data(memory.map(|memory| memory.bytes()).unwrap_or_default())
                    }
                    Err(status) => status.into(),
                }
            }
            Operation::CompareSwap | Operation::FetchAdd => self.atomic(target, request),
        }
    }

    fn atomic(&mut self, target: Handle, request: &Send) -> Outcome {
        let remote = request.remote.expect("an atomic operation has a remote address");
        let [new, compare] = request.operands;
        if !remote.address.is_multiple_of(8) {
            self.qp_event(target, crate::abi::event::QP_REQ_ERR);
            self.fail_qp(target);
            return Status::RemoteInvalidRequest.into();
        }
        let memory =
            match self.remote(target, &remote, 8, responder::wanted(request.operation), false) {
                Ok(memory) => memory.expect("a length of eight bytes"),
                Err(status) => return status.into(),
            };
        // The addresses in a region may differ in alignment from its memory.
        if !memory.address().is_multiple_of(8) {
            return Status::RemoteInvalidRequest.into();
        }
        let old = match request.operation {
            Operation::FetchAdd => memory.atomic(|old| old.wrapping_add(new)),
            _ => memory.atomic(|old| if old == compare { new } else { old }),
        };
        Outcome::Data(old.to_ne_bytes().to_vec())
    }

    fn refuse_receive(&mut self, target: Handle, status: Status) -> Answer {
        let wqe = match self.take_receive(target) {
            responder::Receive::None => return Answer::NotReady,
            responder::Receive::Taken { wqe, .. } | responder::Receive::Refused { wqe } => wqe,
        };
        let qp = &self.qps[&target];
        let cqe = Cqe::error(qp.uidx, Opcode::ResponseError, qp.number, wqe, 0, status);
        let (cq, number) = (qp.recv_cq, qp.number);
        self.complete(cq, number, cqe);
        self.fail_qp(target);
        Answer::Failed(status)
    }

    fn has_receive(&self, target: Handle) -> bool {
        let qp = &self.qps[&target];
        match qp.srq {
            Some(srq) => self.srqs.get(&srq).is_some_and(|srq| srq.posted() != 0),
            None => qp.rq.is_some_and(|rq| rq.posted() != 0),
        }
    }

    /// Uses a receive for a WRITE with immediate data, without writing to its buffers.
    fn deliver_immediate(
        &mut self,
        target: Handle,
        mut arrived: Arrived,
        written: usize,
    ) -> Answer {
        let receive = self.take_receive(target);
        let qp = &self.qps[&target];
        let (cq, number, uidx) = (qp.recv_cq, qp.number, qp.uidx);
        match receive {
            responder::Receive::None => Answer::NotReady,
            responder::Receive::Taken { wqe, .. } | responder::Receive::Refused { wqe } => {
                arrived.bytes = written as u32;
                self.complete(
                    cq,
                    number,
                    Cqe::receive(uidx, Opcode::WriteImm, number, wqe, &arrived),
                );
                Answer::Done
            }
        }
    }

    fn outcome(&self, target: Handle, answer: Answer) -> Outcome {
        match answer {
            Answer::Done => Outcome::Done(0),
            Answer::NotReady => Outcome::NotReady(responder::rnr_wait(&self.qps[&target])),
            Answer::Failed(status) => status.into(),
            Answer::Silent => Outcome::NoAnswer,
        }
    }

    /// Flushes what is posted to a queue pair: everything in the error state, only requests in SQE.
    /// Returns whether there was anything.
    pub(crate) fn flush(&mut self, handle: Handle) -> bool {
        let mut any = false;
        loop {
            let stopped = |qp: &&Qp| matches!(qp.state, state::ERR | state::SQE);
            let Some(qp) = self.qps.get(&handle).filter(stopped) else { return any };
            if qp.sq.is_none_or(|sq| sq.posted() == 0) {
                break;
            }
            self.flush_request(handle);
            any = true;
        }
        loop {
            let Some(qp) = self.qps.get_mut(&handle).filter(|qp| qp.state == state::ERR) else {
                return any;
            };
            let (uidx, number, cq) = (qp.uidx, qp.number, qp.recv_cq);
            let Some(rq) = qp.rq.as_mut().filter(|rq| rq.posted() != 0) else { return any };
            let flushed = Status::WorkRequestFlushed;
            let cqe = Cqe::error(uidx, Opcode::ResponseError, number, rq.index, 0, flushed);
            rq.index = rq.index.wrapping_add(1);
            self.complete(cq, number, cqe);
            any = true;
        }
    }

    /// Flushes the request at the head of a send queue, which has one.
    fn flush_request(&mut self, handle: Handle) {
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        let (uidx, number, cq) = (qp.uidx, qp.number, qp.send_cq);
        let Some(sq) = &mut qp.sq else { return };
        let (control, _) = read_entry(sq);
        let flushed = Status::WorkRequestFlushed;
        let cqe = Cqe::error(uidx, Opcode::RequestError, number, sq.index, control.opcode, flushed);
        qp.history.execute(sq.index, read_block(sq, sq.index));
        // A malformed length must not move the index past the producer's.
        sq.index = sq.index.wrapping_add(control.blocks().min(sq.posted()));
        self.complete(cq, number, cqe);
    }
}

fn is_unreliable(kind: Kind) -> bool {
    matches!(kind, Kind::Uc | Kind::Ud)
}

/// Reads the control segment at `index`.
pub(crate) fn read_control(sq: &Ring, index: u16) -> Control {
    Control::parse(&read_block(sq, index))
}

pub(crate) fn read_block(sq: &Ring, index: u16) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    sq.memory.read(sq.offset(index), &mut block);
    block
}

/// Reads `blocks` blocks from `index`, which may wrap around the end of the queue.
pub(crate) fn read_blocks(sq: &Ring, index: u16, blocks: u16) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(usize::from(blocks) * BLOCK);
    for block in 0..blocks {
        let mut next = [0; BLOCK];
        sq.memory.read(sq.offset(index.wrapping_add(block)), &mut next);
        bytes.extend_from_slice(&next);
    }
    bytes
}

/// Reads the WQE at the head of `sq`.
fn read_entry(sq: &Ring) -> (Control, Vec<u8>) {
    let control = read_control(sq, sq.index);
    let mut entry = read_blocks(sq, sq.index, control.blocks());
    entry.truncate(usize::from(control.segments) * 16);
    (control, entry)
}

fn check(control: &Control, index: u16, number: u32, posted: u16) -> Result<(), String> {
    if control.index != index {
        return Err(format!("control segment has index {:#x}", control.index));
    }
    if control.qpn != number {
        return Err(format!("control segment names queue pair {:#x}", control.qpn));
    }
    if control.segments == 0 {
        return Err("control segment has a length of 0".into());
    }
    if control.blocks() > posted {
        return Err(format!("{} blocks long, but only {posted} are posted", control.blocks()));
    }
    Ok(())
}

/// Longer than any test.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// Converts `timeout` of `ibv_modify_qp(3)`. 0 means that the requester waits for ever.
fn ack_timeout(timeout: u8) -> Option<Duration> {
    match timeout & 31 {
        0 => None,
        timeout => Some(Duration::from_nanos(4096 << timeout)),
    }
}

pub(crate) fn mac_of(state: &State, gid: &[u8; 16]) -> Option<[u8; 6]> {
    port::port_with_gid(state.options.link, state.options.devices, gid).map(port::Port::mac)
}
