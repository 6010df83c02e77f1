//! Ends of a connection: both ends have finished, one was dropped or aborted, or an operation has failed.

use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::admission::Refusal;
use super::core::{BATCH, Core};
use super::error::{CloseReason, MessageError};
use super::handshake::Rejection;
use super::inbound::Incoming;
use super::lifecycle::{Action, End, Event, Phase, is_flush};
use super::message_memory::Arrived;
use super::outbound::Sent;
use super::waiters::{Guest, Ticket};
use crate::error::OpErrorKind;

impl Core {
    /// An operation has failed, and the queue pair with it: finds out which was the first.
    pub(super) fn failed(
        &mut self,
        kind: OpErrorKind,
        context: &mut Context<'_>,
    ) -> Result<(), CloseReason> {
        self.on(Event::Fail(kind));
        // What had arrived before counts. It may have been found together with the failure, behind the look for frames: the
        // last of a peer that closes is followed by its end.
        for _ in 0..=self.receives.len() / BATCH {
            self.take_frames(context)?;
        }
        if self.protocol.flow.is_over() {
            // Both ends have finished, and the peer has closed its queue pair.
            return Err(CloseReason::Clean);
        }
        let mut reason = self.protocol.phase().failure().unwrap_or(kind);
        if is_flush(reason) {
            // The failed operation may be the service's. Its completion precedes the flush of others, but may not be polled yet.
            self.qp.take_completions();
            reason = self.qp.cause().unwrap_or(reason);
        }
        let mut pending = false;
        for sent in &mut self.sends {
            match sent.poll(context) {
                Poll::Ready(Err(kind)) if is_flush(reason) => reason = kind,
                Poll::Ready(_) => {}
                Poll::Pending => pending = true,
            }
        }
        let mut landed = SmallVec::<[_; 2]>::new();
        for (number, message) in (self.inbox.base..).zip(&mut self.inbox.messages) {
            if let Incoming::Landing(landing) = message {
                match landing.poll(&self.qp, context) {
                    Poll::Ready(Ok(Arrived::Message(bytes))) => *message = Incoming::Landed(bytes),
                    Poll::Ready(Ok(Arrived::Region(region))) => {
                        *message = Incoming::Releasing;
                        landed.push(self.landings.release(number, region));
                    }
                    Poll::Ready(Err(kind)) => {
                        reason = if is_flush(reason) { kind } else { reason };
                        *message = Incoming::Lost;
                    }
                    Poll::Pending => pending = true,
                }
            }
        }
        landed.into_iter().for_each(|chore| self.add_chore(chore));
        self.on(Event::Fail(reason));
        if self.inbox.messages.iter().any(|message| matches!(message, Incoming::Releasing)) {
            // The helper calls `progress` after it has released them.
            return Ok(());
        }
        // In the error state all pending operations complete.
        let disconnected = || self.link.as_ref().is_some_and(|link| !link.is_connected());
        match is_flush(reason) {
            true if pending => Ok(()),
            true if disconnected() => Err(self.disconnection()),
            _ => Err(CloseReason::Operation(reason)),
        }
    }

    /// Makes the transition of `event`, and executes its actions.
    pub(super) fn on(&mut self, event: Event) {
        let actions = self.protocol.on(event);
        self.act(actions);
    }

