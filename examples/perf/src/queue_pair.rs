//! Work on a queue pair, at both ends.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use tokio::task::consume_budget;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::{Atomic, BatchOp, ConnectOptions, Recv, Send};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{
    Access, Batch, BufMut, CompletionQueue, ExposedRegion, Imm, ProtectionDomain, QueuePair,
    RemoteRegion,
};

use crate::case::{Case, Verb, Work};
use crate::lane::{Held, Seen, compare};
use crate::measure::{Tally, Until};
use crate::meet::End;
use crate::{Failure, Result};

/// Room for answers beside the work.
const BESIDE: usize = 8;

/// A queue pair that is not connected yet, at either end.
#[derive(Debug)]
pub(crate) struct Prepared {
    qp: QueuePair,
    region: ExposedRegion,
    receives: VecDeque<Recv<BufMut>>,
}

/// What is not acknowledged is repeated after half a second instead of 67 ms: the other end may be a process that has to wait
/// for a processor, as those who poll take them all.
pub(crate) fn patient() -> ConnectOptions {
    ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() }
}

/// Completions that one lane's queues can have outstanding.
pub(crate) fn completions(case: &Case) -> usize {
    match case.verb {
        Verb::Messages => crate::messages::COMPLETIONS,
        _ => case.depth + BESIDE + receives(case),
    }
}

/// Messages that may wait for the server's task: twice as many as are in flight, so that those keep coming.
fn window(case: &Case) -> usize {
    2 * case.depth
}

fn receives(case: &Case) -> usize {
    // One more is the last that came, which is kept to be looked at.
    if case.verb.two_sided() { window(case).max(BESIDE) + 1 } else { 1 }
}

impl Prepared {
    /// With receives posted, before the peer can send. `takes`: bytes of the longest message that comes.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        queue: &CompletionQueue,
        case: &Case,
        peer: Option<IpAddr>,
        takes: usize,
    ) -> Result<Self> {
        let builder = QueuePair::builder(pd, queue)
            .max_send_wr(u32::try_from(case.depth + BESIDE)?)
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
                receives.push_back(qp.recv(pd.register(HostMemory::zeroed(takes)?)?));
            }
        }
        Ok(Self { qp, region, receives })
    }

    /// What the peer needs to know.
    pub(crate) fn end(&self) -> End {
        End::QueuePair(self.qp.endpoint(), self.region.grant())
    }

    /// Connects to the peer's; its memory.
    fn connect(&self, peer: &End) -> Result<RemoteRegion> {
        let End::QueuePair(endpoint, remote) = peer else {
            return Err(crate::meet::unexpected(peer));
        };
        self.qp.connect_with(endpoint, &patient())?;
        Ok(*remote)
    }
}

/// Bytes of the longest message that comes to the client, and to the server.
pub(crate) fn takes(case: &Case) -> [usize; 2] {
    match (case.verb, case.work) {
        (Verb::Send, Work::Latency) => [case.size, case.size],
        (Verb::Send, Work::Bandwidth) => [1, case.size],
        // Data go to their place in memory; the receive only tells of it.
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
    /// What is sent from, or read into: for each operation in flight, or for each batch, which has several.
    buffers: VecDeque<(usize, Vec<BufMut>)>,
    receives: VecDeque<Recv<BufMut>>,
    /// Messages that the server has not acknowledged.
    unacknowledged: usize,
    /// The last answer.
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
            (Work::Latency, Verb::Send | Verb::WriteImm) => self.ask(until, &mut tally).await?,
            _ => self.keep_in_flight(until, &mut tally).await?,
        }
        Ok(tally)
    }

    /// Sends, and waits for the answer.
    async fn ask(&mut self, until: Until, tally: &mut Tally) -> Result<()> {
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
                return Err(format!("an answer of {length} bytes to {}", self.case.size).into());
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

    /// A buffer for answers.
    fn spare(&self) -> Result<BufMut> {
        Ok(self.qp.protection_domain().register(HostMemory::zeroed(takes(&self.case)[0])?)?)
    }

    /// Posts as many operations as may be in flight, and another for each that is done.
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
            // Operations that are complete when they have been posted would keep other lanes from their turn.
            consume_budget().await;
        }
        Ok(())
    }

    /// True if the server has receives for another batch.
    fn may_send(&self) -> bool {
        !self.is_acknowledged() || self.unacknowledged + self.case.batch <= window(&self.case)
    }

    async fn await_acknowledgement(&mut self) -> Result<()> {
        let received = self.receives.pop_front().ok_or("no receive")?.await?;
        self.unacknowledged -= self.case.credit();
        let mut buffer = received.buffer;
        buffer.resize(buffer.capacity())?;
        self.receives.push_back(self.qp.recv(buffer));
        Ok(())
    }

    /// Posts the operation, or the batch, that begins at `slot`. Calling posts: it is in flight when this returns.
    fn post(&mut self, slot: usize, mut buffers: Vec<BufMut>) -> Result<Posted> {
        let (qp, case, before) = (&self.qp, &self.case, self.operations);
        // In the order in which they are posted, which is that in which they are done.
        self.operations += case.batch as u64;
        if self.is_acknowledged() {
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
                    other => return Err(format!("there are no batches of {other}").into()),
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
                Posted::One(qp.write_with_imm(buffer, remote, imm(slot)), buffers)
            }
            (Verb::Read, _) => Posted::One(qp.read(buffer, remote), buffers),
            (other, _) => return Err(format!("{other} is done otherwise").into()),
        })
    }

    /// True if the server says each so many messages that it has taken them.
    fn is_acknowledged(&self) -> bool {
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
                        true => compare("what was read", buffer, case, slot),
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
                // The answer to a READ says that the WRITEs before it are in place, which their own completions do not.
                let buffer = self.qp.protection_domain().register(HostMemory::zeroed(1)?)?;
                self.qp.read(buffer, self.remote.slice(..1)?).await?;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// An operation in flight, and the empty list that its buffer was taken from and comes back in.
enum Posted {
    /// One that gives its buffer back.
    One(Send<BufMut>, Vec<BufMut>),
    /// One that copied its data while it was posted.
    Inline(Send<()>, BufMut, Vec<BufMut>),
    /// One that must find the word as the one before has left it.
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
                found => Err(format!("the word was {found} instead of {before}").into()),
            },
            Self::Batch(operation) => Ok(operation.await.into_buffers()?),
        }
    }
}

