use crate::end::Reason;
use crate::frame::Kind;
use crate::protocol::Protocol;

#[derive(Debug, Clone)]
pub struct Sending {
    /// Frames whose sends have completed, in order.
    completed: u64,
    in_flight: usize,
    offers_made: u64,
    offers_fetched: u64,
    offered: u64,
    max_offered: u64,
    inline: usize,
    /// The size of receives, and how many of the last frames have filled one without a break.
    full: (usize, u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushPoint {
    frames: u64,
    offers: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// One frame within its work request.
    Inline,
    /// This number of frames with buffers.
    Frames(usize),
    /// An offer, which the peer READs.
    Offer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocked {
    Credits(u32),
    Buffers(usize),
    /// Offers must be fetched before a message of this length can be offered.
    Memory(u64),
    /// Held bytes must be sent first.
    Held,
}

impl Default for Blocked {
    fn default() -> Self {
        Self::Credits(1)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Waits {
    pub holds: bool,
    pub is_deaf: bool,
    /// The earliest point for which a flush waits.
    pub flush: Option<FlushPoint>,
    pub wants_buffers: bool,
}

impl Sending {
    pub(crate) fn new(inline: usize, max_offered: u64) -> Self {
        Self {
            completed: 0,
            in_flight: 0,
            offers_made: 0,
            offers_fetched: 0,
            offered: 0,
            max_offered,
            inline,
            full: (0, 0),
        }
    }

    #[inline]
    pub fn inline(&self) -> usize {
        self.inline
    }

    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[inline]
    pub fn completed(&self) -> u64 {
        self.completed
    }

    #[inline]
    pub fn post(&mut self) {
        self.in_flight += 1;
    }

    #[inline]
    pub fn note_full(&mut self, len: usize, is_full: bool) {
        let before = if self.full.0 == len { self.full.1 } else { 0 };
        self.full = (len, if is_full { before.saturating_add(1) } else { 0 });
    }

    #[inline]
    pub fn complete(&mut self) {
        self.in_flight -= 1;
        self.completed += 1;
    }

    /// The connection has ended, so only `kept` frames count.
    pub fn detach(&mut self, kept: usize) {
        self.in_flight = kept;
    }

    pub fn offer(&mut self, len: u64) {
        self.offered += len;
        self.offers_made += 1;
    }

    pub fn fetched(&mut self, len: u64) {
        self.offered -= len;
        self.offers_fetched += 1;
    }

    fn may_offer(&self, len: u64) -> bool {
        self.offers_made == self.offers_fetched || self.offered + len <= self.max_offered
    }

    pub fn flush_point(&self) -> FlushPoint {
        FlushPoint { frames: self.completed + self.in_flight as u64, offers: self.offers_made }
    }

    pub fn has_reached(&self, point: FlushPoint) -> bool {
        self.completed >= point.frames && self.offers_fetched >= point.offers
    }

    #[doc(hidden)]
    pub fn limit_offers(&mut self, max_offered: u64) {
        self.max_offered = max_offered;
    }
}

impl<R: Reason> Protocol<R> {
    /// Returns how a message of `len` bytes is sent, in at most `buffers` frames, or what it waits
    /// for.
    #[inline]
    pub fn transfer(&mut self, len: u64, buffers: usize) -> Result<Transfer, Blocked> {
        if !self.flow.may_send(Kind::Data) {
            return Err(Blocked::Credits(1));
        }
        let short = usize::try_from(len).unwrap_or(usize::MAX);
        if short <= self.sending.inline && short <= self.frame_len(0) {
            return Ok(Transfer::Inline);
        }
        if short <= self.framing().eager()
            && let Some(frames) = self.frames_of(short, buffers)
        {
            return if self.flow.may_send_message(frames as u32) {
                Ok(Transfer::Frames(frames))
            } else {
                Err(Blocked::Credits(frames as u32))
            };
        }
        if self.sending.may_offer(len) { Ok(Transfer::Offer) } else { Err(Blocked::Memory(len)) }
    }

    pub fn is_unblocked(
        &self,
        blocked: Blocked,
        holds: bool,
        has_buffers: impl FnOnce(usize) -> bool,
    ) -> bool {
        match blocked {
            // Held bytes are still sent after `shutdown`.
            Blocked::Held => !holds || self.phase().close_reason().is_some(),
            _ if self.phase().check_open().is_err() => true,
            Blocked::Credits(frames) => self.flow.may_send_message(frames),
            Blocked::Buffers(frames) => has_buffers(frames),
            Blocked::Memory(len) => self.sending.may_offer(len),
        }
    }

    /// Returns true if `len` held bytes are sent as soon as there is a credit: they fill a frame or
    /// their buffer, no frame is in flight, or the application has finished.
    pub fn sends_held(&mut self, len: usize, is_full: bool) -> bool {
        let finishes = self.phase().check_open().is_err();
        is_full || finishes || self.sending.in_flight == 0 || len >= self.frame_len(0)
    }

    /// Returns true if the peer certainly has `bytes` bytes that its application has not read.
    pub fn has_unread(&self, bytes: usize) -> bool {
        let (len, number) = self.sending.full;
        len * self.flow.in_use().min(number) as usize >= bytes
    }

    /// Returns the send in flight whose completion must wake the driver, counted from the oldest.
    /// `last_in_place` returns the last one with a buffer of the application.
    #[inline]
    pub fn awaited_send(
        &self,
        waits: Waits,
        last_in_place: impl FnOnce() -> Option<usize>,
    ) -> Option<usize> {
        let last = self.sending.in_flight.checked_sub(1)?;
        // Without a posted receive, only a send reports that the queue pair has failed.
        if self.flow.is_over() || waits.is_deaf || waits.holds || self.flow.has_due_skip() {
            return Some(last);
        }
        if let Some(point) = waits.flush
            && let Some(before) = point.frames.checked_sub(self.sending.completed + 1)
        {
            return (before <= last as u64).then_some(before as usize);
        }
        if waits.wants_buffers {
            // The middle one, because the first one would wake the driver for every frame.
            return Some(self.sending.in_flight / 2);
        }
        last_in_place()
    }

    pub fn is_complete(&self) -> bool {
        self.flow.is_over() && self.sending.in_flight == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::Instant;

    use super::*;
    use crate::end::TestReason;
    use crate::frame::Header;
    use crate::handshake::{Handshake, Service};
    use crate::incoming::Arrival;
    use crate::protocol::Settings;
    use crate::timers::Times;

    const INLINE: usize = 10;
    const FRAME: usize = 100;
    const EAGER: usize = 300;
    const MAX_OFFERED: u64 = 5000;
    const BUFFERS: usize = 8;

    fn side(receives: u32, of_peer: u32) -> Protocol<TestReason> {
        let settings = Settings {
            service: Service::Messages,
            first_receives: receives,
            receives,
            grows: false,
            max_message: 10_000,
            frame: FRAME,
            eager: EAGER,
            inline: INLINE,
            max_offered: MAX_OFFERED,
            trailer: 0,
            times: Times::default(),
        };
        let size = FRAME as u32;
        let peer =
            Handshake { buffer_size: size, receives: of_peer, max_message: 10_000, grows: false };
        let mut side = Protocol::new(settings);
        side.set_peer(&peer, Instant::now());
        side.limit_frames(Some(size), BUFFERS);
        side
    }

    fn waits() -> Waits {
        Waits { holds: false, is_deaf: false, flush: None, wants_buffers: false }
    }

    #[test]
    fn way_depends_on_length_and_on_what_is_free() {
        let mut side = side(12, 12);
        assert_eq!(side.transfer(INLINE as u64, BUFFERS), Ok(Transfer::Inline));
        assert_eq!(side.transfer(11, BUFFERS), Ok(Transfer::Frames(1)));
        assert_eq!(side.transfer(101, BUFFERS), Ok(Transfer::Frames(2)));
        assert_eq!(side.transfer(EAGER as u64, BUFFERS), Ok(Transfer::Frames(3)));
        assert_eq!(side.transfer(EAGER as u64, 2), Ok(Transfer::Offer), "more frames than buffers");
        assert_eq!(side.transfer(301, BUFFERS), Ok(Transfer::Offer));
        assert_eq!(
            side.transfer(u64::MAX, BUFFERS),
            Ok(Transfer::Offer),
            "one offer is always possible"
        );
        side.sending.offer(MAX_OFFERED);
        let missing = Blocked::Memory(301);
        assert_eq!(side.transfer(301, BUFFERS), Err(missing));
        assert!(!side.is_unblocked(missing, false, |_| true));
        side.sending.fetched(MAX_OFFERED);
        assert!(side.is_unblocked(missing, false, |_| false));
        while side.flow.may_send(Kind::Data) {
            side.flow.send(Kind::Data);
        }
        assert_eq!(side.transfer(1, BUFFERS), Err(Blocked::Credits(1)));
        assert!(!side.is_unblocked(Blocked::Credits(1), false, |_| true));
        assert!(side.is_unblocked(Blocked::Buffers(3), false, |number| number == 3));
        assert!(!side.is_unblocked(Blocked::Held, true, |_| true));
        assert!(side.is_unblocked(Blocked::Held, false, |_| false));
    }

    #[test]
    fn unread_bytes_are_those_of_full_frames_in_a_row() {
        let mut side = side(12, 12);
        let mut send = |len, is_full| {
            side.sending.note_full(len, is_full);
            side.flow.send(Kind::Data);
            side.flow.send(Kind::Data);
        };
        send(FRAME, true);
        send(FRAME, false);
        send(FRAME, true);
        assert!(side.has_unread(FRAME) && !side.has_unread(FRAME + 1), "one in a row");
        side.sending.note_full(FRAME, true);
        assert!(side.has_unread(2 * FRAME));
        side.sending.note_full(FRAME / 2, true);
        assert!(!side.has_unread(FRAME), "receives of another length");
        (0..20).for_each(|_| side.sending.note_full(FRAME, true));
        assert!(side.has_unread(6 * FRAME) && !side.has_unread(6 * FRAME + 1), "six in use");
    }

    #[test]
    fn awaited_send_is_the_last_that_something_waits_for() {
        let mut side = side(12, 12);
        let in_place = || Some(1);
        assert_eq!(side.awaited_send(Waits { holds: true, ..waits() }, in_place), None);
        (0..6).for_each(|_| side.sending.post());
        let point = side.sending.flush_point();
        (0..2).for_each(|_| side.sending.post());
        assert_eq!(side.awaited_send(waits(), || None), None);
        assert_eq!(side.awaited_send(waits(), in_place), Some(1));
        let buffers = Waits { wants_buffers: true, ..waits() };
        assert_eq!(side.awaited_send(buffers, in_place), Some(4), "half of eight");
        let flush = Waits { flush: Some(point), ..buffers };
        assert_eq!(side.awaited_send(flush, in_place), Some(5));
        assert_eq!(side.awaited_send(Waits { is_deaf: true, ..flush }, in_place), Some(7));
        (0..6).for_each(|_| side.sending.complete());
        assert!(side.sending.has_reached(point));
        assert_eq!(side.awaited_send(flush, in_place), Some(1), "the flush is over");
    }

    #[test]
    fn held_bytes_wait_for_frames_or_for_more_bytes() {
        let mut side = side(12, 12);
        assert!(side.sends_held(1, false), "nothing is in flight");
        side.sending.post();
        assert!(!side.sends_held(FRAME - 1, false));
        assert!(side.sends_held(FRAME, false));
        assert!(side.sends_held(1, true));
    }

    /// A message on its way: the headers of its frames, and the length of an offer.
    #[derive(Debug, Clone, Copy)]
    enum Frame {
        Data(Header, usize),
        Offer(Header, u64),
        Ack(Header),
    }

    /// Two ends, of which one sends messages of random lengths and flushes, while time and the
    /// peer do random steps. Each sender that is blocked is unblocked by the steps of the peer, and
    /// then can send; a flush is reached exactly when all before it has arrived and was fetched.
    #[test]
    fn blocked_senders_and_flushes_end_by_what_the_peer_does() {
        for seed in 1..=500 {
            let mut random = Random(seed);
            let [own, other] = [0; 2].map(|_| 6 + random.below(10));
            let [mut one, mut two] = [side(own, other), side(other, own)];
            let (mut wire, mut back) = (VecDeque::new(), VecDeque::new());
            let (mut offers, mut unfetched) = (VecDeque::new(), VecDeque::new());
            let (mut blocked, mut point) = (None, None);
            let (mut sent, mut arrived) = (0u32, 0);
            for step in 0..300 {
                let quiet = step >= 200 && blocked.is_none();
                match random.below(5) {
                    0 | 1 if !quiet => {
                        let len = blocked.map_or_else(|| random.len(), |(len, _)| len);
                        let unblocked = |(_, blocked)| one.is_unblocked(blocked, false, |_| true);
                        let was_unblocked = blocked.is_none_or(unblocked);
                        match one.transfer(len, BUFFERS) {
                            Ok(transfer) => {
                                assert!(was_unblocked, "{blocked:?} hides {transfer:?}");
                                send(&mut one, transfer, len, &mut wire, &mut offers);
                                (blocked, sent) = (None, sent + 1);
                                point.get_or_insert(one.sending.flush_point());
                            }
                            Err(missing) => {
                                let same = blocked == Some((len, missing));
                                assert!(!same || !was_unblocked, "woken in vain for {missing:?}");
                                blocked = Some((len, missing));
                            }
                        }
                    }
                    2 => match wire.pop_front() {
                        Some(frame) => {
                            one.sending.complete();
                            arrived += u32::from(receive(&mut two, frame, &mut unfetched));
                        }
                        None => {
                            if unfetched.pop_front().is_some() {
                                two.flow.done();
                                two.flow.release_message();
                            }
                        }
                    },
                    3 => {
                        let next = two.next_frame(true, || true, Instant::now);
                        back.extend(next.map(|(header, _)| header));
                    }
                    _ => {
                        if let Some(header) = back.pop_front() {
                            let got = one.on_frame(Some(header.encode()), 0, false).unwrap();
                            for _ in 0..got.fetched {
                                one.sending.fetched(offers.pop_front().unwrap());
                            }
                            if got.arrival == Arrival::Skip {
                                continue;
                            }
                            while let Some((header, _)) =
                                one.next_frame(true, || true, Instant::now)
                            {
                                one.sending.post();
                                wire.push_back(Frame::Ack(header));
                            }
                        }
                    }
                }
                if point.is_some_and(|point| one.sending.has_reached(point)) {
                    point = None;
                }
                if wire.is_empty() && offers.is_empty() {
                    assert_eq!(point, None, "everything has arrived and was fetched");
                    assert_eq!(one.sending.in_flight(), 0);
                }
            }
            assert!(sent > 10 && arrived > 10, "seed {seed}: {sent} sent, {arrived} arrived");
        }
    }

    fn send(
        side: &mut Protocol<TestReason>,
        transfer: Transfer,
        len: u64,
        wire: &mut VecDeque<Frame>,
        offers: &mut VecDeque<u64>,
    ) {
        let frames = match transfer {
            Transfer::Inline => 1,
            Transfer::Frames(frames) => frames,
            Transfer::Offer => {
                side.sending.offer(len);
                side.sending.post();
                offers.push_back(len);
                wire.push_back(Frame::Offer(side.flow.send(Kind::Offer), len));
                return;
            }
        };
        let mut left = len as usize;
        for number in 1..=frames {
            let part = left.min(side.frame_len(0));
            left -= part;
            let kind = side.kind_of(number == frames);
            side.sending.post();
            wire.push_back(Frame::Data(side.flow.send(kind), part));
        }
        assert_eq!(left, 0, "the frames hold the message");
    }

    /// Processes a frame. Returns true if it ends a message.
    fn receive(
        side: &mut Protocol<TestReason>,
        frame: Frame,
        unfetched: &mut VecDeque<u64>,
    ) -> bool {
        let (header, len) = match frame {
            Frame::Data(header, len) => (header, len),
            Frame::Offer(header, _) => (header, crate::frame::OFFER_LEN),
            Frame::Ack(header) => (header, 0),
        };
        match side.on_frame(Some(header.encode()), len, false).unwrap().arrival {
            Arrival::Message { parts, .. } => {
                (0..=parts).for_each(|_| side.flow.release_message());
                true
            }
            Arrival::Offer => {
                let Frame::Offer(_, len) = frame else { unreachable!("an offer") };
                side.on_offer(0x1000, len).unwrap();
                unfetched.push_back(len);
                true
            }
            _ => false,
        }
    }

    /// A generator of reproducible numbers (xorshift64).
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u32) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 32) as u32 % limit
        }

        fn len(&mut self) -> u64 {
            let longest = [INLINE, FRAME, EAGER, 3000][self.below(4) as usize];
            u64::from(self.below(longest as u32 + 1))
        }
    }
}
