//! One end at work: frames in, frames out, under one lock.
//!
//! ```text
//!  poll_send ─▶ inline │ copied │ offered ─▶ sends ─▶ peer        credits, phases, time: protocol.rs
//!  poll_recv ◀─ inbox ◀─ receives ◀───────────────── peer
//!                 └─ long: READ, then done ────────▶ peer
//! ```
//!
//! [`Core::progress`] does whatever can be done now. Whoever has something to do calls it first: a task that sends or
//! receives, or the connection's driver. All operations wake the driver, so that nothing depends on a task of the service
//! that may not be polled for a while.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use smallvec::SmallVec;

use super::config::ConnectionConfig;
use super::error::{CloseReason, Violation};
use super::frame::{Header, Kind, decode_offer};
use super::handshake::Handshake;
use super::helper::Chores;
use super::inbound::{Inbox, Incoming};
use super::lifecycle::Event;
use super::message_memory::{Chore, Landings, Made};
use super::outbound::{Block, Sent};
use super::protocol::{Due, Protocol};
use super::timers::{Observed, Times};
use super::waiters::Waiters;
use crate::cm::Link;
use crate::contained::contained;
use crate::error::OpErrorKind;
use crate::memory::{BufMut, Pool, ReadOnlyRegion};
use crate::op::{QueuePair, Received, Recv};

/// Frames that are dealt with before others get their turn.
pub(super) const BATCH: usize = 128;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) protocol: Protocol,
    /// The connection manager's part, which ends the connection at the peer when it is dropped.
    pub(super) link: Option<Arc<Link>>,
    pub(super) qp: QueuePair,
    pub(super) limits: Limits,
    pub(super) receive_pool: Pool,
    pub(super) send_pool: Pool,
    pub(super) landings: Landings,
    pub(super) chores: Chores,

    pub(super) receives: VecDeque<Recv<BufMut>>,
    pub(super) inbox: Inbox,
    /// Frames on their way. After the end: the `Abort` that the driver awaits, if there is one.
    pub(super) sends: VecDeque<Sent>,
    /// Frames before them.
    pub(super) reaped: u64,
    /// Long messages that the peer has not fetched.
    pub(super) offers: VecDeque<ReadOnlyRegion>,
    pub(super) offered: u64,

    pub(super) senders: Waiters,
    /// What the first of them waits for.
    pub(super) blocked: Block,
    pub(super) receivers: Waiters,
    pub(super) flushers: Waiters,
    /// What the first of those that flush waits for.
    pub(super) mark: Option<Mark>,

    pub(super) counters: ConnectionCounters,
    pub(super) after: After,
}

/// A moment in what is sent: frames, and offers among them. A later one is not less in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) frames: u64,
    pub(super) offers: u64,
}

/// Sizes agreed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) inline: usize,
    /// Longest message that is sent at once.
    pub(super) eager: usize,
    /// Longest that the peer takes.
    pub(super) send: u64,
    /// Longest that the peer was told to be possible.
    pub(super) receive: u64,
    pub(super) send_memory: u64,
    pub(super) receive_memory: u64,
}

/// What is to be done when the lock is released: it may run code of the service.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) wakers: SmallVec<[Waker; 4]>,
    /// Wakers of tasks that wait no more.
    pub(super) spent: SmallVec<[Waker; 2]>,
    pub(super) fetched: SmallVec<[ReadOnlyRegion; 2]>,
    /// Their registrations may end with them.
    pub(super) discarded: Vec<Bytes>,
    pub(super) unneeded: Vec<Made>,
    /// There are chores, and nobody does them.
    pub(super) help: bool,
    pub(super) operations: Vec<Operations>,
    pub(super) chores: VecDeque<Chore>,
    pub(super) link: Option<Arc<Link>>,
    /// The driver shall look.
    pub(super) ring: bool,
}

/// Operations of an end that has ended.
type Operations = (VecDeque<Recv<BufMut>>, VecDeque<Sent>, VecDeque<Incoming>);

