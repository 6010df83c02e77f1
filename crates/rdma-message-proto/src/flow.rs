//! Flow control of one end: each frame that may be sent finds a posted receive.
//!
//! # Credits
//!
//! Each frame uses up one receive of the peer, which announces its count of reposted receives
//! (`released`) in every header. `window - (sent - released)` frames may be sent, so "receiver not
//! ready" cannot occur, even with packet loss and retransmission.
//!
//! A message keeps its receive until the application takes it, so slow readers stop senders. The
//! receives of other frames are reposted before anything else is sent.
//!
//! A notification is a WRITE with immediate data of the application, without a header. It uses a
//! credit, too. Its receive is reposted at once, but counts as released only when the application
//! takes the notification.
//!
//! # Freedom from deadlock
//!
//! Credits travel on frames that need credits, so the last ones are reserved:
//!
//! | Frame | Credits needed |
//! |---|---|
//! | message of n frames (`Part`, `Data`, or an `Offer`) | [`RESERVE`] + n - 1 + due skips |
//! | notification | [`RESERVE`] + due skips |
//! | skipped receive (`Resize` without payload) | [`RESERVE`] |
//! | `Fin`, `Ping`, `Resize`, and an `Ack` that reports done offers or answers a `Ping` | 2 |
//! | `Ack` for credits alone, `Abort` | 1 |
//!
//! An `Ack` for credits is due when, since the last announcement, a quarter of the receives for
//! messages was released (at least two if there are four or more), or `CONTROL_ACK` receives of
//! other frames. So it announces at least one.
//!
//! 1. *The two ends are never both without credits while nothing is in flight.* Only an `Ack` for
//!    credits (or an `Abort`, after which nothing is awaited) uses a last credit. If one of two
//!    such frames arrived before the other was sent, the other announced its receive, which is
//!    released at once: the first end has a credit. If they crossed, each announced a receive: both
//!    have one.
//! 2. *An end that needs 2 credits gets them, even if the peer's application is slow.* Messages
//!    leave `RESERVE - 1`. With one credit left, `RESERVE - 2` = `CONTROL_ACK` receives of other
//!    frames are unannounced. These frames have arrived or will, so the peer owes an `Ack`. If it
//!    has no credit for that, this end has one by 1, and owes an `Ack` itself: the peer's credits
//!    were used by messages that this application has not received, at most the window less the
//!    reserve, and by at least `CONTROL_ACK` other frames.
//! 3. *A message gets its credits once the peer's application has received all earlier ones.* All
//!    receives are then released, and fewer of them are unannounced than cause an `Ack`. The others
//!    suffice for a message of up to [`max_frames`]. Its frames are sent at once, so it does not
//!    wait for credits that only its own delivery returns.
//! 4. *Acks do not alternate indefinitely:* two received cause at most one sent.
//! 5. *Changes of the window keep this true.* An end counts more receives from the `Resize` that
//!    announces them; its peer, from its arrival. The peer counts a skipped receive off when it
//!    sends the skip, and the end when the skip arrives. A skip needs and leaves as many credits as
//!    a message of one frame. Messages leave one more credit for each due skip, so all skips are
//!    sent even if the application receives nothing.
//!
//! `model.rs` confirms this for all interleavings with small windows.

use crate::Violation;
use crate::frame::{COUNT_MASK, Header, Kind};
use crate::window::Resize;

/// The receives beyond those for messages: `CONTROL_ACK` + 1, and one for the last frame that is
/// not a message, because its receive is not announced yet.
pub const RESERVE: u32 = 4;

const CONTROL_ACK: u32 = 2;

pub fn max_frames(window: u32) -> u32 {
    let messages = window.saturating_sub(RESERVE);
    messages - ack_threshold(messages) + 1
}

/// The threshold exceeds one if possible, because the answer to a request announces its receive.
fn ack_threshold(messages: u32) -> u32 {
    if messages < 4 { 1 } else { messages.div_ceil(4).max(2) }
}

