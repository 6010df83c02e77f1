//! Why a device of a network cannot be opened.

use std::fmt;

use rdma_provider::VerbError;

/// Why [`Network::open`](crate::Network::open) failed.
#[derive(Debug, Clone, PartialEq, Eq)]

pub enum OpenError {
    /// No device has this name.
    NotFound {
        /// Name asked for.
        name: String,
        /// Names there are.
        available: Vec<String>,
        /// Why there are no others, if that is known.
        reason: Option<&'static str>,
    },
    /// A verb of opening the device failed.
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
