//! WebSockets: connections that leave HTTP.

use axum::Router;
use axum::extract::ws::WebSocketUpgrade;
use axum::routing::any;
use futures::{SinkExt, StreamExt};
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Message;

use crate::{pattern, run, soon};

#[test]
fn upgraded_connection_carries_messages_and_ends() {
    run(async |devices| {
        let echo = async |upgrade: WebSocketUpgrade| {
            upgrade.on_upgrade(async |mut socket| {
                while let Some(Ok(message)) = socket.recv().await {
                    if socket.send(message).await.is_err() {
                        break;
                    }
                }
            })
        };
        let (address, serving) = devices.serve(Router::new().route("/", any(echo))).await;
        let stream = devices.connect(address).await;
        let connecting = client_async(format!("ws://{address}/"), stream);
        let (mut socket, response) = soon("upgrade", connecting).await.unwrap();
        assert_eq!(response.status(), 101);
        for len in [0, 1, 1000, 100_000, 1 << 20] {
            let message = Message::binary(pattern(len, len as u64));
            soon("send", socket.send(message.clone())).await.unwrap();
            assert!(soon("echo", socket.next()).await.unwrap().unwrap() == message, "{len} bytes");
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = soon("end", socket.next()).await {}
        serving.abort();
    });
}