/// The credits of one end. Counts wrap at 2^32. After a violation, the state is meaningless.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Flow {
    // Sending.
    /// The peer's receives, including the reserve, without skipped ones.
    window: u32,
    sent: u32,
    /// Sent frames whose receives were reposted.
    confirmed: u32,
    offered: u32,
    fetched: u32,
    finished: bool,
    fin_acked: bool,
    /// Receives that the peer asks this end to skip, and those that it has skipped.
    to_skip: u32,
    skipped: u32,
    /// No frame may be sent before one has arrived.
    awaits_first_frame: bool,

    // Receiving.
    /// Own receives that the peer knows of, including the reserve, without skipped ones.
    receives: u32,
    resize: Option<Resize>,
    /// Receives that the peer is asked to skip, and those that it has skipped.
    skips: u32,
    peer_skipped: u32,
    arrived: u32,
    released: u32,
    announced: u32,
    /// Unannounced receives of frames other than messages.
    control: u32,
    /// Unannounced receives of a [greeting](Self::greet): 0 or 1.
    greetings: u32,
    offers: u32,
    done: u32,
    done_announced: u32,
    /// The peer waits for an answer to a `Ping` or `Fin`.
    ack_requested: bool,
    peer_finished: bool,
    peer_fin_acked: bool,
}

impl Flow {
    /// Both numbers include the reserve.
    pub fn new(receives: u32, window: u32) -> Self {
        Self {
            window,
            sent: 0,
            confirmed: 0,
            offered: 0,
            fetched: 0,
            finished: false,
            fin_acked: false,
            to_skip: 0,
            skipped: 0,
            awaits_first_frame: false,
            receives,
            resize: None,
            skips: 0,
            peer_skipped: 0,
            arrived: 0,
            released: 0,
            announced: 0,
            control: 0,
            greetings: 0,
            offers: 0,
            done: 0,
            done_announced: 0,
            ack_requested: false,
            peer_finished: false,
            peer_fin_acked: false,
        }
    }

    /// Must be called before the first frame. The window includes the reserve.
    pub fn set_window(&mut self, window: u32) {
        self.window = window;
    }

    /// Makes this end send nothing before a frame of the peer has arrived.
    pub fn wait_for_peer(&mut self) {
        self.awaits_first_frame = true;
    }

    /// Makes an `Ack` due, for which the peer [waits](Self::wait_for_peer).
    pub fn greet(&mut self) {
        self.ack_requested = true;
    }

    #[inline]
    pub fn credits(&self) -> u32 {
        if self.awaits_first_frame { 0 } else { self.window - self.in_use() }
    }

    /// Returns the number of sent frames whose receives are not known to be reposted.
    pub fn in_use(&self) -> u32 {
        self.sent.wrapping_sub(self.confirmed)
    }

    /// Returns true if this frame may be sent now, or an `Ack` for credits alone. Messages leave
    /// the credits for due skips, because the peer waits for them before it posts more receives.
    pub fn may_send(&self, kind: Kind) -> bool {
        let needed = match kind {
            Kind::Data | Kind::Part | Kind::Offer => RESERVE + self.to_skip,
            Kind::Fin | Kind::Ping | Kind::Resize => 2,
            Kind::Ack | Kind::Abort => 1,
        };
        self.credits() >= needed && !(self.finished && (kind.is_message() || kind == Kind::Fin))
    }

    /// Returns the maximum of frames of a message, whose credits exist once the peer's application
    /// has received all earlier messages.
    pub fn max_frames(&self) -> u32 {
        max_frames(self.window - self.to_skip)
    }

    pub fn may_send_message(&self, frames: u32) -> bool {
        self.credits() >= RESERVE - 1 + self.to_skip + frames && self.may_send(Kind::Data)
    }

    /// Uses a credit for a frame, which must be sent. Requires [`may_send`](Self::may_send).
    pub fn send(&mut self, kind: Kind) -> Header {
        debug_assert!(self.may_send(kind), "{kind:?} with {} credits", self.credits());
        self.sent = self.sent.wrapping_add(1);
        match kind {
            Kind::Offer => self.offered = self.offered.wrapping_add(1),
            Kind::Fin => self.finished = true,
            Kind::Data | Kind::Part | Kind::Ack | Kind::Ping | Kind::Abort | Kind::Resize => {}
        }
        self.announced = self.released;
        (self.control, self.greetings) = (0, 0);
        self.done_announced = self.done;
        self.ack_requested = false;
        self.peer_fin_acked = self.peer_finished;
        Header {
            kind,
            fin_acked: self.peer_finished,
            released: self.released & COUNT_MASK,
            done: self.done & COUNT_MASK,
        }
    }

