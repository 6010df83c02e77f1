//! Programs that poll memory instead of waiting for a completion.

use std::sync::mpsc::sync_channel;
use std::thread;

use crate::torture::{HANG, block_on, bounded, pair, software};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::software::Network;
use tokio_rdma::{Access, CompletionMode, CompletionQueue, ExposedRegion};

const LEN: usize = 4096;

/// Another thread writes a page again and again, each time with one number in all its words. Polls
/// the last word for each number, and returns after how many the first word was an older one, or
/// `None` if there was none in `rounds`.
fn first_old_byte(access: Access, reorder: bool, rounds: u64) -> Option<u64> {
    bounded("polling memory", HANG, move || {
        let network = Network::new();
        let (device, pd) = software(&network);
        network.control(device.name()).unwrap().reorder_relaxed(reorder);
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let (a, _b) = pair(&pd, &queue);
        let memory = HostMemory::zeroed(LEN).unwrap();
        let region = ExposedRegion::new(&pd, memory, access | Access::REMOTE_WRITE).unwrap();
        let grant = region.grant();
        let (next, numbers) = sync_channel(0);
        thread::scope(|scope| {
            scope.spawn(move || {
                for number in numbers {
                    let words: Vec<u8> = u64::to_ne_bytes(number).repeat(LEN / 8);
                    block_on(a.write(pd.register(words).unwrap(), grant)).unwrap();
                }
            });
            let old = (1..=rounds).find(|&number| {
                next.send(number).unwrap();
                while region.load(LEN - 8).unwrap() != number {
                    thread::yield_now();
                }
                region.load(0).unwrap() != number
            });
            drop(next);
            old
        })
    })
}

#[test]
fn program_that_polls_relaxed_memory_reads_bytes_that_have_not_arrived() {
    let found = first_old_byte(Access::RELAXED_ORDERING, true, u64::MAX);
    println!("in round {found:?}");
    assert!(found.is_some());
}

#[test]
fn other_memory_is_written_in_ascending_order() {
    let rounds = 2_000;
    assert_eq!(first_old_byte(Access::empty(), true, rounds), None);
    assert_eq!(first_old_byte(Access::RELAXED_ORDERING, false, rounds), None);
}
