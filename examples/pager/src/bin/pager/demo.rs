//! All of it, each part in a process of its own, and the death of one.

use std::net::IpAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::args::{Demo, Work};
use crate::{PATIENCE, Result};

pub(crate) async fn run(options: &Demo) -> Result<()> {
    let [a, b, client] = options.addresses[..] else {
        return Err("three addresses are needed".into());
    };
    println!("--- two owners, one of them the other's replica, which is killed on the way");
    if !act(options, a, Some(b), client).await? {
        return Err("the client has failed, though there was a replica".into());
    }
    println!("--- the same without a replica");
    if act(options, a, None, client).await? {
        return Err("the client has not failed, though its pages are gone".into());
    }
    println!("--- as it should be");
    Ok(())
}

/// Whether the client was content.
async fn act(options: &Demo, a: IpAddr, b: Option<IpAddr>, client: IpAddr) -> Result<bool> {
    let mut coordinator =
        Process::start("coordinator", &["coordinator", "--listen", "127.0.0.1:0"])?;
    let said = coordinator.wait_for("coordinator at ").await?;
    let url = said.trim_start_matches("coordinator at ");
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
    // Somewhere on the way.
    client.wait_for("pages verified, 0 nodes lost").await?;
    println!("demo: owner a is killed");
    owner.child.kill().await?;
    client.end().await
}

fn arguments(work: &Work) -> Vec<String> {
    let Work { reads, writes, in_order, tasks, cache, in_flight, readahead } = work;
    let mut line = format!(
        "--reads {reads} --writes {writes} --tasks {tasks} --cache {cache} --in-flight {in_flight} --readahead {readahead}"
    );
    if *in_order {
        line.push_str(" --in-order");
    }
    line.split(' ').map(str::to_owned).collect()
}

/// This program again, killed when it is dropped.
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
        let said = child.stdout.take().ok_or("it has no output")?;
        Ok(Self { name, child, lines: BufReader::new(said).lines() })
    }

    /// Shows what it says, up to the line that has this.
    async fn wait_for(&mut self, what: &str) -> Result<String> {
        let mut found = async || {
            while let Some(line) = self.lines.next_line().await? {
                println!("{}: {line}", self.name);
                if line.contains(what) {
                    return Ok(line);
                }
            }
            Err::<_, crate::Failure>(
                format!("{} ends without having said {what:?}", self.name).into(),
            )
        };
        timeout(PATIENCE * 20, found()).await.map_err(|_| "it takes too long")?
    }

    /// Shows the rest. Whether it went well.
    async fn end(mut self) -> Result<bool> {
        while let Some(line) = self.lines.next_line().await? {
            println!("{}: {line}", self.name);
        }
        Ok(self.child.wait().await?.success())
    }
}