    /// Uses a credit for a notification, which must be posted. Requires `may_send(Kind::Data)`.
    pub fn send_notification(&mut self) {
        debug_assert!(self.may_send(Kind::Data), "{} credits", self.credits());
        self.sent = self.sent.wrapping_add(1);
    }

    /// Requires that its receives are posted.
    pub fn resize(&mut self, resize: Resize) {
        debug_assert!(self.may_resize(), "one change at a time");
        self.resize = Some(resize);
    }

    pub fn may_resize(&self) -> bool {
        self.resize.is_none() && self.skips == 0
    }

    /// Returns the due announcement, which must be sent, unless the peer has finished.
    #[inline]
    pub fn announce(&mut self) -> Option<(Header, Resize)> {
        let resize = self.resize?;
        if self.peer_finished || !self.may_send(Kind::Resize) {
            return None;
        }
        self.resize = None;
        self.receives = resize.receives;
        self.skips = resize.skip;
        Some((self.send(Kind::Resize), resize))
    }

    /// Returns the header of a due skip, which must be sent.
    #[inline]
    pub fn skip(&mut self) -> Option<Header> {
        if self.to_skip == 0 || self.finished || self.credits() < RESERVE {
            return None;
        }
        let header = self.send(Kind::Resize);
        // A skipped receive is never released, so it leaves the window instead.
        self.sent = self.sent.wrapping_sub(1);
        self.window -= 1;
        self.to_skip -= 1;
        self.skipped = self.skipped.wrapping_add(1);
        Some(header)
    }

    pub fn has_due_skip(&self) -> bool {
        self.to_skip > 0 && !self.finished
    }

    /// Returns the number of the peer's receive for the next frame.
    pub fn next_receive(&self) -> u32 {
        self.sent.wrapping_add(self.skipped)
    }

    pub fn used_receives(&self) -> u32 {
        self.arrived.wrapping_add(self.peer_skipped)
    }

    pub fn unanswered(&self) -> u32 {
        self.arrived.wrapping_sub(self.announced) - self.greetings
    }

