//! Vendor numbers of the devices that the kernel implements in software.

/// SoftRoCE (rdma_rxe).
pub(crate) const SOFT_ROCE: u32 = 0xff_ffff;

/// iWARP over TCP sockets (siw).
pub(crate) const SIW: u32 = 0x62_6d74;
