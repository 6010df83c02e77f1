//! A client's connection to an owner.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    BufMut, Connection, ConnectionConfig, Device, OpError, ProtectionDomain, RemoteRegion,
};

use crate::progress::{DEADLINE, Progress};
use crate::strike::Strike;
use crate::{Directory, DirectoryError, Instance, NodeError, Share};

/// READs and WRITEs that a connection has in flight at once; more wait for a slot. The connection's
/// own keep-alives queue behind them, and must not wait until the peer considers it dead.
const DEPTH: u32 = 64;

/// The interval and timeout of keep-alives. A dead peer is detected in their sum, while the eight
/// attempts of the transport take longer, on some devices four times as long.
const KEEPALIVE: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(600));

/// Returns the settings of both ends. Pages need no messages, hence few buffers.
pub(crate) fn connection(pd: &ProtectionDomain) -> ConnectionConfig {
    // An eighth of a second: a lost keep-alive is retransmitted several times within the timeout.
    let retries = RetryConfig { timeout: AckTimeout::from_code(15), ..RetryConfig::default() };
    let config = ConnectionConfig::default()
        .protection_domain(pd)
        .retries(retries)
        .keepalive(Some(KEEPALIVE))
        .max_send_wr(2 * DEPTH);
    config
        .receive_buffer_size(256)
        .receive_buffers(4)
        .spare_buffers(1)
        .send_buffers(4)
        .max_message(256)
}

/// A connection to an owner. A node that fails is lost for good, since it may lack later writes.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) share: Share,
    state: Mutex<State>,
    /// One permit per operation in flight.
    slots: Semaphore,
    progress: Progress,
    strike: Strike,
}

#[derive(Debug)]
enum State {
    Alive(Connection),
    Lost(NodeError),
}

impl Node {
    /// Connects to a node. If that fails, the node is lost from the start.
    pub(crate) async fn connect(
        device: &Device,
        pd: &ProtectionDomain,
        name: String,
        share: Share,
    ) -> Self {
        let state = match Connection::connect_with(device, share.address, &connection(pd)).await {
            Ok(connection) => State::Alive(connection),
            Err(error) => State::Lost(NodeError::Connect(Box::new(error))),
        };
        let (state, slots) = (Mutex::new(state), Semaphore::new(DEPTH as usize));
        Self { name, share, state, slots, progress: Progress::default(), strike: Strike::default() }
    }

    pub(crate) fn lost(&self) -> Option<NodeError> {
        match &*self.state.lock() {
            State::Alive(_) => None,
            State::Lost(cause) => Some(cause.clone()),
        }
    }

    pub(crate) async fn read(
        &self,
        at: RemoteRegion,
        buffer: BufMut,
    ) -> Result<BufMut, (NodeError, BufMut)> {
        self.execute(buffer, |connection, buffer| connection.read(buffer, at)).await
    }

    pub(crate) async fn write(
        &self,
        at: RemoteRegion,
        buffer: BufMut,
    ) -> Result<BufMut, (NodeError, BufMut)> {
        self.execute(buffer, |connection, buffer| connection.write(buffer, at)).await
    }

    /// Makes the coordinator remove the node from the map, once.
    pub(crate) async fn strike(
        &self,
        directory: &Directory,
        instance: Instance,
    ) -> Result<(), DirectoryError> {
        let ask = || {
            let (directory, name) = (directory.clone(), self.name.clone());
            async move { directory.leave(&name, instance).await }
        };
        self.strike.once(directory.pause(), ask).await
    }

    pub(crate) fn is_unsure(&self, directory: &Directory) -> bool {
        self.strike.is_open(directory.pause())
    }

    /// Posts an operation and waits for it. Returns the buffer in any case.
    async fn execute<O>(
        &self,
        buffer: BufMut,
        post: impl FnOnce(&Connection, BufMut) -> O,
    ) -> Result<BufMut, (NodeError, BufMut)>
    where
        O: Future<Output = Result<BufMut, OpError<BufMut>>> + Unpin,
    {
        // Permits are returned, since each operation ends (see below). The semaphore is never
        // closed.
        let _slot = self.slots.acquire().await;
        let mut operation = match &*self.state.lock() {
            State::Alive(connection) => post(connection, buffer),
            State::Lost(cause) => return Err((cause.clone(), buffer)),
        };
        let done = match self.progress.watch(&mut operation).await {
            Some(done) => done,
            None => {
                // Dropping the connection destroys the queue pair, which ends the operation: no
                // buffer that the device may access is abandoned.
                self.lose(NodeError::Deadline(DEADLINE));
                operation.await
            }
        };
        done.map_err(|error| (self.lose(NodeError::Operation(error.kind())), error.into_buffer()))
    }

    /// Marks the node as lost. The first cause is kept, unless it is only a flush: one operation
    /// reports the actual cause.
    fn lose(&self, cause: NodeError) -> NodeError {
        let is_flush = |cause: &NodeError| match cause {
            NodeError::Operation(kind) => kind.status() == Some(WcStatus::WR_FLUSH_ERR),
            _ => false,
        };
        let mut state = self.state.lock();
        let known = match &*state {
            State::Alive(connection) if is_flush(&cause) => {
                connection.close_reason().map(NodeError::Ended)
            }
            State::Lost(known) if !is_flush(known) => Some(known.clone()),
            State::Alive(_) | State::Lost(_) => None,
        };
        let cause = known.unwrap_or(cause);
        let before = std::mem::replace(&mut *state, State::Lost(cause.clone()));
        // Dropping a connection wakes tasks, so not under the lock.
        drop(state);
        drop(before);
        cause
    }
}
