//! Running the program of a test again, with other settings of its process.

use std::process::Command;

/// Returns a command that runs this program again, under the emulator of `scripts/aarch64`, if any.
///
/// # Panics
///
/// Panics if the path of the program is unknown.
#[must_use]
pub fn this_program() -> Command {
    let program = std::env::current_exe().expect("the path of this program is known");
    let Ok(runner) = std::env::var("TOKIO_RDMA_RUNNER") else { return Command::new(program) };
    let mut words = runner.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).arg(program);
    command
}
