//! A diagnosis of RDMA on this machine: `cargo run --example doctor`.
//!
//! ```text
//! --device NAME    examines this device only
//! --memory BYTES   tests whether this much memory can be registered
//! --hardware       ignores the software device
//! --json           prints JSON
//! ```
//!
//! The exit status is 0 if a device works, that is if an awaited WRITE to itself succeeded; 1 if
//! none does; 2 for unknown arguments. The software device counts, unless `--hardware` or
//! `--device` excludes it.

use std::io::Write;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio_rdma::doctor::{
    Capability, CapabilityStatus, DeviceReport, Examination, Finding, Host, KernelPort, PortReport,
    Report,
};
use tokio_rdma::types::{DeviceAttr, RankedGid};

#[derive(Default)]
struct Options {
    device: Option<String>,
    memory: Option<u64>,
    hardware: bool,
    json: bool,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: doctor [--device NAME] [--memory BYTES] [--hardware] [--json]"
            );
            return ExitCode::from(2);
        }
    };
    let mut examine = Examination::new();
    if let Some(bytes) = options.memory {
        examine = examine.memory(bytes);
    }
    if let Some(name) = &options.device {
        examine = examine.device(name);
    }
    let report = examine.run();
    let works = report
        .devices
        .iter()
        .any(|device| device.works() && !(options.hardware && device.is_software()));
    let mut text = report.to_string();
    if options.json {
        text = format!("{:#}\n", report_as_json(&report, works));
    }
    // A reader such as `head` may close the pipe early.
    let _ = std::io::stdout().write_all(text.as_bytes());
    if works { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn options() -> Result<Options, lexopt::Error> {
    use lexopt::prelude::{Long, ValueExt};
    let mut options = Options::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("device") => options.device = Some(arguments.value()?.string()?),
            Long("memory") => options.memory = Some(arguments.value()?.parse()?),
            Long("hardware") => options.hardware = true,
            Long("json") => options.json = true,
            other => return Err(other.unexpected()),
        }
    }
    Ok(options)
}

// JSON. Absent values are null.

pub(crate) fn report_as_json(report: &Report, works: bool) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "works": works,
        "library": report.library.to_string(),
        "traffic_class": report.traffic_class.as_ref().ok(),
        "host": host(&report.host),
        "devices": report.devices.iter().map(device).collect::<Vec<_>>(),
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}

fn host(host: &Host) -> Value {
    let hardware = host.hardware.iter().map(|function| {
        json!({
            "address": function.address,
            "vendor": function.vendor,
            "driver": function.driver,
            "rdma_module": function.rdma_module,
        })
    });
    let devices = host.devices.iter().map(|device| {
        json!({
            "name": device.name,
            "node": device.node,
            "access": format!("{:?}", device.access),
            "unreachable_gids": device.unreachable_gids,
            "ports": device.ports.iter().map(kernel_port).collect::<Vec<_>>(),
        })
    });
    json!({
        "hardware": hardware.collect::<Vec<_>>(),
        "devices": devices.collect::<Vec<_>>(),
        "modules": host.modules,
        "shared_namespaces": host.shared_namespaces,
        "container": host.container.map(|container| format!("{container:?}")),
        "locked_memory": host.locked_memory.map(|limit| {
            json!({ "current": limit.current, "highest": limit.highest, "exempt": limit.exempt })
        }),
    })
}

fn kernel_port(port: &KernelPort) -> Value {
    json!({
        "port": port.port,
        "forced_traffic_class": port.forced_traffic_class,
        "default_roce_tos": port.default_roce_tos,
        "default_roce_mode": port.default_roce_mode,
    })
}

fn device(device: &DeviceReport) -> Value {
    let capabilities = device.capabilities.iter().map(capability);
    json!({
        "name": device.name,
        "software": device.is_software(),
        "works": device.works(),
        "error": device.error,
        "attr": device.attr.as_ref().map(attr),
        "ports": device.ports.iter().map(port).collect::<Vec<_>>(),
        "capabilities": capabilities.collect::<serde_json::Map<_, _>>(),
    })
}

fn attr(attr: &DeviceAttr) -> Value {
    json!({
        "guid": format!("{:016x}", attr.guid),
        "vendor_id": attr.vendor_id,
        "vendor_part_id": attr.vendor_part_id,
        "firmware": attr.firmware,
        "max_qp": attr.max_qp,
        "max_qp_wr": attr.max_qp_wr,
        "max_sge": attr.max_sge,
        "max_inline": attr.max_inline,
        "max_cq": attr.max_cq,
        "max_cqe": attr.max_cqe,
        "max_mr": attr.max_mr,
        "max_mr_size": attr.max_mr_size,
        "max_mw": attr.max_mw,
        "max_pd": attr.max_pd,
        "max_qp_rd_atom": attr.max_qp_rd_atom,
        "max_qp_init_rd_atom": attr.max_qp_init_rd_atom,
        "max_srq": attr.max_srq,
        "max_srq_wr": attr.max_srq_wr,
        "max_srq_sge": attr.max_srq_sge,
        "max_mcast_grp": attr.max_mcast_grp,
        "max_mcast_qp_attach": attr.max_mcast_qp_attach,
        "completion_vectors": attr.completion_vectors,
        "atomic": format!("{:?}", attr.atomic),
        "on_demand_paging": attr.on_demand_paging,
        "dma_buf": attr.dma_buf,
        "data_path": attr.data_path.to_string(),
        "dc": attr.dc.map(|dc| json!({
            "max_rd_atomic": dc.max_rd_atomic,
            "max_init_rd_atomic": dc.max_init_rd_atomic,
        })),
    })
}

fn port(port: &PortReport) -> Value {
    json!({
        "port": port.attr.port.0,
        "state": format!("{:?}", port.attr.state),
        "link_layer": format!("{:?}", port.attr.link_layer),
        "active_mtu": port.attr.active_mtu.bytes(),
        "max_mtu": port.attr.max_mtu.bytes(),
        "lid": port.attr.lid,
        "pkeys": port.pkeys,
        "physical_state": format!("{:?}", port.attr.physical_state),
        "rate_mbps": port.attr.rate_mbps(),
        "lanes": port.attr.lanes,
        "counters": port.counters,
        "gids": port.gids.iter().map(gid).collect::<Vec<_>>(),
    })
}

fn gid(gid: &RankedGid) -> Value {
    let reasons = gid
        .reasons
        .iter()
        .map(|reason| json!({ "favours": reason.favours(), "what": reason.to_string() }));
    json!({
        "index": gid.entry.index,
        "gid": gid.entry.gid.to_string(),
        "kind": gid.entry.kind.to_string(),
        "interface": gid.interface,
        "usable": gid.is_usable(),
        "reasons": reasons.collect::<Vec<_>>(),
    })
}

fn capability(capability: &Capability) -> (String, Value) {
    let (status, detail) = match &capability.status {
        CapabilityStatus::Works(seen) => ("works", seen.as_str()),
        CapabilityStatus::Claimed(how) => ("claimed", how.as_str()),
        CapabilityStatus::Absent => ("absent", ""),
        CapabilityStatus::Failed(error) => ("failed", error.as_str()),
        _ => ("unknown", ""),
    };
    (capability.name.to_owned(), json!({ "status": status, "detail": detail }))
}

fn finding(finding: &Finding) -> Value {
    json!({
        "severity": finding.severity.to_string(),
        "what": finding.what,
        "advice": finding.advice,
    })
}
