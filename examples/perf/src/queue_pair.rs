//! Operations of a queue pair, at both ends.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use tokio::task::consume_budget;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::{Atomic, BatchOp, Recv, RetryConfig, Send};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{
    Access, Batch, BufMut, CompletionQueue, ExposedRegion, Imm, ProtectionDomain, QueuePair,
    RemoteRegion,
};

use crate::case::{Case, Verb, Work};
use crate::lane::{Arrivals, Held, compare};
use crate::measure::{Tally, Until};
use crate::meet::End;
use crate::{Failure, Result};

/// Queue entries for answers and checks.
const EXTRA: usize = 8;

#[derive(Debug)]
pub(crate) struct Prepared {
    qp: QueuePair,
    region: ExposedRegion,
    receives: VecDeque<Recv<BufMut>>,
}

/// Returns an ACK timeout of 0.5 s instead of 67 ms: polling threads may occupy all processors.
pub(crate) fn long_ack_timeout() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() }
}

/// Returns the maximum number of outstanding completions of a lane.
pub(crate) fn completions(case: &Case) -> usize {
    match case.verb {
        Verb::Messages => crate::messages::COMPLETIONS,
        _ => case.depth + EXTRA + receives(case),
    }
}

/// Returns the number of messages that may wait for the server's task: twice the depth, so that the
/// client need not wait for an acknowledgement.
fn window(case: &Case) -> usize {
    2 * case.depth
}

fn receives(case: &Case) -> usize {
    // One more, because the last message is kept for the check.
    if case.verb.two_sided() { window(case).max(EXTRA) + 1 } else { 1 }
}

impl Prepared {
    /// Posts receives of `max_message` bytes, before the peer can send.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        queue: &CompletionQueue,
        case: &Case,
        peer: Option<IpAddr>,
        max_message: usize,
    ) -> Result<Self> {
        let builder = QueuePair::builder(pd, queue)
            .max_send_wr(u32::try_from(case.depth + EXTRA)?)
            .max_recv_wr(u32::try_from(receives(case))?)
            .max_sge(1)
            .max_inline(if case.inline { u32::try_from(case.size)? } else { 0 });
        let qp = match peer {
            Some(peer) => builder.peer(peer).build()?,
            None => builder.build()?,
        };
        let region = ExposedRegion::new(
            pd,
            HostMemory::zeroed(case.size * case.depth)?,
            Access::REMOTE_ALL,
        )?;
        let mut receives = VecDeque::new();
        if case.verb.two_sided() {
            for _ in 0..self::receives(case) {
                receives.push_back(qp.recv(pd.register(HostMemory::zeroed(max_message)?)?));
            }
        }
        Ok(Self { qp, region, receives })
    }

    pub(crate) fn end(&self) -> End {
        End::QueuePair(self.qp.endpoint(), self.region.grant())
    }

    fn connect(&self, peer: &End) -> Result<RemoteRegion> {
        let End::QueuePair(endpoint, remote) = peer else {
            return Err(crate::meet::unexpected(peer));
        };
        self.qp.connect_with(endpoint, &long_ack_timeout())?;
        Ok(*remote)
    }
}

/// Returns the length of the longest message that arrives at the client, and at the server.
pub(crate) fn message_limits(case: &Case) -> [usize; 2] {
    match (case.verb, case.work) {
        (Verb::Send, Work::Latency) => [case.size, case.size],
        (Verb::Send, Work::Bandwidth) => [1, case.size],
        // The data is written to memory; the receive stays empty.
        _ => [1, 1],
    }
}

// The client.

/// The end that measures.
#[derive(Debug)]
pub(crate) struct Lane {
    case: Case,
    qp: QueuePair,
    region: ExposedRegion,
    remote: RemoteRegion,
    /// First slot and buffers of each operation, or batch, that is not in flight.
    buffers: VecDeque<(usize, Vec<BufMut>)>,
    receives: VecDeque<Recv<BufMut>>,
    /// Messages that the server has not acknowledged.
    unacknowledged: usize,
    answer: Option<BufMut>,
    pub(crate) operations: u64,
}

