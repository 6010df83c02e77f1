//! The faults: what happens to each server, and to the network.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep};
use tokio_rdma::software::Faults;

use super::servers::{Server, Stop};
use super::time::{MS, Pace, delays};
use super::world::World;
use crate::torture::joined;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Stop(Stop),
    /// Nothing passes between the server and some of the clients.
    Partition,
    /// Nothing passes in one direction.
    OneWay,
    /// The server's port goes down and up again.
    Port,
    /// The server's process is stopped, and continues later.
    Pause,
}

impl Fault {
    /// Returns all kinds that happen to servers.
    pub(crate) fn kinds(pace: Pace) -> &'static [Self] {
        match pace {
            Pace::Virtual | Pace::Real => &[
                Self::Stop(Stop::Shutdown),
                Self::Stop(Stop::Drop),
                Self::Stop(Stop::Removal),
                Self::Stop(Stop::PowerLoss),
                Self::Partition,
                Self::OneWay,
                Self::Port,
            ],
            Pace::Processes => &[
                Self::Stop(Stop::Shutdown),
                Self::Stop(Stop::Kill),
                Self::Stop(Stop::KillAfterExecution),
                Self::Pause,
            ],
        }
    }
}

/// Lets faults happen for `duration`, then repairs all.
pub(crate) async fn inject<S: Server>(
    world: &Arc<World>,
    servers: Vec<S>,
    duration: Duration,
) -> Vec<S> {
    let end = Instant::now() + duration;
    let each = (0..).zip(servers).map(|(number, server)| {
        tokio::spawn(inject_into(world.clone(), server, world.random(10 + number), end))
    });
    let each: Vec<_> = each.collect();
    let network = tokio::spawn(inject_into_network(world.clone(), end));
    let mut servers = Vec::new();
    for server in each {
        servers.push(joined(server).await);
    }
    joined(network).await;
    world.network.set_faults(delays());
    servers
}

async fn inject_into<S: Server>(
    world: Arc<World>,
    mut server: S,
    mut random: Rng,
    end: Instant,
) -> S {
    loop {
        sleep(random.u32(20..250) * MS).await;
        if Instant::now() >= end {
            return server;
        }
        let fault = world.next_fault(&mut random);
        let lasts = random.u32(0..150) * MS;
        world.print(|| format!("{}: {fault:?} for {lasts:?}", server.name()));
        server.suffer(fault, lasts, &mut random).await;
        world.print(|| format!("{}: {fault:?} is over", server.name()));
    }
}

/// Returns delays that let a server be killed and started again before what a client has sent
/// arrives: for example the confirmation of a connection whose request the killed server executed.
pub(crate) fn late() -> Faults {
    delays().delay(MS..400 * MS).duplicate(0.6).reorder(0.2)
}

/// Changes losses and delays of the whole network.
async fn inject_into_network(world: Arc<World>, end: Instant) {
    let mut random = world.random(1);
    let micros = Duration::from_micros;
    while Instant::now() < end {
        let faults = match random.u8(..if world.pace == Pace::Processes { 5 } else { 4 }) {
            4 => late(),
            0 => delays(),
            1 => delays().loss(0.02).duplicate(0.02),
            2 => delays().reorder(0.05).corrupt(0.01),
            _ => delays().loss(0.01).delay(micros(20)..micros(1500)),
        };
        world.network.set_faults(faults);
        sleep(random.u32(50..300) * MS).await;
    }
}
