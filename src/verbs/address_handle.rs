use std::fmt;
use std::sync::Arc;

use super::ProtectionDomain;
use crate::dispatch::Ah;
use crate::error::VerbError;
use crate::types::{AddressVector, DcKey, DctTarget, Qkey, Qpn, UdTarget};
use rdma_provider::contract::{Ah as _, Pd as _};

/// A route to a peer, `ibv_create_ah(3)`. Clones refer to the same handle.
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<Inner>,
}

struct Inner {
    raw: Ah,
    address: AddressVector,
    pd: ProtectionDomain,
}

impl AddressHandle {
    pub(super) fn new(pd: &ProtectionDomain, address: &AddressVector) -> Result<Self, VerbError> {
        let raw = pd.raw().create_ah(address)?;
        Ok(Self { inner: Arc::new(Inner { raw, address: *address, pd: pd.clone() }) })
    }

    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> &AddressVector {
        &self.inner.address
    }

    /// Returns its protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Returns queue pair `qpn` at this address, to send datagrams to.
    #[must_use]
    pub fn target(&self, qpn: Qpn, qkey: Qkey) -> UdTarget<'_> {
        UdTarget { address: &self.inner.address, handle: self.inner.raw.handle(), qpn, qkey }
    }

    /// Returns DC target `number` at this address.
    #[must_use]
    pub fn dct(&self, number: Qpn, key: DcKey) -> DctTarget<'_> {
        let (address, handle) = (&self.inner.address, self.inner.raw.handle());
        DctTarget { address, handle, number, key }
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddressHandle").field(&self.inner.address).finish()
    }
}
