//! The service: keeps what nodes announce, and lets others wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::watch;

use crate::Announcement;

/// Nodes that are kept at once: a service that anybody can fill is no service.
pub const MAX_NODES: usize = 1024;

/// Bytes of a name.
const MAX_NAME: usize = 64;

/// Bytes of an announcement; a real one has some 200.
pub const MAX_BODY: usize = 4096;

/// Longest that one request waits.
pub const MAX_WAIT: Duration = Duration::from_secs(30);

/// Status and reason.
pub type Refusal = (StatusCode, String);

/// All announcements by node.
#[derive(Clone, Default)]
struct Nodes {
    known: Arc<Mutex<HashMap<String, Announcement>>>,
    /// Counts announcements, for those who wait for one.
    changed: watch::Sender<u64>,
}

/// `POST` and `GET /nodes/{id}/rdma/endpoint`.
///
/// POST replaces what the node has announced before. GET answers 404 for a node that is not known; with `?wait=SECONDS`
/// (30 at most) only if it is not by then.
pub fn router() -> Router {
    Router::new()
        .route("/nodes/{id}/rdma/endpoint", get(find).post(announce))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Nodes::default())
}

/// Whether a node may be kept beside the `others`, or in its own place if it is `known`.
///
/// # Errors
///
/// 400 for its name, 507 if there are too many.
pub fn check_room(id: &str, others: usize, known: bool) -> Result<(), Refusal> {
    if id.is_empty() || id.len() > MAX_NAME {
        return Err((
            StatusCode::BAD_REQUEST,
            format!("a name has 1 to {MAX_NAME} bytes, this one {}", id.len()),
        ));
    }
    if others >= MAX_NODES && !known {
        let reason = format!("{MAX_NODES} nodes are known, which is all there may be");
        return Err((StatusCode::INSUFFICIENT_STORAGE, reason));
    }
    Ok(())
}

async fn announce(
    State(nodes): State<Nodes>,
    Path(id): Path<String>,
    Json(announcement): Json<Announcement>,
) -> Result<StatusCode, Refusal> {
    let mut known = nodes.known.lock().unwrap_or_else(PoisonError::into_inner);
    check_room(&id, known.len(), known.contains_key(&id))?;
    let status = match known.insert(id, announcement) {
        None => StatusCode::CREATED,
        Some(_) => StatusCode::OK,
    };
    drop(known);
    nodes.changed.send_modify(|count| *count += 1);
    Ok(status)
}

#[derive(Deserialize)]
struct Wait {
    #[serde(default)]
    wait: u64,
}

async fn find(
    State(nodes): State<Nodes>,
    Path(id): Path<String>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<Announcement>, Refusal> {
    // Subscribed before the first look: no announcement falls in between.
    let mut changed = nodes.changed.subscribe();
    let found = async {
        loop {
            let known =
                nodes.known.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied();
            if let Some(announcement) = known {
                return Json(announcement);
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let wait = Duration::from_secs(wait).min(MAX_WAIT);
    tokio::time::timeout(wait, found)
        .await
        .map_err(|_| (StatusCode::NOT_FOUND, format!("no node {id}")))
}
