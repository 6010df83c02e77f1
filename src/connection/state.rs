//! The I/O of a connection, under one lock.
//!
//! ```text
//!  poll_send ─▶ inline │ copied │ in place │ offered ─▶ sends ─▶ peer   credits, phases, time:
//!  poll_recv ◀─ inbox ◀─ receives ◀──────────────────────── peer   rdma_message_proto
//!                 └─ long: READ, then done ───────────────▶ peer
//! ```
//!
//! `work` does all work that is possible now. Each call of a task runs it (`progress`), and so do
//! the waker of operations (`serve`) and the driver (`drive`), so progress never depends on the
//! application's tasks.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use rdma_message_proto::frame::{Header, Kind, OFFER_LEN};
use rdma_message_proto::handshake::{Handshake, Service};
use rdma_message_proto::lifecycle::{Event, Phase, Stage};
use rdma_message_proto::protocol::{Due, Protocol};
use rdma_message_proto::refusal::MAX_REJECT_DATA;
use rdma_message_proto::sending::{Blocked, Waits};
use rdma_message_proto::timers::Observed;
use rdma_provider::later;
use smallvec::SmallVec;
use tokio::runtime;

use super::budget::BudgetGuard;
use super::config::ConnectionConfig;
use super::error::CloseReason;
use super::inbox::Inbox;
use super::jobs::Jobs;
use super::message_memory::FetchMemory;
use super::outbound::INLINE;
use super::outbox::{Outbox, Sent};
use super::receives::Receives;
use super::send_memory::SendMemory;
use super::stream_state::StreamState;
use super::waiting::Waiting;
use crate::clock;
use crate::cm::CmConnection;
use crate::engine::is_current;
use crate::error::{OpErrorKind, SetupError};
use crate::forked;
use crate::memory::{BufMut, Pool, RemoteRegion};
use crate::op::{Destination, Posting, QueuePair, Send};
use crate::types::Imm;
use crate::waiters::{Ticket, Waiters};

const _: () = assert!(OFFER_LEN == RemoteRegion::ENCODED_LEN);
const _: () = assert!(MAX_REJECT_DATA == rdma_provider::cm_contract::MAX_REJECT_DATA);

/// A poll of the send queue pays with this number of frames in flight.
const REAPED: usize = 8;

/// Frames in flight with which receives are skipped. More would enlarge the queues of a connection
/// that becomes idle.
const SKIPS: usize = 4;

#[derive(Debug)]
pub(crate) struct ConnectionState {
    pub(crate) protocol: Protocol<CloseReason>,
    pub(super) io: Io,
    pub(super) limits: Limits,
    pub(super) memory: Memory,
    pub(super) receives: Receives,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    pub(super) waiting: Waiting,
    pub(crate) stream: StreamState,
    pub(super) counters: ConnectionCounters,
}

#[derive(Debug)]
pub(super) struct Io {
    pub(super) qp: QueuePair,
    /// Dropping it disconnects the peer.
    pub(super) link: Option<Arc<CmConnection>>,
    /// A completed receive calls the connection's waker.
    pub(super) notifies: bool,
    pub(super) runtime: Option<runtime::Id>,
    pub(super) wakes_driver: bool,
    /// The length of the header at the end of each frame; 0 if it is immediate data.
    pub(super) trailer: usize,
}

