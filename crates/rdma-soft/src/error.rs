//! The error of opening a device.

use std::fmt;

use rdma_provider::VerbError;

/// The error of [`Network::open`](crate::Network::open).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenError {
    /// The device does not exist.
    NotFound {
        /// Requested name.
        name: String,
        /// Existing devices.
        available: Vec<String>,
        /// Reason why others do not exist, if known.
        reason: Option<&'static str>,
    },
    /// A verb failed.
    Verb {
        /// Name of the device.
        device: String,
        /// Failed verb and reason.
        error: VerbError,
    },
}

impl OpenError {
    /// Adds the device's name to the error of a verb.
    pub(crate) fn of(device: &str) -> impl Fn(VerbError) -> Self {
        move |error| Self::Verb { device: device.to_owned(), error }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { name, available, reason } => {
                write!(f, "device {name:?} not found")?;
                if let Some(reason) = reason {
                    write!(f, ": {reason}")?;
                }
                let available = if available.is_empty() { "none" } else { &*available.join(", ") };
                write!(f, "; available: {available}")
            }
            Self::Verb { device, error } => write!(f, "failed to open device {device:?}: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}
