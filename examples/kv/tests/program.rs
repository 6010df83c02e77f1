//! The program as users run it, in one process and in two. It checks its own work: what is looked at here is what it says.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv::{ClientConfig, KvClient, KvError};
use serde_json::Value;
use tokio::time::timeout;
use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig};

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(120);

/// A program that was started. It ends when this is dropped.
struct Program {
    child: Child,
    line: String,
    /// What it says.
    file: std::path::PathBuf,
}

impl Program {
    fn start(line: &str) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        // A file has room for all that it says, whoever looks when.
        let file = std::env::temp_dir().join(format!("kv-{}-{number}", std::process::id()));
        let said = File::create(&file).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv"));
        command
            .args(line.split(' '))
            .stdin(Stdio::null())
            .stdout(said.try_clone().unwrap())
            .stderr(said);
        // What listens at addresses of loopback is a software device.
        command.env_remove("TOKIO_RDMA_DEVICE");
        Self { child: command.spawn().unwrap(), line: line.to_owned(), file }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    /// What it has said when it has ended as it should.
    fn finish(mut self) -> String {
        let status = self.wait();
        assert!(status.success(), "{}: {}", self.line, self.said());
        self.said()
    }

    /// What it has said when it has ended with an error.
    fn fail(mut self) -> String {
        let status = self.wait();
        assert_eq!(status.code(), Some(1), "{}: {}", self.line, self.said());
        self.said()
    }

    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None => {
                    assert!(start.elapsed() < LONG, "{} does not end: {}", self.line, self.said())
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Fails if it has ended, which is as well.
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(&self.file).ok();
    }
}

fn run(line: &str) -> String {
    Program::start(line).finish()
}

