//! GET, PUT and DELETE.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::ToSocketAddrs;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout;
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Connection, ConnectionConfig, Device, Pool, RemoteRegion};

use crate::calls::Calls;
use crate::error::{KvError, ProtocolError};
use crate::layout::Layout;
use crate::protocol::{Answer, OVERHEAD, Request};
use crate::slot::{Slot, Torn};
use crate::table::Versioned;

/// Settings of a [`KvClient`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ClientConfig {
    connect_timeout: Duration,
    deadline: Duration,
    torn_retries: u32,
    reads: usize,
    checksums: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            torn_retries: 8,
            reads: 16,
            checksums: true,
        }
    }
}

impl ClientConfig {
    /// Time for finding the server and for the handshake, each; 15 s unless set.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Time for each call, and for taking leave; 10 s unless set: more than it takes to find out that a server is gone.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How often a GET reads again what it found torn, before it asks the server; 8 unless set.
    pub fn torn_retries(mut self, retries: u32) -> Self {
        self.torn_retries = retries;
        self
    }

    /// READs at once, each with a buffer for a bucket; 16 unless set, and at least 1. Further GETs wait for one, within their
    /// [`deadline`](Self::deadline): a slow device does not do more of them in that time for having more at once.
    pub fn reads(mut self, reads: usize) -> Self {
        self.reads = reads.max(1);
        self
    }

    /// Takes whatever it reads for whole, to see what that leads to: `kv check --accept-torn` finds it. Never otherwise.
    pub fn accept_torn(mut self) -> Self {
        self.checksums = false;
        self
    }
}

/// A client of a [`Server`](crate::Server). All methods take `&self`: tasks may share it, in an `Arc`.
///
/// Every call ends within the [`deadline`](ClientConfig::deadline). After [`KvError::Connection`], [`KvError::Read`],
/// [`KvError::ServerLeft`] or [`KvError::Protocol`] nothing can be asked of the server any more: connect anew.
#[derive(Debug)]
pub struct KvClient {
    connection: Arc<Connection>,
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

/// What a client's GETs have met.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadCounters {
    /// READs.
    pub reads: u64,
    /// READs, of a slot or a bucket, in which something was torn.
    pub torn: u64,
    /// GETs that asked the server in the end.
    pub fallbacks: u64,
}

/// What a READ has found of a key.
enum Look {
    Found(Versioned),
    Absent,
    Torn,
}

impl KvClient {
    /// Connects to a server, with default settings.
    ///
    /// # Errors
    ///
    /// As [`connect_with`](Self::connect_with).
    pub async fn connect(device: &Device, address: impl ToSocketAddrs) -> Result<Self, KvError> {
        Self::connect_with(device, address, ClientConfig::default()).await
    }

    /// Connects to a server: to the first of the addresses that answers.
    ///
    /// # Errors
    ///
    /// [`KvError::Establish`] if the two do not meet, [`KvError::Protocol`] if it is another kind of server,
    /// [`KvError::Setup`] if there is no memory for READs.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future takes the request back.
    pub async fn connect_with(
        device: &Device,
        address: impl ToSocketAddrs,
        config: ClientConfig,
    ) -> Result<Self, KvError> {
        let longest = OVERHEAD as u64 + u64::from(Layout::MAX_VALUE);
        let settings = ConnectionConfig::default()
            .options(patient())
            .connect_timeout(config.connect_timeout)
            .close_timeout(config.deadline)
            .max_message(longest);
        let connection = Arc::new(Connection::connect_with(device, address, &settings).await?);
        let (layout, table) = Layout::decode(connection.user_data())?;
        let buffers =
            Pool::new(connection.protection_domain(), layout.bucket_bytes(), config.reads)?;
        let calls = Arc::new(Calls::new());
        let answers = tokio::spawn(take_answers(connection.clone(), calls.clone()));
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

    /// How the server's table is made.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What its GETs have met so far.
    #[must_use]
    pub fn counters(&self) -> ReadCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReadCounters {
            reads: of(&self.reads),
            torn: of(&self.torn),
            fallbacks: of(&self.fallbacks),
        }
    }

