//! The coordinator: the service of `examples/coordinator`, extended by the map of pages.
//!
//! The map names only nodes that have every write: a node that missed one is removed, and no node
//! joins once a client has the map. A read from any node of the map therefore returns the last
//! write, provided that every writer finished. If one did not, the map is marked.
//!
//! A restarted coordinator has no state. Each start has a new number, and nodes or clients of
//! another coordinator's map are refused.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use coordinator::service::{MAX_BODY, MAX_WAIT};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::known::{Known, Rejection, Settings};
use crate::{Conflict, Instance, Map, Share, Wanted, WriterId};

type Pages = Arc<watch::Sender<Known>>;

/// Returns the routes of `coordinator::service`, and:
///
/// - `POST /nodes/{id}/pages`: lends a [`Share`]; with `before=INSTANCE`, one that joined that
///   coordinator. The response has the [`Instance`] of this coordinator.
/// - `GET /nodes/{id}/pages`: the share.
/// - `DELETE /nodes/{id}/pages?instance=INSTANCE`: removes a node that leaves or missed a write.
/// - `GET /pages?pages=N&copies=K`: the [`Map`], once it has what is [wanted](Wanted).
/// - `PUT /writers/{id}?instance=INSTANCE`: requests the lease to write; with `going_on=true`,
///   renews it; with `unclean_too=true`, accepts that copies may differ. The response has its
///   duration, `lease_ms`.
/// - `DELETE /writers/{id}?instance=INSTANCE`: ends the lease.
///
/// GET waits for `wait=SECONDS` (at most 30), then answers 404. A [`Conflict`] has status 409.
pub fn router() -> Router {
    router_with(Settings::default())
}

/// Returns the routes of [`router`], with settings.
pub fn router_with(settings: Settings) -> Router {
    let instance = Instance(fastrand::u64(..));
    let pages = Router::new()
        .route("/nodes/{id}/pages", get(find).post(join).delete(leave))
        .route("/pages", get(map))
        .route("/writers/{id}", put(write).delete(end_write))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Arc::new(watch::Sender::new(Known::new(settings, instance))));
    coordinator::service::router().merge(pages)
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Joined {
    pub(crate) instance: Instance,
}

/// Query of an owner: the coordinator that it joined earlier.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JoinedBefore {
    #[serde(default)]
    pub(crate) before: Option<Instance>,
}

/// Query: the coordinator of the map in use.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ByInstance {
    pub(crate) instance: Instance,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Writing {
    #[serde(default)]
    pub(crate) going_on: bool,
    #[serde(default)]
    pub(crate) unclean_too: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeaseGranted {
    pub(crate) lease_ms: u64,
}

impl IntoResponse for Conflict {
    fn into_response(self) -> Response {
        (StatusCode::CONFLICT, Json(self)).into_response()
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        match self {
            Self::Conflict(conflict) => conflict.into_response(),
            Self::Refusal(refusal) => refusal.into_response(),
        }
    }
}

async fn join(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    Query(JoinedBefore { before }): Query<JoinedBefore>,
    Json(share): Json<Share>,
) -> Result<(StatusCode, Json<Joined>), Rejection> {
    share
        .pages()
        .map_err(|error| Rejection::Refusal((StatusCode::BAD_REQUEST, error.to_string())))?;
    let status = change(&pages, |known| known.join(id, share, before))?;
    let instance = pages.borrow().instance();
    Ok((status, Json(Joined { instance })))
}

async fn leave(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    Query(ByInstance { instance }): Query<ByInstance>,
) -> Result<StatusCode, Conflict> {
    change(&pages, |known| known.leave(&id, instance)).map(|_| StatusCode::NO_CONTENT)
}

async fn write(
    State(pages): State<Pages>,
    Path(id): Path<WriterId>,
    Query(ByInstance { instance }): Query<ByInstance>,
    Query(Writing { going_on, unclean_too }): Query<Writing>,
) -> Result<Json<LeaseGranted>, Conflict> {
    let begin = |known: &mut Known| {
        let now = Instant::now();
        if going_on {
            known.renew(now, id, instance)
        } else {
            known.write(now, id, instance, unclean_too)
        }
    };
    let lease = change(&pages, begin)?;
    Ok(Json(LeaseGranted { lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX) }))
}

async fn end_write(
    State(pages): State<Pages>,
    Path(id): Path<WriterId>,
    Query(ByInstance { instance }): Query<ByInstance>,
) -> Result<StatusCode, Conflict> {
    change(&pages, |known| known.end_write(Instant::now(), id, instance))
        .map(|()| StatusCode::NO_CONTENT)
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
) -> Result<Json<Share>, Rejection> {
    let found =
        poll_until(&pages, wait, |known| known.map(Instant::now()).shares.get(&id).cloned()).await;
    found.map(Json).ok_or_else(|| {
        Rejection::Refusal((StatusCode::NOT_FOUND, format!("node {id} lends no pages")))
    })
}

async fn map(
    State(pages): State<Pages>,
    Query(wanted): Query<Wanted>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<Map>, Rejection> {
    let taken = poll_until(&pages, wait, |known| {
        let map = known.map(Instant::now());
        let taken = map.has(wanted).then(|| map.clone())?;
        known.seal();
        Some(taken)
    });
    if let Some(taken) = taken.await {
        return Ok(Json(taken));
    }
    let asked = (wanted.copies.max(1), wanted.pages.max(1));
    let there = poll_until(&pages, 0, |known| Some(known.map(Instant::now()).pages(asked.0)))
        .await
        .unwrap_or(0);
    let missing =
        format!("wanted {1} pages with {0} copies each, available {there}", asked.0, asked.1);
    Err(Rejection::Refusal((StatusCode::NOT_FOUND, missing)))
}

/// Changes the state and notifies waiters, unless the change fails.
fn change<T, E>(pages: &Pages, change: impl FnOnce(&mut Known) -> Result<T, E>) -> Result<T, E> {
    let mut done = None;
    pages.send_if_modified(|known| done.insert(change(known)).is_ok());
    done.unwrap_or_else(|| unreachable!("`send_if_modified` calls what it is given"))
}

/// Returns the first result of `found`, now or after a change within `wait` seconds.
async fn poll_until<T>(
    pages: &Pages,
    wait: u64,
    mut found: impl FnMut(&mut Known) -> Option<T>,
) -> Option<T> {
    // Subscribed before the first check, so that no change is missed.
    let mut changes = pages.subscribe();
    let polling = async {
        loop {
            let mut seen = None;
            // Sealing the map or expiring a lease concerns no waiter.
            pages.send_if_modified(|known| {
                seen = found(known);
                false
            });
            // `pages` keeps the sender alive.
            if seen.is_some() || changes.changed().await.is_err() {
                return seen;
            }
        }
    };
    timeout(Duration::from_secs(wait).min(MAX_WAIT), polling).await.ok().flatten()
}
