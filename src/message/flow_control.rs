//! Who may send what when, so that a frame always finds a receive: pure, one for each end of a connection.
//!
//! # Credits
//!
//! A frame of any kind uses up a receive of the peer. The peer counts those that it has posted again (`released`) and says
//! so in the header of each frame of its own; `window - (sent - released)` is what may be sent, and never more than there
//! are receives. So "receiver not ready" cannot happen, whatever is lost and repeated below.
//!
//! A message keeps its receive until it was handed to the service: a slow reader stops its sender. All other frames are
//! dealt with at once, and their receives posted again before anything else is sent.
//!
//! # Nobody waits for ever
//!
//! Credits travel on frames that themselves need credits, so the last ones are not for everybody:
//!
//! | Frame | Needs |
//! |---|---|
//! | message (`Data`, `Offer`) | [`RESERVE`] |
//! | `Fin`, `Ping`, and an `Ack` that tells of offers done or answers a `Ping` | 2 |
//! | `Ack` for credits alone, `Abort` | 1 |
//!
//! An `Ack` for credits is due when a quarter of the receives for messages, released by messages, is to be announced, or
//! [`CONTROL_ACK`] that other frames had used. Each announces at least one receive.
//!
//! 1. *Not both ends are without any credit while nothing is on the way.* Let each end's last credit be used by a frame.
//!    It was an `Ack` for credits (nothing else may use the last one, but `Abort`, after which there is nothing to wait for).
//!    If one of the two had arrived before the other was sent, the other would have announced its receive, for an `Ack`
//!    gives it back at once: then the first end has a credit. If they crossed, each announced at least one: both have.
//! 2. *An end that needs 2 gets them, however slow the service at the other end is.* Messages leave `RESERVE - 1` alone. If
//!    only one credit is left, `RESERVE - 2` frames that are no messages are unannounced, which is
//!    [`CONTROL_ACK`]; all have arrived or will; so the peer owes an `Ack`, for which it needs one credit. If it has none,
//!    then by 1 this end has one and something to announce (the frames that used up the peer's credits are messages that
//!    its service still keeps, at most the window less the reserve, and at least `CONTROL_ACK` others): its `Ack` is due.
//! 3. *A message gets its credits once the service at the other end has taken those before it:* then all receives are
//!    released, and of those that are not announced messages had used fewer than a quarter, other frames fewer than
//!    `CONTROL_ACK`: together at most as many as there are for messages, which leaves [`RESERVE`].
//! 4. *Acks do not go back and forth for ever:* for two that arrive at most one is sent.
//!
//! `flow_model.rs` goes through all interleavings of two ends for small windows and finds the same.

use super::error::Violation;
use super::frame::{COUNT_MASK, Header, Kind};

/// Receives beyond those for messages: one more than the frames that make an `Ack` due, and one for the last of them, of
/// which nobody was told yet.
pub(super) const RESERVE: u32 = 4;

/// Frames other than messages after which an `Ack` is due.
const CONTROL_ACK: u32 = 2;

/// One end. Counts are since the start, modulo 2^32.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    // What we send.
    /// Receives of the peer, those in reserve included.
    window: u32,
    sent: u32,
    /// Of those, how many the peer has posted a receive for again.
    confirmed: u32,
    offered: u32,
    /// Of those, how many the peer is done with.
    fetched: u32,
    finished: bool,
    /// The peer knows that.
    finish_heard: bool,

    // What the peer sends.
    /// Our receives, those in reserve included.
    receives: u32,
    arrived: u32,
    released: u32,
    announced: u32,
    /// Receives of frames that are no messages, released and not announced.
    control: u32,
    offers: u32,
    done: u32,
    done_announced: u32,
    /// An `Ack` is due: the peer has asked for it, or has finished and must hear that this is known.
    asked: bool,
    peer_finished: bool,
    /// The peer was told that its end is known.
    answered: bool,
}

impl Flow {
    /// `receives` here and `window` at the peer's end, the reserve included.
    pub(super) fn new(receives: u32, window: u32) -> Self {
        Self {
            window,
            sent: 0,
            confirmed: 0,
            offered: 0,
            fetched: 0,
            finished: false,
            finish_heard: false,
            receives,
            arrived: 0,
            released: 0,
            announced: 0,
            control: 0,
            offers: 0,
            done: 0,
            done_announced: 0,
            asked: false,
            peer_finished: false,
            answered: false,
        }
    }

    /// Frames that may be sent now.
    pub(super) fn credits(&self) -> u32 {
        self.window - self.sent.wrapping_sub(self.confirmed)
    }

    /// True if a frame of this kind may be sent now; an `Ack`, if it is for credits alone.
    pub(super) fn may_send(&self, kind: Kind) -> bool {
        let needed = match kind {
            Kind::Data | Kind::Offer => RESERVE,
            Kind::Fin | Kind::Ping => 2,
            Kind::Ack | Kind::Abort => 1,
        };
        self.credits() >= needed
            && !(self.finished && matches!(kind, Kind::Data | Kind::Offer | Kind::Fin))
    }

