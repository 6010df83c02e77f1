//! The demonstration: all roles as processes, one of which is killed.

use std::net::IpAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::args::{Demo, Work};
use crate::{PATIENCE, Result};

pub(crate) async fn run(options: &Demo) -> Result<()> {
    let [a, b, client] = options.addresses[..] else {
        return Err("--addresses takes three addresses".into());
    };
    if let Some(runs) = options.repeat {
        return repeat(options, runs, [a, b, client]).await;
    }
    println!("--- an owner is killed, its replica continues");
    if !run_scenario(options, a, Some(b), client).await?.succeeded {
        return Err("the client failed despite the replica".into());
    }
    println!("--- an owner without a replica is killed");
    if run_scenario(options, a, None, client).await?.succeeded {
        return Err("the client succeeded although its pages are lost".into());
    }
    println!("--- demo passed");
    Ok(())
}

/// Kills an owner that has a replica, several times.
async fn repeat(options: &Demo, runs: u32, [a, b, client]: [IpAddr; 3]) -> Result<()> {
    let mut slowest = Vec::new();
    for _ in 0..runs {
        let ended = run_scenario(options, a, Some(b), client).await?;
        if !ended.succeeded || ended.lost != 1 {
            return Err("the client did not lose one owner and continue; see --reads".into());
        }
        slowest.push(ended.slowest.ok_or("the client printed no slowest page")?);
    }
    slowest.sort_unstable_by(f64::total_cmp);
    // The smallest time that so many per cent of the runs do not exceed.
    let at = |percent: usize| slowest[(slowest.len() * percent).div_ceil(100) - 1] / 1e6;
    println!(
        "{runs} owners killed; slowest page of each run: p50 {:.2} s, p99 {:.2} s, at most {:.2} s",
        at(50),
        at(99),
        at(100)
    );
    Ok(())
}

async fn run_scenario(
    options: &Demo,
    a: IpAddr,
    b: Option<IpAddr>,
    client: IpAddr,
) -> Result<Ended> {
    let mut coordinator =
        Process::start("coordinator", &["coordinator", "--listen", "127.0.0.1:0"])?;
    let output = coordinator.wait_for("coordinator at ").await?;
    let url = output.trim_start_matches("coordinator at ");
    let (memory, a, client) = (options.memory.to_string(), a.to_string(), client.to_string());
    let line = ["owner", "a", "--address", &a, "--memory", &memory, "--coordinator", url];
    let mut owner = Process::start("owner a", &line)?;
    owner.wait_for("lends").await?;
    let mut replica = None;
    if let Some(b) = b {
        let b = b.to_string();
        let line = ["owner", "b", "--address", &b, "--replica-of", "a", "--coordinator", url];
        replica.insert(Process::start("owner b", &line)?).wait_for("lends").await?;
    }
    let work = arguments(&options.work);
    let mut line = vec!["client", "--address", &client, "--coordinator", url];
    line.extend(work.iter().map(String::as_str));
    let mut client = Process::start("client", &line)?;
    // Kill the owner while pages are being read.
    client.wait_for("pages verified, 0 nodes lost").await?;
    println!("demo: killing owner a");
    owner.child.kill().await?;
    client.end().await
}

fn arguments(work: &Work) -> Vec<String> {
    let Work { reads, writes, in_order, tasks, cache, in_flight, readahead } = work;
    let mut line = format!(
        "--reads {reads} --writes {writes} --tasks {tasks} --cache {cache} \
         --in-flight {in_flight} --readahead {readahead}"
    );
    if *in_order {
        line.push_str(" --in-order");
    }
    line.split(' ').map(str::to_owned).collect()
}

/// The end of a client.
struct Ended {
    succeeded: bool,
    /// Nodes lost.
    lost: usize,
    /// The longest time of a page, in microseconds.
    slowest: Option<f64>,
}

/// A process of this program, killed on drop.
struct Process {
    name: &'static str,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(name: &'static str, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child =
            command.args(arguments).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let output = child.stdout.take().ok_or("the process has no standard output")?;
        Ok(Self { name, child, lines: BufReader::new(output).lines() })
    }

    /// Prints output up to the first line that contains `what`, and returns that line.
    async fn wait_for(&mut self, what: &str) -> Result<String> {
        let mut found = async || {
            while let Some(line) = self.lines.next_line().await? {
                println!("{}: {line}", self.name);
                if line.contains(what) {
                    return Ok(line);
                }
            }
            Err::<_, crate::Failure>(
                format!("{} exited without printing {what:?}", self.name).into(),
            )
        };
        timeout(PATIENCE * 20, found()).await.map_err(|_| "timed out waiting for output")?
    }

    /// Prints the remaining output of a client, and waits for its end.
    async fn end(mut self) -> Result<Ended> {
        let mut ended = Ended { succeeded: false, lost: 0, slowest: None };
        while let Some(line) = self.lines.next_line().await? {
            println!("{}: {line}", self.name);
            if line.starts_with("node ") && line.contains(" was lost: ") {
                ended.lost += 1;
            }
            if let Some(latencies) = line.strip_prefix("page ") {
                ended.slowest = latencies.split_whitespace().last().map(str::parse).transpose()?;
            }
        }
        ended.succeeded = self.child.wait().await?.success();
        Ok(ended)
    }
}
