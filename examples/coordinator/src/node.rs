//! A node: it announces itself, finds its peer, then accesses the peer's memory.

use std::error::Error;
use std::time::Duration;

use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair};

use crate::Announcement;

const SLOT: usize = 256;

const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A node and its peer.
#[derive(Debug, Clone)]
pub struct Node {
    /// This node's name.
    pub name: String,
    /// The peer's name.
    pub peer: String,
    /// The service's URL: `http://host:port`.
    pub service: String,
}

impl Node {
    /// Writes a greeting into the peer's memory, and returns the greeting that the peer wrote into
    /// this node's.
    ///
    /// # Errors
    ///
    /// Any failure of the service, the device or the peer. Each step has a limit of 30 seconds.
    pub async fn run(&self, device: &Device) -> Result<String, Box<dyn Error + Send + Sync>> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(device, CompletionMode::Event)?;
        let qp = QueuePair::new(&pd, &queue)?;
        let pool = Pool::new(&pd, SLOT, 4)?;
        let region =
            ExposedRegion::new(&pd, vec![0; SLOT], Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        // Posted before the announcement, so that the peer's message always finds a receive.
        let written = qp.recv(pool.try_alloc(0)?);

        let ours = Announcement { endpoint: qp.endpoint(), region: region.grant() };
        let theirs = self.exchange(&ours).await?;
        // The peer may connect seconds later: the device retransmits until then.
        let retries = RetryConfig { timeout: AckTimeout::from_code(19), ..RetryConfig::default() };
        qp.connect_with(&theirs.endpoint, &retries)?;

        let greeting = format!("{} was here", self.name);
        let there = theirs.region.slice(..greeting.len() as u64)?;
        qp.write(pool.copy_from(greeting.as_bytes())?, there).await?;
        // The READ proves that the WRITE is in the peer's memory before the message is sent.
        let back = qp.read(pool.try_alloc(greeting.len())?, there).await?;
        if back[..] != *greeting.as_bytes() {
            return Err(
                format!("{} has {:?} in its memory, not {greeting:?}", self.peer, back).into()
            );
        }
        let sent = qp.send(pool.copy_from(b"")?);
        let message = tokio::time::timeout(STEP_TIMEOUT, written).await??;
        sent.await?;
        debug_assert!(message.buffer.is_empty());

        let mut bytes = vec![0; SLOT];
        region.read(0, &mut bytes)?;
        let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(SLOT);
        Ok(String::from_utf8(bytes[..len].to_vec())?)
    }

    async fn exchange(&self, ours: &Announcement) -> Result<Announcement, reqwest::Error> {
        let client =
            reqwest::Client::builder().timeout(STEP_TIMEOUT + Duration::from_secs(5)).build()?;
        let at = |name: &str| format!("{}/nodes/{name}/rdma/endpoint", self.service);
        client.post(at(&self.name)).json(ours).send().await?.error_for_status()?;
        let wait = [("wait", STEP_TIMEOUT.as_secs())];
        client.get(at(&self.peer)).query(&wait).send().await?.error_for_status()?.json().await
    }
}
