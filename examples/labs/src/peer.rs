//! One end of a lab, and the TCP control channel between the ends.

use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::{AckTimeout, GidEntry, PortAttr};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device, ExposedRegion,
    Pool, ProtectionDomain, QueuePair, QueuePairEndpoint, RemoteRegion,
};

use crate::{Result, check, in_time, processor_time};

const MAX_MESSAGE: usize = 64 << 10;
/// The other end may have work to do first. If its process exits, the channel closes at once.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(300);

/// One end of a lab.
#[derive(Debug)]
pub struct Peer {
    /// True with `--quick`.
    pub quick: bool,
    device: Device,
    stream: TcpStream,
    /// True if both ends are in this process.
    here: bool,
}

impl Peer {
    /// Checks that the other end runs the same lab.
    pub(crate) async fn new(
        name: &str,
        quick: bool,
        device: Device,
        stream: TcpStream,
        here: bool,
    ) -> Result<Self> {
        stream.set_nodelay(true)?;
        let mut peer = Self { quick, device, stream, here };
        let ours = format!("{name}{}", if quick { " --quick" } else { "" });
        let theirs = in_time("the other end's greeting", peer.exchange(ours.as_bytes())).await?;
        check("the other end's lab", String::from_utf8_lossy(&theirs).into_owned(), ours)?;
        Ok(peer)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the port and the GID of the path to the other end.
    ///
    /// # Errors
    ///
    /// No port is active.
    pub fn path(&self) -> Result<(PortAttr, GidEntry)> {
        Ok(match self.host()? {
            Some(host) => self.device.path_to(host.into())?,
            None => self.device.default_path()?,
        })
    }

    /// Returns the address to select a GID for; `None` if the other end is on this host.
    fn host(&self) -> Result<Option<IpAddr>> {
        let host = self.stream.peer_addr()?.ip();
        Ok((!host.is_loopback()).then_some(host))
    }

    /// Creates the objects that queue pairs and memory are made from.
    ///
    /// # Errors
    ///
    /// The device refuses one of them.
    pub fn end(&self, mode: &CompletionMode) -> Result<End> {
        let pd = self.device.protection_domain()?;
        let queue = CompletionQueue::new(&self.device, mode.clone())?;
        Ok(End { pd, queue, host: self.host()? })
    }

    /// Returns the local address of the control channel.
    ///
    /// # Errors
    ///
    /// `getsockname(2)` failed.
    pub fn address(&self) -> Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// Exchanges messages with the other end, which makes the same call.
    ///
    /// # Errors
    ///
    /// The other end has exited, or sends too long a message, or none.
    pub async fn exchange(&mut self, ours: &[u8]) -> Result<Vec<u8>> {
        let exchanged = async {
            let length = u32::try_from(ours.len())?;
            self.stream.write_all(&[&length.to_be_bytes(), ours].concat()).await?;
            let length = self
                .stream
                .read_u32()
                .await
                .map_err(|error| format!("the other end has exited: {error}"))?
                as usize;
            if length > MAX_MESSAGE {
                return Err(format!(
                    "the other end sent {length} bytes; the limit is {MAX_MESSAGE}"
                )
                .into());
            }
            let mut theirs = vec![0; length];
            self.stream.read_exact(&mut theirs).await?;
            Ok(theirs)
        };
        timeout(EXCHANGE_TIMEOUT, exchanged)
            .await
            .map_err(|_| format!("the other end sent nothing for {EXCHANGE_TIMEOUT:?}"))?
    }

    /// Waits until the other end has reached this point too.
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange).
    pub async fn barrier(&mut self) -> Result<()> {
        let received = self.exchange(&[]).await?;
        check("length of the other end's barrier message", received.len(), 0)
    }

