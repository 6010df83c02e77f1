//! Tests of the service in one process: results, refusals, and failed or hostile peers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kv::{ClientConfig, KvClient, KvError, Layout, ProtocolError, Refusal, Server};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rdma::software::Network;
use tokio_rdma::{Access, Connection, ConnectionConfig, Device, Listener, RemoteRegion};

const TIMEOUT: Duration = Duration::from_secs(60);

fn device() -> Device {
    Device::software_in(&Network::new(), "one").unwrap()
}

/// A server, aborted on drop.
struct Running {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Running {
    async fn new(device: &Device, layout: Layout) -> Self {
        let server = Server::bind(device, "127.0.0.1:0", layout).await.unwrap();
        let address = server.local_addr().unwrap();
        Self { address, task: tokio::spawn(async move { drop(server.run().await) }) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn within_timeout<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(TIMEOUT, work).await.unwrap_or_else(|_| panic!("{what} timed out after {TIMEOUT:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn all_clients_read_a_value_until_it_is_deleted() {
    let device = device();
    let server = Running::new(&device, Layout::new(64, 4, 32, 300).unwrap()).await;
    let a = KvClient::connect(&device, server.address).await.unwrap();
    let b = KvClient::connect(&device, server.address).await.unwrap();
    let mut version = 0;
    // Each length, ascending and descending, over the stale bytes of other values.
    for len in (0..=300).chain((0..300).rev()) {
        let value = vec![len as u8; len];
        let put = within_timeout("put", a.put(b"key", &value)).await.unwrap();
        assert!(put > version);
        version = put;
        for found in [b.get(b"key").await, b.get_by_message(b"key").await, a.get(b"key").await] {
            let found = found.unwrap().unwrap();
            assert_eq!((found.version, &found.value[..]), (version, &value[..]));
        }
    }
    assert!(b.delete(b"key").await.unwrap().unwrap() > version);
    assert_eq!((a.get(b"key").await, a.get_by_message(b"key").await), (Ok(None), Ok(None)));
    assert_eq!(a.delete(b"key").await, Ok(None));
    assert_eq!((a.counters().fallbacks, b.counters().torn), (0, 0));
    within_timeout("close", a.close()).await.unwrap();
    within_timeout("close", b.close()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn displaced_keys_are_found_and_full_bucket_refuses() {
    let device = device();
    let server = Running::new(&device, Layout::new(1, 8, 32, 16).unwrap()).await;
    let client = KvClient::connect(&device, server.address).await.unwrap();
    let key = |number: u8| [b'k', number];
    for number in 0..8 {
        client.put(&key(number), &[number]).await.unwrap();
    }
    assert_eq!(client.put(&key(8), b"").await, Err(Refusal::Full { slots: 8 }.into()));
    for number in 0..8 {
        assert_eq!(client.get(&key(number)).await.unwrap().unwrap().value[..], [number]);
    }
    assert_eq!(client.get(&key(8)).await, Ok(None));
    client.delete(&key(3)).await.unwrap().unwrap();
    client.put(&key(8), &[8]).await.unwrap();
    assert_eq!(client.get(&key(8)).await.unwrap().unwrap().value[..], [8]);
    assert_eq!(client.get(&key(3)).await, Ok(None));
}

#[tokio::test]
async fn lengths_beyond_the_limits_are_refused_with_the_limits() {
    let device = device();
    let server = Running::new(&device, Layout::new(4, 2, 8, 16).unwrap()).await;
    let client = KvClient::connect(&device, server.address).await.unwrap();
    let key = |len| Err(KvError::from(Refusal::KeyLength { len, allowed: 8 }));
    assert_eq!(client.put(&[1; 9], b"").await, key(9));
    assert_eq!(client.put(b"", b"").await, key(0));
    assert_eq!(client.delete(b"").await.map(|_| 0), key(0));
    assert_eq!(client.get(&[1; 9]).await.map(|_| 0), key(9));
    assert_eq!(client.get_by_message(&[1; 9]).await.map(|_| 0), key(9));
    let error = client.put(b"k", &[0; 17]).await.unwrap_err();
    assert_eq!(error, Refusal::ValueLength { len: 17, allowed: 16 }.into());
    assert_eq!(error.to_string(), "value of 17 bytes refused; the limit is 16");
    client.put(&[1; 8], &[2; 16]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn longest_values_are_written_and_read() {
    let device = device();
    let server = Running::new(&device, Layout::new(2, 2, 1024, Layout::MAX_VALUE).unwrap()).await;
    let client = KvClient::connect(&device, server.address).await.unwrap();
    let (key, value) = ([7; 1024], vec![9; Layout::MAX_VALUE as usize]);
    within_timeout("put", client.put(&key, &value)).await.unwrap();
    for found in [client.get(&key).await, client.get_by_message(&key).await] {
        assert_eq!(found.unwrap().unwrap().value, value);
    }
}

// Failed peers.

#[tokio::test(flavor = "multi_thread")]
async fn calls_fail_when_the_server_stops() {
    let device = device();
    let server = Running::new(&device, Layout::new(64, 4, 8, 64).unwrap()).await;
    let config = ClientConfig::default().deadline(TIMEOUT / 4);
    let client = Arc::new(KvClient::connect_with(&device, server.address, config).await.unwrap());
    let done = Arc::new(AtomicU64::new(0));
    let calls: Vec<_> = (0..12_u64)
        .map(|number| {
            let (client, done) = (client.clone(), done.clone());
            tokio::spawn(async move {
                let key = number.to_be_bytes();
                loop {
                    let result = match number % 3 {
                        0 => client.put(&key, &key).await.map(drop),
                        1 => client.get(&key).await.map(drop),
                        _ => client.get_by_message(&key).await.map(drop),
                    };
                    if let Err(error) = result {
                        return error;
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    within_timeout("some calls", async {
        while done.load(Ordering::Relaxed) < 1000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    drop(server);
    for call in calls {
        let error = within_timeout("a call", call).await.unwrap();
        assert!(!matches!(error, KvError::Refused(_) | KvError::Protocol(_)), "{error:?}");
    }
    let error = within_timeout("a late call", client.put(b"late", b"")).await.unwrap_err();
    assert!(matches!(error, KvError::Connection(_) | KvError::ServerClosed), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_to_a_silent_server_end_at_the_deadline() {
    let device = device();
    let fake = FakeServer::new(&device, Layout::new(1, 1, 8, 8).unwrap(), |_| None).await;
    let config = ClientConfig::default().deadline(Duration::from_secs(1));
    let client = KvClient::connect_with(&device, fake.address, config).await.unwrap();
    let late = KvError::Deadline(Duration::from_secs(1));
    assert_eq!(within_timeout("put", client.put(b"k", b"v")).await, Err(late.clone()));
    assert_eq!(within_timeout("get", client.get_by_message(b"k")).await, Err(late.clone()));
    // An invalid slot counts as torn.
    assert_eq!(within_timeout("get", client.get(b"k")).await, Err(late));
    assert_eq!(client.counters().fallbacks, 1);
}

// Hostile peers.

/// A server with valid user data and zeroed memory, whose answers the test supplies.
struct FakeServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl FakeServer {
    async fn new(
        device: &Device,
        layout: Layout,
        answer: impl Fn(Bytes) -> Option<Vec<u8>> + Send + 'static,
    ) -> Self {
        let pd = device.protection_domain().unwrap();
        let memory = tokio_rdma::ExposedRegion::new(
            &pd,
            vec![0; layout.bytes() as usize],
            Access::REMOTE_READ,
        )
        .unwrap();
        Self::with_user_data(
            device,
            &pd,
            user_data(layout, memory.grant()),
            async move |connection| {
                let _memory = memory;
                while let Ok(Some(message)) = connection.recv().await {
                    if let Some(answer) = answer(message) {
                        connection.send(answer).await.ok();
                    }
                }
            },
        )
        .await
    }

    async fn with_user_data<F: Future<Output = ()> + Send>(
        device: &Device,
        pd: &tokio_rdma::ProtectionDomain,
        user_data: Vec<u8>,
        serve: impl FnOnce(Connection) -> F + Send + 'static,
    ) -> Self {
        let config = ConnectionConfig::default().protection_domain(pd).user_data(user_data);
        let listener = Listener::bind_with(device, "127.0.0.1:0", &config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            if let Ok(connection) = listener.accept().await {
                serve(connection).await;
            }
        });
        Self { address, task }
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn user_data(layout: Layout, table: RemoteRegion) -> Vec<u8> {
    let fields =
        [layout.buckets(), layout.slots(), layout.max_key() as u32, layout.max_value() as u32];
    [b"kv 1", &fields.map(u32::to_le_bytes).concat()[..], &table.to_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_user_data_of_a_server_is_refused() {
    let device = device();
    let pd = device.protection_domain().unwrap();
    let layout = Layout::new(1, 1, 8, 8).unwrap();
    let table =
        |addr, len| user_data(layout, RemoteRegion::new(addr, len, tokio_rdma::types::Rkey(0)));
    let (short, wraps) = (table(0, layout.bytes() - 1), table(u64::MAX - 1, layout.bytes()));
    for user_data in [Vec::new(), b"kv 2 and more".to_vec(), vec![0xff; 100], short, wraps] {
        let fake = FakeServer::with_user_data(&device, &pd, user_data, async |_| ()).await;
        let error =
            within_timeout("connect", KvClient::connect(&device, fake.address)).await.unwrap_err();
        assert!(matches!(error, KvError::Protocol(_)), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_answers_are_errors() {
    type Answer = fn(Bytes) -> Option<Vec<u8>>;
    let answers: [(Answer, ProtocolError); 5] = [
        (|_| Some(vec![1, 2, 3]), ProtocolError::Length { len: 3 }),
        // An answer to a request that was not made.
        (
            |_| Some([&[9; 8][..], &[2]].concat()),
            ProtocolError::UnknownRequest(0x0909_0909_0909_0909),
        ),
        (|message| Some([&message[..8], &[77]].concat()), ProtocolError::Kind(77)),
        // A truncated answer.
        (|message| Some([&message[..8], &[3, 0, 0]].concat()), ProtocolError::Length { len: 11 }),
        // `Absent` as the answer to a PUT.
        (|message| Some([&message[..8], &[2]].concat()), ProtocolError::Answer),
    ];
    for (answer, expected) in answers {
        let device = device();
        let fake = FakeServer::new(&device, Layout::new(1, 1, 8, 8).unwrap(), answer).await;
        let client = KvClient::connect(&device, fake.address).await.unwrap();
        assert_eq!(within_timeout("put", client.put(b"k", b"v")).await, Err(expected.into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn table_that_cannot_be_read_is_an_error() {
    let device = device();
    let pd = device.protection_domain().unwrap();
    let layout = Layout::new(1, 1, 8, 8).unwrap();
    let nowhere = RemoteRegion::new(4096, layout.bytes(), tokio_rdma::types::Rkey(0xdead));
    let fake =
        FakeServer::with_user_data(&device, &pd, user_data(layout, nowhere), async |connection| {
            drop(connection.recv().await);
        })
        .await;
    let client = KvClient::connect(&device, fake.address).await.unwrap();
    let error = within_timeout("get", client.get(b"k")).await.unwrap_err();
    assert!(matches!(error, KvError::Read(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_clients_are_disconnected_and_others_continue() {
    let device = device();
    let server = Running::new(&device, Layout::new(4, 2, 8, 16).unwrap()).await;
    let honest = KvClient::connect(&device, server.address).await.unwrap();
    honest.put(b"key", b"value").await.unwrap();
    let put_of_a_longer_key = [&[0; 8][..], &[2, 0xff, 0xff], b"key"].concat();
    for message in [vec![], vec![1], vec![0xff; 40], put_of_a_longer_key] {
        let hostile = Connection::connect(&device, server.address).await.unwrap();
        hostile.send(message.clone()).await.unwrap();
        let answer = within_timeout("the end", hostile.recv()).await;
        assert!(answer.is_err(), "{message:?}: {answer:?}");
    }
    // Valid requests that `KvClient` never sends.
    let curious = Connection::connect(&device, server.address).await.unwrap();
    for (request, answer) in [
        ([&[0; 8][..], &[1], &[7; 30]].concat(), 2_u8),
        ([&[0; 8][..], &[2, 0, 0]].concat(), 4),
        ([&[0; 8][..], &[2, 1, 0, b'k'], &[0; 17]].concat(), 5),
        ([&[0; 8][..], &[3]].concat(), 2),
    ] {
        curious.send(request.clone()).await.unwrap();
        let answered = within_timeout("an answer", curious.recv()).await.unwrap().unwrap();
        assert_eq!(answered[8], answer, "{request:?}: {answered:?}");
    }
    // Only the server may write the table.
    let table = curious.user_data().slice(20..);
    let table = RemoteRegion::from_bytes(&table).unwrap();
    let written =
        curious.write(curious.copy_from(&[0xff; 64]).unwrap(), table.slice(..64).unwrap()).await;
    assert!(written.is_err());
    assert_eq!(honest.get(b"key").await.unwrap().unwrap().value, "value");
    honest.put(b"key", b"other").await.unwrap();
    assert_eq!(honest.get(b"key").await.unwrap().unwrap().value, "other");
}
