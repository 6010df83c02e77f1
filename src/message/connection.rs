//! What a service holds of a connection.

use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{Sink, Stream};
use tokio::net::ToSocketAddrs;

use super::admission::{Admitted, Refusal};
use super::config::{Completions, ConnectionConfig};
use super::core::{ConnectionCounters, Core};
use super::driver::drive;
use super::error::{CloseReason, EstablishError, MessageError};
use super::halves::{RecvHalf, SendHalf, Turn};
use super::handshake::{Handshake, HandshakeError, Rejection};
use super::shared::Shared;
use crate::cm::{self, Link, clock};
use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::engine::CompletionQueue;
use crate::error::{NoRuntime, OpErrorKind, SetupError};
use crate::memory::Pool;
use crate::op::{QueuePair, QueuePairBuilder, QueuePairEndpoint};
use crate::verbs::{Device, ProtectionDomain};
use rdma_provider::cm_contract::MAX_REQUEST_DATA;

/// A reliable connection that carries messages both ways, and reads and writes memory that the peer has exposed.
///
/// All methods take `&self`: tasks may share it, in an `Arc`. Messages sent by one task arrive in the order in which it sent
/// them. [`into_split`](Self::into_split) gives halves to own, which are a [`Sink`] and a [`Stream`].
///
/// ```
/// use tokio_rdma::{Connection, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let connecting = Connection::connect(&device, listener.local_addr());
/// let (theirs, ours) = tokio::try_join!(listener.accept(), connecting)?;
///
/// ours.send("hello").await?;
/// assert_eq!(theirs.recv().await?.as_deref(), Some(&b"hello"[..]));
/// tokio::try_join!(ours.close(), theirs.close())?;
/// # Ok(())
/// # }
/// ```
///
/// # The end
///
/// [`finish`](Self::finish) says that no more messages come: the peer's [`recv`](Self::recv) gives `None` after the last one.
/// [`close`](Self::close) finishes, and waits until the peer has, too. When both have, and all messages have arrived, the
/// connection ends cleanly, by itself. Any other end is an error with its [`CloseReason`], at both ends.
/// [`abort`](Self::abort) ends it at once.
///
/// Dropping it is a clean end only if `recv` has given `None`: then it finishes as `close` does, and nobody is told whether
/// the last messages have arrived. Otherwise the peer is told, as well as that is possible, that this end was dropped
/// ([`CloseReason::Dropped`]). Either takes place in the background, for at most a second; messages that the peer was to
/// fetch, and has not, are lost.
///
/// # Operations of the service
///
/// [`read`](Self::read), [`write`](Self::write), the atomics and [batches](Self::post_batch) use the queue pair of the messages,
/// and wait in line with them for room: a service that lets thousands line up holds up its own messages, and the answers that
/// its peer waits for. One that fails at the peer ends the connection, as it ends the queue pair.
///
/// # Cancel safety
///
/// That of its methods, of its halves where it is used as a [`Stream`] or a [`Sink`].
pub struct Connection {
    send: SendHalf,
    recv: RecvHalf,
}

/// What all parts of a connection that a service holds share.
pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
    close_timeout: Duration,
    pub(super) buffer_size: usize,
    peer: Handshake,
    user_data: Bytes,
    /// Ours and the peer's.
    addresses: Option<(SocketAddr, SocketAddr)>,
    /// Of [`Connection::alloc`]; made when first needed.
    pub(super) buffers: OnceLock<Pool>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.abandon();
    }
}

impl Connection {
    /// Connects to a [`Listener`](super::Listener), with default settings: to the first of the addresses that answers.
    ///
    /// # Errors
    ///
    /// As [`connect_with`](Self::connect_with).
    ///
    /// # Cancel safety
    ///
    /// As [`connect_with`](Self::connect_with): dropping the future takes the request back.
    pub async fn connect(
        device: &Device,
        address: impl ToSocketAddrs,
    ) -> Result<Self, EstablishError> {
        Self::connect_with(device, address, &ConnectionConfig::default()).await
    }

