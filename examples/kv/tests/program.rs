//! Runs the program as a user does. The program checks its own data; these tests check its output.

#[path = "../../common/program.rs"]
mod program;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv::{ClientConfig, FailoverClient, KvClient, KvError};
use program::{Program, TIMEOUT};
use serde_json::Value;
use tokio::time::timeout;
use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::AckTimeout;

const KV: &str = env!("CARGO_BIN_EXE_kv");

fn start(line: &str) -> Program {
    Program::start(KV, line)
}

fn run(line: &str) -> String {
    start(line).finish()
}

/// Starts a server at 127.0.77.`host`. UDP software devices need an address each.
fn serve(host: u8, options: &str) -> (Program, SocketAddr) {
    Program::serve(KV, &format!("serve --listen 127.0.77.{host}:0{options}"))
}

fn udp_device(host: u8) -> Device {
    let ip = IpAddr::V4(Ipv4Addr::new(127, 0, 77, host));
    Device::software_in(&Network::udp(&UdpConfig::new().address(ip)).unwrap(), &ip.to_string())
        .unwrap()
}

#[test]
fn every_answer_is_correct_in_one_process() {
    for wire in ["", " --udp"] {
        // Few keys, some without a free slot, and values long enough to be torn.
        let output = run(&format!(
            "check --duration 0.5 --keys 5 --buckets 1 --slots 4 --max-value 4096{wire}"
        ));
        assert!(output.contains("all answers correct: whole values, linearizable"), "{output}");
    }
}

#[test]
fn load_measures_each_kind_of_call() {
    for (line, by_read, by_message, put) in [
        ("--puts 50", true, true, true),
        ("--get read --puts 0 --choice uniform --clients 1 --depth 16", true, false, false),
        ("--get message --puts 0 --value 256 --udp", false, true, false),
        ("--puts 100", false, false, true),
    ] {
        let output = run(&format!("load --duration 1 --keys 300 --json {line}"));
        let report: Value = serde_json::from_str(&output).unwrap();
        for (name, called) in
            [("get_by_read", by_read), ("get_by_message", by_message), ("put", put)]
        {
            let times = &report[name];
            assert_eq!(times.is_object(), called, "{line}: {name}: {output}");
            if called {
                assert!(times["p50"].as_f64() <= times["p99_9"].as_f64(), "{line}: {output}");
            }
        }
    }
    let output = run("load --duration 1 --keys 10");
    assert!(output.contains("GET by READ") && output.contains("times as long"), "{output}");
}

#[test]
fn full_table_is_reported() {
    let output = start("load --duration 0.1 --keys 10 --buckets 1 --slots 8").fail();
    assert!(output.contains("bucket full: all 8 slots"), "{output}");
}

