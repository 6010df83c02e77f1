//! Cost of a pool of DC initiators over a dedicated initiator, for counting with callgrind.
//!
//! ```text
//! dc_pool count initiator|pool|lease|switch OPERATIONS
//! ```
//!
//! Each operation is an awaited WRITE of 8 bytes: by a dedicated initiator, by a pool's peer that
//! keeps its initiator, through a lease, or by two peers that take the only initiator from each
//! other. Run it twice under `valgrind --tool=callgrind` with different numbers of operations and
//! subtract. Without arguments it runs each mode once, as a test for `cargo bench`.

use std::error::Error;

use tokio_rdma::dc::{DcInitiator, DcPool, DcTarget};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, SharedReceiveQueue,
};

const SIDES: [&str; 4] = ["initiator", "pool", "lease", "switch"];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["count", side, operations] if SIDES.contains(&side) => {
            runtime.block_on(count(side, operations.parse()?))
        }
        [] => SIDES.into_iter().try_for_each(|side| runtime.block_on(count(side, 1000))),
        _ => Err("usage: dc_pool [count initiator|pool|lease|switch OPERATIONS]".into()),
    }
}

async fn count(side: &str, operations: u32) -> Result<(), Box<dyn Error>> {
    let device = Device::software()?;
    let pd = device.protection_domain()?;
    let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
    let srq = SharedReceiveQueue::new(&pd, &queue, 1, 1)?;
    let target = DcTarget::new(&pd, &srq)?;
    let region = ExposedRegion::new(&pd, vec![0; 8], Access::REMOTE_WRITE)?;
    let remote = region.grant();
    let mut buffer = Pool::new(&pd, 8, 1)?.try_alloc(8)?;
    if side == "initiator" {
        let initiator = DcInitiator::new(&pd, &queue)?;
        let peer = initiator.peer(&target.address())?;
        for _ in 0..operations {
            buffer = initiator.to(&peer).write(buffer, remote).await?;
        }
        return Ok(());
    }
    let pool = DcPool::builder(&pd, &queue).initiators(1).build()?;
    let peers = [pool.peer(&target.address())?, pool.peer(&target.address())?];
    match side {
        "pool" => {
            for _ in 0..operations {
                buffer = peers[0].write(buffer, remote).await?;
            }
        }
        "lease" => {
            let lease = peers[0].borrow().await?;
            for _ in 0..operations {
                buffer = lease.write(buffer, remote).await?;
            }
        }
        _ => {
            for round in 0..operations {
                buffer = peers[round as usize % 2].write(buffer, remote).await?;
            }
            assert_eq!(pool.counters().switches, u64::from(operations));
        }
    }
    Ok(())
}