    /// Connects to a [`Listener`](super::Listener): to the first of the addresses that answers.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside of a Tokio runtime with an I/O driver,
    /// [`EstablishError::Connect`] if the two sides do not meet, also within
    /// [`connect_timeout`](ConnectionConfig::connect_timeout), [`EstablishError::Setup`] for settings that the device does
    /// not allow, [`EstablishError::Handshake`] for more [`user_data`](ConnectionConfig::user_data) than a request carries,
    /// [`EstablishError::OtherProtocol`] if the other side is no listener of this kind, [`EstablishError::Rejected`] if its
    /// service rejects the connection, [`EstablishError::Refused`] if it has as many as it may have. An address that leads elsewhere than
    /// [`peer`](ConnectionConfig::peer) or [`source`](ConnectionConfig::source) of the settings say is passed over; if there is no
    /// other, that is [`ConnectError::Setup`](cm::ConnectError::Setup) with [`SetupError::Mismatch`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future takes the request back.
    pub async fn connect_with(
        device: &Device,
        address: impl ToSocketAddrs,
        config: &ConnectionConfig,
    ) -> Result<Self, EstablishError> {
        let options = config.cm_options(MAX_REQUEST_DATA)?;
        let pd = config.domain(device)?;
        let mut prepared = None;
        let (_, link) = cm::connect(device, address, &options, |route| {
            config.check_path((route.port(), route.gid_index()), route.destination())?;
            let made = PreparedConnection::new(&pd, config, |builder| route.prepare(builder))?;
            Ok(prepared.insert(made).qp.clone())
        })
        .await
        .map_err(rejected)?;
        let Some(prepared) = prepared else { unreachable!("a queue pair was connected") };
        let address = link.peer_addr();
        let (handshake, user_data) = Handshake::decode(link.private_data())
            .map_err(|error| EstablishError::OtherProtocol { address, error })?;
        let user_data = Bytes::copy_from_slice(user_data);
        prepared.start(handshake, user_data, Some(link), None)
    }

