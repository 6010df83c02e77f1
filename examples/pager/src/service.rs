//! The coordinator: the service of `examples/coordinator` with the map of pages beside its nodes.
//!
//! Its map names nodes only that have all that was ever written: who was not written to is taken off, and when a client has the
//! map, nobody joins. So whoever reads a page from any node of the map reads what was written last.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use coordinator::service::{MAX_BODY, MAX_WAIT, Refusal, check_room};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::{Map, Share, Wanted};

/// What the coordinator knows.
#[derive(Debug, Default)]
struct Known {
    map: Map,
    /// A client has it: who joins now would miss what that client writes.
    sealed: bool,
}

type Pages = Arc<watch::Sender<Known>>;

/// The routes of `coordinator::service`, and:
///
/// - `POST /nodes/{id}/pages`: lends a [`Share`]. 409 once a client has the map.
/// - `GET /nodes/{id}/pages`: that share.
/// - `DELETE /nodes/{id}/pages`: takes a node off the map that leaves, or that was not written to.
/// - `GET /pages?pages=N&copies=K`: the [`Map`], when it has what is [wanted](Wanted).
///
/// With `wait=SECONDS` (30 at most) GET waits, and else answers 404 for what is not there.
pub fn router() -> Router {
    let pages = Router::new()
        .route("/nodes/{id}/pages", get(find).post(join).delete(leave))
        .route("/pages", get(map))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Pages::default());
    coordinator::service::router().merge(pages)
}

async fn join(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    Json(share): Json<Share>,
) -> Result<StatusCode, Refusal> {
    share.pages().map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))?;
    let mut answer = Ok(StatusCode::CREATED);
    pages.send_if_modified(|known| {
        answer = known.join(id, share);
        answer.is_ok()
    });
    answer
}

async fn leave(State(pages): State<Pages>, Path(id): Path<String>) -> StatusCode {
    pages.send_if_modified(|known| known.map.shares.remove(&id).is_some());
    StatusCode::NO_CONTENT
}

#[derive(Deserialize)]
struct Wait {
    #[serde(default)]
    wait: u64,
}

async fn find(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<Share>, Refusal> {
    let found = look(&pages, wait, |known| known.map.shares.get(&id).cloned()).await;
    found.map(Json).ok_or_else(|| (StatusCode::NOT_FOUND, format!("no node {id} lends pages")))
}

async fn map(
    State(pages): State<Pages>,
    Query(wanted): Query<Wanted>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<Map>, Refusal> {
    let taken = look(&pages, wait, |known| {
        let there = known.map.has(wanted);
        known.sealed |= there;
        there.then(|| known.map.clone())
    });
    let missing = || {
        let (asked, there) = (wanted.pages.max(1), pages.borrow().map.pages(wanted.copies.max(1)));
        format!("{} copies of {asked} pages or more are wanted, there are {there}", wanted.copies.max(1))
    };
    taken.await.map(Json).ok_or_else(|| (StatusCode::NOT_FOUND, missing()))
}

impl Known {
    fn join(&mut self, id: String, share: Share) -> Result<StatusCode, Refusal> {
        if self.sealed {
            let reason = "clients have the map already; a node that joins would not have what they write";
            return Err((StatusCode::CONFLICT, reason.to_owned()));
        }
        check_room(&id, self.map.shares.len(), self.map.shares.contains_key(&id))?;
        Ok(match self.map.shares.insert(id, share) {
            None => StatusCode::CREATED,
            Some(_) => StatusCode::OK,
        })
    }
}

/// What `found` finds, now or after one of the changes of the next `wait` seconds.
async fn look<T>(pages: &Pages, wait: u64, mut found: impl FnMut(&mut Known) -> Option<T>) -> Option<T> {
    // Subscribed before the first look: no change falls in between.
    let mut changes = pages.subscribe();
    let looking = async {
        loop {
            let mut seen = None;
            // Nobody waits for what this changes.
            pages.send_if_modified(|known| {
                seen = found(known);
                false
            });
            // `pages` is here, so changes do not end.
            if seen.is_some() || changes.changed().await.is_err() {
                return seen;
            }
        }
    };
    timeout(Duration::from_secs(wait).min(MAX_WAIT), looking).await.ok().flatten()
}
