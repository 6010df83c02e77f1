//! Tests a device on its own thread, so that a hanging device does not block the examination.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use futures::future::try_join;

use super::{Capability, CapabilityStatus, DeviceReport, PortReport};
use crate::cm::{self, CmConnection, ConnectConfig, ConnectError};
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
pub(super) const IMMEDIATE: &str = "immediate data";
pub(super) const SHARED_RECEIVES: &str = "shared receive queues";
pub(super) const WINDOWS: &str = "memory windows";
pub(super) const ON_DEMAND: &str = "on-demand paging";
pub(super) const DMA_BUF: &str = "registration of dma-bufs";
pub(super) const DC: &str = "dynamic connections";

/// The number of WRITEs for the median latency.
const ROUNDS: usize = 101;

/// A part of the report, sent as soon as it is known: a hanging device loses no earlier part.
enum Piece {
    Attr(DeviceAttr),
    Port(PortReport),
    Capability(Capability),
    Error(String),
}

pub(super) fn examine(name: &str, deadline: Duration) -> DeviceReport {
    examine_with(name, deadline, probe)
}

fn examine_with(name: &str, deadline: Duration, probe: fn(&str, &Sender<Piece>)) -> DeviceReport {
    let end = Instant::now() + deadline;
    let mut report = DeviceReport {
        name: name.to_owned(),
        attr: None,
        ports: Vec::new(),
        capabilities: Vec::new(),
        error: None,
    };
    let (found, pieces) = mpsc::channel();
    let device = name.to_owned();
    let thread = thread::Builder::new().name(format!("doctor {name}"));
    let thread = match thread.spawn(move || probe(&device, &found)) {
        Ok(thread) => thread,
        Err(error) => {
            report.error = Some(format!("failed to start a thread for the examination: {error}"));
            return report;
        }
    };
    loop {
        match pieces.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Piece::Attr(attr)) => report.attr = Some(attr),
            Ok(Piece::Port(port)) => report.ports.push(port),
            Ok(Piece::Capability(capability)) => report.capabilities.push(capability),
            Ok(Piece::Error(error)) => report.error = Some(error),
            Err(RecvTimeoutError::Timeout) => {
                report.error = Some(format!("no answer within {deadline:?}"));
                return report;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if thread.join().is_err() {
        report.error = Some("the examination panicked, which is a bug in tokio-rdma".to_owned());
    }
    report
}

fn probe(name: &str, found: &Sender<Piece>) {
    // Fails once the deadline has passed; the results are no longer needed.
    let send = |piece| drop(found.send(piece));
    let device = match Device::open(name) {
        Ok(device) => device,
        Err(error) => return send(Piece::Error(error.to_string())),
    };
    let attr = device.attr();
    send(Piece::Attr(attr.clone()));
    for number in 1..=attr.ports {
        match port_report(&device, PortNum(number)) {
            Ok(report) => send(Piece::Port(report)),
            Err(error) => send(Piece::Error(format!("port {number}: {error}"))),
        }
    }
    let capability = |name, status| send(Piece::Capability(Capability { name, status }));

    capability(EVENTS, status(channel(&device)));
    let (write, atomic) = operations(&device);
    capability(WRITE, write);
    capability(ATOMICS, atomic);
    capability(
        SHARED_RECEIVES,
        if attr.max_srq == 0 { CapabilityStatus::Absent } else { status(shared_receives(&device)) },
    );
    let claimed = |is: bool, how: String| {
        if is { CapabilityStatus::Claimed(how) } else { CapabilityStatus::Absent }
    };
    capability(IMMEDIATE, claimed(attr.immediate, String::new()));
    capability(WINDOWS, claimed(attr.max_mw > 0, format!("up to {}", attr.max_mw)));
    capability(ON_DEMAND, claimed(attr.on_demand_paging, String::new()));
    capability(DMA_BUF, claimed(attr.dma_buf, String::new()));
    capability(
        DC,
        match attr.dc {
            Some(_) => dynamic_connection(&device),
            // Without feature `mlx5` a real device may support DC unseen.
            None if !cfg!(feature = "mlx5") && !attr.is_iwarp() && name != Device::SOFTWARE => {
                CapabilityStatus::Unknown
            }
            None => CapabilityStatus::Absent,
        },
    );
}

fn port_report(device: &Device, port: PortNum) -> Result<PortReport, VerbError> {
    Ok(PortReport {
        attr: device.port(port)?,
        gids: device.gids(port, None)?,
        pkeys: device.pkey_table(port)?,
        counters: device.port_counters(port)?,
    })
}

fn status<E: ToString>(tried: Result<String, E>) -> CapabilityStatus {
    match tried {
        Ok(seen) => CapabilityStatus::Works(seen),
        Err(error) => CapabilityStatus::Failed(error.to_string()),
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

/// Tests WRITE and atomics from the device to itself, awaiting completion events.
fn operations(device: &Device) -> (CapabilityStatus, CapabilityStatus) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return (
                CapabilityStatus::Failed(format!("failed to create a Tokio runtime: {error}")),
                CapabilityStatus::Unknown,
            );
        }
    };
    let _entered = runtime.enter();
    let ends = match runtime.block_on(within(Loopback::new(device))) {
        Ok(ends) => ends,
        Err(error) => return (CapabilityStatus::Failed(error), CapabilityStatus::Unknown),
    };
    let write = status(runtime.block_on(within(ends.write())));
    let atomic = match (device.attr().atomic, &write) {
        (AtomicCapability::None, _) => CapabilityStatus::Absent,
        (_, CapabilityStatus::Works(_)) => status(runtime.block_on(within(ends.atomic()))),
        _ => CapabilityStatus::Unknown,
    };
    (write, atomic)
}

