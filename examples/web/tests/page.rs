//! Runs the server as a process, and reads its page as a program and in a browser.

#[path = "../../common/program.rs"]
mod program;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Instant;

use program::{Program, TIMEOUT};
use serde_json::Value;

const WEB: &str = env!("CARGO_BIN_EXE_web");

/// Starts a server. Returns the addresses of its page and for RDMA.
fn serve(line: &str) -> (Program, SocketAddr, SocketAddr) {
    let mut server = Program::start(WEB, line);
    let (page, rdma) = server.wait_for("addresses", |server| {
        let output = server.output();
        let (page, rest) = output.strip_prefix("page at http://")?.split_once(", RDMA at ")?;
        let (rdma, _) = rest.split_once(" with ")?;
        Some((page.parse().unwrap(), rdma.parse().unwrap()))
    });
    (server, page, rdma)
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
    let (_server, page, _) = serve("serve --listen 127.0.0.1:0");
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
    let (_server, _, rdma) = serve("serve --listen 127.0.0.1:0 --rdma 127.0.78.1:0");
    let output = Program::start(WEB, &format!("measure --rdma {rdma}")).finish();
    let figures: Value = serde_json::from_str(&output).unwrap();
    assert!(figures["p50_us"].as_f64() > Some(0.0), "{figures}");
}

#[test]
#[ignore = "needs a browser: TOKIO_RDMA_BROWSER"]
fn browser_shows_the_figures() {
    let browser = std::env::var("TOKIO_RDMA_BROWSER")
        .expect("this test needs TOKIO_RDMA_BROWSER, the path of Chromium");
    let (_server, page, _) = serve("serve --listen 127.0.0.1:0");
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
