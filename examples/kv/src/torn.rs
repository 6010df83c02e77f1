//! Readers while the server is in the middle of writing: not now and then, as under load, but every time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rdma::Device;
use tokio_rdma::software::Network;

use crate::history::{Event, What, Wrong, check};
use crate::slot::HEADER;
use crate::stamp::Stamp;
use crate::{ClientConfig, KvClient, KvError, Layout, Server, Table, Versioned};

const KEY: &[u8] = b"key";
const LONGEST: usize = 1000;
/// More than anything here takes.
const LONG: Duration = Duration::from_secs(60);
const RETRIES: u32 = 3;

/// A stamp whose values are of full length: the old one is of writer 0, the new one of writer 1.
fn stamp(writer: u32) -> Stamp {
    let mut stamps = (0..).map(|sequence| Stamp { key: 0, writer, sequence });
    stamps.find(|stamp| stamp.value(LONGEST).len() == LONGEST).unwrap()
}

/// What a GET gave.
type Got = Result<Option<Versioned>, KvError>;

struct Fixture {
    table: Arc<Table>,
    client: Arc<KvClient>,
    server: JoinHandle<()>,
    old: u64,
}

impl Fixture {
    /// A server with one key, and a client.
    async fn new(config: ClientConfig) -> Self {
        let device = Device::software_in(&Network::new(), "one").unwrap();
        let layout = Layout::new(1, 2, 8, LONGEST as u32).unwrap();
        let server = Server::bind(&device, "127.0.0.1:0", layout).await.unwrap();
        let (table, address) = (server.table().clone(), server.local_addr());
        let server = tokio::spawn(async move { drop(server.run().await) });
        let config = config.deadline(LONG).torn_retries(RETRIES);
        let client = Arc::new(KvClient::connect_with(&device, address, config).await.unwrap());
        let old = client.put(KEY, &stamp(0).value(LONGEST)).await.unwrap();
        Self { table, client, server, old }
    }

    /// Writes the new value in two, with a GET in the middle that is given `until` to show something; what it gave, and the
    /// version of the new value.
    async fn get_within_a_put(
        &self,
        half: usize,
        until: impl Fn(&KvClient, &JoinHandle<Got>) -> bool + Send + 'static,
    ) -> (u64, Got) {
        let (table, client) = (self.table.clone(), self.client.clone());
        let runtime = tokio::runtime::Handle::current();
        // The lock of the bucket is held: that is for a thread that may wait.
        let put = tokio::task::spawn_blocking(move || {
            table.put_in_two(KEY, &stamp(1).value(LONGEST), half, || {
                let getting = runtime.spawn({
                    let client = client.clone();
                    async move { client.get(KEY).await }
                });
                // Not by the runtime's clock: the server's task may wait for the lock where the runtime looks at it.
                let start = Instant::now();
                while !until(&client, &getting) {
                    assert!(start.elapsed() < LONG, "what was waited for");
                    std::thread::sleep(Duration::from_millis(1));
                }
                getting
            })
        });
        let (new, getting) = put.await.unwrap();
        let got = timeout(LONG, getting).await.unwrap().unwrap();
        (new, got)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Places to be interrupted at: after the checksum, after the header, and within the value.
const HALVES: [usize; 4] = [16, HEADER, 512, HEADER + LONGEST - 8];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn torn_value_is_read_again_and_in_the_end_asked_for() {
    for half in HALVES {
        let fixture = Fixture::new(ClientConfig::default()).await;
        // It gives up reading, and the server does not answer before it has finished the PUT.
        let (new, got) =
            fixture.get_within_a_put(half, |client, _| client.counters().fallbacks == 1).await;
        let found = got.unwrap().unwrap();
        assert_eq!(
            (found.version, Stamp::of(&found.value, LONGEST)),
            (new, Ok(stamp(1))),
            "half {half}"
        );
        let counters = fixture.client.counters();
        assert_eq!((counters.torn, counters.fallbacks), (u64::from(RETRIES) + 1, 1), "half {half}");
        // From now on it is whole.
        assert_eq!(fixture.client.get(KEY).await.unwrap().unwrap(), found);
        assert_eq!(fixture.client.counters().fallbacks, 1);
    }
}

/// The same without looking at the checksum: the checker finds it. So it would if the checksum did not do what it is for.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reader_that_accepts_torn_values_is_found_out() {
    // With a new checksum alone it would be right by chance.
    for half in HALVES.into_iter().skip(1) {
        let fixture = Fixture::new(ClientConfig::default().accept_torn()).await;
        let (new, got) = fixture.get_within_a_put(half, |_, getting| getting.is_finished()).await;
        let found = got.unwrap().unwrap();
        let event = |start, end, what| Event { key: 0, start, end, what };
        let history = [
            event(0, 1, What::Put { version: fixture.old, stamp: stamp(0) }),
            event(2, 5, What::Put { version: new, stamp: stamp(1) }),
            event(
                3,
                4,
                What::Found { version: found.version, value: Stamp::of(&found.value, LONGEST) },
            ),
        ];
        let wrong = check(&history).expect_err("a torn value");
        match half {
            // The old value under the new version.
            HEADER => assert!(matches!(wrong, Wrong::NotPut { .. }), "{wrong}"),
            _ => assert!(matches!(wrong, Wrong::Torn { .. }), "{wrong}"),
        }
    }
}