impl Io {
    /// The peer waits for solicited messages only. A `Part` is not solicited, because the peer
    /// cannot use it before the `Data` that follows.
    #[inline]
    pub(super) fn frame(&self, header: Header) -> Posting<Destination<'_>, Imm> {
        let frame = self.qp.with_imm(Imm(header.encode()));
        if header.kind == Kind::Part { frame } else { frame.solicited() }
    }

    #[cold]
    fn frame_with_trailer(&self, header: Header) -> Posting<Destination<'_>> {
        let frame = Posting::new(self.qp.destination());
        if header.kind == Kind::Part { frame } else { frame.solicited() }
    }

    pub(super) fn send_inline(&self, header: Header, payload: &[u8]) -> Send<()> {
        if self.trailer == 0 {
            return self.frame(header).send_inline(payload);
        }
        let mut bytes = SmallVec::<[u8; INLINE]>::from_slice(payload);
        bytes.extend_from_slice(&header.encode().to_be_bytes());
        self.frame_with_trailer(header).send_inline(&bytes)
    }

    /// The header must fit in the buffer after the payload.
    pub(super) fn send_buffer(&self, header: Header, mut payload: BufMut) -> Send<BufMut> {
        if self.trailer == 0 {
            return self.frame(header).send(payload);
        }
        let len = payload.len();
        let fits = payload.resize(len + self.trailer);
        debug_assert!(fits.is_ok(), "send buffers have room for the header");
        payload[len..].copy_from_slice(&header.encode().to_be_bytes());
        self.frame_with_trailer(header).send(payload)
    }

    /// If the payload ends with its header, cuts it off.
    #[inline]
    pub(super) fn header(&self, payload: &mut BufMut, imm: Option<Imm>) -> Option<u32> {
        if self.trailer == 0 {
            return imm.map(|imm| imm.0);
        }
        let header = payload.last_chunk().copied()?;
        payload.truncate(payload.len() - self.trailer);
        Some(u32::from_be_bytes(header))
    }

    pub(super) fn wake_driver(&mut self) {
        self.wakes_driver = true;
    }
}

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) send: SendMemory,
    pub(super) fetch: FetchMemory,
    pub(super) budget: BudgetGuard,
    pub(super) jobs: Jobs,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Longest buffer of held bytes while the peer has its first receives.
    pub(super) held: usize,
    pub(super) is_elastic: bool,
    pub(super) send: u64,
    pub(super) receive_memory: u64,
    pub(super) linger: Duration,
}

impl ConnectionState {
    pub(super) fn new(
        qp: QueuePair,
        config: &ConnectionConfig,
        (receive_pool, send_pool): (Pool, Option<Pool>),
        budget: BudgetGuard,
    ) -> Self {
        let trailer = config.trailer(qp.protection_domain().device());
        let limits = Limits {
            held: 0,
            is_elastic: config.is_elastic(),
            send: 0,
            receive_memory: config.receive_memory,
            linger: config.close_timeout,
        };
        let mut state = Self {
            protocol: Protocol::new(config.protocol(qp.caps().max_inline, trailer)),
            limits,
            memory: Memory {
                send: SendMemory::new(send_pool, config, trailer),
                fetch: FetchMemory::new(qp.protection_domain(), config.receive_memory),
                budget,
                jobs: Jobs::None,
            },
            receives: Receives::new(receive_pool, config),
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            waiting: Waiting::default(),
            stream: StreamState::default(),
            counters: ConnectionCounters::default(),
            io: Io {
                notifies: qp.notifies(),
                link: None,
                runtime: None,
                wakes_driver: false,
                trailer,
                qp,
            },
        };
        state.post_receives(config.first_receives());
        state
    }

    pub(super) fn set_peer(&mut self, peer: &Handshake, link: Option<Arc<CmConnection>>) {
        self.io.link = link;
        self.protocol.set_peer(peer, clock::now());
        self.limits.send = peer.max_message;
        self.renew_send_memory();
    }

    /// Lets this runtime watch the receives, too. Operations call `waker`.
    pub(super) fn progress(&mut self, waker: &Waker) {
        self.advance(waker);
        // The task may wait for a receive, even if the other runtimes that watch the queue do not
        // run. If this one cannot watch it, the driver polls.
        if self.io.notifies && self.close_reason().is_none() && !self.io.qp.watch_receives() {
            self.io.wake_driver();
        }
    }

    /// If nothing has arrived, does no other work: other completions call the connection's waker.
    pub(super) fn progress_for_receiver(&mut self, waker: &Waker) {
        let nothing_arrived = self.io.notifies
            && self.inbox.fetching.is_empty()
            && self.protocol.phase().check_open().is_ok()
            && self.receives.posted.front().is_some_and(|receive| !receive.is_finished())
            && !forked::is_child();
        if nothing_arrived && self.io.qp.watch_receives() {
            return;
        }
        self.progress(waker);
    }

    fn advance(&mut self, waker: &Waker) {
        if self.close_reason().is_some() {
            return;
        }
        self.terminate_on_error(|state| {
            let forked = |error| CloseReason::Operation(OpErrorKind::CompletionQueue(error));
            forked::check().map_err(forked)?;
            state.work(&mut Context::from_waker(waker))
        });
        self.wake();
        // Only the driver keeps deadlines.
        if self.protocol.is_linger_due() {
            self.io.wake_driver();
        }
    }

