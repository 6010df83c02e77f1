//! One-sided operations on a connection with messages.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::connected::{self, assert_ready, config, modes, pair, pair_in, pattern, recv, two};
use crate::torture::{LONG, Mode, device, eventually, keeps_fences, scaled, soon};
use tokio_rdma::error::{LimitError, Outcome};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::WcStatus;
use tokio_rdma::{
    Access, Batch, BufMut, CloseReason, CompletionQueue, Connection, ExposedRegion, Imm, Listener,
    OpErrorKind, Pool, RemoteRegion, SetupError,
};

/// Bytes per work request.
const BLOCK: usize = 512;

fn exposed(owner: &Connection, blocks: usize) -> (ExposedRegion, RemoteRegion) {
    let region = owner.expose(vec![0; blocks * BLOCK], Access::REMOTE_ALL).unwrap();
    let remote = region.grant();
    (region, remote)
}

fn place(remote: RemoteRegion, block: usize) -> RemoteRegion {
    let start = (block * BLOCK) as u64;
    remote.slice(start..start + BLOCK as u64).unwrap()
}

fn writes(from: &Connection, remote: RemoteRegion, blocks: usize, seed: u64) -> Batch<BufMut> {
    let mut batch = Batch::new();
    for (block, bytes) in pattern(blocks * BLOCK, seed).chunks(BLOCK).enumerate() {
        batch.write(from.copy_from(bytes).unwrap(), place(remote, block));
    }
    batch
}

