//! Servers with a counter each, which can be stopped in several ways and started again.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tokio_rdma::{Access, Connection, Device, EstablishError, ExposedRegion, Listener};

use super::faults::Fault;
use super::time::MS;
use super::world::World;

/// Requests start with their kind.
pub(crate) const INCREMENT: u8 = 1;

/// The words of memory that each connection's client may write, once each.
pub(crate) const WORDS: usize = 32;

/// The port at which servers listen.
pub(crate) const PORT: u16 = 7000;

pub(crate) fn name(number: usize) -> String {
    format!("server-{number}")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// Answers what has arrived, and closes.
    Shutdown,
    /// Drops all connections, whose peers are notified.
    Drop,
    /// The device is removed.
    Removal,
    /// The host loses its power: it sends nothing more.
    PowerLoss,
    /// The process is killed.
    Kill,
    /// The process is killed between the execution of a request and its answer.
    KillAfterExecution,
}

/// A server that faults happen to.
pub(crate) trait Server: Sized + Send + 'static {
    /// Starts a server.
    fn start(world: &Arc<World>, number: usize) -> impl Future<Output = Self> + Send;

    fn name(&self) -> String;

    fn address(&self) -> SocketAddr;

    /// Lets a fault of a kind for this server happen, and repairs it after `lasts`.
    fn suffer(
        &mut self,
        fault: Fault,
        lasts: Duration,
        random: &mut Rng,
    ) -> impl Future<Output = ()> + Send;

    /// Ends the server for good, in order.
    fn shut_down(&mut self) -> impl Future<Output = ()> + Send;
}

/// A server of this process.
pub(crate) struct LocalServer {
    world: Arc<World>,
    number: usize,
    address: SocketAddr,
    device: Option<Device>,
    running: Option<Running>,
}

struct Running {
    /// Accepts until `stop`, then returns the listener.
    accepting: JoinHandle<Listener>,
    stop: oneshot::Sender<()>,
    serving: Arc<Mutex<JoinSet<()>>>,
}

impl Server for LocalServer {
    async fn start(world: &Arc<World>, number: usize) -> Self {
        let device = Device::software_in(&world.network, &name(number)).expect("a device");
        let ip = device.default_path().expect("a path").1.gid.to_ip();
        let address = SocketAddr::new(ip, PORT);
        let (world, device) = (world.clone(), Some(device));
        let mut server = Self { world, number, address, device, running: None };
        server.run().await;
        server
    }

    fn name(&self) -> String {
        name(self.number)
    }

    fn address(&self) -> SocketAddr {
        self.address
    }

    async fn suffer(&mut self, fault: Fault, lasts: Duration, random: &mut Rng) {
        match fault {
            Fault::Stop(how) => {
                self.stop(how).await;
                sleep(lasts).await;
                self.run().await;
            }
            Fault::Partition | Fault::OneWay => {
                let (network, name) = (&self.world.network, self.name());
                let part = random.u8(1..=4);
                let to_server = random.bool();
                let clients = self.world.clients.iter();
                let cut: Vec<_> = clients.filter(|_| random.u8(..4) < part).collect();
                let set = |loss: f64| {
                    for client in &cut {
                        let links = [network.link(client, &name), network.link(&name, client)];
                        let [to, from] = links.map(|link| link.expect("both exist"));
                        if fault == Fault::Partition || to_server {
                            to.set_loss(loss);
                        }
                        if fault == Fault::Partition || !to_server {
                            from.set_loss(loss);
                        }
                    }
                };
                set(1.0);
                sleep(lasts).await;
                set(0.0);
            }
            Fault::Port => {
                let (network, name) = (&self.world.network, self.name());
                network.control(&name).expect("its device").set_port(false);
                sleep(lasts).await;
                network.control(&name).expect("its device").set_port(true);
            }
            Fault::Pause => unreachable!("for processes"),
        }
    }

    async fn shut_down(&mut self) {
        self.stop(Stop::Shutdown).await;
        self.device = None;
        self.world.release(&self.name()).await;
    }
}

