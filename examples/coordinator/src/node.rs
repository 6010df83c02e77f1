//! A node: announces itself, finds its peer, then uses the peer's memory.

use std::error::Error;
use std::time::Duration;

use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair};

use crate::Announcement;

/// Bytes that each node grants.
const SLOT: usize = 256;

/// Longest that a node waits for its peer, at each step.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who we are and whom we look for.
#[derive(Debug, Clone)]
pub struct Node {
    /// Our name at the service.
    pub name: String,
    /// The peer's name.
    pub peer: String,
    /// Where the service is: `http://host:port`.
    pub service: String,
}

impl Node {
    /// Meets the peer: writes a greeting into its memory, and gives what it wrote into ours.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong, within 30 seconds for each step.
    pub async fn run(&self, device: &Device) -> Result<String, Box<dyn Error + Send + Sync>> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(device, CompletionMode::Event)?;
        let qp = QueuePair::new(&pd, &queue)?;
        let pool = Pool::new(&pd, SLOT, 4)?;
        let region =
            ExposedRegion::new(&pd, vec![0; SLOT], Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        // Before anybody knows of us: whatever the peer sends finds a receive.
        let written = qp.recv(pool.try_alloc(0)?);

        let ours = Announcement { endpoint: qp.endpoint(), region: region.grant() };
        let theirs = self.exchange(&ours).await?;
        // The peer knows of us as well, but may be seconds behind: what we send is repeated until it has connected.
        let options =
            ConnectOptions { timeout: AckTimeout::from_code(19), ..ConnectOptions::default() };
        qp.connect_with(&theirs.endpoint, &options)?;

        let greeting = format!("{} was here", self.name);
        let there = theirs.region.slice(..greeting.len() as u64)?;
        qp.write(pool.copy_from(greeting.as_bytes())?, there).await?;
        // What it reads back is there: the peer's memory was written before the message is sent.
        let back = qp.read(pool.try_alloc(greeting.len())?, there).await?;
        if back[..] != *greeting.as_bytes() {
            return Err(
                format!("{} has {:?} in its memory, not {greeting:?}", self.peer, back).into()
            );
        }
        let told = qp.send(pool.copy_from(b"")?);
        let message = tokio::time::timeout(PATIENCE, written).await??;
        told.await?;
        debug_assert!(message.buffer.is_empty());

        let mut bytes = vec![0; SLOT];
        region.read(0, &mut bytes)?;
        let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(SLOT);
        Ok(String::from_utf8(bytes[..len].to_vec())?)
    }

    /// Announces ourselves and waits for the peer's announcement.
    async fn exchange(&self, ours: &Announcement) -> Result<Announcement, reqwest::Error> {
        let client =
            reqwest::Client::builder().timeout(PATIENCE + Duration::from_secs(5)).build()?;
        let at = |name: &str| format!("{}/nodes/{name}/rdma/endpoint", self.service);
        client.post(at(&self.name)).json(ours).send().await?.error_for_status()?;
        let wait = [("wait", PATIENCE.as_secs())];
        client.get(at(&self.peer)).query(&wait).send().await?.error_for_status()?.json().await
    }
}