impl Lane {
    pub(crate) fn connect(prepared: Prepared, peer: &End, case: &Case) -> Result<Self> {
        let remote = prepared.connect(peer)?;
        let pd = prepared.qp.protection_domain();
        let mut buffers = VecDeque::new();
        for first in (0..case.depth).step_by(case.batch) {
            let buffer = |slot| {
                let mut buffer = pd.register(HostMemory::zeroed(case.size)?)?;
                if case.verb != Verb::Read {
                    buffer
                        .iter_mut()
                        .zip(case.pattern(slot))
                        .for_each(|(byte, value)| *byte = value);
                }
                Ok::<_, Failure>(buffer)
            };
            buffers.push_back((
                first,
                (first..first + case.batch).map(buffer).collect::<Result<_>>()?,
            ));
        }
        let Prepared { qp, region, receives } = prepared;
        let case = case.clone();
        Ok(Self {
            case,
            qp,
            region,
            remote,
            buffers,
            receives,
            unacknowledged: 0,
            answer: None,
            operations: 0,
        })
    }

    pub(crate) async fn run(&mut self, until: Until) -> Result<Tally> {
        let mut tally = Tally::new()?;
        match (self.case.work, self.case.verb) {
            (Work::Latency, Verb::Send | Verb::WriteImm) => {
                self.run_round_trips(until, &mut tally).await?
            }
            _ => self.keep_in_flight(until, &mut tally).await?,
        }
        Ok(tally)
    }

    async fn run_round_trips(&mut self, until: Until, tally: &mut Tally) -> Result<()> {
        let (slot, mut buffers) = self.buffers.pop_front().ok_or("no buffer")?;
        loop {
            let start = Instant::now();
            let posted = self.post(slot, buffers)?;
            let answer = self.receives.pop_front().ok_or("no receive")?.await?;
            let end = Instant::now();
            buffers = posted.done().await?;
            let length = answer.len;
            let mut next = self.answer.replace(answer.buffer).map_or_else(|| self.spare(), Ok)?;
            if length != self.case.size {
                return Err(format!(
                    "expected an answer of {} bytes, got {length}",
                    self.case.size
                )
                .into());
            }
            next.resize(next.capacity())?;
            self.receives.push_back(self.qp.recv(next));
            tally.add(1, end - start)?;
            if until.is_over(end) {
                self.buffers.push_front((slot, buffers));
                return Ok(());
            }
            consume_budget().await;
        }
    }

    fn spare(&self) -> Result<BufMut> {
        Ok(self
            .qp
            .protection_domain()
            .register(HostMemory::zeroed(message_limits(&self.case)[0])?)?)
    }

    /// Keeps the maximum number of operations in flight.
    async fn keep_in_flight(&mut self, until: Until, tally: &mut Tally) -> Result<()> {
        let mut in_flight = VecDeque::with_capacity(self.buffers.len());
        let mut over = false;
        loop {
            while !over && self.may_send() {
                let Some((slot, buffers)) = self.buffers.pop_front() else { break };
                let start = Instant::now();
                in_flight.push_back((slot, start, self.post(slot, buffers)?));
            }
            let Some((slot, start, posted)) = in_flight.pop_front() else { break };
            let buffers = posted.done().await?;
            let end = Instant::now();
            tally.add(self.case.batch, end - start)?;
            self.buffers.push_back((slot, buffers));
            if !self.may_send() {
                self.await_acknowledgement().await?;
            }
            over |= until.is_over(end);
            // Operations that complete while they are posted would starve the other lanes.
            consume_budget().await;
        }
        Ok(())
    }

    /// Returns whether the server has receives for another batch.
    fn may_send(&self) -> bool {
        !self.uses_acknowledgements() || self.unacknowledged + self.case.batch <= window(&self.case)
    }

    async fn await_acknowledgement(&mut self) -> Result<()> {
        let received = self.receives.pop_front().ok_or("no receive")?.await?;
        self.unacknowledged -= self.case.ack_interval();
        let mut buffer = received.buffer;
        buffer.resize(buffer.capacity())?;
        self.receives.push_back(self.qp.recv(buffer));
        Ok(())
    }

