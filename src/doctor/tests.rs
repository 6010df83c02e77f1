//! Findings about machines that are simulated by files.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::types::{
    Gid, GidEntry, GidKind, IpPrefix, LinkLayer, Mtu, PortAttr, PortNum, PortState,
};
use crate::verbs::gid_rank::{NetInterface, Peer, rank};

/// A root directory with the files of a kernel, deleted on drop.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "tokio-rdma-doctor-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(&root).unwrap();
        Self { root }
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
        self
    }

    fn module(self, name: &str) -> Self {
        self.file(&format!("sys/module/{name}/refcnt"), "0")
    }

    fn pci(self, address: &str, class: &str, vendor: &str, driver: Option<&str>) -> Self {
        let path = format!("sys/bus/pci/devices/{address}");
        let machine =
            self.file(&format!("{path}/class"), class).file(&format!("{path}/vendor"), vendor);
        if let Some(driver) = driver {
            symlink(
                format!("../../../bus/pci/drivers/{driver}"),
                machine.root.join(path).join("driver"),
            )
            .unwrap();
        }
        machine
    }

    fn connectx(self) -> Self {
        self.pci("0000:41:00.0", "0x020000", "0x15b3", Some("mlx5_core")).module("mlx5_core")
    }

    /// Adds `mlx5_0` to sysfs, as loading mlx5_ib does.
    fn device(self) -> Self {
        self.connectx()
            .module("mlx5_ib")
            .module("ib_core")
            .file("sys/class/infiniband/mlx5_0/node_type", "1: CA")
    }

    /// Adds its node to sysfs, as loading ib_uverbs does.
    fn uverbs(self) -> Self {
        self.device().module("ib_uverbs").file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    }

    fn node(self) -> Self {
        self.uverbs().file("dev/infiniband/uverbs0", "")
    }

    fn limit(self, current: &str, highest: &str) -> Self {
        let line = |name: &str, values: [&str; 3]| {
            format!("{name:<26}{:<21}{:<21}{}", values[0], values[1], values[2])
        };
        let lines = [
            line("Limit", ["Soft Limit", "Hard Limit", "Units"]),
            line("Max locked memory", [current, highest, "bytes"]),
            line("Max open files", ["1024", "4096", "files"]),
        ];
        self.file("proc/self/limits", &lines.join("\n"))
            .file("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000")
    }

    fn report(
        &self,
        library: LibraryState,
        devices: Vec<DeviceReport>,
        asked: &Examination,
    ) -> Report {
        let host = Host::with_addresses(&self.root, &HashMap::new());
        let traffic_class = Ok(None);
        let mut report = Report { host, library, traffic_class, devices, findings: Vec::new() };
        report.findings = findings::of(&report, asked);
        report
    }

    fn findings(&self, library: LibraryState) -> Vec<Finding> {
        self.report(library, Vec::new(), &Examination::new()).findings
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn listed() -> LibraryState {
    LibraryState::Devices(vec!["mlx5_0".to_owned()])
}

fn none_listed() -> LibraryState {
    LibraryState::Devices(Vec::new())
}

#[track_caller]
fn only(found: &[Finding], severity: Severity, what: &str, advice: &str) {
    assert_eq!(found.len(), 1, "{found:#?}");
    contains(found, severity, what, advice);
}

#[track_caller]
fn contains(found: &[Finding], severity: Severity, what: &str, advice: &str) {
    let fits = |finding: &&Finding| {
        finding.severity == severity
            && finding.what.contains(what)
            && finding.advice.contains(advice)
    };
    assert!(found.iter().any(|finding| fits(&finding)), "{found:#?}");
}

use Severity::{Note, Problem, Warning};

#[test]
fn machine_without_rdma_gets_advice_on_software_devices() {
    let machine = Machine::new()
        .file("sys/class/net/lo/ifindex", "1")
        .file("sys/class/net/ens3/ifindex", "2");
    only(&machine.findings(none_listed()), Note, "no RDMA device", "type rxe netdev ens3");
    let found = machine.findings(LibraryState::NotBuilt);
    contains(&found, Note, "without feature `ibverbs`", "--features ibverbs");
    contains(
        &machine.findings(LibraryState::Missing),
        Warning,
        "libibverbs.so.1",
        "ibverbs-providers",
    );
    // A root without any directory.
    let nothing = Host::with_addresses(&machine.root.join("nothing"), &HashMap::new());
    assert!(
        nothing.hardware.is_empty()
            && nothing.devices.is_empty()
            && nothing.locked_memory.is_none()
    );
}

#[test]
fn hardware_without_feature_or_library_raises_the_severity() {
    let machine = Machine::new().node();
    only(
        &machine.findings(LibraryState::NotBuilt),
        Warning,
        "cannot be used",
        "--features ibverbs",
    );
    only(&machine.findings(LibraryState::Missing), Problem, "cannot be loaded", "apt install");
    only(&machine.findings(LibraryState::Failed(13)), Problem, "Permission denied", "strace");
    assert_eq!(machine.findings(listed()), []);
}

#[test]
fn adapter_without_rdma_device_names_the_module() {
    let found = Machine::new().connectx().findings(LibraryState::NoKernelSupport);
    only(
        &found,
        Problem,
        "NVIDIA (Mellanox) adapter 0000:41:00.0 is not an RDMA device yet",
        "modprobe mlx5_ib",
    );
    for (vendor, driver, module) in [
        ("0x14e4", "bnxt_en", "bnxt_re"),
        ("0x8086", "ice", "irdma"),
        ("0x1425", "cxgb4", "iw_cxgb4"),
    ] {
        let machine = Machine::new().pci("0000:01:00.0", "0x020000", vendor, Some(driver));
        only(
            &machine.findings(none_listed()),
            Problem,
            "not an RDMA device yet",
            &format!("modprobe {module}"),
        );
    }
    let in_container = Machine::new().connectx().file(".dockerenv", "").findings(none_listed());
    only(&in_container, Problem, "not an RDMA device yet", "on the host, not in the container");
    let loaded = Machine::new().connectx().module("mlx5_ib").findings(none_listed());
    only(&loaded, Problem, "although mlx5_ib is loaded", "devlink");
    let unbound =
        Machine::new().pci("0000:41:00.0", "0x020700", "0x15b3", None).findings(none_listed());
    only(&unbound, Problem, "has no kernel driver", "modprobe mlx5_ib");
    let handed_on = Machine::new()
        .pci("0000:41:00.0", "0x020000", "0x15b3", Some("vfio-pci"))
        .findings(none_listed());
    only(&handed_on, Problem, "bound to vfio-pci", "driverctl");
}

#[test]
fn adapters_without_rdma_are_not_reported() {
    let machine = Machine::new()
        .pci("0000:02:00.0", "0x020000", "0x14e4", Some("tg3"))
        .pci("0000:03:00.0", "0x020000", "0x8086", Some("e1000e"))
        .pci("0000:04:00.0", "0x020000", "0x8086", None)
        .pci("0000:05:00.0", "0x020000", "0x1af4", Some("virtio-pci"))
        // A disk controller.
        .pci("0000:06:00.0", "0x010802", "0x15b3", Some("nvme"));
    only(
        &machine.findings(none_listed()),
        Note,
        "no RDMA device and no RDMA-capable adapter",
        "rdma_rxe",
    );
}

#[test]
fn device_without_node_names_module_or_container_option() {
    only(
        &Machine::new().device().findings(none_listed()),
        Problem,
        "no device node for programs",
        "modprobe ib_uverbs",
    );
    let uverbs = || Machine::new().uverbs();
    let missing = "mlx5_0: /dev/infiniband/uverbs0 is missing";
    only(&uverbs().findings(none_listed()), Problem, missing, "udev");
    let docker = uverbs().file(".dockerenv", "");
    only(&docker.findings(none_listed()), Problem, missing, "--device=/dev/infiniband");
    let podman = uverbs().file("run/.containerenv", "");
    only(&podman.findings(none_listed()), Problem, missing, "--device=/dev/infiniband");
    let pod = uverbs().file("proc/1/cgroup", "0::/kubepods.slice/kubepods-besteffort.slice");
    only(&pod.findings(none_listed()), Problem, missing, "device plugin");
}

#[test]
fn node_that_cannot_be_opened_is_reported_with_the_reason() {
    let machine = Machine::new().node();
    for (access, what, advice) in [
        (NodeAccess::Denied, "EACCES", "0666"),
        (NodeAccess::Forbidden, "EPERM", "udev"),
        (NodeAccess::Failed(5), "Input/output error", "dmesg"),
    ] {
        let mut report = machine.report(none_listed(), Vec::new(), &Examination::new());
        report.host.devices[0].access = access;
        only(&findings::of(&report, &Examination::new()), Problem, what, advice);
    }
    let mut report = machine.report(none_listed(), Vec::new(), &Examination::new());
    report.host.devices[0].access = NodeAccess::Forbidden;
    report.host.container = Some(Container::Other);
    only(
        &findings::of(&report, &Examination::new()),
        Problem,
        "EPERM",
        "mounting it as a volume is not enough",
    );
}

#[test]
fn device_missing_from_the_library_needs_its_provider() {
    only(
        &Machine::new().node().findings(none_listed()),
        Problem,
        "libibverbs does not list it",
        "ibverbs-providers",
    );
}

#[test]
fn requested_device_that_does_not_exist_is_a_problem() {
    let asked = Examination::new().device("mlx5_7");
    let found = Machine::new().node().report(listed(), Vec::new(), &asked).findings;
    only(&found, Problem, "device mlx5_7 not found", "");
}

#[test]
fn limit_of_locked_memory_is_compared_with_the_wanted_size() {
    let report = |machine: &Machine, wanted: Option<u64>| {
        let asked = wanted.map_or(Examination::new(), |bytes| Examination::new().memory(bytes));
        machine.report(listed(), Vec::new(), &asked).findings
    };
    let small = Machine::new().node().limit("8388608", "8388608");
    only(&report(&small, Some(1 << 30)), Problem, "8 MiB, 1 GiB wanted", "/etc/security/limits.d");
    only(&report(&small, Some(1 << 20)), Note, "8 MiB, 1 MiB wanted", "");
    only(&report(&small, None), Warning, "8 MiB", "LimitMEMLOCK=infinity");
    let small = small.file(".dockerenv", "");
    only(&report(&small, Some(1 << 30)), Problem, "1 GiB wanted", "--ulimit memlock=-1");
    let small = small.file("proc/1/cgroup", "0::/kubepods/x");
    only(&report(&small, Some(1 << 30)), Problem, "1 GiB wanted", "IPC_LOCK");

    let raisable = Machine::new().node().limit("65536", "unlimited");
    only(
        &report(&raisable, Some(1 << 20)),
        Problem,
        "64 KiB, 1 MiB wanted",
        "raise it with `ulimit -l` in this shell",
    );
    let unlimited = Machine::new().node().limit("unlimited", "unlimited");
    only(&report(&unlimited, Some(1 << 40)), Note, "no limit", "");
    assert_eq!(report(&unlimited, None), []);
    let exempt = Machine::new()
        .node()
        .limit("65536", "65536")
        .file("proc/self/status", "CapEff:\t0000000000004000");
    only(&report(&exempt, Some(1 << 30)), Note, "no limit", "");
    let first = exempt.file("proc/self/uid_map", "         0          0 4294967295");
    only(&report(&first, Some(1 << 30)), Note, "no limit", "");
    let rootless = first.file("proc/self/uid_map", "0 1000 1");
    only(&report(&rootless, Some(1 << 30)), Problem, "64 KiB, 1 GiB wanted", "");
    // Without real devices the limit is a warning only.
    let none = Machine::new().limit("65536", "65536");
    let asked = Examination::new().memory(1 << 20);
    contains(
        &none.report(none_listed(), Vec::new(), &asked).findings,
        Warning,
        "the software device locks no memory",
        "",
    );
    only(&none.findings(none_listed()), Note, "no RDMA device", "");
}

#[test]
fn softroce_and_exclusive_namespaces_are_noted() {
    let machine = Machine::new()
        .node()
        .module("rdma_rxe")
        .file("sys/module/ib_core/parameters/netns_mode", "N");
    let found = machine.findings(listed());
    contains(&found, Note, "UDP port 4791", "cannot bind");
    contains(&found, Note, "exclusive mode", "rdma dev set");
    let shared = Machine::new().node().file("sys/module/ib_core/parameters/netns_mode", "Y");
    assert_eq!(shared.findings(listed()), []);
}

#[test]
fn gids_above_index_255_are_counted() {
    let table = "sys/class/infiniband/mlx5_0/ports/1/gids";
    let zero = "0000:0000:0000:0000:0000:0000:0000:0000";
    let used = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    let machine = Machine::new()
        .node()
        .file(&format!("{table}/3"), used)
        .file(&format!("{table}/256"), used)
        .file(&format!("{table}/257"), zero);
    let found = machine.report(listed(), vec![device(&[])], &Examination::new()).findings;
    contains(&found, Note, "1 GIDs have an index beyond 255", "");
}

#[test]
fn traffic_classes_of_environment_and_administrator_are_printed() {
    let cm = "sys/kernel/config/rdma_cm/mlx5_0/ports/1";
    let forced = "sys/class/infiniband/mlx5_0/tc/1/traffic_class";
    let printed = |machine: &Machine, class| {
        let mut report = machine.report(listed(), vec![device(&[])], &Examination::new());
        report.traffic_class = class;
        (report.to_string(), report.findings)
    };
    let unset = Machine::new().node().file(forced, "");
    let (text, found) = printed(&unset, Ok(None));
    assert!(text.contains("  traffic class             0 (DSCP 0), unless paths set"), "{text}");
    assert!(!text.contains("  port 1"), "{text}");
    assert_eq!(found, []);

    let machine = Machine::new()
        .node()
        .file(forced, "Global tc=106")
        .file(&format!("{cm}/default_roce_tos"), "104")
        .file(&format!("{cm}/default_roce_mode"), "RoCE v2");
    let (text, found) = printed(&machine, Ok(Some(104)));
    for expected in [
        "traffic class             104 (DSCP 26), from TOKIO_RDMA_TRAFFIC_CLASS",
        "    port 1                  sends traffic class: Global tc=106",
        "    port 1                  rdma_cm selects traffic class 104 (DSCP 26)",
        "    port 1                  rdma_cm selects RoCE v2",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    only(&found, Note, "mlx5_0 port 1: the adapter sends one traffic class", "tc/1/traffic_class");
}

// Open devices.

fn device(ports: &[PortReport]) -> DeviceReport {
    DeviceReport {
        name: "mlx5_0".to_owned(),
        attr: None,
        ports: ports.to_vec(),
        capabilities: vec![capability(trial::WRITE, CapabilityStatus::Works(String::new()))],
        error: None,
    }
}

fn capability(name: &'static str, status: CapabilityStatus) -> Capability {
    Capability { name, status }
}

#[test]
fn interfaces_of_another_namespace_are_ignored() {
    let machine = Machine::new()
        .file("sys/class/net/eth0/ifindex", "2")
        .file("sys/class/net/eth0/uevent", "DEVTYPE=vlan\nINTERFACE=eth0")
        .file("sys/class/net/eth9/ifindex", "9")
        .file("sys/class/net/eth9/operstate", "lowerlayerdown");
    let found = |machine: &Machine| -> Vec<(String, bool, bool)> {
        let interfaces = Host::with_addresses(&machine.root, &HashMap::new()).interfaces;
        interfaces
            .into_iter()
            .map(|interface| (interface.name, interface.vlan, interface.up))
            .collect()
    };
    let both = [("eth0".to_owned(), true, true), ("eth9".to_owned(), false, false)];
    assert_eq!(found(&machine), both);
    let machine = machine.file("proc/net/dev", "Inter-|   Receive\n face |bytes\n  eth0: 0 0");
    assert_eq!(found(&machine), both[..1]);
}

/// Returns an Ethernet port on `eth0` with these addresses, and the interface.
fn port(addresses: &[&str], kind: GidKind, mtu: u32) -> (PortReport, NetInterface) {
    let addresses: Vec<std::net::IpAddr> =
        addresses.iter().map(|text| text.parse().unwrap()).collect();
    let entry = |(index, address): (usize, &std::net::IpAddr)| {
        GidEntry::new(index as u8, Gid::from(*address), kind).on_interface(2)
    };
    let gids: Vec<GidEntry> = addresses.iter().enumerate().map(entry).collect();
    let addresses = addresses.iter().map(|address| IpPrefix::new(*address, 24)).collect();
    let interface = NetInterface {
        index: 2,
        name: "eth0".into(),
        up: true,
        vlan: false,
        mtu: Some(mtu),
        addresses,
    };
    let ranked = rank(&gids, std::slice::from_ref(&interface), None::<Peer>);
    (
        PortReport {
            attr: PortAttr::ethernet(PortNum(1), gids),
            gids: ranked,
            pkeys: vec![0xffff],
            counters: BTreeMap::new(),
        },
        interface,
    )
}

fn with(device: DeviceReport, interface: NetInterface) -> Vec<Finding> {
    let mut report = Machine::new().node().report(listed(), vec![device], &Examination::new());
    report.host.interfaces = vec![interface];
    findings::of(&report, &Examination::new())
}

#[test]
fn healthy_device_has_no_findings() {
    let (port, interface) = port(&["10.9.0.1"], GidKind::RoceV2, 9000);
    assert_eq!(with(device(&[port]), interface), []);
}

#[test]
fn inactive_ports_are_reported_with_advice() {
    let (mut down, interface) = port(&["10.9.0.1"], GidKind::RoceV2, 9000);
    down.attr.state = PortState::Down;
    only(
        &with(device(std::slice::from_ref(&down)), interface.clone()),
        Note,
        "mlx5_0 port 1 is down",
        "ip link set",
    );
    let mut dead = device(&[down.clone()]);
    dead.capabilities =
        vec![capability(trial::WRITE, CapabilityStatus::Failed("port 1 has no GID".to_owned()))];
    only(&with(dead.clone(), interface.clone()), Problem, "mlx5_0 port 1 is down", "ip link set");
    dead.ports[0].attr.link_layer = LinkLayer::InfiniBand;
    dead.ports[0].attr.state = PortState::Initializing;
    only(&with(dead, interface), Problem, "initializing", "opensm");
}

#[test]
fn unusable_gids_are_explained() {
    let find = |addresses: &[&str], kind| {
        let (port, interface) = port(addresses, kind, 9000);
        with(device(&[port]), interface)
    };
    only(&find(&[], GidKind::RoceV2), Problem, "no GID", "IP address");
    only(&find(&["10.9.0.1"], GidKind::RoceV1), Warning, "only RoCE v1 GIDs", "firmware");
    only(&find(&["fe80::1"], GidKind::RoceV2), Warning, "only a link-local GID", "IP address");
    let (mut port, mut interface) = port(&["10.9.0.1"], GidKind::RoceV2, 9000);
    interface.up = false;
    port.gids = rank(&port.attr.gids, std::slice::from_ref(&interface), None);
    let found = with(device(&[port.clone()]), interface.clone());
    only(&found, Warning, "interface eth0 is down", "bring the interface up");
    interface.index = 77;
    port.gids = rank(&port.attr.gids, &[interface.clone()], None);
    let mut broken = device(&[port]);
    broken.capabilities.clear();
    only(
        &with(broken, interface),
        Problem,
        "not in this network namespace",
        "rdma system set netns",
    );
}

#[test]
fn interface_mtu_limits_the_path_mtu() {
    let (mut port, interface) = port(&["10.9.0.1"], GidKind::RoceV2, 1500);
    port.attr.active_mtu = Mtu::Mtu1024;
    only(
        &with(device(&[port.clone()]), interface.clone()),
        Note,
        "path MTU 1024, because eth0 has MTU 1500",
        "mtu 4200",
    );
    port.attr.active_mtu = Mtu::Mtu4096;
    only(
        &with(device(&[port]), interface),
        Warning,
        "path MTU 4096 exceeds MTU 1500 of eth0",
        "down and up",
    );
}

#[test]
fn failures_and_missing_capabilities_come_with_advice() {
    let (port, interface) = port(&["10.9.0.1"], GidKind::RoceV2, 9000);
    let mut broken = device(&[port]);
    let failed = |error: &str| CapabilityStatus::Failed(error.to_owned());
    broken.capabilities = vec![capability(trial::WRITE, failed("no completion within 2s"))];
    only(&with(broken.clone(), interface.clone()), Problem, "awaited WRITE failed", "firewall");
    let class = "TOKIO_RDMA_TRAFFIC_CLASS (must be 0 to 255, or 0x0 to 0xff): Invalid argument";
    broken.capabilities = vec![capability(trial::WRITE, failed(class))];
    let found = with(broken.clone(), interface.clone());
    only(&found, Problem, "awaited WRITE failed", "set TOKIO_RDMA_TRAFFIC_CLASS to");
    broken.capabilities = [trial::ON_DEMAND, trial::DMA_BUF, trial::ATOMICS]
        .map(|name| capability(name, CapabilityStatus::Absent))
        .to_vec();
    let found = with(broken.clone(), interface.clone());
    contains(&found, Note, "no on-demand paging", "pinned");
    contains(&found, Note, "no registration of dma-bufs", "memory of the host");
    contains(&found, Note, "no atomics", "SEND");
    broken.capabilities = vec![capability(
        trial::EVENTS,
        failed("ibv_create_cq: Cannot allocate memory (os error 12)"),
    )];
    let machine = Machine::new().node().limit("65536", "65536");
    let found = machine.report(listed(), vec![broken.clone()], &Examination::new()).findings;
    contains(&found, Problem, "completion events failed", "limit of locked memory");
    broken.capabilities.clear();
    broken.error = Some("no answer within 10s".to_owned());
    only(&with(broken.clone(), interface), Problem, "mlx5_0: no answer within 10s", "dmesg");
    // A missing node suppresses the error that follows from it.
    let found =
        Machine::new().uverbs().report(listed(), vec![broken], &Examination::new()).findings;
    only(&found, Problem, "mlx5_0: /dev/infiniband/uverbs0 is missing", "");
}

#[test]
fn findings_are_sorted_by_severity() {
    let machine = Machine::new().device().module("rdma_rxe").limit("65536", "65536");
    let found = machine.findings(none_listed());
    let severities: Vec<_> = found.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Problem, Warning, Note]);
}

#[test]
fn sizes_are_printed_exactly() {
    use super::findings::bytes;
    for (number, text) in [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (8 << 20, "8 MiB"),
        ((8 << 20) + 1, "8.0 MiB (8388609 bytes)"),
        (1 << 47, "128 TiB"),
        (u64::MAX, "16.0 EiB (18446744073709551615 bytes)"),
    ] {
        assert_eq!(bytes(number), text);
    }
}

#[test]
fn report_of_this_machine_is_printed() {
    let report = Examination::new().memory(1 << 20).run();
    let text = report.to_string();
    assert!(report.works(Device::SOFTWARE), "{text}");
    for expected in [
        "soft0 (software, in this process): works",
        "libibverbs",
        "locked memory",
        "GIDs, best first",
        "  P_Keys                  0xffff",
        "of dma-bufs  ",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(text.lines().all(|line| !line.ends_with(' ')), "{text}");
    let missing = Examination::new().device("mlx9_9").run();
    assert!(missing.devices.is_empty() && !missing.findings.is_empty());
}
