//! The faults: what happens to each server, and to the network.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep};

use crate::servers::{Server, Stop};
use crate::time::{MS, calm};
use crate::torture::joined;
use crate::world::{FAULTS, World};

#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    Stop(Stop),
    /// Nothing passes between the server and some of the clients.
    Partition,
    /// Nothing passes in one direction.
    OneWay,
    /// The server's port goes down and up again.
    Port,
}

const KINDS: [Fault; FAULTS] = [
    Fault::Stop(Stop::Shutdown),
    Fault::Stop(Stop::Drop),
    Fault::Stop(Stop::Removal),
    Fault::Stop(Stop::PowerLoss),
    Fault::Partition,
    Fault::OneWay,
    Fault::Port,
];

/// Lets faults happen for `duration`, then repairs all.
pub(crate) async fn rule(
    world: &Arc<World>,
    servers: Vec<Server>,
    clients: &[String],
    duration: Duration,
) -> Vec<Server> {
    let end = Instant::now() + duration;
    let ruled = (0..).zip(servers).map(|(number, server)| {
        let clients = clients.to_vec();
        tokio::spawn(of_server(world.clone(), server, world.random(10 + number), clients, end))
    });
    let ruled: Vec<_> = ruled.collect();
    let weather = tokio::spawn(weather(world.clone(), end));
    let mut servers = Vec::new();
    for server in ruled {
        servers.push(joined(server).await);
    }
    joined(weather).await;
    servers
}

async fn of_server(
    world: Arc<World>,
    mut server: Server,
    mut random: Rng,
    clients: Vec<String>,
    end: Instant,
) -> Server {
    let (network, name) = (&world.network, server.name());
    loop {
        sleep(random.u32(20..250) * MS).await;
        if Instant::now() >= end {
            return server;
        }
        let fault = KINDS[world.next_fault(&mut random)];
        let lasts = random.u32(0..150) * MS;
        world.print(|| format!("{name}: {fault:?} for {lasts:?}"));
        match fault {
            Fault::Stop(how) => {
                server.stop(how).await;
                sleep(lasts).await;
                server.run().await;
            }
            Fault::Partition | Fault::OneWay => {
                let part = random.u8(1..=4);
                let to_server = random.bool();
                let cut: Vec<_> = clients.iter().filter(|_| random.u8(..4) < part).collect();
                let set = |loss: f64| {
                    for client in &cut {
                        let links = [network.link(client, &name), network.link(&name, client)];
                        let [to, from] = links.map(|link| link.expect("both exist"));
                        if matches!(fault, Fault::Partition) || to_server {
                            to.set_loss(loss);
                        }
                        if matches!(fault, Fault::Partition) || !to_server {
                            from.set_loss(loss);
                        }
                    }
                };
                set(1.0);
                sleep(lasts).await;
                set(0.0);
            }
            Fault::Port => {
                network.control(&name).expect("its device").set_port(false);
                sleep(lasts).await;
                network.control(&name).expect("its device").set_port(true);
            }
        }
        world.print(|| format!("{name}: {fault:?} is over"));
    }
}

/// Changes losses and delays of the whole network.
async fn weather(world: Arc<World>, end: Instant) {
    let mut random = world.random(1);
    let micros = Duration::from_micros;
    while Instant::now() < end {
        let faults = match random.u8(..4) {
            0 => calm(),
            1 => calm().loss(0.02).duplicate(0.02),
            2 => calm().reorder(0.05).corrupt(0.01),
            _ => calm().loss(0.01).delay(micros(20)..micros(1500)),
        };
        world.network.set_faults(faults);
        sleep(random.u32(50..300) * MS).await;
    }
    world.network.set_faults(calm());
}
