//! The report as text.

use std::fmt;

use super::findings::bytes;
use super::{
    Capability, CapabilityStatus, Container, DeviceReport, Finding, KernelPort, LibraryState,
    NodeAccess, PortReport, Report, Severity,
};
use crate::types::{AtomicCapability, DeviceAttr, PhysicalState};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tokio-rdma {}", env!("CARGO_PKG_VERSION"))?;
        self.machine(f)?;
        for device in &self.devices {
            write!(f, "\n{device}")?;
        }
        if !self.findings.is_empty() {
            writeln!(f, "\nfindings")?;
        }
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        Ok(())
    }
}

impl Report {
    fn machine(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = &self.host;
        line(f, "libibverbs", &self.library)?;
        for function in &host.hardware {
            let driver = function.driver.as_deref().unwrap_or("none");
            line(
                f,
                "adapter",
                format_args!("{} {}, driver {driver}", function.address, function.vendor),
            )?;
        }
        for device in &host.devices {
            let node = device.node.as_deref().unwrap_or("no node");
            let access = match device.access {
                NodeAccess::Open => "can be opened",
                _ => "cannot be opened",
            };
            line(f, "kernel device", format_args!("{}, {node} {access}", device.name))?;
            for port in &device.ports {
                settings(f, port)?;
            }
        }
        if host.devices.is_empty() {
            line(f, "kernel device", "none")?;
        }
        if !host.modules.is_empty() {
            line(f, "modules", host.modules.join(", "))?;
        }
        if let Some(shared) = host.shared_namespaces {
            line(f, "namespaces", if shared { "shared" } else { "exclusive" })?;
        }
        if let Some(container) = host.container {
            let kind = match container {
                Container::Kubernetes => "Kubernetes",
                Container::Other => "Docker, Podman or similar",
            };
            line(f, "container", kind)?;
        }
        match &self.traffic_class {
            Ok(Some(class)) => line(
                f,
                "traffic class",
                format_args!("{class} (DSCP {}), from TOKIO_RDMA_TRAFFIC_CLASS", class >> 2),
            )?,
            Ok(None) => line(f, "traffic class", "0 (DSCP 0), unless paths set another")?,
            Err(error) => line(f, "traffic class", error)?,
        }
        match &host.locked_memory {
            Some(limit) if limit.current.is_none() => line(f, "locked memory", "no limit"),
            Some(limit) if limit.exempt => line(f, "locked memory", "no limit (CAP_IPC_LOCK)"),
            Some(limit) => {
                let most = |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), bytes);
                line(
                    f,
                    "locked memory",
                    format_args!(
                        "{}, can be raised to {}",
                        most(limit.current),
                        most(limit.highest)
                    ),
                )
            }
            None => line(f, "locked memory", "unknown"),
        }
    }
}

fn settings(f: &mut fmt::Formatter<'_>, settings: &KernelPort) -> fmt::Result {
    let name = format!("  port {}", settings.port);
    if let Some(class) = &settings.forced_traffic_class {
        line(f, &name, format_args!("sends traffic class: {class}"))?;
    }
    if let Some(class) = settings.default_roce_tos {
        let dscp = class >> 2;
        line(f, &name, format_args!("rdma_cm selects traffic class {class} (DSCP {dscp})"))?;
    }
    if let Some(mode) = &settings.default_roce_mode {
        line(f, &name, format_args!("rdma_cm selects {mode}"))?;
    }
    Ok(())
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "  {name:<26}{value}")
}

impl fmt::Display for LibraryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str("not used: built without feature `ibverbs`"),
            Self::Missing => f.write_str("cannot be loaded"),
            Self::NoKernelSupport => {
                f.write_str("loaded, but the kernel has no RDMA support loaded")
            }
            Self::Failed(errno) => {
                write!(f, "failed: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Self::Devices(names) if names.is_empty() => f.write_str("loaded, lists no device"),
            Self::Devices(names) => write!(f, "loaded, lists {}", names.join(", ")),
        }
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let software = if self.is_software() { " (software, in this process)" } else { "" };
        writeln!(
            f,
            "{}{software}: {}",
            self.name,
            if self.works() { "works" } else { "DOES NOT WORK" }
        )?;
        if let Some(error) = &self.error {
            line(f, "error", error)?;
        }
        if let Some(attr) = &self.attr {
            limits(f, attr)?;
        }
        for port in &self.ports {
            port.fmt(f)?;
        }
        for Capability { name, status } in &self.capabilities {
            line(f, name, status)?;
        }
        Ok(())
    }
}

