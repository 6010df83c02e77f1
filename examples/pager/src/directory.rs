//! How the coordinator is asked.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, StatusCode};

use crate::{Map, Share, ShareError, Wanted};

/// Longest that a request takes besides what it is to wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// The coordinator, as owners and clients see it; clones share its connections.
#[derive(Debug, Clone)]
pub struct Directory {
    url: String,
    http: reqwest::Client,
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
        Self { url: url.trim_end_matches('/').to_owned(), http: reqwest::Client::new() }
    }

    /// Lends pages.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 409 if a client has the map already.
    pub async fn join(&self, node: &str, share: &Share) -> Result<(), DirectoryError> {
        let request = self.request(Method::POST, &format!("nodes/{node}/pages"), Duration::ZERO).json(share);
        self.send(request).await.map(drop)
    }

    /// Takes a node off the map. One that is not there is no error.
    ///
    /// # Errors
    ///
    /// If the coordinator is not there.
    pub async fn leave(&self, node: &str) -> Result<(), DirectoryError> {
        self.send(self.request(Method::DELETE, &format!("nodes/{node}/pages"), Duration::ZERO)).await.map(drop)
    }

    /// The pages that a node lends, waiting for it for up to 30 seconds.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Refused`] with 404 if it does not come.
    pub async fn find(&self, node: &str, wait: Duration) -> Result<Share, DirectoryError> {
        let share = self.json(self.request(Method::GET, &format!("nodes/{node}/pages"), wait)).await?;
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
        share.pages().map(drop).map_err(|error| DirectoryError::Share { node: node.to_owned(), error })
    }

    fn request(&self, method: Method, path: &str, wait: Duration) -> RequestBuilder {
        let request = self.http.request(method, format!("{}/{path}", self.url)).timeout(wait + PATIENCE);
        request.query(&[("wait", wait.as_secs())])
    }

    async fn json<T: serde::de::DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, DirectoryError> {
        self.send(request).await?.json().await.map_err(|error| self.failed(&error))
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, DirectoryError> {
        let answer = request.send().await.map_err(|error| self.failed(&error))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let reason = answer.text().await.map_err(|error| self.failed(&error))?;
        Err(DirectoryError::Refused { status, reason })
    }

    fn failed(&self, error: &reqwest::Error) -> DirectoryError {
        // The error itself says as much as "error sending request".
        let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
        let reason = causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"));
        DirectoryError::Http { url: self.url.clone(), reason }
    }
}
