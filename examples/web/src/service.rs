//! The routes of the server.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, Response};
use axum::routing::get;
use futures::{Stream, stream};
use tokio::sync::watch;

use crate::measure::Figures;

/// The path of a short answer.
pub(crate) const PING: &str = "/ping";

/// The path of an answer of 16 MiB.
pub(crate) const BULK: &str = "/bulk";

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 256;

/// Returns the service. Its page shows what `figures` has.
pub(crate) fn router(figures: watch::Receiver<Figures>) -> Router {
    Router::new()
        .route("/", get(async || Html(include_str!("page.html"))))
        .route("/figures", get(events))
        .route(PING, get(async || "pong"))
        .route(BULK, get(bulk))
        .with_state(figures)
}

async fn bulk() -> Response {
    let block = Bytes::from(vec![7; BLOCK]);
    let blocks = stream::iter((0..BLOCKS).map(move |_| Ok::<_, Infallible>(block.clone())));
    Response::new(Body::from_stream(blocks))
}

/// Sends the figures now and after each measurement.
async fn events(
    State(figures): State<watch::Receiver<Figures>>,
) -> Sse<impl Stream<Item = Result<Event, axum::Error>>> {
    let events = stream::unfold((figures, true), |(mut figures, first)| async move {
        if !first {
            figures.changed().await.ok()?;
        }
        let event = Event::default().json_data(figures.borrow_and_update().clone());
        Some((event, (figures, false)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(5)))
}