    #[inline]
    pub(super) fn terminate_on_error(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(), CloseReason>,
    ) {
        if let Err(reason) = work(self) {
            self.on(Event::Terminate(reason));
        }
    }

    fn needs_driver(&self) -> bool {
        !matches!(self.protocol.phase(), Phase::Running(stage) if *stage != Stage::Aborting)
    }

    /// Returns true if the driver must continue.
    pub(super) fn serve(&mut self, waker: &Waker) -> bool {
        if self.needs_driver() {
            return true;
        }
        self.advance(waker);
        self.needs_driver()
    }

    /// Returns the driver's next deadline, or the close reason.
    pub(super) fn drive(&mut self, waker: &Waker) -> ControlFlow<CloseReason, Option<Instant>> {
        self.progress(waker);
        self.protocol.linger(clock::now);
        let fetched = self.limits.is_elastic && self.memory.fetch.pooled() > 0;
        let receives = self.protocol.watches_receives() || self.receives.are_leaving();
        if receives || self.memory.send.is_grown() || fetched {
            self.protocol.watch_idle(clock::now);
        }
        if self.is_abort_acknowledged(waker) {
            self.on(Event::Terminate(CloseReason::Local));
        }
        self.close_reason()
            .map_or(ControlFlow::Continue(self.protocol.deadline()), ControlFlow::Break)
    }

    pub(super) fn on_deadline(&mut self, now: Instant) {
        // A sender that was woken, or whose future was dropped, waits no longer.
        let waits = !self.waiting.senders.is_empty() && !self.is_unblocked();
        let stalled_at = waits.then_some(self.counters.sent);
        let notified =
            self.counters.notifications_received > 0 || !self.inbox.notifications.is_empty();
        let message_seen = self.inbox.has_seen_message() || notified;
        let counters = &self.counters;
        let notifications = counters.notifications_sent + counters.notifications_received;
        let messages = counters.sent + counters.received + notifications;
        let observed = Observed { stalled_at, message_seen, messages };
        while let (None, Some(due)) = (self.close_reason(), self.protocol.due(now, observed)) {
            match due {
                Due::Frame(header) => self.send_bare(header),
                Due::Buffers { idle } => {
                    self.reap();
                    self.settle_receives();
                    if idle {
                        self.shrink_send_memory();
                        self.shrink_receives();
                        self.shrink_fetch_memory();
                        self.inbox.messages.shrink_to_fit();
                        self.outbox.offers.shrink_to_fit();
                        self.send_due();
                    }
                    self.renew_send_memory();
                }
                Due::Terminate(end) => self.on(Event::Terminate(end.into())),
            }
        }
    }

    fn work(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        self.take_frames(context)?;
        if self.protocol.peer_writes_in_vain() {
            // Ends the peer's writes, as TCP does by a reset.
            self.on(Event::Abort(CloseReason::Local));
            return Ok(());
        }
        if self.protocol.note_answer(clock::now) {
            self.io.wake_driver();
        }
        if let Some(failure) = self.protocol.phase().failure() {
            return self.on_failure(failure, context);
        }
        self.reap_some();
        self.send_held();
        if self.protocol.may_grow() {
            self.grow_receives();
        }
        self.fetch(context)?;
        if !self.protocol.phase().takes_messages() {
            self.discard();
        }
        self.send_due();
        self.watch_sends(context)?;
        match self.protocol.phase().failure() {
            Some(failure) => self.on_failure(failure, context),
            None if self.protocol.is_complete() => Err(CloseReason::Clean),
            None => Ok(()),
        }
    }

    pub(super) fn note_failed_growth(&mut self, error: &SetupError) {
        if self.counters.growth_failures == 0 {
            rdma_provider::warn!(
                qpn = %self.io.qp.qpn(),
                %error,
                "failed to register more buffers; continuing with fewer"
            );
        }
        self.counters.growth_failures += 1;
    }

    pub(super) fn note_refusal(&mut self, refusal: Option<OpErrorKind>) {
        if let Some(kind) = refusal {
            // The queue pair still works, so the failure would be noticed only after earlier
            // operations.
            self.on(Event::Fail(kind.into()));
            self.io.wake_driver();
        }
    }

