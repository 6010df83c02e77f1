//! Fuzz targets for the parsers of data from peers.

use std::time::Instant;

use crate::end::End;
use crate::flow::RESERVE;
use crate::frame::{Kind, OFFER_LEN};
use crate::handshake::{Handshake, Service};
use crate::incoming::Arrival;
use crate::protocol::{Protocol, Settings};
use crate::timers::Times;

/// Checks that decoded handshakes encode to the same bytes, and belong to one service.
pub fn handshake(bytes: &[u8]) {
    let services = [Service::Messages, Service::Bytes];
    let decoded = services.map(|service| Handshake::decode_for(service, bytes));
    assert!(decoded.iter().any(Result::is_err), "both contents");
    for (service, decoded) in services.into_iter().zip(decoded) {
        let Ok((handshake, user)) = decoded else { continue };
        match handshake.encode_for(service, user) {
            Ok(again) => assert_eq!(bytes[..again.len()], again),
            Err(error) => panic!("{error}"),
        }
        assert!(handshake.receives > RESERVE);
    }
}

/// Feeds frames to an end that answers, and checks that credits stay within the window. Each frame
/// is a byte, for the length of the payload and whether it is a notification, 4 bytes of header and
/// 20 bytes of payload. With an odd number of receives, the frames belong to a stream.
pub fn frames(bytes: &[u8]) {
    let Some((&[receives, window], frames)) = bytes.split_first_chunk() else { return };
    let service = if receives % 2 == 1 { Service::Bytes } else { Service::Messages };
    let receives = RESERVE + 1 + u32::from(receives);
    let mut protocol = Protocol::<End>::new(Settings {
        service,
        first_receives: receives,
        receives,
        grows: true,
        max_message: 1 << 20,
        frame: 4096,
        eager: 1 << 16,
        inline: 0,
        max_offered: 0,
        trailer: 0,
        times: Times::default(),
    });
    let window = RESERVE + 1 + u32::from(window);
    let peer = Handshake { buffer_size: 4096, receives: window, max_message: 0, grows: true };
    protocol.set_peer(&peer, Instant::now());
    protocol.limit_frames(None, 16);
    for frame in frames.chunks(25) {
        let Some((&[shape, a, b, c, d], payload)) = frame.split_first_chunk() else { return };
        let imm = u32::from_be_bytes([a, b, c, d]);
        let payload = &payload[..payload.len().min(usize::from(shape >> 1) % 21)];
        let Ok(received) = protocol.on_frame(Some(imm), payload.len(), shape % 2 == 1) else {
            return;
        };
        let known = match received.arrival {
            Arrival::Offer => {
                let number =
                    |at: usize| payload.get(at..)?.first_chunk().map(|at| u64::from_be_bytes(*at));
                let (Some(addr), Some(len)) = (number(0), number(8)) else { return };
                let checked = protocol.on_offer(addr, len);
                assert!(checked.is_err() || (1..=1 << 20).contains(&len));
                protocol.flow.done();
                protocol.flow.release_message();
                checked.is_ok()
            }
            Arrival::Resize => match protocol.on_resize(payload) {
                Ok(size) => {
                    protocol.limit_frames(Some(size), 16);
                    true
                }
                Err(_) => false,
            },
            Arrival::Message { parts, len } => {
                assert!(service == Service::Messages || parts == 0 && len > 0);
                (0..=parts).for_each(|_| protocol.flow.release_message());
                true
            }
            Arrival::Notification => {
                protocol.flow.release_message();
                true
            }
            Arrival::Part | Arrival::Skip | Arrival::Control => true,
        };
        if !known {
            return;
        }
        let most = window.max(2 * (RESERVE + 4)) + RESERVE + 4;
        assert!(protocol.flow.credits() <= most, "{} credits", protocol.flow.credits());
        while protocol.next_frame(true, || true, Instant::now).is_some() {}
        let frames = protocol.frames_of(10_000, 16);
        assert!(frames.is_none_or(|frames| frames <= 10_000 / OFFER_LEN));
        if protocol.flow.may_send(Kind::Data) {
            protocol.flow.send(Kind::Data);
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
            bytes.iter_mut().skip(3).step_by(25).for_each(|byte| *byte = random.u8(..8) << 5);
            super::frames(&bytes);
        }
    }
}