fn limits(f: &mut fmt::Formatter<'_>, attr: &DeviceAttr) -> fmt::Result {
    if attr.vendor_id != 0 {
        line(f, "vendor, part", format_args!("{:#06x}, {}", attr.vendor_id, attr.vendor_part_id))?;
    }
    line(f, "protocol", attr.protocol)?;
    line(f, "firmware", &attr.firmware)?;
    line(f, "data path", attr.data_path)?;
    line(f, "queue pairs", format_args!("{} of {} work requests", attr.max_qp, attr.max_qp_wr))?;
    line(f, "completion queues", format_args!("{} of {} completions", attr.max_cq, attr.max_cqe))?;
    let size =
        if attr.max_mr_size == u64::MAX { "any size".to_owned() } else { bytes(attr.max_mr_size) };
    line(f, "registrations", format_args!("{} of {size}", attr.max_mr))?;
    line(f, "elements, inline", format_args!("{}, {} bytes", attr.max_sge, attr.max_inline))?;
    line(
        f,
        "READs in flight",
        format_args!("{} outbound, {} inbound", attr.max_qp_init_rd_atom, attr.max_qp_rd_atom),
    )?;
    let atomic = match attr.atomic {
        AtomicCapability::None => "none",
        AtomicCapability::Device => "with respect to operations of this device",
        AtomicCapability::Global => "with respect to the processor too",
    };
    line(f, "atomic", atomic)?;
    line(f, "completion vectors", attr.completion_vectors)
}

impl fmt::Display for PortReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attr = &self.attr;
        let name = format!("port {}", attr.port.0);
        let (active, most) = (attr.active_mtu.bytes(), attr.max_mtu.bytes());
        line(
            f,
            &name,
            format_args!("{:?}, {:?}, MTU {active} of {most}", attr.state, attr.link_layer),
        )?;
        let state = attr.physical_state;
        if let Some(rate) = attr.rate_mbps() {
            let gbps = f64::from(rate) / 1000.0;
            line(f, "  link", format_args!("{state:?}, {gbps} Gb/s, lanes: {}", attr.lanes))?;
        } else if state != PhysicalState::LinkUp {
            line(f, "  link", format_args!("{state:?}"))?;
        }
        if attr.lid != 0 {
            line(f, "  LID", attr.lid)?;
        }
        let used = self.pkeys.iter().filter(|&&pkey| pkey & 0x7fff != 0);
        let pkeys: Vec<_> = used.map(|pkey| format!("{pkey:#06x}")).collect();
        if !pkeys.is_empty() {
            line(f, "  P_Keys", pkeys.join(", "))?;
        }
        // Traffic is of no interest here; what names an error, a drop or congestion is.
        let telling = self.counters.iter().filter(|&(name, &count)| count > 0 && tells(name));
        for (place, (name, count)) in telling.enumerate() {
            let title = if place == 0 { "  counters" } else { "" };
            line(f, title, format_args!("{name} {count}"))?;
        }
        for (place, gid) in self.gids.iter().enumerate() {
            line(f, if place == 0 { "  GIDs, best first" } else { "" }, gid)?;
        }
        Ok(())
    }
}

/// Returns true if a counter tells of an error, a lost or repeated packet, or congestion. Queue
/// pairs that are closed flush their work.
fn tells(counter: &str) -> bool {
    const PARTS: [&str; 18] = [
        "err",
        "discard",
        "drop",
        "duplicate",
        "out_of",
        "retrans",
        "timeout",
        "cnp",
        "ecn",
        "wait",
        "downed",
        "bad_",
        "constraint",
        "icrc",
        "nak",
        "exceed",
        "missing",
        "slow_restart",
    ];
    let counter = counter.to_ascii_lowercase();
    PARTS.iter().any(|part| counter.contains(part)) && !counter.contains("flush")
}

impl fmt::Display for CapabilityStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, detail) = match self {
            Self::Works(seen) => ("works", seen),
            Self::Claimed(how) => ("reported by the device, untested", how),
            Self::Failed(error) => ("FAILED", error),
            Self::Absent => return f.write_str("no"),
            Self::Unknown => return f.write_str("unknown"),
        };
        if detail.is_empty() { f.write_str(what) } else { write!(f, "{what}: {detail}") }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {:<9}{}", self.severity, self.what)?;
        if self.advice.is_empty() { Ok(()) } else { write!(f, "\n           -> {}", self.advice) }
    }
}