    /// Uses a credit; the header of the frame, which must be sent. The caller has asked [`may_send`](Self::may_send).
    pub(super) fn send(&mut self, kind: Kind) -> Header {
        debug_assert!(self.may_send(kind), "{kind:?} with {} credits", self.credits());
        self.sent = self.sent.wrapping_add(1);
        match kind {
            Kind::Offer => self.offered = self.offered.wrapping_add(1),
            Kind::Fin => self.finished = true,
            Kind::Data | Kind::Ack | Kind::Ping | Kind::Abort => {}
        }
        self.announced = self.released;
        self.control = 0;
        self.done_announced = self.done;
        self.asked = false;
        self.answered = self.peer_finished;
        Header {
            kind,
            heard: self.peer_finished,
            released: self.released & COUNT_MASK,
            done: self.done & COUNT_MASK,
        }
    }

    /// True if an `Ack` is to be sent now.
    pub(super) fn ack_due(&self) -> bool {
        if (self.done != self.done_announced || self.asked) && self.credits() >= 2 {
            return true;
        }
        // A peer that is waiting for nothing more may be gone already.
        let needed = !self.is_over();
        let messages = (self.receives - RESERVE).div_ceil(4);
        let due = self.control >= CONTROL_ACK || self.unannounced() - self.control >= messages;
        needed && due && self.may_send(Kind::Ack)
    }

    fn unannounced(&self) -> u32 {
        self.released.wrapping_sub(self.announced)
    }

    /// A frame of the peer has arrived: takes its counts. How many offers of ours it says to be done since the last one.
    ///
    /// # Errors
    ///
    /// What the peer did that no peer does; nothing is to be believed then.
    pub(super) fn receive(&mut self, header: Header) -> Result<u32, Violation> {
        let released = header.released.wrapping_sub(self.confirmed) & COUNT_MASK;
        let in_use = self.sent.wrapping_sub(self.confirmed);
        if released > in_use {
            return Err(Violation::Credits { announced: released, in_use });
        }
        let fetched = header.done.wrapping_sub(self.fetched) & COUNT_MASK;
        let offered = self.offered.wrapping_sub(self.fetched);
        if fetched > offered {
            return Err(Violation::Done { announced: fetched, offered });
        }
        // An offer keeps its credit until it is done, and longer.
        if in_use - released < offered - fetched {
            return Err(Violation::Unfetched {
                in_use: in_use - released,
                offered: offered - fetched,
            });
        }
        if header.heard && !self.finished {
            return Err(Violation::NotFinished);
        }
        if self.peer_finished && matches!(header.kind, Kind::Data | Kind::Offer | Kind::Fin) {
            return Err(Violation::AfterFinish);
        }
        self.arrived = self.arrived.wrapping_add(1);
        if self.arrived.wrapping_sub(self.announced) > self.receives {
            return Err(Violation::Window { receives: self.receives });
        }
        self.finish_heard |= header.heard;
        self.confirmed = self.confirmed.wrapping_add(released);
        self.fetched = self.fetched.wrapping_add(fetched);
        match header.kind {
            Kind::Offer => self.offers = self.offers.wrapping_add(1),
            Kind::Ping => self.asked = true,
            Kind::Fin => (self.peer_finished, self.asked) = (true, true),
            Kind::Data | Kind::Ack | Kind::Abort => {}
        }
        Ok(fetched)
    }

    /// The receive of a message that was handed to the service is posted again.
    pub(super) fn release_message(&mut self) {
        self.released = self.released.wrapping_add(1);
    }

    /// The receive of any other frame is posted again.
    pub(super) fn release_control(&mut self) {
        self.released = self.released.wrapping_add(1);
        self.control += 1;
    }

    /// The oldest offer of the peer that was not done is done.
    pub(super) fn done(&mut self) {
        debug_assert_ne!(self.done, self.offers, "an offer for each");
        self.done = self.done.wrapping_add(1);
    }

    /// Frames of the peer that have arrived, modulo 2^32.
    pub(super) fn arrived(&self) -> u32 {
        self.arrived
    }

    /// True if the peer is done with all that was offered to it.
    pub(super) fn all_fetched(&self) -> bool {
        self.offered == self.fetched
    }

    /// True if the peer has.
    pub(super) fn peer_has_finished(&self) -> bool {
        self.peer_finished
    }

    /// True if neither end has anything more to say: both have finished, and know that of each other, and that all messages
    /// have arrived and all offers are done. That is not for the device to say, whose acknowledgements may be lost together with
    /// a peer that has closed its queue pair.
    pub(super) fn is_over(&self) -> bool {
        self.finish_heard
            && self.answered
            && self.all_fetched()
            && self.offers == self.done
            && self.done == self.done_announced
    }
}

