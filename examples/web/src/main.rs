//! A web server over RDMA and TCP. Its page shows the latency and throughput of both.
//!
//! ```text
//! web serve --listen 127.0.0.1:8080     the page at http://127.0.0.1:8080
//! web serve --listen 127.0.0.1:8080 --rdma 127.0.0.1:7478
//! web measure --rdma 127.0.0.1:7478     measures that server from another process or host
//! ```
//!
//! Browsers connect by TCP; the clients that measure, by RDMA and TCP. The device is the one named
//! by `TOKIO_RDMA_DEVICE`, or a real device, or a software device, which between two processes
//! sends RoCE v2 over UDP.

mod measure;
mod service;

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rdma::Device;
use tokio_rdma_http::HttpListener;

use crate::measure::{Figures, Target, measure};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A web server over RDMA.
#[derive(Debug, Parser)]
enum Command {
    /// Serves the page, and measures this server.
    Serve {
        /// Address of the page.
        #[arg(long)]
        listen: SocketAddr,
        /// Address for RDMA. By default, the software device within this process.
        #[arg(long)]
        rdma: Option<SocketAddr>,
    },
    /// Measures a server once.
    Measure {
        /// The server's address for RDMA.
        #[arg(long)]
        rdma: SocketAddr,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Serve { listen, rdma } => serve(listen, rdma).await,
        Command::Measure { rdma } => measure_once(rdma).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("web: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(listen: SocketAddr, rdma: Option<SocketAddr>) -> Result<()> {
    let (device, at) = match rdma {
        Some(address) => (Device::open_default_at(address.ip())?, address),
        None => (Device::software()?, SocketAddr::from(([127, 0, 0, 1], 0))),
    };
    let (figures, published) = watch::channel(Figures::default());
    let service = service::router(published);
    let over_rdma = HttpListener::bind(&device, at).await?;
    let over_tcp = TcpListener::bind(listen).await?;
    let (rdma_address, page) = (over_rdma.local_addr()?, over_tcp.local_addr()?);
    // Scripts wait for this line.
    println!("page at http://{page}, RDMA at {rdma_address} with {}", device.name());
    let measuring = async {
        loop {
            let rdma = Target::Rdma(device.clone(), rdma_address);
            let next =
                Figures { rdma: measure(&rdma).await?, tcp: measure(&Target::Tcp(page)).await? };
            figures.send_replace(next);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let serving = async {
        tokio::try_join!(async { axum::serve(over_rdma, service.clone()).await }, async {
            axum::serve(over_tcp, service.clone()).await
        },)?;
        Ok(())
    };
    tokio::select! {
        result = serving => result,
        result = measuring => result,
    }
}

async fn measure_once(rdma: SocketAddr) -> Result<()> {
    let target = Target::Rdma(Device::open_default_to(rdma.ip())?, rdma);
    println!("{}", serde_json::to_string(&measure(&target).await?)?);
    Ok(())
}