fn bytes_of(region: &ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

async fn assert_open(a: &Connection, b: &Connection) {
    for (from, to) in [(a, b), (b, a)] {
        from.send("still there").await.unwrap();
        assert_eq!(recv(to).await, "still there");
    }
    assert_ready([a, b]);
}

/// Peers by address share a listener and a device, and may get what a closed connection has left.
// Shows S4.
#[test]
fn grant_to_one_peer_is_refused_to_another() {
    modes("grant", || async {
        let (device, _) = device(&Network::new());
        let local = connected::address(&device);
        let listener = Listener::bind_with(&device, local, &config()).await.unwrap();
        let connect = async || {
            let config = config();
            let connecting =
                Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
            let both = async { tokio::try_join!(connecting, listener.accept()) };
            soon("connect", both).await.unwrap()
        };
        let refused = async |by: &Connection, remote: RemoteRegion, op: usize| {
            let remote = remote.slice(..8).unwrap();
            let buffer = by.copy_from(&[1; 8]).unwrap();
            let kind = match op {
                0 => soon("write", by.write(buffer, remote)).await.unwrap_err().kind(),
                1 => soon("read", by.read(buffer, remote)).await.unwrap_err().kind(),
                _ => soon("atomic", by.fetch_add(remote, 1)).await.unwrap_err().kind(),
            };
            let OpErrorKind::Completion(error) = kind else { panic!("{kind:?}") };
            assert_eq!(error.status, WcStatus::REM_ACCESS_ERR);
        };
        let (b, for_b) = connect().await;
        let (region, grant) = exposed(&for_b, 1);
        for op in 0..3 {
            let (a, _for_a) = connect().await;
            refused(&a, grant, op).await;
        }
        assert_eq!(bytes_of(&region), [0; BLOCK]);
        let word = grant.slice(..8).unwrap();
        soon("write", b.write(b.copy_from(&[2; 8]).unwrap(), word)).await.unwrap();
        assert_eq!(region.load(0).unwrap(), u64::from_ne_bytes([2; 8]));
        // Nor can a later peer use it, perhaps in the protection domain of `for_b`.
        drop(region);
        let both = async { tokio::join!(b.close(), for_b.close()) };
        assert_eq!(soon("close", both).await, (Ok(()), Ok(())));
        drop((b, for_b));
        for op in 0..3 {
            let (a, _for_a) = connect().await;
            refused(&a, grant, op).await;
        }
    });
}

#[test]
fn batch_has_one_completion_and_precedes_a_later_message() {
    modes("batch", || async {
        let (device, pd) = device(&Network::new());
        // Keepalive completions would be counted.
        let config = config().keepalive(None);
        let queue = CompletionQueue::builder(&device)
            .capacity(512)
            .mode(Mode::Cooperative.make())
            .build()
            .unwrap();
        let (a, b) = pair_in(&pd, &pd, &config.clone().completion_queue(&queue), &config);
        let (region, remote) = exposed(&b, 16);
        let mut batch = Batch::new();
        for round in 0..scaled(16) {
            let bytes = pattern(16 * BLOCK, round);
            for (block, bytes) in bytes.chunks(BLOCK).enumerate() {
                batch.write(a.copy_from(bytes).unwrap(), place(remote, block));
            }
            let before = queue.counters().completions;
            let written = soon("writes", a.post_batch(batch)).await;
            assert!(written.is_ok(), "{:?}", written.results());
            assert_eq!(
                queue.counters().completions,
                before + 1,
                "one completion for 16 work requests"
            );
            batch = written.into_batch();
            for block in 0..16 {
                batch.read(a.try_alloc(BLOCK).unwrap(), place(remote, block));
            }
            let mut read = soon("reads", a.post_batch(batch)).await;
            let seen: Vec<_> = read.drain().flat_map(|buffer| buffer.to_vec()).collect();
            assert!(read.is_ok() && seen == bytes, "{:?}", read.results());
            batch = read.into_batch();
            assert!(bytes_of(&region) == bytes);
        }

        // The later message shows that the dropped batch has completed.
        drop(a.post_batch(writes(&a, remote, 16, 99)));
        a.send("written").await.unwrap();
        assert_eq!(recv(&b).await, "written");
        assert!(bytes_of(&region) == pattern(16 * BLOCK, 99));
        assert_open(&a, &b).await;
    });
}

#[test]
fn batch_that_consumes_peer_receives_is_refused_whole() {
    modes("refused", || async {
        let (a, b) = pair(&config());
        let (region, remote) = exposed(&b, 4);
        let mut batch = Batch::new();
        for (kind, what) in ["SEND", "SEND with immediate data", "WRITE with immediate data"]
            .into_iter()
            .enumerate()
        {
            for block in 0..2 {
                batch.write(a.copy_from(&[7; BLOCK]).unwrap(), place(remote, block));
            }
            let buffer = a.copy_from(&[8; BLOCK]).unwrap();
            match kind {
                0 => batch.send(buffer),
                1 => batch.send_with_imm(buffer, Imm(0)),
                _ => batch.write_with_imm(buffer, place(remote, 2), Imm(0)),
            };
            batch.read(a.copy_from(&[9; BLOCK]).unwrap(), place(remote, 3));
            let result = soon("refusal", a.post_batch(batch)).await;
            let refusal = OpErrorKind::NotOneSided { index: 2, what };
            assert_eq!(result.results(), [Err(refusal); 4]);
            assert!(
                refusal.to_string().contains(&format!("work request 2 of the batch is a {what}")),
                "{refusal}"
            );
            let first: Vec<_> = result.buffers().iter().map(|buffer| buffer[0]).collect();
            assert_eq!(first, [7, 7, 8, 9], "all buffers are returned unchanged");
            batch = result.into_batch();
            assert!(batch.is_empty());
            assert_open(&a, &b).await;
            assert!(bytes_of(&region).iter().all(|&byte| byte == 0));
        }
        batch.write(a.copy_from(&[7; BLOCK]).unwrap(), place(remote, 0));
        assert!(soon("again", a.post_batch(batch)).await.is_ok());
        assert!(soon("empty", a.post_batch(Batch::<BufMut>::new())).await.is_ok());
    });
}

#[test]
fn batches_share_the_send_queue_with_messages_and_fit_its_length() {
    modes("send queue", || async {
        let (a, b) = pair(&config().max_send_wr(8));
        let (region, remote) = exposed(&b, 9);
        let limit =
            LimitError { field: "work requests of a batch (max_send_wr)", asked: 9, allowed: 8 };
        let result = soon("too long", a.post_batch(writes(&a, remote, 9, 1))).await;
        assert_eq!(result.results(), [Err(OpErrorKind::Limit(limit)); 9]);
        assert_eq!(result.buffers().len(), 9);
        assert!(bytes_of(&region).iter().all(|&byte| byte == 0));

        let count = scaled(64);
        let batches: Vec<_> = (0..count)
            .map(|seed| a.post_batch(writes(&a, remote, [8, 3][seed as usize % 2], seed)))
            .collect();
        let sending = async {
            for number in 0..count {
                a.send(pattern(300, number)).await.unwrap();
            }
        };
        let receiving = async {
            for number in 0..count {
                assert!(recv(&b).await == pattern(300, number));
            }
        };
        let ending = async {
            for batch in batches {
                assert!(soon("batch", batch).await.is_ok());
            }
        };
        soon("all", async { tokio::join!(sending, receiving, ending) }).await;
        // The last batch rewrites only the first three blocks.
        let (long, short) = (pattern(8 * BLOCK, count - 2), pattern(3 * BLOCK, count - 1));
        assert!(bytes_of(&region)[..8 * BLOCK] == [&short[..], &long[3 * BLOCK..]].concat());
        assert_open(&a, &b).await;
    });
}

#[test]
fn inline_writes_need_no_buffer() {
    modes("inline", || async {
        let (a, b) = pair(&config().max_inline(64));
        let (region, remote) = exposed(&b, 1);
        let mut bytes = [1; 64];
        let write = a.write_inline(&bytes, remote);
        // The bytes are copied when the write is posted.
        bytes = [2; 64];
        let second = a.write_inline(&bytes[..32], remote.slice(64..96).unwrap());
        bytes.fill(3);
        soon("write", async { tokio::try_join!(write, second) }).await.unwrap();
        a.send("written").await.unwrap();
        assert_eq!(recv(&b).await, "written");
        assert_eq!(bytes_of(&region)[..97], [&[1; 64][..], &[2; 32], &[0]].concat());

        let kind = |result: Result<(), tokio_rdma::OpError<()>>| result.unwrap_err().kind();
        let refused = kind(soon("too long", a.write_inline(&[4; BLOCK + 1], remote)).await);
        assert!(
            matches!(refused, OpErrorKind::Limit(LimitError { asked: 513, .. })),
            "{refused:?}"
        );
        let refused = kind(
            soon("beyond the region", a.write_inline(&[4; 9], remote.slice(..8).unwrap())).await,
        );
        assert!(
            matches!(refused, OpErrorKind::Limit(LimitError { asked: 9, allowed: 8, .. })),
            "{refused:?}"
        );
        assert_eq!(bytes_of(&region)[0], 1);
        assert_open(&a, &b).await;
    });
}

#[test]
fn fenced_write_waits_for_the_earlier_read() {
    modes("fence", || async {
        let (device, pd) = device(&Network::new());
        if !keeps_fences(&device) {
            return;
        }
        let (a, b) = pair_in(&pd, &pd, &config(), &config());
        let (region, remote) = exposed(&b, 1);
        for round in 0..scaled(64) {
            let mut batch = Batch::new();
            batch.read(a.try_alloc(BLOCK).unwrap(), remote);
            batch.fence().write(a.copy_from(&pattern(BLOCK, round + 1)).unwrap(), remote);
            let buffers = soon("both", a.post_batch(batch)).await.into_buffers().unwrap();
            let before = if round == 0 { vec![0; BLOCK] } else { pattern(BLOCK, round).to_vec() };
            assert!(buffers[0][..] == before[..], "the READ returns the bytes before the WRITE");
            assert!(bytes_of(&region) == pattern(BLOCK, round + 1));
        }
    });
}

#[test]
fn dropped_batch_completes_and_returns_its_buffers() {
    modes("dropped", || async {
        let (a, b) = pair(&config().max_send_wr(8));
        let (region, remote) = exposed(&b, 8);
        let pool = Pool::new(a.protection_domain(), BLOCK, 24).unwrap();
        for _ in 0..3 {
            let mut batch = Batch::new();
            for block in 0..8 {
                batch.write(pool.copy_from(&[5; BLOCK]).unwrap(), place(remote, block));
            }
            drop(a.post_batch(batch));
        }
        eventually("buffers", || pool.available() == 24).await;
        a.send("written").await.unwrap();
        assert_eq!(recv(&b).await, "written");
        assert!(bytes_of(&region).iter().all(|&byte| byte == 5));
    });
}

#[test]
fn impossible_buffers_are_refused_before_allocation() {
    modes("too long", || async {
        let (a, _b) = pair(&config());
        // Above the maximum length, and above any machine's memory.
        for len in [u32::MAX as usize + 1, 1 << 61, usize::MAX] {
            match a.try_alloc(len) {
                Err(SetupError::Limit(limit)) => {
                    assert_eq!(
                        limit,
                        LimitError {
                            field: "buffer bytes",
                            asked: len as u64,
                            allowed: u32::MAX.into()
                        }
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        match Pool::new(a.protection_domain(), 1 << 31, 1 << 30) {
            Err(SetupError::Verb(error)) => {
                assert_eq!(std::io::Error::from(error).kind(), ErrorKind::OutOfMemory)
            }
            other => panic!("{other:?}"),
        }
    });
}

// Shows T1.
#[test]
fn deadline_of_a_read_closes_the_connection_with_its_reason() {
    modes("deadline", || async {
        let network = Network::new();
        network.set_faults(Faults::none());
        let [(_, a_pd), (_, b_pd)] = two(&network);
        let config = config().retries(RetryConfig::default());
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        let (region, remote) = exposed(&b, 1);
        region.write(0, &[1; BLOCK]).unwrap();
        let buffer =
            soon("in time", a.read(a.try_alloc(BLOCK).unwrap(), remote).within(LONG)).await;
        network.set_loss(1.0);
        let read = a.read(buffer.unwrap(), remote).deadline(Instant::now());
        let revoked = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };
        let error = soon("a READ", read).await.unwrap_err();
        assert_eq!(error.kind(), revoked);
        assert_eq!(error.into_buffer().unwrap()[..], [1; BLOCK]);
        assert_eq!(soon("the end", a.closed()).await, CloseReason::Operation(revoked));
    });
}

#[test]
fn lease_of_a_connection_ends_at_its_deadline() {
    modes("lease", || async {
        let (a, b) = pair(&config());
        if b.protection_domain().device().attr().max_mw == 0 {
            return;
        }
        let region = b.expose(vec![0; BLOCK], Access::MW_BIND).unwrap();
        let lease = b.lease(&region, 0..BLOCK, Access::REMOTE_WRITE);
        let mut lease = soon("the lease", lease).await.unwrap();
        let grant = lease.grant();
        soon("in time", a.write(a.copy_from(&[7; BLOCK]).unwrap(), grant)).await.unwrap();
        lease.expire_at(Instant::now() + Duration::from_millis(1)).unwrap();
        soon("the end of the lease", lease.expired()).await;
        let bytes: Vec<u8> = region.into_storage().unwrap();
        assert_eq!(bytes, [7; BLOCK]);
        // Nothing is lost but the access.
        assert_open(&a, &b).await;
        let late = soon("late", a.write(a.copy_from(&[8; BLOCK]).unwrap(), grant)).await;
        assert!(late.is_err());
    });
}
