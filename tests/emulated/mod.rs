//! Starts the emulated ConnectX of a test program, as the device under test.

use std::sync::OnceLock;

use emulated_connectx::{EmulatedConnectX, Link, Options};

static DEVICE: OnceLock<EmulatedConnectX> = OnceLock::new();

/// Starts it before the program's first thread does: what tests find is a device `mlx5_0`, as on a machine that has one.
///
/// # Panics
///
/// If it cannot be started.
pub(crate) fn start(link: Link) {
    let mut options = Options::default();
    options.link = link;
    let device = EmulatedConnectX::start(options).expect("the emulated device starts");
    assert!(DEVICE.set(device).is_ok(), "started twice");
    // SAFETY: called before `main`, so no other thread of the program runs that could look at the environment.
    unsafe { std::env::set_var("TOKIO_RDMA_DEVICE", "mlx5_0") };
}

/// Calls `start` when the program is loaded.
macro_rules! before_main {
    ($link:expr) => {
        #[used]
        #[unsafe(link_section = ".init_array")]
        static START: extern "C" fn() = {
            extern "C" fn start() {
                crate::emulated::start($link);
            }
            start
        };
    };
}
pub(crate) use before_main;

/// What libmlx5 wrote is what a device can read, whichever tests ran before this one.
#[test]
fn emulated_device_has_nothing_to_complain_about() {
    let device = tokio_rdma::Device::open("mlx5_0").unwrap();
    let dc = device.attr().dc.expect("it has DC");
    assert!(dc.max_rd_atomic > 0 && dc.max_init_rd_atomic > 0, "{dc:?}");
    DEVICE.get().expect("it was started").assert_clean();
}
