//! The HTTP service, which stores announcements.

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

/// The maximum number of nodes: any client may POST, so memory must be bounded.
pub const MAX_NODES: usize = 1024;

/// The maximum length of a name, in bytes.
const MAX_NAME: usize = 64;

/// The maximum length of an announcement, in bytes; a real one has about 200.
pub const MAX_BODY: usize = 4096;

/// The maximum time that a request waits.
pub const MAX_WAIT: Duration = Duration::from_secs(30);

/// An HTTP status and the reason.
pub type Refusal = (StatusCode, String);

#[derive(Clone, Default)]
struct Nodes {
    known: Arc<Mutex<HashMap<String, Announcement>>>,
    /// The number of announcements so far.
    changed: watch::Sender<u64>,
}

/// Returns the routes `POST` and `GET /nodes/{id}/rdma/endpoint`.
///
/// POST replaces an earlier announcement. GET answers 404 for an unknown node; `?wait=SECONDS` (at
/// most 30) waits that long for an announcement.
pub fn router() -> Router {
    Router::new()
        .route("/nodes/{id}/rdma/endpoint", get(find).post(announce))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Nodes::default())
}

/// Checks whether a node may be stored beside `others` nodes; `known` if it is one of them.
///
/// # Errors
///
/// 400 for an invalid name, 507 if the service is full.
pub fn check_capacity(id: &str, others: usize, known: bool) -> Result<(), Refusal> {
    if id.is_empty() || id.len() > MAX_NAME {
        return Err((
            StatusCode::BAD_REQUEST,
            format!("name of {} bytes; expected 1 to {MAX_NAME}", id.len()),
        ));
    }
    if others >= MAX_NODES && !known {
        let reason = format!("service full: {MAX_NODES} nodes stored, which is the maximum");
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
    check_capacity(&id, known.len(), known.contains_key(&id))?;
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
    // Subscribes before the first check, so that no announcement is missed.
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
        .map_err(|_| (StatusCode::NOT_FOUND, format!("node {id} unknown")))
}
