//! The emulated ConnectX of a test program, as the device under test.

mod doctor;

use std::sync::OnceLock;

use emulated_connectx::{EmulatedConnectX, Link, Options, Release, this_program};
use tokio_rdma::types::{DataPath, SendOp, WcStatus};

use crate::common::{eventually, raw};

static DEVICE: OnceLock<EmulatedConnectX> = OnceLock::new();

const ROCE: &str = "TOKIO_RDMA_EMULATED_ROCE";
const POST: &str = "TOKIO_RDMA_POST";
const COMPRESSION: &str = "TOKIO_RDMA_CQE_COMPRESSION";
/// Settings of the process, for which a test starts the program again.
const SETTINGS: [&str; 3] = [ROCE, POST, COMPRESSION];

/// Starts device `mlx5_0` before the program starts threads.
///
/// # Panics
///
/// Panics if the device cannot be started.
extern "C" fn start() {
    let mut options = Options::default();
    options.link = if std::env::var_os(ROCE).is_some() { Link::Roce } else { Link::InfiniBand };
    // Sessions of all lengths up to this one, which is longer than four arrays.
    options.compressed_session = 33;
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

#[test]
fn all_suites_pass_with_compressed_completion_entries() {
    pass_with(COMPRESSION, "1");
}

#[test]
fn compression_is_on_or_off() {
    const CHILD: &str = "TOKIO_RDMA_OPENS";
    if std::env::var_os(CHILD).is_some() {
        let error = tokio_rdma::Device::open("mlx5_0").unwrap_err();
        assert!(
            error.to_string().contains("TOKIO_RDMA_CQE_COMPRESSION (must be 0 or 1)"),
            "{error}"
        );
        return;
    }
    for value in ["", "2", "on"] {
        let mut command = this_program();
        command.args(["--exact", "emulated::compression_is_on_or_off"]);
        // The setting is read for direct queues only.
        command.env_remove(POST);
        let output = command.env(CHILD, "1").env(COMPRESSION, value).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("test result: ok. 1 passed"), "{COMPRESSION}={value}: {text}");
    }
}

pub(crate) fn adapter() -> &'static EmulatedConnectX {
    DEVICE.get().expect("the device was started before main")
}

/// Runs all tests of this program with an environment variable set.
fn pass_with(name: &str, value: &str) {
    if SETTINGS.iter().any(|name| std::env::var_os(name).is_some()) {
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
    let emulated = adapter();
    emulated.assert_clean();
    if !compresses() {
        assert_eq!(emulated.counters().compressed_sessions, 0);
    }
}

fn compresses() -> bool {
    std::env::var(COMPRESSION).is_ok_and(|value| value == "1")
}

// Elsewhere, sessions depend on how many requests the device finds at a time.
#[test]
fn completions_released_together_arrive_in_sessions_if_requested() {
    const COUNT: u64 = 40;
    let emulated = adapter();
    let mut options = raw::Options::default();
    options.caps.max_send_wr = 64;
    let (a, b, _setup) = raw::connected(&options);
    let (from, to) = (a.memory(64), b.memory(64));
    emulated.hold_completions(Some(a.qp.qpn().0));
    for id in 0..COUNT {
        a.send(id, SendOp::Write(to.remote(0)), &[from.sge(0, 64)]).unwrap();
    }
    eventually("held completions", || (emulated.held_completions() >= 40).then_some(()));
    let before = emulated.counters().compressed_sessions;
    emulated.release_completions(Release::InOrder);
    let sessions = emulated.counters().compressed_sessions - before;
    // Other tests write sessions, too.
    assert!(if compresses() { sessions >= 2 } else { sessions == 0 }, "{sessions} sessions");
    let expected: Vec<_> = (0..COUNT).map(|id| (id, WcStatus::SUCCESS)).collect();
    assert_eq!(raw::outcome(&a.sent(40)), expected);
}
