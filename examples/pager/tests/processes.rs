//! The program as users run it: all roles as separate processes, some of which are killed.

use std::io::{BufRead, BufReader, Lines};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Maximum wait for a process.
const LONG: Duration = Duration::from_secs(120);

/// Returns an address for a process: a real device has one for all, the software device one per
/// process.
fn address(host: u8) -> IpAddr {
    match std::env::var("PAGER_TEST_ADDRESS") {
        Ok(address) => address.parse().unwrap(),
        Err(_) => Ipv4Addr::new(127, 0, 75, host).into(),
    }
}

/// A process of the program, killed on drop.
struct Process {
    child: Child,
    output: Receiver<String>,
    all: Vec<String>,
}

impl Process {
    fn start(line: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pager"));
        let mut child =
            command.args(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, output) = channel();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let out: Lines<BufReader<ChildStdout>> = BufReader::new(out).lines();
        let stdout_sender = sender.clone();
        std::thread::spawn(move || {
            out.map_while(Result::ok).try_for_each(|line| stdout_sender.send(line))
        });
        std::thread::spawn(move || {
            BufReader::new(err).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, output, all: Vec::new() }
    }

    fn wait_for(&mut self, what: &str) -> String {
        let deadline = Instant::now() + LONG;
        loop {
            match self.output.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    println!("{line}");
                    self.all.push(line.clone());
                    if line.contains(what) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with {what:?} ({error}): {:#?}", self.all),
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn interrupt(&self) {
        let sent =
            Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for the process to exit; returns its status and its whole output.
    fn end(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + LONG;
        while let Ok(line) =
            self.output.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            println!("{line}");
            self.all.push(line);
        }
        assert!(Instant::now() < deadline, "the process does not exit: {:#?}", self.all);
        (self.child.wait().unwrap(), self.all.join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if the process has exited, which is fine.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn coordinator() -> (Process, String) {
    coordinator_with(&[])
}

fn coordinator_with(more: &[&str]) -> (Process, String) {
    let mut process = Process::start(&[&["coordinator", "--listen", "127.0.0.1:0"], more].concat());
    let output = process.wait_for("coordinator at ");
    (process, output.replace("coordinator at ", ""))
}

fn owner(url: &str, name: &str, host: u8, more: &[&str]) -> Process {
    let address = address(host).to_string();
    let line = [&["owner", name, "--address", &address, "--coordinator", url], more].concat();
    let mut process = Process::start(&line);
    process.wait_for("lends pages");
    process
}

fn client(url: &str, host: u8, more: &[&str]) -> Process {
    let address = address(host).to_string();
    Process::start(
        &[&["client", "--address", &address, "--coordinator", url, "--cache", "256"], more]
            .concat(),
    )
}

#[test]
fn random_pages_of_two_owners_are_verified_and_restored() {
    let (_coordinator, url) = coordinator();
    let _a = owner(&url, "a", 1, &["--memory", "4"]);
    let _b = owner(&url, "b", 2, &["--memory", "4", "--first", "1024"]);
    let (status, output) =
        client(&url, 3, &["--reads", "4000", "--writes", "20", "--pages", "2048"]).end();
    assert!(status.success(), "{output}");
    assert!(output.contains("4000 pages verified"), "{output}");
    // The client restored the initial contents for the next one.
    let (status, output) = client(&url, 3, &["--reads", "4000", "--in-order"]).end();
    assert!(status.success(), "{output}");
    assert!(output.contains("100.0     500.0   on real hardware"), "{output}");
}

#[test]
fn killed_owner_is_replaced_by_its_replica() {
    let (_coordinator, url) = coordinator();
    let a = owner(&url, "a", 11, &["--memory", "4"]);
    let _b = owner(&url, "b", 12, &["--replica-of", "a"]);
    // More than can be read during the test.
    let line = ["--reads", "1000000000", "--writes", "10", "--copies", "2"];
    let mut client = client(&url, 13, &line);
    client.wait_for("pages verified, 0 nodes lost");
    a.kill();
    client.wait_for("pages verified, 1 nodes lost");
    client.wait_for("pages verified, 1 nodes lost");
    client.interrupt();
    let (status, output) = client.end();
    assert!(status.success(), "{output}");
    assert!(output.contains("node a was lost: "), "{output}");
}

#[test]
fn error_after_the_only_owner_was_killed_names_page_and_node() {
    let (_coordinator, url) = coordinator();
    let a = owner(&url, "a", 21, &["--memory", "4"]);
    let mut client = client(&url, 22, &["--reads", "1000000000"]);
    client.wait_for("pages verified, 0 nodes lost");
    a.kill();
    let (status, output) = client.end();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("is lost: all nodes with a copy failed; last node a: "), "{output}");
    assert!(!output.contains("WRONG"), "{output}");
}

#[test]
fn owner_reports_a_coordinator_that_does_not_know_it() {
    let mut first = Process::start(&["coordinator", "--listen", "127.0.75.40:0"]);
    let url = first.wait_for("coordinator at ").replace("coordinator at ", "");
    let mut a = owner(&url, "a", 41, &["--memory", "4"]);
    first.kill();
    let mut second =
        Process::start(&["coordinator", "--listen", url.trim_start_matches("http://")]);
    second.wait_for("coordinator at ");
    a.wait_for("a is off the map: memory lent by the map of coordinator ");
    // Its memory is on no map; a newly filled one is.
    let _b = owner(&url, "b", 42, &["--memory", "4"]);
    let (status, output) =
        client(&url, 43, &["--reads", "1000", "--pages", "1024", "--writes", "10"]).end();
    assert!(status.success(), "{output}");
    a.interrupt();
    let (status, output) = a.end();
    assert!(status.success(), "{output}");
}

#[test]
fn killed_writer_is_reported_to_the_next_client() {
    let (_coordinator, url) = coordinator_with(&["--lease", "5"]);
    let _a = owner(&url, "a", 51, &["--memory", "4"]);
    let mut writes = client(&url, 52, &["--reads", "1000000000", "--writes", "50"]);
    writes.wait_for("pages verified, 0 nodes lost");
    writes.kill();
    // Other clients may start until the lease expires.
    let deadline = Instant::now() + LONG;
    let output = loop {
        let (status, output) = client(&url, 53, &["--reads", "0"]).end();
        if !status.success() {
            break output;
        }
        assert!(Instant::now() < deadline, "the next client is not refused: {output}");
    };
    assert!(output.contains("a client stopped without finishing its writes"), "{output}");
    let (status, output) = client(&url, 53, &["--reads", "0", "--unclean-too"]).end();
    assert!(status.success(), "{output}");
}

#[test]
fn missing_coordinator_is_reported() {
    let (status, output) = client("http://127.0.75.99:1", 31, &[]).end();
    assert_eq!(status.code(), Some(1));
    assert!(output.contains("request to coordinator http://127.0.75.99:1 failed"), "{output}");
}
