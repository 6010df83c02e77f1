//! The cache lines that the caller of a post prefetches.

use rdma_provider::contract::{PEER_LINES, Qp as _, STATE_LINES};

use super::*;

/// Maximum offset of the address in its cache line: an allocation is aligned to 16 bytes, and so is
/// what an `Arc` holds.
const BEFORE: usize = 48;
const LINE: usize = 64;

#[test]
fn prefetched_lines_have_all_fields_of_a_direct_message() {
    let (a, b) = connected(&Network::new(), &Options::default());
    let own = a.qp.post_state().unwrap().addr();
    let end = a.qp.0.sender.lock().machine.direct_end();
    assert!(end > own && end - own + BEFORE <= STATE_LINES * LINE, "{}", end - own);

    let peer = a.qp.peer_post_state().unwrap().addr();
    assert!(peer <= (&raw const b.qp.0.destroyed).addr());
    let end = b.qp.0.receiver.lock().machine.direct_end();
    assert!(end > peer && end - peer + LINE - 1 <= PEER_LINES * LINE, "{}", end - peer);
}

#[test]
fn destroyed_peer_has_no_state_to_prefetch() {
    let (a, b) = connected(&Network::new(), &Options::default());
    drop(b);
    assert_eq!(a.qp.peer_post_state(), None);
}
