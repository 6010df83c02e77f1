//! Protection domain: what belongs together may be used together.

use std::fmt;
use std::sync::Arc;

use super::{AddressHandle, Device};
use crate::dispatch::Pd;
use crate::error::VerbError;
use crate::types::AddressVector;
use rdma_provider::contract::Context as _;

/// Protection domain, `ibv_alloc_pd(3)`; clones share it.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    raw: Pd,
    device: Device,
}

impl ProtectionDomain {
    pub(super) fn new(device: &Device) -> Result<Self, VerbError> {
        let raw = device.context().create_pd()?;
        Ok(Self { inner: Arc::new(Inner { raw, device: device.clone() }) })
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// A route to a peer for datagrams and dynamic connections, `ibv_create_ah(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn address_handle(&self, address: &AddressVector) -> Result<AddressHandle, VerbError> {
        AddressHandle::new(self, address)
    }

    pub(crate) fn raw(&self) -> &Pd {
        &self.inner.raw
    }

    /// True if both are the same protection domain.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Number that tells protection domains apart while they live.
    pub(crate) fn id(&self) -> PdId {
        PdId(Arc::as_ptr(&self.inner).addr())
    }
}

/// Tells protection domains apart while they live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PdId(usize);

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.device().name())
            .finish_non_exhaustive()
    }
}
