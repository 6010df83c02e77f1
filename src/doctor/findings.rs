//! Derives findings and advice from the facts of a report, without I/O.

use super::host::PASSTHROUGH_DRIVERS;
use super::{
    CapabilityStatus, Container, DeviceReport, Examination, Finding, Host, KernelDevice,
    LibraryState, NodeAccess, PciFunction, PortReport, Report, Severity, trial,
};
use crate::types::{DeviceAttr, GidKind, GidReason, LinkLayer, Mtu, PortState};

pub(super) fn of(report: &Report, asked: &Examination) -> Vec<Finding> {
    let mut found = Vec::new();
    missing_devices(report, asked, &mut found);
    for device in &report.devices {
        device_findings(device, &report.host, &mut found);
    }
    locked_memory(report, asked, &mut found);
    host_findings(&report.host, &mut found);
    // The sort is stable: within a severity, causes stay before their consequences.
    found.sort_by_key(|finding| finding.severity);
    found
}

fn problem(what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { severity: Severity::Problem, what: what.into(), advice: advice.into() }
}

fn warning(what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { severity: Severity::Warning, what: what.into(), advice: advice.into() }
}

fn note(what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { severity: Severity::Note, what: what.into(), advice: advice.into() }
}

// From hardware to an open device: each step requires the previous one.

const BUILD: &str = "build with `--features ibverbs`; the program loads libibverbs when it starts";
const PACKAGES: &str = "install rdma-core: `apt install libibverbs1 ibverbs-providers` or \
                        `dnf install libibverbs`; for a container, in its image";

fn missing_devices(report: &Report, asked: &Examination, found: &mut Vec<Finding>) {
    if let Some(name) = asked.device.as_ref().filter(|_| report.devices.is_empty()) {
        found.push(problem(format!("device {name} not found"), String::new()));
    }
    let host = &report.host;
    let present = !host.devices.is_empty() || !host.hardware.is_empty();
    match &report.library {
        LibraryState::NotBuilt if present => {
            found.push(warning(
                "real devices cannot be used: built without feature `ibverbs`",
                BUILD,
            ));
        }
        LibraryState::NotBuilt => found.push(note(
            "built without feature `ibverbs`: only the software device is available",
            BUILD,
        )),
        LibraryState::Missing if present => {
            found.push(problem("libibverbs.so.1 cannot be loaded", PACKAGES))
        }
        LibraryState::Missing => found.push(warning("libibverbs.so.1 cannot be loaded", PACKAGES)),
        LibraryState::Failed(errno) => {
            let error = std::io::Error::from_raw_os_error(*errno);
            found.push(problem(
                format!("libibverbs cannot list devices: {error}"),
                "see `strace -e openat ibv_devices`",
            ));
        }
        LibraryState::NoKernelSupport | LibraryState::Devices(_) => {}
    }
    if host.devices.is_empty() {
        no_kernel_device(host, found);
    }
    for device in &host.devices {
        match (&device.node, device.access) {
            (None, _) => found.push(problem(
                format!("{} has no device node for programs", device.name),
                "load the module on the host: `modprobe ib_uverbs`",
            )),
            (Some(node), access) => node_access(host, device, node, access, found),
        }
        if let (LibraryState::Devices(listed), NodeAccess::Open) = (&report.library, device.access)
            && !listed.contains(&device.name)
        {
            found.push(problem(
                format!("{} exists, but libibverbs does not list it", device.name),
                "install its user-space driver: `apt install ibverbs-providers` or \
                 `dnf install libibverbs`; with a vendor's kernel driver, the rdma-core of the \
                 same vendor release",
            ));
        }
    }
}

fn no_kernel_device(host: &Host, found: &mut Vec<Finding>) {
    for function in &host.hardware {
        found.push(idle_adapter(host, function));
    }
    if !host.hardware.is_empty() {
        return;
    }
    let interface = host.interfaces.iter().find(|interface| interface.up && interface.name != "lo");
    let interface = interface.map_or("eth0", |interface| interface.name.as_str());
    found.push(note(
        "no RDMA device and no RDMA-capable adapter on the PCI bus",
        format!(
            "the software device needs none; for SoftRoCE, the kernel's software device: \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {interface}`"
        ),
    ));
}

