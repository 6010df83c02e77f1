//! Tries a device out, on a thread of its own: whatever hangs, the report goes on.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::{Ability, DeviceReport, PortReport, Verdict};
use crate::dc::{DcInitiator, DcTarget};
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::{SetupError, VerbError};
use crate::memory::{ExposedRegion, HostMemory, Pool};
use crate::op::{QueuePair, SharedReceiveQueue};
use crate::types::{Access, AtomicCapability, DeviceAttr, PortNum};
use crate::verbs::{Channel, Device};

pub(super) const EVENTS: &str = "completion events";
pub(super) const WRITE: &str = "awaited WRITE";
pub(super) const ATOMICS: &str = "atomics";
pub(super) const SHARED_RECEIVES: &str = "shared receive queues";
pub(super) const WINDOWS: &str = "memory windows";
pub(super) const ON_DEMAND: &str = "on-demand paging";
pub(super) const DMA_BUF: &str = "registration of dma-bufs";
pub(super) const DC: &str = "dynamic connections";

/// WRITEs that the time is the median of.
const ROUNDS: usize = 101;

/// What the thread finds out, piece by piece, so that what hangs takes nothing along.
enum Piece {
    Attr(DeviceAttr),
    Port(PortReport),
    Ability(Ability),
    Error(String),
}

/// Opens the device and tries what programs need.
pub(super) fn examine(name: &str, deadline: Duration) -> DeviceReport {
    examine_by(name, deadline, look_at)
}

fn examine_by(name: &str, deadline: Duration, look: fn(&str, &Sender<Piece>)) -> DeviceReport {
    let end = Instant::now() + deadline;
    let mut report = DeviceReport {
        name: name.to_owned(),
        attr: None,
        ports: Vec::new(),
        abilities: Vec::new(),
        error: None,
    };
    let (found, pieces) = mpsc::channel();
    let of_thread = name.to_owned();
    let thread = thread::Builder::new().name(format!("doctor {name}"));
    let thread = match thread.spawn(move || look(&of_thread, &found)) {
        Ok(thread) => thread,
        Err(error) => {
            report.error = Some(format!("no thread to examine it on: {error}"));
            return report;
        }
    };
    loop {
        match pieces.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Piece::Attr(attr)) => report.attr = Some(attr),
            Ok(Piece::Port(port)) => report.ports.push(port),
            Ok(Piece::Ability(ability)) => report.abilities.push(ability),
            Ok(Piece::Error(error)) => report.error = Some(error),
            Err(RecvTimeoutError::Timeout) => {
                report.error = Some(format!("it did not answer within {deadline:?}"));
                return report;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if thread.join().is_err() {
        report.error =
            Some("the examination itself failed, which is an error of this crate".to_owned());
    }
    report
}

fn look_at(name: &str, found: &Sender<Piece>) {
    // The receiver gone means that the deadline has passed: nobody asks any more.
    let tell = |piece| drop(found.send(piece));
    let device = match Device::open(name) {
        Ok(device) => device,
        Err(error) => return tell(Piece::Error(format!("it does not open: {error}"))),
    };
    let attr = device.attr();
    tell(Piece::Attr(attr.clone()));
    for number in 1..=attr.ports {
        match port_report(&device, PortNum(number)) {
            Ok(report) => tell(Piece::Port(report)),
            Err(error) => tell(Piece::Error(format!("port {number}: {error}"))),
        }
    }
    let ability = |name, verdict| tell(Piece::Ability(Ability { name, verdict }));

    ability(EVENTS, verdict(channel(&device)));
    let (write, atomic) = operations(&device);
    ability(WRITE, write);
    ability(ATOMICS, atomic);
    ability(
        SHARED_RECEIVES,
        if attr.max_srq == 0 { Verdict::Absent } else { verdict(shared_receives(&device)) },
    );
    let claimed = |is: bool, how: String| if is { Verdict::Claimed(how) } else { Verdict::Absent };
    ability(WINDOWS, claimed(attr.max_mw > 0, format!("up to {}", attr.max_mw)));
    ability(ON_DEMAND, claimed(attr.on_demand_paging, String::new()));
    ability(DMA_BUF, claimed(attr.dma_buf, String::new()));
    ability(
        DC,
        match attr.dc {
            Some(_) => dynamic_connection(&device),
            // A real device may have it all the same.
            None if !cfg!(feature = "mlx5") && name != Device::SOFTWARE => Verdict::Unknown,
            None => Verdict::Absent,
        },
    );
}

fn port_report(device: &Device, port: PortNum) -> Result<PortReport, VerbError> {
    Ok(PortReport {
        attr: device.port(port)?,
        gids: device.gids(port, None)?,
        pkeys: device.pkey_table(port)?,
    })
}

fn verdict<E: ToString>(tried: Result<String, E>) -> Verdict {
    match tried {
        Ok(seen) => Verdict::Works(seen),
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

fn channel(device: &Device) -> Result<String, SetupError> {
    let channel = Channel::new(device)?;
    let queue = crate::verbs::Cq::new(device, 1, Some(&channel), 1)?;
    queue.arm(false)?;
    Ok(String::new())
}

fn shared_receives(device: &Device) -> Result<String, SetupError> {
    let pd = device.protection_domain()?;
    let queue = CompletionQueue::builder(device).capacity(16).build()?;
    SharedReceiveQueue::new(&pd, &queue, 1, 1)?;
    Ok(String::new())
}

/// WRITE and atomic to itself, awaited as a service would: asleep in the reactor until the event comes.
fn operations(device: &Device) -> (Verdict, Verdict) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return (Verdict::Failed(format!("no Tokio runtime: {error}")), Verdict::Unknown);
        }
    };
    let _entered = runtime.enter();
    let ends = match Loop::new(device) {
        Ok(ends) => ends,
        Err(error) => return (Verdict::Failed(error), Verdict::Unknown),
    };
    let write = verdict(runtime.block_on(within(ends.write())));
    let atomic = match (device.attr().atomic, &write) {
        (AtomicCapability::None, _) => Verdict::Absent,
        (_, Verdict::Works(_)) => verdict(runtime.block_on(within(ends.atomic()))),
        _ => Verdict::Unknown,
    };
    (write, atomic)
}