    /// Reaps if something waits for it, or if a poll is likely to find several frames.
    fn reap_some(&mut self) {
        let awaited = self.outbox.in_place > 0
            || !self.outbox.held.is_empty()
            || self.waiting.flush.is_some()
            || !self.waiting.senders.is_empty();
        if awaited || self.outbox.sends.len() >= REAPED {
            self.reap();
        }
    }

    pub(super) fn reap(&mut self) {
        let context = &mut Context::from_waker(Waker::noop());
        while self.outbox.sends.front().is_some_and(Sent::is_finished)
            && let Poll::Ready(result) = self.poll_sent(0, context)
        {
            if let Err(kind) = result {
                self.on(Event::Fail(kind.into()));
            }
        }
    }

    /// Removes the frame if it is complete and the oldest.
    #[inline]
    pub(super) fn poll_sent(
        &mut self,
        index: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), OpErrorKind>> {
        let Some(sent) = self.outbox.sends.get_mut(index) else { return Poll::Ready(Ok(())) };
        let in_place = usize::from(sent.is_in_place());
        let result = ready!(sent.poll(context));
        self.outbox.in_place -= in_place;
        if index == 0 {
            self.outbox.sends.pop_front();
            self.protocol.sending.complete();
        }
        Poll::Ready(result)
    }

    #[inline]
    pub(super) fn send_due(&mut self) {
        if !self.protocol.is_quiet() {
            self.send_until_quiet();
        }
    }

    #[inline(never)]
    fn send_until_quiet(&mut self) {
        loop {
            let sends = &self.outbox.sends;
            let may_skip = || sends.len() < SKIPS.max(sends.capacity());
            let all_sent = self.outbox.held.is_empty();
            let next = self.protocol.next_frame(all_sent, may_skip, clock::now);
            let Some((header, resize)) = next else { return };
            self.counters.acks += u64::from(header.kind == Kind::Ack);
            match resize {
                Some(resize) => self.send_short(header, &resize.to_bytes()),
                None => self.send_bare(header),
            }
        }
    }

    #[inline]
    pub(super) fn watch_sends(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        match self.awaited_send() {
            Some(index) => self.watch_sends_from(index, context),
            None => Ok(()),
        }
    }

    #[inline(never)]
    fn watch_sends_from(
        &mut self,
        mut index: usize,
        context: &mut Context<'_>,
    ) -> Result<(), CloseReason> {
        loop {
            let before = self.protocol.sending.completed();
            match self.poll_sent(index, context) {
                Poll::Pending => {
                    self.watch_by_driver();
                    return Ok(());
                }
                Poll::Ready(Err(kind)) => return self.on_failure(kind.into(), context),
                Poll::Ready(Ok(())) => {}
            }
            // It completed after the last `reap`: held bytes may have waited for it, and another
            // send may be awaited now.
            if index > 0 {
                self.reap();
            }
            self.send_held();
            self.send_due();
            index = match self.awaited_send() {
                Some(index) if self.protocol.sending.completed() != before => index,
                _ => return Ok(()),
            };
        }
    }

    /// Also lets the driver's runtime watch a polled operation, because the current one may stop.
    pub(super) fn watch_by_driver(&mut self) {
        if self.io.runtime.is_some_and(|driver| !is_current(driver)) {
            self.io.wake_driver();
        }
    }

    #[inline]
    fn awaited_send(&self) -> Option<usize> {
        let (outbox, waiting) = (&self.outbox, &self.waiting);
        let waits = Waits {
            holds: !outbox.held.is_empty(),
            is_deaf: self.receives.posted.is_empty(),
            flush: waiting.flush,
            wants_buffers: !waiting.senders.is_empty()
                && matches!(waiting.blocked, Blocked::Buffers(_)),
        };
        self.protocol.awaited_send(waits, || outbox.last_in_place())
    }

    fn wake(&mut self) {
        let ended = self.close_reason().is_some();
        if ended || self.inbox.is_ready() || self.is_at_end() {
            self.wake_receivers();
        }
        if !self.waiting.notified.is_empty() && self.has_notification_or_end() {
            later::wake(self.waiting.notified.take_first());
        }
        if !self.waiting.senders.is_empty() && self.is_unblocked() {
            self.wake_senders();
        }
        let has_reached = |point| self.protocol.sending.has_reached(point);
        if ended || self.waiting.flush.is_some_and(has_reached) {
            self.waiting.flush = None;
            later::wake(self.waiting.flushers.take_all());
        }
    }

