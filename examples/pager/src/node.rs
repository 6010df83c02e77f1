//! A client's connection to an owner.

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    BufMut, Connection, ConnectionConfig, Device, OpError, ProtectionDomain, RemoteRegion,
};

use crate::progress::{DEADLINE, Progress};
use crate::strike::Strike;
use crate::{Directory, DirectoryError, Instance, NodeError, Share};

/// READs and WRITEs that a connection holds at once, whatever the pager has on its way; more wait here for their turn. What the
/// connection says for itself, that it is alive, stands in line behind them, and must not for so long that its peer takes it for dead.
const DEPTH: u32 = 64;

/// Settings of both ends. Pages need no messages, so there are buffers for hardly any.
pub(crate) fn connection(pd: &ProtectionDomain) -> ConnectionConfig {
    // What is not acknowledged is repeated after half a second, six times: a peer that is gone is found out in some seconds, and one
    // that waits for a processor is not taken for it.
    let options =
        ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() };
    let config =
        ConnectionConfig::default().protection_domain(pd).options(options).max_send_wr(2 * DEPTH);
    config
        .receive_buffer_size(256)
        .receive_buffers(4)
        .spare_buffers(1)
        .send_buffers(4)
        .max_message(256)
}

/// An owner, as long as it lives. A node that fails is lost for good: it may lack what was written since.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) share: Share,
    state: Mutex<State>,
    /// Permits are places at the connection.
    places: Semaphore,
    progress: Progress,
    strike: Strike,
}

#[derive(Debug)]
enum State {
    Alive(Connection),
    Lost(NodeError),
}

impl Node {
    /// A node that cannot be reached is made, too, and lost from the start.
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
        let (state, places) = (Mutex::new(state), Semaphore::new(DEPTH as usize));
        Self {
            name,
            share,
            state,
            places,
            progress: Progress::default(),
            strike: Strike::default(),
        }
    }

    /// Why it is lost, if it is.
    pub(crate) fn lost(&self) -> Option<NodeError> {
        match &*self.state.lock() {
            State::Alive(_) => None,
            State::Lost(cause) => Some(cause.clone()),
        }
    }

    /// Fills a buffer with a page that is one of its share.
    pub(crate) async fn read(
        &self,
        at: RemoteRegion,
        buffer: BufMut,
    ) -> Result<BufMut, (NodeError, BufMut)> {
        self.carry(buffer, |connection, buffer| connection.read(buffer, at)).await
    }

    /// Writes a page of its share.
    pub(crate) async fn write(
        &self,
        at: RemoteRegion,
        buffer: BufMut,
    ) -> Result<BufMut, (NodeError, BufMut)> {
        self.carry(buffer, |connection, buffer| connection.write(buffer, at)).await
    }

    /// Has the coordinator take it off the map, once.
    pub(crate) async fn strike(
        &self,
        directory: &Directory,
        instance: Instance,
    ) -> Result<(), DirectoryError> {
        let ask = || {
            let (directory, name) = (directory.clone(), self.name.clone());
            async move { directory.leave(&name, instance).await }
        };
        self.strike.once(directory.patient_for(), ask).await
    }

    /// The coordinator does not answer whether it is off the map.
    pub(crate) fn is_unsure(&self, directory: &Directory) -> bool {
        self.strike.is_open(directory.patient_for())
    }

    /// Gives the buffer back in any case.
    async fn carry<O>(
        &self,
        buffer: BufMut,
        post: impl FnOnce(&Connection, BufMut) -> O,
    ) -> Result<BufMut, (NodeError, BufMut)>
    where
        O: Future<Output = Result<BufMut, OpError<BufMut>>> + Unpin,
    {
        // Each of those before comes to an end: see below. It is never closed.
        let _place = self.places.acquire().await;
        let mut operation = match &*self.state.lock() {
            State::Alive(connection) => post(connection, buffer),
            State::Lost(cause) => return Err((cause.clone(), buffer)),
        };
        let done = match self.progress.watch(&mut operation).await {
            Some(done) => done,
            None => {
                // Its queue pair goes, which ends the operation: a buffer that a device may touch is never left behind.
                self.lose(NodeError::Deadline(DEADLINE));
                operation.await
            }
        };
        done.map_err(|error| (self.lose(NodeError::Operation(error.kind())), error.into_buffer()))
    }

    /// The first cause stays, unless it says only that all work has ended: of what fails with a connection one thing says why.
    fn lose(&self, cause: NodeError) -> NodeError {
        let says_little = |cause: &NodeError| match cause {
            NodeError::Operation(kind) => kind.status() == Some(WcStatus::WR_FLUSH_ERR),
            _ => false,
        };
        let mut state = self.state.lock();
        let known = match &*state {
            State::Alive(connection) if says_little(&cause) => {
                connection.close_reason().map(NodeError::Ended)
            }
            State::Lost(known) if !says_little(known) => Some(known.clone()),
            State::Alive(_) | State::Lost(_) => None,
        };
        let cause = known.unwrap_or(cause);
        let before = std::mem::replace(&mut *state, State::Lost(cause.clone()));
        // A connection wakes others when it is dropped.
        drop(state);
        drop(before);
        cause
    }
}