fn idle_adapter(host: &Host, function: &PciFunction) -> Finding {
    let PciFunction { address, vendor, driver, rdma_module } = function;
    let here = |command: String| match host.container {
        Some(_) => format!("on the host, not in the container: {command}"),
        None => command,
    };
    match driver {
        Some(driver) if PASSTHROUGH_DRIVERS.contains(&driver.as_str()) => problem(
            format!(
                "the {vendor} adapter {address} is bound to {driver}, so the kernel does not use it"
            ),
            here(format!(
                "return it to the kernel: `driverctl unset-override {address}`, or remove it from \
                 the virtual machine"
            )),
        ),
        None => problem(
            format!("the {vendor} adapter {address} has no kernel driver"),
            here(format!(
                "`modprobe {rdma_module}`, which loads the network driver too; then see `dmesg`"
            )),
        ),
        Some(_) if host.has_module(rdma_module) => problem(
            format!(
                "the {vendor} adapter {address} is not an RDMA device, although {rdma_module} is \
                 loaded"
            ),
            "RDMA may be disabled in the firmware or for this function (`devlink dev param show`), \
             the adapter may lack RDMA (see `dmesg`), or the device may be in another network \
             namespace (`rdma system show`)",
        ),
        Some(_) => problem(
            format!("the {vendor} adapter {address} is not an RDMA device yet"),
            here(format!(
                "`modprobe {rdma_module}`; to load it at boot, add a line to \
                 /etc/modules-load.d/rdma.conf"
            )),
        ),
    }
}

fn node_access(
    host: &Host,
    device: &KernelDevice,
    node: &str,
    access: NodeAccess,
    found: &mut Vec<Finding>,
) {
    let name = &device.name;
    let grant = match host.container {
        Some(Container::Kubernetes) => {
            "request it from an RDMA device plugin in the pod's resources; mounting \
             /dev/infiniband is not enough"
        }
        Some(_) => {
            "start the container with `--device=/dev/infiniband`; mounting it as a volume is not \
             enough"
        }
        None => "see `ls -l /dev/infiniband`; udev creates the nodes by the rules of rdma-core",
    };
    let finding = match access {
        NodeAccess::Open => return,
        NodeAccess::Missing => problem(format!("{name}: /dev/infiniband/{node} is missing"), grant),
        NodeAccess::Forbidden => {
            problem(format!("{name}: opening /dev/infiniband/{node} is forbidden (EPERM)"), grant)
        }
        NodeAccess::Denied => problem(
            format!("{name}: no permission for /dev/infiniband/{node} (EACCES)"),
            "the udev rules of rdma-core set mode 0666; otherwise join the group of the node, see \
             `ls -l /dev/infiniband`",
        ),
        NodeAccess::Failed(errno) => problem(
            format!("{name}: /dev/infiniband/{node}: {}", std::io::Error::from_raw_os_error(errno)),
            "see `dmesg`; the device may be resetting",
        ),
    };
    found.push(finding);
}

// An open device.