/// WRITE by a dynamic connection to itself.
fn dynamic_connection(device: &Device) -> Verdict {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Verdict::Failed(format!("no Tokio runtime: {error}")),
    };
    let write = async {
        let pd = device.protection_domain()?;
        let queue =
            CompletionQueue::builder(device).capacity(16).mode(CompletionMode::Event).build()?;
        let target = DcTarget::new(&pd, &SharedReceiveQueue::new(&pd, &queue, 1, 1)?)?;
        let initiator =
            DcInitiator::builder(&pd, &queue).max_send_wr(8).max_sge(1).max_inline(0).build()?;
        let peer = initiator.peer(&target.address())?;
        let region = ExposedRegion::new(
            &pd,
            HostMemory::zeroed(8).map_err(SetupError::from)?,
            Access::REMOTE_ALL,
        )?;
        let buffer = pd.register(7_u64.to_ne_bytes().to_vec())?;
        initiator.to(&peer).write(buffer, region.grant()).await.map_err(io::Error::from)?;
        region.load(0).map_err(io::Error::other)
    };
    let tried = runtime.block_on(within(async { write.await.map_err(|error| error.to_string()) }));
    verdict(tried.and_then(|arrived| match arrived {
        7 => Ok("a WRITE to itself".to_owned()),
        _ => Err("it completed, and the bytes did not arrive".to_owned()),
    }))
}