/// A server at 127.0.77.`host`, which no other test has: the software device over UDP has one program at each address.
fn serve(host: u8, options: &str) -> (Program, SocketAddr) {
    let server = Program::start(&format!("serve --listen 127.0.77.{host}:0{options}"));
    let start = Instant::now();
    loop {
        let said = server.said();
        if let Some((said, _)) =
            said.strip_prefix("listening on ").and_then(|rest| rest.split_once(" with "))
        {
            return (server, said.parse().unwrap());
        }
        assert!(start.elapsed() < LONG, "no server: {said}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client's, at 127.0.77.`host`.
fn udp_device(host: u8) -> Device {
    let ip = IpAddr::V4(Ipv4Addr::new(127, 0, 77, host));
    Device::software_in(&Network::udp(&UdpConfig::new().address(ip)).unwrap(), &ip.to_string())
        .unwrap()
}

#[test]
fn every_answer_is_right_in_one_process() {
    for wire in ["", " --udp"] {
        // Few keys, some without room, and values long enough to be torn.
        let said = run(&format!(
            "check --duration 0.5 --keys 5 --buckets 1 --slots 4 --max-value 4096{wire}"
        ));
        assert!(said.contains("all answers right: whole values, linearizable"), "{said}");
    }
}

#[test]
fn load_is_measured_in_every_way() {
    for (line, by_read, by_message, put) in [
        ("--puts 50", true, true, true),
        ("--get read --puts 0 --choice uniform --clients 1 --depth 16", true, false, false),
        ("--get message --puts 0 --value 256 --udp", false, true, false),
        ("--puts 100", false, false, true),
    ] {
        let said = run(&format!("load --duration 1 --keys 300 --json {line}"));
        let report: Value = serde_json::from_str(&said).unwrap();
        for (name, called) in
            [("get_by_read", by_read), ("get_by_message", by_message), ("put", put)]
        {
            let times = &report[name];
            assert_eq!(times.is_object(), called, "{line}: {name}: {said}");
            if called {
                assert!(times["p50"].as_f64() <= times["p99_9"].as_f64(), "{line}: {said}");
            }
        }
    }
    let said = run("load --duration 1 --keys 10");
    assert!(said.contains("GET by READ") && said.contains("times as long"), "{said}");
}

#[test]
fn table_without_room_for_the_load_says_so() {
    let said = Program::start("load --duration 0.1 --keys 10 --buckets 1 --slots 8").fail();
    assert!(said.contains("the table is full: all 8 slots"), "{said}");
}

#[test]
fn two_processes_put_get_delete_measure_and_check() {
    let (server, address) = serve(1, " --max-value 4096");
    assert_eq!(run(&format!("put --connect {address} colour red")), "version 1\n");
    assert_eq!(run(&format!("get --connect {address} colour")), "red\n");
    assert_eq!(run(&format!("get --connect {address} --by-message colour")), "red\n");
    assert_eq!(run(&format!("delete --connect {address} colour")), "version 2\n");
    let said = Program::start(&format!("get --connect {address} colour")).fail();
    assert_eq!(said, "kv: no such key: colour\n");
    let said = run(&format!("load --connect {address} --duration 0.5 --keys 500 --json"));
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["processes"], 2);
    // Twice: keys of another run are in the table.
    for _ in 0..2 {
        let said = run(&format!("check --connect {address} --duration 0.5 --clients 2"));
        assert!(said.contains("all answers right: whole values, linearizable"), "{said}");
    }
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn program_whose_server_is_killed_says_so() {
    let (server, address) = serve(2, "");
    let client = KvClient::connect(&udp_device(201), address).await.unwrap();
    let load =
        Program::start(&format!("load --connect {address} --duration 600 --keys 100 --puts 50"));
    // Each key is put once before anything is measured: one that is put again says that this has begun.
    let key = 0_u64.to_be_bytes();
    let version = async || client.get(&key).await.unwrap().map(|found| found.version);
    let measuring = async {
        let mut first = None;
        while first.is_none() || version().await == first {
            first = first.or(version().await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, measuring).await.expect("a key is put again");
    drop(server);
    let said = tokio::task::spawn_blocking(|| load.fail()).await.unwrap();
    assert!(said.starts_with("kv: ") && !said.contains("filling the table"), "{said}");
    let gone = ["the connection has ended", "READ: ", "the server has left", "no result within"];
    assert!(gone.iter().any(|gone| said.contains(gone)), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_to_a_server_that_is_killed_ends_with_an_error() {
    let (server, address) = serve(3, "");
    let device = udp_device(200);
    let config = ClientConfig::default().deadline(LONG / 6);
    let client = Arc::new(KvClient::connect_with(&device, address, config).await.unwrap());
    let done = Arc::new(AtomicU64::new(0));
    let calls: Vec<_> = (0..24_u64)
        .map(|number| {
            let (client, done) = (client.clone(), done.clone());
            tokio::spawn(async move {
                let key = number.to_be_bytes();
                loop {
                    let result = match number % 4 {
                        0 => client.put(&key, &key).await.map(drop),
                        1 => client.get(&key).await.map(drop),
                        2 => client.get_by_message(&key).await.map(drop),
                        _ => client.delete(&key).await.map(drop),
                    };
                    match result {
                        Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                        Err(error) => return error,
                    };
                }
            })
        })
        .collect();
    let some = async {
        while done.load(Ordering::Relaxed) < 500 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, some).await.expect("some calls");
    drop(server);
    for call in calls {
        let error = timeout(LONG, call).await.expect("in bounded time").unwrap();
        let gone = matches!(
            error,
            KvError::Connection(_) | KvError::Read(_) | KvError::ServerLeft | KvError::Deadline(_)
        );
        assert!(gone, "{error:?}");
    }
    let late = timeout(LONG, client.put(b"late", b"")).await.expect("in bounded time");
    assert!(late.is_err());
    // And there is nobody to connect to.
    let config = ClientConfig::default().connect_timeout(Duration::from_millis(200));
    let none = timeout(LONG, KvClient::connect_with(&device, address, config))
        .await
        .expect("in bounded time");
    assert!(matches!(none, Err(KvError::Establish(_))), "{none:?}");
}