fn device_findings(device: &DeviceReport, host: &Host, found: &mut Vec<Finding>) {
    let name = &device.name;
    // A finding about the node exists already.
    let node = host.devices.iter().find(|known| known.name == *name).map(|known| known.access);
    if let Some(error) =
        device.error.as_ref().filter(|_| node.is_none_or(|access| access == NodeAccess::Open))
    {
        let by_setting =
            ["TOKIO_RDMA_POST", "direct data path"].iter().any(|part| error.contains(part));
        let advice = if error.contains("TOKIO_RDMA_CQE_COMPRESSION") {
            "set TOKIO_RDMA_CQE_COMPRESSION to 0 or 1, or unset it"
        } else if by_setting {
            "unset TOKIO_RDMA_POST; the device is then posted to directly if that is possible"
        } else {
            "see `dmesg`"
        };
        found.push(problem(format!("{name}: {error}"), advice));
    }
    if device.attr.as_ref().is_some_and(DeviceAttr::is_iwarp) {
        found.push(iwarp(name));
    }
    for port in &device.ports {
        port_findings(device, port, host, found);
    }
    let any_active = device.ports.iter().any(|port| port.attr.state == PortState::Active);
    for capability in &device.capabilities {
        if let CapabilityStatus::Failed(error) = &capability.status {
            // A finding about the port exists already.
            if any_active {
                found.push(failed(device, capability.name, error, host));
            }
        }
        if capability.status == CapabilityStatus::Absent && !device.is_software() {
            found.push(note(format!("{name}: no {}", capability.name), instead(capability.name)));
        }
    }
    let kernel = host.devices.iter().find(|known| known.name == *name);
    for settings in kernel.into_iter().flat_map(|kernel| &kernel.ports) {
        if let Some(class) = &settings.forced_traffic_class {
            let port = settings.port;
            found.push(note(
                format!("{name} port {port}: the adapter sends one traffic class ({class})"),
                format!(
                    "it replaces those of paths; \
                     /sys/class/infiniband/{name}/tc/{port}/traffic_class changes it"
                ),
            ));
        }
    }
    if let Some(unreachable) =
        host.devices.iter().find(|known| known.name == *name && known.unreachable_gids > 0)
    {
        found.push(note(
            format!(
                "{name}: {} GIDs have an index beyond 255 and cannot be sent from",
                unreachable.unreachable_gids
            ),
            "remove unneeded addresses or VLANs if such a GID is needed",
        ));
    }
}

fn iwarp(name: &str) -> Finding {
    note(
        format!(
            "{name} is an iWARP device: it connects by IP address only, has the transport RC only, \
             completes a WRITE before it has arrived, and ends a connection at a message without a \
             posted receive"
        ),
        "use Connection, RdmaStream or cm::connect, and post receives before you connect",
    )
}

/// Returns the alternative to a missing capability.
fn instead(capability: &str) -> &'static str {
    match capability {
        trial::ATOMICS => "send a message with SEND and let the peer update the value",
        trial::IMMEDIATE => "send the number in a message after the WRITE",
        trial::SHARED_RECEIVES => "post receives to each queue pair: `QueuePair::recv`",
        trial::WINDOWS => "revoke access by dropping the exposed region",
        trial::ON_DEMAND => {
            "all registered memory is pinned and counts towards the limit of locked memory"
        }
        trial::DMA_BUF => "copy memory of other devices through memory of the host",
        trial::DC => "use one queue pair for each peer, or datagrams",
        _ => "",
    }
}

fn failed(device: &DeviceReport, capability: &str, error: &str, host: &Host) -> Finding {
    let limit = host.locked_memory.as_ref().and_then(super::LockLimit::effective);
    let advice = if error.contains("allocate memory") && limit.is_some() {
        format!("most likely the limit of locked memory: {}", raise_limit(host))
    } else if error.contains("TOKIO_RDMA_TRAFFIC_CLASS") {
        "set TOKIO_RDMA_TRAFFIC_CLASS to a number from 0 to 255, or unset it".to_owned()
    } else if error.contains("no completion within") {
        "packets from the device to itself are lost: check the state of its port and GIDs, and \
         firewall rules for UDP port 4791"
            .to_owned()
    } else {
        String::new()
    };
    problem(format!("{}: {capability} failed: {error}", device.name), advice)
}

