mod polled;
mod prepared;

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::ToSocketAddrs;

use polled::Polled;
pub use prepared::PreparedConnection;

use super::config::ConnectionConfig;
use super::error::{CloseReason, EstablishError, MessageError, TrySendError};
use super::inbound::copy_target;
use super::inbox::Next;
use super::notifications::Notifications;
use super::outbound::{Flush, Outgoing};
use super::resources::{ConnectionResources, ResourceCache};
use super::shared::{ConnectionInner, WaitGuard};
use super::state::{ConnectionCounters, ConnectionState};
use crate::clock;
use crate::cm;
use crate::coop::within_budget;
use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::error::SetupError;
use crate::memory::{Buf, Pool};
use crate::op::QueuePair;
use crate::verbs::{Device, ProtectionDomain};
use crate::waiters::Caller;
use rdma_message_proto::handshake::Handshake;
use rdma_message_proto::refusal::{RefusalReason, Rejection};
use rdma_provider::cm_contract::MAX_REQUEST_DATA;

/// A reliable connection that carries messages and accesses memory that the peer exposes.
///
/// Methods take `&self`; clone the handle for other tasks. Messages from one task arrive in order.
///
/// ```
/// use tokio_rdma::{Connection, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let connecting = Connection::connect(&device, listener.local_addr()?);
/// let (theirs, ours) = tokio::try_join!(listener.accept(), connecting)?;
///
/// ours.send("hello").await?;
/// assert_eq!(theirs.recv().await?.as_deref(), Some(&b"hello"[..]));
/// tokio::try_join!(ours.close(), theirs.close())?;
/// # Ok(())
/// # }
/// ```
///
/// # Sink and stream
///
/// Each handle is also a [`Sink`] and a [`Stream`] of messages. The sink holds at most one message
/// that could not be sent yet. [`send`](Self::send) on the same handle overtakes it, but other
/// handles wait for it: poll the sink, or drop the handle. `SinkExt::close` sends it and finishes.
///
/// # Closing
///
/// [`finish`](Self::finish) ends the messages to the peer, whose [`recv`](Self::recv) then returns
/// `None`. When both peers have finished and all messages have arrived, the connection closes
/// cleanly; [`close`](Self::close) waits for that. Any other termination is an error with a
/// [`CloseReason`] for both peers.
///
/// Dropping the last handle after `recv` has returned `None` finishes, without a report whether the
/// last messages arrived. Otherwise it aborts ([`CloseReason::Dropped`]). Both take at most one
/// second in the background; messages not fetched by then are lost.
///
/// # One-sided operations
///
/// [`read`](Self::read), [`write`](Self::write), atomics and [batches](Self::post_batch) are those
/// of [`QueuePair`], with the same errors. They queue with messages in FIFO order, so thousands of
/// them delay messages and answers to the peer. An operation that fails at the peer closes the
/// connection.
///
/// # Errors
///
/// On a closed connection, messages fail with [`MessageError::Closed`], which contains the reason,
/// and operations with [`OpErrorKind::Closed`](crate::OpErrorKind::Closed).
///
/// # Cancel safety
///
/// A dropped future loses no message: its `send` has sent nothing, and the next `recv` returns the
/// message. It does not stop the [`Operation`](crate::op::Operation) that it waits for. The
/// [`Sink`] keeps what `start_send` was given until it is polled again.
///
/// [`Sink`]: futures::Sink
/// [`Stream`]: futures::Stream
pub struct Connection {
    handle: Arc<Handle>,
    polled: Polled,
}

pub(crate) struct Handle {
    /// Dropped before `shared`, whose last reference leaves the protection domain to other
    /// connections.
    pub(crate) buffers: [OnceLock<Pool>; 2],
    pub(crate) shared: Arc<ConnectionInner>,
    close_timeout: Duration,
    pub(crate) buffer_size: usize,
    peer: Handshake,
    pub(crate) user_data: Bytes,
    pub(crate) addresses: Option<(SocketAddr, SocketAddr)>,
}

