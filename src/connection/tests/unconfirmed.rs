//! Unconfirmed handshakes on devices whose connection manager cannot answer requests itself.

use std::future::Future;
use std::time::Instant;

use super::silent_peer::SilentPeer;
use crate::connection::listener::GRACE;
use crate::connection::{Connection, Listener, ListenerConfig};
use crate::contained::tests::HANG;
use crate::software::Network;
use crate::verbs::Device;

/// A listener with pending requests of silent peers, and the device of a working client.
struct FloodedListener {
    client: Device,
    listener: Listener,
    _silent_peers: Vec<SilentPeer>,
}

impl FloodedListener {
    async fn new(handshakes: u32, sources: usize, requests: usize) -> Self {
        let network = Network::new();
        let (server, client) = (
            Device::software_in(&network, "server").unwrap(),
            Device::software_in(&network, "client").unwrap(),
        );
        let gid = server.default_path().unwrap().1.gid;
        let config = ListenerConfig::default().handshakes(handshakes);
        let listener = Listener::bind_with(&server, (gid.to_ip(), 0), &config).await.unwrap();
        listener.never_answer();
        let mut silent_peers: Vec<_> = (0..sources)
            .map(|number| SilentPeer::new(&network, &format!("stranger{number}")))
            .collect();
        for number in 0..requests {
            silent_peers[number % sources].request(listener.local_addr().unwrap());
        }
        Self { client, listener, _silent_peers: silent_peers }
    }

    async fn connect(&self) -> (Connection, Connection) {
        let connecting = Connection::connect(&self.client, self.listener.local_addr().unwrap());
        let (theirs, ours) = tokio::join!(connecting, self.listener.accept());
        (theirs.expect("a working client connects"), ours.unwrap())
    }
}

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("timed out") });
}

#[test]
fn unconfirmed_handshakes_are_evicted_when_the_program_answers() {
    run(|| async {
        let flooded = FloodedListener::new(4, 3, 20).await;
        let (theirs, ours) = flooded.connect().await;
        theirs.send("here").await.unwrap();
        assert_eq!(ours.recv().await.unwrap().unwrap(), "here");
        let stats = flooded.listener.stats();
        assert!(stats.evicted >= 16, "{stats:?}");
    });
}

#[test]
fn handshake_is_evicted_after_its_grace_in_real_time_under_a_paused_clock() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let flooded = FloodedListener::new(1, 1, 1).await;
        let start = Instant::now();
        drop(flooded.connect().await);
        assert_eq!(flooded.listener.stats().evicted, 1);
        assert!(start.elapsed() >= GRACE, "the handshake was evicted early");
    });
}
