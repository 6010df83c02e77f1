//! The channel over which the ends meet: a line of JSON for each request and each reply, over TCP.

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

/// Longest line. An end takes less than 500 bytes, and there are at most 1024 of them.
const LONGEST: u64 = 1 << 20;
/// A peer that is there answers long before.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// What the client asks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Make the other ends of these.
    Open(Case, Vec<End>),
    /// Note what you have used: a round begins.
    Begin,
    /// It has ended; so many operations were done on each lane since it was opened. Check that.
    End(Vec<u64>),
    /// Drop the ends.
    Close,
    /// That was all.
    Leave,
}

/// What the server answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// With the name of the device.
    Opened(String, Vec<End>),
    Begun,
    /// What it used in this round.
    Ended(Usage),
    Closed,
    Failed(String),
}

/// What the peer needs to know of one end of a lane.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum End {
    QueuePair(QueuePairEndpoint, RemoteRegion),
    Connection(QueuePairEndpoint, Vec<u8>),
    /// Where the server listens; the client has no address to tell.
    Tcp(Option<SocketAddr>),
}

/// One end of the channel.
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

    pub(crate) async fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        timeout(DEADLINE, self.stream.get_mut().write_all(&line))
            .await
            .map_err(|_| "the peer does not listen")??;
        Ok(())
    }

    /// The next message, or `None` if the peer is gone.
    pub(crate) async fn hear<T: DeserializeOwned>(
        &mut self,
        within: Duration,
    ) -> Result<Option<T>> {
        let mut line = Vec::new();
        let mut limited = (&mut self.stream).take(LONGEST);
        let read = timeout(within, limited.read_until(b'\n', &mut line)).await;
        read.map_err(|_| format!("the peer says nothing for {within:?}"))??;
        match line.last() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(
                serde_json::from_slice(&line).map_err(|error| format!("the peer: {error}"))?,
            )),
            Some(_) => {
                Err(format!("the peer left within a line, or it has more than {LONGEST} bytes")
                    .into())
            }
        }
    }

    /// Asks the server.
    pub(crate) async fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.say(request).await?;
        match self.hear(DEADLINE).await? {
            Some(Reply::Failed(why)) => Err(format!("the server: {why}").into()),
            Some(reply) => Ok(reply),
            None => Err("the server is gone".into()),
        }
    }
}

/// A reply to something else, or an end of another kind.
pub(crate) fn unexpected(what: &impl std::fmt::Debug) -> crate::Failure {
    format!("the peer said {what:?}, which is no answer here").into()
}
