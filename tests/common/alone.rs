//! Tests that look at their whole process, and run beside others.

use std::env;
use std::process::Command;

const SETTING: &str = "TOKIO_RDMA_ALONE";

/// Returns true in a process that runs only `test`. Otherwise starts this program again for it,
/// prints its output, panics if it fails, and returns false.
pub(crate) fn alone(test: &str) -> bool {
    if env::var(SETTING).is_ok_and(|only| only == test) {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).env(SETTING, test);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    let ran = text.contains("test result: ok. 1 passed");
    assert!(output.status.success() && ran, "{test}: {}, in a process of its own", output.status);
    false
}
