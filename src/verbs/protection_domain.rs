use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use rdma_provider::locks::RwLock;

use super::{AddressHandle, Device};
use crate::dispatch::Pd;
use crate::error::VerbError;
use crate::types::AddressVector;
use rdma_provider::contract::Context as _;

/// A protection domain, `ibv_alloc_pd(3)`. Clones refer to the same domain.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    raw: Pd,
    device: Device,
    index: RwLock<BTreeMap<usize, Indexed>>,
}

pub(crate) struct Indexed {
    pub(crate) end: usize,
    pub(crate) memory: Weak<dyn Any + Send + Sync>,
}

impl ProtectionDomain {
    pub(super) fn new(device: &Device) -> Result<Self, VerbError> {
        let raw = device.context().create_pd()?;
        let (device, index) = (device.clone(), RwLock::default());
        Ok(Self { inner: Arc::new(Inner { raw, device, index }) })
    }

    /// Returns its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Creates an address handle for datagrams and dynamic connections, `ibv_create_ah(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn address_handle(&self, address: &AddressVector) -> Result<AddressHandle, VerbError> {
        AddressHandle::new(self, address)
    }

    pub(crate) fn raw(&self) -> &Pd {
        &self.inner.raw
    }

    pub(crate) fn index(&self) -> &RwLock<BTreeMap<usize, Indexed>> {
        &self.inner.index
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the number of references. When it has fallen, the objects that held the dropped ones
    /// are released.
    pub(crate) fn references(&self) -> usize {
        let count = Arc::strong_count(&self.inner);
        fence(Ordering::Acquire);
        count
    }

    pub(crate) fn id(&self) -> PdId {
        PdId(NonNull::from(&*self.inner).addr())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PdId(NonZero<usize>);

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.device().name())
            .finish_non_exhaustive()
    }
}
