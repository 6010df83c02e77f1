//! Lists the RDMA devices of this machine with their ports and GIDs, like `ibv_devinfo -v`.
//!
//! `cargo run -p rdma-ibverbs --example devices`

use std::error::Error;

use rdma_ibverbs::Context;
use rdma_ibverbs::contract::Context as _;
use rdma_ibverbs::types::PortNum;

fn main() -> Result<(), Box<dyn Error>> {
    let names = match rdma_ibverbs::devices() {
        Ok(names) => names,
        Err(error) => {
            println!("no devices: {error}");
            return Ok(());
        }
    };
    println!("{} devices", names.len());
    for name in names {
        // A device may be removed between the two calls.
        let Some(context) = Context::open(&name)? else { continue };
        let attr = context.attr();
        println!(
            "{name}: firmware {}, {} queue pairs, {} ports",
            attr.firmware, attr.max_qp, attr.ports
        );
        for port in (1..=attr.ports).map(PortNum) {
            let port = context.port(port)?;
            println!(
                "  port {}: {:?}, {:?}, MTU {}",
                port.port.0,
                port.state,
                port.link_layer,
                port.active_mtu.bytes()
            );
            for entry in port.gids {
                println!("    GID {}: {} ({})", entry.index, entry.gid, entry.kind);
            }
        }
    }
    Ok(())
}