impl Handle {
    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        self.shared.with(|state, _| state.close_reason())
    }

    pub(crate) async fn closed(&self) -> CloseReason {
        let mut guard = WaitGuard::new(&self.shared, ConnectionState::withdraw_flusher);
        poll_fn(|context| {
            within_budget(context, |context| {
                self.shared.poll(context, |state, _, caller| {
                    state.poll_terminated(&mut guard.ticket, caller)
                })
            })
        })
        .await
    }

    #[inline]
    pub(super) fn as_buffer(&self, bytes: &Bytes) -> Option<Buf> {
        Buf::of_bytes(bytes, self.shared.qp.protection_domain())
    }

    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        self.addresses.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    pub(crate) fn counters(&self) -> ConnectionCounters {
        self.shared.with(|state, _| state.counters())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.abandon();
    }
}

impl Connection {
    /// Calls [`connect_with`](Self::connect_with) with default settings.
    pub async fn connect(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> Result<Self, EstablishError> {
        Self::connect_with(device, address, &ConnectionConfig::default()).await
    }

    /// Connects to a [`Listener`](super::Listener) at the first address that answers.
    ///
    /// # Errors
    ///
    /// - [`EstablishError::NoRuntime`]: no Tokio runtime with an I/O driver.
    /// - [`EstablishError::Connect`]: also after
    ///   [`connect_timeout`](ConnectionConfig::connect_timeout), or with [`SetupError::Mismatch`]
    ///   if no address has the configured [`peer`](ConnectionConfig::peer) or
    ///   [`source`](ConnectionConfig::source).
    /// - [`EstablishError::Setup`]: unsupported settings.
    /// - [`EstablishError::Handshake`]: [`user_data`](ConnectionConfig::user_data) too long.
    /// - [`EstablishError::OtherProtocol`]: the address is not a `Listener`'s.
    /// - [`EstablishError::Rejected`]: by the peer's application.
    /// - [`EstablishError::Refused`]: a connection limit of the listener, or its shutdown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the request.
    pub async fn connect_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: &ConnectionConfig,
    ) -> Result<Self, EstablishError> {
        let connecting = async move {
            let cm_config = config.cm_config(MAX_REQUEST_DATA)?;
            config.check(device)?;
            let cache = ResourceCache::of(device);
            let mut prepared = None;
            let connected = cm::connect(device, address, &cm_config, |route| {
                config.check_path((route.port(), route.gid_index()), route.destination())?;
                let resources = config.resources(&cache)?;
                let made =
                    PreparedConnection::new(resources, config, |builder| route.prepare(builder))?;
                Ok(prepared.insert(made).qp.clone())
            });
            let (_, link) = connected.await.map_err(rejected)?;
            let Some(prepared) = prepared else {
                unreachable!("a connected queue pair was prepared")
            };
            let address = link.peer_addr();
            let (handshake, user_data) = Handshake::decode_for(config.service, link.private_data())
                .map_err(|error| EstablishError::OtherProtocol { address, error })?;
            let user_data = Bytes::copy_from_slice(user_data);
            prepared.start(handshake, user_data, Some(link), None)
        };
        // The futures of services that contain this one stay short.
        Box::pin(connecting).await
    }

    /// Prepares a connection that applications with their own control plane establish: exchange
    /// [`PreparedConnection::endpoint`] and [`PreparedConnection::handshake`] with the peer. On a
    /// port with several GIDs, set [`ConnectionConfig::peer`] or [`ConnectionConfig::source`].
    ///
    /// # Errors
    ///
    /// As for [`QueuePairBuilder::build`](crate::op::QueuePairBuilder::build), with the limits of
    /// the settings.
    pub fn prepare(
        pd: &ProtectionDomain,
        config: &ConnectionConfig,
    ) -> Result<PreparedConnection, SetupError> {
        config.check(pd.device())?;
        let resources = ConnectionResources::in_domain(pd, config)?;
        PreparedConnection::new(resources, config, |builder| {
            builder.port_and_gid(config.source.clone())
        })
    }

