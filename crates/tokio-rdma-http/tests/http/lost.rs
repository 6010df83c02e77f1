//! Peers that are lost in the middle of a body.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::get;
use http_body_util::{BodyExt, Empty};
use hyper::{Request, Response};

use crate::{Devices, run, soon};

/// How the server is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Its network.
    Port,
    /// Its runtime, and so the task that writes the body.
    Runtime,
}

/// Serves a body without an end, in a runtime of its own. Returns what is dropped to end it.
fn serve(devices: &Devices) -> (std::net::SocketAddr, tokio::runtime::Runtime) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let endless = async || {
        let blocks = futures::stream::repeat_with(|| {
            Ok::<_, std::io::Error>(Bytes::from_static(&[7; 10_000]))
        });
        // Chunked: the end of the stream would not complete the body, an end of the body would.
        Response::new(Body::from_stream(blocks))
    };
    let (address, _) = std::thread::scope(|scope| {
        let serving = devices.serve(Router::new().route("/", get(endless)));
        scope.spawn(|| runtime.block_on(serving)).join().unwrap()
    });
    (address, runtime)
}

#[test]
fn body_of_a_lost_server_ends_with_an_error() {
    run(async |devices| {
        for loss in [Loss::Port, Loss::Runtime] {
            let (address, runtime) = serve(&devices);
            let io = devices.connect_io(address).await;
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            let connection = tokio::spawn(connection);
            let request = Request::get("/").body(Empty::<Bytes>::new()).unwrap();
            let response = soon("response", sender.send_request(request)).await.unwrap();
            let (mut body, mut frames) = (response.into_body(), 0);
            let mut running = Some(runtime);
            let error = loop {
                match soon("frame", body.frame()).await {
                    Some(Ok(_)) => frames += 1,
                    Some(Err(error)) => break error,
                    None => panic!("{loss:?}: a truncated body that looks complete"),
                }
                if frames == 20 {
                    match loss {
                        Loss::Port => devices.network.control("server").unwrap().set_port(false),
                        Loss::Runtime => running.take().unwrap().shutdown_background(),
                    }
                }
            };
            assert!(error.is_body_write_aborted() || !error.is_canceled(), "{loss:?}: {error:?}");
            drop(soon("connection", connection).await);
            devices.network.control("server").unwrap().set_port(true);
            if let Some(running) = running {
                running.shutdown_background();
            }
        }
    });
}
