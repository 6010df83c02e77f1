//! Handshakes that peers never confirm, where the program answers each request: on devices whose manager is the kernel's.

use std::future::Future;
use std::time::{Duration, Instant};

use super::stranger::Stranger;
use crate::message::listener::GRACE;
use crate::message::{Connection, ConnectionConfig, Listener};
use crate::software::Network;
use crate::verbs::Device;

/// Only a hang takes this long.
const HANG: Duration = Duration::from_secs(120);

/// A listener whose program answers each request, with `requests` of `sources` strangers that wait, and the device of an
/// honest client.
struct Beset {
    client: Device,
    listener: Listener,
    _strangers: Vec<Stranger>,
}

impl Beset {
    async fn new(handshakes: u32, sources: usize, requests: usize) -> Self {
        let network = Network::new();
        let (server, client) = (
            Device::software_in(&network, "server").unwrap(),
            Device::software_in(&network, "client").unwrap(),
        );
        let gid = server.default_path().unwrap().1.gid;
        let config = ConnectionConfig::default().handshakes(handshakes);
        let listener = Listener::bind_with(&server, (gid.to_ip(), 0), &config).await.unwrap();
        listener.never_answer();
        let mut strangers: Vec<_> = (0..sources)
            .map(|number| Stranger::new(&network, &format!("stranger{number}")))
            .collect();
        for number in 0..requests {
            strangers[number % sources].request(listener.local_addr());
        }
        Self { client, listener, _strangers: strangers }
    }

    /// An honest client connects.
    async fn connect(&self) -> (Connection, Connection) {
        let connecting = Connection::connect(&self.client, self.listener.local_addr());
        let (theirs, ours) = tokio::join!(connecting, self.listener.accept());
        (theirs.expect("an honest client connects"), ours.unwrap())
    }
}

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("hangs") });
}

#[test]
fn handshakes_that_are_not_confirmed_give_way_where_the_program_answers() {
    run(|| async {
        let it = Beset::new(4, 3, 20).await;
        let (theirs, ours) = it.connect().await;
        theirs.send("here").await.unwrap();
        assert_eq!(ours.recv().await.unwrap().unwrap(), "here");
        let stats = it.listener.stats();
        assert!(stats.gave_way >= 16, "{stats:?}");
    });
}

#[test]
fn handshake_gives_way_after_its_grace_in_real_time_under_a_paused_clock() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let it = Beset::new(1, 1, 1).await;
        let start = Instant::now();
        drop(it.connect().await);
        assert_eq!(it.listener.stats().gave_way, 1);
        assert!(start.elapsed() >= GRACE, "the handshake gave way early");
    });
}