impl After {
    /// What is dropped may run destructors of the service, too: of the owner of a `Bytes`.
    pub(super) fn run(self) {
        let Self {
            wakers,
            spent,
            fetched,
            discarded,
            unneeded,
            operations,
            chores,
            link,
            help: _,
            ring: _,
        } = self;
        for waker in wakers {
            contained(|| waker.wake());
        }
        for waker in spent {
            contained(|| drop(waker));
        }
        for region in fetched {
            contained(|| drop(region));
        }
        for bytes in discarded {
            contained(|| drop(bytes));
        }
        contained(|| drop((unneeded, operations, chores, link)));
    }
}

impl Core {
    /// An end whose queue pair takes receives.
    pub(super) fn new(
        qp: QueuePair,
        config: &ConnectionConfig,
        [receive_pool, send_pool]: [Pool; 2],
    ) -> Self {
        let limits = Limits {
            inline: qp.caps().max_inline.min(config.max_inline) as usize,
            eager: send_pool.buffer_size(),
            send: 0,
            receive: config.handshake().max_message,
            send_memory: config.send_memory,
            receive_memory: config.receive_memory,
        };
        let mut core = Self {
            protocol: Protocol::new(config.receives()),
            landings: Landings::new(qp.protection_domain(), config.receive_memory),
            chores: Chores::None,
            link: None,
            qp,
            limits,
            receive_pool,
            send_pool,
            receives: VecDeque::with_capacity(config.receives() as usize),
            inbox: Inbox::default(),
            sends: VecDeque::new(),
            reaped: 0,
            offers: VecDeque::new(),
            offered: 0,
            senders: Waiters::default(),
            blocked: Block::Credits,
            receivers: Waiters::default(),
            flushers: Waiters::default(),
            mark: None,
            counters: ConnectionCounters::default(),
            after: After::default(),
        };
        for _ in 0..config.receives() {
            match core.receive_pool.try_alloc(core.receive_pool.buffer_size()) {
                Ok(buffer) => core.post_receive(buffer),
                Err(error) => {
                    unreachable!("the pool has as many buffers as there are receives: {error}")
                }
            }
        }
        core
    }

    /// The peer is connected, and has said what it takes.
    pub(super) fn meet(
        &mut self,
        config: &ConnectionConfig,
        peer: &Handshake,
        link: Option<Arc<Link>>,
    ) {
        self.link = link;
        self.protocol.meet(config.receives(), peer.receives, Times::new(config), Instant::now());
        self.limits.eager = self.limits.eager.min(peer.buffer_size as usize);
        self.limits.send = peer.max_message;
    }

    /// What is left to do without the lock.
    pub(super) fn take_after(&mut self) -> After {
        std::mem::take(&mut self.after)
    }

    // Progress.

    /// Does what can be done now; all operations wake `bell`.
    pub(super) fn progress(&mut self, bell: &Waker) {
        if self.ended().is_some() {
            return;
        }
        let context = &mut Context::from_waker(bell);
        let result = self.work(context);
        if let Err(reason) = result {
            self.on(Event::End(reason));
        }
        self.wake();
    }

    /// Makes progress for the driver. Returns when it has to look again by itself, until the connection has ended.
    pub(super) fn drive(&mut self, bell: &Waker) -> ControlFlow<CloseReason, Option<Instant>> {
        self.progress(bell);
        self.protocol.linger(Instant::now);
        if self.is_abort_taken(bell) {
            self.on(Event::End(CloseReason::Local));
        }
        self.ended().map_or(ControlFlow::Continue(self.protocol.deadline()), ControlFlow::Break)
    }

    /// Does what is due at `now`.
    pub(super) fn on_time(&mut self, now: Instant) {
        let stalled_at = (!self.senders.is_empty()).then_some(self.counters.sent);
        let observed = Observed { stalled_at, begun: self.inbox.has_begun() };
        while let (None, Some(due)) = (self.ended(), self.protocol.due(now, observed)) {
            match due {
                Due::Frame(header) => self.send_bare(header),
                Due::End(reason) => self.on(Event::End(reason)),
            }
        }
    }