    pub(super) fn wake_receivers(&mut self) {
        match self.protocol.service() {
            Service::Messages => {
                later::wake(self.waiting.receivers.take_first());
                if !self.waiting.streams.is_empty() {
                    later::wake(self.waiting.streams.take_all());
                }
            }
            Service::Bytes => later::wake(self.waiting.receivers.take_all()),
        }
    }

    pub(super) fn wake_senders(&mut self) {
        match self.protocol.service() {
            Service::Messages => later::wake(self.waiting.senders.take_first()),
            Service::Bytes => later::wake(self.waiting.senders.take_all()),
        }
    }

    pub(super) fn is_turn(&self, waiters: &Waiters, ticket: Option<Ticket>) -> bool {
        // A stream has at most one reader and one writer. All others in its queues only wait for
        // readiness, or no longer do: as with a `TcpStream`, a read may be dropped without notice.
        self.protocol.service() == Service::Bytes || waiters.is_first(ticket)
    }

    fn is_unblocked(&self) -> bool {
        let has_buffers = |frames| self.memory.send.has(frames);
        self.protocol.is_unblocked(self.waiting.blocked, !self.outbox.held.is_empty(), has_buffers)
    }

    /// Also true if the application has received the messages before the listener's shutdown.
    pub(crate) fn is_at_end(&self) -> bool {
        let inbox = &self.inbox;
        let is_incomplete = self.protocol.incomplete_frames() > 0;
        let received_all = || inbox.messages.is_empty() && !is_incomplete && !inbox.lost;
        self.protocol.flow.peer_has_finished() && received_all() || inbox.is_drained()
    }

    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        self.protocol.phase().close_reason()
    }

    pub(super) fn max_message(&self) -> u64 {
        self.limits.send
    }

    pub(super) fn counters(&self) -> ConnectionCounters {
        ConnectionCounters {
            credits: self.protocol.flow.credits(),
            inbox: self.inbox.messages.len(),
            receives: self.protocol.receives(),
            buffer_memory: self.receives.memory()
                + self.memory.send.memory()
                + self.memory.fetch.pooled(),
            ..self.counters
        }
    }
}

/// Counters of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectionCounters {
    /// Messages sent.
    pub sent: u64,
    /// Sent messages that the peer fetches.
    pub offered: u64,
    /// Messages received.
    pub received: u64,
    /// Received messages copied for lack of spare buffers.
    pub copied_out: u64,
    /// Messages of the peer discarded by `close` or `abort`.
    pub discarded: u64,
    /// WRITEs with immediate data posted.
    pub notifications_sent: u64,
    /// Notifications of the peer taken by the application.
    pub notifications_received: u64,
    /// `Ack` frames sent.
    pub acks: u64,
    /// Frames that may be sent now.
    pub credits: u32,
    /// Messages arrived or offered that the application has not received.
    pub inbox: usize,
    /// Receives posted or kept by messages that wait for the application, with four for control
    /// frames.
    pub receives: u32,
    /// Registered bytes of receive, spare and send buffers, and of those kept for long messages.
    pub buffer_memory: u64,
    /// Failed attempts to register more buffers.
    pub growth_failures: u64,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::connection::Connection;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn failed_receive_post_fails_the_connection_at_once() {
        let pd =
            Device::software_in(&Network::new(), "refused").unwrap().protection_domain().unwrap();
        let mut state = Connection::prepare(&pd, &ConnectionConfig::default()).unwrap().state;
        let pool = Pool::new(state.io.qp.protection_domain(), 512, 1).unwrap();
        let spare = pool.try_alloc(1).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(state.io.qp.clone().close());
        state.post_receive(spare);
        assert_eq!(
            state.protocol.phase().failure(),
            Some(CloseReason::Operation(OpErrorKind::Closed))
        );
        assert!(state.io.wakes_driver, "the driver is notified");
        state.progress(Waker::noop());
        assert!(
            matches!(state.close_reason(), Some(CloseReason::Operation(_))),
            "{:?}",
            state.close_reason()
        );
    }
}
