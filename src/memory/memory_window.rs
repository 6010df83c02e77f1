#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rdma_provider::locks::Mutex;

use super::registration::Registration;
use crate::dispatch::Mw;
use crate::error::{LimitError, SetupError, VerbError};
use crate::memory::ExposedRegion;
use crate::types::{Access, Rkey, WindowBind};
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::{Mw as _, Pd as _};

/// A type 2 memory window, `ibv_alloc_mw(3)`. Most programs use a [`Lease`](crate::op::Lease)
/// instead.
///
/// A posted [`BindWindow`](crate::types::SendOp::BindWindow) opens the window to the queue pair's
/// peer. [`LocalInvalidate`](crate::types::SendOp::LocalInvalidate), or the peer's
/// [`SendWithInvalidate`](crate::types::SendOp::SendWithInvalidate), closes it. Dropping the window
/// revokes the access, then releases the regions it was [prepared](Self::prepare) for.
///
/// ```
/// use tokio_rdma::memory::MemoryWindow;
/// use tokio_rdma::types::{Data, SendFlags, SendOp, SendWr, WrId};
/// use tokio_rdma::{Access, ExposedRegion, SetupError};
/// # use tokio_rdma::ProtectionDomain;
///
/// # fn example(pd: &ProtectionDomain) -> Result<(), SetupError> {
/// let region = ExposedRegion::new(pd, vec![0; 4096], Access::MW_BIND)?;
/// let window = MemoryWindow::new(pd)?;
/// let bind = window.prepare(&region, 0..64, Access::REMOTE_WRITE)?;
/// // After the completion, the peer accesses 64 bytes at `bind.addr` by `bind.rkey`.
/// let work_request = SendWr {
///     wr_id: WrId(1),
///     op: SendOp::BindWindow,
///     flags: SendFlags::SIGNALED,
///     data: Data::Window(&bind),
///     target: None,
/// };
/// # Ok(())
/// # }
/// ```
pub struct MemoryWindow {
    state: Mutex<State>,
    pd: ProtectionDomain,
}

struct State {
    /// Deallocated before `regions` are released.
    raw: Option<Mw>,
    current: Rkey,
    regions: Vec<Arc<Registration>>,
}

impl State {
    fn free(&mut self) {
        let Some(mut raw) = self.raw.take() else { return };
        if let Err(error) = raw.deallocate() {
            rdma_provider::error!(
                %error,
                rkey = %self.current,
                "failed to deallocate memory window; leaking it and its regions"
            );
            std::mem::forget((raw, std::mem::take(&mut self.regions)));
            return;
        }
        // Dropping `raw` may free the window, so it precedes the release of the regions.
        drop(raw);
        self.regions.clear();
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.free();
    }
}

impl MemoryWindow {
    /// Allocates an unbound window.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the device supports no windows (`max_mw` is 0).
    pub fn new(pd: &ProtectionDomain) -> Result<Self, SetupError> {
        LimitError::check(
            "memory windows (max_mw of the device)",
            1,
            pd.device().attr().max_mw.into(),
        )?;
        Ok(Self::allocate(pd)?)
    }

    pub(crate) fn allocate(pd: &ProtectionDomain) -> Result<Self, VerbError> {
        let raw = pd.raw().create_mw()?;
        let state = State { current: raw.rkey(), raw: Some(raw), regions: Vec::new() };
        Ok(Self { state: Mutex::new(state), pd: pd.clone() })
    }

    /// Returns the current key: of the allocation or of the last [`prepare`](Self::prepare).
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        self.state.lock().current
    }

    /// Returns the data of a work request that binds the window to `range` of `region` under its
    /// next key. The region stays registered until the window is dropped. It must allow binding
    /// ([`Access::MW_BIND`]), and the window must be unbound.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the range is not within the region, [`SetupError::Foreign`] if the
    /// region belongs to another protection domain.
    pub fn prepare(
        &self,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<WindowBind, SetupError> {
        region.registration().check_range(&range)?;
        SetupError::check_same(region.registration().pd().same(&self.pd), "exposed region")?;
        Ok(self.bind(region.registration(), range, access))
    }

    pub(crate) fn bind(
        &self,
        region: &Arc<Registration>,
        range: Range<usize>,
        access: Access,
    ) -> WindowBind {
        let mut state = self.state.lock();
        let current = state.current;
        state.current = current.next();
        state.regions.push(region.clone());
        WindowBind {
            // Number 0 is no window: the device refuses it.
            window: state.raw.as_ref().map_or(0, |raw| raw.handle()),
            region: region.handle(),
            current,
            rkey: state.current,
            lkey: region.lkey(),
            addr: region.addr() + range.start as u64,
            len: range.len() as u64,
            access,
        }
    }

    pub(crate) fn release_regions(&self) {
        self.state.lock().regions.clear();
    }

    pub(crate) fn free(&self) {
        self.state.lock().free();
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow").field("rkey", &self.rkey()).finish_non_exhaustive()
    }
}