    /// Makes what is needed to connect: a queue pair in INIT with its receives posted. For services with a control plane of
    /// their own; exchange [`PreparedConnection::endpoint`] and [`PreparedConnection::handshake`] with the peer over that. On a port with several GIDs, say
    /// whom it is for by [`ConnectionConfig::peer`], or where it sends from by [`ConnectionConfig::source`].
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] and [`SetupError::TooSmall`] with the setting that the device or the protocol does not allow,
    /// [`SetupError::NoGid`] without an active port or the entry asked for, else as [`QueuePairBuilder::build`].
    pub fn prepare(
        pd: &ProtectionDomain,
        config: &ConnectionConfig,
    ) -> Result<PreparedConnection, SetupError> {
        PreparedConnection::new(pd, config, |builder| builder.path(config.path))
    }

    /// Sends a message: up to the peer's `receive_buffer_size` it is copied, a longer one is read by the peer from where it
    /// is. Ready when it is on its way and others may follow; [`flush`](Self::flush) waits until it has arrived.
    ///
    /// Waits while the peer's service takes no messages, and while it has as many long ones to fetch as `send_memory` allows.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`] above the peer's longest message, [`MessageError::Finished`] after
    /// [`finish`](Self::finish), [`MessageError::Register`] if a long message cannot be registered;
    /// [`MessageError::Closed`] with the reason if the connection has ended, which also loses messages on their way.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped before it was ready, the message was not sent, and will not be.
    pub async fn send(&self, message: impl Into<Bytes>) -> Result<(), MessageError> {
        self.send.send(message).await
    }

    /// The next message, or `None` if the peer has finished.
    ///
    /// It is not copied unless it is short (256 bytes) or [`spare_buffers`](ConnectionConfig::spare_buffers) messages are
    /// held already; its buffer is used again when its last clone is dropped.
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] with the reason if the connection has ended otherwise. Messages that had arrived before come
    /// first.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped before it was ready, no message is lost.
    pub async fn recv(&self) -> Result<Option<Bytes>, MessageError> {
        self.recv.recv().await
    }

    /// Waits until all messages sent so far have arrived: short ones in a buffer of the peer, long ones fetched.
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] with the reason if the connection has ended.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost if it is dropped.
    pub async fn flush(&self) -> Result<(), MessageError> {
        self.send.flush().await
    }

    /// Says that no more messages come. The peer's may go on.
    ///
    /// Sends that still wait fail as [`MessageError::Finished`].
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] with the reason if the connection has ended.
    pub fn finish(&self) -> Result<(), MessageError> {
        self.send.finish()
    }

    /// Finishes, waits until the peer has finished too and all has arrived, and closes the queue pair. Messages of the peer that
    /// were not received are thrown away: receive until `None` before, if they matter.
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] with the reason if the connection ends otherwise; after
    /// [`close_timeout`](ConnectionConfig::close_timeout) that is [`CloseReason::CloseTimeout`].
    ///
    /// # Cancel safety
    ///
    /// Once polled, no messages are sent or received any more, and the rest goes on in the background until the connection
    /// is dropped. It can be called again, to wait.
    pub async fn close(&self) -> Result<(), MessageError> {
        let handle = self.handle();
        handle.shared.with(|core, bell| core.close(bell));
        let mut turn = Turn::new(&handle.shared, Core::leave_flushers);
        let mut gone = async || {
            poll_fn(|context| {
                handle.shared.poll(context, |core, bell, guest| {
                    core.poll_closed(&mut turn.ticket, bell, guest)
                })
            })
            .await
        };
        let reason = match clock::timeout(handle.close_timeout, gone()).await {
            Some(reason) => reason,
            None => {
                handle.shared.abort(CloseReason::CloseTimeout);
                gone().await
            }
        };
        if reason == CloseReason::Clean { Ok(()) } else { Err(reason.into()) }
    }

    /// Ends it now, without having finished: for a service that is wrong about its peer, or must not write any more. If it has
    /// ended already, nothing changes.
    ///
    /// When this returns, messages that wait to be sent or received fail with [`CloseReason::Aborted`], messages that have arrived
    /// are thrown away, and operations that are called fail as [`OpErrorKind::Closed`]. Those that
    /// stand in line are not carried out any more. They fail, and those that are in flight end, flushed or as `Closed`, once the
    /// peer's device has taken the word that this end is gone, and within a second if it does not: until then what is in flight may
    /// be carried out, and its buffers belong to the device. [`close`](Self::close), called after this, waits until all of that is
    /// over. If its runtime shuts down before, that is over with it.
    ///
    /// The peer finds [`CloseReason::Dropped`], or [`CloseReason::Disconnected`] if the connection manager is faster; the reason is
    /// not for it to know, and a service that wants to tell it sends a message before. It is not told if operations stand in line
    /// before the word, if it has no receive for that, if it has not established the connection yet, or if the runtime shuts down.
    /// Out of band it then finds out when it asks for an answer ([`keepalive`](ConnectionConfig::keepalive)), or by an operation
    /// that fails.
    pub fn abort(&self) {
        self.send.abort();
    }

    /// Why it has ended, if it has.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.handle().shared.with(|core, _| core.ended())
    }

    /// Halves that two tasks can own. The connection is dropped when both are.
    #[must_use]
    pub fn into_split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    /// The connection of two halves.
    ///
    /// # Errors
    ///
    /// The halves, if they are not of one connection.
    #[expect(clippy::result_large_err, reason = "it gives back what it was given")]
    pub fn reunite(send: SendHalf, recv: RecvHalf) -> Result<Self, (SendHalf, RecvHalf)> {
        if Arc::ptr_eq(&send.handle, &recv.handle) {
            Ok(Self { send, recv })
        } else {
            Err((send, recv))
        }
    }

    /// Longest message that the peer takes, in bytes.
    #[must_use]
    pub fn max_message(&self) -> u64 {
        self.handle().shared.with(|core, _| core.max_message())
    }

    /// What the peer said of itself.
    #[must_use]
    pub fn peer(&self) -> Handshake {
        self.handle().peer
    }

    /// Our address, if it was connected by address.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.handle().addresses.map(|(local, _)| local)
    }

    /// The peer's address, if it was connected by address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.handle().addresses.map(|(_, peer)| peer)
    }

    /// What the peer's service gave along when it connected.
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        &self.handle().user_data
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle().shared.with(|core, _| core.counters())
    }

    /// What its queue pair has done so far, if it is of a software device and still open: see
    /// [`QueuePair::software_counters`].
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.qp().software_counters()
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.send.handle
    }

    /// Not for users: what they sent or received on it would be taken for messages.
    pub(super) fn qp(&self) -> &QueuePair {
        &self.handle().shared.qp
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("qpn", &self.qp().qpn())
            .field("close_reason", &self.close_reason())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Stream for Connection {
    type Item = Result<Bytes, MessageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.recv).poll_next(context)
    }
}

impl Sink<Bytes> for Connection {
    type Error = MessageError;

    fn poll_ready(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        Pin::new(&mut self.send).poll_ready(context)
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), MessageError> {
        Pin::new(&mut self.send).start_send(message)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        Pin::new(&mut self.send).poll_flush(context)
    }

    fn poll_close(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        Pin::new(&mut self.send).poll_close(context)
    }
}

