//! The protocol of one end of a connection. The caller reports frames, events and time, posts the
//! frames that it gets, and executes the actions.

use std::time::{Duration, Instant};

use crate::Violation;
use crate::end::{End, Reason};
use crate::flow::Flow;
use crate::frame::{Header, Kind, OFFER_LEN, check_offer};
use crate::framing::Framing;
use crate::growth::Growth;
use crate::handshake::{Handshake, Service};
use crate::incoming::{Arrival, Incoming};
use crate::lifecycle::{Action, Event, Phase, Stage, transition};
use crate::sending::Sending;
use crate::timers::{Expired, LINGER, Observed, Timers, Times};
use crate::window::{FIRST_SIZE, Resize, first_receives};

#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub service: Service,
    /// The number of first receives, including the reserve.
    pub first_receives: u32,
    /// The maximum of receives, including the reserve.
    pub receives: u32,
    /// The number and size of receives follow use.
    pub grows: bool,
    /// The longest accepted message, in bytes.
    pub max_message: u64,
    /// The longest frame sent, in bytes.
    pub frame: usize,
    /// The longest message sent in several frames, in bytes.
    pub eager: usize,
    /// The longest frame sent within its work request, in bytes.
    pub inline: usize,
    /// The maximum of offered bytes, except that one message may always be offered.
    pub max_offered: u64,
    /// The bytes at the end of each frame that are not payload: [`TRAILER`](crate::frame::TRAILER)
    /// if headers are not immediate data.
    pub trailer: usize,
    pub times: Times,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    pub arrival: Arrival,
    /// The number of offers that the peer reports as fetched.
    pub fetched: u32,
}

/// The state of one end. It depends only on frames, events and time.
#[derive(Debug, Clone)]
pub struct Protocol<R> {
    pub flow: Flow,
    /// Frames and offers in flight.
    pub sending: Sending,
    incoming: Incoming,
    framing: Framing,
    growth: Growth,
    /// The maximum of the peer's receives, including those that it posts while it shrinks, and of
    /// their size.
    peer_receives: (u32, u32),
    times: Times,
    phase: Phase<R>,
    timers: Timers,
    /// The listener shuts down, or the stream was dropped.
    draining: bool,
    peer_writes_in_vain: bool,
}

#[derive(Debug)]
pub enum Due {
    Frame(Header),
    Buffers {
        /// True if no message was sent or received since the last check.
        idle: bool,
    },
    Terminate(End),
}

impl<R: Reason> Protocol<R> {
    /// Creates the state before [`set_peer`](Self::set_peer).
    pub fn new(settings: Settings) -> Self {
        let Settings { service, receives, max_message, frame, eager, times, .. } = settings;
        let Settings { first_receives, grows, inline, max_offered, trailer, .. } = settings;
        Self {
            flow: Flow::new(first_receives, 0),
            sending: Sending::new(inline, max_offered),
            growth: Growth::new(first_receives, receives, eager as u64, grows),
            incoming: Incoming::new(service, receives, max_message),
            framing: Framing::new(frame, eager, trailer),
            peer_receives: (0, 0),
            times,
            phase: Phase::Running(Stage::Open),
            timers: Timers::unset(),
            draining: false,
            peer_writes_in_vain: false,
        }
    }

    /// Applies the peer's handshake and starts the timers. [`limit_frames`](Self::limit_frames)
    /// must follow.
    pub fn set_peer(&mut self, peer: &Handshake, now: Instant) {
        let (window, size) = peer.first_receives();
        self.flow.set_window(window);
        let most = peer.receives.saturating_add(first_receives(peer.receives));
        self.peer_receives = (most, peer.buffer_size);
        self.framing.set_peer(size, peer.buffer_size);
        self.timers = Timers::new(self.times, now);
    }

    /// Limits the time from [`set_peer`](Self::set_peer), which must follow, to the first message.
    pub fn set_first_message_timeout(&mut self, timeout: Option<Duration>) {
        self.times.first_message = timeout;
    }

    #[inline]
    pub fn service(&self) -> Service {
        self.incoming.service()
    }

    #[inline]
    pub fn framing(&self) -> &Framing {
        &self.framing
    }

    /// Only for tests.
    #[doc(hidden)]
    pub fn framing_mut(&mut self) -> &mut Framing {
        &mut self.framing
    }

    pub fn incomplete_frames(&self) -> u32 {
        self.incoming.parts()
    }

    #[inline]
    pub fn phase(&self) -> &Phase<R> {
        &self.phase
    }