fn port_findings(device: &DeviceReport, port: &PortReport, host: &Host, found: &mut Vec<Finding>) {
    let (attr, number) = (&port.attr, port.attr.port.0);
    let name = format!("{} port {number}", device.name);
    let infiniband = attr.link_layer == LinkLayer::InfiniBand;
    let interface = port.gids.first().and_then(|gid| gid.interface.as_ref());
    let inactive = match (attr.state, interface) {
        (PortState::Active, _) => None,
        (PortState::Initializing | PortState::Armed, _) if infiniband => Some(
            "not configured by a subnet manager: start opensm on a host, or the one of a switch"
                .to_owned(),
        ),
        _ if infiniband => {
            Some("check cable and switch; `rdma link` shows the physical state".to_owned())
        }
        (_, Some(interface)) => {
            Some(format!("`ip link set {interface} up`; check cable and switch"))
        }
        (_, None) => Some(
            "`rdma link` shows its interface: `ip link set <interface> up`; check cable and switch"
                .to_owned(),
        ),
    };
    if let Some(advice) = inactive {
        // Adapters with two ports are often used with one port.
        let severity = if device.works() { Severity::Note } else { Severity::Problem };
        let what = format!("{name} is {}", state_of(attr.state));
        found.push(Finding { severity, what, advice });
        return;
    }
    let is_iwarp = device.attr.as_ref().is_some_and(DeviceAttr::is_iwarp);
    if !infiniband && !is_iwarp {
        gid_findings(&name, device.works(), port, found);
        mtu_findings(&name, port, host, found);
    }
}

fn state_of(state: PortState) -> String {
    match state {
        PortState::Down => "down".to_owned(),
        PortState::Initializing => "initializing".to_owned(),
        PortState::Armed => "armed, but not active".to_owned(),
        other => format!("{other:?}"),
    }
}

fn gid_findings(name: &str, works: bool, port: &PortReport, found: &mut Vec<Finding>) {
    let Some(best) = port.gids.first() else {
        found.push(problem(
            format!("{name} has no GID"),
            "give its network interface an IP address, in the network namespace of this process",
        ));
        return;
    };
    let why_not =
        |wanted: fn(&GidReason) -> bool| best.reasons.iter().find(|reason| wanted(reason));
    if !best.is_usable() {
        let reason = best.reasons.first().map(ToString::to_string).unwrap_or_default();
        // Some drivers nevertheless deliver packets from the device to itself.
        let severity = if works { Severity::Warning } else { Severity::Problem };
        let what = format!("{name} has no usable GID; the best one: {reason}");
        let advice = "bring the interface up; in a container, use the host's network, or move \
                      interface and device into its namespace (`rdma system set netns exclusive`, \
                      `rdma dev set <device> netns <name>`)";
        found.push(Finding { severity, what, advice: advice.to_owned() });
    } else if best.entry.kind == GidKind::RoceV1 {
        found.push(warning(
            format!("{name} has only RoCE v1 GIDs"),
            "RoCE v2 may be disabled in the firmware or unsupported by the adapter",
        ));
    } else if why_not(|reason| *reason == GidReason::LinkLocal).is_some() {
        found.push(warning(
            format!("{name} has only a link-local GID"),
            "give its network interface an IP address: link-local ones reach only hosts on the \
             same link",
        ));
    }
}

/// Interface MTU for a path MTU of 4096 bytes: headers of RoCE v2 over IPv6 and immediate data
/// included, rounded up to the customary value.
const FULL_MTU: u32 = 4200;

fn mtu_findings(name: &str, port: &PortReport, host: &Host, found: &mut Vec<Finding>) {
    let interface = port.gids.first().and_then(|best| best.interface.as_ref());
    let interface = host.interfaces.iter().find(|known| Some(&known.name) == interface);
    let Some((interface, mtu)) = interface.and_then(|interface| Some((interface, interface.mtu?)))
    else {
        return;
    };
    let active = port.attr.active_mtu;
    if active.bytes() > mtu as usize {
        found.push(warning(
            format!(
                "{name}: path MTU {} exceeds MTU {} of {}",
                active.bytes(),
                mtu,
                interface.name
            ),
            "set the interface down and up, so that the device reads its MTU",
        ));
    } else if active < Mtu::Mtu4096 && active < port.attr.max_mtu && mtu < FULL_MTU {
        found.push(note(
            format!(
                "{name}: path MTU {}, because {} has MTU {mtu}",
                active.bytes(),
                interface.name
            ),
            format!(
                "for packets of 4096 bytes: `ip link set {} mtu {FULL_MTU}` or 9000, on both ends \
                 and all switches",
                interface.name
            ),
        ));
    }
}

