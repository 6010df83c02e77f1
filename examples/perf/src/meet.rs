//! The control channel between the ends: one line of JSON per request and per reply, over TCP.

use std::net::SocketAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rdma::{QueuePairEndpoint, RemoteRegion};

use crate::Result;
use crate::case::Case;
use crate::measure::Usage;

/// Enough for 1024 ends of less than 500 bytes.
const MAX_LINE: u64 = 1 << 20;
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Create the peers of these ends.
    Open(Case, Vec<End>),
    /// Start measuring the resource usage.
    Begin,
    /// Stop measuring, and check the data of so many operations on each lane since it was opened.
    End(Vec<u64>),
    /// Drop the ends.
    Close,
    Exit,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The name of the server's device, and its ends.
    Opened(String, Vec<End>),
    Begun,
    /// The usage of this round.
    Ended(Usage),
    Closed,
    Failed(String),
}

/// The address of one end of a lane.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum End {
    QueuePair(QueuePairEndpoint, RemoteRegion),
    Connection(QueuePairEndpoint, Vec<u8>),
    /// The server's listener; `None` for the client.
    Tcp(Option<SocketAddr>),
}

#[derive(Debug)]
pub(crate) struct Channel {
    stream: BufReader<TcpStream>,
}

impl Channel {
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    pub(crate) async fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        timeout(DEADLINE, self.stream.get_mut().write_all(&line))
            .await
            .map_err(|_| "the peer does not read the control channel")??;
        Ok(())
    }

    /// Receives the next message, or `None` if the peer has closed the channel.
    pub(crate) async fn receive<T: DeserializeOwned>(
        &mut self,
        within: Duration,
    ) -> Result<Option<T>> {
        let mut line = Vec::new();
        let mut limited = (&mut self.stream).take(MAX_LINE);
        let read = timeout(within, limited.read_until(b'\n', &mut line)).await;
        read.map_err(|_| format!("no message from the peer for {within:?}"))??;
        match line.last() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(
                serde_json::from_slice(&line)
                    .map_err(|error| format!("malformed message from the peer: {error}"))?,
            )),
            Some(_) => {
                Err(format!("the peer exited within a line, or the line exceeds {MAX_LINE} bytes")
                    .into())
            }
        }
    }

    pub(crate) async fn request(&mut self, request: &Request) -> Result<Reply> {
        self.send(request).await?;
        match self.receive(DEADLINE).await? {
            Some(Reply::Failed(why)) => Err(format!("server: {why}").into()),
            Some(reply) => Ok(reply),
            None => Err("the server has exited".into()),
        }
    }
}

/// Returns the error for a reply to another request, or an end of another kind.
pub(crate) fn unexpected(what: &impl std::fmt::Debug) -> crate::Failure {
    format!("unexpected message from the peer: {what:?}").into()
}
