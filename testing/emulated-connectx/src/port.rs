//! Identity of a device and its port: addresses, limits, capabilities.

use crate::abi::{EINVAL, ENODATA, GidEntry, Plain, QueryDevice, QueryPort};
use crate::control::Link;

/// GID types in `struct ib_uverbs_gid_entry`.
const INFINIBAND: u32 = 0;
const ROCE_V1: u32 = 1;
const ROCE_V2: u32 = 2;

pub(crate) const MAX_SEND_WQEBB: u32 = 32768;
pub(crate) const MAX_RECV_WR: u32 = 32768;
pub(crate) const MAX_SRQ_WR: u32 = 32767;
/// 1 GiB.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;
/// Maximum datagram, with a path MTU of 4096.
pub(crate) const MAX_DATAGRAM: u64 = 4096;
pub(crate) const COMPLETION_VECTORS: u32 = 4;
/// `MLX5_IB_CQE_RES_FORMAT_HASH`: the only format of receives in compressed sessions.
pub(crate) const COMPRESSED_HASH: u32 = 1;
/// Entries of the GID table; most are empty.
pub(crate) const GID_ENTRIES: u32 = 256;
/// Firmware version, which no real device has.
pub(crate) const FIRMWARE: [u32; 3] = [99, 44, 0];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) device: usize,
    pub(crate) link: Link,
    pub(crate) up: bool,
}

impl Port {
    pub(crate) fn name(self) -> String {
        format!("mlx5_{}", self.device)
    }

    /// Returns the GUID: Mellanox's prefix and a recognisable number.
    pub(crate) fn guid(self) -> u64 {
        0x0002_c903_00e0_e000 + self.device as u64
    }

    pub(crate) fn lid(self) -> u16 {
        match self.link {
            Link::InfiniBand => self.device as u16 + 1,
            Link::Roce => 0,
        }
    }

    pub(crate) fn mac(self) -> [u8; 6] {
        [2, 0, 0, 0xe0, 0xe0, self.device as u8 + 1]
    }

    pub(crate) fn gids(self) -> Vec<([u8; 16], u32)> {
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[8..].copy_from_slice(&self.guid().to_be_bytes());
        match self.link {
            Link::InfiniBand => {
                // A second GID with a subnet prefix, as an alias GUID has it.
                let mut alias = local;
                alias[..8].copy_from_slice(&[0xfe, 0xc0, 0, 0, 0, 0, 0, 0x44]);
                alias[8] |= 0x02;
                vec![(local, INFINIBAND), (alias, INFINIBAND)]
            }
            Link::Roce => {
                // Addresses reserved for documentation: 192.0.2.0/24 and 2001:db8::/32.
                let host = self.device as u8 + 1;
                let mut v4 = [0; 16];
                v4[10..].copy_from_slice(&[0xff, 0xff, 192, 0, 2, host]);
                let mut v6 = [0; 16];
                v6[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
                v6[15] = host;
                [local, v4, v6]
                    .into_iter()
                    .flat_map(|gid| [(gid, ROCE_V1), (gid, ROCE_V2)])
                    .collect()
            }
        }
    }

    pub(crate) fn gid_entry(self, index: usize) -> Option<GidEntry> {
        let (gid, kind) = *self.gids().get(index)?;
        Some(GidEntry { gid, index: index as u32, port: 1, kind, interface: 0 })
    }

    pub(crate) fn check_gid(self, index: u8) -> Result<(), i32> {
        match usize::from(index) {
            index if index < self.gids().len() => Ok(()),
            index if index < GID_ENTRIES as usize => Err(ENODATA),
            _ => Err(EINVAL),
        }
    }

    pub(crate) fn attributes(self) -> QueryPort {
        const ACTIVE: u8 = 4;
        const DOWN: u8 = 1;
        const MTU_4096: u8 = 5;
        const LINK_UP: u8 = 5;
        const POLLING: u8 = 2;
        const GRH_REQUIRED: u8 = 1;
        let infiniband = self.link == Link::InfiniBand;
        QueryPort {
            port_cap_flags: 1 << 26 | 1 << 16 | 1 << 11,
            max_msg_sz: MAX_MESSAGE as u32,
            gid_tbl_len: GID_ENTRIES,
            pkey_tbl_len: 1,
            lid: self.lid(),
            sm_lid: u16::from(infiniband),
            state: if self.up { ACTIVE } else { DOWN },
            max_mtu: MTU_4096,
            active_mtu: MTU_4096,
            max_vl_num: 4,
            active_width: 2,
            active_speed: 64,
            phys_state: if self.up { LINK_UP } else { POLLING },
            link_layer: if infiniband { 1 } else { 2 },
            flags: if infiniband { 0 } else { GRH_REQUIRED },
            ..QueryPort::zeroed()
        }
    }

    /// Returns the device attributes. Unsupported features (multicast, on-demand paging) are 0.
    pub(crate) fn device_attributes(self) -> QueryDevice {
        const PORT_ACTIVE_EVENT: u32 = 1 << 10;
        const SYS_IMAGE_GUID: u32 = 1 << 11;
        const RC_RNR_NAK_GEN: u32 = 1 << 12;
        const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
        const MEM_WINDOW_TYPE_2B: u32 = 1 << 24;
        const ATOMICS_OF_THE_DEVICE: u32 = 1;
        let [major, minor, patch] = FIRMWARE.map(u64::from);
        QueryDevice {
            fw_ver: major << 32 | minor << 16 | patch,
            node_guid: self.guid().to_be(),
            sys_image_guid: self.guid().to_be(),
            max_mr_size: u64::MAX,
            page_size_cap: !0xfff,
            vendor_id: 0x2c9,
            vendor_part_id: 0x101b,
            max_qp: 1 << 17,
            max_qp_wr: MAX_SEND_WQEBB,
            device_cap_flags: PORT_ACTIVE_EVENT
                | SYS_IMAGE_GUID
                | RC_RNR_NAK_GEN
                | MEM_MGT_EXTENSIONS
                | MEM_WINDOW_TYPE_2B,
            max_sge: 30,
            max_sge_rd: 30,
            max_cq: 1 << 16,
            max_cqe: (1 << 22) - 1,
            max_mr: 1 << 23,
            max_mw: 1 << 23,
            max_pd: 1 << 23,
            max_qp_rd_atom: 16,
            max_res_rd_atom: 1 << 20,
            max_qp_init_rd_atom: 16,
            atomic_cap: ATOMICS_OF_THE_DEVICE,
            max_ah: i32::MAX as u32,
            max_srq: 1 << 16,
            max_srq_wr: MAX_SRQ_WR,
            max_srq_sge: 31,
            max_pkeys: 1,
            local_ca_ack_delay: 16,
            phys_port_cnt: 1,
            ..QueryDevice::zeroed()
        }
    }
}

pub(crate) fn find(link: Link, devices: usize, lid: u16, gid: Option<&[u8; 16]>) -> Option<usize> {
    (0..devices).find(|&device| {
        let port = Port { device, link, up: true };
        match link {
            Link::InfiniBand => port.lid() == lid,
            Link::Roce => gid.is_some_and(|gid| port.gids().iter().any(|(of, _)| of == gid)),
        }
    })
}

pub(crate) fn port_with_gid(link: Link, devices: usize, gid: &[u8; 16]) -> Option<Port> {
    let mut ports = (0..devices).map(|device| Port { device, link, up: true });
    ports.find(|port| port.gids().iter().any(|(of, _)| of == gid))
}