#[test]
fn two_processes_put_get_delete_measure_and_check() {
    let (server, address) = serve(1, " --max-value 4096");
    assert_eq!(run(&format!("put --connect {address} colour red")), "version 1\n");
    assert_eq!(run(&format!("get --connect {address} colour")), "red\n");
    assert_eq!(run(&format!("get --connect {address} --by-message colour")), "red\n");
    assert_eq!(run(&format!("delete --connect {address} colour")), "version 2\n");
    let output = start(&format!("get --connect {address} colour")).fail();
    assert_eq!(output, "kv: no such key: colour\n");
    let output = run(&format!("load --connect {address} --duration 0.5 --keys 500 --json"));
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["processes"], 2);
    // The second run finds keys of the first in the table.
    for _ in 0..2 {
        let output = run(&format!("check --connect {address} --duration 0.5 --clients 2"));
        assert!(output.contains("all answers correct: whole values, linearizable"), "{output}");
    }
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_server_is_reported() {
    let (server, address) = serve(2, "");
    let client = KvClient::connect(&udp_device(201), address).await.unwrap();
    let load = start(&format!("load --connect {address} --duration 600 --keys 100 --puts 50"));
    // The load puts each key once before it measures. A second PUT shows that measuring has begun.
    let key = 0_u64.to_be_bytes();
    let version = async || client.get(&key).await.unwrap().map(|found| found.version);
    let measuring = async {
        let mut first = None;
        while first.is_none() || version().await == first {
            first = first.or(version().await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(TIMEOUT, measuring).await.expect("a key is put again");
    drop(server);
    let output = tokio::task::spawn_blocking(|| load.fail()).await.unwrap();
    assert!(output.starts_with("kv: ") && !output.contains("failed to fill the table"), "{output}");
    let gone = [
        "connection closed",
        "READ failed: ",
        "the server closed the connection",
        "no result within",
    ];
    assert!(gone.iter().any(|gone| output.contains(gone)), "{output}");
}

#[test]
fn times_until_the_next_server_answers_are_measured() {
    let output = run("failover --repeat 2 --addresses 127.0.77.6 127.0.77.7");
    assert!(output.starts_with("2 servers killed; until the next one answered: p50 "), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_fails_when_the_server_is_killed() {
    let (server, address) = serve(3, "");
    let device = udp_device(200);
    let config = ClientConfig::default().deadline(TIMEOUT / 6);
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
    timeout(TIMEOUT, some).await.expect("some calls");
    drop(server);
    for call in calls {
        let error = timeout(TIMEOUT, call).await.expect("in bounded time").unwrap();
        let gone = matches!(
            error,
            KvError::Connection(_)
                | KvError::Read(_)
                | KvError::ServerClosed
                | KvError::Deadline(_)
        );
        assert!(gone, "{error:?}");
    }
    let late = timeout(TIMEOUT, client.put(b"late", b"")).await.expect("in bounded time");
    assert!(late.is_err());
    let config = ClientConfig::default().connect_timeout(Duration::from_millis(200));
    let none = timeout(TIMEOUT, KvClient::connect_with(&device, address, config))
        .await
        .expect("in bounded time");
    assert!(matches!(none, Err(KvError::Establish(_))), "{none:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_server_is_replaced_before_the_transport_gives_it_up() {
    let ((first, at_first), (_second, at_second)) = (serve(4, ""), serve(5, ""));
    let device = udp_device(202);
    // Both tables have the key, with other values.
    for (address, value) in [(at_first, "first"), (at_second, "second")] {
        let client = KvClient::connect(&device, address).await.unwrap();
        client.put(b"server", value.as_bytes()).await.unwrap();
        client.close().await.unwrap();
    }
    // Eight attempts of at least 2.1 s.
    let patient = ClientConfig::default()
        .keepalive(None)
        .ack_timeout(AckTimeout::from_code(19))
        .deadline(TIMEOUT);
    let waits = KvClient::connect_with(&device, at_first, patient).await.unwrap();
    let config = ClientConfig::default().deadline(TIMEOUT);
    let client = FailoverClient::new(&device, [at_first, at_second], config).unwrap();
    let found = async || client.get(b"server").await.unwrap().expect("it was put").value;
    assert_eq!(found().await[..], *b"first");
    assert_eq!(client.generation().await.unwrap(), 1);
    drop(first);
    // Posts a READ to the killed server.
    let mut pending = Box::pin(waits.get(b"server"));
    assert!(timeout(Duration::ZERO, &mut pending).await.is_err());
    let start = Instant::now();
    assert_eq!(found().await[..], *b"second");
    println!("the next server answered after {:?}", start.elapsed());
    assert_eq!(client.generation().await.unwrap(), 2);
    let given_up = timeout(Duration::ZERO, &mut pending).await;
    assert!(given_up.is_err(), "the transport was faster: {given_up:?}");
    // The next calls use the next server, and closing is final.
    client.put(b"late", b"value").await.unwrap();
    assert_eq!(client.delete(b"late").await.unwrap(), Some(2));
    client.close().await.unwrap();
    assert!(matches!(client.get(b"server").await, Err(KvError::Reconnect(_))));
}