#[cfg(test)]
impl Flow {
    /// True if we have sent `Fin`.
    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    /// All that decides what it does next, and no more: counts matter by their differences.
    pub(super) fn shape(&self) -> [u32; 9] {
        let flags =
            [self.asked, self.peer_finished, self.answered, self.finished, self.finish_heard];
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
        ]
    }

    /// A header on its way to this end, by what it adds.
    pub(super) fn shape_of(&self, header: Header) -> (Kind, bool, u32, u32) {
        let released = header.released.wrapping_sub(self.confirmed) & COUNT_MASK;
        (header.kind, header.heard, released, header.done.wrapping_sub(self.fetched) & COUNT_MASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: Kind, released: u32, done: u32) -> Header {
        Header { kind, heard: false, released, done }
    }

    #[test]
    fn a_window_is_used_up_and_comes_back() {
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
    fn a_peer_that_announces_what_was_not_used_is_found_out() {
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
    fn a_peer_that_frees_the_receives_of_offers_that_are_not_done_is_found_out() {
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
    fn a_peer_that_uses_more_receives_than_were_announced_is_found_out() {
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
        // A receive that is posted again is the peer's once it was told.
        let mut flow = full(&[Kind::Data]);
        flow.release_message();
        assert_eq!(flow.clone().receive(header(Kind::Data, 0, 0)), window);
        flow.send(Kind::Ack);
        assert_eq!(flow.receive(header(Kind::Data, 1, 0)), Ok(0));
        assert_eq!(flow.receive(header(Kind::Data, 1, 0)), window);
        // So are those of other frames.
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
    fn each_end_knows_which_has_finished_and_which_offers_were_fetched() {
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
        assert_eq!(flow.receive(Header { heard: true, ..header(Kind::Ack, 1, 0) }), Ok(0));
        assert_eq!(known(&flow), (false, true, true, false), "the offer is still to be fetched");
        assert_eq!(flow.receive(header(Kind::Ack, 2, 1)), Ok(1));
        assert_eq!(known(&flow), (true, true, true, true));
    }

    #[test]
    fn ack_is_due_when_a_quarter_of_the_receives_for_messages_was_released() {
        for (messages, quarter) in [(1, 1), (4, 1), (5, 2), (8, 2), (12, 3), (100, 25), (101, 26)] {
            let mut flow = Flow::new(RESERVE + messages, RESERVE + 1);
            // An announcement begins the count again.
            for _ in 0..2 {
                for released in 1..=quarter {
                    assert_eq!(flow.receive(header(Kind::Data, 0, 0)), Ok(0));
                    flow.release_message();
                    assert_eq!(flow.ack_due(), released == quarter, "{released} of {messages}");
                }
                flow.send(Kind::Ack);
                assert!(!flow.ack_due());
            }
            // The receive of another frame does not count as that of a message.
            assert_eq!(flow.receive(header(Kind::Ack, 0, 0)), Ok(0));
            flow.release_control();
            assert!(!flow.ack_due(), "{messages}");
        }
    }

    #[test]
    fn nothing_comes_after_the_end() {
        let mut flow = Flow::new(8, 8);
        let early = Header { heard: true, ..header(Kind::Ack, 0, 0) };
        assert_eq!(flow.receive(early), Err(Violation::NotFinished));
        assert_eq!(flow.receive(header(Kind::Fin, 0, 0)), Ok(0));
        for kind in [Kind::Data, Kind::Offer, Kind::Fin] {
            assert_eq!(flow.receive(header(kind, 0, 0)), Err(Violation::AfterFinish));
        }
        assert_eq!(flow.receive(header(Kind::Ack, 0, 0)), Ok(0));
        flow.send(Kind::Fin);
        assert!(!flow.may_send(Kind::Data) && !flow.may_send(Kind::Fin) && !flow.is_over());
        assert_eq!(flow.receive(Header { heard: true, ..header(Kind::Ack, 0, 0) }), Ok(0));
        assert!(flow.is_over());
    }

    #[test]
    fn counts_go_round() {
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

    /// Any sequence of headers is taken or refused, and never makes more credits than there are receives.
    #[test]
    fn hostile_headers_do_no_harm() {
        for seed in 0..if cfg!(miri) { 10 } else { 2_000 } {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut flow = Flow::new(RESERVE + random.u32(1..8), RESERVE + random.u32(1..8));
            let window = flow.window;
            for _ in 0..200 {
                if let Ok(header) = Header::decode(crate::types::Imm(random.u32(..))) {
                    // Nearly right ones get further.
                    let near = |random: &mut fastrand::Rng, count: u32| {
                        count.wrapping_add(random.u32(..3)) & COUNT_MASK
                    };
                    let (released, done) =
                        (near(&mut random, flow.confirmed), near(&mut random, flow.fetched));
                    let header = if random.bool() {
                        Header { heard: false, released, done, ..header }
                    } else {
                        header
                    };
                    if flow.receive(header).is_err() {
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
                }
                assert!(flow.credits() <= window);
                let kind = [Kind::Data, Kind::Offer, Kind::Ack, Kind::Ping][random.usize(..4)];
                if flow.may_send(kind) {
                    flow.send(kind);
                }
            }
        }
    }
}
