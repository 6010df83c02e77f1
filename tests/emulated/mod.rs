//! Starts the emulated ConnectX of a test program, as the device under test.

use std::process::Command;
use std::sync::OnceLock;

use emulated_connectx::{EmulatedConnectX, Link, Options};

static DEVICE: OnceLock<EmulatedConnectX> = OnceLock::new();

/// Set in the process that has RoCE ports; other processes have InfiniBand ports.
const ROCE: &str = "TOKIO_RDMA_EMULATED_ROCE";

/// Starts the device before the program's first thread: tests find a device `mlx5_0`, as on a machine that has one.
///
/// # Panics
///
/// If it cannot be started.
extern "C" fn start() {
    let mut options = Options::default();
    options.link = if std::env::var_os(ROCE).is_some() { Link::Roce } else { Link::InfiniBand };
    let device = EmulatedConnectX::start(options).expect("the emulated device starts");
    assert!(DEVICE.set(device).is_ok(), "started twice");
    // SAFETY: called before `main`, so no other thread of the program runs that could look at the environment.
    unsafe { std::env::set_var("TOKIO_RDMA_DEVICE", "mlx5_0") };
}

/// The loader calls it before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// All suites again with RoCE ports. The kind of port is a setting of the process, so this starts the program again.
#[test]
fn all_suites_with_roce_ports() {
    if std::env::var_os(ROCE).is_some() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap()).env(ROCE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("test result: ok. "),
        "{}; repeat with {ROCE}=1\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// What libmlx5 wrote is what a device can read, whichever tests ran before this one.
#[test]
fn emulated_device_has_nothing_to_complain_about() {
    let device = tokio_rdma::Device::open("mlx5_0").unwrap();
    let dc = device.attr().dc.expect("it has DC");
    assert!(dc.max_rd_atomic > 0 && dc.max_init_rd_atomic > 0, "{dc:?}");
    DEVICE.get().expect("it was started").assert_clean();
}
