//! How the coordinator is asked.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, StatusCode};

use crate::service::{Before, Joined, Lent, Of, Writing};
use crate::{Conflict, Instance, Map, Share, ShareError, Wanted, WriterId};

/// Longest that a request takes besides what it is to wait, unless set.
const PATIENCE: Duration = Duration::from_secs(5);

/// The coordinator, as owners and clients see it; clones share its connections.
#[derive(Debug, Clone)]
pub struct Directory {
    url: String,
    http: reqwest::Client,
    patience: Duration,
}

/// Why the coordinator did not do it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// It is not there, or it is not one.
    #[error("the coordinator at {url}: {reason}")]
    Http {
        /// Where it should be.
        url: String,
        /// What went wrong, with all its causes.
        reason: String,
    },
    /// It said no.
    #[error("the coordinator: {reason} ({status})")]
    Refused {
        /// Of the answer.
        status: StatusCode,
        /// Its words.
        reason: String,
    },
    /// It does not go with what the coordinator knows.
    #[error("the coordinator: {0}")]
    Conflict(Conflict),
    /// It has a share that cannot be.
    #[error("the coordinator says of node {node}: {error}")]
    Share {
        /// Whose.
        node: String,
        /// Why not.
        error: ShareError,
    },
}

impl Directory {
    /// Of the coordinator at `http://host:port`. Nothing is asked yet.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self {
            url: url.trim_end_matches('/').to_owned(),
            http: reqwest::Client::new(),
            patience: PATIENCE,
        }
    }

    /// Longest that an answer takes, besides what a request is to wait; 5 s unless set. For as long after one that has failed
    /// the coordinator is not asked again to take a node off the map.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How long that is.
    pub(crate) fn patient_for(&self) -> Duration {
        self.patience
    }

    /// Lends pages: new ones, or those that were lent `before`. The instance of the coordinator that has them on its map.
    pub(crate) async fn join(
        &self,
        node: &str,
        share: &Share,
        before: Option<Instance>,
    ) -> Result<Instance, DirectoryError> {
        let request = self.request(Method::POST, &format!("nodes/{node}/pages"), Duration::ZERO);
        let joined: Joined = self.json(request.query(&Before { before }).json(share)).await?;
        Ok(joined.instance)
    }

    /// Takes a node off the map of that coordinator. One that is not there is no error.
    ///
    /// # Errors
    ///
    /// If the coordinator is not there, or is another one.
    pub async fn leave(&self, node: &str, instance: Instance) -> Result<(), DirectoryError> {
        let request = self.request(Method::DELETE, &format!("nodes/{node}/pages"), Duration::ZERO);
        self.send(request.query(&Of { instance })).await.map(drop)
    }

    /// Begins to write, or goes on, for as long as the coordinator hears of it at least that often.
    pub(crate) async fn write(
        &self,
        id: WriterId,
        instance: Instance,
        how: &Writing,
    ) -> Result<Duration, DirectoryError> {
        let request = self.request(Method::PUT, &format!("writers/{}", id.0), Duration::ZERO);
        let lent: Lent = self.json(request.query(&Of { instance }).query(how)).await?;
        Ok(Duration::from_millis(lent.lease_ms))
    }

    /// Ends to write.
    pub(crate) async fn give_back(
        &self,
        id: WriterId,
        instance: Instance,
    ) -> Result<(), DirectoryError> {
        let request = self.request(Method::DELETE, &format!("writers/{}", id.0), Duration::ZERO);
        self.send(request.query(&Of { instance })).await.map(drop)
    }

    /// The pages that a node lends, waiting for it for up to 30 seconds.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 404 if it does not come.
    pub async fn find(&self, node: &str, wait: Duration) -> Result<Share, DirectoryError> {
        let share =
            self.json(self.request(Method::GET, &format!("nodes/{node}/pages"), wait)).await?;
        self.check(node, &share)?;
        Ok(share)
    }

    /// The map, waiting for up to 30 seconds until it has what is wanted. From then on no node joins.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 404 if there are not as many pages.
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
        // The error itself says as much as "error sending request".
        let causes =
            std::iter::successors(std::error::Error::source(error), |cause| cause.source());
        let reason = causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"));
        DirectoryError::Http { url: self.url.clone(), reason }
    }
}
