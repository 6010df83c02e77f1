//! Clients of five servers that are restarted, killed and cut off at random.
//!
//! Each request to a server's counter has a number of its own and is never repeated. Its client
//! records its answer, or the outcome that its error names. Its server records each execution, and
//! keeps the records when it is restarted. `world.rs` compares both.
//!
//! The servers are tasks of this process, in virtual or real time, or processes of their own
//! (`processes.rs`).
//!
//! ```text
//! TOKIO_RDMA_SEEDS=1000 cargo test --release --test faults virtual
//!     runs 1000 seeds in virtual time
//! TOKIO_RDMA_SEED=17 cargo test --test faults virtual -- --nocapture
//!     runs one seed and prints each fault
//! TOKIO_RDMA_SECONDS=600 cargo test --release --test faults real_time
//!     runs for ten minutes on threads, in real time
//! TOKIO_RDMA_SECONDS=600 cargo test --release --test faults to_processes
//!     runs for ten minutes with servers that are processes
//! ```

mod clients;
mod disk;
mod faults;
#[path = "../../common/live.rs"]
mod live;
mod processes;
mod servers;
mod time;
#[allow(dead_code, reason = "other programs use the rest")]
#[path = "../../common/udp.rs"]
mod udp;
mod world;

use std::sync::Arc;
use std::time::Duration;

use tokio_rdma::Device;
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::software::Network;

use self::clients::Client;
use self::faults::Fault;
use self::processes::ServerProcess;
use self::servers::{LocalServer, Server};
use self::time::Pace;
use self::world::{Tally, World};
use crate::alone::alone;
use crate::torture::{LONG, Seed, bounded};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs one seed: chaos for `duration`, then a recovery, an orderly end, and the comparison.
async fn chaos<S: Server>(
    (pace, network): (Pace, Network),
    seed: u64,
    duration: Duration,
    verbose: bool,
) -> Tally {
    let budget = BufferBudget::new(1 << 30);
    let world = Arc::new(World::new(pace, network, seed, &budget, verbose));
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let device = |name: &String| Device::software_in(&world.network, name);
    let devices: Vec<_> =
        world.clients.iter().map(|name| device(name).expect("a client's device")).collect();
    let mut servers = Vec::new();
    for number in 0..pace.servers() {
        servers.push(S::start(&world, number).await);
    }
    let addresses: Vec<_> = servers.iter().map(Server::address).collect();
    let clients: Vec<_> = (devices.iter().enumerate())
        .map(|(number, device)| Client::start(&world, number, device, &addresses))
        .collect();
    drop(devices);

    servers = faults::inject(&world, servers, duration).await;
    world.end_faults();
    for client in clients {
        client.recover_and_close().await;
    }
    for server in &mut servers {
        server.shut_down().await;
    }
    drop(servers);
    for name in &world.clients {
        world.release(name).await;
    }
    assert_eq!(budget.counters().used, 0, "registered buffers of closed connections");
    world.eventually("end of all tasks", || tasks() <= before).await;
    world.compare()
}

/// Returns the allocated bytes and the open descriptors of the process, so each test is alone in
/// one.
fn in_use() -> (usize, usize) {
    (live::bytes(), std::fs::read_dir("/proc/self/fd").expect("descriptors").count())
}

/// Fails if a run has left something behind, beside what the process allocates once.
fn assert_freed(before: (usize, usize)) {
    let now = in_use();
    let freed = now.0 < before.0 + (64 << 10) && now.1 <= before.1;
    assert!(freed, "{before:?} bytes and descriptors before, {now:?} after");
}

#[test]
fn outcomes_are_truthful_and_clients_connect_again_in_virtual_time() {
    if !alone("chaos::outcomes_are_truthful_and_clients_connect_again_in_virtual_time") {
        return;
    }
    const SEEDS: u64 = if cfg!(debug_assertions) { 1 } else { 8 };
    let seconds = number("TOKIO_RDMA_SECONDS").unwrap_or(1);
    let chosen = number("TOKIO_RDMA_SEED");
    let seeds = match chosen {
        Some(seed) => seed..seed + 1,
        None => 0..number("TOKIO_RDMA_SEEDS").unwrap_or(SEEDS),
    };
    let (mut sum, before) = (Tally::default(), in_use());
    for seed in seeds {
        let _replay = Seed::chosen("--test faults virtual", seed);
        let limit = LONG * (4 + 2 * seconds as u32);
        let tally = bounded("chaos in virtual time", limit, move || {
            let duration = Duration::from_secs(seconds);
            time::in_virtual_time(seed, |pace, network| {
                chaos::<LocalServer>((pace, network), seed, duration, chosen.is_some())
            })
        });
        sum.add(&tally);
        println!("seed {seed}: {tally:?}");
        assert_freed(before);
    }
    println!("virtual time: {sum:?}");
    let Tally { done, not_sent, executed, lost, writes, generations, faults } = &sum;
    let counts = [done, not_sent, executed, lost, writes, generations];
    let eventful =
        counts.iter().all(|count| **count > 0) && faults.len() == Fault::kinds(Pace::Virtual).len();
    assert!(chosen.is_some() || eventful, "uneventful: {sum:?}");
}

#[test]
fn outcomes_are_truthful_and_clients_connect_again_in_real_time() {
    if !alone("chaos::outcomes_are_truthful_and_clients_connect_again_in_real_time") {
        return;
    }
    in_real_time("--test faults real_time", |seed, duration, verbose| {
        time::in_real_time(seed, |pace, network| {
            chaos::<LocalServer>((pace, network), seed, duration, verbose)
        })
    });
}

#[test]
fn outcomes_are_truthful_and_clients_connect_again_to_processes() {
    if !alone("chaos::outcomes_are_truthful_and_clients_connect_again_to_processes") {
        return;
    }
    in_real_time("--test faults to_processes", |seed, duration, verbose| {
        let names = Pace::Processes.clients();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let network = udp::network(&names);
        time::on_threads(chaos::<ServerProcess>(
            (Pace::Processes, network),
            seed,
            duration,
            verbose,
        ))
    });
}

/// Runs `test` with a seed, the duration of the faults, and whether each is printed.
fn in_real_time(
    command: &'static str,
    test: impl FnOnce(u64, Duration, bool) -> Tally + Send + 'static,
) {
    let seconds =
        number("TOKIO_RDMA_SECONDS").unwrap_or(if cfg!(debug_assertions) { 1 } else { 3 });
    let seed = Seed::new(command);
    let (value, verbose) = (seed.value, number("TOKIO_RDMA_SEED").is_some());
    let (limit, before) = (LONG * 4 + Duration::from_secs(seconds), in_use());
    let tally = bounded(command, limit, move || test(value, Duration::from_secs(seconds), verbose));
    println!("{command}: {tally:?}");
    assert_freed(before);
    // The machine decides about the rest.
    assert!(tally.done > 0, "uneventful: {tally:?}");
}
