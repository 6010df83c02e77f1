//! Connections that are made anew. `connecting_again` has more, on the software device.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::time::Duration;

use tokio_rdma::peers::{
    PeerSet, PeerSetConfig, Reconnect, ReconnectError, ReconnectPolicy, ReconnectState,
};
use tokio_rdma::software::Network;
use tokio_rdma::{Connection, Listener};

use crate::connected::{self, address, config, recv, run};
use crate::torture::soon;

/// Sends a request and awaits its echo.
async fn echoed(client: &Connection, server: &Connection) {
    client.send("request").await.unwrap();
    assert_eq!(recv(server).await, "request");
    server.send("answer").await.unwrap();
    assert_eq!(recv(client).await, "answer");
}

#[test]
fn client_connects_again_to_a_server_that_drops_or_aborts_connections() {
    run("reconnect", || async {
        let [(near, _), (far, _)] = connected::two(&Network::new());
        let listener = Listener::bind_with(&far, address(&far), &config()).await.unwrap();
        let policy = ReconnectPolicy::default().first_delay(Duration::from_millis(1));
        let client =
            Reconnect::new(&near, listener.local_addr().unwrap(), &config(), policy).unwrap();
        for expected in 1..=3 {
            let both = async { tokio::join!(listener.accept(), client.connected()) };
            let (server, connected) = soon("connected", both).await;
            let (server, (generation, connection)) = (server.unwrap(), connected.unwrap());
            assert_eq!(generation, expected);
            echoed(&connection, &server).await;
            if expected % 2 == 0 {
                server.abort();
            }
            drop(server);
            soon("closed", connection.closed()).await;
        }
        drop(client.close().await);
        assert_eq!(client.state(), ReconnectState::Closed);
        assert_eq!(client.connected().await.unwrap_err(), ReconnectError::Closed);
    });
}

#[test]
fn peers_share_a_connection_and_the_one_used_least_recently_is_evicted() {
    run("peers", || async {
        let [(near, _), (far, _)] = connected::two(&Network::new());
        let listener = Listener::bind_with(&far, address(&far), &config()).await.unwrap();
        let place = listener.local_addr().unwrap();
        let settings = PeerSetConfig::default().max_peers(2);
        let peers = PeerSet::new(&near, &config(), settings, move |_: &u32| async move {
            Ok::<_, std::io::Error>(place)
        })
        .unwrap();
        let mut servers = Vec::new();
        for key in [1, 2, 3] {
            let both = async { tokio::join!(peers.get(&key), listener.accept()) };
            let (peer, server) = soon("connected", both).await;
            let (peer, server) = (peer.unwrap(), server.unwrap());
            echoed(&peer, &server).await;
            let again = soon("known", peers.get(&key)).await.unwrap();
            assert_eq!(again.generation(), peer.generation());
            servers.push(server);
        }
        // The third took the place of the first.
        let [first, second, third] = &servers[..] else { panic!("three") };
        assert_eq!(soon("end", first.recv()).await, Ok(None));
        assert!(second.close_reason().is_none() && third.close_reason().is_none());
        drop(peers);
        for server in [second, third] {
            soon("closed", server.closed()).await;
        }
    });
}
