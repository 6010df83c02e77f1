//! Lab 8: greedy clients, and the budget that they share with others. See
//! `examples/labs/docs/08-greedy.md`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use labs::{Peer, Result, check, in_time};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::{Connection, ConnectionConfig};

/// The bytes of buffers that the server has for all clients.
const BUDGET: u64 = 2 << 20;
/// The bytes of buffers that the server has for one client.
const SHARE: u64 = BUDGET / 2;
/// The length of the honest clients' requests and of their answers.
const HONEST: usize = 4 << 10;
/// The length of a greedy client's requests and of their answers, which need long receives.
const GREEDY: usize = 8 << 10;
/// The bytes of the buffers with which a connection starts.
const FIRST: u64 = 10 * 384;
/// The time without progress after which a client that has stopped reading has filled all buffers.
const STUCK: Duration = Duration::from_millis(200);
/// The interval of the requests by which a client keeps the buffers that the server has for it.
const REMINDER: Duration = Duration::from_secs(1);

/// The conduct of the greedy client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    None,
    /// Receives answers until the server has registered buffers, and none from then on.
    StopsReading,
    /// Has the server register as many buffers as it does, on this number of connections, and then
    /// does next to nothing.
    Hoards(usize),
}

const ATTACKS: [(Attack, &str); 4] = [
    (Attack::None, "none"),
    (Attack::StopsReading, "stops reading"),
    (Attack::Hoards(1), "hoards, 1 connection"),
    (Attack::Hoards(16), "hoards, 16 connections"),
];

impl Attack {
    fn connections(self) -> usize {
        match self {
            Self::None => 0,
            Self::StopsReading => 1,
            Self::Hoards(connections) => connections,
        }
    }
}

/// The extent of the lab.
struct Extent {
    rounds: usize,
    clients: usize,
    /// The requests of each client.
    requests: usize,
    /// The requests by which a greedy client has buffers registered.
    burst: usize,
}

impl Extent {
    fn new(peer: &Peer) -> Self {
        if peer.quick {
            Self { rounds: 1, clients: 3, requests: 20, burst: 200 }
        } else {
            Self { rounds: 11, clients: 8, requests: 4000, burst: 1000 }
        }
    }
}

/// The results of an attack in one round.
struct Phase {
    p50: Duration,
    p99: Duration,
    /// Bytes of the budget that the greedy client has.
    share: u64,
}

fn main() -> ExitCode {
    labs::run("greedy", client, server)
}

