//! Selection of the device.

use std::net::IpAddr;

use tokio_rdma::{CompletionMode, CompletionQueue, Device, SetupError};

use crate::Result;
use crate::case::{Case, Mode};

/// The peers that a software device has to reach.
#[derive(Debug)]
pub(crate) enum Reach {
    /// Devices of this process.
    Process,
    /// Other processes and hosts, from this address.
    From(IpAddr),
    /// Other processes and hosts, from an address that routes to this peer.
    To(IpAddr),
}

pub(crate) fn open(reach: &Reach) -> Result<Device> {
    Ok(match *reach {
        Reach::Process => Device::open_default_or_software()?,
        Reach::From(address) => Device::open_default_at(address)?,
        Reach::To(peer) => Device::open_default_to(peer)?,
    })
}

pub(crate) fn describe(device: &Device) -> String {
    // Only the software device has no vendor.
    if device.attr().vendor_id == 0 {
        format!("software device {}", device.name())
    } else {
        device.name().to_owned()
    }
}

/// Returns the address to select a GID for; `None` for a peer on this host.
pub(crate) fn peer_of(address: IpAddr) -> Option<IpAddr> {
    (!address.is_loopback()).then_some(address)
}

pub(crate) fn queues(device: &Device, case: &Case) -> Result<Vec<CompletionQueue>> {
    let lanes = case.lanes.div_ceil(case.queues);
    let capacity = u32::try_from(lanes * crate::queue_pair::completions(case))?;
    let queue = || {
        let mode = match case.mode {
            Mode::Event => CompletionMode::Event,
            Mode::BusyPoll => CompletionMode::busy_poll()
                .map_err(|error| format!("failed to start the polling thread: {error}"))?,
            Mode::Cooperative => CompletionMode::Cooperative,
            Mode::Hybrid => CompletionMode::Hybrid,
        };
        let made: std::result::Result<_, SetupError> =
            CompletionQueue::builder(device).capacity(capacity).mode(mode).build();
        Ok(made?)
    };
    (0..case.queues.min(case.lanes)).map(|_| queue()).collect()
}
