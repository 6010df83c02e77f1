//! How a connection ends: both have finished, one is gone, or something has failed.

use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::admission::Refusal;
use super::core::{BATCH, Core};
use super::error::{CloseReason, MessageError};
use super::frame::Kind;
use super::handshake::Rejection;
use super::inbound::Incoming;
use super::message_memory::Arrived;
use super::waiters::{Guest, Ticket};
use crate::error::OpErrorKind;
use crate::types::WcStatus;

impl Core {
    /// An operation has failed, and the queue pair with it: finds out which was the first.
    pub(super) fn failed(&mut self, kind: OpErrorKind, context: &mut Context<'_>) -> Result<(), CloseReason> {
        if self.flushed.is_none_or(is_flush) {
            self.flushed = Some(kind);
        }
        // What had arrived before counts. It may have been found together with the failure, behind the look for frames: the
        // last of a peer that closes is followed by its end.
        for _ in 0..=self.receives.len() / BATCH {
            self.take_frames(context)?;
        }
        if self.flow.is_over() {
            // The peer has heard and said all, and is gone.
            return Err(CloseReason::Clean);
        }
        let mut reason = self.flushed.unwrap_or(kind);
        if is_flush(reason) {
            // What has failed may be the service's. Its completion comes before those of what is flushed because of it, but
            // perhaps nobody has looked.
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
        self.flushed = Some(reason);
        if self.inbox.messages.iter().any(|message| matches!(message, Incoming::Releasing)) {
            // They are there: whoever releases them comes back.
            return Ok(());
        }
        // In the error state all of them end.
        let disconnected = || self.link.as_ref().is_some_and(|link| !link.is_connected());
        match is_flush(reason) {
            true if pending => Ok(()),
            true if disconnected() => Err(self.disconnection()),
            _ => Err(CloseReason::Operation(reason)),
        }
    }

    /// Ends the connection: nothing is sent or received any more, what has arrived can still be taken unless the service takes no
    /// more.
    pub(super) fn end(&mut self, reason: CloseReason) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(reason);
        match reason {
            CloseReason::Clean | CloseReason::Local | CloseReason::Aborted => {
                tracing::debug!(qpn = %self.qp.qpn(), %reason, "connection ended")
            }
            _ => tracing::warn!(qpn = %self.qp.qpn(), %reason, "connection ended"),
        }
        // The memory of messages that are being fetched is the device's until the queue pair is closed.
        let here = |message: &&Incoming| matches!(message, Incoming::Here(_) | Incoming::Landed(_));
        let kept = if self.closing { 0 } else { self.inbox.messages.iter().take_while(here).count() };
        let lost = self.inbox.messages.split_off(kept);
        self.inbox.lost = !lost.is_empty();
        if self.closing {
            self.counters.discarded += lost.iter().filter(here).count() as u64;
        }
        let operations = (std::mem::take(&mut self.receives), std::mem::take(&mut self.sends), lost);
        self.after.operations.push(operations);
        if !self.parting {
            // Else with the queue pair: a peer that is refused what it fetches would take that for the reason.
            self.after.fetched.extend(self.offers.drain(..));
        }
        self.offered = 0;
        self.after.chores = std::mem::take(&mut self.chores);
        self.after.wakers.extend(self.receivers.all());
        self.after.wakers.extend(self.senders.all());
        self.after.wakers.extend(self.flushers.all());
    }

    /// Sends no more messages.
    pub(super) fn finish(&mut self, bell: &Waker) -> Result<(), MessageError> {
        if let Some(reason) = self.ended.filter(|&reason| reason != CloseReason::Clean) {
            return Err(MessageError::Closed(reason));
        }
        self.finishing = true;
        self.progress(bell);
        self.after.wakers.extend(self.senders.all());
        Ok(())
    }

    /// Neither sends nor receives any more messages.
    pub(super) fn close(&mut self, bell: &Waker) {
        self.finishing = true;
        self.closing = true;
        self.progress(bell);
        self.after.wakers.extend(self.senders.all());
        self.after.wakers.extend(self.receivers.all());
    }

    /// How it ended, once the queue pair is gone.
    pub(super) fn poll_gone(
        &mut self,
        ticket: &mut Option<Ticket>,
        bell: &Waker,
        guest: &mut Guest<'_>,
    ) -> Poll<CloseReason> {
        self.progress(bell);
        match self.ended {
            Some(reason) if self.gone => {
                self.leave_flushers(ticket);
                Poll::Ready(reason)
            }
            _ => {
                self.flushers.wait(ticket, guest);
                Poll::Pending
            }
        }
    }

    /// The service has dropped all it held of it.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// True if the service has dropped it, and nothing was said about that.
    pub(super) fn take_abandoned(&mut self) -> bool {
        std::mem::take(&mut self.abandoned) && self.ended.is_none()
    }

