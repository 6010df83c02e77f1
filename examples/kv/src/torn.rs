//! Tests of READs that overlap with a write in every run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rdma::Device;
use tokio_rdma::software::Network;

use crate::history::{Event, Outcome, Violation, check};
use crate::slot::HEADER;
use crate::stamp::Stamp;
use crate::{ClientConfig, KvClient, KvError, Layout, Server, Table, Versioned};

const KEY: &[u8] = b"key";
const LONGEST: usize = 1000;
const TIMEOUT: Duration = Duration::from_secs(60);
const RETRIES: u32 = 3;

/// Returns a stamp whose value has the maximum length.
fn stamp(writer: u32) -> Stamp {
    let mut stamps = (0..).map(|sequence| Stamp { key: 0, writer, sequence });
    stamps.find(|stamp| stamp.value(LONGEST).len() == LONGEST).unwrap()
}

type GetResult = Result<Option<Versioned>, KvError>;

struct Fixture {
    table: Arc<Table>,
    client: Arc<KvClient>,
    server: JoinHandle<()>,
    old: u64,
}

impl Fixture {
    /// Starts a server with one key, and a client.
    async fn new(config: ClientConfig) -> Self {
        let device = Device::software_in(&Network::new(), "one").unwrap();
        let layout = Layout::new(1, 2, 8, LONGEST as u32).unwrap();
        let server = Server::bind(&device, "127.0.0.1:0", layout).await.unwrap();
        let (table, address) = (server.table().clone(), server.local_addr().unwrap());
        let server = tokio::spawn(async move { drop(server.run().await) });
        let config = config.deadline(TIMEOUT).torn_retries(RETRIES);
        let client = Arc::new(KvClient::connect_with(&device, address, config).await.unwrap());
        let old = client.put(KEY, &stamp(0).value(LONGEST)).await.unwrap();
        Self { table, client, server, old }
    }

    /// Writes the new value in two parts, and starts a GET in between. The second part follows when
    /// `until` returns true. Returns the new version and the result of the GET.
    async fn get_during_put(
        &self,
        split: usize,
        until: impl Fn(&KvClient, &JoinHandle<GetResult>) -> bool + Send + 'static,
    ) -> (u64, GetResult) {
        let (table, client) = (self.table.clone(), self.client.clone());
        let runtime = tokio::runtime::Handle::current();
        // The write holds the lock of the bucket, so it needs a thread that may block.
        let put = tokio::task::spawn_blocking(move || {
            table.put_with_pause(KEY, &stamp(1).value(LONGEST), split, || {
                let getting = runtime.spawn({
                    let client = client.clone();
                    async move { client.get(KEY).await }
                });
                // System clock: the server's task may block on the lock and with it the runtime's
                // timers.
                let start = Instant::now();
                while !until(&client, &getting) {
                    assert!(start.elapsed() < TIMEOUT, "the condition was not met");
                    std::thread::sleep(Duration::from_millis(1));
                }
                getting
            })
        });
        let (new, getting) = put.await.unwrap();
        let got = timeout(TIMEOUT, getting).await.unwrap().unwrap();
        (new, got)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// After the checksum, after the header, and within the value.
const SPLITS: [usize; 4] = [16, HEADER, 512, HEADER + LONGEST - 8];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn torn_read_is_retried_then_answered_by_the_server() {
    for split in SPLITS {
        let fixture = Fixture::new(ClientConfig::default()).await;
        // The server answers the client's message only when the PUT is complete.
        let (new, got) =
            fixture.get_during_put(split, |client, _| client.counters().fallbacks == 1).await;
        let found = got.unwrap().unwrap();
        assert_eq!(
            (found.version, Stamp::decode(&found.value, LONGEST)),
            (new, Ok(stamp(1))),
            "split {split}"
        );
        let counters = fixture.client.counters();
        assert_eq!(
            (counters.torn, counters.fallbacks),
            (u64::from(RETRIES) + 1, 1),
            "split {split}"
        );
        assert_eq!(fixture.client.get(KEY).await.unwrap().unwrap(), found);
        assert_eq!(fixture.client.counters().fallbacks, 1);
    }
}

/// Shows that the checker would detect a checksum that does not work.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn checker_detects_a_reader_without_checksums() {
    // With only the checksum replaced, the value is correct by chance.
    for split in SPLITS.into_iter().skip(1) {
        let fixture = Fixture::new(ClientConfig::default().accept_torn()).await;
        let (new, got) = fixture.get_during_put(split, |_, getting| getting.is_finished()).await;
        let found = got.unwrap().unwrap();
        let event = |start, end, outcome| Event { key: 0, start, end, outcome };
        let history = [
            event(0, 1, Outcome::Put { version: fixture.old, stamp: stamp(0) }),
            event(2, 5, Outcome::Put { version: new, stamp: stamp(1) }),
            event(
                3,
                4,
                Outcome::Found {
                    version: found.version,
                    value: Stamp::decode(&found.value, LONGEST),
                },
            ),
        ];
        let violation = check(&history).expect_err("a torn value");
        match split {
            // The old value with the new version.
            HEADER => assert!(matches!(violation, Violation::NotPut { .. }), "{violation}"),
            _ => assert!(matches!(violation, Violation::Torn { .. }), "{violation}"),
        }
    }
}
