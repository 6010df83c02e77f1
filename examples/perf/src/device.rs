//! Which device.

use std::net::IpAddr;

use tokio_rdma::{CompletionMode, CompletionQueue, Device, SetupError};

use crate::Result;
use crate::case::{Case, Mode};

/// Whom a software device reaches.
#[derive(Debug)]
pub(crate) enum Reach {
    /// Other devices of this process.
    Process,
    /// Other processes and hosts, from this address.
    From(IpAddr),
    /// The same, from an address that leads to this one.
    To(IpAddr),
}

/// The real device that there is, or is named, or a software device.
pub(crate) fn open(reach: &Reach) -> Result<Device> {
    Ok(match *reach {
        Reach::Process => Device::open_default()?,
        Reach::From(address) => Device::open_default_at(address)?,
        Reach::To(peer) => Device::open_default_to(peer)?,
    })
}

/// Its name, with what it is.
pub(crate) fn describe(device: &Device) -> String {
    // Only the software device has no vendor.
    if device.attr().vendor_id == 0 {
        format!("software device {}", device.name())
    } else {
        device.name().to_owned()
    }
}

/// The peer to choose a GID for: another host.
pub(crate) fn peer_of(address: IpAddr) -> Option<IpAddr> {
    (!address.is_loopback()).then_some(address)
}

/// Completion queues of a case, each with room for the lanes that use it.
pub(crate) fn queues(device: &Device, case: &Case) -> Result<Vec<CompletionQueue>> {
    let lanes = case.lanes.div_ceil(case.queues);
    let capacity = u32::try_from(lanes * crate::queue_pair::completions(case))?;
    let queue = || {
        let mode = match case.mode {
            Mode::Event => CompletionMode::Event,
            Mode::BusyPoll => CompletionMode::busy_poll()
                .map_err(|error| format!("no thread to poll: {error}"))?,
            Mode::Cooperative => CompletionMode::Cooperative,
            Mode::Hybrid => CompletionMode::Hybrid,
        };
        let made: std::result::Result<_, SetupError> =
            CompletionQueue::builder(device).capacity(capacity).mode(mode).build();
        Ok(made?)
    };
    (0..case.queues.min(case.lanes)).map(|_| queue()).collect()
}
