//! What the benches share: arguments, the address of a device and processor time.

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use tokio_rdma::{CompletionMode, Device};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Arguments of the form `name=value`.
pub(crate) struct Arguments(HashMap<String, String>);

impl Arguments {
    /// Returns the arguments of this program. `defaults` has all their names.
    pub(crate) fn new(defaults: &[(&str, &str)]) -> Result<Self> {
        let mut values: HashMap<_, _> =
            defaults.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        // Cargo adds `--bench`.
        for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
            let (name, value) = argument
                .split_once('=')
                .ok_or_else(|| format!("invalid argument {argument}, must be name=value"))?;
            let known = values.get_mut(name).ok_or_else(|| format!("unknown argument {name}"))?;
            value.clone_into(known);
        }
        Ok(Self(values))
    }

    pub(crate) fn get(&self, name: &str) -> &str {
        &self.0[name]
    }

    pub(crate) fn number(&self, name: &str) -> Result<usize> {
        self.get(name).parse().map_err(|error| format!("{name}={}: {error}", self.get(name)).into())
    }

    pub(crate) fn mode(&self) -> Result<CompletionMode> {
        Ok(match self.get("mode") {
            "event" => CompletionMode::Event,
            "cooperative" => CompletionMode::Cooperative,
            "hybrid" => CompletionMode::Hybrid,
            "busy-poll" => CompletionMode::busy_poll()?,
            other => return Err(format!("unknown mode {other}").into()),
        })
    }

    /// Returns a builder of a runtime with one thread or several, without drivers.
    pub(crate) fn runtime(&self) -> Result<tokio::runtime::Builder> {
        match self.get("runtime") {
            "current" => Ok(tokio::runtime::Builder::new_current_thread()),
            "multi" => Ok(tokio::runtime::Builder::new_multi_thread()),
            other => Err(format!("unknown runtime {other}").into()),
        }
    }
}

/// Prints a line of results, or the error.
pub(crate) fn exit(program: &str, line: Result<String>) -> ExitCode {
    match line {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a comparison with TCP on one thread, with the default device and the arguments `rounds` and
/// `mode`.
pub(crate) fn on_one_thread(compare: impl AsyncFnOnce(&Device, &CompletionMode, u32)) {
    let arguments = Arguments::new(&[("rounds", "20000"), ("mode", "event")]).expect("arguments");
    let rounds = arguments.number("rounds").expect("a number") as u32;
    let mode = arguments.mode().expect("a mode");
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let device = Device::open_default_or_software().expect("a device");
        println!("{} ({mode:?}) beside TCP to {}", device.name(), address(&device).ip());
        compare(&device, &mode, rounds).await;
    });
}

/// Returns the address of a device, with port 0.
pub(crate) fn address(device: &Device) -> SocketAddr {
    SocketAddr::new(device.default_path().expect("an active port").1.gid.to_ip(), 0)
}

/// Returns the CPU time of this process.
pub(crate) fn cpu() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a process has tasks");
    let of_task = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(tasks.flatten().filter_map(of_task).sum())
}
