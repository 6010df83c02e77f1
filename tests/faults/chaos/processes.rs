//! Servers that are processes. Their clients are in the process of the test, over UDP.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::sleep;
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::software::{Network, UdpConfig, UdpError};

use super::faults::{Fault, late};
use super::servers::{LocalServer, PORT, Server, Stop, name};
use super::time::{MS, Pace, on_threads};
use super::udp;
use super::world::World;
use crate::torture::LONG;

/// Describes its server to a process: number, address, seed, and the file of its records.
const SETTING: &str = "TOKIO_RDMA_CHAOS";

/// Asks a server process to kill itself after its next request.
const KILL_AFTER_EXECUTION: u8 = 1;

/// A server that is a process.
pub(crate) struct ServerProcess {
    world: Arc<World>,
    number: usize,
    address: IpAddr,
    records: PathBuf,
    process: Option<Child>,
}

impl Server for ServerProcess {
    async fn start(world: &Arc<World>, number: usize) -> Self {
        let records = format!("tokio-rdma-chaos-{}-{number}", std::process::id());
        // An earlier process with this number may have been killed.
        let _ = std::fs::remove_file(std::env::temp_dir().join(&records));
        let mut server = Self {
            world: world.clone(),
            number,
            address: udp::address(),
            records: std::env::temp_dir().join(records),
            process: None,
        };
        server.run();
        server
    }

    fn name(&self) -> String {
        name(self.number)
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.address, PORT)
    }

    async fn suffer(&mut self, fault: Fault, lasts: Duration, random: &mut Rng) {
        match fault {
            // Again and again, soon after clients have connected: what they have sent to one
            // process arrives at the next one.
            Fault::Stop(Stop::Kill) => {
                for _ in 0..random.u32(1..8) {
                    self.stop(Stop::Kill).await;
                    sleep(lasts / 10).await;
                    self.run();
                    sleep(random.u32(50..200) * MS).await;
                }
            }
            // Started again at once, so that the next process rejects confirmations of connections
            // whose requests this one has executed.
            Fault::Stop(Stop::KillAfterExecution) => {
                for _ in 0..random.u32(1..8) {
                    self.world.network.set_faults(late());
                    self.stop(Stop::KillAfterExecution).await;
                    self.run();
                }
            }
            Fault::Stop(how) => {
                self.stop(how).await;
                sleep(lasts).await;
                self.run();
            }
            Fault::Pause => {
                self.signal(Signal::STOP);
                // Sometimes until its clients consider it lost.
                sleep(lasts * 5).await;
                self.signal(Signal::CONT);
            }
            Fault::Partition | Fault::OneWay | Fault::Port => unreachable!("for one process"),
        }
    }

    async fn shut_down(&mut self) {
        self.stop(Stop::Shutdown).await;
        self.world.open_disk(self.number, &self.records);
    }
}

impl ServerProcess {
    /// Starts a process, which serves at the same address as before.
    fn run(&mut self) {
        let Self { number, address, records, .. } = self;
        let setting = format!("{number} {address} {} {}", self.world.seed, records.display());
        let process = Command::new(std::env::current_exe().expect("the path of this program"))
            .args([
                "--exact",
                "chaos::processes::serve_in_a_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(SETTING, setting)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        self.process = Some(process.expect("a process"));
    }

    fn signal(&mut self, signal: Signal) {
        let (name, process) = (self.name(), self.process.as_mut().expect("it runs"));
        assert_eq!(process.try_wait().unwrap(), None, "{name} has exited");
        kill_process(Pid::from_child(process), signal).expect("it exists");
    }

    /// Asks the process to kill itself after its next request, and does so after a while.
    async fn kill_after_execution(&mut self) {
        let process = self.process.as_mut().expect("it runs");
        let input = process.stdin.as_mut().expect("it reads");
        input.write_all(&[KILL_AFTER_EXECUTION]).expect("it reads");
        let start = Instant::now();
        while process.try_wait().unwrap().is_none() {
            if start.elapsed() > 500 * MS {
                return self.signal(Signal::KILL);
            }
            sleep(MS).await;
        }
    }

    async fn stop(&mut self, how: Stop) {
        match how {
            Stop::Kill => self.signal(Signal::KILL),
            Stop::KillAfterExecution => self.kill_after_execution().await,
            _ => {}
        }
        let killed = matches!(how, Stop::Kill | Stop::KillAfterExecution);
        let mut process = self.process.take().expect("it runs");
        // The end of its input asks a server to shut down.
        drop(process.stdin.take());
        let start = Instant::now();
        let status = loop {
            if let Some(status) = process.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > LONG {
                let _ = process.kill();
                panic!("{} does not shut down", self.name());
            }
            sleep(MS).await;
        };
        assert!(killed || status.success(), "{}: {status}", self.name());
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = std::fs::remove_file(&self.records);
    }
}

/// Runs as the program of a server process, until the end of its input. Does nothing as a
/// test.
#[test]
fn serve_in_a_process() {
    let Ok(setting) = std::env::var(SETTING) else { return };
    let [number, address, seed, records] = setting.splitn(4, ' ').collect::<Vec<_>>()[..] else {
        panic!("{setting}")
    };
    let number: usize = number.parse().expect("a number");
    let network = network(&name(number), address.parse().expect("an address"));
    let (seed, budget) = (seed.parse().expect("a seed"), BufferBudget::new(1 << 30));
    let world = Arc::new(World::new(Pace::Processes, network, seed, &budget, false));
    world.open_disk(number, records.as_ref());
    on_threads(async {
        let mut server = LocalServer::start(&world, number).await;
        let input = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap();
        let mut input = pipe::Receiver::from_owned_fd(input).expect("a pipe");
        while let Ok(KILL_AFTER_EXECUTION) = input.read_u8().await {
            world.kill_after_execution();
        }
        server.shut_down().await;
    });
}

/// Creates a network with a server's device, on the port that [`udp::network`] selects for clients.
fn network(name: &str, address: IpAddr) -> Network {
    let on = |port| Network::udp(&UdpConfig::new().port(port).device(name, address));
    let network = match on(UdpConfig::PORT) {
        Err(UdpError::PortTaken { soft_roce: true, .. }) => on(UdpConfig::PORT + 1),
        network => network,
    };
    network.unwrap_or_else(|error| panic!("{name}: {error}"))
}
