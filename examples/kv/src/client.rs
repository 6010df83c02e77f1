//! The client: GET, PUT and DELETE.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::ToSocketAddrs;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Connection, ConnectionConfig, Device, Pool, RemoteRegion};

use crate::calls::Calls;
use crate::error::{KvError, ProtocolError};
use crate::layout::Layout;
use crate::protocol::{Answer, OVERHEAD, Request};
use crate::slot::{Slot, Torn};
use crate::table::Versioned;

/// The settings of a [`KvClient`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ClientConfig {
    connect_timeout: Duration,
    deadline: Duration,
    torn_retries: u32,
    reads: usize,
    checksums: bool,
    keepalive: Option<(Duration, Duration)>,
    ack_timeout: AckTimeout,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            torn_retries: 8,
            reads: 16,
            checksums: true,
            keepalive: Some((Duration::from_millis(150), Duration::from_millis(600))),
            ack_timeout: ACK_TIMEOUT,
        }
    }
}

impl ClientConfig {
    /// Sets the limit for resolving the address, and for the handshake; default 15 s each.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the limit for each call, and for closing; default 10 s, longer than the detection of a
    /// [failed server](Self::keepalive) takes.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how often a GET repeats a torn READ before it sends a message; default 8.
    pub fn torn_retries(mut self, retries: u32) -> Self {
        self.torn_retries = retries;
        self
    }

    /// Sets the maximum number of READs in flight, each with a buffer for a bucket; default 16, at
    /// least 1. Further GETs wait for a buffer within their [`deadline`](Self::deadline). More
    /// READs do not speed up a slow device.
    pub fn reads(mut self, reads: usize) -> Self {
        self.reads = reads.max(1);
        self
    }

    /// Sets how a failed server is detected: a server that is silent for the first duration is
    /// asked, and fails if it is silent for the second one after that; default 150 ms and 600 ms.
    /// With `None`, only the transport detects it, by [retries](Self::ack_timeout).
    ///
    /// Longer times suit machines where a server may wait for a processor as long.
    pub fn keepalive(mut self, times: Option<(Duration, Duration)>) -> Self {
        self.keepalive = times;
        self
    }

    /// Sets the time until the transport repeats an unacknowledged packet; default code 15, 134 ms.
    /// It must be a fraction of the [`keepalive`](Self::keepalive), so that a lost packet is no
    /// failure. After eight attempts the connection fails.
    pub fn ack_timeout(mut self, timeout: AckTimeout) -> Self {
        self.ack_timeout = timeout;
        self
    }

    pub(crate) fn call_deadline(&self) -> Duration {
        self.deadline
    }

    pub(crate) fn connection(&self) -> ConnectionConfig {
        let longest = OVERHEAD as u64 + u64::from(Layout::MAX_VALUE);
        ConnectionConfig::default()
            .retries(RetryConfig { timeout: self.ack_timeout, ..RetryConfig::default() })
            .keepalive(self.keepalive)
            .connect_timeout(self.connect_timeout)
            .close_timeout(self.deadline)
            .max_message(longest)
    }

    /// Accepts torn READs, for tests only: `kv check --accept-torn` must detect the consequences.
    pub fn accept_torn(mut self) -> Self {
        self.checksums = false;
        self
    }
}

/// A client of a [`Server`](crate::Server). Tasks can share it in an `Arc`.
///
/// Every call returns within the [`deadline`](ClientConfig::deadline). [`KvError::Connection`],
/// [`KvError::Read`], [`KvError::ServerClosed`] and [`KvError::Protocol`] are permanent: connect
/// again.
#[derive(Debug)]
pub struct KvClient {
    connection: Connection,
    layout: Layout,
    table: RemoteRegion,
    buffers: Pool,
    calls: Arc<Calls>,
    answers: JoinHandle<()>,
    config: ClientConfig,
    reads: AtomicU64,
    torn: AtomicU64,
    fallbacks: AtomicU64,
}

/// Counters of a client's GETs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadCounters {
    /// READs.
    pub reads: u64,
    /// READs, of a slot or a bucket, with a torn slot.
    pub torn: u64,
    /// GETs that sent a message after too many torn READs.
    pub fallbacks: u64,
}

