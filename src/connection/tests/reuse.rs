//! Resources that closed connections leave to others.

use std::future::Future;
use std::sync::Arc;

use crate::connection::resources::{MAX_IDLE, ResourceCache};
use crate::connection::{Connection, ConnectionConfig, Listener};
use crate::contained::tests::HANG;
use crate::software::Network;
use crate::types::Access;
use crate::verbs::{Device, PdId};

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("test timed out") });
}

async fn eventually(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

fn small() -> ConnectionConfig {
    ConnectionConfig::default().receive_buffers(4).spare_buffers(2).send_buffers(2)
}

async fn listen(device: &Device) -> Listener {
    Listener::bind_with(device, "127.0.0.1:0", &small()).await.unwrap()
}

async fn connect(device: &Device, listener: &Listener) -> [Connection; 2] {
    let config = small();
    let connecting = Connection::connect_with(device, listener.local_addr().unwrap(), &config);
    let (ours, theirs) = tokio::try_join!(connecting, listener.accept()).unwrap();
    [ours, theirs]
}

/// Closes both ends and waits until nothing uses what they had.
async fn close([ours, theirs]: [Connection; 2]) {
    let ends = [&ours, &theirs].map(|end| Arc::downgrade(&end.handle().shared));
    let (one, other) = tokio::join!(ours.close(), theirs.close());
    assert_eq!((one, other), (Ok(()), Ok(())));
    drop((ours, theirs));
    eventually(|| ends.iter().all(|end| end.strong_count() == 0)).await;
}

fn domains(connections: &[Connection; 2]) -> [PdId; 2] {
    let mut domains = connections.each_ref().map(|end| end.protection_domain().id());
    domains.sort();
    domains
}

#[test]
fn closed_connection_leaves_its_resources_to_the_next() {
    run(|| async {
        let device = Device::software_in(&Network::new(), "reused").unwrap();
        let listener = listen(&device).await;
        let cache = ResourceCache::of(&device);
        let first = connect(&device, &listener).await;
        let known = domains(&first);
        assert_ne!(known[0], known[1], "each end has a domain of its own");
        close(first).await;
        assert_eq!(cache.idle(), 2);
        for _ in 0..3 {
            let again = connect(&device, &listener).await;
            assert_eq!((domains(&again), cache.idle()), (known, 0));
            for len in [10, 5_000, 100_000] {
                for [from, to] in [[&again[0], &again[1]], [&again[1], &again[0]]] {
                    from.send(vec![len as u8; len]).await.unwrap();
                    let message = to.recv().await.unwrap().expect("a message");
                    assert!(message.len() == len && message.iter().all(|&byte| byte == len as u8));
                }
            }
            close(again).await;
        }
        // Other settings need other buffers.
        let other = small().receive_buffer_size(4096);
        let connecting = Connection::connect_with(&device, listener.local_addr().unwrap(), &other);
        let (ours, _theirs) = tokio::try_join!(connecting, listener.accept()).unwrap();
        assert!(!known.contains(&ours.protection_domain().id()));
        assert_eq!(cache.idle(), 1);
    });
}

// Shows S4.
#[test]
fn resources_that_the_service_uses_are_not_left_to_others() {
    run(|| async {
        let device = Device::software_in(&Network::new(), "used").unwrap();
        let listener = listen(&device).await;
        let cache = ResourceCache::of(&device);
        type Use = fn(&Connection) -> Box<dyn std::any::Any>;
        let uses: [Use; 3] = [
            |of| Box::new(of.expose(vec![0; 64], Access::REMOTE_ALL).unwrap()),
            |of| Box::new(of.protection_domain().clone()),
            |of| Box::new(of.try_alloc(8).unwrap()),
        ];
        for use_of in uses {
            let connections = connect(&device, &listener).await;
            let used = use_of(&connections[0]);
            close(connections).await;
            assert_eq!(cache.idle(), 1, "the other end's");
            drop(used);
            assert_eq!(cache.idle(), 1);
        }
        // A message in a receive buffer.
        let connections = connect(&device, &listener).await;
        connections[0].send(vec![7; 5_000]).await.unwrap();
        let message = connections[1].recv().await.unwrap().expect("a message");
        close(connections).await;
        assert_eq!(cache.idle(), 1);
        assert_eq!(message, vec![7; 5_000]);
    });
}

#[test]
fn unused_resources_are_limited_and_freed_with_the_last_user() {
    run(|| async {
        let network = Network::new();
        let device = Device::software_in(&network, "limited").unwrap();
        let listener = listen(&device).await;
        let mut open = Vec::new();
        for _ in 0..=MAX_IDLE / 2 {
            open.push(connect(&device, &listener).await);
        }
        let last = open.pop().unwrap();
        for connections in open {
            close(connections).await;
        }
        let cache = ResourceCache::of(&device);
        assert_eq!(cache.idle(), MAX_IDLE);
        close(last).await;
        assert_eq!(cache.idle(), MAX_IDLE);
        let kept = Arc::downgrade(&cache);
        drop((cache, listener, device));
        eventually(|| kept.strong_count() == 0).await;
        eventually(|| network.control("limited").is_none()).await;
    });
}

#[test]
fn queue_of_the_settings_is_released_with_its_connection() {
    run(|| async {
        let device = Device::software_in(&Network::new(), "released").unwrap();
        let queue = crate::engine::CompletionQueue::builder(&device).build().unwrap();
        let state = Arc::downgrade(queue.shared());
        let config = small().completion_queue(&queue);
        let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
        let connecting = Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
        let (ours, theirs) = tokio::try_join!(connecting, listener.accept()).unwrap();
        close([ours, theirs]).await;
        drop((queue, config));
        eventually(|| state.strong_count() == 0).await;
        assert_eq!(ResourceCache::of(&device).idle(), 2);
    });
}
