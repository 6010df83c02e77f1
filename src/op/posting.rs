//! Options of work requests, which come before the call that posts.

#![forbid(unsafe_code)]

use super::atomic::Atomic;
use super::batch::{Batch, BatchOp};
use super::destination::Destination;
use super::operation::{Operation, ReturnBuffer};
use super::queue_pair::QueuePair;
use super::read::Read;
use super::send::{Send, SendTo};
use super::write::Write;
use crate::engine::WorkRequest;
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::types::{Imm, Qkey, Qpn, SendFlags};
use crate::verbs::AddressHandle;

/// A destination with the options of operations, which come first because calling an operation
/// posts it. They can be combined:
///
/// ```
/// # use tokio_rdma::*;
/// # async fn example(qp: &QueuePair, buffer: Buf) -> Result<(), OpError<Buf>> {
/// qp.fenced().with_imm(Imm(7)).send(buffer).await?;
/// # Ok(())
/// # }
/// ```
///
/// | Option | Type | Operations |
/// |---|---|---|
/// | [`fenced`](Self::fenced), [`solicited`](Self::solicited) | `Posting<P, X>`, as before | all |
/// | `with_imm` | `Posting<P, Imm>` | SEND and WRITE |
/// | `invalidating` | `Posting<P, RemoteRegion>` | SEND |
///
/// The operations are the methods of [`QueuePair`] of the same names. After `with_imm` and
/// `invalidating`, and for atomics, there is no `try_` form. The futures do not borrow the
/// `Posting`.
#[derive(Debug, Clone, Copy)]
#[must_use = "it posts nothing before an operation is called"]
pub struct Posting<P, X = ()> {
    to: P,
    flags: SendFlags,
    extra: X,
}

/// A destination of operations with options: of a queue pair or a DC initiator ([`Destination`]),
/// of a pool ([`DcPoolPeer`](crate::dc::DcPoolPeer)) or of a lease of one
/// ([`DcLease`](crate::dc::DcLease)). This trait is sealed.
pub trait Poster: Copy {
    /// The future of an operation: `F`, or a [`PooledOperation<F>`](crate::dc::PooledOperation) if
    /// it may wait for an initiator.
    type Posted<F>;

    #[doc(hidden)]
    fn submit<F, W>(self, work: W) -> Self::Posted<F>
    where
        F: std::marker::Send + 'static,
        W: FnOnce(Destination<'_>) -> F + std::marker::Send + 'static;

    #[doc(hidden)]
    fn submit_inline<F, W>(self, bytes: &[u8], work: W) -> Self::Posted<F>
    where
        F: std::marker::Send + 'static,
        W: FnOnce(Destination<'_>, &[u8]) -> F + std::marker::Send + 'static;

    #[doc(hidden)]
    fn try_submit<F, B>(
        self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>>;
}

/// Implements the operations of `$owner` by its method `posting`. `$wrap` wraps their futures.
macro_rules! operations {
    ([$($generics:tt)*] $owner:ty, [$($wrap:tt)*]) => {
        impl<$($generics)*> $owner {
            /// Posts a SEND, see [`QueuePair::send`].
            #[inline]
            pub fn send<B: Gather>(&self, buffer: B) -> operations!(@ [$($wrap)*] Send<B>) {
                self.posting().post(WorkRequest::send(), buffer)
            }

            /// Posts a SEND of a copy of `bytes`, see [`QueuePair::send_inline`].
            #[inline]
            pub fn send_inline(&self, bytes: &[u8]) -> operations!(@ [$($wrap)*] Send<()>) {
                self.posting().post_inline(WorkRequest::send(), bytes)
            }

            /// Posts a SEND without waiting, see [`QueuePair::try_send`].
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            #[inline]
            pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
                self.posting().try_post(WorkRequest::send(), buffer)
            }

            /// Posts a WRITE, see [`QueuePair::write`].
            #[inline]
            pub fn write<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> operations!(@ [$($wrap)*] Write<B>) {
                self.posting().post(WorkRequest::write(remote), buffer)
            }

            /// Posts a WRITE of a copy of `bytes`, see [`QueuePair::write_inline`].
            #[inline]
            pub fn write_inline(
                &self,
                bytes: &[u8],
                remote: RemoteRegion,
            ) -> operations!(@ [$($wrap)*] Write<()>) {
                self.posting().post_inline(WorkRequest::write(remote), bytes)
            }

            /// Posts a WRITE without waiting, see [`QueuePair::try_write`].
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            #[inline]
            pub fn try_write<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> Result<Write<B>, TryError<B>> {
                self.posting().try_post(WorkRequest::write(remote), buffer)
            }

            /// Posts a READ, see [`QueuePair::read`].
            #[inline]
            pub fn read<B: Scatter>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> operations!(@ [$($wrap)*] Read<B>) {
                self.posting().post(WorkRequest::read(remote), buffer)
            }

            /// Posts a READ without waiting, see [`QueuePair::try_read`].
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            #[inline]
            pub fn try_read<B: Scatter>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> Result<Read<B>, TryError<B>> {
                self.posting().try_post(WorkRequest::read(remote), buffer)
            }

            /// Posts a compare-and-swap, see [`QueuePair::compare_swap`].
            pub fn compare_swap(
                &self,
                remote: RemoteRegion,
                compare: u64,
                swap: u64,
            ) -> operations!(@ [$($wrap)*] Atomic) {
                self.posting().post_atomic(WorkRequest::compare_swap(remote, compare, swap))
            }

            /// Posts a fetch-and-add, see [`QueuePair::fetch_add`].
            pub fn fetch_add(
                &self,
                remote: RemoteRegion,
                add: u64,
            ) -> operations!(@ [$($wrap)*] Atomic) {
                self.posting().post_atomic(WorkRequest::fetch_add(remote, add))
            }

            /// Posts a batch, see [`QueuePair::post_batch`]. Options hold for all its work
            /// requests.
            pub fn post_batch<B: Gather>(
                &self,
                batch: Batch<B>,
            ) -> operations!(@ [$($wrap)*] BatchOp<B>) {
                self.posting().post_all(batch)
            }

            /// Posts a batch without waiting, see [`QueuePair::try_post_batch`].
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] without free slots for the whole batch or, in a pool, without an
            /// available initiator.
            pub fn try_post_batch<B: Gather>(
                &self,
                batch: Batch<B>,
            ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
                self.posting().try_post_all(batch)
            }
        }
    };
    (@ [] $future:ty) => { $future };
    (@ [$($wrap:tt)+] $future:ty) => { $($wrap)+<$future> };
}

pub(crate) use operations;

operations!([P: Poster] Posting<P>, [P::Posted]);

impl<P: Poster> Posting<P> {
    #[inline]
    pub(crate) const fn new(to: P) -> Self {
        Self { to, flags: SendFlags::empty(), extra: () }
    }

