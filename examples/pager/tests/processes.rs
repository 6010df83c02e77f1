//! The program as users run it: coordinator, owners and client in processes of their own, which are killed.

use std::io::{BufRead, BufReader, Lines};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest that a process is waited for.
const LONG: Duration = Duration::from_secs(120);

/// A real device has its own address, which all may share; the software device one for each process.
fn address(host: u8) -> IpAddr {
    match std::env::var("PAGER_TEST_ADDRESS") {
        Ok(address) => address.parse().unwrap(),
        Err(_) => Ipv4Addr::new(127, 0, 75, host).into(),
    }
}

/// The program in a role, killed when it is dropped.
struct Process {
    child: Child,
    said: Receiver<String>,
    all: Vec<String>,
}

impl Process {
    fn start(line: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pager"));
        let mut child =
            command.args(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (tell, said) = channel();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let out: Lines<BufReader<ChildStdout>> = BufReader::new(out).lines();
        let told = tell.clone();
        std::thread::spawn(move || out.map_while(Result::ok).try_for_each(|line| told.send(line)));
        std::thread::spawn(move || {
            BufReader::new(err).lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        Self { child, said, all: Vec::new() }
    }

    /// The first line that has this.
    fn wait_for(&mut self, what: &str) -> String {
        let deadline = Instant::now() + LONG;
        loop {
            match self.said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    println!("{line}");
                    self.all.push(line.clone());
                    if line.contains(what) {
                        return line;
                    }
                }
                Err(error) => panic!("{what:?} was not said ({error}), but {:#?}", self.all),
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ctrl-C.
    fn interrupt(&self) {
        let sent =
            Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// How it ended by itself, and all that it has said.
    fn end(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + LONG;
        // Its output ends with it.
        while let Ok(line) =
            self.said.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            println!("{line}");
            self.all.push(line);
        }
        assert!(Instant::now() < deadline, "it does not end: {:#?}", self.all);
        (self.child.wait().unwrap(), self.all.join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if it has ended, which is as well.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn coordinator() -> (Process, String) {
    coordinator_with(&[])
}

fn coordinator_with(more: &[&str]) -> (Process, String) {
    let mut process = Process::start(&[&["coordinator", "--listen", "127.0.0.1:0"], more].concat());
    let said = process.wait_for("coordinator at ");
    (process, said.replace("coordinator at ", ""))
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
fn random_pages_of_two_owners_are_verified_and_left_as_they_were() {
    let (_coordinator, url) = coordinator();
    let _a = owner(&url, "a", 1, &["--memory", "4"]);
    let _b = owner(&url, "b", 2, &["--memory", "4", "--first", "1024"]);
    let (status, said) =
        client(&url, 3, &["--reads", "4000", "--writes", "20", "--pages", "2048"]).end();
    assert!(status.success(), "{said}");
    assert!(said.contains("4000 pages verified"), "{said}");
    // What was written is undone: the next one finds what was there at first.
    let (status, said) = client(&url, 3, &["--reads", "4000", "--in-order"]).end();
    assert!(status.success(), "{said}");
    assert!(said.contains("100.0     500.0   on real hardware"), "{said}");
}

#[test]
fn an_owner_that_is_killed_is_replaced_by_its_replica() {
    let (_coordinator, url) = coordinator();
    let a = owner(&url, "a", 11, &["--memory", "4"]);
    let _b = owner(&url, "b", 12, &["--replica-of", "a"]);
    // More than can be read while somebody looks away.
    let line = ["--reads", "1000000000", "--writes", "10", "--copies", "2"];
    let mut client = client(&url, 13, &line);
    client.wait_for("pages verified, 0 nodes lost");
    a.kill();
    client.wait_for("pages verified, 1 nodes lost");
    client.wait_for("pages verified, 1 nodes lost");
    client.interrupt();
    let (status, said) = client.end();
    assert!(status.success(), "{said}");
    assert!(said.contains("node a was lost: "), "{said}");
}

#[test]
fn an_owner_that_is_killed_without_a_replica_is_an_error_that_says_which_page_and_node() {
    let (_coordinator, url) = coordinator();
    let a = owner(&url, "a", 21, &["--memory", "4"]);
    let mut client = client(&url, 22, &["--reads", "1000000000"]);
    client.wait_for("pages verified, 0 nodes lost");
    a.kill();
    let (status, said) = client.end();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("is lost: no node has it any more, and the last, a: "), "{said}");
    assert!(!said.contains("WRONG"), "{said}");
}

#[test]
fn an_owner_says_so_when_a_coordinator_that_does_not_know_it_takes_the_place_of_its_own() {
    let mut first = Process::start(&["coordinator", "--listen", "127.0.75.40:0"]);
    let url = first.wait_for("coordinator at ").replace("coordinator at ", "");
    let mut a = owner(&url, "a", 41, &["--memory", "4"]);
    first.kill();
    let mut second =
        Process::start(&["coordinator", "--listen", url.trim_start_matches("http://")]);
    second.wait_for("coordinator at ");
    a.wait_for("a is off the map: this memory was lent by the map of coordinator ");
    // Its memory is on no map. One that is filled anew is.
    let _b = owner(&url, "b", 42, &["--memory", "4"]);
    let (status, said) =
        client(&url, 43, &["--reads", "1000", "--pages", "1024", "--writes", "10"]).end();
    assert!(status.success(), "{said}");
    a.interrupt();
    let (status, said) = a.end();
    assert!(status.success(), "{said}");
}

#[test]
fn a_client_that_is_killed_while_it_writes_is_told_of_to_the_next() {
    let (_coordinator, url) = coordinator_with(&["--lease", "5"]);
    let _a = owner(&url, "a", 51, &["--memory", "4"]);
    let mut writes = client(&url, 52, &["--reads", "1000000000", "--writes", "50"]);
    writes.wait_for("pages verified, 0 nodes lost");
    writes.kill();
    // Its lease is over at some time, and until then others may come.
    let deadline = Instant::now() + LONG;
    let said = loop {
        let (status, said) = client(&url, 53, &["--reads", "0"]).end();
        if !status.success() {
            break said;
        }
        assert!(Instant::now() < deadline, "nobody is told: {said}");
    };
    assert!(said.contains("a client has not come to the end of writing"), "{said}");
    let (status, said) = client(&url, 53, &["--reads", "0", "--unclean-too"]).end();
    assert!(status.success(), "{said}");
}

#[test]
fn who_finds_no_coordinator_says_so() {
    let (status, said) = client("http://127.0.75.99:1", 31, &[]).end();
    assert_eq!(status.code(), Some(1));
    assert!(said.contains("the coordinator at http://127.0.75.99:1"), "{said}");
}
