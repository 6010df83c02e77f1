//! The link of a port, and its counters.

use std::collections::BTreeMap;

use tokio_rdma::VerbError;
use tokio_rdma::types::{PhysicalState, PortNum, Transport};

use crate::common::pair::Pair;
use crate::common::{Setup, in_every_mode};

in_every_mode! {
    port_counters_follow_the_packets,
}

async fn port_counters_follow_the_packets(mode: &str) {
    let pair = Pair::new(Transport::Rc, mode);
    let device = pair.a.pd.device();
    let port = device.default_path().unwrap().0.port;
    let before = device.port_counters(port).unwrap();
    for _ in 0..3 {
        let receive = pair.b.qp.recv(pair.b.blank(8));
        pair.a.qp.send(pair.a.buffer(&[7; 8])).await.unwrap();
        receive.await.unwrap();
    }
    let after = device.port_counters(port).unwrap();
    assert!(before.keys().eq(after.keys()), "{before:?}, {after:?}");
    // Other tests may use the port too.
    assert!(before.iter().all(|(name, count)| after[name] >= *count), "{before:?}, {after:?}");
    let sent = |counters: &BTreeMap<String, u64>| counters.get("sent_pkts").copied();
    match (sent(&before), sent(&after)) {
        (Some(before), Some(after)) => assert!(after >= before + 3, "{before}, {after}"),
        // Of a file that the emulated ConnectX never changes.
        _ => assert_eq!((after["out_of_sequence"], after.get("lifespan")), (7, None)),
    }
    let device = device.clone();
    drop(pair);
    let last = device.port_counters(port).unwrap();
    assert!(after.iter().all(|(name, count)| last[name] >= *count), "{after:?}, {last:?}");
}

#[test]
fn port_has_a_link() {
    let setup = Setup::new();
    let port = setup.a.default_path().unwrap().0;
    assert_eq!(port.physical_state, PhysicalState::LinkUp);
    assert_eq!(port.rate_mbps().is_none(), setup.is_software(), "{port:?}");
    let missing = PortNum(port.port.0 + 100);
    assert_eq!(setup.a.port_counters(missing).unwrap_err().errno, VerbError::EINVAL);
}