/// Tells the server which of the slots was written.
fn imm(slot: usize) -> Imm {
    Imm(u32::try_from(slot).unwrap_or(u32::MAX))
}

// The server.

/// The end that answers, or whose memory is reached.
#[derive(Debug)]
pub(crate) struct Server {
    case: Case,
    qp: QueuePair,
    region: ExposedRegion,
    seen: Seen,
}

impl Server {
    /// Connects, and gives what is to be done at this end, until it is dropped.
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
        let server = Self { case: case.clone(), qp, region, seen: Seen::default() };
        let answering =
            answer(server.qp.clone(), receives, remote, case.clone(), server.seen.clone());
        Ok((server, answering))
    }

    pub(crate) async fn check(&self, operations: u64) -> Result<()> {
        let case = &self.case;
        let used = usize::try_from(operations)?.min(case.depth);
        match case.verb {
            Verb::Send => self.seen.check(case, operations).await,
            Verb::Write => compare_region("what was written", &self.region, case, used),
            Verb::WriteImm => {
                self.seen.check(case, operations).await?;
                compare_region("what was written", &self.region, case, used)
            }
            Verb::CompareSwap | Verb::FetchAdd => match self.region.load(0)? {
                word if word == operations => Ok(()),
                word => Err(format!("the word is {word} after {operations} operations").into()),
            },
            Verb::Read | Verb::Messages => Ok(()),
        }
    }
}

/// Takes messages and answers them, one by one or each so many, until it is dropped.
async fn answer(
    qp: QueuePair,
    mut receives: VecDeque<Recv<BufMut>>,
    remote: RemoteRegion,
    case: Case,
    seen: Seen,
) -> Result<()> {
    // What a WRITE with immediate is answered with.
    let mut reply = qp.protection_domain().register(case.pattern(0).collect::<Vec<_>>())?;
    let mut since = 0;
    while let Some(receive) = receives.pop_front() {
        let received = receive.await?;
        if received.len != case.size {
            return Err(
                format!("a message of {} bytes instead of {}", received.len, case.size).into()
            );
        }
        let mut buffer = received.buffer;
        since += 1;
        match (case.work, case.verb) {
            (Work::Latency, Verb::Send) if case.inline => qp.send_inline(&buffer).await?,
            (Work::Latency, Verb::Send) => buffer = qp.send(buffer).await?,
            (Work::Latency, _) => {
                reply = qp.write_with_imm(reply, remote.slice(..case.size as u64)?, imm(0)).await?
            }
            (Work::Bandwidth, _) if since == case.credit() => {
                qp.send_inline(&[]).await?;
                since = 0;
            }
            (Work::Bandwidth, _) => {}
        }
        let free = match case.verb {
            Verb::Send => seen.message(Held::Buffer(buffer)),
            // It holds nothing: the data are in memory.
            _ => {
                seen.told();
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
