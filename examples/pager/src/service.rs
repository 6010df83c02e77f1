//! The coordinator: the service of `examples/coordinator` with the map of pages beside its nodes.
//!
//! Its map names nodes only that have all that was ever written: who was not written to is taken off, and when a client has the
//! map, nobody joins. So whoever reads a page from any node of the map reads what was written last, as long as each client that
//! writes has come to an end of it. Of one that has not the map says so.
//!
//! It remembers nothing when it is started anew. So each start has a number, and what was on the map of another one, or was
//! written by that map, is refused.

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

use crate::known::{Known, No, Settings};
use crate::{Conflict, Instance, Map, Share, Wanted, WriterId};

type Pages = Arc<watch::Sender<Known>>;

/// The routes of `coordinator::service`, and:
///
/// - `POST /nodes/{id}/pages`: lends a [`Share`]; with `before=INSTANCE` one that was lent then. The answer has the
///   [`Instance`] of this coordinator.
/// - `GET /nodes/{id}/pages`: that share.
/// - `DELETE /nodes/{id}/pages?instance=INSTANCE`: takes a node off the map that leaves, or that was not written to.
/// - `GET /pages?pages=N&copies=K`: the [`Map`], when it has what is [wanted](Wanted).
/// - `PUT /writers/{id}?instance=INSTANCE`: a client begins to write; with `going_on=true` it goes on, with `unclean_too=true`
///   it knows that copies may differ. The answer has the lease, as `lease_ms`.
/// - `DELETE /writers/{id}?instance=INSTANCE`: it has written all.
///
/// With `wait=SECONDS` (30 at most) GET waits, and else answers 404 for what is not there. 409 comes with a [`Conflict`].
pub fn router() -> Router {
    router_with(Settings::default())
}

/// As [`router`], with settings.
pub fn router_with(settings: Settings) -> Router {
    let instance = Instance(fastrand::u64(..));
    let pages = Router::new()
        .route("/nodes/{id}/pages", get(find).post(join).delete(leave))
        .route("/pages", get(map))
        .route("/writers/{id}", put(write).delete(give_back))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Arc::new(watch::Sender::new(Known::new(settings, instance))));
    coordinator::service::router().merge(pages)
}

/// What an owner is told when it has joined.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Joined {
    pub(crate) instance: Instance,
}

/// What an owner says of memory that was lent before.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Before {
    #[serde(default)]
    pub(crate) before: Option<Instance>,
}

/// By which map somebody acts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Of {
    pub(crate) instance: Instance,
}

/// What a client says that writes.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Writing {
    #[serde(default)]
    pub(crate) going_on: bool,
    #[serde(default)]
    pub(crate) unclean_too: bool,
}

/// For how long a client may write of which nothing is heard.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Lent {
    pub(crate) lease_ms: u64,
}

impl IntoResponse for Conflict {
    fn into_response(self) -> Response {
        (StatusCode::CONFLICT, Json(self)).into_response()
    }
}

impl IntoResponse for No {
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
    Query(Before { before }): Query<Before>,
    Json(share): Json<Share>,
) -> Result<(StatusCode, Json<Joined>), No> {
    share.pages().map_err(|error| No::Refusal((StatusCode::BAD_REQUEST, error.to_string())))?;
    let status = change(&pages, |known| known.join(id, share, before))?;
    let instance = pages.borrow().instance();
    Ok((status, Json(Joined { instance })))
}

async fn leave(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    Query(Of { instance }): Query<Of>,
) -> Result<StatusCode, Conflict> {
    change(&pages, |known| known.leave(&id, instance)).map(|_| StatusCode::NO_CONTENT)
}

async fn write(
    State(pages): State<Pages>,
    Path(id): Path<WriterId>,
    Query(Of { instance }): Query<Of>,
    Query(Writing { going_on, unclean_too }): Query<Writing>,
) -> Result<Json<Lent>, Conflict> {
    let begin = |known: &mut Known| {
        let now = Instant::now();
        if going_on {
            known.go_on(now, id, instance)
        } else {
            known.write(now, id, instance, unclean_too)
        }
    };
    let lease = change(&pages, begin)?;
    Ok(Json(Lent { lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX) }))
}

async fn give_back(
    State(pages): State<Pages>,
    Path(id): Path<WriterId>,
    Query(Of { instance }): Query<Of>,
) -> Result<StatusCode, Conflict> {
    change(&pages, |known| known.give_back(Instant::now(), id, instance))
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
) -> Result<Json<Share>, No> {
    let found =
        look(&pages, wait, |known| known.map(Instant::now()).shares.get(&id).cloned()).await;
    found
        .map(Json)
        .ok_or_else(|| No::Refusal((StatusCode::NOT_FOUND, format!("no node {id} lends pages"))))
}

async fn map(
    State(pages): State<Pages>,
    Query(wanted): Query<Wanted>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<Map>, No> {
    let taken = look(&pages, wait, |known| {
        let map = known.map(Instant::now());
        let taken = map.has(wanted).then(|| map.clone())?;
        known.seal();
        Some(taken)
    });
    if let Some(taken) = taken.await {
        return Ok(Json(taken));
    }
    let asked = (wanted.copies.max(1), wanted.pages.max(1));
    let there =
        look(&pages, 0, |known| Some(known.map(Instant::now()).pages(asked.0))).await.unwrap_or(0);
    let missing =
        format!("{} copies of {} pages or more are wanted, there are {there}", asked.0, asked.1);
    Err(No::Refusal((StatusCode::NOT_FOUND, missing)))
}

/// Changes what is known, and has those look who wait, unless it fails.
fn change<T, E>(pages: &Pages, change: impl FnOnce(&mut Known) -> Result<T, E>) -> Result<T, E> {
    let mut done = None;
    pages.send_if_modified(|known| done.insert(change(known)).is_ok());
    done.unwrap_or_else(|| unreachable!("`send_if_modified` calls what it is given"))
}

/// What `found` finds, now or after one of the changes of the next `wait` seconds.
async fn look<T>(
    pages: &Pages,
    wait: u64,
    mut found: impl FnMut(&mut Known) -> Option<T>,
) -> Option<T> {
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