    /// Adds 4 bytes of immediate data to the next SEND or WRITE, see [`QueuePair::with_imm`].
    #[inline]
    pub fn with_imm(self, imm: Imm) -> Posting<P, Imm> {
        self.with(imm)
    }

    #[inline]
    fn posting(&self) -> Self {
        *self
    }

    pub(crate) fn post_atomic(self, request: WorkRequest<'static>) -> P::Posted<Atomic> {
        let request = request.with_flags(self.flags);
        self.to.submit(move |to| to.post_atomic(request))
    }

    pub(crate) fn post_all<B: Gather>(self, batch: Batch<B>) -> P::Posted<BatchOp<B>> {
        self.to.submit(move |to| to.post_batch(batch, self.flags))
    }

    pub(crate) fn try_post_all<B: Gather>(
        self,
        batch: Batch<B>,
    ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        let work = |to: Destination<'_>, batch| to.try_post_batch(batch, self.flags);
        match self.to.try_submit(batch, work) {
            Err(TryError::Refused(error)) => {
                Ok(BatchOp::refused(error.kind(), error.into_buffer()))
            }
            result => result,
        }
    }
}

impl<P: Poster> Posting<P, Imm> {
    /// Posts a SEND with immediate data.
    #[inline]
    pub fn send<B: Gather>(self, buffer: B) -> P::Posted<Send<B>> {
        self.post(WorkRequest::send_with_imm(self.extra), buffer)
    }

    /// Posts a SEND of a copy of `bytes` with immediate data.
    #[inline]
    pub fn send_inline(self, bytes: &[u8]) -> P::Posted<Send<()>> {
        self.post_inline(WorkRequest::send_with_imm(self.extra), bytes)
    }

    /// Posts a WRITE, see [`QueuePair::with_imm`].
    #[inline]
    pub fn write<B: Gather>(self, buffer: B, remote: RemoteRegion) -> P::Posted<Write<B>> {
        self.post(WorkRequest::write_with_imm(remote, self.extra), buffer)
    }

    /// Posts a [`write`](Self::write) of a copy of `bytes`.
    #[inline]
    pub fn write_inline(self, bytes: &[u8], remote: RemoteRegion) -> P::Posted<Write<()>> {
        self.post_inline(WorkRequest::write_with_imm(remote, self.extra), bytes)
    }
}

impl<P: Poster> Posting<P, RemoteRegion> {
    /// Posts a SEND that invalidates a key of the peer, see [`QueuePair::invalidating`].
    pub fn send<B: Gather>(self, buffer: B) -> P::Posted<Send<B>> {
        self.post(WorkRequest::send_with_invalidate(self.extra), buffer)
    }

    /// Posts a [`send`](Self::send) of a copy of `bytes`.
    pub fn send_inline(self, bytes: &[u8]) -> P::Posted<Send<()>> {
        self.post_inline(WorkRequest::send_with_invalidate(self.extra), bytes)
    }
}

impl<P: Poster, X> Posting<P, X> {
    /// Adds a fence, see [`QueuePair::fenced`].
    #[inline]
    pub fn fenced(self) -> Self {
        Self { flags: self.flags | SendFlags::FENCE, ..self }
    }

