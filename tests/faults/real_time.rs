//! Faults in real time, in every completion mode and on several threads.

use std::time::Duration;

use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AckTimeout, RnrTimer, WcStatus};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, Pool, QueuePair,
    RemoteRegion,
};

use super::chance::noise;
use crate::torture::HANG;

const MESSAGES: usize = 40;
const ADDITIONS: u64 = 20;
const LARGEST: usize = 9000;

fn message(number: usize) -> &'static [u8] {
    &noise()[number * 100..][..number * 997 % LARGEST]
}

async fn send(qp: QueuePair, pool: Pool, remote: RemoteRegion) {
    let mut pending = Vec::new();
    for number in 0..MESSAGES {
        let buffer = pool.copy_from(message(number)).unwrap();
        pending.push(qp.with_imm(Imm(number as u32)).send(buffer));
    }
    for (number, one) in pending.into_iter().enumerate() {
        assert_eq!(one.await.unwrap()[..], *message(number));
    }
    let data = remote.slice(8..).unwrap();
    for number in 0..8 {
        let piece = data.slice(..message(number).len() as u64).unwrap();
        let buffer = qp.write(pool.copy_from(message(number)).unwrap(), piece).await.unwrap();
        let back = qp.read(buffer, piece).await.unwrap();
        assert_eq!(back[..], *message(number));
    }
    for _ in 0..ADDITIONS {
        qp.fetch_add(remote.slice(..8).unwrap(), 1).await.unwrap();
    }
}

async fn receive(qp: QueuePair, pool: Pool) {
    for number in 0..MESSAGES {
        // One receive at a time, so that messages often have to wait.
        let received = qp.recv(pool.try_alloc(LARGEST).unwrap()).await.unwrap();
        assert_eq!(received.imm, Some(Imm(number as u32)), "in order");
        assert_eq!(received.buffer[..], *message(number));
    }
}

async fn both_directions(mode: fn() -> CompletionMode, seed: u64) {
    let delay = Duration::from_micros(1)..Duration::from_micros(60);
    let faults = Faults::none().loss(0.03).duplicate(0.03).reorder(0.03).corrupt(0.03).delay(delay);
    let network = Network::with_faults(seed, faults);
    // Threads of a loaded machine are delayed, so timeouts are long.
    let options = RetryConfig {
        timeout: AckTimeout::from_code(12),
        rnr_timer: RnrTimer::from_code(6),
        ..RetryConfig::default()
    };
    let ends = ["a", "b"].map(|name| {
        let device = Device::software_in(&network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, mode()).unwrap();
        let qp = QueuePair::builder(&pd, &queue).max_send_wr(8).max_recv_wr(4).build().unwrap();
        let region =
            ExposedRegion::new(&pd, HostMemory::zeroed(16384).unwrap(), Access::REMOTE_ALL);
        let pool = Pool::builder(&pd)
            .buffer_size(LARGEST)
            .buffers(MESSAGES + 8)
            .growing(true)
            .build()
            .unwrap();
        (qp, region.unwrap(), pool)
    });
    ends[0].0.connect_with(&ends[1].0.endpoint(), &options).unwrap();
    ends[1].0.connect_with(&ends[0].0.endpoint(), &options).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for (this, that) in [(0, 1), (1, 0)] {
        let (qp, _, pool) = &ends[this];
        tasks.spawn(send(qp.clone(), pool.clone(), ends[that].1.grant()));
        tasks.spawn(receive(qp.clone(), pool.clone()));
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    for (_, region, _) in &ends {
        assert_eq!(region.load(0).unwrap(), ADDITIONS, "each addition is executed once");
    }
    assert!(network.counters().lost > 0 && network.counters().rejected > 0);
    // A link failure fails all waiting operations.
    network.set_loss(1.0);
    let [(qp, _, pool), (peer, ..)] = &ends;
    let (first, second) =
        (qp.send(pool.copy_from(b"1").unwrap()), qp.send(pool.copy_from(b"2").unwrap()));
    let waiting = qp.recv(pool.try_alloc(8).unwrap());
    assert_eq!(first.await.unwrap_err().kind().status(), Some(WcStatus::RETRY_EXC_ERR));
    assert_eq!(second.await.unwrap_err().kind().status(), Some(WcStatus::WR_FLUSH_ERR));
    assert_eq!(waiting.await.unwrap_err().kind().status(), Some(WcStatus::WR_FLUSH_ERR));
    peer.clone().close().await;
}

fn run_bounded(threads: usize, mode: fn() -> CompletionMode, seed: u64) {
    let runtime = if threads == 1 {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    } else {
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
    };
    let runtime = runtime.unwrap();
    let done = runtime.block_on(async {
        let task = tokio::spawn(both_directions(mode, seed));
        tokio::time::timeout(HANG, task).await
    });
    done.expect("the run hangs").unwrap();
    runtime.shutdown_background();
}

#[test]
fn operations_succeed_in_event_mode() {
    run_bounded(2, || CompletionMode::Event, 1);
}

#[test]
fn operations_succeed_in_busy_poll_mode() {
    run_bounded(2, || CompletionMode::busy_poll().unwrap(), 2);
}

#[test]
fn operations_succeed_in_cooperative_mode() {
    run_bounded(1, || CompletionMode::Cooperative, 3);
    run_bounded(2, || CompletionMode::Cooperative, 4);
}

#[test]
fn operations_succeed_in_hybrid_mode() {
    run_bounded(2, || CompletionMode::Hybrid, 5);
}