enum Lookup {
    Found(Versioned),
    Absent,
    Torn,
}

impl KvClient {
    /// Connects with the default settings.
    ///
    /// # Errors
    ///
    /// See [`connect_with`](Self::connect_with).
    pub async fn connect(
        device: &Device,
        address: impl ToSocketAddrs + std::fmt::Debug,
    ) -> Result<Self, KvError> {
        Self::connect_with(device, address, ClientConfig::default()).await
    }

    /// Connects to the first of the addresses that answers.
    ///
    /// # Errors
    ///
    /// [`KvError::Establish`] if the connection fails, [`KvError::Protocol`] if the peer is not a
    /// kv server, [`KvError::Setup`] if the buffers for READs cannot be registered.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future cancels the connection request.
    pub async fn connect_with(
        device: &Device,
        address: impl ToSocketAddrs + std::fmt::Debug,
        config: ClientConfig,
    ) -> Result<Self, KvError> {
        let connection = Connection::connect_with(device, address, &config.connection()).await?;
        Self::over(connection, config)
    }

    /// Uses a connection that was made with [`ClientConfig::connection`]. Requires a runtime.
    pub(crate) fn over(connection: Connection, config: ClientConfig) -> Result<Self, KvError> {
        let (layout, table) = Layout::decode(connection.user_data())?;
        let buffers =
            Pool::new(connection.protection_domain(), layout.bucket_bytes(), config.reads)?;
        let calls = Arc::new(Calls::new());
        let answers = tokio::spawn(dispatch_answers(connection.clone(), calls.clone()));
        Ok(Self {
            connection,
            layout,
            table,
            buffers,
            calls,
            answers,
            config,
            reads: AtomicU64::new(0),
            torn: AtomicU64::new(0),
            fallbacks: AtomicU64::new(0),
        })
    }