/// An error of connecting, with the user data of the listener's service if that rejected the connection, or the limit that the
/// listener has reached.
fn rejected(error: cm::ConnectError) -> EstablishError {
    match &error {
        cm::ConnectError::Rejected { attempt, private_data, .. } => {
            match Rejection::decode(private_data) {
                Some(Rejection { user_data }) => {
                    EstablishError::Rejected { address: attempt.address, user_data }
                }
                None => match Refusal::decode(private_data) {
                    Some(refusal) => EstablishError::Refused { address: attempt.address, refusal },
                    None => error.into(),
                },
            }
        }
        _ => error.into(),
    }
}

/// One end that is ready to be connected: its receives are posted.
#[must_use = "it is connected by establish"]
pub struct PreparedConnection {
    pub(super) core: Core,
    pub(super) qp: QueuePair,
    config: ConnectionConfig,
}

impl PreparedConnection {
    /// As [`Connection::prepare`], with a queue pair that is described further.
    pub(super) fn new(
        pd: &ProtectionDomain,
        config: &ConnectionConfig,
        describe: impl FnOnce(QueuePairBuilder) -> QueuePairBuilder,
    ) -> Result<Self, SetupError> {
        config.check(pd.device())?;
        let receives = config.receives();
        let queue = match &config.completions {
            Completions::Shared(queue) => queue.clone(),
            Completions::Own(mode) => {
                let capacity = config.max_send_wr + receives;
                CompletionQueue::builder(pd.device())
                    .capacity(capacity)
                    .mode(mode.clone())
                    .build()?
            }
        };
        let builder =
            QueuePair::builder(pd, &queue).max_send_wr(config.max_send_wr).max_recv_wr(receives);
        let qp = describe(builder.max_sge(1).max_inline(config.max_inline)).build()?;
        let size = config.receive_buffer_size as usize;
        let pool = |buffers: u32| Pool::new(pd, size, buffers as usize);
        let pools =
            [pool(receives.saturating_add(config.spare_buffers))?, pool(config.send_buffers)?];
        let core = Core::new(qp.clone(), config, pools);
        match core.protocol.phase().failure() {
            Some(OpErrorKind::Post(error) | OpErrorKind::State { error, .. }) => {
                return Err(error.into());
            }
            Some(_) => return Err(SetupError::Closed),
            None => {}
        }
        Ok(Self { core, qp, config: config.clone() })
    }

    /// What the peer needs to connect its queue pair to this one.
    #[must_use]
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.qp.endpoint()
    }

    /// What the peer needs to know besides, with bytes of the service's.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::UserData`] above [`Handshake::MAX_USER_DATA`] bytes.
    pub fn handshake(&self, user_data: &[u8]) -> Result<Vec<u8>, HandshakeError> {
        self.config.handshake().encode(user_data)
    }

    /// Connects to the peer, whose endpoint and handshake these are. It must do the same; messages may be sent before it has.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Handshake`] if the peer's handshake is not one, [`EstablishError::Setup`] if the ends do not fit together,
    /// [`EstablishError::NoRuntime`] outside of a Tokio runtime.
    pub fn establish(
        self,
        peer: &QueuePairEndpoint,
        handshake: &[u8],
    ) -> Result<Connection, EstablishError> {
        NoRuntime::or_current()?;
        let (handshake, user_data) = Handshake::decode(handshake)?;
        let user_data = Bytes::copy_from_slice(user_data);
        self.qp.connect_with(peer, &self.config.options)?;
        self.start(handshake, user_data, None, None)
    }

    /// The connection of a queue pair that is connected.
    pub(super) fn start(
        mut self,
        peer: Handshake,
        user_data: Bytes,
        link: Option<Link>,
        admitted: Option<Admitted>,
    ) -> Result<Connection, EstablishError> {
        let runtime = NoRuntime::or_current()?;
        let addresses = link.as_ref().map(|link| (link.local_addr(), link.peer_addr()));
        let link = link.map(Arc::new);
        self.core.meet(&self.config, &peer, link.clone());
        let shared = Shared::new(self.core, self.qp, runtime.clone(), admitted);
        drop(runtime.spawn(drive(shared.clone(), link)));
        let handle = Arc::new(Handle {
            shared,
            close_timeout: self.config.close_timeout,
            buffer_size: self.config.receive_buffer_size as usize,
            peer,
            user_data,
            addresses,
            buffers: OnceLock::new(),
        });
        Ok(Connection { send: SendHalf::new(handle.clone()), recv: RecvHalf::new(handle) })
    }
}

impl fmt::Debug for PreparedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedConnection")
            .field("qp", &self.qp)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
