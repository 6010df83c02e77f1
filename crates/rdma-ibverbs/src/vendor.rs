//! The devices that the kernel implements in software.

use rdma_provider::types::{DeviceAttr, Lkey, Sge};

/// SoftRoCE (rdma_rxe).
pub(crate) const SOFT_ROCE: u32 = 0xff_ffff;

/// iWARP over TCP sockets (siw).
pub(crate) const SIW: u32 = 0x62_6d74;

/// Returns the elements of a receive without any: none, except that libsiw refuses such a receive
/// and needs an element of no bytes.
pub(crate) fn empty_receive(device: &DeviceAttr) -> &'static [Sge] {
    const EMPTY: [Sge; 1] = [Sge { addr: 0, length: 0, lkey: Lkey(0) }];
    if device.vendor_id == SIW { &EMPTY } else { &[] }
}