async fn client(mut peer: Peer) -> Result<()> {
    let extent = Extent::new(&peer);
    let mut phases: [Vec<Phase>; ATTACKS.len()] = Default::default();
    for _ in 0..extent.rounds {
        for ((attack, _), phases) in ATTACKS.into_iter().zip(&mut phases) {
            phases.push(attacked(&mut peer, &extent, attack).await?);
        }
    }
    println!(
        "{} clients beside a greedy one, {} rounds\n\n{:<23} {:>8} {:>8} {:>11} {:>16}",
        extent.clients,
        extent.rounds,
        "greedy client",
        "p50 µs",
        "p99 µs",
        "p99 ratio",
        "of the budget"
    );
    for ((_, name), attacked) in ATTACKS.iter().zip(&phases) {
        let micros = |of: fn(&Phase) -> Duration| {
            median(attacked.iter().map(|phase| of(phase).as_secs_f64() * 1e6))
        };
        let pairs = attacked.iter().zip(&phases[0]);
        let ratio =
            median(pairs.map(|(with, without)| with.p99.as_secs_f64() / without.p99.as_secs_f64()));
        let share = attacked.iter().map(|phase| phase.share).max().unwrap_or(0);
        println!(
            "{name:<23} {:>8.0} {:>8.0} {ratio:>11.2} {:>14.1} %",
            micros(|phase| phase.p50),
            micros(|phase| phase.p99),
            share as f64 * 100.0 / BUDGET as f64,
        );
    }
    peer.barrier().await
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Attacks the server, and measures its other clients meanwhile.
async fn attacked(peer: &mut Peer, extent: &Extent, attack: Attack) -> Result<Phase> {
    let config = ConnectionConfig::default();
    let mut greedy = Vec::new();
    for _ in 0..attack.connections() {
        greedy.push(peer.connection(&config).await?);
    }
    for connection in &greedy {
        exchange(connection, extent.burst).await?;
        if attack == Attack::StopsReading {
            fill(connection).await?;
        }
    }
    peer.barrier().await?;
    // The others come later, and find what the greedy client has left.
    let mut honest = Vec::new();
    for _ in 0..extent.clients {
        honest.push(peer.connection(&config).await?);
    }
    peer.barrier().await?;

    let mut clients = JoinSet::new();
    for (number, connection) in honest.into_iter().enumerate() {
        clients.spawn(requests(connection, number, extent.requests));
    }
    let mut times = Vec::new();
    let measuring = async {
        while let Some(done) = clients.join_next().await {
            times.extend(done??);
        }
        Result::Ok(())
    };
    let reminding = async {
        loop {
            sleep(REMINDER).await;
            if let Attack::Hoards(_) = attack {
                for connection in &greedy {
                    exchange(connection, 1).await?;
                }
            }
        }
    };
    tokio::select! {
        measured = measuring => measured?,
        failed = reminding => return failed,
    }
    peer.barrier().await?;
    let share = peer.exchange(&[]).await?;
    for connection in greedy {
        connection.abort();
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    Ok(Phase { p50: at(50), p99: at(99), share: u64::from_be_bytes(share[..].try_into()?) })
}

/// Sends requests until no more are accepted.
async fn fill(connection: &Connection) -> Result<()> {
    let request = Bytes::from(vec![0; GREEDY]);
    while let Ok(sent) = timeout(STUCK, connection.send(request.clone())).await {
        sent?;
    }
    Ok(())
}

/// Sends requests, several at once, and receives their answers.
async fn exchange(connection: &Connection, requests: usize) -> Result<()> {
    let request = Bytes::from(vec![0; GREEDY]);
    let sending = async {
        for _ in 0..requests {
            connection.send(request.clone()).await?;
        }
        Result::Ok(())
    };
    let receiving = async {
        for _ in 0..requests {
            connection.recv().await?.ok_or("the server has finished")?;
        }
        Result::Ok(())
    };
    in_time("a greedy client's requests", async { tokio::try_join!(sending, receiving) }).await?;
    Ok(())
}

/// Sends requests one at a time, and returns their times.
async fn requests(connection: Connection, number: usize, requests: usize) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(requests);
    for at in 0..requests {
        let request = Bytes::from(vec![(number + at) as u8; HONEST]);
        let start = Instant::now();
        in_time("a request", connection.send(request.clone())).await?;
        let answer = in_time("an answer", connection.recv()).await?;
        times.push(start.elapsed());
        check("the answer", answer.as_ref() == Some(&request), true)?;
    }
    in_time("an orderly end", connection.close()).await?;
    Ok(times)
}

async fn server(mut peer: Peer) -> Result<()> {
    let extent = Extent::new(&peer);
    for _ in 0..extent.rounds {
        for (attack, _) in ATTACKS {
            serve(&mut peer, &extent, attack).await?;
        }
    }
    peer.barrier().await
}

async fn serve(peer: &mut Peer, extent: &Extent, attack: Attack) -> Result<()> {
    let budget = BufferBudget::new(BUDGET);
    let greedy = budget.part(SHARE);
    let (mut attackers, mut others) = (JoinSet::new(), JoinSet::new());
    let config = ConnectionConfig::default().budget(&greedy);
    for _ in 0..attack.connections() {
        attackers.spawn(answer(peer.connection(&config).await?));
    }
    peer.barrier().await?;
    for _ in 0..extent.clients {
        let config = ConnectionConfig::default().budget(&budget.part(SHARE));
        others.spawn(answer(peer.connection(&config).await?));
    }
    peer.barrier().await?;
    // The clients are measured meanwhile.
    peer.barrier().await?;
    let used = greedy.counters().used;
    peer.exchange(&used.to_be_bytes()).await?;
    check("more than its share", used > SHARE, false)?;
    let first = FIRST * attack.connections() as u64;
    check("more than the first buffers", used > first, attack != Attack::None)?;
    // It loses its connections, and the others end in order.
    attackers.shutdown().await;
    in_time("the clients' end", async {
        while let Some(served) = others.join_next().await {
            served??;
        }
        Result::Ok(())
    })
    .await
}

/// Answers each request with its content.
async fn answer(connection: Connection) -> Result<()> {
    while let Some(request) = connection.recv().await? {
        connection.send(request).await?;
    }
    Ok(connection.close().await?)
}