    #[must_use]
    pub fn on(&mut self, event: Event<R>) -> &'static [Action] {
        let (phase, actions) = transition(self.phase, event);
        self.phase = phase;
        actions
    }

    #[must_use]
    pub fn abandon(&mut self, at_end: bool) -> &'static [Action] {
        self.timers.set_dropped(LINGER);
        self.on(Event::Drop { at_end })
    }

    /// Applies the drop of a stream's last handle. Written bytes are still sent, within `limit`, or
    /// within [`LINGER`] once the peer has everything.
    #[must_use]
    pub fn abandon_stream(&mut self, limit: Duration) -> &'static [Action] {
        self.draining = true;
        self.timers.set_dropped(limit);
        let (closing, actions) = transition(self.phase, Event::Close);
        self.phase = transition(closing, Event::Drop { at_end: true }).0;
        actions
    }

    /// Shortens `close` to [`LINGER`], once the peer has everything, because the listener shuts
    /// down.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Starts the linger timeout if [`is_linger_due`](Self::is_linger_due), or on the first call
    /// after [`abandon`](Self::abandon).
    pub fn linger(&mut self, now: impl FnOnce() -> Instant) {
        if self.is_linger_due() {
            self.draining = false;
            self.timers.set_dropped(LINGER);
        }
        self.timers.linger(now);
    }

    pub fn is_linger_due(&self) -> bool {
        self.draining && self.phase.awaits_peer() && self.flow.peer_has_all()
    }

    /// Processes a frame with `len` bytes of payload; `written` if a WRITE carried it. Before the
    /// next frame is sent, its receive must be reposted, unless a message keeps it, and fetched
    /// offers must be dropped.
    #[inline]
    pub fn on_frame(
        &mut self,
        imm: Option<u32>,
        len: usize,
        written: bool,
    ) -> Result<Received, End> {
        let imm = imm.ok_or(Violation::Header { header: 0 })?;
        if written && self.service() == Service::Messages {
            self.flow.receive_notification()?;
            let arrival = Arrival::Notification;
            self.growth.note_message(self.service(), arrival, self.flow.unanswered());
            return Ok(Received { arrival, fetched: 0 });
        }
        let header = Header::decode(imm);
        self.incoming.check(header, len, written)?;
        let fetched = self.flow.receive(header)?;
        if header.kind == Kind::Abort && !self.flow.is_over() {
            return Err(End::Dropped);
        }
        if self.phase == Phase::Running(Stage::Lingering)
            && self.service() == Service::Bytes
            && header.kind.is_message()
        {
            // If this frame or an earlier one acknowledges the `Fin`, the peer knew of it when it
            // sent this frame.
            self.peer_writes_in_vain |= self.flow.peer_has_all();
        }
        let arrival = self.incoming.add(header.kind, len)?;
        match arrival {
            Arrival::Control => self.flow.release_control(),
            Arrival::Skip => self.flow.receive_skip()?,
            Arrival::Message { .. } => {
                self.growth.note_message(self.service(), arrival, self.flow.unanswered());
            }
            _ => {}
        }
        Ok(Received { arrival, fetched })
    }

    /// The peer has sent bytes although it knew that the stream was dropped.
    #[inline]
    pub fn peer_writes_in_vain(&self) -> bool {
        self.peer_writes_in_vain
    }

    pub fn on_offer(&mut self, addr: u64, len: u64) -> Result<(), Violation> {
        check_offer(addr, len, self.incoming.max_message())?;
        self.growth.note_offer(len, self.flow.unanswered());
        Ok(())
    }

    /// Processes the payload of a `Resize`. Returns the new size for
    /// [`limit_frames`](Self::limit_frames).
    pub fn on_resize(&mut self, payload: &[u8]) -> Result<u32, Violation> {
        let len = payload.len();
        let resize = Resize::from_bytes(payload).ok_or(Violation::FrameLength { len })?;
        let Resize { receives, size, .. } = resize;
        let (most, longest) = self.peer_receives;
        if !(OFFER_LEN as u32..=longest).contains(&size) {
            return Err(Violation::Resize { receives, size });
        }
        let next = self.flow.next_receive();
        self.flow.receive_resize(resize, most)?;
        self.framing.sizes().change(resize, next)?;
        self.flow.release_control();
        Ok(size)
    }

    /// Returns the longest payload, in bytes, of the frame after the next `ahead` ones.
    #[inline]
    pub fn frame_len(&mut self, ahead: u32) -> usize {
        self.framing.frame_len(&self.flow, ahead)
    }

    /// Returns the number of frames of a message of `len` bytes, at most `most`; `None` if the
    /// message must be offered.
    #[inline]
    pub fn frames_of(&mut self, len: usize, most: usize) -> Option<usize> {
        self.framing.frames_of(&self.flow, len, most)
    }

    pub fn kind_of(&self, is_last: bool) -> Kind {
        match self.service() {
            Service::Messages if !is_last => Kind::Part,
            Service::Messages | Service::Bytes => Kind::Data,
        }
    }

    /// Limits frames to `size` bytes, by default the size that the peer announced last, and
    /// messages to `buffers` frames. A message for which an end has too few buffers would wait for
    /// ever.
    pub fn limit_frames(&mut self, size: Option<u32>, buffers: usize) {
        let size = size.unwrap_or_else(|| {
            let next = self.flow.next_receive();
            self.framing.sizes().settle(next);
            self.framing.sizes().last()
        });
        let frames = buffers.min(self.flow.max_frames() as usize);
        self.framing.limit(size, frames);
    }

    /// Cheaper than [`next_frame`](Self::next_frame), which certainly returns `None` if this is
    /// true.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.flow.is_quiet() && matches!(self.phase, Phase::Running(stage) if !stage.sends_fin())
    }

    /// Returns the next due `Fin`, `Resize` or `Ack`, which must be sent, with the payload of a
    /// `Resize`. A `Fin` is due only if `all_sent`, a skip only if `may_skip`.
    #[inline]
    pub fn next_frame(
        &mut self,
        all_sent: bool,
        may_skip: impl FnOnce() -> bool,
        now: impl FnOnce() -> Instant,
    ) -> Option<(Header, Option<Resize>)> {
        let next = self.flow.next_receive();
        self.framing.sizes().settle(next);
        let Phase::Running(stage) = self.phase else { return None };
        if stage == Stage::Aborting {
            return None;
        }
        // Before other frames, which may use the receives whose size changes.
        if let Some((header, resize)) = self.flow.announce() {
            return Some((header, Some(resize)));
        }
        if stage.sends_fin() && all_sent && self.flow.may_send(Kind::Fin) {
            return Some((self.flow.send(Kind::Fin), None));
        }
        if self.flow.ack_due() {
            if self.flow.owes_credits() {
                self.growth.note_ack(now);
            }
            return Some((self.flow.send(Kind::Ack), None));
        }
        // Tested first, because skips are rare.
        let skips = self.flow.has_due_skip() && may_skip();
        let skipped = if skips { self.flow.skip() } else { None };
        skipped.map(|header| (header, None))
    }

    /// Returns the `Abort`, which must be sent, if there is a credit.
    pub fn abort_frame(&mut self) -> Option<Header> {
        self.flow.may_send(Kind::Abort).then(|| self.flow.send(Kind::Abort))
    }

    pub fn note_buffer_taken(&mut self) {
        self.growth.note_buffer_taken();
    }

    pub fn receives(&self) -> u32 {
        self.growth.receives()
    }

    #[inline]
    pub fn may_grow(&self) -> bool {
        self.growth.is_wanted()
    }

    /// [`grow`](Self::grow) to this number, including the reserve, or
    /// [`refuse_growth`](Self::refuse_growth) must follow.
    pub fn growth(&self) -> Option<u32> {
        let grows = self.growth.is_wanted() && self.phase.takes_messages() && self.may_resize();
        grows.then(|| self.growth.next())
    }

    /// Announces the receives of [`growth`](Self::growth), of `size` bytes, and returns how many of
    /// them must be posted now, from number `from` on. The peer skips the first receives; long ones
    /// are kept.
    #[must_use]
    pub fn grow(&mut self, from: u32, size: u32) -> u32 {
        let before = self.growth.receives();
        let kept = if self.growth.is_grown() { before } else { 0 };
        self.growth.grow(size, self.flow.unanswered());
        self.resize(before - kept, from, size);
        self.growth.receives() - kept
    }

    /// The next [`Due::Buffers`] permits another attempt.
    pub fn refuse_growth(&mut self) {
        self.growth.refuse();
    }

    /// Returns true if [`watch_idle`](Self::watch_idle) is needed, because the receives may change.
    pub fn watches_receives(&self) -> bool {
        self.growth.is_grown() || self.growth.is_refused()
    }

    /// Returns the number of first receives if [`shrink`](Self::shrink) is possible, which must
    /// follow.
    pub fn shrinkage(&self) -> Option<u32> {
        let is_free = self.flow.is_idle() && self.incomplete_frames() == 0;
        let shrinks = self.growth.is_grown() && is_free && self.may_resize();
        shrinks.then(|| self.growth.first())
    }

    /// Returns to the first receives, posted from number `from` on. The peer skips earlier ones.
    pub fn shrink(&mut self, from: u32) {
        let before = self.growth.receives();
        self.growth.shrink();
        self.resize(before, from, FIRST_SIZE);
    }

    /// Makes the peer skip `number` more receives, for which as many first receives were posted,
    /// from number `from` on.
    pub fn exchange(&mut self, number: u32, from: u32) {
        self.resize(number, from, FIRST_SIZE);
    }

    fn resize(&mut self, skip: u32, from: u32, size: u32) {
        let receives = self.growth.receives() + skip;
        self.flow.resize(Resize { receives, skip, from, size });
    }

    pub fn may_resize(&self) -> bool {
        matches!(self.phase, Phase::Running(stage) if stage != Stage::Aborting)
            && self.flow.may_resize()
            && self.flow.may_send(Kind::Resize)
            && !self.flow.peer_has_finished()
    }

    pub fn watch_idle(&mut self, now: impl FnOnce() -> Instant) {
        self.timers.watch_idle(now);
    }

    pub fn probe(&mut self, now: Instant) {
        self.timers.probe(now, self.flow.used_receives());
    }

    pub fn note_answer(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.timers.note_answer(now, self.flow.used_receives())
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.timers.deadline()
    }

    pub fn due(&mut self, now: Instant, observed: Observed) -> Option<Due> {
        while let Some(expired) = self.timers.expire(now, self.flow.used_receives(), observed) {
            match expired {
                Expired::Terminate(reason) => return Some(Due::Terminate(reason)),
                // Without a credit no `Ping` is needed: a live peer returns credits by itself.
                Expired::Silence if self.flow.may_send(Kind::Ping) => {
                    return Some(Due::Frame(self.flow.send(Kind::Ping)));
                }
                Expired::Silence => {}
                Expired::Buffers { idle } => {
                    self.growth.renew();
                    return Some(Due::Buffers { idle });
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::end::TestReason;

    fn sides(service: Service) -> [Protocol<TestReason>; 2] {
        let settings = Settings {
            service,
            first_receives: 12,
            receives: 12,
            grows: false,
            max_message: 100,
            frame: 100,
            eager: 100,
            inline: 10,
            max_offered: 1000,
            trailer: 0,
            times: Times::default(),
        };
        let peer = Handshake { buffer_size: 100, receives: 12, max_message: 100, grows: false };
        [(); 2].map(|()| {
            let mut side = Protocol::new(settings);
            side.set_peer(&peer, Instant::now());
            side
        })
    }

    fn deliver(to: &mut Protocol<TestReason>, header: Header) -> Received {
        let len = usize::from(header.kind.is_message());
        to.on_frame(Some(header.encode()), len, false).unwrap()
    }

    #[test]
    fn message_to_a_dropped_stream_is_in_vain_once_the_peer_has_its_end() {
        for service in [Service::Bytes, Service::Messages] {
            let [mut a, mut b] = sides(service);
            // A side whose listener shuts down lingers, too, and discards what it gets.
            let actions = a.abandon_stream(LINGER);
            assert!(actions.contains(&Action::WakeSenders));
            let crossing = b.flow.send(Kind::Data);
            let (fin, _) = a.next_frame(true, || true, Instant::now).unwrap();
            assert_eq!(fin.kind, Kind::Fin);
            deliver(&mut a, crossing);
            assert!(!a.peer_writes_in_vain(), "the message has crossed the end");
            deliver(&mut b, fin);
            let late = b.flow.send(Kind::Data);
            deliver(&mut a, late);
            assert_eq!(a.peer_writes_in_vain(), service == Service::Bytes);
        }
    }

    #[test]
    fn each_arrival_tells_what_becomes_of_the_receive() {
        let [mut a, mut b] = sides(Service::Messages);
        let part = b.flow.send(Kind::Part);
        assert_eq!(deliver(&mut a, part).arrival, Arrival::Part);
        let data = b.flow.send(Kind::Data);
        assert_eq!(deliver(&mut a, data).arrival, Arrival::Message { parts: 1, len: 2 });
        let ping = b.flow.send(Kind::Ping);
        assert_eq!(deliver(&mut a, ping).arrival, Arrival::Control);
        b.flow.send_notification();
        let notified = a.on_frame(Some(7), 0, true).unwrap();
        assert_eq!(notified, Received { arrival: Arrival::Notification, fetched: 0 });
        let missing = a.on_frame(None, 0, false);
        assert_eq!(missing, Err(End::Violation(Violation::Header { header: 0 })));
    }
}