    /// The value of a key, by READ of the server's memory; or by message, if what it reads is torn again and again.
    ///
    /// It is that of the last PUT which was answered before the GET began, or of a later one.
    ///
    /// # Errors
    ///
    /// [`KvError::Refused`] for a key that no table has; [`KvError::Deadline`]; others if the connection has ended.
    ///
    /// # Cancel safety
    ///
    /// It changes nothing; a READ that was posted is done by the device, into a buffer that nobody else has.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        self.layout.check_key(key)?;
        self.in_time(async {
            for _ in 0..=self.config.torn_retries {
                match self.look(key).await? {
                    Look::Found(found) => return Ok(Some(found)),
                    Look::Absent => return Ok(None),
                    // The server may need this processor to go on.
                    Look::Torn => yield_now().await,
                }
            }
            self.fallbacks.fetch_add(1, Ordering::Relaxed);
            self.ask_for(key).await
        })
        .await
    }

    /// As [`get`](Self::get), always by message.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// It changes nothing.
    pub async fn get_by_message(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
        self.layout.check_key(key)?;
        self.in_time(self.ask_for(key)).await
    }

    /// Gives a key a value. The version of that: greater than those of all PUTs and DELETEs of the key that were answered
    /// before this began.
    ///
    /// # Errors
    ///
    /// [`KvError::Refused`] for a key or a value that is too long, and if the table is full; [`KvError::Deadline`]; others
    /// if the connection has ended. Unless it was refused, it may have been done.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, it may be done or not.
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
        self.layout.check_key(key)?;
        self.layout.check_value(value)?;
        match self.in_time(self.call(Request::Put(key, value))).await? {
            Answer::Done(version) => Ok(version),
            other => Err(unexpected(other)),
        }
    }

    /// Takes a key away. The version of that, or `None` if there is no such key.
    ///
    /// # Errors
    ///
    /// As [`put`](Self::put).
    ///
    /// # Cancel safety
    ///
    /// As [`put`](Self::put).
    pub async fn delete(&self, key: &[u8]) -> Result<Option<u64>, KvError> {
        self.layout.check_key(key)?;
        match self.in_time(self.call(Request::Delete(key))).await? {
            Answer::Done(version) => Ok(Some(version)),
            Answer::Absent => Ok(None),
            other => Err(unexpected(other)),
        }
    }

    /// Takes leave of the server.
    ///
    /// # Errors
    ///
    /// If the connection has ended otherwise, or the server does not take leave within the deadline.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, so is the connection.
    pub async fn close(self) -> Result<(), KvError> {
        Ok(self.connection.close().await?)
    }

    /// Looks for a key: in the slot where it is if that was vacant when it came, then in all of its bucket.
    async fn look(&self, key: &[u8]) -> Result<Look, KvError> {
        let place = self.layout.place(key);
        let home = self.layout.slot(place.bucket, place.home);
        for range in [home, self.layout.bucket(place.bucket)] {
            let buffer = self.buffers.alloc((range.end - range.start) as usize).await?;
            self.reads.fetch_add(1, Ordering::Relaxed);
            // Layout and length of the table were checked against each other.
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
                    // A copy: the buffer is for the next READ.
                    Ok(Slot { version, key: of, value }) if of == key => {
                        return Ok(Look::Found(Versioned {
                            version,
                            value: Bytes::copy_from_slice(value),
                        }));
                    }
                    Ok(_) => {}
                    Err(Torn) => torn = true,
                }
            }
            // It may be in what was torn.
            if torn {
                self.torn.fetch_add(1, Ordering::Relaxed);
                return Ok(Look::Torn);
            }
        }
        Ok(Look::Absent)
    }

    fn decode<'a>(&self, slot: &'a [u8]) -> Result<Slot<'a>, Torn> {
        if self.config.checksums { Slot::decode(slot) } else { Slot::decode_unchecked(slot) }
    }

    async fn ask_for(&self, key: &[u8]) -> Result<Option<Versioned>, KvError> {
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
        // It has a share of the connection, which ends when the last one is dropped.
        self.answers.abort();
    }
}

async fn take_answers(connection: Arc<Connection>, calls: Arc<Calls>) {
    let end = loop {
        match connection.recv().await {
            Ok(Some(message)) => match calls.on_message(&message) {
                Ok(()) => {}
                Err(error) => break error.into(),
            },
            Ok(None) => break KvError::ServerLeft,
            Err(error) => break error.into(),
        }
    };
    calls.end(end);
}

/// The error of an answer that is none to the request.
fn unexpected(answer: Answer) -> KvError {
    match answer {
        Answer::Refused(refusal) => refusal.into(),
        Answer::Found(_) | Answer::Absent | Answer::Done(_) => ProtocolError::Answer.into(),
    }
}

/// What is not acknowledged is repeated after half a second, instead of 67 ms: on a busy machine the other end may have to
/// wait for a processor. A peer that is gone is noticed in about 4 s.
pub(crate) fn patient() -> ConnectOptions {
    ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() }
}
