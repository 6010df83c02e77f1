//! A `PeerSet` of a pool's peers.

use std::io;
use std::sync::{Arc, Mutex};

use futures::future::join_all;
use tokio_rdma::dc::DcAddress;
use tokio_rdma::peers::{PeerError, PeerSet, PeerSetConfig};
use tokio_rdma::{EstablishError, SetupError};

use super::{Home, Node, exclusive, setup};
use crate::common::{in_every_mode, within};

in_every_mode!(
    set_reads_and_writes_memory_of_more_peers_than_it_holds,
    target_that_has_moved_is_resolved_again,
);

async fn set_reads_and_writes_memory_of_more_peers_than_it_holds(mode: &str) {
    const PEERS: usize = 24;
    const PLACES: usize = 5;
    const ROUNDS: usize = 3;
    let Some(setup) = setup("set_reads_and_writes") else { return };
    let (home, first) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let mut nodes = vec![first];
    while nodes.len() < PEERS {
        nodes.push(nodes[0].beside());
    }
    let directory: Vec<_> = nodes.iter().map(|node| node.target.address()).collect();
    let pool = home.pool(2, exclusive(5));
    let peers = PeerSet::over_dc(
        &pool,
        PeerSetConfig::default().max_peers(PLACES).max_in_flight_per_peer(1),
        move |&key: &usize| std::future::ready(Ok::<DcAddress, io::Error>(directory[key])),
    )
    .unwrap();
    let text = |key: usize, round: usize| format!("peer {key:2}, round {round}");
    for round in 0..ROUNDS {
        let calls = nodes.iter().enumerate().map(|(key, node)| {
            let (peers, home) = (&peers, &home);
            async move {
                let (expected, remote) = (text(key, round), node.remote(64 * round, 16));
                let peer = peers.get(&key).await.unwrap();
                assert_eq!(expected.len(), 16);
                peer.write(home.buffer(expected.as_bytes()), remote).await.unwrap();
                let read = peer.read(home.buffers.alloc(16).await.unwrap(), remote).await.unwrap();
                assert_eq!(&read[..], expected.as_bytes());
            }
        });
        within("all peers", join_all(calls)).await;
    }
    for (key, node) in nodes.iter().enumerate() {
        for round in 0..ROUNDS {
            let mut bytes = [0; 16];
            node.region.read(64 * round, &mut bytes).unwrap();
            assert_eq!(&bytes[..], text(key, round).as_bytes());
        }
    }
    let counters = peers.counters();
    assert_eq!((counters.peers, counters.idle, counters.in_flight), (PLACES, PLACES, 0));
    assert_eq!(counters.connected, counters.evicted + PLACES as u64);
    assert!(counters.evicted >= (ROUNDS * (PEERS - PLACES)) as u64, "{counters:?}");
    assert_eq!((counters.lost, pool.counters().repairs), (0, 0));
}

async fn target_that_has_moved_is_resolved_again(mode: &str) {
    let Some(setup) = setup("target_that_has_moved") else { return };
    let (home, old) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let (new, other) = (old.beside(), old.beside());
    let pool = home.pool(2, exclusive(5));
    let directory = Arc::new(Mutex::new([old.target.address(), other.target.address()]));
    let resolved = directory.clone();
    let peers = PeerSet::over_dc(&pool, PeerSetConfig::default(), move |&key: &usize| {
        std::future::ready(Ok::<DcAddress, io::Error>(resolved.lock().unwrap()[key]))
    })
    .unwrap();
    let get = async |key| within("peer", peers.get(&key)).await.unwrap();
    let (before, unaffected) = (get(0).await, get(1).await);
    within("write", before.write_inline(b"before", old.remote(0, 6))).await.unwrap();

    // The server is restarted.
    directory.lock().unwrap()[0] = new.target.address();
    drop(old);
    within("lost write", before.write_inline(b"lost", new.remote(0, 4))).await.unwrap_err();
    let after = get(0).await;
    assert!(after.generation() > before.generation());
    within("write", after.write_inline(b"after", new.remote(0, 5))).await.unwrap();
    let mut bytes = [0; 5];
    new.region.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"after");

    within("write", unaffected.write_inline(b"good", other.remote(0, 4))).await.unwrap();
    assert_eq!(get(1).await.generation(), unaffected.generation());
    assert_eq!((peers.counters().lost, peers.counters().peers), (1, 2));

    pool.close();
    let error = within("closed", peers.get(&0)).await.unwrap_err();
    assert_eq!(error, PeerError::Connect(EstablishError::Setup(SetupError::Closed)));
}
