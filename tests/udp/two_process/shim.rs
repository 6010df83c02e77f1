//! A wire with faults between the sockets of two processes.
//!
//! The ICRC covers addresses, so a proxy must use the addresses of both ends. That takes two
//! network namespaces. In each, a shim binds the address of the other device. It passes received
//! datagrams, with faults, through a Unix socket to the other shim, which sends them from their
//! original address.
//!
//! ```text
//!   device A ──▶ shim's socket B    │ Unix │    shim's socket A ──▶ device B
//!   device A ◀── shim's socket B    │      │    shim's socket A ◀── device B
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{UdpSocket, UnixDatagram};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Length of a datagram with the largest MTU and all headers.
const LONGEST: usize = 4096 + 128;
/// Maximum number of datagrams that overtake a delayed one. If fewer come, it is sent after
/// [`HELD`].
const OVERTAKING: u64 = 12;
const HELD: Duration = Duration::from_millis(3);

#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) passed: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) repeated: AtomicU64,
    pub(super) held: AtomicU64,
    pub(super) damaged: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A random number generator (xorshift64*). Its seed determines the whole sequence.
#[derive(Debug, Clone)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        // Mixes the seed, so that adjacent seeds differ at once.
        let mut chance = Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..4).for_each(|_| _ = chance.next());
        chance
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

pub(super) struct Shim {
    pub(super) faults: Arc<Faults>,
    work: [JoinHandle<()>; 2],
    path: PathBuf,
}

impl Shim {
    /// Starts a shim in place of `far`, or returns `None` if the address is in use. `paths` are the
    /// Unix sockets of this shim and of the other.
    pub(super) async fn start(
        near: IpAddr,
        far: SocketAddr,
        paths: (&Path, &Path),
        seed: u64,
    ) -> Option<Self> {
        let socket = Arc::new(UdpSocket::bind(far).await.ok()?);
        let near = SocketAddr::new(near, far.port());
        let (ours, theirs) = (paths.0.to_owned(), paths.1.to_owned());
        let pipe = Arc::new(UnixDatagram::bind(&ours).unwrap());
        let faults = Arc::new(Faults::default());
        let leaving = tokio::spawn(forward(
            Arc::clone(&socket),
            near,
            Arc::clone(&pipe),
            theirs,
            Arc::clone(&faults),
            Chance::new(seed),
        ));
        let arriving = tokio::spawn(async move {
            let mut bytes = [0; LONGEST];
            while let Ok(length) = pipe.recv(&mut bytes).await {
                // Fails if the device has closed its socket. The datagram is then lost.
                socket.send_to(&bytes[..length], near).await.ok();
            }
        });
        Some(Self { faults, work: [leaving, arriving], path: ours })
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.work.iter().for_each(JoinHandle::abort);
        fs::remove_file(&self.path).ok();
    }
}

async fn forward(
    socket: Arc<UdpSocket>,
    near: SocketAddr,
    pipe: Arc<UnixDatagram>,
    theirs: PathBuf,
    faults: Arc<Faults>,
    mut chance: Chance,
) {
    let mut bytes = [0; LONGEST];
    let mut number = 0;
    // Delayed datagrams, each with the number of the datagram that it follows.
    let mut held = BinaryHeap::new();
    let mut until = Instant::now();
    loop {
        let received = if held.is_empty() {
            socket.recv_from(&mut bytes).await
        } else {
            match tokio::time::timeout_at(until, socket.recv_from(&mut bytes)).await {
                Ok(received) => received,
                Err(_) => {
                    for Reverse((_, late)) in std::mem::take(&mut held).into_sorted_vec() {
                        let late: Vec<u8> = late;
                        pipe.send_to(&late, &theirs).await.ok();
                    }
                    continue;
                }
            }
        };
        // The socket reports ICMP errors of earlier sends here.
        let Ok((length, from)) = received else { continue };
        if from != near {
            continue;
        }
        let datagram = &mut bytes[..length];
        number += 1;
        count(&faults.passed);
        if chance.percent(2) {
            count(&faults.lost);
            continue;
        }
        if chance.percent(1) {
            count(&faults.damaged);
            // Damages only the ICRC, so that a packet with undetected damage has the right bytes.
            // The check misses one in 32768 where it has to guess the IPv4 identification
            // (crates/rdma-soft/src/roce/icrc.rs). The UDP checksum would detect all, but is
            // recomputed here.
            let at = length.saturating_sub(1 + chance.below(4) as usize);
            datagram[at] ^= 1 << chance.below(8);
        }
        if chance.percent(2) {
            count(&faults.held);
            if held.is_empty() {
                until = Instant::now() + HELD;
            }
            held.push(Reverse((number + 1 + chance.below(OVERTAKING), datagram.to_vec())));
            continue;
        }
        let copies = if chance.percent(2) {
            count(&faults.repeated);
            2
        } else {
            1
        };
        for _ in 0..copies {
            // Waits while the other shim's buffer is full. Dropping would add losses.
            pipe.send_to(datagram, &theirs).await.ok();
        }
        while held.peek().is_some_and(|Reverse((due, _))| *due <= number) {
            if let Some(Reverse((_, late))) = held.pop() {
                pipe.send_to(&late, &theirs).await.ok();
            }
        }
    }
}

/// Returns a command that runs `program` in a new network namespace, or `None` where the system
/// does not allow that.
pub(super) fn in_namespace(program: &Path) -> Option<Command> {
    const SETUP: &str = r#"ip link set lo up && exec "$0" "$@""#;
    let command = |program: &Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", SETUP]).arg(program);
        command
    };
    let tried = command(Path::new("true"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    tried.is_ok_and(|status| status.success()).then(|| command(program))
}
