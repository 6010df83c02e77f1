use crate::Violation;
use crate::flow::max_frames;
use crate::frame::{Header, Kind, OFFER_LEN};
use crate::handshake::Service;

/// The content of a frame, which determines what becomes of its receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Part of a message, which keeps the receive until the application has the message.
    Part,
    /// The last or only part of a message; the receive is as for `Part`.
    Message { parts: u32, len: u64 },
    /// The region of a message, for [`on_offer`](crate::protocol::Protocol::on_offer). The receive
    /// is free, but its credit returns when the application has the message.
    Offer,
    /// A change of the peer's receives, for [`on_resize`](crate::protocol::Protocol::on_resize).
    /// The receive is free.
    Resize,
    /// A skipped receive, which is not reposted.
    Skip,
    /// No payload. The receive is free.
    Control,
    /// A WRITE of the peer's application. The receive is as for `Offer`.
    Notification,
}

#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    service: Service,
    max_message: u64,
    max_frames: u32,
    /// The frames and bytes of the incomplete message.
    parts: u32,
    bytes: u64,
}

impl Incoming {
    pub(crate) fn new(service: Service, receives: u32, max_message: u64) -> Self {
        Self { service, max_message, max_frames: max_frames(receives), parts: 0, bytes: 0 }
    }

    pub(crate) fn service(&self) -> Service {
        self.service
    }

    pub(crate) fn max_message(&self) -> u64 {
        self.max_message
    }

    pub(crate) fn parts(&self) -> u32 {
        self.parts
    }

    /// `written` if a WRITE carried the frame. An empty frame of a stream is refused, because it
    /// would be taken for the end.
    #[inline]
    pub(crate) fn check(&self, header: Header, len: usize, written: bool) -> Result<(), Violation> {
        let is_stream = self.service == Service::Bytes;
        match header.kind {
            kind if is_stream && (written || kind == Kind::Part) => {
                Err(Violation::Header { header: header.encode() })
            }
            Kind::Data if is_stream && len == 0 => Err(Violation::FrameLength { len }),
            Kind::Offer if len != OFFER_LEN => Err(Violation::FrameLength { len }),
            kind if !kind.has_payload() && len > 0 => Err(Violation::FrameLength { len }),
            _ => Ok(()),
        }
    }

    #[inline]
    pub(crate) fn add(&mut self, kind: Kind, len: usize) -> Result<Arrival, Violation> {
        if self.parts > 0 && !matches!(kind, Kind::Data | Kind::Part) {
            return Err(Violation::Incomplete { len: self.bytes });
        }
        match kind {
            Kind::Data | Kind::Part => {
                let bytes = self.bytes + len as u64;
                // The limit is for messages. The size of their buffer limits the bytes of a stream.
                if bytes > self.max_message && self.service == Service::Messages {
                    return Err(Violation::TooLong { len: bytes, allowed: self.max_message });
                }
                if kind == Kind::Data {
                    let parts = std::mem::take(&mut self.parts);
                    self.bytes = 0;
                    return Ok(Arrival::Message { parts, len: bytes });
                }
                if len == 0 {
                    return Err(Violation::FrameLength { len });
                }
                (self.parts, self.bytes) = (self.parts + 1, bytes);
                if self.parts >= self.max_frames {
                    return Err(Violation::Frames { allowed: self.max_frames });
                }
                Ok(Arrival::Part)
            }
            Kind::Offer => Ok(Arrival::Offer),
            Kind::Resize if len == 0 => Ok(Arrival::Skip),
            Kind::Resize => Ok(Arrival::Resize),
            Kind::Ack | Kind::Ping | Kind::Fin | Kind::Abort => Ok(Arrival::Control),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::RESERVE;

    const HEADER: Header = Header { kind: Kind::Data, fin_acked: false, released: 0, done: 0 };

    #[test]
    fn frames_of_streams_are_whole_and_not_empty() {
        let check = |service, kind, len| {
            let incoming = Incoming::new(service, RESERVE + 8, 100);
            incoming.check(Header { kind, ..HEADER }, len, false)
        };
        for service in [Service::Messages, Service::Bytes] {
            assert_eq!(check(service, Kind::Data, 1), Ok(()));
            assert_eq!(check(service, Kind::Ack, 1), Err(Violation::FrameLength { len: 1 }));
        }
        assert_eq!(check(Service::Messages, Kind::Offer, OFFER_LEN), Ok(()));
        let short = check(Service::Messages, Kind::Offer, 19);
        assert_eq!(short, Err(Violation::FrameLength { len: 19 }));
        assert_eq!(check(Service::Messages, Kind::Data, 0), Ok(()));
        assert_eq!(check(Service::Messages, Kind::Part, 1), Ok(()));
        assert_eq!(check(Service::Bytes, Kind::Data, 0), Err(Violation::FrameLength { len: 0 }));
        let part = Header { kind: Kind::Part, ..HEADER };
        let wrong = |header: Header| Err(Violation::Header { header: header.encode() });
        assert_eq!(check(Service::Bytes, Kind::Part, 1), wrong(part));
        let stream = Incoming::new(Service::Bytes, RESERVE + 8, 100);
        assert_eq!(stream.check(HEADER, 1, true), wrong(HEADER));
    }

    #[test]
    fn message_of_several_frames_is_whole_and_has_no_other_frame_in_it() {
        let mut incoming = Incoming::new(Service::Messages, RESERVE + 8, 100);
        for _ in 0..2 {
            assert_eq!(incoming.add(Kind::Part, 30), Ok(Arrival::Part));
            assert_eq!(incoming.add(Kind::Part, 30), Ok(Arrival::Part));
            for kind in [Kind::Ack, Kind::Fin, Kind::Offer, Kind::Resize] {
                let within = incoming.clone().add(kind, 0);
                assert_eq!(within, Err(Violation::Incomplete { len: 60 }), "{kind:?}");
            }
            let empty = incoming.clone().add(Kind::Part, 0);
            assert_eq!(empty, Err(Violation::FrameLength { len: 0 }));
            assert_eq!(incoming.add(Kind::Data, 0), Ok(Arrival::Message { parts: 2, len: 60 }));
            assert_eq!(incoming.add(Kind::Ack, 0), Ok(Arrival::Control));
        }
    }

    #[test]
    fn messages_beyond_the_announced_length_and_frames_are_violations() {
        let incoming = Incoming::new(Service::Messages, RESERVE + 8, 100);
        let too_long = incoming.clone().add(Kind::Data, 101);
        assert_eq!(too_long, Err(Violation::TooLong { len: 101, allowed: 100 }));
        let mut stream = Incoming::new(Service::Bytes, RESERVE + 8, 100);
        assert_eq!(stream.add(Kind::Data, 101), Ok(Arrival::Message { parts: 0, len: 101 }));
        let mut parts = incoming;
        let allowed = max_frames(RESERVE + 8);
        for _ in 1..allowed {
            assert_eq!(parts.add(Kind::Part, 1), Ok(Arrival::Part));
        }
        let last = parts.clone().add(Kind::Data, 1);
        assert_eq!(last, Ok(Arrival::Message { parts: allowed - 1, len: allowed.into() }));
        assert_eq!(parts.add(Kind::Part, 1), Err(Violation::Frames { allowed }));
    }
}