    fn work(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        self.take_frames(context)?;
        if let Some(kind) = self.protocol.phase().failure() {
            return self.failed(kind, context);
        }
        self.reap();
        self.fetch(context)?;
        if !self.protocol.phase().takes_messages() {
            self.discard()?;
        }
        self.send_due();
        self.watch_sends(context)?;
        match self.protocol.phase().failure() {
            Some(kind) => self.failed(kind, context),
            None if self.protocol.flow.is_over() && self.sends.is_empty() => {
                Err(CloseReason::Clean)
            }
            None => Ok(()),
        }
    }

    /// Deals with frames that have arrived.
    pub(super) fn take_frames(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        for _ in 0..BATCH {
            let Some(receive) = self.receives.front_mut() else { return Ok(()) };
            let Poll::Ready(result) = Pin::new(receive).poll(context) else { return Ok(()) };
            self.receives.pop_front();
            match result {
                Ok(received) => self.on_frame(received)?,
                Err(error) => {
                    self.on(Event::Fail(error.kind()));
                    return Ok(());
                }
            }
        }
        // Others shall run, too.
        context.waker().wake_by_ref();
        Ok(())
    }

    fn on_frame(&mut self, received: Received<BufMut>) -> Result<(), CloseReason> {
        let Received { buffer, imm, written, .. } = received;
        let header = imm.filter(|_| !written).ok_or(Violation::Header { header: 0 })?;
        let header = Header::decode(header)?;
        if !header.kind.is_message() && !buffer.is_empty() {
            return Err(Violation::FrameLength { len: buffer.len() }.into());
        }
        let fetched = self.protocol.receive(header)?;
        for _ in 0..fetched {
            if let Some(region) = self.offers.pop_front() {
                self.offered -= region.len();
                self.after.fetched.push(region);
            }
        }
        match header.kind {
            Kind::Data => {
                let (len, allowed) = (buffer.len() as u64, self.limits.receive);
                if len > allowed {
                    return Err(Violation::TooLong { len, allowed }.into());
                }
                self.inbox.push(Incoming::Here(buffer));
            }
            Kind::Offer => {
                let region = decode_offer(&buffer, self.limits.receive)?;
                self.post_receive(buffer);
                // The peer keeps the credit until the message was handed out.
                self.inbox.push(Incoming::Offered(region));
            }
            Kind::Ack | Kind::Ping | Kind::Fin | Kind::Abort => {
                self.post_receive(buffer);
                self.protocol.flow.release_control();
            }
        }
        Ok(())
    }

    /// Posts a receive.
    pub(super) fn post_receive(&mut self, mut buffer: BufMut) {
        let whole = buffer.resize(self.receive_pool.buffer_size());
        debug_assert!(whole.is_ok(), "it is of the pool");
        let receive = self.qp.recv(buffer);
        self.note_refusal(receive.refusal());
        self.receives.push_back(receive);
    }

    /// An operation that was not posted does not end by itself, nor does its queue pair: without this it would be found when
    /// all before it have ended.
    pub(super) fn note_refusal(&mut self, refusal: Option<OpErrorKind>) {
        if let Some(kind) = refusal {
            self.on(Event::Fail(kind));
            self.after.ring = true;
        }
    }

    /// Forgets sends that are done.
    pub(super) fn reap(&mut self) {
        while self.sends.front().is_some_and(Sent::is_finished) {
            self.reaped += 1;
            if let Some(mut sent) = self.sends.pop_front()
                && let Poll::Ready(Err(kind)) = sent.poll(&mut Context::from_waker(Waker::noop()))
            {
                self.on(Event::Fail(kind));
            }
        }
    }

    /// Sends the frames that are due: that offers are done, that receives are free, that this end has finished.
    pub(super) fn send_due(&mut self) {
        while let Some(header) = self.protocol.next_frame() {
            self.counters.acks += u64::from(header.kind == Kind::Ack);
            self.send_bare(header);
        }
    }

