//! The coordinator's command line.
//!
//! ```text
//! coordinator serve [--listen ADDRESS]                   the service (127.0.0.1:7480)
//! coordinator node NAME --peer NAME [--service URL]      one node (http://127.0.0.1:7480)
//! coordinator demo                                       the service and two nodes in one process
//! ```
//!
//! The device is a real one (feature `ibverbs`) that `TOKIO_RDMA_DEVICE` names or that has the
//! local address of the route to the service. Otherwise it is a software device: within the process
//! for `demo`, over UDP from that address for `node`.

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;

use coordinator::node::Node;
use coordinator::service;
use lexopt::prelude::*;
use tokio::net::TcpListener;
use tokio_rdma::Device;

type Failure = Box<dyn Error + Send + Sync>;

const LISTEN: &str = "127.0.0.1:7480";

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("coordinator: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Failure> {
    let mut arguments = lexopt::Parser::from_env();
    let (mut positional, mut listen, mut peer) = (Vec::new(), LISTEN.to_owned(), None);
    let mut url = format!("http://{LISTEN}");
    while let Some(argument) = arguments.next()? {
        match argument {
            Value(value) => positional.push(value.string()?),
            Long("listen") => listen = arguments.value()?.string()?,
            Long("peer") => peer = Some(arguments.value()?.string()?),
            Long("service") => url = arguments.value()?.string()?,
            other => return Err(other.unexpected().into()),
        }
    }
    match (positional.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), peer) {
        (["serve"], None) => {
            let listener = TcpListener::bind(&listen).await?;
            println!("listening on http://{}", listener.local_addr()?);
            let stop = async { tokio::signal::ctrl_c().await.expect("cannot wait for Ctrl-C") };
            Ok(axum::serve(listener, service::router()).with_graceful_shutdown(stop).await?)
        }
        (["node", name], Some(peer)) => {
            // The peer is assumed to have the same route as the service.
            let service: reqwest::Url = url.parse()?;
            let found =
                tokio::task::spawn_blocking(move || service.socket_addrs(|| None)).await??;
            let service = found.first().ok_or("the service's URL has no address")?;
            let ip = service.ip();
            // On the service's host, peers reach this node at the service's address unless another
            // node has it.
            let device =
                Device::open_default_at(ip).or_else(|_| Device::open_default_towards(ip))?;
            meet(&device, name, &peer, &url).await
        }
        (["demo"], None) => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let url = url_of(listener.local_addr()?);
            tokio::spawn(async move { axum::serve(listener, service::router()).await });
            let (a, b) = (Device::open_default_or_software()?, Device::open_default_or_software()?);
            tokio::try_join!(meet(&a, "a", "b", &url), meet(&b, "b", "a", &url))?;
            Ok(())
        }
        _ => Err("usage: coordinator serve [--listen ADDRESS] | \
             node NAME --peer NAME [--service URL] | demo"
            .into()),
    }
}

fn url_of(address: SocketAddr) -> String {
    format!("http://{address}")
}

async fn meet(device: &Device, name: &str, peer: &str, service: &str) -> Result<(), Failure> {
    let node = Node { name: name.to_owned(), peer: peer.to_owned(), service: service.to_owned() };
    let found = node.run(device).await?;
    println!("{name}: found {found:?} in its memory");
    Ok(())
}
