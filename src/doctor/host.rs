//! The machine as its kernel shows it in `/sys`, `/proc` and `/dev`. This module only reads files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use crate::verbs::gid_rank::NetInterface;
use crate::verbs::interfaces::{Addresses, addresses, interfaces};

/// The RDMA-related state of the machine. Unreadable items count as absent.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Host {
    /// Adapters on the PCI bus that support RDMA, or may.
    pub hardware: Vec<PciFunction>,
    /// Devices of `/sys/class/infiniband`.
    pub devices: Vec<KernelDevice>,
    /// RDMA-related kernel modules that are loaded, or built in and visible.
    pub modules: Vec<String>,
    /// True if all network namespaces see all RDMA devices; `None` if unknown.
    pub shared_namespaces: Option<bool>,
    /// The container that this process runs in, if detected.
    pub container: Option<Container>,
    /// Limit of locked, hence of registered memory; `None` if unknown.
    pub locked_memory: Option<LockLimit>,
    /// Network interfaces, by index.
    pub(crate) interfaces: Vec<NetInterface>,
}

/// A function of a PCI device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PciFunction {
    /// Address in the form of `lspci -D`.
    pub address: String,
    /// Name of the vendor.
    pub vendor: &'static str,
    /// Kernel driver, if one is bound.
    pub driver: Option<String>,
    /// Kernel module that makes an RDMA device of the adapter.
    pub rdma_module: &'static str,
}

/// An RDMA device of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelDevice {
    /// Name, for example `mlx5_0`.
    pub name: String,
    /// Name of the device node, for example `uverbs0`; `None` without module `ib_uverbs`.
    pub node: Option<String>,
    /// Whether the node can be opened.
    pub access: NodeAccess,
    /// GIDs with an index above 255, which work requests cannot send from.
    pub unreachable_gids: usize,
    /// Ports for which the administrator has set something.
    pub ports: Vec<KernelPort>,
}

/// Settings of the administrator for a port. Each is `None` if it is not set, or if the kernel does
/// not show it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelPort {
    /// Number of the port.
    pub port: u8,
    /// Traffic class that the adapter sends instead of that of queue pairs, as the file
    /// `tc/<port>/traffic_class` of the device (NVIDIA's driver) shows it.
    pub forced_traffic_class: Option<String>,
    /// Traffic class that the kernel's connection manager selects, `default_roce_tos` of configfs.
    pub default_roce_tos: Option<u8>,
    /// GID type that the kernel's connection manager selects, `default_roce_mode` of configfs.
    pub default_roce_mode: Option<String>,
}

/// Whether a device node can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeAccess {
    /// The node can be opened.
    Open,
    /// The node is not in `/dev/infiniband`.
    Missing,
    /// Mode or owner of the node forbid it (EACCES).
    Denied,
    /// Another rule forbids it, for example the device rules of a container (EPERM).
    Forbidden,
    /// Opening the node fails with this `errno`.
    Failed(i32),
}

/// The kind of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Container {
    /// A Kubernetes pod.
    Kubernetes,
    /// Docker, Podman or similar.
    Other,
}

/// The limit of locked memory, `RLIMIT_MEMLOCK` of `getrlimit(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockLimit {
    /// Soft limit in bytes; `None` if unlimited.
    pub current: Option<u64>,
    /// Hard limit in bytes, to which this process may raise the soft limit; `None` if unlimited.
    pub highest: Option<u64>,
    /// True if the process has CAP_IPC_LOCK, which lifts the limit.
    pub exempt: bool,
}

impl LockLimit {
    /// Returns the number of bytes that can be locked; `None` if unlimited.
    #[must_use]
    pub const fn effective(&self) -> Option<u64> {
        if self.exempt { None } else { self.current }
    }
}

impl Host {
    pub(super) fn read(root: &Path) -> Self {
        Self::with_addresses(root, &addresses())
    }