    fn act(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::SendAbort => {
                    if let Some(header) = self.protocol.abort_frame() {
                        self.send_bare(header);
                    }
                }
                Action::StopSending => self.qp.stop_sending(),
                Action::Release => self.release(None),
                Action::ReleaseAllButAbort => {
                    let abort = self
                        .sends
                        .back()
                        .is_some_and(Sent::is_posted_abort)
                        .then(|| self.sends.pop_back());
                    self.release(abort.flatten());
                }
                Action::ReleaseOffers => self.after.fetched.extend(self.offers.drain(..)),
                Action::ReleaseLink => self.after.link = self.link.take(),
                Action::WakeSenders => self.after.wakers.extend(self.senders.all()),
                Action::WakeReceivers => self.after.wakers.extend(self.receivers.all()),
                Action::WakeFlushers => self.after.wakers.extend(self.flushers.all()),
            }
        }
    }

    /// Detaches all operations except an `Abort` that the driver awaits. Drops the messages that cannot be received any more.
    fn release(&mut self, abort: Option<Sent>) {
        let Some(End { reason, readable }) = self.protocol.phase().end() else {
            unreachable!("an end releases")
        };
        match reason {
            CloseReason::Clean | CloseReason::Local | CloseReason::Aborted => {
                tracing::debug!(qpn = %self.qp.qpn(), %reason, "connection ended")
            }
            _ => tracing::warn!(qpn = %self.qp.qpn(), %reason, "connection ended"),
        }
        // The memory of messages that are being fetched is the device's until the queue pair is closed.
        let here = |message: &&Incoming| matches!(message, Incoming::Here(_) | Incoming::Landed(_));
        let kept = if readable { self.inbox.messages.iter().take_while(here).count() } else { 0 };
        let lost = self.inbox.messages.split_off(kept);
        self.inbox.lost = !lost.is_empty();
        if !readable {
            self.counters.discarded += lost.iter().filter(here).count() as u64;
        }
        let operations =
            (std::mem::take(&mut self.receives), std::mem::take(&mut self.sends), lost);
        self.after.operations.push(operations);
        self.sends.extend(abort);
        self.after.chores = self.chores.take();
    }

    /// Finishes: the service sends no more messages.
    pub(super) fn finish(&mut self, bell: &Waker) -> Result<(), MessageError> {
        if let Some(reason) = self.ended().filter(|&reason| reason != CloseReason::Clean) {
            return Err(MessageError::Closed(reason));
        }
        self.on(Event::Finish);
        self.progress(bell);
        Ok(())
    }

    /// Closes: the service neither sends nor receives any more messages.
    pub(super) fn close(&mut self, bell: &Waker) {
        self.on(Event::Close);
        self.progress(bell);
    }

    /// Returns the reason of the end once the queue pair is closed.
    pub(super) fn poll_closed(
        &mut self,
        ticket: &mut Option<Ticket>,
        bell: &Waker,
        guest: &mut Guest<'_>,
    ) -> Poll<CloseReason> {
        self.progress(bell);
        match self.protocol.phase() {
            &Phase::Closed(End { reason, .. }) => {
                self.leave_flushers(ticket);
                Poll::Ready(reason)
            }
            _ => {
                self.flushers.wait(ticket, guest);
                Poll::Pending
            }
        }
    }

    /// Continues without the service, which has dropped its last handle.
    pub(super) fn abandon(&mut self, bell: &Waker) {
        // The peer's `Fin` may be among the frames that have arrived.
        self.progress(bell);
        let actions = self.protocol.abandon(self.is_at_end());
        self.act(actions);
    }

    /// Ends the connection at once, without having finished. Neither the connection nor the service posts after it. Queued
    /// operations are not awaited, nor is an `Abort` behind them.
    pub(super) fn abort(&mut self, reason: CloseReason, bell: &Waker) {
        if self.ended().is_some() {
            return;
        }
        // A frame that has arrived may carry a credit.
        self.qp.take_completions();
        if let Err(ended) = self.take_frames(&mut Context::from_waker(bell)) {
            // The reason stays the service's. The `Abort` fails, or the peer ignores it.
            tracing::debug!(qpn = %self.qp.qpn(), %ended, "the peer has ended the connection, too");
        }
        self.on(Event::Abort(reason));
    }

    /// True if the service has dropped the connection, and the peer's device has acknowledged all frames, the last of which is
    /// the `Abort`.
    pub(super) fn is_abort_taken(&mut self, bell: &Waker) -> bool {
        let context = &mut Context::from_waker(bell);
        self.protocol.phase().is_aborting()
            && self.sends.back_mut().is_none_or(|sent| sent.poll(context).is_ready())
    }

    /// Ends a connection whose peer has disconnected, according to the connection manager. Frames that had arrived before count,
    /// though the busy-poll thread may not have polled them yet.
    pub(super) fn disconnected(&mut self, bell: &Waker) {
        self.qp.take_completions();
        for _ in 0..=self.receives.len() / BATCH {
            self.progress(bell);
        }
        let reason =
            if self.protocol.flow.is_over() { CloseReason::Clean } else { self.disconnection() };
        self.on(Event::End(reason));
    }

    /// Reason of a connection that the connection manager has ended.
    fn disconnection(&self) -> CloseReason {
        let Some(private_data) = self.link.as_ref().and_then(|link| link.rejection()) else {
            return CloseReason::Disconnected;
        };
        match Refusal::decode(&private_data) {
            Some(refusal) => CloseReason::Refused(refusal),
            None if Rejection::decode(&private_data).is_some() => CloseReason::Rejected,
            None => CloseReason::Unconfirmed,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    use crate::message::frame::Kind;
    use crate::message::timers::LINGER;
    use crate::message::{Connection, ConnectionConfig};
    use crate::software::Network;
    use crate::types::Access;
    use crate::verbs::Device;

    /// Work requests that an end has at the device at most.
    const DEPTH: u32 = 4;

    /// Two ends, to be used where no driver runs; the first does not hear of the second any more if that is `silent`.
    fn ends(silent: bool) -> [Connection; 2] {
        let network = Network::new();
        let config = ConnectionConfig::default().max_send_wr(DEPTH).keepalive(None);
        let prepared = ["one", "two"].map(|name| {
            let pd = Device::software_in(&network, name).unwrap().protection_domain().unwrap();
            Connection::prepare(&pd, &config).unwrap()
        });
        let [(one_end, one_handshake), (two_end, two_handshake)] = [0, 1]
            .map(|end: usize| (prepared[end].endpoint(), prepared[end].handshake(&[]).unwrap()));
        let [one, two] = prepared;
        let ends = [
            one.establish(&two_end, &two_handshake).unwrap(),
            two.establish(&one_end, &one_handshake).unwrap(),
        ];
        network.control("two").unwrap().set_port(!silent);
        ends
    }

    /// In a runtime that does not get to run its tasks.
    fn without_drivers(test: impl FnOnce()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { test() });
    }

    #[test]
    fn abort_that_is_posted_is_sent_whatever_is_queued_behind_it() {
        for (before, said) in [(0, true), (DEPTH, false)] {
            without_drivers(|| {
                let [one, two] = ends(true);
                let remote = two.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
                let write = || one.write(one.copy_from(b"x").unwrap(), remote.grant());
                let mut writes: Vec<_> = (0..before).map(|_| write()).collect();
                one.handle().shared.with(|core, _| {
                    core.on(Event::Drop { at_end: false });
                    assert!(matches!(core.sends.back(), Some(Sent::Abort(_))));
                });
                writes.extend((0..2 * DEPTH).map(|_| write()));
                one.handle().shared.with(|core, _| {
                    assert!(core.qp.send_counters().waiting > 0);
                    core.on(Event::Abort(CloseReason::Aborted));
                    assert_eq!(!core.sends.is_empty(), said);
                });
            });
        }
    }

    /// The last frame may have to be retransmitted, so its time begins when it is posted.
    #[test]
    fn runtime_that_is_busy_after_a_drop_does_not_use_up_the_time_of_the_last_frame() {
        without_drivers(|| {
            let [one, _two] = ends(false);
            one.handle().shared.with(|core, bell| {
                core.abandon(bell);
                let busy_until = Instant::now() + Duration::from_secs(3600);
                assert!(core.protocol.deadline().is_none());
                core.on_time(busy_until);
                assert_eq!(core.ended(), None);
                // The driver comes: `Core::drive`.
                core.protocol.linger(|| busy_until);
                core.on_time(busy_until);
                assert_eq!(core.ended(), None);
                core.on_time(busy_until + LINGER);
                assert_eq!(core.ended(), Some(CloseReason::Local));
            });
        });
    }

    #[test]
    fn abort_uses_a_credit_of_a_frame_that_was_not_polled() {
        without_drivers(|| {
            let [one, two] = ends(false);
            let shared = [&one, &two].map(|end| &end.handle().shared);
            shared[0].with(|core, _| {
                while core.protocol.flow.may_send(Kind::Ping) {
                    let ping = core.protocol.flow.send(Kind::Ping);
                    core.send_bare(ping);
                }
                let ack = core.protocol.flow.send(Kind::Ack);
                core.send_bare(ack);
                assert!(!core.protocol.flow.may_send(Kind::Abort));
            });
            let deadline = Instant::now() + Duration::from_secs(60);
            let wait = |done: &dyn Fn() -> bool| {
                while !done() {
                    assert!(Instant::now() < deadline, "hangs, given up");
                    std::thread::yield_now();
                }
            };
            // The answer has arrived: its device has said so.
            wait(&|| {
                shared[0].qp.take_completions();
                shared[1].with(|core, bell| {
                    core.qp.take_completions();
                    core.progress(bell);
                    core.counters.acks > 0 && core.sends.is_empty()
                })
            });
            shared[0].with(|core, bell| {
                assert!(!core.protocol.flow.may_send(Kind::Abort));
                core.abort(CloseReason::Aborted, bell);
                assert!(core.sends.back().is_some_and(Sent::is_posted_abort));
            });
            wait(&|| {
                shared[1].with(|core, bell| {
                    core.qp.take_completions();
                    core.progress(bell);
                    core.ended() == Some(CloseReason::Dropped)
                })
            });
        });
    }
}
