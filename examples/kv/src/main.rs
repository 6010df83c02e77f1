//! The server, the clients, a load generator and a checker of a key-value service on tokio-rdma.
//!
//! ```text
//! kv serve --listen 127.0.0.1:7474         a server; the following run in other terminals or hosts
//! kv put --connect 127.0.0.1:7474 colour red
//! kv get --connect 127.0.0.1:7474 colour
//! kv load --connect 127.0.0.1:7474         measures GET by READ, GET by message, and PUT
//! kv check --connect 127.0.0.1:7474        runs many clients at once and checks every answer
//! kv load                                  the same with a server in this process
//! kv check --udp                           the same with two software devices over UDP
//! kv failover                              kills servers, and measures until the next ones answer
//! ```
//!
//! `kv COMMAND --help` lists all options; `examples/kv/README.md` explains the design. The device
//! is the one named by `TOKIO_RDMA_DEVICE`, or a real device, or a software device, which between
//! two processes sends RoCE v2 over UDP.

mod args;
mod device;
mod load;
mod place;
mod report;
mod takeover;
mod torture;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use kv::{KvClient, Layout, Server};
use tokio_rdma::Device;

use crate::args::{Arguments, Client, Command, Table};

type Failure = Box<dyn Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse().command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve { listen, table } => {
            let device = Device::open_default_at(listen.ip())?;
            let server = Server::bind(&device, listen, table.layout()?).await?;
            // Scripts wait for this line.
            println!("listening on {} with {}", server.local_addr()?, device.name());
            match server.run().await? {}
        }
        Command::Get { client, by_message, key } => {
            let client = client.connect().await?;
            let found = if by_message {
                client.get_by_message(key.as_bytes()).await?
            } else {
                client.get(key.as_bytes()).await?
            };
            let found = found.ok_or_else(|| format!("no such key: {key}"))?;
            std::io::stdout().write_all(&[&found.value[..], b"\n"].concat())?;
            Ok(client.close().await?)
        }
        Command::Put { client, key, value } => {
            let client = client.connect().await?;
            println!("version {}", client.put(key.as_bytes(), value.as_bytes()).await?);
            Ok(client.close().await?)
        }
        Command::Delete { client, key } => {
            let client = client.connect().await?;
            let version = client
                .delete(key.as_bytes())
                .await?
                .ok_or_else(|| format!("no such key: {key}"))?;
            println!("version {version}");
            Ok(client.close().await?)
        }
        Command::Load { place, load } => {
            let report = place.with_server(|server| load::run(server, load)).await?;
            Ok(report.print()?)
        }
        Command::Check { place, check } => {
            let done = place.with_server(|server| torture::run(server, check)).await?;
            println!("{done}");
            Ok(())
        }
        Command::Failover(options) => takeover::run(&options).await,
    }
}

impl Client {
    async fn connect(&self) -> Result<KvClient> {
        let device = device::connecting(self.connect, self.from)?;
        Ok(KvClient::connect(&device, self.connect).await?)
    }
}

impl Table {
    fn layout(&self) -> Result<Layout> {
        Ok(Layout::new(self.buckets, self.slots, self.max_key, self.max_value)?)
    }
}