    pub fn is_idle(&self) -> bool {
        self.arrived == self.released
    }

    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.unannounced() < ack_threshold(self.receives - RESERVE).min(CONTROL_ACK)
            && self.done == self.done_announced
            && !self.ack_requested
            && self.resize.is_none()
            && self.to_skip == 0
    }

    #[inline]
    pub fn ack_due(&self) -> bool {
        if (self.done != self.done_announced || self.ack_requested) && self.credits() >= 2 {
            return true;
        }
        let due = self.control >= CONTROL_ACK || self.owes_credits();
        // A peer that has everything may be gone.
        due && !self.is_over() && self.may_send(Kind::Ack)
    }

    pub fn owes_credits(&self) -> bool {
        let messages = self.unannounced() - self.control;
        // The first comparison, which the second implies, is often enough and costs less.
        messages > 0 && messages >= ack_threshold(self.receives - RESERVE)
    }

    fn unannounced(&self) -> u32 {
        self.released.wrapping_sub(self.announced)
    }

    /// Returns the number of further offers that are done.
    pub fn receive(&mut self, header: Header) -> Result<u32, Violation> {
        // Frames of other kinds count as traffic that has no answer yet.
        self.greetings += u32::from(self.awaits_first_frame && header.kind == Kind::Ack);
        self.awaits_first_frame = false;
        let released = header.released.wrapping_sub(self.confirmed) & COUNT_MASK;
        let in_use = self.in_use();
        if released > in_use {
            return Err(Violation::Credits { announced: released, in_use });
        }
        let fetched = header.done.wrapping_sub(self.fetched) & COUNT_MASK;
        let offered = self.offered.wrapping_sub(self.fetched);
        if fetched > offered {
            return Err(Violation::Done { announced: fetched, offered });
        }
        // An offer must keep its credit until it is done.
        if in_use - released < offered - fetched {
            return Err(Violation::Unfetched {
                in_use: in_use - released,
                offered: offered - fetched,
            });
        }
        if header.fin_acked && !self.finished {
            return Err(Violation::NotFinished);
        }
        if self.peer_finished && (header.kind.is_message() || header.kind == Kind::Fin) {
            return Err(Violation::AfterFinish);
        }
        // A `Resize` is counted when its payload is known.
        if header.kind != Kind::Resize {
            self.arrive()?;
        }
        self.fin_acked |= header.fin_acked;
        self.confirmed = self.confirmed.wrapping_add(released);
        self.fetched = self.fetched.wrapping_add(fetched);
        match header.kind {
            Kind::Offer => self.offers = self.offers.wrapping_add(1),
            Kind::Ping => self.ack_requested = true,
            Kind::Fin => (self.peer_finished, self.ack_requested) = (true, true),
            Kind::Data | Kind::Part | Kind::Ack | Kind::Abort | Kind::Resize => {}
        }
        Ok(fetched)
    }

    /// Called after the header. `most` is the maximum of the peer's receives.
    pub fn receive_resize(&mut self, resize: Resize, most: u32) -> Result<(), Violation> {
        self.arrive()?;
        let Resize { receives, skip, size, .. } = resize;
        let least = self.window.max(skip.saturating_add(RESERVE + 1));
        if self.to_skip > 0 || !(least..=most).contains(&receives) {
            return Err(Violation::Resize { receives, size });
        }
        (self.window, self.to_skip) = (receives, skip);
        Ok(())
    }

    pub fn receive_skip(&mut self) -> Result<(), Violation> {
        self.skips = self.skips.checked_sub(1).ok_or(Violation::Skip)?;
        self.receives -= 1;
        self.peer_skipped = self.peer_skipped.wrapping_add(1);
        self.check_window()
    }

    pub fn receive_notification(&mut self) -> Result<(), Violation> {
        if self.peer_finished {
            return Err(Violation::AfterFinish);
        }
        self.arrive()
    }

    fn arrive(&mut self) -> Result<(), Violation> {
        self.arrived = self.arrived.wrapping_add(1);
        self.check_window()
    }

    fn check_window(&self) -> Result<(), Violation> {
        if self.arrived.wrapping_sub(self.announced) > self.receives {
            return Err(Violation::Window { receives: self.receives });
        }
        Ok(())
    }

    /// Also called for a notification that the application has taken.
    pub fn release_message(&mut self) {
        self.released = self.released.wrapping_add(1);
    }

    pub fn release_control(&mut self) {
        self.released = self.released.wrapping_add(1);
        self.control += 1;
    }

    pub fn done(&mut self) {
        debug_assert_ne!(self.done, self.offers, "each done has an offer");
        self.done = self.done.wrapping_add(1);
    }

    pub fn is_everything_released(&self) -> bool {
        self.sent == self.confirmed
    }

    pub fn all_fetched(&self) -> bool {
        self.offered == self.fetched
    }

    /// Returns true if the peer has the `Fin` and all messages.
    pub fn peer_has_all(&self) -> bool {
        self.fin_acked && self.all_fetched()
    }

    pub fn peer_has_finished(&self) -> bool {
        self.peer_finished
    }

    /// Returns true if both ends have the other's `Fin`, all messages and all done counts. The
    /// device's acknowledgements do not suffice, because a peer that closes its queue pair may not
    /// send the last ones.
    pub fn is_over(&self) -> bool {
        self.fin_acked
            && self.peer_fin_acked
            && self.all_fetched()
            && self.offers == self.done
            && self.done == self.done_announced
    }
}

#[cfg(test)]
impl Flow {
    pub(crate) fn receives(&self) -> u32 {
        self.receives
    }

    pub(crate) fn has_finished(&self) -> bool {
        self.finished
    }

