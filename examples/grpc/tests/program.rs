//! Runs a server and clients as processes, over UDP and TCP on loopback.

#[path = "../../common/program.rs"]
mod program;

use std::net::SocketAddr;

use program::Program;

const GRPC: &str = env!("CARGO_BIN_EXE_grpc");

fn start(line: &str) -> Program {
    Program::start(GRPC, line)
}

fn run(line: &str) -> String {
    start(line).finish()
}

/// Starts a server at 127.0.76.`host`. UDP software devices need an address each.
fn serve(host: u8, options: &str) -> (Program, SocketAddr) {
    Program::serve(GRPC, &format!("serve --listen 127.0.76.{host}:0{options}"))
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
    let (server, address) = serve(3, "");
    let mut client = start(&format!("load --calls 1000000000 --depth 8 --connect {address}"));
    // Once the client is connected, its calls use the processor.
    client.wait_for("connection", |client| {
        let stat = std::fs::read_to_string(format!("/proc/{}/schedstat", client.id())).ok()?;
        let spent: u64 = stat.split(' ').next()?.parse().ok()?;
        (spent > 200_000_000).then_some(())
    });
    drop(server);
    let output = client.fail();
    assert!(output.starts_with("grpc: "), "{output}");
}

#[test]
fn connection_without_a_server_fails() {
    let (server, address) = serve(4, "");
    drop(server);
    start(&format!("call --connect {address}")).fail();
}
