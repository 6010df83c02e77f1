//! HTTP client of the coordinator.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, StatusCode};

use crate::service::{ByInstance, Joined, JoinedBefore, LeaseGranted, Writing};
use crate::{Conflict, Instance, Map, Share, ShareError, Wanted, WriterId};

/// Default of [`Directory::patience`].
const PATIENCE: Duration = Duration::from_secs(5);

/// A client of the coordinator for owners and clients. Clones share its connections.
#[derive(Debug, Clone)]
pub struct Directory {
    url: String,
    http: reqwest::Client,
    patience: Duration,
}

/// The error of a request to the coordinator.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The coordinator is unreachable or its response is invalid.
    #[error("request to coordinator {url} failed: {reason}")]
    Http {
        /// URL of the coordinator.
        url: String,
        /// The error with all its causes.
        reason: String,
    },
    /// The coordinator refused the request.
    #[error("coordinator refused the request: {reason} ({status})")]
    Refused {
        /// HTTP status.
        status: StatusCode,
        /// Text of the response.
        reason: String,
    },
    /// The request conflicts with the coordinator's state.
    #[error("coordinator refused the request: {0}")]
    Conflict(Conflict),
    /// The coordinator returned an invalid share.
    #[error("coordinator returned an invalid share of node {node}: {error}")]
    Share {
        /// The node with the share.
        node: String,
        /// Why the share is invalid.
        error: ShareError,
    },
}

impl Directory {
    /// Creates a client of the coordinator at `http://host:port`. Sends nothing yet.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self {
            url: url.trim_end_matches('/').to_owned(),
            http: reqwest::Client::new(),
            patience: PATIENCE,
        }
    }

    /// Sets the maximum duration of a request in addition to the wait that it asks for; 5 s by
    /// default. After a failed removal of a node from the map, the next attempt is made no sooner
    /// than this.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub(crate) fn pause(&self) -> Duration {
        self.patience
    }

    /// Joins a node with its share to the map: a new share, or one that joined coordinator
    /// `before`. Returns the instance of the coordinator.
    pub(crate) async fn join(
        &self,
        node: &str,
        share: &Share,
        before: Option<Instance>,
    ) -> Result<Instance, DirectoryError> {
        let request = self.request(Method::POST, &format!("nodes/{node}/pages"), Duration::ZERO);
        let joined: Joined = self.json(request.query(&JoinedBefore { before }).json(share)).await?;
        Ok(joined.instance)
    }

    /// Removes a node from the map of coordinator `instance`. It is not an error if the node is not
    /// on it.
    ///
    /// # Errors
    ///
    /// If the coordinator is unreachable or another instance.
    pub async fn leave(&self, node: &str, instance: Instance) -> Result<(), DirectoryError> {
        let request = self.request(Method::DELETE, &format!("nodes/{node}/pages"), Duration::ZERO);
        self.send(request.query(&ByInstance { instance })).await.map(drop)
    }

    /// Begins or renews a lease to write. Returns the interval within which it must be renewed.
    pub(crate) async fn write(
        &self,
        id: WriterId,
        instance: Instance,
        how: &Writing,
    ) -> Result<Duration, DirectoryError> {
        let request = self.request(Method::PUT, &format!("writers/{}", id.0), Duration::ZERO);
        let lent: LeaseGranted =
            self.json(request.query(&ByInstance { instance }).query(how)).await?;
        Ok(Duration::from_millis(lent.lease_ms))
    }

    /// Ends a lease to write.
    pub(crate) async fn end_write(
        &self,
        id: WriterId,
        instance: Instance,
    ) -> Result<(), DirectoryError> {
        let request = self.request(Method::DELETE, &format!("writers/{}", id.0), Duration::ZERO);
        self.send(request.query(&ByInstance { instance })).await.map(drop)
    }

    /// Returns the share of a node; waits for it for up to 30 seconds.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 404 if it does not join in time.
    pub async fn find(&self, node: &str, wait: Duration) -> Result<Share, DirectoryError> {
        let share =
            self.json(self.request(Method::GET, &format!("nodes/{node}/pages"), wait)).await?;
        self.check(node, &share)?;
        Ok(share)
    }

    /// Returns the map once it has what is wanted; waits for up to 30 seconds. From then on no node
    /// can join.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 404 if pages or copies are missing.
    pub async fn map(&self, wanted: Wanted, wait: Duration) -> Result<Map, DirectoryError> {
        let map: Map = self.json(self.request(Method::GET, "pages", wait).query(&wanted)).await?;
        for (node, share) in &map.shares {
            self.check(node, share)?;
        }
        Ok(map)
    }

    fn check(&self, node: &str, share: &Share) -> Result<(), DirectoryError> {
        share
            .pages()
            .map(drop)
            .map_err(|error| DirectoryError::Share { node: node.to_owned(), error })
    }

    fn request(&self, method: Method, path: &str, wait: Duration) -> RequestBuilder {
        let request =
            self.http.request(method, format!("{}/{path}", self.url)).timeout(wait + self.patience);
        request.query(&[("wait", wait.as_secs())])
    }

    async fn json<T: serde::de::DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, DirectoryError> {
        self.send(request).await?.json().await.map_err(|error| self.failed(&error))
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, DirectoryError> {
        let answer = request.send().await.map_err(|error| self.failed(&error))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        if status == StatusCode::CONFLICT {
            let conflict = answer.json().await.map_err(|error| self.failed(&error))?;
            return Err(DirectoryError::Conflict(conflict));
        }
        let reason = answer.text().await.map_err(|error| self.failed(&error))?;
        Err(DirectoryError::Refused { status, reason })
    }

    fn failed(&self, error: &reqwest::Error) -> DirectoryError {
        // reqwest's error alone says little more than "error sending request".
        let causes =
            std::iter::successors(std::error::Error::source(error), |cause| cause.source());
        let reason = causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"));
        DirectoryError::Http { url: self.url.clone(), reason }
    }
}