    pub(super) fn with_addresses(root: &Path, addresses: &HashMap<String, Addresses>) -> Self {
        let sys = root.join("sys");
        let mode = text(&sys.join("module/ib_core/parameters/netns_mode"));
        Self {
            hardware: hardware(&sys),
            devices: devices(root),
            modules: modules(&sys),
            shared_namespaces: match mode.as_deref() {
                Some("Y" | "1") => Some(true),
                Some("N" | "0") => Some(false),
                _ => None,
            },
            container: container(root),
            locked_memory: locked_memory(root),
            interfaces: interfaces(root, addresses),
        }
    }

    /// Returns true if this module is loaded.
    #[must_use]
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn link(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Adapters with RDMA: PCI vendor, vendor name, network driver, RDMA module.
const ADAPTERS: [(&str, &str, &str, &str); 13] = [
    ("15b3", "NVIDIA (Mellanox)", "mlx5_core", "mlx5_ib"),
    ("15b3", "NVIDIA (Mellanox)", "mlx4_core", "mlx4_ib"),
    ("14e4", "Broadcom", "bnxt_en", "bnxt_re"),
    ("8086", "Intel", "ice", "irdma"),
    ("8086", "Intel", "i40e", "irdma"),
    ("8086", "Intel", "idpf", "irdma"),
    ("1425", "Chelsio", "cxgb4", "iw_cxgb4"),
    ("1077", "Marvell (QLogic)", "qede", "qedr"),
    ("19e5", "HiSilicon", "hns3", "hns_roce_hw_v2"),
    ("1d0f", "Amazon", "efa", "efa"),
    ("1414", "Microsoft", "mana", "mana_ib"),
    ("1dd8", "AMD (Pensando)", "ionic", "ionic_rdma"),
    ("1ded", "Alibaba", "erdma", "erdma"),
];

fn hardware(sys: &Path) -> Vec<PciFunction> {
    let bus = sys.join("bus/pci/devices");
    let mut found = Vec::new();
    for address in names(&bus) {
        let function = bus.join(&address);
        // PCI class 02 is network controllers, InfiniBand included.
        let is_network =
            text(&function.join("class")).is_some_and(|class| class.starts_with("0x02"));
        let Some(vendor) = text(&function.join("vendor")).filter(|_| is_network) else { continue };
        let driver = link(&function.join("driver"));
        // Vendors also make adapters without RDMA: the bound driver tells. Without one, the
        // vendor's usual driver is assumed.
        let of_vendor = |row: &&(&str, _, _, _)| vendor.strip_prefix("0x") == Some(row.0);
        let known = match driver.as_deref() {
            Some(driver) if !PASSTHROUGH_DRIVERS.contains(&driver) => {
                ADAPTERS.iter().find(|row| row.2 == driver)
            }
            _ => ADAPTERS.iter().filter(|row| RDMA_BY_VENDOR.contains(&row.0)).find(of_vendor),
        };
        if let Some(&(_, vendor, _, rdma_module)) = known {
            found.push(PciFunction { address, vendor, driver, rdma_module });
        }
    }
    found
}

/// Drivers that pass an adapter through to a virtual machine or a program.
pub(super) const PASSTHROUGH_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "pci-stub"];

/// Vendors whose current network adapters all support RDMA.
const RDMA_BY_VENDOR: [&str; 3] = ["15b3", "1425", "1dd8"];

fn modules(sys: &Path) -> Vec<String> {
    const OTHERS: [&str; 9] = [
        "ib_core",
        "ib_uverbs",
        "rdma_cm",
        "rdma_ucm",
        "rdma_rxe",
        "siw",
        "mlx5_core",
        "mlx4_core",
        "vmw_pvrdma",
    ];
    let known =
        |name: &String| OTHERS.contains(&name.as_str()) || ADAPTERS.iter().any(|row| row.3 == name);
    names(&sys.join("module")).into_iter().filter(known).collect()
}

fn devices(root: &Path) -> Vec<KernelDevice> {
    let sys = root.join("sys/class");
    let nodes: Vec<(String, String)> = names(&sys.join("infiniband_verbs"))
        .into_iter()
        .filter_map(|node| {
            Some((text(&sys.join("infiniband_verbs").join(&node).join("ibdev"))?, node))
        })
        .collect();
    let device = |name: String| {
        let node = nodes.iter().find(|(device, _)| *device == name).map(|(_, node)| node.clone());
        let access = match &node {
            Some(node) => access(&root.join("dev/infiniband").join(node)),
            None => NodeAccess::Missing,
        };
        let unreachable_gids = unreachable_gids(&sys.join("infiniband").join(&name));
        let ports = configured_ports(root, &name);
        KernelDevice { name, node, access, unreachable_gids, ports }
    };
    names(&sys.join("infiniband")).into_iter().map(device).collect()
}

fn configured_ports(root: &Path, device: &str) -> Vec<KernelPort> {
    let sys = root.join("sys/class/infiniband").join(device);
    // Exists while the administrator has a directory for the device.
    let cm = root.join("sys/kernel/config/rdma_cm").join(device).join("ports");
    let mut numbers = names(&sys.join("tc"));
    numbers.extend(names(&cm));
    let mut numbers: Vec<u8> = numbers.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let set = |path: &Path| text(path).filter(|text| !text.is_empty());
    let port = |port: u8| {
        let number = port.to_string();
        let (tc, cm) = (sys.join("tc").join(&number), cm.join(&number));
        KernelPort {
            port,
            forced_traffic_class: set(&tc.join("traffic_class"))
                .map(|text| text.lines().collect::<Vec<_>>().join(", ")),
            default_roce_tos: set(&cm.join("default_roce_tos")).and_then(|text| text.parse().ok()),
            default_roce_mode: set(&cm.join("default_roce_mode")),
        }
    };
    numbers.into_iter().map(port).collect()
}

/// Opens and closes the node as libibverbs does.
fn access(node: &Path) -> NodeAccess {
    match File::options().read(true).write(true).open(node) {
        Ok(_) => NodeAccess::Open,
        Err(error) => match error.raw_os_error() {
            Some(1) => NodeAccess::Forbidden,
            Some(2) => NodeAccess::Missing,
            Some(13) => NodeAccess::Denied,
            other => NodeAccess::Failed(other.unwrap_or(0)),
        },
    }
}

/// Counts GIDs above index 255: an address handle has 8 bits for the index.
fn unreachable_gids(device: &Path) -> usize {
    let ports = names(&device.join("ports"));
    let tables = ports.iter().map(|port| device.join("ports").join(port).join("gids"));
    let used = |gid: String| gid.chars().any(|c| c != '0' && c != ':');
    let beyond = |table: &Path, name: &String| {
        name.parse().is_ok_and(|index: u32| index > u8::MAX.into())
            && text(&table.join(name)).is_some_and(used)
    };
    tables.map(|table| names(&table).iter().filter(|name| beyond(&table, name)).count()).sum()
}

fn container(root: &Path) -> Option<Container> {
    // The first process shows the container; `sudo` clears the environment variables that would.
    let groups = text(&root.join("proc/1/cgroup")).unwrap_or_default();
    if groups.contains("kubepods") || root.join("var/run/secrets/kubernetes.io").exists() {
        return Some(Container::Kubernetes);
    }
    let marked = root.join(".dockerenv").exists() || root.join("run/.containerenv").exists();
    let named = ["docker", "containerd", "libpod", "lxc"].iter().any(|name| groups.contains(name));
    (marked || named).then_some(Container::Other)
}

fn locked_memory(root: &Path) -> Option<LockLimit> {
    let limits = text(&root.join("proc/self/limits"))?;
    let values = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let mut values = values.split_whitespace().map(|value| match value {
        "unlimited" => Some(None),
        bytes => bytes.parse().ok().map(Some),
    });
    let (current, highest) = (values.next()??, values.next()??);
    let status = text(&root.join("proc/self/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective =
        effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    // The kernel requires the capability in the initial user namespace. A rootless container has it
    // only in its own.
    let users = text(&root.join("proc/self/uid_map")).unwrap_or_default();
    let first = users.split_whitespace().eq(["0", "0", "4294967295"]) || users.is_empty();
    Some(LockLimit { current, highest, exempt: first && effective & CAP_IPC_LOCK != 0 })
}

const CAP_IPC_LOCK: u64 = 1 << 14;
