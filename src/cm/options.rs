//! Settings of listeners and connections.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::error::{LimitError, SetupError};
use crate::op::ConnectOptions;

/// How to connect, or to accept.
///
/// ```
/// use std::time::Duration;
/// use tokio_rdma::cm::{self, Options};
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let listener = cm::Listener::bind(&device, "127.0.0.1:0").await?;
/// # let client = async {
/// #     let route = cm::resolve(&device, listener.local_addr()).await?;
/// #     let qp = route.prepare(QueuePair::builder(&pd, &queue)).build()?;
/// let options = Options::default().timeout(Duration::from_secs(5)).private_data(*b"v2");
/// let link = route.connect(&qp, &options).await?;
/// #     Ok::<_, Box<dyn std::error::Error>>((link, qp))
/// # };
/// # let server = async {
/// let request = listener.accept().await?;
/// assert!(request.private_data().starts_with(b"v2"));
/// #     let qp = request.prepare(QueuePair::builder(&pd, &queue)).build()?;
/// #     let link = request.accept(&qp, &Options::default()).await?;
/// #     Ok::<_, Box<dyn std::error::Error>>((link, qp))
/// # };
/// # tokio::try_join!(server, client)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    source: Option<IpAddr>,
    resolve_timeout: Duration,
    timeout: Duration,
    private_data: Vec<u8>,
    reads: Option<u8>,
    keepalive: Option<Duration>,
    transport: ConnectOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            source: None,
            // A lookup and ARP, each with a repetition or two.
            resolve_timeout: Duration::from_secs(5),
            // Some repetitions of the kernel's manager, which waits 4.3 s between two.
            timeout: Duration::from_secs(15),
            private_data: Vec::new(),
            reads: None,
            keepalive: None,
            transport: ConnectOptions::default(),
        }
    }
}

impl Options {
    /// Address to connect from, one of the device's; unless set, that which the routes of this machine choose. It decides
    /// where several devices lead to the peer, or the shortest way is not to be taken.
    #[must_use]
    pub const fn source(mut self, address: IpAddr) -> Self {
        self.source = Some(address);
        self
    }

    /// Time for looking up a host, and again for resolving the route to each of its addresses that is tried: one that does
    /// not answer leaves the next as much; 5 s unless set.
    #[must_use]
    pub const fn resolve_timeout(mut self, timeout: Duration) -> Self {
        self.resolve_timeout = timeout;
        self
    }

    /// Time for the handshake with each address that is tried, and later for the answer to our goodbye; 15 s unless set. The
    /// peer's program has to accept within it. The kernel's manager repeats a lost message after 4.3 s; the software
    /// device's after 0.27 s, then after twice the wait before, up to 4.3 s, until this time has passed.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Bytes that travel with the request (at most 56), or with the answer (at most 196); none unless set.
    ///
    /// The other side sees them padded with zeros, because the messages of IBTA 12.6 do not carry their length. Begin them with a
    /// length if trailing zeros matter. [`ConnectionConfig::user_data`](crate::ConnectionConfig::user_data) arrives with its length.
    #[must_use]
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// READs and atomics that either side issues at once, at most; as many as both devices can unless set. With 0 there
    /// are none. More than this side's device serves or issues ([`DeviceAttr::max_qp_rd_atom`](crate::types::DeviceAttr),
    /// `max_qp_init_rd_atom`) are refused; the other side may agree to fewer.
    #[must_use]
    pub const fn reads(mut self, reads: u8) -> Self {
        self.reads = Some(reads);
        self
    }

    /// Probes the peer when nothing was in flight and nothing has arrived for `interval`; never unless set. For a side that only
    /// waits to receive: a peer whose process is killed, or whose host is gone, says no goodbye, and nothing of a queue pair that
    /// sends nothing notices that.
    ///
    /// A probe is a WRITE of no bytes, which no program at the peer sees. If it is not acknowledged within the retries of
    /// [`transport`](Self::transport), the link ends as [`Disconnection::Silent`](super::Disconnection::Silent), the queue pair
    /// goes to the error state, and its receives are flushed: that takes at most two intervals and the retries.
    ///
    /// - The peer's queue pair must allow REMOTE_WRITE, as it does unless told otherwise, here and in librdmacm; else the first
    ///   probe ends the link as [`Disconnection::ProbeFailed`](super::Disconnection::ProbeFailed).
    /// - So does a queue pair in the error state: other work has failed, or the peer has asked for what is not allowed. A program
    ///   that resets its queue pair itself is left alone until that can post again.
    /// - An acknowledgement timeout without end ([`AckTimeout`](crate::types::AckTimeout) of code 0) is refused.
    /// - A probe takes one of [`max_send_wr`](crate::op::QueuePairBuilder::max_send_wr) until it is acknowledged, and one completion,
    ///   which is counted there. It is posted only while nothing else is in flight; what is posted meanwhile may have to wait
    ///   for it if the send queue is otherwise full. Make the send queue one larger if a `try_` form must not find it full.
    /// - Deadlines are in real time; probes are sent by a task of the runtime that has connected, as long as that runs.
    #[must_use]
    pub const fn keepalive(mut self, interval: Option<Duration>) -> Self {
        self.keepalive = interval;
        self
    }

