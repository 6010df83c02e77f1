//! Messages of a `Connection`, at both ends.

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use tokio::task::consume_budget;
use tokio_rdma::{CompletionQueue, Connection, ConnectionConfig, ProtectionDomain};

use crate::Result;
use crate::case::{Case, Work};
use crate::lane::{Arrivals, Held, compare};
use crate::measure::{Tally, Until};
use crate::meet::{End, unexpected};

/// The completions of a connection with queues of default sizes.
pub(crate) const COMPLETIONS: usize = 512;

#[derive(Debug)]
pub(crate) struct Prepared(tokio_rdma::connection::PreparedConnection);

impl Prepared {
    /// Prepares a connection. With `peer`, selects a GID that routes to it.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        queue: &CompletionQueue,
        case: &Case,
        peer: Option<IpAddr>,
    ) -> Result<Self> {
        // Long messages occupy memory until the peer has read them: allow for several.
        let (size, memory) = (case.size as u64, (4 * case.size as u64).max(64 << 20));
        let config = ConnectionConfig::default()
            .completion_queue(queue)
            .retries(crate::queue_pair::long_ack_timeout())
            .max_message(size.max(64 << 20))
            .receive_memory(memory)
            .send_memory(memory);
        let config = match peer {
            Some(peer) => config.peer(peer),
            None => config,
        };
        Ok(Self(Connection::prepare(pd, &config)?))
    }

    pub(crate) fn end(&self) -> Result<End> {
        Ok(End::Connection(self.0.endpoint(), self.0.handshake(&[])?))
    }

    fn connect(self, peer: &End) -> Result<Connection> {
        let End::Connection(endpoint, handshake) = peer else { return Err(unexpected(peer)) };
        Ok(self.0.establish(endpoint, handshake)?)
    }
}

/// The end that measures.
#[derive(Debug)]
pub(crate) struct Lane {
    case: Case,
    connection: Connection,
    message: Bytes,
    answer: Option<Bytes>,
    pub(crate) operations: u64,
}

impl Lane {
    pub(crate) fn connect(prepared: Prepared, peer: &End, case: &Case) -> Result<Self> {
        let message = case.pattern(0).collect::<Vec<_>>().into();
        Ok(Self {
            case: case.clone(),
            connection: prepared.connect(peer)?,
            message,
            answer: None,
            operations: 0,
        })
    }

    pub(crate) async fn run(&mut self, until: Until) -> Result<Tally> {
        let mut tally = Tally::new()?;
        loop {
            let start = Instant::now();
            self.connection.send(self.message.clone()).await?;
            if self.case.work == Work::Latency {
                self.answer = Some(self.connection.recv().await?.ok_or("the server finished")?);
            }
            let end = Instant::now();
            tally.add(1, end - start)?;
            self.operations += 1;
            if until.is_over(end) {
                break;
            }
            consume_budget().await;
        }
        // Messages count once they have arrived.
        self.connection.flush().await?;
        Ok(tally)
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.answer.iter().try_for_each(|answer| compare("the last answer", answer, &self.case, 0))
    }

    pub(crate) async fn close(self) -> Result<()> {
        Ok(self.connection.close().await?)
    }
}

/// The end that answers.
#[derive(Debug)]
pub(crate) struct Server {
    case: Case,
    arrivals: Arrivals,
}

impl Server {
    /// Returns the end, and a future that answers until the client closes.
    pub(crate) fn connect(
        prepared: Prepared,
        peer: &End,
        case: &Case,
    ) -> Result<(Self, impl Future<Output = Result<()>> + Send + use<>)> {
        let connection = prepared.connect(peer)?;
        let server = Self { case: case.clone(), arrivals: Arrivals::default() };
        let answering = answer(connection, case.work, server.arrivals.clone());
        Ok((server, answering))
    }

    pub(crate) async fn check(&self, operations: u64) -> Result<()> {
        self.arrivals.check(&self.case, operations).await
    }
}

async fn answer(connection: Connection, work: Work, arrivals: Arrivals) -> Result<()> {
    while let Some(message) = connection.recv().await? {
        if work == Work::Latency {
            connection.send(message.clone()).await?;
        }
        drop(arrivals.record(Held::Bytes(message)));
    }
    Ok(connection.close().await?)
}