async fn within<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    // A peer in the same device answers within microseconds; a lost packet is repeated after 67 ms.
    const PATIENCE: Duration = Duration::from_secs(2);
    let late = |_| format!("no completion within {PATIENCE:?}");
    tokio::time::timeout(PATIENCE, work).await.map_err(late)?
}

/// A queue pair that is connected to itself, and memory for it to reach.
struct Loop {
    qp: QueuePair,
    region: ExposedRegion,
    pool: Pool,
}

impl Loop {
    const BYTES: u64 = 64;

    fn new(device: &Device) -> Result<Self, String> {
        let made = || -> Result<Self, SetupError> {
            let pd = device.protection_domain()?;
            let queue = CompletionQueue::builder(device)
                .capacity(64)
                .mode(CompletionMode::Event)
                .build()?;
            let qp = QueuePair::builder(&pd, &queue)
                .max_send_wr(8)
                .max_recv_wr(1)
                .max_sge(1)
                .max_inline(0)
                .build()?;
            qp.connect(&qp.endpoint())?;
            let memory = HostMemory::zeroed(Self::BYTES as usize)?;
            let region = ExposedRegion::new(&pd, memory, Access::REMOTE_ALL)?;
            Ok(Self { qp, region, pool: Pool::new(&pd, Self::BYTES as usize, 1)? })
        };
        made().map_err(|error| error.to_string())
    }

    async fn write(&self) -> Result<String, String> {
        let remote = self.region.grant();
        let mut buffer =
            self.pool.copy_from(&[7; Self::BYTES as usize]).map_err(|error| error.to_string())?;
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let start = Instant::now();
            buffer = self.qp.write(buffer, remote).await.map_err(|error| error.to_string())?;
            times.push(start.elapsed());
        }
        let mut arrived = [0; Self::BYTES as usize];
        self.region.read(0, &mut arrived).map_err(|error| error.to_string())?;
        if arrived != [7; Self::BYTES as usize] {
            return Err("it completed, and the bytes did not arrive".to_owned());
        }
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        Ok(format!("{} bytes to itself, median {:.1} µs", Self::BYTES, median.as_secs_f64() * 1e6))
    }

    async fn atomic(&self) -> Result<String, String> {
        let word = self.region.grant().slice(..8).map_err(|error| error.to_string())?;
        let before = self.qp.fetch_add(word, 1).await.map_err(|error| error.to_string())?;
        let after = self.region.load(0).map_err(|error| error.to_string())?;
        if after == before.wrapping_add(1) {
            Ok(String::new())
        } else {
            Err(format!("one more than {before:#x} became {after:#x}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_device_works_in_everything_it_claims() {
        let report = examine(Device::SOFTWARE, Duration::from_secs(10));
        assert!(report.works() && report.error.is_none(), "{report:?}");
        assert_eq!(report.ports.len(), 1);
        assert_eq!(report.abilities.len(), 8);
        let failed =
            |ability: &&Ability| matches!(ability.verdict, Verdict::Failed(_) | Verdict::Unknown);
        assert_eq!(report.abilities.iter().find(failed), None);
    }

    #[test]
    fn device_that_does_not_exist_says_so() {
        let report = examine("mlx9_9", Duration::from_secs(10));
        assert!(
            report.error.as_ref().is_some_and(|error| error.contains("mlx9_9")) && !report.works()
        );
    }

    #[test]
    fn device_that_hangs_is_given_up_with_what_is_known() {
        let report = examine_by("stuck", Duration::from_millis(20), |_, found| {
            found.send(Piece::Attr(DeviceAttr::named("stuck"))).unwrap();
            loop {
                thread::park();
            }
        });
        assert!(report.attr.is_some());
        assert_eq!(report.error.as_deref(), Some("it did not answer within 20ms"));
    }

    #[test]
    fn panic_while_examining_becomes_an_error() {
        let report =
            examine_by("bad", Duration::from_secs(10), |_, _| panic!("as intended by the test"));
        assert!(report.error.is_some());
    }
}
