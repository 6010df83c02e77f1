//! Senders that are withdrawn while others wait behind them.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use futures::FutureExt;

use crate::connection::{Connection, Listener};
use crate::contained::tests::Counts;
use crate::software::Network;
use crate::verbs::Device;

#[test]
fn sender_behind_a_withdrawn_one_is_woken() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let network = Network::new();
        let [client, server] =
            ["client", "server"].map(|name| Device::software_in(&network, name).unwrap());
        let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
        let connecting = Connection::connect(&client, listener.local_addr().unwrap());
        let (accepted, connected) = tokio::join!(listener.accept(), connecting);
        let (_server, client) = (accepted.unwrap(), connected.unwrap());
        // The peer cannot return credits.
        network.control("server").unwrap().set_port(false);
        while client.send("filling").now_or_never().is_some() {}
        let counts = Arc::new(Counts::default());
        let waker = Waker::from(counts.clone());
        let mut first = Box::pin(client.send("first"));
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let mut second = Box::pin(client.send("second"));
        assert!(second.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(counts.0.load(Ordering::Relaxed), 0);
        drop(first);
        assert_eq!(counts.0.load(Ordering::Relaxed), 1);
    });
}