    pub(crate) fn shape(&self) -> [u32; 13] {
        let flags = [
            self.ack_requested,
            self.peer_finished,
            self.peer_fin_acked,
            self.finished,
            self.fin_acked,
        ];
        [
            self.credits(),
            self.offered.wrapping_sub(self.fetched),
            self.unannounced(),
            self.arrived.wrapping_sub(self.announced),
            self.control,
            self.offers.wrapping_sub(self.done),
            self.done.wrapping_sub(self.done_announced),
            flags.iter().fold(0, |bits, &flag| bits << 1 | u32::from(flag)),
            self.window,
            self.receives,
            self.to_skip,
            self.skips,
            self.resize.map_or(0, |resize| 1 + resize.receives * 32 + resize.skip),
        ]
    }

    pub(crate) fn shape_of(&self, header: Header) -> (Kind, bool, u32, u32) {
        let released = header.released.wrapping_sub(self.confirmed) & COUNT_MASK;
        (
            header.kind,
            header.fin_acked,
            released,
            header.done.wrapping_sub(self.fetched) & COUNT_MASK,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: Kind, released: u32, done: u32) -> Header {
        Header { kind, fin_acked: false, released, done }
    }

    #[test]
    fn sent_messages_use_up_the_window_and_an_ack_returns_credits() {
        let mut flow = Flow::new(RESERVE + 2, RESERVE + 2);
        for _ in 0..3 {
            assert!(flow.may_send(Kind::Data));
            flow.send(Kind::Data);
        }
        assert!(
            !flow.may_send(Kind::Data) && !flow.may_send(Kind::Offer) && flow.may_send(Kind::Fin)
        );
        assert_eq!(flow.receive(header(Kind::Ack, 1, 0)), Ok(0));
        assert!(flow.may_send(Kind::Offer));
    }

    #[test]
    fn end_that_waits_for_its_peer_sends_nothing_before_the_greeting() {
        let mut waiting = Flow::new(8, 8);
        waiting.wait_for_peer();
        for kind in [Kind::Data, Kind::Fin, Kind::Ping, Kind::Ack, Kind::Abort, Kind::Resize] {
            assert!(!waiting.may_send(kind), "{kind:?}");
        }
        assert!(!waiting.ack_due());
        let mut greeting = Flow::new(8, 8);
        assert!(!greeting.ack_due());
        greeting.greet();
        assert!(greeting.ack_due() && !greeting.is_quiet());
        assert_eq!(waiting.receive(greeting.send(Kind::Ack)), Ok(0));
        assert!(!greeting.ack_due() && waiting.may_send(Kind::Data));
    }

    #[test]
    fn announcing_unused_receives_is_a_violation() {
        let mut flow = Flow::new(8, 8);
        flow.send(Kind::Data);
        assert_eq!(
            flow.receive(header(Kind::Ack, 2, 0)),
            Err(Violation::Credits { announced: 2, in_use: 1 })
        );
        assert_eq!(
            flow.receive(header(Kind::Ack, COUNT_MASK, 0)),
            Err(Violation::Credits { announced: COUNT_MASK, in_use: 1 })
        );
        assert_eq!(
            flow.receive(header(Kind::Ack, 1, 1)),
            Err(Violation::Done { announced: 1, offered: 0 })
        );
        assert_eq!(flow.receive(header(Kind::Ack, 1, 0)), Ok(0));
    }

    #[test]
    fn releasing_the_receive_of_an_unfetched_offer_is_a_violation() {
        let mut flow = Flow::new(8, 8);
        flow.send(Kind::Offer);
        flow.send(Kind::Data);
        flow.send(Kind::Offer);
        assert_eq!(flow.receive(header(Kind::Ack, 1, 0)), Ok(0));
        assert_eq!(
            flow.receive(header(Kind::Ack, 2, 0)),
            Err(Violation::Unfetched { in_use: 1, offered: 2 })
        );
        assert_eq!(flow.receive(header(Kind::Ack, 2, 1)), Ok(1));
        assert_eq!(flow.receive(header(Kind::Ack, 3, 2)), Ok(1));
    }

    #[test]
    fn using_more_receives_than_announced_is_a_violation() {
        let full = |kinds: &[Kind]| {
            let mut flow = Flow::new(8, 8);
            for kind in kinds.iter().cycle().take(8) {
                assert_eq!(flow.receive(header(*kind, 0, 0)), Ok(0));
            }
            flow
        };
        let window = Err(Violation::Window { receives: 8 });
        for kind in [Kind::Data, Kind::Offer, Kind::Ack, Kind::Ping, Kind::Fin] {
            assert_eq!(full(&[Kind::Data]).receive(header(kind, 0, 0)), window, "{kind:?}");
            assert_eq!(
                full(&[Kind::Ack, Kind::Offer]).receive(header(kind, 0, 0)),
                window,
                "{kind:?}"
            );
        }
        // The peer may use a receive only after its announcement.
        let mut flow = full(&[Kind::Data]);
        flow.release_message();
        assert_eq!(flow.clone().receive(header(Kind::Data, 0, 0)), window);
        flow.send(Kind::Ack);
        assert_eq!(flow.receive(header(Kind::Data, 1, 0)), Ok(0));
        assert_eq!(flow.receive(header(Kind::Data, 1, 0)), window);
        // The same holds for other frames.
        let mut flow = full(&[Kind::Ping]);
        flow.release_control();
        flow.release_control();
        assert_eq!(flow.clone().receive(header(Kind::Ping, 0, 0)), window);
        flow.send(Kind::Ack);
        assert_eq!(flow.receive(header(Kind::Ping, 1, 0)), Ok(0));
        assert_eq!(flow.receive(header(Kind::Ping, 1, 0)), Ok(0));
        assert_eq!(flow.receive(header(Kind::Ping, 1, 0)), window);
    }

    #[test]
    fn each_side_knows_which_side_finished_and_which_offers_were_fetched() {
        let mut flow = Flow::new(8, 8);
        let known = |flow: &Flow| {
            (flow.all_fetched(), flow.has_finished(), flow.peer_has_finished(), flow.is_over())
        };
        assert_eq!(known(&flow), (true, false, false, false));
        flow.send(Kind::Offer);
        assert_eq!(known(&flow), (false, false, false, false));
        assert_eq!(flow.receive(header(Kind::Fin, 0, 0)), Ok(0));
        assert_eq!(known(&flow), (false, false, true, false));
        flow.send(Kind::Fin);
        assert_eq!(known(&flow), (false, true, true, false));
        assert_eq!(flow.receive(Header { fin_acked: true, ..header(Kind::Ack, 1, 0) }), Ok(0));
        assert_eq!(known(&flow), (false, true, true, false), "the offer is still to be fetched");
        assert_eq!(flow.receive(header(Kind::Ack, 2, 1)), Ok(1));
        assert_eq!(known(&flow), (true, true, true, true));
    }

    #[test]
    fn ack_is_due_when_a_quarter_of_the_receives_for_messages_or_two_were_released() {
        for (messages, quarter) in [(1, 1), (3, 1), (4, 2), (5, 2), (12, 3), (100, 25), (101, 26)] {
            let mut flow = Flow::new(RESERVE + messages, RESERVE + 1);
            // An announcement resets the count.
            for _ in 0..2 {
                for released in 1..=quarter {
                    assert_eq!(flow.receive(header(Kind::Data, 0, 0)), Ok(0));
                    flow.release_message();
                    assert_eq!(flow.ack_due(), released == quarter, "{released} of {messages}");
                }
                flow.send(Kind::Ack);
                assert!(!flow.ack_due());
            }
            // Another frame's receive does not count.
            assert_eq!(flow.receive(header(Kind::Ack, 0, 0)), Ok(0));
            flow.release_control();
            assert!(!flow.ack_due(), "{messages}");
        }
    }

    #[test]
    fn notification_uses_a_credit_until_the_service_has_taken_it() {
        let (mut a, mut b) =
            (Flow::new(RESERVE + 1, RESERVE + 2), Flow::new(RESERVE + 2, RESERVE + 1));
        for _ in 0..3 {
            assert!(a.may_send(Kind::Data));
            a.send_notification();
            assert_eq!(b.receive_notification(), Ok(()));
        }
        assert!(!a.may_send(Kind::Data) && a.may_send(Kind::Ping));
        assert!(!b.ack_due());
        b.release_message();
        assert!(b.ack_due(), "a quarter of the receives for messages");
        let ack = b.send(Kind::Ack);
        assert_eq!(a.receive(ack), Ok(0));
        assert!(a.may_send(Kind::Data));
    }

    #[test]
    fn notifications_beyond_the_window_or_after_fin_are_violations() {
        let mut flow = Flow::new(8, 8);
        for _ in 0..8 {
            assert_eq!(flow.receive_notification(), Ok(()));
        }
        assert_eq!(flow.clone().receive_notification(), Err(Violation::Window { receives: 8 }));
        // The service has taken one, which the peer does not know.
        flow.release_message();
        assert_eq!(flow.receive_notification(), Err(Violation::Window { receives: 8 }));
        let mut flow = Flow::new(8, 8);
        assert_eq!(flow.receive(header(Kind::Fin, 0, 0)), Ok(0));
        assert_eq!(flow.receive_notification(), Err(Violation::AfterFinish));
    }

    #[test]
    fn messages_after_fin_are_a_violation() {
        let mut flow = Flow::new(8, 8);
        let early = Header { fin_acked: true, ..header(Kind::Ack, 0, 0) };
        assert_eq!(flow.receive(early), Err(Violation::NotFinished));
        assert_eq!(flow.receive(header(Kind::Fin, 0, 0)), Ok(0));
        for kind in [Kind::Data, Kind::Offer, Kind::Fin] {
            assert_eq!(flow.receive(header(kind, 0, 0)), Err(Violation::AfterFinish));
        }
        assert_eq!(flow.receive(header(Kind::Ack, 0, 0)), Ok(0));
        flow.send(Kind::Fin);
        assert!(!flow.may_send(Kind::Data) && !flow.may_send(Kind::Fin) && !flow.is_over());
        assert_eq!(flow.receive(Header { fin_acked: true, ..header(Kind::Ack, 0, 0) }), Ok(0));
        assert!(flow.is_over());
    }

    #[test]
    fn counts_wrap_around() {
        let (mut a, mut b) = (Flow::new(12, 12), Flow::new(12, 12));
        for _ in 0..3 * COUNT_MASK {
            let sent = a.send(Kind::Offer);
            assert_eq!(b.receive(sent), Ok(0));
            b.done();
            b.release_message();
            let answer = b.send(Kind::Ack);
            assert_eq!(a.receive(answer), Ok(1));
            a.release_control();
            assert!(a.all_fetched());
        }
    }

    // Shows S4.
    #[test]
    fn hostile_headers_do_no_harm() {
        for seed in 0..if cfg!(miri) { 10 } else { 2_000 } {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut flow = Flow::new(RESERVE + random.u32(1..8), RESERVE + random.u32(1..8));
            for _ in 0..200 {
                if random.u8(..4) == 0 && flow.receive_notification().is_ok() && random.bool() {
                    flow.release_message();
                }
                let header = Header::decode(random.u32(..));
                // Nearly valid headers get further.
                let near = |random: &mut fastrand::Rng, count: u32| {
                    count.wrapping_add(random.u32(..3)) & COUNT_MASK
                };
                let (released, done) =
                    (near(&mut random, flow.confirmed), near(&mut random, flow.fetched));
                let header = if random.bool() {
                    Header { fin_acked: false, released, done, ..header }
                } else {
                    header
                };
                let resized = |flow: &mut Flow, random: &mut fastrand::Rng| {
                    if random.bool() {
                        return flow.receive_skip();
                    }
                    let skip = if random.u8(..8) == 0 { random.u32(..) } else { random.u32(..10) };
                    let receives = random.u32(..20);
                    flow.receive_resize(Resize { receives, skip, from: 0, size: 0 }, 16)
                };
                if flow.receive(header).is_err()
                    || header.kind == Kind::Resize && resized(&mut flow, &mut random).is_err()
                {
                    break;
                }
                if header.kind.is_message() {
                    flow.release_message()
                } else {
                    flow.release_control()
                }
                if header.kind == Kind::Offer {
                    flow.done();
                }
                assert!(flow.credits() <= 16);
                flow.skip();
                let kind = [Kind::Data, Kind::Offer, Kind::Ack, Kind::Ping][random.usize(..4)];
                if flow.may_send(kind) {
                    flow.send(kind);
                }
            }
        }
    }
}
