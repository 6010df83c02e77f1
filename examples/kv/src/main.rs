//! A key-value service on tokio-rdma: its server, its clients, a load generator and a checker.
//!
//! ```text
//! kv serve --listen 127.0.0.1:7474                  a server; in other terminals, or on other hosts:
//! kv put --connect 127.0.0.1:7474 colour red
//! kv get --connect 127.0.0.1:7474 colour
//! kv load --connect 127.0.0.1:7474                  latency of GET by READ and by message, and of PUT
//! kv check --connect 127.0.0.1:7474                 many clients at once: was every answer right?
//! kv load                                           the same with a server in this process, or, with --udp, two software
//! kv check --udp                                    devices that speak over UDP
//! ```
//!
//! `kv COMMAND --help` has all options; docs/kv.md tells how it works. The device is the one that `TOKIO_RDMA_DEVICE` names, or a
//! real one that there is, or else a software device: within the process, or, of two processes, over UDP.
//!
//! | File | What |
//! |---|---|
//! | `args.rs` | what is asked for |
//! | `device.rs` | which device |
//! | `place.rs` | which server: one that is there, or one of this process |
//! | `load.rs`, `report.rs` | the load generator |
//! | `torture.rs` | the checker's clients |
//!
//! The rest is the library, for all programs.

mod args;
mod device;
mod load;
mod place;
mod report;
mod torture;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use kv::{KvClient, Layout, Server};
use tokio_rdma::Device;

use crate::args::{Arguments, Client, Command, Table};

/// What goes wrong is told to whoever runs the program, in words.
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
            println!("listening on {} with {}", server.local_addr(), device.name());
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
