//! Clients that send numbered increments, and record their outcomes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rdma::cm::{ConnectError, ConnectStep};
use tokio_rdma::error::Outcome;
use tokio_rdma::peers::{PeerSet, PeerSetConfig, Reconnect, ReconnectState};
use tokio_rdma::{
    Connection, ConnectionConfig, Device, EstablishError, MessageError, RemoteRegion,
};

use super::servers::{INCREMENT, WORDS};
use super::time::{ATTEMPT, GREATEST_DELAY, MS};
use super::world::{Seen, World};
use crate::torture::{LONG, joined};

/// The longest window of requests.
const WINDOW: usize = 4;

/// A client and its tasks.
pub(crate) struct Client {
    tasks: Vec<JoinHandle<()>>,
}

impl Client {
    /// Starts a client with a [`Reconnect`] for each server, or with a [`PeerSet`].
    pub(crate) fn start(
        world: &Arc<World>,
        number: usize,
        device: &Device,
        addresses: &[SocketAddr],
    ) -> Self {
        let tasks = if number.is_multiple_of(2) {
            let start = |(server, &address)| {
                let task = ReconnectTask { world: world.clone(), client: number, server };
                tokio::spawn(task.run(device.clone(), address))
            };
            addresses.iter().enumerate().map(start).collect()
        } else {
            let client = PeerSetClient { world: world.clone(), client: number };
            vec![tokio::spawn(client.run(device.clone(), addresses.to_vec()))]
        };
        Self { tasks }
    }

    /// Waits until the client has reached all servers again after the end of the faults.
    pub(crate) async fn recover_and_close(self) {
        for task in self.tasks {
            joined(task).await;
        }
    }
}

/// Connects within [`ATTEMPT`].
async fn connect(
    world: Arc<World>,
    device: Device,
    address: SocketAddr,
    config: ConnectionConfig,
) -> Result<Connection, EstablishError> {
    let connecting = Connection::connect_with(&device, address, &config);
    let connection = match timeout(ATTEMPT, connecting).await {
        Ok(connected) => connected?,
        Err(_) => {
            let step = ConnectStep::Request;
            return Err(ConnectError::TimedOut { address, step, after: ATTEMPT }.into());
        }
    };
    world.generations.fetch_add(1, Ordering::Relaxed);
    Ok(connection)
}

/// Returns a request. The longest ones are fetched by the server.
fn message(kind: u8, id: u64, len: usize) -> Vec<u8> {
    let mut message = [&[kind][..], &id.to_le_bytes()].concat();
    message.resize(len.max(message.len()), id as u8);
    message
}

/// The lengths of requests, before the shortest is replaced.
const LENGTHS: [usize; 8] = [0, 0, 0, 0, 0, 300, 1000, 20_000];

/// Waits for the next message. Fails the test if the request has no outcome in time.
async fn answer(
    connection: &Connection,
    until: Instant,
) -> Result<Option<bytes::Bytes>, MessageError> {
    let answer = timeout_at(until, connection.recv()).await;
    answer.unwrap_or_else(|_| panic!("no outcome in time: {connection:?}"))
}

/// Sends increments and awaits their answers. Returns true if all are done.
async fn burst(
    world: &World,
    (client, server): (usize, usize),
    connection: &Connection,
    random: &mut fastrand::Rng,
) -> bool {
    let until = Instant::now() + world.pace.request_deadline();
    let mut sent = Vec::new();
    let mut good = true;
    for _ in 0..random.usize(1..=WINDOW) {
        let id = world.request(client, server);
        let len = LENGTHS[random.usize(..LENGTHS.len())];
        let sending = connection.send(message(INCREMENT, id, len));
        match timeout_at(until, sending).await.expect("`send` ends in time") {
            Ok(()) => sent.push(id),
            Err(error) => {
                assert!(matches!(error, MessageError::Closed(_)), "{error}");
                world.saw(id, Seen::NotSent);
                good = false;
            }
        }
    }
    let mut rest = None;
    for id in sent {
        if let Some(seen) = rest {
            world.saw(id, seen);
            continue;
        }
        let seen = match answer(connection, until).await {
            Ok(Some(answer)) => {
                let word = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
                assert_eq!(word(0), id, "the answer to another request");
                Seen::Done(Some(word(8)))
            }
            Ok(None) => Seen::MaybeExecuted,
            Err(error) => error.outcome().into(),
        };
        world.saw(id, seen);
        if !matches!(seen, Seen::Done(_)) {
            rest = Some(seen);
        }
    }
    good && rest.is_none()
}

/// Ends a connection whose server has finished.
async fn finish(world: &World, connection: &Connection) {
    if connection.close_reason().is_none() {
        let closed = timeout(world.pace.request_deadline(), connection.close()).await;
        if closed.is_err() {
            connection.abort();
        }
    }
}

/// The requests of a client to one server, over a [`Reconnect`].
struct ReconnectTask {
    world: Arc<World>,
    client: usize,
    server: usize,
}

