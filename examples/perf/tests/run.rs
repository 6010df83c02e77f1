//! Runs the program as a user does. The program checks its own data; these tests check its output.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const QUICK: [&str; 6] = ["--duration", "0.05", "--warm-up", "0.01", "--rounds", "2"];

fn perf() -> Command {
    Command::new(env!("CARGO_BIN_EXE_perf"))
}

fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn run(line: &str) -> Value {
    report(&perf().args(line.split(' ')).args(QUICK).arg("--json").output().unwrap())
}

#[test]
fn every_operation_is_measured_and_compared_with_tcp() {
    for verb in ["send", "write", "write-imm", "read", "compare-swap", "fetch-add", "messages"] {
        for work in ["latency", "bandwidth"] {
            let report = run(&format!("{work} {verb} --against tcp"));
            let results = report["results"].as_array().unwrap();
            let overs: Vec<_> =
                results.iter().map(|result| result["over"].as_str().unwrap()).collect();
            assert_eq!(overs, ["rdma", "tcp"], "{work} {verb}");
            for result in results {
                assert!(result["operations"].as_u64().unwrap() > 0, "{work} {verb}: {result}");
                let times = &result["microseconds"];
                assert!(
                    times["p50"].as_f64() <= times["p99_99"].as_f64(),
                    "{work} {verb}: {result}"
                );
            }
        }
    }
}

#[test]
fn each_step_of_setting_up_is_measured() {
    for wire in [&[][..], &["--udp"]] {
        let line = "setup --size 4K,64K --parallel 3 --duration 0.02 --rounds 2 --json";
        let report = report(&perf().args(line.split(' ')).args(wire).output().unwrap());
        let results = report["results"].as_array().unwrap();
        let steps: Vec<_> = results
            .iter()
            .map(|result| {
                let number = |name: &str| result[name].as_u64().unwrap_or(0);
                (result["step"].as_str().unwrap(), number("size"), number("parallel"))
            })
            .collect();
        let expected = [
            ("register", 4096, 1),
            ("deregister", 4096, 1),
            ("register", 65536, 1),
            ("deregister", 65536, 1),
            ("create queue pair", 0, 1),
            ("connect queue pair", 0, 1),
            ("destroy queue pair", 0, 1),
            ("connection", 0, 1),
            ("connection", 0, 3),
        ];
        assert_eq!(steps, expected);
        for result in results {
            let times = &result["microseconds"];
            assert!(result["operations"].as_u64() > Some(0), "{result}");
            assert!(result["operations_per_second"].as_f64() > Some(0.0), "{result}");
            assert!(times["p50"].as_f64() <= times["max"].as_f64(), "{result}");
        }
    }
}

#[test]
fn settings_work_in_every_mode() {
    for (mode, settings) in [
        ("event", "write --depth 32 --batch 8 --queue-pairs 3 --threads 2"),
        ("busy-poll", "send --size 100,5000 --queue-pairs 2"),
        ("cooperative", "read --size 64K --batch 4"),
        ("hybrid", "write-imm --depth 1"),
        ("event", "send --inline --size 16 --depth 3"),
        ("hybrid", "messages --size 1M --queue-pairs 2"),
    ] {
        let report = run(&format!("bandwidth {settings} --mode {mode}"));
        assert_eq!(report["mode"], mode);
        assert!(
            report["results"]
                .as_array()
                .unwrap()
                .iter()
                .all(|result| result["operations"].as_u64() > Some(0))
        );
    }
}

#[test]
fn two_processes_measure_and_plot() {
    for verb in ["write", "send", "messages"] {
        // UDP software devices need an address each: no other test uses this one.
        let mut server =
            perf().args(["--listen", "127.0.71.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
        let line = BufReader::new(server.stdout.take().unwrap()).lines().next().unwrap().unwrap();
        let address = line.split(' ').nth(2).unwrap();
        let plot = std::env::temp_dir().join(format!("perf-{}-{verb}.svg", std::process::id()));
        let mut client = perf();
        client.args([
            "latency",
            verb,
            "--size",
            "8,4096",
            "--against",
            "tcp",
            "--json",
            "--connect",
            address,
        ]);
        let output = client.args(QUICK).arg("--plot").arg(&plot).output().unwrap();
        assert_eq!(report(&output)["processes"], 2);
        assert!(server.wait().unwrap().success());
        let drawn = std::fs::read_to_string(&plot).unwrap();
        std::fs::remove_file(&plot).unwrap();
        for name in [
            "bytes of an operation",
            "latency in µs",
            "percentile",
            "RDMA, p99",
            "TCP, p99",
            "software device",
        ] {
            assert!(drawn.contains(name), "{name} is not in the plot");
        }
    }
}

#[test]
fn client_without_a_server_reports_it() {
    let output = perf().args(["latency", "write", "--connect", "127.0.71.9:1"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no server at 127.0.71.9:1"));
}
