//! A running program of an example, for its tests.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// A running program, killed on drop.
pub(crate) struct Program {
    child: Child,
    line: String,
    file: PathBuf,
}

impl Program {
    /// Starts `executable` with the arguments of `line`.
    pub(crate) fn start(executable: &str, line: &str) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = Path::new(executable).file_name().unwrap().to_str().unwrap();
        // Unlike a pipe, a file never blocks the program.
        let file = std::env::temp_dir().join(format!("{name}-{}-{number}", std::process::id()));
        let output = File::create(&file).unwrap();
        let mut command = Command::new(executable);
        command
            .args(line.split(' '))
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        // The loopback addresses of these tests need software devices.
        command.env_remove("TOKIO_RDMA_DEVICE");
        Self { child: command.spawn().unwrap(), line: line.to_owned(), file }
    }

    /// Starts a server and waits for the address that it prints.
    pub(crate) fn serve(executable: &str, line: &str) -> (Self, SocketAddr) {
        let mut server = Self::start(executable, line);
        let address = server.wait_for("address", |server| {
            let output = server.output();
            let (address, _) = output.strip_prefix("listening on ")?.split_once(" with ")?;
            Some(address.parse().unwrap())
        });
        (server, address)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    /// Waits for success and returns the output.
    pub(crate) fn finish(mut self) -> String {
        let status = self.wait();
        assert!(status.success(), "{}: {}", self.line, self.output());
        self.output()
    }

    /// Waits for failure and returns the output.
    pub(crate) fn fail(mut self) -> String {
        let status = self.wait();
        assert_eq!(status.code(), Some(1), "{}: {}", self.line, self.output());
        self.output()
    }

    fn wait(&mut self) -> ExitStatus {
        self.wait_for("end", |program| program.child.try_wait().unwrap())
    }

    /// Waits until `found` returns a value.
    pub(crate) fn wait_for<T>(
        &mut self,
        what: &str,
        mut found: impl FnMut(&mut Self) -> Option<T>,
    ) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = found(self) {
                return value;
            }
            let (line, output) = (&self.line, self.output());
            assert!(start.elapsed() < TIMEOUT, "{line}: no {what}: {output}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Fails if the program has exited, which is fine.
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(&self.file).ok();
    }
}
