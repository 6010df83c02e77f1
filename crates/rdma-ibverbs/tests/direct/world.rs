//! The device under both data paths, and the process that runs the tests.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Mutex;
use std::time::Duration;

use emulated_connectx::{EmulatedConnectX, Link, Options, this_program};
use rdma_ibverbs::contract::{Context as _, Pd as _};
use rdma_ibverbs::ffi::*;
use rdma_ibverbs::types::{Access, AddressVector, GidKind, PortNum, Transport};
use rdma_ibverbs::{Ah, Context, Mr, Mw, Pd};

/// Selects Ethernet ports for this process.
const ROCE: &str = "TOKIO_RDMA_EMULATED_ROCE";
/// Marks a process that a test has started.
const REPEATED: &str = "TOKIO_RDMA_REPEATED";
const PAGE: usize = 4096;

extern "C" fn prepare() {
    // libmlx5 prints error CQEs, of which the tests make thousands.
    // SAFETY: called before `main`, so no other thread reads the environment.
    unsafe { std::env::set_var("MLX5_DEBUG_FILE", "/dev/null") };
}

// The loader calls `prepare` before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = prepare;

/// Runs all tests again in a process with other settings, which libmlx5 reads from the environment.
#[track_caller]
fn repeat(settings: &[(&str, &str)]) {
    if std::env::var_os(REPEATED).is_some() {
        return;
    }
    let mut command = this_program();
    command.env(REPEATED, "1").envs(settings.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("test result: ok. "),
        "{}; repeat with {settings:?}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn all_tests_pass_with_ethernet_ports_and_long_completion_entries() {
    repeat(&[(ROCE, "1"), ("MLX5_CQE_SIZE", "128")]);
}

#[test]
fn all_tests_pass_without_blue_flame() {
    repeat(&[("MLX5_SHUT_UP_BF", "1")]);
}

/// An open device that posts directly, and a protection domain.
#[derive(Debug)]
pub struct World {
    pub pd: Pd,
    pub context: Context,
    /// Register pages that are memory of the test.
    pages: Mutex<BTreeSet<usize>>,
}

/// Returns whether the processes' settings permit BlueFlame.
pub fn blue_flame() -> bool {
    std::env::var_os("MLX5_SHUT_UP_BF").is_none()
}

pub fn device() -> EmulatedConnectX {
    let mut options = Options::default();
    options.link = if std::env::var_os(ROCE).is_some() { Link::Roce } else { Link::InfiniBand };
    options.manual_stepping = true;
    // No doorbell arrives.
    options.doorbell_patience = Duration::from_secs(86_400);
    EmulatedConnectX::start(options).unwrap()
}

impl World {
    pub fn new() -> Self {
        device();
        let context = Context::open("mlx5_0").unwrap().unwrap();
        let pd = context.create_pd().unwrap();
        Self { pd, context, pages: Mutex::default() }
    }

    pub fn raw_pd(&self) -> *mut ibv_pd {
        self.pd.as_raw().as_ptr()
    }

    pub fn raw_context(&self) -> *mut ibv_context {
        self.context.as_raw().as_ptr()
    }

    /// Replaces the page of a register by memory of the test: the device sees no doorbell, and the
    /// tests read what was stored.
    pub fn silence(&self, register: *mut c_void) {
        let page = register.addr() & !(PAGE - 1);
        if !self.pages.lock().unwrap().insert(page) {
            return;
        }
        // SAFETY: replaces a page that libmlx5 has mapped, whose contents are registers.
        let mapped = unsafe {
            libc::mmap(
                register.with_addr(page),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        assert_eq!(mapped.addr(), page, "{}", std::io::Error::last_os_error());
    }

    /// Returns a route to the device's own port.
    pub fn route(&self) -> AddressVector {
        let port = self.context.port(PortNum(1)).unwrap();
        let best = |kind: GidKind| port.gids.iter().find(move |entry| entry.kind == kind);
        let entry = best(GidKind::RoceV2).or(best(GidKind::InfiniBand)).unwrap();
        let mut route = AddressVector::new(PortNum(1), entry.index, entry.gid);
        route.dlid = port.lid;
        route
    }

    pub fn register(&self, memory: &mut [u8]) -> Mr {
        let first = std::ptr::NonNull::from(&mut *memory).cast();
        let access = Access::LOCAL_WRITE | Access::REMOTE_ALL | Access::MW_BIND;
        // SAFETY: the caller keeps the memory; the device does not execute anything.
        unsafe { self.pd.register(first, memory.len(), memory.as_ptr() as u64, access, true) }
            .unwrap()
    }

    pub fn window(&self) -> Mw {
        self.pd.create_mw().unwrap()
    }

    pub fn address_handles(&self, address: &AddressVector) -> Handles {
        let ours = self.pd.create_ah(address).unwrap();
        let local = address.dgid.0[..2] == [0xfe, 0x80] && address.dlid != 0;
        // SAFETY: zeros are valid.
        let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
        attr.port_num = address.port.0;
        attr.dlid = address.dlid;
        attr.sl = address.service_level;
        attr.is_global = u8::from(!local && !address.dgid.is_zero());
        attr.grh.dgid.raw = address.dgid.0;
        attr.grh.flow_label = address.flow_label;
        attr.grh.sgid_index = address.sgid_index;
        attr.grh.hop_limit = address.hop_limit;
        attr.grh.traffic_class = address.traffic_class;
        // SAFETY: the domain is alive.
        let theirs = unsafe { ibv_create_ah(self.raw_pd(), &raw mut attr) };
        assert!(!theirs.is_null(), "{}", std::io::Error::last_os_error());
        Handles { ours, theirs }
    }
}

/// The address handles of both sides for one address.
#[derive(Debug)]
pub struct Handles {
    pub ours: Ah,
    pub theirs: *mut ibv_ah,
}

impl Drop for Handles {
    fn drop(&mut self) {
        // SAFETY: created by this object.
        assert_eq!(unsafe { ibv_destroy_ah(self.theirs) }, 0);
    }
}

/// Attributes of `ibv_modify_qp(3)` for each change of state up to RTS.
pub fn attributes(world: &World, transport: Transport) -> [rdma_ibverbs::types::QpAttr; 3] {
    use rdma_ibverbs::types::{AckTimeout, Mtu, Psn, Qkey, QpAttr, QpState, Qpn, RnrTimer};
    let mut all = [QpState::Init, QpState::Rtr, QpState::Rts].map(QpAttr::to_state);
    let [init, rtr, rts] = &mut all;
    (init.pkey_index, init.port) = (Some(0), Some(PortNum(1)));
    rts.sq_psn = Some(Psn::new(7));
    match transport {
        Transport::Rc | Transport::Uc => init.access = Some(Access::REMOTE_ALL),
        Transport::Ud => init.qkey = Some(Qkey(0x1234)),
        Transport::Dci => {}
    }
    if matches!(transport, Transport::Rc | Transport::Uc) {
        rtr.address = Some(world.route());
        (rtr.dest_qpn, rtr.rq_psn) = (Some(Qpn(0x99)), Some(Psn::new(9)));
    }
    if transport != Transport::Ud {
        rtr.path_mtu = Some(Mtu::Mtu1024);
    }
    if transport == Transport::Rc {
        (rtr.max_dest_rd_atomic, rtr.min_rnr_timer) = (Some(4), Some(RnrTimer::from_code(1)));
    }
    if matches!(transport, Transport::Rc | Transport::Dci) {
        rts.timeout = Some(AckTimeout::from_code(14));
        (rts.retry_count, rts.rnr_retry, rts.max_rd_atomic) = (Some(3), Some(3), Some(4));
    }
    all
}

/// A generator of numbers that are the same in each run.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns a number below `limit`, or 0.
    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.0 >> 33) as u32).checked_rem(limit).unwrap_or(0)
    }
}
