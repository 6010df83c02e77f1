//! Memory that peers may read and nobody writes.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

use super::ProtectionDomain;
use super::registration::Registration;
use crate::error::SetupError;
use crate::mem::{RemoteRegion, Storage};
use crate::types::Access;

/// Bytes that peers may read where they are, without a copy.
///
/// Neither a device nor a peer may write them, so that other clones of the [`Bytes`] can be read at the same time. Dropping
/// it revokes the access first and lets go of the bytes after; what peers read from then on fails at their side.
pub(crate) struct ReadOnlyRegion {
    registration: Registration,
}

/// The bytes as memory to be registered.
struct Shared(Bytes);

// SAFETY: S1: the bytes stay where they are and unchanged while the value lives, and the value holds a share of them. That
// others do too is why they are registered for nothing but reading.
unsafe impl Storage for Shared {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&self.0[..]).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl ReadOnlyRegion {
    /// Lets peers read `bytes`.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if they are longer than a registration can be, or the provider refuses.
    pub(crate) fn new(pd: &ProtectionDomain, bytes: Bytes) -> Result<Self, SetupError> {
        Ok(Self { registration: Registration::new(pd, Shared(bytes), Access::REMOTE_READ, true)? })
    }

    /// Address and key, to hand to a peer.
    pub(crate) fn grant(&self) -> RemoteRegion {
        let base = self.registration.base().addr().get() as u64;
        RemoteRegion::new(base, self.len(), self.registration.rkey())
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.registration.len() as u64
    }
}

impl fmt::Debug for ReadOnlyRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadOnlyRegion").field("len", &self.len()).finish_non_exhaustive()
    }
}
