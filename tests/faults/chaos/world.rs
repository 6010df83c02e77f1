//! The records of clients and servers, and their comparison.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process};
use tokio::time::{Instant, sleep};
use tokio_rdma::ConnectionConfig;
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::error::Outcome;
use tokio_rdma::software::Network;

use super::disk::Disk;
use super::faults::Fault;
use super::time::{MS, Pace};
use crate::torture::LONG;

/// The knowledge of a client of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Running,
    /// The answer, or nothing for a WRITE.
    Done(Option<u64>),
    NotSent,
    MaybeExecuted,
}

impl From<Outcome> for Seen {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::NotSent => Self::NotSent,
            Outcome::MaybeExecuted => Self::MaybeExecuted,
            Outcome::Done => panic!("an error does not tell that a request is done"),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Request {
    client: usize,
    server: usize,
    seen: Seen,
}

/// The counts of one or more runs.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) done: u64,
    pub(crate) not_sent: u64,
    /// Requests whose client does not know the outcome, and which were executed, or not.
    pub(crate) executed: u64,
    pub(crate) lost: u64,
    /// WRITEs among all these.
    pub(crate) writes: u64,
    /// Connections of clients.
    pub(crate) generations: u64,
    pub(crate) faults: BTreeMap<Fault, u64>,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.not_sent += other.not_sent;
        self.executed += other.executed;
        self.lost += other.lost;
        self.writes += other.writes;
        self.generations += other.generations;
        for (&fault, more) in &other.faults {
            *self.faults.entry(fault).or_default() += more;
        }
    }
}

pub(crate) struct World {
    pub(crate) pace: Pace,
    pub(crate) network: Network,
    budget: BufferBudget,
    pub(crate) seed: u64,
    verbose: bool,
    start: Instant,
    /// The names of the clients' devices.
    pub(crate) clients: Vec<String>,
    faults_are_over: AtomicBool,
    kill_after_execution: AtomicBool,
    requests: Mutex<Vec<Request>>,
    disks: Vec<Mutex<Disk>>,
    pub(crate) generations: AtomicU64,
    /// The number of each kind of fault, and kinds that are due before any is repeated.
    faults: Mutex<(BTreeMap<Fault, u64>, Vec<Fault>)>,
}

impl World {
    pub(crate) fn new(
        pace: Pace,
        network: Network,
        seed: u64,
        budget: &BufferBudget,
        verbose: bool,
    ) -> Self {
        Self {
            pace,
            network,
            budget: budget.clone(),
            seed,
            verbose,
            start: Instant::now(),
            clients: pace.clients(),
            faults_are_over: AtomicBool::new(false),
            kill_after_execution: AtomicBool::new(false),
            requests: Mutex::default(),
            disks: (0..pace.servers()).map(|_| Mutex::default()).collect(),
            generations: AtomicU64::new(0),
            faults: Mutex::default(),
        }
    }

    /// Returns the next kind of fault.
    pub(crate) fn next_fault(&self, random: &mut fastrand::Rng) -> Fault {
        let (counts, due) = &mut *self.faults.lock();
        if due.is_empty() {
            due.extend(Fault::kinds(self.pace));
        }
        let fault = due.swap_remove(random.usize(..due.len()));
        *counts.entry(fault).or_default() += 1;
        fault
    }

    /// Returns the settings of a client or server.
    pub(crate) fn config(&self, number: usize) -> ConnectionConfig {
        self.pace.config(number, &self.budget)
    }

