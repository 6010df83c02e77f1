//! What belongs to one connection is refused on the next.

use std::time::Duration;

use tokio_rdma::error::Outcome;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::WcStatus;
use tokio_rdma::{Access, Connection, ConnectionConfig, OpErrorKind, RemoteRegion};

use super::setup::{Hosts, MS, eager, run};
use crate::torture::{Seed, impatient, soon};

const LEN: usize = 64;

fn bytes_of(region: &tokio_rdma::ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// Performs operation `op` on the grant of another connection, which must be refused.
async fn assert_refused(by: &Connection, grant: RemoteRegion, op: usize) {
    let word = grant.slice(..8).unwrap();
    let buffer = by.copy_from(&[9; 8]).unwrap();
    let kind = match op {
        0 => soon("write", by.write(buffer, word)).await.unwrap_err().kind(),
        1 => soon("read", by.read(buffer, word)).await.unwrap_err().kind(),
        _ => soon("atomic", by.fetch_add(word, 1)).await.unwrap_err().kind(),
    };
    let OpErrorKind::Completion(error) = kind else { panic!("{kind:?}") };
    assert_eq!(error.status, WcStatus::REM_ACCESS_ERR);
    assert_eq!(kind.outcome(), Outcome::MaybeExecuted, "the status does not tell how much arrived");
}

#[test]
fn grant_of_an_old_generation_is_refused_on_the_new_connection() {
    run("old grant", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        for kept in [true, false] {
            for op in 0..3 {
                let (old, ours, theirs) = Hosts::next(&client, &listener).await;
                let region = theirs.expose(vec![0; LEN], Access::REMOTE_ALL).unwrap();
                let grant = region.grant();
                let written = ours.write(ours.copy_from(&[1; LEN]).unwrap(), grant);
                soon("write", written).await.unwrap();
                theirs.abort();
                soon("end", ours.closed()).await;
                drop(ours);
                // The server keeps what it has exposed, or exposes other memory in its place.
                let region = kept.then_some(region);
                let theirs = kept.then_some(theirs);

                let (new, ours, newer) = Hosts::next(&client, &listener).await;
                assert!(new > old);
                let exposed = newer.expose(vec![7; LEN], Access::REMOTE_ALL).unwrap();
                assert_refused(&ours, grant, op).await;
                assert_eq!(bytes_of(&exposed), [7; LEN]);
                if let Some(region) = region {
                    assert_eq!(bytes_of(&region), [1; LEN]);
                }
                // The refusal has closed the connection.
                soon("end", ours.closed()).await;
                drop((ours, newer, theirs));
            }
        }
    });
}

#[test]
fn operations_on_an_old_connection_are_refused_at_this_side() {
    run("old connection", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        let (_, old, theirs) = Hosts::next(&client, &listener).await;
        let region = theirs.expose(vec![0; LEN], Access::REMOTE_ALL).unwrap();
        theirs.abort();
        soon("end", old.closed()).await;
        let (_, new, newer) = Hosts::next(&client, &listener).await;
        let exposed = newer.expose(vec![7; LEN], Access::REMOTE_ALL).unwrap();
        for grant in [region.grant(), exposed.grant()] {
            let write = old.write(old.copy_from(&[9; LEN]).unwrap(), grant);
            let error = soon("write", write).await.unwrap_err();
            assert_ne!(error.status(), Some(WcStatus::SUCCESS), "{error:?}");
        }
        assert!(old.send("late").await.is_err());
        assert_eq!((bytes_of(&region), bytes_of(&exposed)), (vec![0; LEN], vec![7; LEN]));
        new.send("alive").await.unwrap();
        assert_eq!(crate::connected::recv(&newer).await, "alive");
    });
}

#[test]
fn delayed_packets_of_an_old_generation_change_nothing_of_the_new() {
    const ROUNDS: u8 = 12;
    const WRITES: usize = 16;
    // Each generation leaves WRITEs and messages in the network. They arrive up to 20 ms later, in
    // part twice, while the next one uses queue pairs, memory and keys made in place of the old.
    run("delayed packets", || async {
        let seed = Seed::new("delayed_packets_of_an_old_generation_change_nothing_of_the_new");
        let faults = Faults::none().delay(Duration::ZERO..20 * MS).duplicate(0.3).reorder(0.3);
        // Delays are no losses.
        let config = ConnectionConfig::default().retries(impatient());
        let hosts = Hosts::on(Network::with_faults(seed.value, faults), config).await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        let mut random = fastrand::Rng::with_seed(seed.value);
        for round in 1..=ROUNDS {
            let (generation, ours, theirs) = Hosts::next(&client, &listener).await;
            // The previous generation's bytes may still arrive now.
            let region = theirs.expose(vec![0; WRITES * LEN], Access::REMOTE_ALL).unwrap();
            let slice =
                |at: usize| region.grant().slice((at * LEN) as u64..((at + 1) * LEN) as u64);
            for at in 0..WRITES {
                drop(ours.write(ours.copy_from(&[round; LEN]).unwrap(), slice(at).unwrap()));
            }
            ours.send(vec![round; LEN]).await.unwrap();
            let awaited = random.usize(..3);
            if awaited > 0 {
                // The message follows the WRITEs.
                assert_eq!(crate::connected::recv(&theirs).await, vec![round; LEN]);
                assert_eq!(bytes_of(&region), [round; WRITES * LEN], "generation {generation}");
            }
            if awaited > 1 {
                // More of them stay in flight.
                for at in 0..WRITES {
                    drop(ours.write(ours.copy_from(&[round; LEN]).unwrap(), slice(at).unwrap()));
                }
            }
            if random.bool() {
                theirs.abort();
            } else {
                ours.abort();
            }
            soon("end", ours.closed()).await;
            let seen = bytes_of(&region);
            assert!(seen.iter().all(|&byte| byte == 0 || byte == round), "{generation}: {seen:?}");
        }
    });
}