    /// Has the driver woken by sends that somebody waits for.
    fn watch_sends(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        let waited_for = if self.protocol.flow.is_over() {
            self.sends.back_mut()
        } else if let Some(last) =
            self.mark.and_then(|mark| mark.frames.checked_sub(self.reaped + 1))
        {
            self.sends.get_mut(last as usize)
        } else if !self.senders.is_empty() && self.blocked == Block::Buffers {
            // Not the first: it would wake for each of them.
            let middle = self.sends.len() / 2;
            self.sends.get_mut(middle)
        } else {
            return Ok(());
        };
        if let Some(sent) = waited_for {
            let polled = sent.poll(context);
            if let Poll::Ready(Err(kind)) = polled {
                return self.failed(kind, context);
            }
            self.reap();
        }
        Ok(())
    }

    /// Tells those who wait for something that has happened.
    fn wake(&mut self) {
        let ended = self.ended().is_some();
        if ended || self.inbox.is_ready() || self.is_at_end() {
            self.after.wakers.extend(self.receivers.first());
        }
        if !self.senders.is_empty() && self.is_unblocked() {
            self.after.wakers.extend(self.senders.first());
        }
        if ended || self.mark.is_some_and(|mark| self.has_reached(mark)) {
            self.mark = None;
            self.after.wakers.extend(self.flushers.all());
        }
    }

    fn is_unblocked(&self) -> bool {
        if self.protocol.phase().check_open().is_err() {
            return true;
        }
        match self.blocked {
            Block::Credits => self.protocol.flow.may_send(Kind::Data),
            Block::Buffers => self.send_pool.available() > 0,
            Block::Memory(len) => {
                self.offers.is_empty() || self.offered + len <= self.limits.send_memory
            }
        }
    }

    /// All that was sent so far.
    pub(super) fn sent_so_far(&self) -> Mark {
        Mark { frames: self.reaped + self.sends.len() as u64, offers: self.counters.offered }
    }

    /// True if all that had been sent then has arrived.
    pub(super) fn has_reached(&self, mark: Mark) -> bool {
        self.reaped >= mark.frames
            && self.counters.offered - self.offers.len() as u64 >= mark.offers
    }

    /// True if the peer's messages have all been handed out.
    pub(super) fn is_at_end(&self) -> bool {
        self.protocol.flow.peer_has_finished() && self.inbox.messages.is_empty() && !self.inbox.lost
    }

    /// Why the connection has ended, if it has.
    pub(super) fn ended(&self) -> Option<CloseReason> {
        self.protocol.phase().ended()
    }

    pub(super) fn max_message(&self) -> u64 {
        self.limits.send
    }

    pub(super) fn counters(&self) -> ConnectionCounters {
        ConnectionCounters {
            credits: self.protocol.flow.credits(),
            inbox: self.inbox.messages.len(),
            ..self.counters
        }
    }
}

impl From<Violation> for CloseReason {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

/// What a connection has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectionCounters {
    /// Messages sent.
    pub sent: u64,
    /// Of those, how many were left for the peer to fetch.
    pub offered: u64,
    /// Messages received.
    pub received: u64,
    /// Of those, how many were copied because the service kept too many buffers.
    pub copied_out: u64,
    /// Messages of the peer that were thrown away after `close` or by `abort`.
    pub discarded: u64,
    /// Times that the peer was told of free receives or fetched messages without a message of ours to do so.
    pub acks: u64,
    /// Frames that may be sent now.
    pub credits: u32,
    /// Messages that have arrived, or are announced, and were not received yet.
    pub inbox: usize,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::message::Connection;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn receive_that_is_refused_is_noticed_at_once() {
        let pd =
            Device::software_in(&Network::new(), "refused").unwrap().protection_domain().unwrap();
        let mut core = Connection::prepare(&pd, &ConnectionConfig::default()).unwrap().core;
        let spare = core.receive_pool.try_alloc(1).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(core.qp.clone().close());
        core.post_receive(spare);
        assert_eq!(core.protocol.phase().failure(), Some(OpErrorKind::Closed));
        assert!(core.take_after().ring, "and the driver is told");
        core.progress(Waker::noop());
        assert!(matches!(core.ended(), Some(CloseReason::Operation(_))), "{:?}", core.ended());
    }
}
