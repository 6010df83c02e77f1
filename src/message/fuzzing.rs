//! Fuzz targets for the parsers of data from peers.

use super::flow_control::{Flow, RESERVE};
use super::frame::{Header, Kind, decode_offer};
use super::handshake::{Content, Handshake};
use super::stream::check_bytes;
use crate::types::Imm;

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
        let Ok(header) = Header::decode(Imm(u32::from_be_bytes(*header))) else {
            if flow.receive_notification().is_err() {
                return;
            }
            // The service may not take it.
            if payload.first().is_some_and(|&byte| byte % 2 == 0) {
                flow.release_message();
            }
            continue;
        };
        assert_eq!(Header::decode(header.encode()), Ok(header));
        if is_stream {
            let empty = payload.iter().all(|&byte| byte == 0);
            if check_bytes(header, if empty { &[] } else { payload }, false).is_err() {
                return;
            }
            assert!(header.kind != Kind::Part && !(header.kind == Kind::Data && empty));
        }
        if flow.receive(header).is_err() {
            return;
        }
        if header.kind == Kind::Offer {
            match decode_offer(payload, 1 << 20) {
                Ok(region) => assert!((1..=1 << 20).contains(&region.len())),
                Err(_) => return,
            }
            flow.done();
        }
        if header.kind.is_message() {
            flow.release_message()
        } else {
            flow.release_control()
        }
        assert!(flow.credits() <= window);
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
        let good = super::Handshake { buffer_size: 4096, receives: 68, max_message: 1 << 20 }
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
            bytes.iter_mut().skip(2).step_by(24).for_each(|byte| *byte = random.u8(..7) << 5);
            super::frames(&bytes);
        }
    }
}