    /// Posts the operation, or the batch, that begins at `slot`. It is in flight when this returns.
    fn post(&mut self, slot: usize, mut buffers: Vec<BufMut>) -> Result<Posted> {
        let (qp, case, before) = (&self.qp, &self.case, self.operations);
        // Operations execute in the order in which they are posted.
        self.operations += case.batch as u64;
        if self.uses_acknowledgements() {
            self.unacknowledged += case.batch;
        }
        if case.batch > 1 {
            let mut batch = Batch::new();
            for (slot, buffer) in (slot..).zip(buffers) {
                let remote = self.remote_slot(slot)?;
                match case.verb {
                    Verb::Send => batch.send(buffer),
                    Verb::Write => batch.write(buffer, remote),
                    Verb::WriteImm => batch.write_with_imm(buffer, remote, imm(slot)),
                    Verb::Read => batch.read(buffer, remote),
                    other => return Err(format!("batches of {other} are not supported").into()),
                };
            }
            return Ok(Posted::Batch(qp.post_batch(batch)));
        }
        match case.verb {
            Verb::CompareSwap => {
                return Ok(Posted::Counted(
                    qp.compare_swap(self.word()?, before, before + 1),
                    before,
                    buffers,
                ));
            }
            Verb::FetchAdd => {
                return Ok(Posted::Counted(qp.fetch_add(self.word()?, 1), before, buffers));
            }
            _ => {}
        }
        let buffer = buffers.pop().ok_or("no buffer")?;
        let remote = self.remote_slot(slot)?;
        Ok(match (case.verb, case.inline) {
            (Verb::Send, true) => Posted::Inline(qp.send_inline(&buffer), buffer, buffers),
            (Verb::Write, true) => {
                Posted::Inline(qp.write_inline(&buffer, remote), buffer, buffers)
            }
            (Verb::Send, false) => Posted::One(qp.send(buffer), buffers),
            (Verb::Write, false) => Posted::One(qp.write(buffer, remote), buffers),
            (Verb::WriteImm, _) => {
                Posted::One(qp.with_imm(imm(slot)).write(buffer, remote), buffers)
            }
            (Verb::Read, _) => Posted::One(qp.read(buffer, remote), buffers),
            (other, _) => return Err(format!("{other} is not an operation of a queue pair").into()),
        })
    }

    /// Returns whether the server acknowledges messages in groups.
    fn uses_acknowledgements(&self) -> bool {
        self.case.verb.two_sided() && self.case.work == Work::Bandwidth
    }

    fn remote_slot(&self, slot: usize) -> Result<RemoteRegion> {
        let (start, size) = (slot as u64 * self.case.size as u64, self.case.size as u64);
        Ok(self.remote.slice(start..start + size)?)
    }

    fn word(&self) -> Result<RemoteRegion> {
        Ok(self.remote.slice(..8)?)
    }