    /// Requests solicited events, see [`QueuePair::solicited`].
    #[inline]
    pub fn solicited(self) -> Self {
        Self { flags: self.flags | SendFlags::SOLICITED, ..self }
    }

    #[inline]
    fn with<Y>(self, extra: Y) -> Posting<P, Y> {
        Posting { to: self.to, flags: self.flags, extra }
    }

    #[inline]
    pub(crate) fn post<B: Gather>(
        self,
        request: WorkRequest<'static>,
        buffer: B,
    ) -> P::Posted<Operation<ReturnBuffer<B>>> {
        let request = request.with_flags(self.flags);
        self.to.submit(move |to| to.post(request, buffer))
    }

    #[inline]
    pub(crate) fn post_inline(
        self,
        request: WorkRequest<'static>,
        bytes: &[u8],
    ) -> P::Posted<Send<()>> {
        let request = request.with_flags(self.flags);
        self.to.submit_inline(bytes, move |to, bytes| to.post(request.inline(bytes), ()))
    }

    #[inline]
    pub(crate) fn try_post<B: Gather>(
        self,
        request: WorkRequest<'static>,
        buffer: B,
    ) -> Result<Operation<ReturnBuffer<B>>, TryError<B>> {
        let request = request.with_flags(self.flags);
        self.to.try_submit(buffer, |to, buffer| to.try_post(request, buffer))
    }
}

impl<'a> Posting<Destination<'a>> {
    /// Makes the next SEND invalidate a key of the peer, see [`QueuePair::invalidating`].
    pub fn invalidating(self, remote: RemoteRegion) -> Posting<Destination<'a>, RemoteRegion> {
        self.with(remote)
    }

    /// Sends a datagram, see [`QueuePair::send_to`].
    pub fn send_to<B: Gather>(
        self,
        buffer: B,
        handle: &AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> SendTo<B> {
        self.to.send_datagram(
            WorkRequest::send().with_flags(self.flags),
            buffer,
            (handle, qpn, qkey),
        )
    }
}

impl Posting<Destination<'_>, Imm> {
    /// Sends a datagram with immediate data, see [`QueuePair::send_to`].
    pub fn send_to<B: Gather>(
        self,
        buffer: B,
        handle: &AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> SendTo<B> {
        self.to.send_datagram(
            WorkRequest::send_with_imm(self.extra).with_flags(self.flags),
            buffer,
            (handle, qpn, qkey),
        )
    }
}

impl Poster for Destination<'_> {
    type Posted<F> = F;

    #[inline]
    fn submit<F, W: FnOnce(Destination<'_>) -> F>(self, work: W) -> F {
        work(self)
    }

    #[inline]
    fn submit_inline<F, W: FnOnce(Destination<'_>, &[u8]) -> F>(self, bytes: &[u8], work: W) -> F {
        work(self, bytes)
    }

    #[inline]
    fn try_submit<F, B>(
        self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>> {
        work(self, held)
    }
}

/// The operations of the queue pair without options.
impl<'a> From<&'a QueuePair> for Posting<Destination<'a>> {
    #[inline]
    fn from(qp: &'a QueuePair) -> Self {
        Self::new(qp.destination())
    }
}

impl QueuePair {
    /// Returns its operations with a fence: they start after all READs and atomics posted before
    /// (RC, `IBV_SEND_FENCE`).
    #[inline]
    pub fn fenced(&self) -> Posting<Destination<'_>> {
        Posting::from(self).fenced()
    }

    /// Returns its operations with solicited messages, which raise a solicited event at the
    /// receiver (`IBV_SEND_SOLICITED`).
    #[inline]
    pub fn solicited(&self) -> Posting<Destination<'_>> {
        Posting::from(self).solicited()
    }

    /// Returns its operations that carry 4 bytes of immediate data: SENDs, and WRITEs, which
    /// thereby consume a receive of the peer. The receiver finds the data in
    /// [`Received::imm`](super::Received::imm).
    #[inline]
    pub fn with_imm(&self, imm: Imm) -> Posting<Destination<'_>, Imm> {
        Posting::from(self).with_imm(imm)
    }

    /// Returns a SEND before whose delivery the peer's device invalidates the key of `remote`, a
    /// lease that the peer granted (RC). The receiver finds the key in
    /// [`Received::invalidated`](super::Received::invalidated).
    ///
    /// READs that use the key must be complete: await them, or add a [fence](Posting::fenced).
    ///
    /// # Errors
    ///
    /// As for [`send`](Self::send). A key without a lease in force fails the connection, at the
    /// peer with [`REM_INV_REQ_ERR`](crate::types::WcStatus::REM_INV_REQ_ERR) of its receive. The
    /// protocol cannot report it, so the SEND fails with
    /// [`RETRY_EXC_ERR`](crate::types::WcStatus::RETRY_EXC_ERR), or, on some devices, only the next
    /// operation does.
    pub fn invalidating(&self, remote: RemoteRegion) -> Posting<Destination<'_>, RemoteRegion> {
        Posting::from(self).invalidating(remote)
    }
}
