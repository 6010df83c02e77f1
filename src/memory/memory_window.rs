//! Memory windows: access to a part of a registration that work requests turn on and off.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::registration::Registration;
use crate::dispatch::Mw;
use crate::error::{LimitError, SetupError, VerbError};
use crate::memory::ExposedRegion;
use crate::types::{Access, Rkey, WindowBind};
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::{Mw as _, Pd as _};

/// Bare memory window of type 2, `ibv_alloc_mw(3)`.
///
/// A [`BindWindow`](crate::types::SendOp::BindWindow) that is posted to a queue pair opens it to the peer of this queue
/// pair, a [`LocalInvalidate`](crate::types::SendOp::LocalInvalidate) closes it, and so does the peer's
/// [`SendWithInvalidate`](crate::types::SendOp::SendWithInvalidate). Dropping it ends the access whatever state the queue
/// pair is in, and only then lets go of the regions it was [prepared](Self::prepare) for.
///
/// Most programs rather use a [`Lease`](crate::op::Lease).
///
/// ```
/// use tokio_rdma::memory::MemoryWindow;
/// use tokio_rdma::types::{Data, SendFlags, SendOp, SendWr, WrId};
/// use tokio_rdma::{Access, ExposedRegion};
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let region = ExposedRegion::new(&pd, vec![0; 4096], Access::MW_BIND)?;
/// let window = MemoryWindow::new(&pd)?;
/// let bind = window.prepare(&region, 0..64, Access::REMOTE_WRITE)?;
/// // Once this work request has completed, the peer reaches 64 bytes at `bind.addr` by `bind.rkey`.
/// let work_request = SendWr {
///     wr_id: WrId(1),
///     op: SendOp::BindWindow,
///     flags: SendFlags::SIGNALED,
///     data: Data::Window(&bind),
///     target: None,
/// };
/// # let _ = work_request;
/// assert_eq!((bind.len, bind.rkey), (64, window.rkey()));
/// # Ok(())
/// # }
/// ```
pub struct MemoryWindow {
    state: Mutex<State>,
    pd: ProtectionDomain,
}

struct State {
    /// `None` once deallocated: before the regions, which no device touches through the window then.
    raw: Option<Mw>,
    current: Rkey,
    regions: Vec<Arc<Registration>>,
}

impl State {
    fn free(&mut self) {
        let Some(mut raw) = self.raw.take() else { return };
        if let Err(error) = raw.deallocate() {
            tracing::error!(%error, rkey = %self.current, "a window does not end, its regions are kept for ever");
            std::mem::forget((raw, std::mem::take(&mut self.regions)));
            return;
        }
        // Gone before the regions, also where only the drop ends it.
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
    /// A window that is not bound.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the device has none (`max_mw` is 0), [`SetupError::Verb`] if the provider refuses.
    pub fn new(pd: &ProtectionDomain) -> Result<Self, SetupError> {
        LimitError::check("memory windows", 1, pd.device().attr().max_mw.into())?;
        Ok(Self::allocate(pd)?)
    }

    pub(crate) fn allocate(pd: &ProtectionDomain) -> Result<Self, VerbError> {
        let raw = pd.raw().create_mw()?;
        let state = State { current: raw.rkey(), raw: Some(raw), regions: Vec::new() };
        Ok(Self { state: Mutex::new(state), pd: pd.clone() })
    }

    /// Its key: as allocated, or as prepared last.
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        self.state.lock().current
    }

    /// What to post to bind it to `range` of `region`, under its next key, for `access`. The region stays registered
    /// until the window is dropped.
    ///
    /// Whether the region allows it (it needs [`Access::MW_BIND`]), and whether the window is free, the device finds out.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the range is not within the region, [`SetupError::Foreign`] if that is of another
    /// protection domain.
    pub fn prepare(
        &self,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<WindowBind, SetupError> {
        region.check(&range)?;
        if !region.registration().pd().same(&self.pd) {
            return Err(SetupError::Foreign { what: "exposed region" });
        }
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
            // 0 names no window: the device refuses it.
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

    /// It is not bound: lets go of the regions.
    pub(crate) fn unbound(&self) {
        self.state.lock().regions.clear();
    }

    /// Ends the access and the window.
    pub(crate) fn free(&self) {
        self.state.lock().free();
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow").field("rkey", &self.rkey()).finish_non_exhaustive()
    }
}
