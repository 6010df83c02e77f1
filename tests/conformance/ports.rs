//! The link of a port, and its counters.

use std::collections::BTreeMap;
use std::time::Duration;

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
    let sent = |counters: &BTreeMap<String, u64>| counters.get("sent_pkts").copied();
    let mut after = device.port_counters(port).unwrap();
    match sent(&before) {
        // The kernel keeps the values for 10 ms.
        Some(before) => {
            while sent(&after) < Some(before + 3) {
                tokio::time::sleep(Duration::from_millis(5)).await;
                after = device.port_counters(port).unwrap();
            }
        }
        // Of a file that the emulated ConnectX never changes.
        None => assert_eq!((after["out_of_sequence"], after.get("lifespan")), (7, None)),
    }
    // Other tests may use the port too.
    assert!(before.keys().eq(after.keys()), "{before:?}, {after:?}");
    assert!(before.iter().all(|(name, count)| after[name] >= *count), "{before:?}, {after:?}");
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
