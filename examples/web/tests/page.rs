//! Runs the server as a process, and reads its page as a program and in a browser.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

const TIMEOUT: Duration = Duration::from_secs(120);

/// A running program, killed on drop.
struct Program {
    child: Child,
    file: PathBuf,
}

impl Program {
    fn start(line: &str) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        // Unlike a pipe, a file never blocks the program.
        let file = std::env::temp_dir().join(format!("web-{}-{number}", std::process::id()));
        let output = File::create(&file).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_web"));
        command
            .args(line.split(' '))
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        // The loopback addresses of these tests need software devices.
        command.env_remove("TOKIO_RDMA_DEVICE");
        Self { child: command.spawn().unwrap(), file }
    }

    fn output(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    /// Waits for the addresses of a server: of its page, and for RDMA.
    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        let start = Instant::now();
        loop {
            let output = self.output();
            if let Some(line) = output.strip_prefix("page at http://")
                && let Some((page, rest)) = line.split_once(", RDMA at ")
                && let Some((rdma, _)) = rest.split_once(" with ")
            {
                return (page.parse().unwrap(), rdma.parse().unwrap());
            }
            assert!(start.elapsed() < TIMEOUT, "no server: {output}");
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

/// Requests a path, and returns the answer as it arrives.
fn get(server: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").unwrap();
    stream
}

#[test]
fn page_and_its_events_show_both_transports() {
    let server = Program::start("serve --listen 127.0.0.1:0");
    let (page, _) = server.addresses();
    let mut html = String::new();
    get(page, "/").read_to_string(&mut html).unwrap();
    assert!(html.starts_with("HTTP/1.1 200 OK") && html.contains("EventSource(\"/figures\")"));

    let events = BufReader::new(get(page, "/figures")).lines().map(Result::unwrap);
    let measured = events
        .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
        .map(|data| serde_json::from_str::<Value>(&data).unwrap())
        .find(|figures| figures["rdma"]["requests"].as_u64() > Some(0));
    let measured = measured.expect("the events go on");
    for transport in ["rdma", "tcp"] {
        for figure in ["p50_us", "p99_us", "throughput_mb_s"] {
            let value = measured[transport][figure].as_f64();
            assert!(value > Some(0.0), "{transport}, {figure}: {measured}");
        }
    }
}

#[test]
fn another_process_measures_the_server_over_udp() {
    let server = Program::start("serve --listen 127.0.0.1:0 --rdma 127.0.78.1:0");
    let (_, rdma) = server.addresses();
    let mut client = Program::start(&format!("measure --rdma {rdma}"));
    let status = client.child.wait().unwrap();
    assert!(status.success(), "{}", client.output());
    let figures: Value = serde_json::from_str(&client.output()).unwrap();
    assert!(figures["p50_us"].as_f64() > Some(0.0), "{figures}");
}

#[test]
fn browser_shows_the_figures() {
    let Ok(browser) = std::env::var("TOKIO_RDMA_BROWSER") else {
        eprintln!("SKIPPED browser: TOKIO_RDMA_BROWSER names none");
        return;
    };
    let server = Program::start("serve --listen 127.0.0.1:0");
    let (page, _) = server.addresses();
    let start = Instant::now();
    loop {
        let output = Command::new(&browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--timeout=4000"])
            .arg(format!("http://{page}/"))
            .output()
            .unwrap();
        let dom = String::from_utf8_lossy(&output.stdout).into_owned();
        let shown = |id: &str| {
            let (_, rest) = dom.split_once(&format!("id=\"{id}\">"))?;
            rest.split('<').next()?.trim().parse::<f64>().ok()
        };
        let ids = ["rdma-p50", "rdma-p99", "rdma-throughput", "tcp-p50", "tcp-throughput"];
        if ids.into_iter().all(|id| shown(id) > Some(0.0)) && dom.contains("measurements: ") {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{dom}");
    }
}
