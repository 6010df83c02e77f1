use std::time::Instant;

use crate::end::{End, TestReason};
use crate::flow::RESERVE;
use crate::frame::{Header, Kind, OFFER_LEN};
use crate::handshake::{Handshake, Service};
use crate::incoming::Arrival;
use crate::lifecycle::{Action, Event, Phase, Stage};
use crate::protocol::{Protocol, Settings};
use crate::timers::{LINGER, Times};
use crate::window::{FIRST_SIZE, Resize};

/// The maximum of frames in flight in each direction.
pub(super) const MAX_WINDOW: usize = RESERVE as usize + 6;

/// Each occurs at most once, and none after `Drop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// After the last message.
    FinishAtEnd,
    Finish,
    Close,
    Abort,
    Drop,
}

impl Call {
    pub(super) const ALL: [Self; 5] =
        [Self::FinishAtEnd, Self::Finish, Self::Close, Self::Abort, Self::Drop];
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Frame {
    Notification,
    Bare(Header),
    /// A header, and the receives and skipped receives of its payload.
    Resize(Header, [u8; 2]),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Wire {
    pub(super) frames: [Frame; MAX_WINDOW],
    pub(super) len: usize,
}

impl Wire {
    pub(super) const EMPTY: Self = Self { frames: [Frame::Notification; MAX_WINDOW], len: 0 };

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn push(&mut self, header: Header) {
        self.push_any(Frame::Bare(header));
    }

    pub(super) fn push_any(&mut self, frame: Frame) {
        self.frames[self.len] = frame;
        self.len += 1;
    }

    pub(super) fn pop(&mut self) -> Frame {
        let first = self.frames[0];
        self.frames.copy_within(1.., 0);
        self.len -= 1;
        first
    }
}

#[derive(Debug, Clone)]
pub(super) struct Side {
    pub(super) protocol: Protocol<TestReason>,
    /// Frames of each message that is not offered, in both directions.
    pub(super) frames: u8,
    /// Short writes may be held, and a drop sends them.
    pub(super) stream: bool,
    /// Frames of held bytes; all but the last one are full.
    pub(super) held: u8,
    /// Still to be sent: messages or writes, notifications and pings.
    pub(super) data: u8,
    pub(super) offers: u8,
    pub(super) notices: u8,
    pub(super) pings: u8,
    /// Remaining changes, the last one first: receives to post and to skip.
    pub(super) changes: &'static [(u32, u32)],
    pub(super) calls: [bool; Call::ALL.len()],
    pub(super) may_fail: bool,
    pub(super) posted: u32,
    /// Arrived but not taken.
    pub(super) inbox: u8,
    pub(super) reading: u8,
    /// Arrived but not taken.
    pub(super) noticed: u8,
    pub(super) sent: u8,
    pub(super) arrived: u8,
    pub(super) wire: Wire,
    /// Acknowledgements were lost with the peer's queue pair or the network.
    pub(super) unacknowledged: bool,
    /// Aborted, dropped before the end of the peer's messages, or failed.
    pub(super) disturbed: bool,
    pub(super) aborted: bool,
}

impl Side {
    pub(super) fn new(receives: u32, window: u32, data: u8, offers: u8) -> Self {
        Self {
            protocol: protocol(Service::Messages, receives, window),
            frames: 1,
            stream: false,
            held: 0,
            data,
            offers,
            notices: 0,
            pings: 0,
            changes: &[],
            calls: Call::ALL.map(|call| call == Call::FinishAtEnd),
            may_fail: false,
            posted: receives,
            inbox: 0,
            reading: 0,
            noticed: 0,
            sent: 0,
            arrived: 0,
            wire: Wire::EMPTY,
            unacknowledged: false,
            disturbed: false,
            aborted: false,
        }
    }

    /// Creates an end with the smallest window.
    pub(super) fn calling(data: u8, offers: u8, calls: &[Call]) -> Self {
        Self {
            calls: Call::ALL.map(|call| calls.contains(&call)),
            ..Self::new(RESERVE + 1, RESERVE + 1, data, offers)
        }
    }

    pub(super) fn stream(data: u8, offers: u8, calls: &[Call]) -> Self {
        let protocol = protocol(Service::Bytes, RESERVE + 1, RESERVE + 1);
        Self { protocol, stream: true, ..Self::calling(data, offers, calls) }
    }

    pub(super) fn may_hold(&self) -> bool {
        self.stream && (self.held > 0 || !self.is_flushed() || !self.may_send(Kind::Data))
    }

    pub(super) fn send_held(&mut self) {
        self.held -= 1;
        self.send(Kind::Data);
    }

    pub(super) fn may_send(&self, kind: Kind) -> bool {
        let frames = if kind == Kind::Data { self.frames } else { 1 };
        self.protocol.flow.may_send(kind) && self.protocol.flow.may_send_message(frames.into())
    }

    pub(super) fn send(&mut self, kind: Kind) {
        if kind == Kind::Data {
            for _ in 1..self.frames {
                let part = self.protocol.flow.send(Kind::Part);
                self.wire.push(part);
            }
        }
        let header = self.protocol.flow.send(kind);
        self.sent += u8::from(kind.is_message());
        self.wire.push(header);
    }

    pub(super) fn notify(&mut self) {
        self.notices -= 1;
        self.protocol.flow.send_notification();
        self.wire.push_any(Frame::Notification);
    }

    pub(super) fn resize(&mut self) {
        let Some((&(post, skip), rest)) = self.changes.split_last() else { return };
        self.changes = rest;
        self.posted += post;
        let receives = self.protocol.flow.receives() + post;
        self.protocol.flow.resize(Resize { receives, skip, from: 0, size: FIRST_SIZE });
    }

    pub(super) fn stage(&self) -> Option<Stage> {
        match *self.protocol.phase() {
            Phase::Running(stage) => Some(stage),
            _ => None,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.protocol.phase(), Phase::Closed(_))
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.protocol.flow.peer_has_finished() && self.inbox == 0
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.wire.is_empty() && !self.unacknowledged
    }

    pub(super) fn lose(&mut self, unacknowledged: bool) {
        self.unacknowledged |= unacknowledged && self.stage().is_some();
    }

    pub(super) fn cut_off(&mut self) {
        self.wire = Wire::EMPTY;
        self.unacknowledged = false;
    }

    pub(super) fn on(&mut self, event: Event<TestReason>) {
        let actions = match event {
            Event::Drop { .. } if self.stream => self.protocol.abandon_stream(LINGER),
            Event::Drop { at_end } => self.protocol.abandon(at_end),
            event => self.protocol.on(event),
        };
        if actions.contains(&Action::SendAbort)
            && let Some(header) = self.protocol.abort_frame()
        {
            self.wire.push(header);
            self.aborted = true;
        }
        self.disturbed |= matches!(event, Event::Abort(_) | Event::Fail(_))
            || self.stage() == Some(Stage::Aborting);
    }

    pub(super) fn call(&mut self, call: Call) {
        self.calls[call as usize] = false;
        match call {
            Call::FinishAtEnd | Call::Finish => self.on(Event::Finish),
            Call::Close => self.on(Event::Close),
            Call::Abort => self.on(Event::Abort(TestReason::Aborted)),
            Call::Drop => {
                self.calls = [false; Call::ALL.len()];
                self.on(Event::Drop { at_end: self.is_at_end() });
            }
        }
    }

    /// Takes a message. An end that gets messages of several frames gets no offers.
    pub(super) fn take(&mut self) {
        self.inbox -= 1;
        for _ in 0..self.frames {
            self.posted += 1;
            self.protocol.flow.release_message();
        }
    }

    /// Its receive was reposted before.
    pub(super) fn take_notice(&mut self) {
        self.noticed -= 1;
        self.protocol.flow.release_message();
    }

    pub(super) fn receive(&mut self, frame: Frame) {
        assert!(self.posted > 0, "receiver not ready");
        let (imm, len, written) = match frame {
            Frame::Notification => (0, 0, true),
            Frame::Resize(header, _) => (header.encode(), Resize::LEN, false),
            Frame::Bare(header) => {
                let len = match header.kind {
                    Kind::Data | Kind::Part => 1,
                    Kind::Offer => OFFER_LEN,
                    _ => 0,
                };
                (header.encode(), len, false)
            }
        };
        let arrival = match self.protocol.on_frame(Some(imm), len, written) {
            Ok(received) => received.arrival,
            Err(End::Dropped) => return self.on(Event::Terminate(End::Dropped.into())),
            Err(other) => panic!("violation by a correct peer: {other:?}"),
        };
        match arrival {
            Arrival::Notification => self.noticed += 1,
            // The receives of a message are reposted when the whole message is received.
            Arrival::Part | Arrival::Skip => self.posted -= 1,
            Arrival::Message { parts, .. } => {
                assert_eq!(parts + 1, u32::from(self.frames));
                self.posted -= 1;
                self.inbox += 1;
                self.arrived += 1;
            }
            Arrival::Offer => {
                self.posted -= 1;
                self.inbox += 1;
                self.arrived += 1;
                self.reading += 1;
            }
            Arrival::Control => {}
            Arrival::Resize => {
                let Frame::Resize(_, counts) = frame else { unreachable!("it has a payload") };
                let [receives, skip] = counts.map(u32::from);
                let resize = Resize { receives, skip, from: 0, size: FIRST_SIZE };
                assert_eq!(self.protocol.on_resize(&resize.to_bytes()), Ok(FIRST_SIZE));
            }
        }
    }
}

fn protocol(service: Service, receives: u32, window: u32) -> Protocol<TestReason> {
    let mut protocol = Protocol::new(Settings {
        service,
        first_receives: receives,
        receives: MAX_WINDOW as u32,
        grows: false,
        max_message: 100,
        frame: FIRST_SIZE as usize,
        eager: 100,
        inline: 0,
        max_offered: 0,
        trailer: 0,
        times: Times::default(),
    });
    let peer =
        Handshake { buffer_size: FIRST_SIZE, receives: window, max_message: 100, grows: false };
    protocol.set_peer(&peer, Instant::now());
    protocol
}
