//! One end of a lab, and the channel over which it tells the other what RDMA has to know before it begins.

use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::{AckTimeout, GidEntry, PortAttr};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair, QueuePairEndpoint, RemoteRegion,
};

use crate::{Result, check, in_time, processor_time};

/// Most bytes of one thing told.
const LONGEST: usize = 64 << 10;
/// The other end may have work of its own to do first. If its process ends, we hear of it at once.
const PATIENCE: Duration = Duration::from_secs(300);

/// One end.
#[derive(Debug)]
pub struct Peer {
    /// `--quick`: as little as shows that it works.
    pub quick: bool,
    device: Device,
    stream: TcpStream,
    /// Both ends are one process.
    here: bool,
}

impl Peer {
    /// Makes sure that the other end is of the same lab.
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
        check("what the other end runs", String::from_utf8_lossy(&theirs).into_owned(), ours)?;
        Ok(peer)
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Port and GID from which the other end is reached.
    ///
    /// # Errors
    ///
    /// If no port is active.
    pub fn path(&self) -> Result<(PortAttr, GidEntry)> {
        Ok(match self.host()? {
            Some(host) => self.device.path_to(host.into())?,
            None => self.device.default_path()?,
        })
    }

    /// The host to choose a GID for: another one.
    fn host(&self) -> Result<Option<IpAddr>> {
        let host = self.stream.peer_addr()?.ip();
        Ok((!host.is_loopback()).then_some(host))
    }

    /// What queue pairs and memory are made of.
    ///
    /// # Errors
    ///
    /// If the device refuses.
    pub fn end(&self, mode: &CompletionMode) -> Result<End> {
        let pd = self.device.protection_domain()?;
        let queue = CompletionQueue::new(&self.device, mode.clone())?;
        Ok(End { pd, queue, host: self.host()? })
    }

    /// Address of the channel at this end.
    ///
    /// # Errors
    ///
    /// If the kernel does not say.
    pub fn address(&self) -> Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip())
    }

    /// Tells the other end something, and hears what it tells: both have come as far as this.
    ///
    /// # Errors
    ///
    /// If the other end is gone, says too much, or nothing.
    pub async fn exchange(&mut self, ours: &[u8]) -> Result<Vec<u8>> {
        let exchanged = async {
            let length = u32::try_from(ours.len())?;
            self.stream.write_all(&[&length.to_be_bytes(), ours].concat()).await?;
            let length = self
                .stream
                .read_u32()
                .await
                .map_err(|error| format!("the other end is gone: {error}"))?
                as usize;
            if length > LONGEST {
                return Err(
                    format!("the other end tells {length} bytes; {LONGEST} are allowed").into()
                );
            }
            let mut theirs = vec![0; length];
            self.stream.read_exact(&mut theirs).await?;
            Ok(theirs)
        };
        timeout(PATIENCE, exchanged)
            .await
            .map_err(|_| format!("the other end says nothing for {PATIENCE:?}"))?
    }

    /// Waits until the other end has come as far as this.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange), or if the other end is elsewhere.
    pub async fn meet(&mut self) -> Result<()> {
        let told = self.exchange(&[]).await?;
        check("bytes told where nothing was to be told", told.len(), 0)
    }

    /// Connects a queue pair to that of the other end, which does the same.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange), or if the two do not fit together.
    pub async fn connect(&mut self, qp: &QueuePair) -> Result<()> {
        self.connect_with(qp, &patient()).await
    }

    /// As [`connect`](Self::connect), with timeouts and retries of one's own.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with(&mut self, qp: &QueuePair, options: &ConnectOptions) -> Result<()> {
        let theirs = self.exchange(&qp.endpoint().to_bytes()).await?;
        qp.connect_with(&QueuePairEndpoint::from_bytes(&theirs)?, options)?;
        // Nothing is sent before both hear.
        self.meet().await
    }

    /// Lets the other end, which calls [`offered`](Self::offered), use this memory.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange).
    pub async fn offer(&mut self, memory: &ExposedRegion) -> Result<()> {
        self.exchange(&memory.grant().to_bytes()).await?;
        Ok(())
    }

    /// The memory that the other end [`offer`](Self::offer)s.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange), or if what was told is no memory.
    pub async fn offered(&mut self) -> Result<RemoteRegion> {
        let told = self.exchange(&[]).await?;
        Ok(RemoteRegion::from_bytes(&told).ok_or("the other end offers what is no memory")?)
    }

    /// Processor time that both ends have used since each called [`processor_time`] and got `before`.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange).
    pub async fn used_since(&mut self, before: Duration) -> Result<Duration> {
        self.meet().await?;
        let ours = processor_time()?.saturating_sub(before);
        let theirs = self.exchange(&u64::try_from(ours.as_nanos())?.to_be_bytes()).await?;
        let theirs = Duration::from_nanos(u64::from_be_bytes(theirs[..].try_into()?));
        // What one process has used, both of its ends have counted.
        Ok(if self.here { ours } else { ours + theirs })
    }
}

/// What is not acknowledged is repeated after half a second instead of 67 ms: on a busy machine the other end may have to wait
/// for a processor.
#[must_use]
pub fn patient() -> ConnectOptions {
    ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() }
}

/// What queue pairs and memory of one end are made of.
#[derive(Debug)]
pub struct End {
    /// Who may reach what.
    pub pd: ProtectionDomain,
    /// Where completions arrive.
    pub queue: CompletionQueue,
    host: Option<IpAddr>,
}

impl End {
    /// A queue pair of reliable connection, to be connected.
    ///
    /// # Errors
    ///
    /// If the device refuses.
    pub fn queue_pair(&self) -> Result<QueuePair> {
        let builder = QueuePair::builder(&self.pd, &self.queue);
        Ok(match self.host {
            Some(host) => builder.peer(host).build()?,
            None => builder.build()?,
        })
    }

    /// Zeroed memory that peers may read, write and change atomically.
    ///
    /// # Errors
    ///
    /// If there is no such memory, or it cannot be registered.
    pub fn expose(&self, bytes: usize) -> Result<ExposedRegion> {
        Ok(ExposedRegion::new(&self.pd, HostMemory::zeroed(bytes)?, Access::REMOTE_ALL)?)
    }

    /// Registered buffers.
    ///
    /// # Errors
    ///
    /// If they cannot be registered.
    pub fn pool(&self, bytes: usize, buffers: usize) -> Result<Pool> {
        Ok(Pool::new(&self.pd, bytes, buffers)?)
    }
}
