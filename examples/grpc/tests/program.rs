//! Runs a server and clients as processes, over UDP and TCP on loopback.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);

/// A running program, killed on drop.
struct Program {
    child: Child,
    line: String,
    file: PathBuf,
}

impl Program {
    fn start(line: &str) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        // Unlike a pipe, a file never blocks the program.
        let file = std::env::temp_dir().join(format!("grpc-{}-{number}", std::process::id()));
        let output = File::create(&file).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_grpc"));
        command
            .args(line.split(' '))
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        // The loopback addresses of these tests need software devices.
        command.env_remove("TOKIO_RDMA_DEVICE");
        Self { child: command.spawn().unwrap(), line: line.to_owned(), file }
    }

    fn output(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        self.until("end", |program| {
            status = program.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
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

/// Runs a client and returns its output.
fn run(line: &str) -> String {
    let mut program = Program::start(line);
    let status = program.wait();
    assert!(status.success(), "{line}: {}", program.output());
    program.output()
}

/// Starts a server at 127.0.76.`host`. UDP software devices need an address each.
fn serve(host: u8, options: &str) -> (Program, SocketAddr) {
    let mut server = Program::start(&format!("serve --listen 127.0.76.{host}:0{options}"));
    let mut address = None;
    server.until("address", |server| {
        let output = server.output();
        let line = output.strip_prefix("listening on ").and_then(|line| line.split_once(" with "));
        address = line.map(|(address, _)| address.parse().unwrap());
        address.is_some()
    });
    (server, address.unwrap())
}

#[test]
fn each_kind_of_call_works_over_both_transports() {
    for (host, options) in [(1, ""), (2, " --tcp")] {
        let (_server, address) = serve(host, options);
        let output = run(&format!("call --connect {address}{options}"));
        for line in [
            "unary: 3 words",
            "server streaming: two",
            "bidirectional: 4 words so far",
            "deadline: ",
            "after a cancelled call: 2 words",
        ] {
            assert!(output.contains(line), "{line}: {output}");
        }
        for depth in [1, 64] {
            let load = "load --calls 500";
            let output = run(&format!("{load} --depth {depth} --connect {address}{options}"));
            assert!(output.starts_with(&format!("500 calls, {depth} in flight: p50 ")), "{output}");
        }
    }
}

#[test]
fn client_of_a_killed_server_ends_with_an_error() {
    let (mut server, address) = serve(3, "");
    let mut client =
        Program::start(&format!("load --calls 1000000000 --depth 8 --connect {address}"));
    // Once the client is connected, its calls use the processor.
    client.until("connection", |client| {
        let stat = std::fs::read_to_string(format!("/proc/{}/schedstat", client.child.id()));
        let spent = stat.ok().and_then(|stat| stat.split(' ').next()?.parse::<u64>().ok());
        spent.is_some_and(|spent| spent > 200_000_000)
    });
    server.child.kill().unwrap();
    let status = client.wait();
    assert_eq!(status.code(), Some(1), "{}", client.output());
    assert!(client.output().starts_with("grpc: "), "{}", client.output());
}

#[test]
fn connection_without_a_server_fails() {
    let (server, address) = serve(4, "");
    drop(server);
    let mut client = Program::start(&format!("call --connect {address}"));
    let status = client.wait();
    assert_eq!(status.code(), Some(1), "{}", client.output());
}
