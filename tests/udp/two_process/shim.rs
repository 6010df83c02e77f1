//! A wire with faults between two processes: real sockets at both ends, and a program between them that loses, repeats, holds
//! back and damages datagrams.
//!
//! The check of RoCE v2 covers addresses and ports, so a proxy with an address of its own would break it, and one with the
//! addresses of the ends cannot be in the same network namespace. So the other process is in one of its own, and in each
//! namespace a shim has the socket of the device that is in the other: what arrives there goes, after its faults, to the
//! other shim, which sends it on from the socket with the sender's address. The two have a Unix socket between them, as the
//! file system is common to both namespaces.
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

/// Longest datagram of RoCE v2: the largest MTU with all headers.
const LONGEST: usize = 4096 + 128;
/// Datagrams that overtake one that is held back, at most; and how long it is held if so many do not come.
const OVERTAKING: u64 = 12;
const HELD: Duration = Duration::from_millis(3);

/// Datagrams, by what became of them.
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

/// Numbers from a seed (xorshift64*): the same in both processes and wherever it is replayed.
#[derive(Debug, Clone)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        // Seeds next to each other shall differ at once.
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

    /// Less than `limit`.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// This process's half of the wire.
pub(super) struct Shim {
    pub(super) faults: Arc<Faults>,
    work: [JoinHandle<()>; 2],
    path: PathBuf,
}

impl Shim {
    /// Stands in for `far`, towards `near`; `None` if `far` is taken here. `paths`: of its Unix socket, and the other's.
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
        let leaving = tokio::spawn(leave(
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
                // A device that has closed its socket refuses it; that is as if it were lost.
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

/// Passes on what the device at `near` sends, with faults.
async fn leave(
    socket: Arc<UdpSocket>,
    near: SocketAddr,
    pipe: Arc<UnixDatagram>,
    theirs: PathBuf,
    faults: Arc<Faults>,
    mut chance: Chance,
) {
    let mut bytes = [0; LONGEST];
    let mut number = 0;
    // Held back: until so many datagrams have gone, or until a time.
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
        // Refusals of what was sent to a device that had closed are said here.
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
            // In the check itself. One damage of 32768 is not found where the identification of IPv4 has to be guessed
            // (crates/rdma-soft/src/roce/icrc.rs), on which the place of the bit has no influence; and a sum of UDP, which would
            // find it, is made anew here. What then gets through has the right bytes.
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
            // Waits while the other shim has many: as a wire does, it does not gain speed by losing.
            pipe.send_to(datagram, &theirs).await.ok();
        }
        while held.peek().is_some_and(|Reverse((due, _))| *due <= number) {
            if let Some(Reverse((_, late))) = held.pop() {
                pipe.send_to(&late, &theirs).await.ok();
            }
        }
    }
}

/// A command that runs `program` in a network namespace of its own, as nobody; `None` where the system allows none.
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