impl ReconnectTask {
    async fn run(self, device: Device, address: SocketAddr) {
        let (world, ends) = (&self.world, (self.client, self.server));
        let mut random = world.random(1_000_000 + (self.client * 100 + self.server) as u64);
        let connector = {
            let (world, config) = (world.clone(), world.config(self.client));
            move || connect(world.clone(), device.clone(), address, config.clone())
        };
        let handle = Reconnect::with_connector(world.pace.policy(), connector).expect("a runtime");
        let watching = tokio::spawn(watch(handle.states()));
        let (mut last, mut grant, mut words) = (0, None, 0);
        let mut until = None;
        loop {
            let over = world.faults_are_over();
            let connected = if over {
                let until = *until.get_or_insert_with(|| Instant::now() + world.pace.recovery());
                assert!(Instant::now() < until, "no answer in time: {ends:?}");
                timeout_at(until, handle.connected()).await.expect("connects again in time")
            } else {
                handle.connected().await
            };
            let (generation, connection) = connected.unwrap_or_else(|error| panic!("{error}"));
            assert!(generation >= last, "generation {generation} after {last}");
            if generation > last {
                (last, grant, words) = (generation, None, 0);
                if world.pace.keeps_memory() {
                    // The first message of each connection.
                    match answer(&connection, Instant::now() + world.pace.recovery()).await {
                        Ok(Some(bytes)) => grant = RemoteRegion::from_bytes(&bytes),
                        Ok(None) => finish(world, &connection).await,
                        Err(_) => {}
                    }
                }
            }
            if world.pace.keeps_memory() && grant.is_none() {
                connection.closed().await;
                continue;
            }
            let good = burst(world, ends, &connection, &mut random).await;
            if good && over {
                break;
            }
            if !good {
                finish(world, &connection).await;
            }
            if let Some(grant) = grant
                && words < WORDS
                && random.u8(..4) == 0
            {
                self.write(&connection, grant, words).await;
                words += 1;
            }
            drop(connection);
            sleep(random.u32(1..300) * MS).await;
        }
        // The server need not finish at once.
        let closing = async {
            let _ = handle.close().await;
        };
        let _ = timeout(world.pace.request_deadline(), closing).await;
        drop(handle);
        watching.await.expect("no panic");
    }

    /// Writes the number of a request to the server's memory.
    async fn write(&self, connection: &Connection, grant: RemoteRegion, word: usize) {
        let id = self.world.request(self.client, self.server);
        let at = 8 * word as u64;
        let remote = grant.slice(at..at + 8).expect("in bounds");
        let written = connection.write_inline(&id.to_le_bytes(), remote);
        let written = timeout(self.world.pace.request_deadline(), written)
            .await
            .expect("`write` ends in time");
        self.world.saw(
            id,
            match written {
                Ok(()) => Seen::Done(None),
                Err(error) => error.outcome().into(),
            },
        );
    }
}

/// Checks the delays between attempts.
async fn watch(mut states: tokio_rdma::peers::ReconnectStates) {
    while let Some(state) = states.next().await {
        match state {
            ReconnectState::Waiting { delay, cause } => {
                assert!(delay <= GREATEST_DELAY, "{delay:?}: {cause}");
            }
            ReconnectState::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

/// A client with a [`PeerSet`], whose tasks call random servers.
struct PeerSetClient {
    world: Arc<World>,
    client: usize,
}

impl PeerSetClient {
    async fn run(self, device: Device, addresses: Vec<SocketAddr>) {
        let servers = addresses.len();
        let settings = PeerSetConfig::default()
            // Fewer than servers, so that some are evicted.
            .max_peers(3)
            .max_in_flight_per_peer(1)
            .idle_timeout(Some(40 * MS))
            .attempt_timeout(LONG);
        let connector = {
            let (world, config) = (self.world.clone(), self.world.config(self.client));
            move |&server: &usize| {
                connect(world.clone(), device.clone(), addresses[server], config.clone())
            }
        };
        let peers = Arc::new(PeerSet::with_connector(settings, connector).expect("a runtime"));
        // The connections whose grant was received.
        let greeted = Arc::new(Mutex::new(HashMap::new()));
        let this = Arc::new(self);
        let tasks: Vec<_> = (0..2)
            .map(|task| {
                let (this, peers, greeted) = (this.clone(), peers.clone(), greeted.clone());
                tokio::spawn(async move { this.call(task, servers, &peers, &greeted).await })
            })
            .collect();
        for task in tasks {
            joined(task).await;
        }
        let mut random = this.world.random(3_000_000 + this.client as u64);
        for server in 0..servers {
            let until = Instant::now() + this.world.pace.recovery();
            while !this.request(&peers, &greeted, server, &mut random).await {
                assert!(Instant::now() < until, "no connection to server {server} in time");
                sleep(MS).await;
            }
        }
    }

    async fn call(
        &self,
        task: usize,
        servers: usize,
        peers: &PeerSet<usize>,
        greeted: &Mutex<HashMap<usize, u64>>,
    ) {
        let mut random = self.world.random(2_000_000 + (self.client * 100 + task) as u64);
        while !self.world.faults_are_over() {
            let server = random.usize(..servers);
            self.request(peers, greeted, server, &mut random).await;
            sleep(random.u32(1..150) * MS).await;
        }
    }

    /// Sends a window of requests. Returns true if all are done.
    async fn request(
        &self,
        peers: &PeerSet<usize>,
        greeted: &Mutex<HashMap<usize, u64>>,
        server: usize,
        random: &mut fastrand::Rng,
    ) -> bool {
        let world = &self.world;
        let Ok(peer) = peers.get(&server).await else {
            // Nothing was sent.
            let id = world.request(self.client, server);
            world.saw(id, Outcome::NotSent.into());
            return false;
        };
        let before = greeted.lock().insert(server, peer.generation());
        assert!(before.is_none_or(|before| before <= peer.generation()));
        if world.pace.keeps_memory() && before != Some(peer.generation()) {
            match answer(&peer, Instant::now() + world.pace.recovery()).await {
                Ok(Some(_)) => {}
                Ok(None) => {
                    finish(world, &peer).await;
                    return false;
                }
                Err(_) => return false,
            }
        }
        let good = burst(world, (self.client, server), &peer, random).await;
        if !good {
            finish(world, &peer).await;
        }
        good
    }
}