    /// Returns a generator of its own for a part of the test.
    pub(crate) fn random(&self, part: u64) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed.wrapping_mul(1_000_003).wrapping_add(part))
    }

    pub(crate) fn print(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            println!("{:9.3} s: {}", self.start.elapsed().as_secs_f64(), what());
        }
    }

    /// Tells the clients that no more faults happen.
    pub(crate) fn end_faults(&self) {
        self.faults_are_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn faults_are_over(&self) -> bool {
        self.faults_are_over.load(Ordering::Relaxed)
    }

    /// Reads the records of a server that is a process, to which it appends.
    pub(crate) fn open_disk(&self, server: usize, path: &Path) {
        *self.disks[server].lock() = Disk::open(path);
    }

    /// Returns the number of a new request.
    pub(crate) fn request(&self, client: usize, server: usize) -> u64 {
        let mut requests = self.requests.lock();
        requests.push(Request { client, server, seen: Seen::Running });
        requests.len() as u64
    }

    /// Records what a client knows of its request.
    pub(crate) fn saw(&self, id: u64, seen: Seen) {
        let mut requests = self.requests.lock();
        let request = &mut requests[id as usize - 1];
        assert_eq!(request.seen, Seen::Running, "request {id} has two outcomes");
        request.seen = seen;
    }

    /// Increments a server's counter, and returns its value.
    pub(crate) fn execute(&self, server: usize, id: u64) -> u64 {
        let value = self.disks[server].lock().increment(id);
        if self.kill_after_execution.load(Ordering::Relaxed) {
            kill_process(getpid(), Signal::KILL).expect("this process");
        }
        value
    }

    /// Kills this process when it has executed the next request.
    pub(crate) fn kill_after_execution(&self) {
        self.kill_after_execution.store(true, Ordering::Relaxed);
    }

    /// Records a number that a WRITE has left.
    pub(crate) fn found(&self, server: usize, id: u64) {
        self.disks[server].lock().found(id);
    }

    /// Waits for a condition; fails after a minute in real time.
    pub(crate) async fn eventually(&self, what: &str, condition: impl Fn() -> bool) {
        let start = std::time::Instant::now();
        while !condition() {
            assert!(start.elapsed() < LONG, "{what} hangs");
            sleep(MS).await;
        }
    }

    /// Waits until a device is freed, with the last object that was made on it.
    pub(crate) async fn release(&self, device: &str) {
        self.eventually(device, || self.network.control(device).is_none()).await;
    }

    /// Compares what clients and servers have recorded.
    pub(crate) fn compare(&self) -> Tally {
        let requests = self.requests.lock();
        // How often each request was executed, and the last value of the counter.
        let mut executions: HashMap<u64, (u64, Option<u64>)> = HashMap::new();
        let mut tally = Tally {
            generations: self.generations.load(Ordering::Relaxed),
            faults: self.faults.lock().0.clone(),
            ..Tally::default()
        };
        for (server, disk) in self.disks.iter().enumerate() {
            let disk = disk.lock();
            tally.writes += disk.writes();
            for (id, value) in disk.executed() {
                let request = requests.get(id as usize - 1).unwrap_or_else(|| {
                    panic!("server {server} has executed {id}, which was never sent")
                });
                assert_eq!(request.server, server, "{id} was sent to another server");
                let execution = executions.entry(id).or_default();
                *execution = (execution.0 + 1, value);
            }
        }
        // Requests of one client to one server follow each other, except while some of them run at
        // the same time, which are numbered in the order of their sends.
        let mut newest: HashMap<(usize, usize), u64> = HashMap::new();
        for (id, request) in (1..).zip(&*requests) {
            let (times, value) = executions.get(&id).copied().unwrap_or_default();
            let Request { client, server, seen } = *request;
            assert!(times <= 1, "{id} was executed {times} times: {request:?}");
            match seen {
                Seen::Running => panic!("{id} has no outcome: {request:?}"),
                Seen::NotSent => {
                    assert_eq!(times, 0, "{id} was executed: {request:?}");
                    tally.not_sent += 1;
                }
                Seen::Done(answer) => {
                    assert_eq!(times, 1, "{id} was not executed: {request:?}");
                    assert_eq!(answer, value, "{id} has another answer: {request:?}");
                    if let Some(answer) = answer {
                        let before = newest.insert((client, server), answer).unwrap_or(0);
                        assert!(before < answer, "{id}: {answer} after {before}: {request:?}");
                    }
                    tally.done += 1;
                }
                Seen::MaybeExecuted if times == 1 => tally.executed += 1,
                Seen::MaybeExecuted => tally.lost += 1,
            }
        }
        tally
    }
}