fn dynamic_connection(device: &Device) -> CapabilityStatus {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return CapabilityStatus::Failed(format!("failed to create a Tokio runtime: {error}"));
        }
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
    status(tried.and_then(|arrived| match arrived {
        7 => Ok("a WRITE to itself".to_owned()),
        _ => Err("the WRITE completed, but the bytes did not arrive".to_owned()),
    }))
}

async fn within<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    // A peer on the same device answers within microseconds; lost packets are retransmitted after
    // 67 ms.
    const TIMEOUT: Duration = Duration::from_secs(2);
    let late = |_| format!("no completion within {TIMEOUT:?}");
    tokio::time::timeout(TIMEOUT, work).await.map_err(late)?
}

/// A queue pair connected to itself, with memory as the target. An iWARP device connects two by
/// address.
struct Loopback {
    qp: QueuePair,
    _by_address: Option<(QueuePair, [CmConnection; 2])>,
    region: ExposedRegion,
    pool: Pool,
}

/// Connects two queue pairs of `device` by its own address.
async fn connect_by_address(
    device: &Device,
    active: &QueuePair,
    passive: &QueuePair,
) -> Result<[CmConnection; 2], String> {
    let address = device.default_address().map_err(|error| {
        format!("{error}; an iWARP device connects by the IP address of its network interface")
    })?;
    let config = ConnectConfig::default();
    let links = async {
        let listener = cm::Listener::bind(device, (address, 0)).await?;
        let accept = async { listener.accept().await?.accept(passive, &config).await };
        let connect = async {
            cm::resolve(device, listener.local_addr()).await?.connect(active, &config).await
        };
        try_join(connect, accept).await
    };
    let (ours, theirs) = links.await.map_err(|error: ConnectError| error.to_string())?;
    Ok([ours, theirs])
}

impl Loopback {
    const BYTES: u64 = 64;

    async fn new(device: &Device) -> Result<Self, String> {
        let pair = || -> Result<[QueuePair; 2], SetupError> {
            let pd = device.protection_domain()?;
            let queue = CompletionQueue::builder(device)
                .capacity(64)
                .mode(CompletionMode::Event)
                .build()?;
            let builder = QueuePair::builder(&pd, &queue)
                .max_send_wr(8)
                .max_recv_wr(1)
                .max_sge(1)
                .max_inline(0);
            Ok([builder.clone().build()?, builder.build()?])
        };
        let [qp, peer] = pair().map_err(|error| error.to_string())?;
        let by_address = if device.attr().is_iwarp() {
            let links = connect_by_address(device, &qp, &peer).await?;
            Some((peer, links))
        } else {
            qp.connect(&qp.endpoint()).map_err(|error| error.to_string())?;
            None
        };
        let memory = || -> Result<_, SetupError> {
            let pd = qp.protection_domain();
            let memory = HostMemory::zeroed(Self::BYTES as usize)?;
            let region = ExposedRegion::new(pd, memory, Access::REMOTE_ALL)?;
            Ok((region, Pool::new(pd, Self::BYTES as usize, 1)?))
        };
        let (region, pool) = memory().map_err(|error| error.to_string())?;
        Ok(Self { qp, _by_address: by_address, region, pool })
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
        if self.qp.protection_domain().device().attr().is_iwarp() {
            // A WRITE completes when TCP has it, a READ after the peer has executed those before.
            self.qp.read(buffer, remote).await.map_err(|error| error.to_string())?;
        }
        let mut arrived = [0; Self::BYTES as usize];
        self.region.read(0, &mut arrived).map_err(|error| error.to_string())?;
        if arrived != [7; Self::BYTES as usize] {
            return Err("the WRITE completed, but the bytes did not arrive".to_owned());
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
            Err(format!("fetch-and-add of 1 to {before:#x} left {after:#x}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_device_passes_all_tests() {
        let report = examine(Device::SOFTWARE, Duration::from_secs(10));
        assert!(report.works() && report.error.is_none(), "{report:?}");
        assert_eq!(report.ports.len(), 1);
        assert_eq!(report.capabilities.len(), 9);
        let failed = |capability: &&Capability| {
            matches!(capability.status, CapabilityStatus::Failed(_) | CapabilityStatus::Unknown)
        };
        assert_eq!(report.capabilities.iter().find(failed), None);
    }

    #[test]
    fn unknown_device_is_named_in_the_error() {
        let report = examine("mlx9_9", Duration::from_secs(10));
        assert!(
            report.error.as_ref().is_some_and(|error| error.contains("mlx9_9")) && !report.works()
        );
    }

    #[test]
    fn hanging_device_is_reported_with_the_results_so_far() {
        // A busy machine may start the examination late.
        for limit in [20, 200, 2_000, 20_000].map(Duration::from_millis) {
            let report = examine_with("stuck", limit, |_, found| {
                // The examination may be over.
                let _ = found.send(Piece::Attr(DeviceAttr::named("stuck")));
                loop {
                    thread::park();
                }
            });
            assert_eq!(report.error, Some(format!("no answer within {limit:?}")));
            if report.attr.is_some() {
                return;
            }
        }
        panic!("no result so far is reported");
    }

    #[test]
    fn panic_during_the_examination_is_reported() {
        let report =
            examine_with("bad", Duration::from_secs(10), |_, _| panic!("as intended by the test"));
        assert!(report.error.is_some());
    }
}