    pub(crate) async fn check(&mut self) -> Result<()> {
        let case = &self.case;
        match (case.verb, case.work) {
            (Verb::Read, _) => {
                let used = usize::try_from(self.operations)?.min(case.depth);
                let of = |(first, buffers): &(usize, Vec<BufMut>)| {
                    (*first..).zip(buffers).try_for_each(|(slot, buffer)| match slot < used {
                        true => compare("data read", buffer, case, slot),
                        false => Ok(()),
                    })
                };
                self.buffers.iter().try_for_each(of)
            }
            (Verb::Send, Work::Latency) => match &self.answer {
                Some(answer) => compare("the last answer", answer, case, 0),
                None => Ok(()),
            },
            (Verb::WriteImm, Work::Latency) => {
                compare_region("the last answer", &self.region, case, 1)
            }
            (Verb::Write, _) => {
                // The answer to a READ proves that the WRITEs are in the peer's memory. Their
                // completions do not.
                let buffer = self.qp.protection_domain().register(HostMemory::zeroed(1)?)?;
                self.qp.read(buffer, self.remote.slice(..1)?).await?;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// An operation in flight, with the empty list that its buffer returns to.
enum Posted {
    One(Send<BufMut>, Vec<BufMut>),
    /// The data was copied when the operation was posted.
    Inline(Send<()>, BufMut, Vec<BufMut>),
    /// Must find the word as the previous operation left it.
    Counted(Atomic, u64, Vec<BufMut>),
    Batch(BatchOp<BufMut>),
}

impl Posted {
    async fn done(self) -> Result<Vec<BufMut>> {
        match self {
            Self::One(operation, mut buffers) => {
                buffers.push(operation.await?);
                Ok(buffers)
            }
            Self::Inline(operation, buffer, mut buffers) => {
                operation.await?;
                buffers.push(buffer);
                Ok(buffers)
            }
            Self::Counted(operation, before, buffers) => match operation.await? {
                found if found == before => Ok(buffers),
                found => Err(format!("expected the word {before}, found {found}").into()),
            },
            Self::Batch(operation) => Ok(operation.await.into_buffers()?),
        }
    }
}

/// Returns the immediate that names the written slot.
fn imm(slot: usize) -> Imm {
    Imm(u32::try_from(slot).unwrap_or(u32::MAX))
}

// The server.

/// The end that answers, or whose memory the client accesses.
#[derive(Debug)]
pub(crate) struct Server {
    case: Case,
    qp: QueuePair,
    region: ExposedRegion,
    arrivals: Arrivals,
}

impl Server {
    /// Returns the end, and a future that answers messages until it is dropped.
    pub(crate) fn connect(
        prepared: Prepared,
        peer: &End,
        case: &Case,
    ) -> Result<(Self, impl Future<Output = Result<()>> + std::marker::Send + use<>)> {
        let remote = prepared.connect(peer)?;
        let Prepared { qp, region, receives } = prepared;
        if case.verb == Verb::Read {
            for slot in 0..case.depth {
                region.write(slot * case.size, &case.pattern(slot).collect::<Vec<_>>())?;
            }
        }
        let server = Self { case: case.clone(), qp, region, arrivals: Arrivals::default() };
        let answering =
            answer(server.qp.clone(), receives, remote, case.clone(), server.arrivals.clone());
        Ok((server, answering))
    }

    pub(crate) async fn check(&self, operations: u64) -> Result<()> {
        let case = &self.case;
        let used = usize::try_from(operations)?.min(case.depth);
        match case.verb {
            Verb::Send => self.arrivals.check(case, operations).await,
            Verb::Write => compare_region("data written", &self.region, case, used),
            Verb::WriteImm => {
                self.arrivals.check(case, operations).await?;
                compare_region("data written", &self.region, case, used)
            }
            Verb::CompareSwap | Verb::FetchAdd => match self.region.load(0)? {
                word if word == operations => Ok(()),
                word => Err(format!("the word is {word} after {operations} operations").into()),
            },
            Verb::Read | Verb::Messages => Ok(()),
        }
    }
}

/// Answers messages, one by one or in groups, until it is dropped.
async fn answer(
    qp: QueuePair,
    mut receives: VecDeque<Recv<BufMut>>,
    remote: RemoteRegion,
    case: Case,
    arrivals: Arrivals,
) -> Result<()> {
    // The data that answers a WRITE with immediate.
    let mut reply = qp.protection_domain().register(case.pattern(0).collect::<Vec<_>>())?;
    let mut since = 0;
    while let Some(receive) = receives.pop_front() {
        let received = receive.await?;
        if received.len != case.size {
            return Err(
                format!("expected a message of {} bytes, got {}", case.size, received.len).into()
            );
        }
        let mut buffer = received.buffer;
        since += 1;
        match (case.work, case.verb) {
            (Work::Latency, Verb::Send) if case.inline => qp.send_inline(&buffer).await?,
            (Work::Latency, Verb::Send) => buffer = qp.send(buffer).await?,
            (Work::Latency, _) => {
                reply = qp.with_imm(imm(0)).write(reply, remote.slice(..case.size as u64)?).await?
            }
            (Work::Bandwidth, _) if since == case.ack_interval() => {
                qp.send_inline(&[]).await?;
                since = 0;
            }
            (Work::Bandwidth, _) => {}
        }
        let free = match case.verb {
            Verb::Send => arrivals.record(Held::Buffer(buffer)),
            // The data is in memory; the buffer is empty.
            _ => {
                arrivals.count();
                Some(Held::Buffer(buffer))
            }
        };
        if let Some(Held::Buffer(mut buffer)) = free {
            buffer.resize(buffer.capacity())?;
            receives.push_back(qp.recv(buffer));
        }
    }
    Ok(())
}

fn compare_region(what: &str, region: &ExposedRegion, case: &Case, slots: usize) -> Result<()> {
    let mut bytes = vec![0; case.size];
    for slot in 0..slots {
        region.read(slot * case.size, &mut bytes)?;
        compare(what, &bytes, case, slot)?;
    }
    Ok(())
}
