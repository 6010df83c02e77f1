//! Errors of opening a device of a network.

use std::fmt;

use rdma_provider::VerbError;

/// Error of [`Network::open`](crate::Network::open).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenError {
    /// No device has this name.
    NotFound {
        /// Name asked for.
        name: String,
        /// Names of the devices that exist.
        available: Vec<String>,
        /// Why no other device exists, if that is known.
        reason: Option<&'static str>,
    },
    /// A verb failed while the device was opened.
    Verb {
        /// Name of the device.
        device: String,
        /// Verb and reason.
        error: VerbError,
    },
}

impl OpenError {
    /// Names the device in the error of a verb.
    pub(crate) fn of(device: &str) -> impl Fn(VerbError) -> Self {
        move |error| Self::Verb { device: device.to_owned(), error }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { name, available, reason } => {
                write!(f, "no RDMA device is called {name:?}; there is {}", available.join(", "))?;
                reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))
            }
            Self::Verb { device, error } => write!(f, "opening device {device:?}: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}
