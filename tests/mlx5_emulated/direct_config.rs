//! `QueuePairBuilder::direct`: where short data arrives, and that it is the same everywhere.

use emulated_connectx::this_program;
use tokio_rdma::types::{DirectConfig, ScatterToCqe, Transport};
use tokio_rdma::{Batch, ExposedRegion};

use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, pattern, run};
use crate::emulated::adapter;

/// Lengths around those that fit into completion entries.
const LENGTHS: [usize; 7] = [1, 8, 31, 32, 33, 64, 65];
/// The longest data in a completion entry of 64 bytes.
const IN_ENTRY: usize = 32;

#[test]
fn short_data_arrives_where_the_queue_pair_chooses() {
    const CHILD: &str = "TOKIO_RDMA_COUNTS";
    if std::env::var_os(CHILD).is_none() {
        // The adapter's counters are exact in a program that does nothing else.
        let name = "direct_config::short_data_arrives_where_the_queue_pair_chooses";
        let output = this_program().args(["--exact", name]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("test result: ok. 1 passed"), "{text}");
        return;
    }
    if std::env::var_os("TOKIO_RDMA_POST").is_some() {
        return; // Refused, which the conformance suite tests.
    }
    run(0, "short data", async {
        use ScatterToCqe::{All, Off, Receives};
        for (scatter, blue_flame) in [(Off, true), (Receives, false), (All, true), (All, false)] {
            let config = DirectConfig::DEFAULT.scatter_to_cqe(scatter).blue_flame(blue_flame);
            let scattered = exchange(config).await;
            let short = LENGTHS.iter().filter(|&&length| length <= IN_ENTRY).count() as u64;
            let (received, read) = (short, short + 1);
            let expected = match scatter {
                Off => 0,
                Receives => received,
                _ => received + read,
            };
            assert_eq!(scattered, expected, "{config:?}");
        }
    });
}

/// Sends and reads each length, adds once, and reads unsignalled in a batch; checks all data.
/// Returns the number of completion entries with data.
async fn exchange(config: DirectConfig) -> u64 {
    let build = move |builder: tokio_rdma::op::QueuePairBuilder| builder.direct(config);
    let shape = Shape { build: &build, ..Shape::new(Transport::Rc, "event") };
    let Pair { a, b, .. } = Pair::shaped(Setup::new(), &shape);
    let before = adapter().counters().scattered;
    for length in LENGTHS {
        let bytes = pattern(length, length as u8);
        let receive = b.qp.recv(b.blank(100));
        a.qp.send(a.buffer(&bytes)).await.unwrap();
        let received = receive.await.unwrap();
        assert_eq!(received.buffer[..received.len], bytes, "{config:?}");
        let region: ExposedRegion = b.region(length);
        region.write(0, &bytes).unwrap();
        let read = a.qp.read(a.blank(length), region.grant()).await.unwrap();
        assert_eq!(read[..], bytes, "{config:?}");
    }
    let region = b.region(8);
    region.write(0, &7_u64.to_ne_bytes()).unwrap();
    assert_eq!(a.qp.fetch_add(region.grant(), 1).await.unwrap(), 7);
    let scattered = adapter().counters().scattered - before;

    // Without a completion entry, data goes to memory.
    let mut batch = Batch::new();
    for _ in 0..4 {
        batch.read(a.blank(8), region.grant());
    }
    let result = a.qp.post_batch(batch).await;
    for buffer in result.into_buffers().unwrap() {
        assert_eq!(buffer[..], 8_u64.to_ne_bytes(), "{config:?}");
    }
    scattered
}
