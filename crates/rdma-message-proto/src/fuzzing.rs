//! Fuzz targets for the parsers of data from peers.

use crate::flow::{Flow, RESERVE};
use crate::frame::{Header, Kind, check_frame, check_offer};
use crate::handshake::{Content, Handshake};
use crate::window::Resize;

/// The maximum of receives.
const MOST: u32 = 300;

/// Checks that decoded handshakes encode to the same bytes, and have one content.
pub fn handshake(bytes: &[u8]) {
    let contents = [Content::Messages, Content::Bytes];
    let decoded = contents.map(|content| Handshake::decode_for(content, bytes));
    assert!(decoded.iter().any(Result::is_err), "both contents");
    for (content, decoded) in contents.into_iter().zip(decoded) {
        let Ok((handshake, user)) = decoded else { continue };
        match handshake.encode_for(content, user) {
            Ok(again) => assert_eq!(bytes[..again.len()], again),
            Err(error) => panic!("{error}"),
        }
        assert!(handshake.receives > RESERVE);
    }
}

/// Feeds frames (4 bytes of header and 20 bytes of a possible offer each) to a side that answers;
/// notifications for invalid headers. With an odd number of receives, the frames belong to a
/// stream. Checks that credits stay within the window.
pub fn frames(bytes: &[u8]) {
    let Some((&[receives, window], frames)) = bytes.split_first_chunk() else { return };
    let is_stream = receives % 2 == 1;
    let (receives, window) = (RESERVE + 1 + u32::from(receives), RESERVE + 1 + u32::from(window));
    let mut flow = Flow::new(receives, window);
    for frame in frames.chunks(24) {
        let Some((header, payload)) = frame.split_first_chunk() else { return };
        let header = Header::decode(u32::from_be_bytes(*header));
        assert_eq!(Header::decode(header.encode()), header);
        if header.kind == Kind::Abort {
            // A notification instead, which the service may not take.
            if flow.receive_notification().is_err() {
                return;
            }
            if payload.first().is_some_and(|&byte| byte % 2 == 0) {
                flow.release_message();
            }
            continue;
        }
        if is_stream {
            let empty = payload.iter().all(|&byte| byte == 0);
            let len = if empty || !header.kind.has_payload() { 0 } else { payload.len() };
            if check_frame(Content::Bytes, header, len, false).is_err() {
                return;
            }
            assert!(header.kind != Kind::Part && !(header.kind == Kind::Data && empty));
        }
        if flow.receive(header).is_err() {
            return;
        }
        if header.kind == Kind::Offer {
            let number = |at: usize| {
                payload.get(at..)?.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
            };
            let (Some(addr), Some(len)) = (number(0), number(8)) else { return };
            if check_offer(addr, len, 1 << 20).is_err() {
                return;
            }
            assert!((1..=1 << 20).contains(&len));
            flow.done();
        }
        if header.kind == Kind::Resize {
            let resize =
                payload.first_chunk().and_then(|bytes: &[u8; 16]| Resize::from_bytes(bytes));
            let known = match resize {
                Some(resize) => flow.receive_resize(resize, MOST),
                None => flow.receive_skip(),
            };
            if known.is_err() {
                return;
            }
        }
        if header.kind.is_message() {
            flow.release_message()
        } else {
            flow.release_control()
        }
        assert!(flow.credits() <= MOST);
        for kind in [Kind::Ack, Kind::Offer, Kind::Part, Kind::Data] {
            let due = kind != Kind::Ack || flow.ack_due();
            if due && flow.may_send(kind) {
                flow.send(kind);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_inputs_keep_invariants() {
        let good =
            super::Handshake { buffer_size: 4096, receives: 68, max_message: 1 << 20, grows: true }
                .encode(b"user")
                .unwrap();
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100_000 {
            let mut bytes = good.clone();
            bytes.resize(random.usize(..300), 0);
            for _ in 0..random.usize(..6) {
                // Often the flags.
                let at = if random.bool() { 5 } else { random.usize(..40) };
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.u8(..);
                }
            }
            super::handshake(&bytes);
            // Valid kinds, so that decoding does not stop at the first frame.
            bytes.iter_mut().skip(2).step_by(24).for_each(|byte| *byte = random.u8(..8) << 5);
            super::frames(&bytes);
        }
    }
}