// The process and the machine.

/// The queues and pools of a small service do not fit below this limit.
const SMALL_LIMIT: u64 = 64 << 20;

fn locked_memory(report: &Report, asked: &Examination, found: &mut Vec<Finding>) {
    let host = &report.host;
    let Some(limit) = &host.locked_memory else { return };
    let real = !host.devices.is_empty();
    let enough = match (limit.effective(), asked.memory) {
        (None, Some(wanted)) => {
            found.push(note(
                format!("{} can be registered: no limit of locked memory", bytes(wanted)),
                "",
            ));
            return;
        }
        (None, None) => return,
        (Some(most), Some(wanted)) => most >= wanted,
        (Some(most), None) => most >= SMALL_LIMIT,
    };
    let most = limit.effective().map_or_else(String::new, bytes);
    let wanted =
        asked.memory.map_or_else(String::new, |wanted| format!(", {} wanted", bytes(wanted)));
    let what = format!("memory that can be registered: {most}{wanted}");
    if enough {
        if asked.memory.is_some() {
            found.push(note(format!("{what}; queues also count"), ""));
        }
        return;
    }
    let raisable =
        limit.highest.is_none_or(|highest| asked.memory.unwrap_or(SMALL_LIMIT) <= highest);
    let raise = raise_limit(host);
    let advice = if raisable {
        format!("raise it with `ulimit -l` in this shell; permanently: {raise}")
    } else {
        raise
    };
    match (real, asked.memory) {
        (true, Some(_)) => found.push(problem(what, advice)),
        (true, None) => found.push(warning(what, advice)),
        (false, Some(_)) => {
            found.push(warning(
                format!("{what}; the software device locks no memory, real ones do"),
                advice,
            ));
        }
        (false, None) => {}
    }
}

fn raise_limit(host: &Host) -> String {
    match host.container {
        Some(Container::Kubernetes) => {
            "give the container capability IPC_LOCK in its securityContext, or the container \
             runtime's service LimitMEMLOCK=infinity"
                .to_owned()
        }
        Some(_) => {
            "start the container with `--ulimit memlock=-1` or `--cap-add=IPC_LOCK`".to_owned()
        }
        None => {
            "put `* - memlock unlimited` into /etc/security/limits.d/rdma.conf and log in again; \
                 for systemd services, LimitMEMLOCK=infinity into the unit"
                .to_owned()
        }
    }
}

/// Returns binary units, followed by the exact bytes if rounded.
pub(super) fn bytes(number: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (number.checked_ilog2().unwrap_or(0) / 10) as usize;
    let (size, name) = (1_u64 << (10 * unit), units.get(unit).unwrap_or(&"bytes"));
    if number.is_multiple_of(size) {
        format!("{} {name}", number / size)
    } else {
        format!("{:.1} {name} ({number} bytes)", number as f64 / size as f64)
    }
}

fn host_findings(host: &Host, found: &mut Vec<Finding>) {
    if host.has_module("rdma_rxe") {
        found.push(note(
            "SoftRoCE (rdma_rxe) is loaded: the kernel occupies UDP port 4791",
            "programs that implement RoCE v2 cannot bind the port at the same time; firewalls must \
             pass it",
        ));
    }
    if host.shared_namespaces == Some(false) && !host.devices.is_empty() {
        found.push(note(
            "RDMA devices belong to one network namespace each (exclusive mode)",
            "a container sees only devices moved into its namespace: \
             `rdma dev set <device> netns <name>`",
        ));
    }
}