    /// Says goodbye for a service that does not: if it has seen the peer's last message it has finished, else it is gone.
    pub(super) fn part(&mut self, bell: &Waker) {
        if self.end_seen || self.flow.has_finished() && self.is_at_end() {
            return self.close(bell);
        }
        self.say_gone();
    }

    /// Tells the peer that this end is gone, unless it has no receive for that.
    fn say_gone(&mut self) -> bool {
        (self.closing, self.parting) = (true, true);
        let may = self.flow.may_send(Kind::Abort);
        if may {
            self.send_bare(Kind::Abort);
        }
        may
    }

    /// Ends the connection at once, without having finished. Nothing more is posted, of the service's neither; what is in line is
    /// not waited for, nor is a goodbye behind that.
    pub(super) fn leave(&mut self, reason: CloseReason, bell: &Waker) {
        if self.ended.is_some() {
            return;
        }
        // There may be a credit in what has arrived.
        self.qp.take_completions();
        if let Err(ended) = self.take_frames(&mut Context::from_waker(bell)) {
            // The service was first, and this is still its end; the goodbye fails, or is not minded.
            tracing::debug!(qpn = %self.qp.qpn(), %ended, "the peer has ended the connection, too");
        }
        let said = self.say_gone();
        self.stop(said);
        self.end(reason);
    }

    /// Sends no more frames, and nothing of the service's. If the last was the word that this end is gone, and the device has
    /// that, it may go on its way, whatever lined up behind it meanwhile.
    fn stop(&mut self, said: bool) {
        self.qp.stop_sending();
        if said && self.sends.back().is_some_and(|word| !word.is_in_line()) {
            self.goodbye = self.sends.pop_back();
        }
    }

    /// True if the peer's device has taken a goodbye without an end.
    pub(super) fn has_parted(&mut self, bell: &Waker) -> bool {
        if !self.parting {
            return false;
        }
        let context = &mut Context::from_waker(bell);
        let polled = self.sends.back_mut().map_or(Poll::Ready(Ok(())), |sent| sent.poll(context));
        polled.is_ready()
    }

    /// The queue pair is closed.
    pub(super) fn gone(&mut self) {
        self.gone = true;
        self.after.fetched.extend(self.offers.drain(..));
        self.after.link = self.link.take();
        self.after.wakers.extend(self.flushers.all());
    }

    /// The connection manager says that the peer has disconnected: what had arrived before counts, though the thread that
    /// polls in busy-poll mode may not have come to see it.
    pub(super) fn disconnected(&mut self, bell: &Waker) {
        self.qp.take_completions();
        for _ in 0..=self.receives.len() / BATCH {
            self.progress(bell);
        }
        let reason = if self.flow.is_over() { CloseReason::Clean } else { self.disconnection() };
        self.end(reason);
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

pub(super) fn is_flush(kind: OpErrorKind) -> bool {
    kind.status() == Some(WcStatus::WR_FLUSH_ERR) || kind == OpErrorKind::Closed
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

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
        let [(one_end, one_handshake), (two_end, two_handshake)] =
            [0, 1].map(|end: usize| (prepared[end].endpoint(), prepared[end].handshake(&[]).unwrap()));
        let [one, two] = prepared;
        let ends = [one.establish(&two_end, &two_handshake).unwrap(), two.establish(&one_end, &one_handshake).unwrap()];
        network.control("two").unwrap().set_port(!silent);
        ends
    }

    /// In a runtime that does not get to run its tasks.
    fn without_drivers(test: impl FnOnce()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { test() });
    }

    #[test]
    fn goodbye_that_the_device_has_is_said_whatever_lines_up_behind_it() {
        for (before, said) in [(0, true), (DEPTH, false)] {
            without_drivers(|| {
                let [one, two] = ends(true);
                let remote = two.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
                let write = || one.write(one.copy_from(b"x").unwrap(), remote.grant());
                let mut writes: Vec<_> = (0..before).map(|_| write()).collect();
                one.handle().shared.with(|core, _| assert!(core.say_gone()));
                writes.extend((0..2 * DEPTH).map(|_| write()));
                one.handle().shared.with(|core, _| {
                    assert!(core.qp.send_counters().waiting > 0);
                    core.stop(true);
                    assert_eq!(core.goodbye.is_some(), said);
                });
            });
        }
    }

    #[test]
    fn goodbye_uses_a_credit_of_a_frame_that_nobody_has_looked_at() {
        without_drivers(|| {
            let [one, two] = ends(false);
            let shared = [&one, &two].map(|end| &end.handle().shared);
            shared[0].with(|core, _| {
                while core.flow.may_send(Kind::Ping) {
                    core.send_bare(Kind::Ping);
                }
                core.send_bare(Kind::Ack);
                assert!(!core.flow.may_send(Kind::Abort));
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
                assert!(!core.flow.may_send(Kind::Abort));
                core.leave(CloseReason::Aborted, bell);
                assert!(core.goodbye.is_some());
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