    /// Returns the layout of the server's table.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the counters of this client.
    #[must_use]
    pub fn counters(&self) -> ReadCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReadCounters {
            reads: of(&self.reads),
            torn: of(&self.torn),
            fallbacks: of(&self.fallbacks),
        }
    }

    /// Returns the value of a key, by READ, or by message after repeated torn READs.
    ///
    /// It is the value of the last PUT that was answered before this call began, or of a later one.
    ///
    /// # Errors
    ///
    /// [`KvError::Refused`] for an invalid key length; [`KvError::Deadline`]; others if the
    /// connection has failed.
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing. A READ in flight completes into a buffer that no other call uses.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        self.layout.check_key(key)?;
        self.in_time(async {
            for _ in 0..=self.config.torn_retries {
                match self.lookup(key).await? {
                    Lookup::Found(found) => return Ok(Some(found)),
                    Lookup::Absent => return Ok(None),
                    // The server may need this processor to finish its write.
                    Lookup::Torn => yield_now().await,
                }
            }
            self.fallbacks.fetch_add(1, Ordering::Relaxed);
            self.get_from_server(key).await
        })
        .await
    }

    /// Returns the value of a key like [`get`](Self::get), always by message.
    ///
    /// # Errors
    ///
    /// See [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// The call changes nothing.
    pub async fn get_by_message(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        self.layout.check_key(key)?;
        self.in_time(self.get_from_server(key)).await
    }

    /// Sets the value of a key. Returns the new version, which is greater than the version of every
    /// PUT and DELETE of the key that was answered before this call began.
    ///
    /// # Errors
    ///
    /// [`KvError::Refused`] if the key or value is too long or the bucket is full;
    /// [`KvError::Deadline`]; others if the connection has failed. Unless refused, the PUT may have
    /// taken effect.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the PUT may or may not take effect.
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
        self.layout.check_key(key)?;
        self.layout.check_value(value)?;
        match self.in_time(self.call(Request::Put(key, value))).await? {
            Answer::Done(version) => Ok(version),
            other => Err(unexpected(other)),
        }
    }

    /// Deletes a key. Returns the version of the deletion, or `None` if the key is absent.
    ///
    /// # Errors
    ///
    /// See [`put`](Self::put).
    ///
    /// # Cancel safety
    ///
    /// See [`put`](Self::put).
    pub async fn delete(&self, key: &[u8]) -> Result<Option<u64>, KvError> {
        self.layout.check_key(key)?;
        match self.in_time(self.call(Request::Delete(key))).await? {
            Answer::Done(version) => Ok(Some(version)),
            Answer::Absent => Ok(None),
            other => Err(unexpected(other)),
        }
    }

    /// Closes the connection.
    ///
    /// # Errors
    ///
    /// The connection has failed, or the server does not close within the deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the connection.
    pub async fn close(self) -> Result<(), KvError> {
        Ok(self.connection.close().await?)
    }

    /// Ends the connection without the server, and waits until it has ended.
    pub(crate) async fn abort(&self) {
        self.connection.abort();
        self.connection.closed().await;
    }

    /// Looks up a key by READ: first in its home slot, then in the whole bucket.
    async fn lookup(&self, key: &[u8]) -> Result<Lookup, KvError> {
        let place = self.layout.place(key);
        let home = self.layout.slot(place.bucket, place.home);
        for range in [home, self.layout.bucket(place.bucket)] {
            let buffer = self.buffers.alloc((range.end - range.start) as usize).await?;
            self.reads.fetch_add(1, Ordering::Relaxed);
            // The layout was checked against the length of the table.
            let remote = self.table.slice(range).unwrap_or_else(|error| unreachable!("{error}"));
            let slots = self
                .connection
                .read(buffer, remote)
                .await
                .map_err(|error| KvError::Read(error.kind()))?;
            let mut torn = false;
            for slot in slots.chunks_exact(self.layout.slot_bytes()).map(|bytes| self.decode(bytes))
            {
                match slot {
                    // Copied, so that the buffer is free for the next READ.
                    Ok(Slot { version, key: of, value }) if of == key => {
                        return Ok(Lookup::Found(Versioned {
                            version,
                            value: Bytes::copy_from_slice(value),
                        }));
                    }
                    Ok(_) => {}
                    Err(Torn) => torn = true,
                }
            }
            // The torn slot may hold the key.
            if torn {
                self.torn.fetch_add(1, Ordering::Relaxed);
                return Ok(Lookup::Torn);
            }
        }
        Ok(Lookup::Absent)
    }

    fn decode<'a>(&self, slot: &'a [u8]) -> Result<Slot<'a>, Torn> {
        if self.config.checksums { Slot::decode(slot) } else { Slot::decode_unchecked(slot) }
    }

    async fn get_from_server(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        match self.call(Request::Get(key)).await? {
            Answer::Found(found) => Ok(Some(found)),
            Answer::Absent => Ok(None),
            other => Err(unexpected(other)),
        }
    }

    async fn call(&self, request: Request<'_>) -> Result<Answer, KvError> {
        let call = self.calls.begin()?;
        self.connection.send(request.encode(call.number)).await?;
        call.answer().await
    }

    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, KvError>>,
    ) -> Result<T, KvError> {
        let deadline = self.config.deadline;
        timeout(deadline, call).await.unwrap_or(Err(KvError::Deadline(deadline)))
    }
}

impl Drop for KvClient {
    fn drop(&mut self) {
        // The task holds a reference to the connection, which would keep it open.
        self.answers.abort();
    }
}

async fn dispatch_answers(connection: Connection, calls: Arc<Calls>) {
    let end = loop {
        match connection.recv().await {
            Ok(Some(message)) => match calls.on_message(&message) {
                Ok(()) => {}
                Err(error) => break error.into(),
            },
            Ok(None) => break KvError::ServerClosed,
            Err(error) => break error.into(),
        }
    };
    calls.fail_all(end);
}

/// Returns the error for an answer that does not match its request.
fn unexpected(answer: Answer) -> KvError {
    match answer {
        Answer::Refused(refusal) => refusal.into(),
        Answer::Found(_) | Answer::Absent | Answer::Done(_) => ProtocolError::Answer.into(),
    }
}

/// An eighth of a second, so that a lost packet is repeated several times within the default
/// [`ClientConfig::keepalive`].
pub(crate) const ACK_TIMEOUT: AckTimeout = AckTimeout::from_code(15);