impl LocalServer {
    /// Starts to serve at the same address as before.
    async fn run(&mut self) {
        let device = match self.device.take() {
            Some(device) => device,
            None => Device::software_in(&self.world.network, &self.name()).expect("a new device"),
        };
        let config = self.world.config(self.number);
        let bound = Listener::bind_with(&device, self.address, &config).await;
        let listener = bound.unwrap_or_else(|error| panic!("{}: {error}", self.name()));
        self.device = Some(device);
        let (stop, mut stopped) = oneshot::channel();
        let serving = Arc::new(Mutex::new(JoinSet::new()));
        let (world, number, set) = (self.world.clone(), self.number, serving.clone());
        let accepting = tokio::spawn(async move {
            let accept = async {
                let mut part = 0;
                loop {
                    match listener.accept().await {
                        Ok(connection) => {
                            part += 1;
                            let random = world.random(1000 * (1 + number as u64) + part);
                            let serving = Serving::new(&world, number, connection);
                            let mut set = set.lock();
                            while let Some(served) = set.try_join_next() {
                                served.expect("no panic");
                            }
                            set.spawn(serving.run(random));
                        }
                        // The port is down.
                        Err(EstablishError::Setup(_)) => sleep(MS).await,
                        // The device was removed.
                        Err(error) => {
                            world.print(|| format!("{}: {error}", name(number)));
                            return;
                        }
                    }
                }
            };
            tokio::select! { biased; _ = &mut stopped => {}, () = accept => drop(stopped.await) }
            listener
        });
        self.running = Some(Running { accepting, stop, serving });
    }

    /// Stops serving. A later [`run`](Self::run) finds the device as it would after such an end.
    async fn stop(&mut self, how: Stop) {
        let Some(Running { accepting, stop, serving }) = self.running.take() else { return };
        let control = self.world.network.control(&self.name()).expect("its device");
        match how {
            Stop::Shutdown | Stop::Drop => {}
            Stop::Removal => control.kill(),
            Stop::PowerLoss => control.set_port(false),
            Stop::Kill | Stop::KillAfterExecution => unreachable!("for processes"),
        }
        drop(control);
        stop.send(()).expect("the server runs");
        let listener = accepting.await.expect("no panic");
        if how == Stop::Shutdown {
            let _ = listener.shutdown(100 * MS).await;
        } else {
            drop(listener);
        }
        let mut serving = std::mem::take(&mut *serving.lock());
        serving.abort_all();
        while let Some(served) = serving.join_next().await {
            assert!(served.as_ref().err().is_none_or(|error| error.is_cancelled()), "{served:?}");
        }
        if matches!(how, Stop::Removal | Stop::PowerLoss) {
            self.device = None;
            self.world.release(&self.name()).await;
        }
    }
}

/// One connection of a server.
struct Serving {
    world: Arc<World>,
    server: usize,
    /// `None` in the end.
    held: Option<(Connection, Option<ExposedRegion>)>,
}

impl Serving {
    fn new(world: &Arc<World>, server: usize, connection: Connection) -> Self {
        let region = connection.expose(vec![0_u8; 8 * WORDS], Access::REMOTE_ALL).ok();
        Self { world: world.clone(), server, held: Some((connection, region)) }
    }

    async fn run(self, mut random: fastrand::Rng) {
        let Some((connection, region)) = &self.held else { return };
        // Without a region, the device was removed.
        let Some(region) = region else { return };
        let grants = self.world.pace.keeps_memory();
        if grants && connection.send(region.grant()).await.is_err() {
            return;
        }
        loop {
            let request = match connection.recv().await {
                Ok(Some(request)) => request,
                Ok(None) => {
                    let _ = connection.close().await;
                    return;
                }
                Err(_) => return,
            };
            assert_eq!(request[0], INCREMENT);
            let id = u64::from_le_bytes(request[1..9].try_into().expect("eight bytes"));
            assert!(request[9..].iter().all(|&byte| byte == id as u8), "contents of {id}");
            slow(&mut random).await;
            let value = self.world.execute(self.server, id);
            slow(&mut random).await;
            let answer = [id.to_le_bytes(), value.to_le_bytes()].concat();
            if connection.send(answer).await.is_err() {
                return;
            }
        }
    }
}

/// Sometimes takes a while.
async fn slow(random: &mut fastrand::Rng) {
    if random.u8(..4) == 0 {
        sleep(random.u32(1..20) * MS).await;
    }
}

impl Drop for Serving {
    /// Reads what the client has written, after its last WRITE.
    fn drop(&mut self) {
        let Some((connection, region)) = self.held.take() else { return };
        let (world, server) = (self.world.clone(), self.server);
        connection.abort();
        tokio::spawn(async move {
            // The queue pair is closed then.
            let _ = connection.close().await;
            drop(connection);
            if let Some(region) = region {
                for word in 0..WORDS {
                    match region.load(8 * word).expect("in bounds") {
                        0 => {}
                        id => world.found(server, id),
                    }
                }
            }
        });
    }
}
