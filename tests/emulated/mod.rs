//! The emulated ConnectX of a test program, as the device under test.

mod doctor;

use std::process::Command;
use std::sync::OnceLock;

use emulated_connectx::{EmulatedConnectX, Link, Options};
use tokio_rdma::types::DataPath;

static DEVICE: OnceLock<EmulatedConnectX> = OnceLock::new();

const ROCE: &str = "TOKIO_RDMA_EMULATED_ROCE";
const POST: &str = "TOKIO_RDMA_POST";

/// Starts device `mlx5_0` before the program starts threads.
///
/// # Panics
///
/// Panics if the device cannot be started.
extern "C" fn start() {
    let mut options = Options::default();
    options.link = if std::env::var_os(ROCE).is_some() { Link::Roce } else { Link::InfiniBand };
    let device = EmulatedConnectX::start(options).expect("the emulated device starts");
    assert!(DEVICE.set(device).is_ok(), "the device was started twice");
    // SAFETY: called before `main`, so no other thread can read the environment.
    unsafe { std::env::set_var("TOKIO_RDMA_DEVICE", "mlx5_0") };
}

// The loader calls `start` before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

// The link layer and the data path are settings of the process, so these start the program again.
#[test]
fn all_suites_pass_with_roce_ports() {
    pass_with(ROCE, "1");
}

#[test]
fn all_suites_pass_through_libmlx5() {
    pass_with(POST, "extended");
}

/// Returns a command that runs this program again, under the emulator of `scripts/aarch64`, if any.
fn this_program() -> Command {
    let program = std::env::current_exe().unwrap();
    let Ok(runner) = std::env::var("TOKIO_RDMA_RUNNER") else { return Command::new(program) };
    let mut words = runner.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).arg(program);
    command
}

/// Runs all tests of this program with an environment variable set.
fn pass_with(name: &str, value: &str) {
    if [ROCE, POST].iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    let output = this_program().env(name, value).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("test result: ok. "),
        "{}; repeat with {name}={value}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

// Checks what was written to the device in the tests that ran before this one.
#[test]
fn emulated_device_reports_no_violations() {
    let device = tokio_rdma::Device::open("mlx5_0").unwrap();
    let path = match std::env::var(POST).as_deref() {
        Ok("chain") => DataPath::Chain,
        Ok("extended") => DataPath::Extended,
        _ => DataPath::Direct,
    };
    assert_eq!(device.attr().data_path, path);
    let dc = device.attr().dc.expect("the emulated device has DC");
    assert!(dc.max_rd_atomic > 0 && dc.max_init_rd_atomic > 0, "{dc:?}");
    DEVICE.get().expect("the device was started before main").assert_clean();
}
