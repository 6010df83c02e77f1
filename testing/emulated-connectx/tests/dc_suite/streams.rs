//! Streams of an initiator: four, of which four in error end the initiator.

use emulated_connectx::Status;

use super::*;

const STREAMS: u16 = 4;
const FLUSHED: ibv_wc_status::Type = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
const REFUSED: ibv_wc_status::Type = ibv_wc_status::IBV_WC_REM_ACCESS_ERR;

impl Node {
    fn streams() -> Self {
        Self::with(true)
    }

    /// Writes to memory with (`good`) or without the right to, in `stream`.
    fn request(&self, id: u64, stream: u16, good: bool) -> (u64, Dc<'_>, To<'_>) {
        let memory = if good { &self.memory } else { &self.source };
        let (ah, number, key, _) = self.to(usize::from(stream % 2));
        let to = (ah, number, key, Some(stream));
        (id, Dc::Write(self.source.sge(0, 64), memory, 64 * u64::from(stream)), to)
    }

    fn is_ready(&self) -> bool {
        self.dci.state() == ibv_qp_state::IBV_QPS_RTS
    }
}

#[test]
fn requests_of_all_streams_execute() {
    let device = device();
    let node = Node::streams();
    let requests: Vec<_> =
        (0..STREAMS).map(|stream| node.request(stream.into(), stream, true)).collect();
    post_dc(&node.dci, &requests);
    for stream in 0..STREAMS {
        node.cq().ok(stream.into());
    }
    device.assert_clean();
}

#[test]
fn failed_stream_is_flushed_until_it_is_reset() {
    let device = device();
    let node = Node::streams();
    let requests = [
        node.request(0, 1, true),
        node.request(1, 2, false),
        node.request(2, 1, true),
        node.request(3, 2, true),
        node.request(4, 0, true),
        node.request(5, 2, true),
    ];
    post_dc(&node.dci, &requests);
    node.cq().ok(0);
    node.cq().fails_with(1, REFUSED);
    node.cq().ok(2);
    node.cq().fails_with(3, FLUSHED);
    node.cq().ok(4);
    node.cq().fails_with(5, FLUSHED);
    assert!(node.is_ready());
    // Also what is posted later, until the reset.
    post_dc(&node.dci, &[node.request(6, 2, true), node.request(7, 3, true)]);
    node.cq().fails_with(6, FLUSHED);
    node.cq().ok(7);
    assert_eq!(reset_stream(&node.dci, 2), 0);
    post_dc(&node.dci, &[node.request(8, 2, true)]);
    node.cq().ok(8);
    device.assert_clean();
}

#[test]
fn initiator_fails_with_as_many_failed_streams_as_its_limit() {
    let device = device();
    let node = Node::streams();
    // A reset stream does not count.
    post_dc(&node.dci, &[node.request(10, 0, false)]);
    node.cq().fails_with(10, REFUSED);
    assert_eq!(reset_stream(&node.dci, 0), 0);
    for stream in 1..STREAMS {
        post_dc(&node.dci, &[node.request(u64::from(stream), stream, false)]);
        node.cq().fails_with(stream.into(), REFUSED);
        assert!(node.is_ready());
    }
    post_dc(&node.dci, &[node.request(0, 0, false), node.request(9, 1, true)]);
    node.cq().fails_with(0, REFUSED);
    node.cq().fails_with(9, FLUSHED);
    assert_ne!(reset_stream(&node.dci, 0), 0, "only in RTS");
    node.repair();
    // The repair has reset the streams too.
    for stream in 0..STREAMS {
        post_dc(&node.dci, &[node.request(1, stream, true)]);
        node.cq().ok(1);
    }
    device.assert_clean();
}

#[test]
fn injected_failure_fails_one_stream() {
    let device = device();
    let node = Node::streams();
    device.fail_request(Some(node.dci.number()), 1, Status::RetryExceeded);
    let requests =
        [(0, 0), (1, 1), (2, 1), (3, 2)].map(|(id, stream)| node.request(id, stream, true));
    post_dc(&node.dci, &requests);
    node.cq().ok(0);
    node.cq().fails_with(1, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    node.cq().fails_with(2, FLUSHED);
    node.cq().ok(3);
    device.assert_clean();
}

#[test]
fn failure_without_streams_ends_the_initiator() {
    let device = device();
    let node = Node::new();
    post_dc(&node.dci, &[node.request(0, 0, false), node.request(1, 0, true)]);
    node.cq().fails_with(0, REFUSED);
    node.cq().fails_with(1, FLUSHED);
    assert_ne!(reset_stream(&node.dci, 0), 0);
    node.repair();
    device.assert_clean();
}

#[test]
fn streams_beyond_the_limits_are_refused() {
    let device = device();
    let node = Node::new();
    let cq = Cq::new(&node.pd.1, 7);
    for logs in [[5, 0], [0, 5]] {
        assert_eq!(try_dc_initiator(&node.pd, &cq, Some(logs)).err(), Some(libc::EINVAL));
    }
    assert!(try_dc_initiator(&node.pd, &cq, Some([4, 4])).is_ok());
    device.assert_clean();
}