    /// Timeouts and retries of the connection. They hold for this side, whatever the other one proposes, and are not sent to
    /// it: a peer that sets none of its own gets 6 retries, RNR retries without end, and from a software device an
    /// acknowledgement timeout of 537 ms.
    #[must_use]
    pub const fn transport(mut self, transport: ConnectOptions) -> Self {
        self.transport = transport;
        self
    }

    /// Where to connect from, with any port; of the family of `destination`.
    pub(super) fn source_to(
        &self,
        destination: SocketAddr,
    ) -> Result<Option<SocketAddr>, SetupError> {
        let Some(source) = self.source else { return Ok(None) };
        if source.is_ipv4() != destination.is_ipv4() {
            let (ours, theirs) = (source.to_string(), destination.ip().to_string());
            return Err(SetupError::Mismatch {
                what: "family of the source address",
                ours,
                theirs,
            });
        }
        Ok(Some(SocketAddr::new(source, 0)))
    }

    pub(super) const fn time_to_resolve(&self) -> Duration {
        self.resolve_timeout
    }

    pub(super) const fn deadline(&self) -> Duration {
        self.timeout
    }

    pub(super) const fn probes(&self) -> Option<Duration> {
        self.keepalive
    }

    /// READs and atomics at once, unless the devices decide.
    pub(super) const fn reads_asked(&self) -> Option<u8> {
        self.reads
    }

    /// What is sent along, and the timers, all within their limits.
    pub(super) fn checked(&self, most_data: usize) -> Result<(&[u8], ConnectOptions), LimitError> {
        LimitError::check("private_data", self.private_data.len() as u64, most_data as u64)?;
        self.transport.check()?;
        Ok((&self.private_data, self.transport))
    }
}

/// How to listen.
///
/// ```
/// use tokio_rdma::cm::{ListenOptions, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let options = ListenOptions::default().backlog(64);
/// let listener = Listener::bind_with(&device, "127.0.0.1:0", &options).await?;
/// assert_ne!(listener.local_addr().port(), 0);
/// assert!(Listener::bind_with(&device, "127.0.0.1:0", &options.backlog(0)).await.is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenOptions {
    backlog: u32,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024 }
    }
}

impl ListenOptions {
    /// Requests that wait at most; 1024 unless set, some 2 KiB each. At least 1: 0 is refused.
    ///
    /// The software device's manager asks the peers beyond that to try again a little later, until a request was answered or
    /// their deadline has passed; a request counts until it is accepted or rejected. The kernel's counts only those that the
    /// program has not seen; beyond, requests are rejected here, with reason
    /// [`CONSUMER`](crate::cm::RejectReason::CONSUMER).
    ///
    /// The backlog is the only limit of a [`Listener`](super::Listener) on requests that wait. A request that the program has
    /// accepted counts no more, although its peer may never confirm: it holds the program's queue pair until
    /// [`Request::accept`](super::Request::accept) returns, at the latest after [`Options::timeout`]. The program bounds how many
    /// requests it accepts at a time. On the software device, 256 requests of one source and 4,096 of all sources may wait for their
    /// answer or its confirmation; further ones are asked to try again. While more than 2,048 do, a request that the
    /// program has accepted is given up after 1.1 s. Requests that wait do not give way to later ones: a listener that
    /// has to withstand forged requests is a [`tokio_rdma::Listener`](crate::Listener).
    #[must_use]
    pub const fn backlog(mut self, requests: u32) -> Self {
        self.backlog = requests;
        self
    }

    /// Requests that wait at most, within its limit.
    pub(super) fn checked(&self) -> Result<u32, SetupError> {
        SetupError::at_least("backlog", self.backlog.into(), 1)?;
        Ok(self.backlog)
    }
}
