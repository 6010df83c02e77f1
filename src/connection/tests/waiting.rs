//! What a `Reconnect` publishes while it waits.

use std::time::Duration;

use futures::StreamExt;

use crate::connection::ConnectionConfig;
use crate::peers::{Reconnect, ReconnectPolicy, ReconnectState};
use crate::software::Network;
use crate::verbs::Device;

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn wait_shortened_by_an_event_is_published() {
    // The clock advances only while no task can run.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let network = Network::new();
        let client = Device::software_in(&network, "client").unwrap();
        let control = network.control("client").unwrap();
        control.set_port(false);
        let policy = ReconnectPolicy::default().first_delay(HOUR).greatest_delay(100 * HOUR);
        let config = ConnectionConfig::default();
        let reconnect = Reconnect::new(&client, "127.0.0.1:9", &config, policy).unwrap();
        let mut states = reconnect.states();
        let long = loop {
            match states.next().await.unwrap() {
                ReconnectState::Waiting { delay, .. } if delay >= 50 * HOUR => break delay,
                _ => reconnect.retry_now(),
            }
        };
        control.set_port(true);
        let Some(ReconnectState::Waiting { delay, .. }) = states.next().await else {
            panic!("the wait of {long:?} ended, and no shorter one was published")
        };
        assert!(delay >= HOUR / 2 && delay <= HOUR, "{delay:?}");
    });
}
