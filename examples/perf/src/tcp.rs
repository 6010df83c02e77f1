//! The same work over TCP, at both ends.
//!
//! A request consists of two lengths (of its data and of the wanted answer) and the data. Over RDMA
//! the device sends the response to a READ or the acknowledgement of a WRITE; over TCP a task has
//! to.
//!
//! | Operation | Request | Answer |
//! |---|---|---|
//! | send, write-imm, messages (latency) | the data | the data |
//! | send, write, write-imm, messages (bandwidth) | the data | a byte per half of the depth |
//! | write (latency) | the data | a byte |
//! | read | nothing | the data |
//! | compare-swap, fetch-add | 24 bytes | 8 bytes: the counter |

use std::collections::VecDeque;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::consume_budget;
use tokio::time::timeout;

use crate::Result;
use crate::case::{Case, Verb, Work};
use crate::lane::{Arrivals, Held, compare};
use crate::measure::{Tally, Until};
use crate::meet::{DEADLINE, End, unexpected};

/// The two lengths.
const HEADER: usize = 8;

/// Returns the length of a request's data.
fn data(case: &Case) -> usize {
    match case.verb {
        Verb::Read => 0,
        // Address, compare value and swap value, as in RDMA.
        Verb::CompareSwap | Verb::FetchAdd => 24,
        _ => case.size,
    }
}

/// Returns the length of an answer.
fn answer(case: &Case) -> usize {
    match (case.verb, case.work) {
        (Verb::Read, _) => case.size,
        (Verb::CompareSwap | Verb::FetchAdd, _) => 8,
        (Verb::Write, _) | (_, Work::Bandwidth) => 1,
        (_, Work::Latency) => case.size,
    }
}

/// The end that measures.
#[derive(Debug)]
pub(crate) struct Lane {
    case: Case,
    stream: TcpStream,
    /// The encoded requests that share one answer.
    requests: Vec<u8>,
    answer: Vec<u8>,
    pub(crate) operations: u64,
}

impl Lane {
    pub(crate) async fn connect(peer: &End, case: &Case) -> Result<Self> {
        let End::Tcp(Some(address)) = peer else { return Err(unexpected(peer)) };
        let stream = timeout(DEADLINE, TcpStream::connect(address))
            .await
            .map_err(|_| "the server does not accept the connection")??;
        stream.set_nodelay(true)?;
        let mut requests = Vec::new();
        for slot in 0..case.requests_per_answer() {
            let wanted = if slot + 1 == case.requests_per_answer() { answer(case) } else { 0 };
            requests.extend(u32::try_from(data(case))?.to_be_bytes());
            requests.extend(u32::try_from(wanted)?.to_be_bytes());
            requests.extend(case.pattern(slot).chain(std::iter::repeat(0)).take(data(case)));
        }
        Ok(Self {
            case: case.clone(),
            stream,
            requests,
            answer: vec![0; answer(case)],
            operations: 0,
        })
    }

    pub(crate) async fn run(&mut self, until: Until) -> Result<Tally> {
        let mut tally = Tally::new()?;
        // As many as over RDMA: operations in flight, and messages that wait for the server's task.
        let messages =
            if self.case.requests_per_answer() > 1 { 2 * self.case.depth } else { self.case.depth };
        let groups = (messages / self.case.requests_per_answer()).max(1);
        let written = self.case.batch * (HEADER + data(&self.case));
        let mut in_flight = VecDeque::with_capacity(groups);
        let mut over = false;
        loop {
            while !over && in_flight.len() < groups {
                in_flight.push_back(Instant::now());
                for part in self.requests.chunks(written) {
                    self.stream.write_all(part).await?;
                }
            }
            let Some(start) = in_flight.pop_front() else { return Ok(tally) };
            self.stream.read_exact(&mut self.answer).await?;
            let end = Instant::now();
            self.check_counter()?;
            tally.add(self.case.requests_per_answer(), end - start)?;
            self.operations += self.case.requests_per_answer() as u64;
            over |= until.is_over(end);
            consume_budget().await;
        }
    }

    fn check_counter(&self) -> Result<()> {
        match (self.case.verb, self.answer.first_chunk()) {
            (Verb::CompareSwap | Verb::FetchAdd, Some(&found)) => match u64::from_be_bytes(found) {
                found if found == self.operations => Ok(()),
                found => {
                    Err(format!("expected the counter {}, found {found}", self.operations).into())
                }
            },
            _ => Ok(()),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.answer.len() != self.case.size || self.case.verb == Verb::Write {
            return Ok(());
        }
        compare("the last answer", &self.answer, &self.case, 0)
    }
}

/// The end that answers.
#[derive(Debug)]
pub(crate) struct Server {
    case: Case,
    arrivals: Arrivals,
}

impl Server {
    /// Returns the end, and a future that answers until the client disconnects.
    pub(crate) fn new(
        listener: TcpListener,
        case: &Case,
    ) -> (Self, impl Future<Output = Result<()>> + Send + use<>) {
        let server = Self { case: case.clone(), arrivals: Arrivals::default() };
        let serving = serve(listener, server.case.clone(), server.arrivals.clone());
        (server, serving)
    }

    pub(crate) async fn check(&self, operations: u64) -> Result<()> {
        match self.case.verb {
            Verb::Read | Verb::CompareSwap | Verb::FetchAdd => Ok(()),
            _ => self.arrivals.check(&self.case, operations).await,
        }
    }
}

async fn serve(listener: TcpListener, case: Case, arrivals: Arrivals) -> Result<()> {
    let (stream, _) =
        timeout(DEADLINE, listener.accept()).await.map_err(|_| "the client does not connect")??;
    stream.set_nodelay(true)?;
    let mut stream = BufReader::with_capacity(64 << 10, stream);
    let mut answer: Vec<u8> = case.pattern(0).collect();
    let (mut message, mut counter) = (Vec::new(), 0_u64);
    loop {
        // The stream may end only between requests.
        let Ok(length) = stream.read_u32().await else { return Ok(()) };
        let (length, wanted) = (length as usize, stream.read_u32().await? as usize);
        if length != data(&case) || wanted > answer.len().max(8) {
            return Err(format!(
                "malformed request: {length} bytes of data, {wanted} bytes of answer"
            )
            .into());
        }
        message.resize(length, 0);
        stream.read_exact(&mut message).await?;
        match (case.verb, case.work) {
            (Verb::CompareSwap | Verb::FetchAdd, _) => {
                answer.splice(.., counter.to_be_bytes());
                counter += 1;
            }
            (Verb::Read, _) | (Verb::Write, _) | (_, Work::Bandwidth) => {}
            (_, Work::Latency) => answer.copy_from_slice(&message),
        }
        if wanted > 0 {
            stream.write_all(&answer[..wanted]).await?;
        }
        // Reuses the buffer of the previous message.
        if let Some(Held::Vec(before)) = arrivals.record(Held::Vec(std::mem::take(&mut message))) {
            message = before;
        }
    }
}