    /// Connects a queue pair to the other end's, which makes the same call.
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange); or the queue pairs do not match.
    pub async fn connect(&mut self, qp: &QueuePair) -> Result<()> {
        self.connect_with(qp, &long_ack_timeout()).await
    }

    /// Connects with the given timeouts and retries.
    ///
    /// # Errors
    ///
    /// See [`connect`](Self::connect).
    pub async fn connect_with(&mut self, qp: &QueuePair, options: &RetryConfig) -> Result<()> {
        let theirs = self.exchange(&qp.endpoint().to_bytes()).await?;
        qp.connect_with(&QueuePairEndpoint::from_bytes(&theirs)?, options)?;
        // Neither end may send before both are connected.
        self.barrier().await
    }

    /// Makes a connection for messages with the other end, which makes the same call.
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange); or a side refuses the settings.
    pub async fn connection(&mut self, config: &ConnectionConfig) -> Result<Connection> {
        let config = config.clone().retries(long_ack_timeout());
        let config = match self.host()? {
            Some(host) => config.peer(host),
            None => config,
        };
        let prepared = Connection::prepare(&self.device.protection_domain()?, &config)?;
        let theirs = self.exchange(&prepared.endpoint().to_bytes()).await?;
        let endpoint = QueuePairEndpoint::from_bytes(&theirs)?;
        let handshake = self.exchange(&prepared.handshake(&[])?).await?;
        Ok(prepared.establish(&endpoint, &handshake)?)
    }

    /// Grants memory to the other end, which calls [`offered`](Self::offered).
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange).
    pub async fn offer(&mut self, memory: &ExposedRegion) -> Result<()> {
        self.exchange(&memory.grant().to_bytes()).await?;
        Ok(())
    }

    /// Returns the memory that the other end grants by [`offer`](Self::offer).
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange); or the message is not a grant.
    pub async fn offered(&mut self) -> Result<RemoteRegion> {
        let received = self.exchange(&[]).await?;
        Ok(RemoteRegion::from_bytes(&received).ok_or("malformed memory grant of the other end")?)
    }

    /// Returns the processor time of both ends since each got `before` from [`processor_time`].
    ///
    /// # Errors
    ///
    /// See [`exchange`](Self::exchange).
    pub async fn used_since(&mut self, before: Duration) -> Result<Duration> {
        self.barrier().await?;
        let ours = processor_time()?.saturating_sub(before);
        let theirs = self.exchange(&u64::try_from(ours.as_nanos())?.to_be_bytes()).await?;
        let theirs = Duration::from_nanos(u64::from_be_bytes(theirs[..].try_into()?));
        // Both ends count the same process.
        Ok(if self.here { ours } else { ours + theirs })
    }
}

/// Returns an ACK timeout of 0.5 s instead of 67 ms: on a busy machine the peer may wait for a
/// processor.
#[must_use]
pub fn long_ack_timeout() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() }
}

/// The objects that queue pairs and memory are made from.
#[derive(Debug)]
pub struct End {
    /// The protection domain.
    pub pd: ProtectionDomain,
    /// The completion queue.
    pub queue: CompletionQueue,
    host: Option<IpAddr>,
}

impl End {
    /// Creates a queue pair for a reliable connection.
    ///
    /// # Errors
    ///
    /// The device refuses.
    pub fn queue_pair(&self) -> Result<QueuePair> {
        let builder = QueuePair::builder(&self.pd, &self.queue);
        Ok(match self.host {
            Some(host) => builder.peer(host).build()?,
            None => builder.build()?,
        })
    }

    /// Allocates zeroed memory that peers may read, write and change atomically.
    ///
    /// # Errors
    ///
    /// The memory cannot be allocated or registered.
    pub fn expose(&self, bytes: usize) -> Result<ExposedRegion> {
        Ok(ExposedRegion::new(&self.pd, HostMemory::zeroed(bytes)?, Access::REMOTE_ALL)?)
    }

    /// Creates a pool of registered buffers.
    ///
    /// # Errors
    ///
    /// The memory cannot be registered.
    pub fn pool(&self, bytes: usize, buffers: usize) -> Result<Pool> {
        Ok(Pool::new(&self.pd, bytes, buffers)?)
    }
}