    /// Sends a message. Waits for a credit of the peer and, if the message is long, for
    /// [`send_memory`](ConnectionConfig::send_memory), but not for its [arrival](Self::flush).
    ///
    /// Messages up to [`max_eager`](ConnectionConfig::max_eager) are copied; the peer reads longer
    /// ones. At least 4 KiB of a registered buffer, for example a received one, are sent like
    /// [`send_buffer`](Self::send_buffer).
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`], [`MessageError::Finished`], [`MessageError::Register`], or
    /// [`MessageError::Closed`], which also loses messages in flight. The message was not sent.
    pub async fn send(&self, message: impl Into<Bytes>) -> Result<(), MessageError> {
        let message = message.into();
        let buffer = self.handle.as_buffer(&message);
        self.send_outgoing(Outgoing::of(&message, buffer.as_ref())).await
    }

    /// Like [`send`](Self::send), but sends a registered buffer without a copy if it belongs to the
    /// connection's [protection domain](Self::protection_domain), as buffers of
    /// [`try_alloc`](Self::try_alloc) do. It returns to its pool when the peer's device has the
    /// message and the last view is dropped.
    pub async fn send_buffer(&self, buffer: impl Into<Buf>) -> Result<(), MessageError> {
        let buffer = buffer.into();
        self.send_outgoing(Outgoing::Buffer(&buffer)).await
    }

    /// Like [`send`](Self::send), but sends the concatenation of `parts`, which may be none, as one
    /// message. If that is longer than [`max_eager`](ConnectionConfig::max_eager), it is first
    /// copied into one allocation, which does not count as `send_memory` while it waits.
    pub async fn send_vectored(&self, parts: &[Bytes]) -> Result<(), MessageError> {
        if let [message] = parts {
            let buffer = self.handle.as_buffer(message);
            return self.send_outgoing(Outgoing::of(message, buffer.as_ref())).await;
        }
        // A long copy is made without the lock.
        if self.handle.shared.with(|state, _| state.is_offered(parts)) {
            let message = Outgoing::Parts(parts).to_bytes();
            return self.send_outgoing(Outgoing::Bytes(&message)).await;
        }
        self.send_outgoing(Outgoing::Parts(parts)).await
    }

    /// Like [`send`](Self::send), but returns the message if it would have to wait.
    ///
    /// # Errors
    ///
    /// [`TrySendError::Full`] with the message, [`TrySendError::Failed`] as for `send`.
    pub fn try_send(&self, message: impl Into<Bytes>) -> Result<(), TrySendError> {
        self.withdraw_sink();
        let message = message.into();
        let buffer = self.handle.as_buffer(&message);
        let outgoing = Outgoing::of(&message, buffer.as_ref());
        match self.handle.shared.with(|state, waker| state.try_send(outgoing, waker)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TrySendError::Full(message)),
            Err(error) => Err(TrySendError::Failed(error)),
        }
    }

    /// Returns the next message, or `None` after the peer has finished.
    ///
    /// Messages up to 256 bytes are copied, and so are all until the connection has
    /// [grown](ConnectionConfig::preallocate), and while the application holds
    /// [`spare_buffers`](ConnectionConfig::spare_buffers) messages. The buffer of any other message
    /// is reused when the last clone is dropped.
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] after the last message if the peer has not finished.
    pub async fn recv(&self) -> Result<Option<Bytes>, MessageError> {
        let shared = &self.handle.shared;
        let mut guard = WaitGuard::new(shared, ConnectionState::withdraw_receiver);
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll_receiver(context, &mut guard.ticket, ConnectionState::poll_recv)
            })
        })
        .await
    }

    /// Like [`recv`](Self::recv), but returns memory registered in the connection's [protection
    /// domain](Self::protection_domain).
    ///
    /// A message in one frame stays in its receive buffer if a [spare
    /// buffer](ConnectionConfig::spare_buffers) is free, and a long message up to 1 MiB where it
    /// was fetched. Any other message is copied once, into a buffer as from
    /// [`try_alloc`](Self::try_alloc), which does not count as
    /// [`receive_memory`](ConnectionConfig::receive_memory). Above 64 KiB, its registration during
    /// the call may take milliseconds.
    ///
    /// # Errors
    ///
    /// As for `recv`, and [`MessageError::Register`] if memory for a copy cannot be registered or
    /// the copy would exceed `u32::MAX` bytes; the message can then still be received.
    pub async fn recv_buffer(&self) -> Result<Option<Buf>, MessageError> {
        let shared = &self.handle.shared;
        let mut guard = WaitGuard::new(shared, ConnectionState::withdraw_receiver);
        let mut memory = None;
        let mut poll_next = |context: &mut Context<'_>| {
            loop {
                let take = |state: &mut ConnectionState,
                            ticket: &mut _,
                            waker: &_,
                            caller: &mut Caller<'_>| {
                    state.poll_recv_buffer(&mut memory, ticket, waker, caller)
                };
                let next = ready!(shared.poll_receiver(context, &mut guard.ticket, take))?;
                return Poll::Ready(Ok(match next {
                    Some(Next::Message(buffer)) => Some(buffer),
                    Some(Next::Copy(bytes)) => {
                        let mut target = copy_target(&mut memory, bytes.len());
                        target.copy_from_slice(&bytes);
                        Some(target.freeze())
                    }
                    Some(Next::Memory(len)) => {
                        memory = Some(self.handle.try_alloc(len).map_err(MessageError::Register)?);
                        continue;
                    }
                    None => None,
                }));
            }
        };
        poll_fn(|context| within_budget(context, &mut poll_next)).await
    }

    /// Returns the stream of the peer's WRITEs with immediate data. It ends after the peer has
    /// finished, or after an error. Their order relative to messages is undefined.
    ///
    /// ```
    /// use futures::StreamExt;
    /// use tokio_rdma::{Access, Imm, RemoteRegion};
    /// # use tokio_rdma::*;
    ///
    /// # async fn example(ours: Connection, theirs: Connection)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let region = theirs.expose(vec![0; 4096], Access::REMOTE_WRITE)?;
    /// theirs.send(region.grant()).await?;
    /// let grant = ours.recv().await?.ok_or("no message")?;
    /// let remote = RemoteRegion::from_bytes(&grant).ok_or("not a region")?;
    ///
    /// ours.write_with_imm(ours.copy_from(b"block 7")?, remote.slice(..7)?, Imm(7)).await?;
    /// let notification = theirs.notifications().next().await.ok_or("the peer has finished")??;
    /// assert_eq!((notification.imm, notification.len), (Imm(7), 7));
    /// # Ok(())
    /// # }
    /// ```
    pub fn notifications(&self) -> Notifications<'_> {
        Notifications::new(&self.handle.shared)
    }

    /// Waits until all messages sent so far have arrived, long ones by a fetch.
    pub async fn flush(&self) -> Result<(), MessageError> {
        let shared = &self.handle.shared;
        let mut guard = WaitGuard::new(shared, ConnectionState::withdraw_flusher);
        let mut flush = Flush::default();
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll(context, |state, waker, caller| {
                    state.poll_flush(&mut flush, &mut guard.ticket, waker, caller)
                })
            })
        })
        .await
    }

    /// Finishes sending, for all handles. Pending sends fail with [`MessageError::Finished`]. The
    /// peer may continue to send.
    pub fn finish(&self) -> Result<(), MessageError> {
        self.handle.shared.with(|state, waker| state.finish(waker))
    }

    /// Finishes, waits until the peer has finished and all messages have arrived, and closes the
    /// queue pair. Unreceived messages are discarded; receive until `None` first to keep them.
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] unless closed cleanly: [`CloseReason::CloseTimeout`] after
    /// [`close_timeout`](ConnectionConfig::close_timeout), or, during the
    /// [shutdown](super::Listener::shutdown) of the listener, [`CloseReason::Local`] if the peer
    /// has all messages but does not finish within a second.
    ///
    /// # Cancel safety
    ///
    /// From the first poll, no messages are sent or received. Closing continues in the background
    /// until the last handle is dropped; call `close` again to wait.
    pub async fn close(&self) -> Result<(), MessageError> {
        let handle = self.handle();
        handle.shared.with(|state, waker| state.close(waker));
        let reason = match clock::timeout(handle.close_timeout, handle.shared.closed()).await {
            Some(reason) => reason,
            None => {
                handle.shared.abort(CloseReason::CloseTimeout);
                handle.shared.closed().await
            }
        };
        if reason == CloseReason::Clean { Ok(()) } else { Err(reason.into()) }
    }

    /// Terminates the connection at once, for an application that distrusts its peer or must stop
    /// writing. Does nothing on a closed connection. On return:
    ///
    /// - Pending sends and receives fail with [`CloseReason::Aborted`]; arrived messages are
    ///   discarded.
    /// - New operations fail, and queued ones are never carried out.
    /// - Operations in flight may still be carried out. They complete, and release their buffers,
    ///   when the peer's device acknowledges the `Abort` frame, after at most one second, or when
    ///   the runtime shuts down. [`close`](Self::close) waits for that.
    ///
    /// The peer gets [`CloseReason::Dropped`], or [`CloseReason::Disconnected`] if the connection
    /// manager is faster. If the `Abort` cannot be sent, for example for lack of a credit, a peer
    /// without a connection manager notices the end only by
    /// [`keepalive`](ConnectionConfig::keepalive) or a failed operation.
    pub fn abort(&self) {
        self.handle.shared.abort(CloseReason::Aborted);
    }

    /// Returns the reason why the connection closed, if it has.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.handle().close_reason()
    }

    /// Waits until the connection has closed, and returns the reason; use it in `tokio::select!` to
    /// notice a lost peer. Messages that have arrived can still be received, except after
    /// [`close`](Self::close) and [`abort`](Self::abort).
    pub async fn closed(&self) -> CloseReason {
        self.handle().closed().await
    }

    /// Returns the longest message that the peer accepts, in bytes.
    #[must_use]
    pub fn max_message(&self) -> u64 {
        self.handle().shared.with(|state, _| state.max_message())
    }

    /// Returns the peer's handshake.
    #[must_use]
    pub fn peer(&self) -> Handshake {
        self.handle().peer
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// [`NotConnected`](io::ErrorKind::NotConnected) if the connection was
    /// [prepared](Self::prepare).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses().map(|(local, _)| local)
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    ///
    /// As [`local_addr`](Self::local_addr).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses().map(|(_, peer)| peer)
    }

    /// Returns the user data of the peer's application.
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        &self.handle().user_data
    }

    /// Returns the counters of this connection.
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle().counters()
    }

    /// Returns [`QueuePair::software_counters`].
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.qp().software_counters()
    }

    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, polled: Polled::default() }
    }

    /// Otherwise the sink of this handle would block later sends.
    pub(super) fn withdraw_sink(&self) {
        if let mut left @ Some(_) = self.polled.sending {
            self.handle.shared.with(|state, _| state.withdraw_sender(&mut left));
        }
    }

    async fn send_outgoing(&self, message: Outgoing<'_>) -> Result<(), MessageError> {
        let shared = &self.handle.shared;
        self.withdraw_sink();
        let mut guard = WaitGuard::new(shared, ConnectionState::withdraw_sender);
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll(context, |state, waker, caller| {
                    state.poll_send(message, &mut guard.ticket, waker, caller)
                })
            })
        })
        .await
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Asks the peer for a frame, unless [`keepalive`](ConnectionConfig::keepalive) is off.
    pub(crate) fn probe(&self) {
        self.handle().shared.probe();
    }

    pub(crate) fn shared_handle(&self) -> Arc<Handle> {
        self.handle.clone()
    }

    /// Callers must not SEND on it: the peer would take that for a frame.
    pub(super) fn qp(&self) -> &QueuePair {
        &self.handle().shared.qp
    }
}

/// A message that waits in the sink of the original stays there.
impl Clone for Connection {
    fn clone(&self) -> Self {
        Self::new(self.handle.clone())
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

fn rejected(error: cm::ConnectError) -> EstablishError {
    match &error {
        cm::ConnectError::Rejected { attempt, private_data, .. } => {
            match Rejection::decode(private_data) {
                Some(Rejection { user_data }) => {
                    let user_data = Bytes::copy_from_slice(user_data);
                    EstablishError::Rejected { address: attempt.address, user_data }
                }
                None => match RefusalReason::decode(private_data) {
                    Some(reason) => EstablishError::Refused { address: attempt.address, reason },
                    None => error.into(),
                },
            }
        }
        _ => error.into(),
    }
}
