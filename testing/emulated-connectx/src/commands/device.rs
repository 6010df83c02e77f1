//! Commands of the device: contexts, ports, GIDs, event channels.

use super::{CORE_IN, CORE_OUT};
use crate::abi::{
    EINVAL, ENODATA, GidEntry, Mlx5QueryDevice, Plain, QueryDeviceEx, UHW_IN, UHW_OUT,
    UcontextRequest, UcontextResponse,
};
use crate::channel::Channel;
use crate::interpose;
use crate::port::{
    COMPLETION_VECTORS, COMPRESSED_HASH, GID_ENTRIES, MAX_RECV_WR, MAX_SEND_WQEBB, MAX_SRQ_WR, Port,
};
use crate::state::State;
use crate::uverbs::{Reply, Request};

impl State {
    fn port_of(&self, request: &Request<'_>) -> Result<Port, i32> {
        let context = self.contexts.get(&request.context).ok_or(EINVAL)?;
        Ok(self.port(context.device))
    }

    pub(crate) fn get_context(&mut self, request: &mut Request<'_>) -> Reply {
        const NUM_COMP_VECTORS: u16 = 0;
        const CORE_SUPPORT: u16 = 1;
        /// `MLX5_USER_CMDS_SUPP_UHW_*`: QUERY_DEVICE and CREATE_AH return driver data.
        const ANSWERS: u8 = 1 | 2;
        const NO_INLINE_NEEDED: u8 = 1;
        /// `MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET`.
        const CORE_CLOCK_OFFSET: u32 = 1;
        request.put(NUM_COMP_VECTORS, &COMPLETION_VECTORS);
        request.put(CORE_SUPPORT, &0_u64);
        // Another driver, for which a test has renamed the device.
        let Some(asked) = request.get::<UcontextRequest>(UHW_IN) else { return Ok(()) };
        let answer = UcontextResponse {
            qp_tab_size: 1 << 17,
            bf_reg_size: 512,
            // No static registers: libmlx5 allocates UAR pages one at a time.
            tot_bfregs: 0,
            cache_line_size: 64,
            max_sq_desc_sz: 1024,
            max_rq_desc_sz: 512,
            max_send_wqebb: MAX_SEND_WQEBB,
            max_recv_wr: MAX_RECV_WR,
            max_srq_recv_wr: MAX_SRQ_WR,
            num_ports: 1,
            response_length: size_of::<UcontextResponse>() as u32,
            // Version 1: CQEs identify queue pairs by libmlx5's user index.
            cqe_version: asked.max_cqe_version.min(1),
            cmds_supp_uhw: ANSWERS,
            eth_min_inline: NO_INLINE_NEEDED,
            // The clock is at offset 0 of its page.
            comp_mask: CORE_CLOCK_OFFSET,
            log_uar_size: 12,
            num_uars_per_page: 1,
            num_dyn_bfregs: 1024,
            ..UcontextResponse::zeroed()
        };
        request.put(UHW_OUT, &answer);
        Ok(())
    }

    pub(crate) fn query_context(&mut self, request: &mut Request<'_>) -> Reply {
        request.put(0, &COMPLETION_VECTORS);
        request.put(1, &0_u64);
        Ok(())
    }

    pub(crate) fn query_device(&mut self, request: &mut Request<'_>) -> Reply {
        let port = self.port_of(request)?;
        request.put(CORE_OUT, &port.device_attributes());
        Ok(())
    }

    pub(crate) fn query_device_ex(&mut self, request: &mut Request<'_>) -> Reply {
        let port = self.port_of(request)?;
        let answer = QueryDeviceEx {
            base: port.device_attributes(),
            response_length: size_of::<QueryDeviceEx>() as u32,
            timestamp_mask: u64::MAX,
            // Kilohertz: CQE timestamps are in nanoseconds.
            hca_core_clock: 1_000_000,
            device_cap_flags_ex: u64::from(port.device_attributes().device_cap_flags),
            ..QueryDeviceEx::zeroed()
        };
        request.put(CORE_OUT, &answer);
        /// `MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_COMP`.
        const COMPRESSES_128: u32 = 1;
        let max_session = self.options.compressed_session;
        let compresses = max_session > 1;
        let mlx5 = Mlx5QueryDevice {
            cqe_comp: if compresses { [max_session, COMPRESSED_HASH] } else { [0; 2] },
            flags: if compresses { COMPRESSES_128 } else { 0 },
            response_length: size_of::<Mlx5QueryDevice>() as u32,
            ..Mlx5QueryDevice::zeroed()
        };
        request.put(UHW_OUT, &mlx5);
        Ok(())
    }

    pub(crate) fn query_port(&mut self, request: &mut Request<'_>) -> Reply {
        const PORT: u16 = 0;
        const ANSWER: u16 = 1;
        let port = self.port_of(request)?;
        if request.get::<u8>(PORT) != Some(1) {
            return Err(EINVAL);
        }
        request.put(ANSWER, &port.attributes());
        Ok(())
    }

    pub(crate) fn query_gid_entry(&mut self, request: &mut Request<'_>) -> Reply {
        const PORT: u16 = 0;
        const INDEX: u16 = 1;
        const ANSWER: u16 = 3;
        let port = self.port_of(request)?;
        if request.get::<u32>(PORT) != Some(1) {
            return Err(EINVAL);
        }
        let index: u32 = request.get(INDEX).ok_or(EINVAL)?;
        if index >= GID_ENTRIES {
            return Err(EINVAL);
        }
        let entry = port.gid_entry(index as usize).ok_or(ENODATA)?;
        request.put(ANSWER, &entry);
        Ok(())
    }

    pub(crate) fn query_gid_table(&mut self, request: &mut Request<'_>) -> Reply {
        const ENTRY_SIZE: u16 = 0;
        const ENTRIES: u16 = 2;
        const COUNT: u16 = 3;
        let port = self.port_of(request)?;
        let size = request.get::<u64>(ENTRY_SIZE).ok_or(EINVAL)? as usize;
        if size < size_of::<GidEntry>() {
            return Err(EINVAL);
        }
        let capacity = request.capacity(ENTRIES) / size;
        let entries: Vec<_> = (0..capacity).map_while(|index| port.gid_entry(index)).collect();
        let mut bytes = Vec::new();
        for entry in &entries {
            let from = bytes.len();
            bytes.extend(entry.gid);
            bytes.extend(
                [entry.index, entry.port, entry.kind, entry.interface]
                    .iter()
                    .flat_map(|n| n.to_ne_bytes()),
            );
            bytes.resize(from + size, 0);
        }
        request.put_bytes(ENTRIES, &bytes);
        request.put(COUNT, &(entries.len() as u64));
        Ok(())
    }

    pub(crate) fn create_channel(&mut self, request: &mut Request<'_>) -> Reply {
        debug_assert!(request.has(CORE_IN));
        let fd = self.open_channel()?;
        request.put(CORE_OUT, &(fd as u32));
        Ok(())
    }

    pub(crate) fn open_events(&mut self, request: &mut Request<'_>) -> Reply {
        let fd = self.open_channel()?;
        let lost = {
            let context = self.contexts.get_mut(&request.context).ok_or(EINVAL)?;
            context.events = Some(fd);
            self.lost[context.device]
        };
        request.set_handle(0, fd as u64);
        match lost {
            // The error of a device that has been removed.
            true => Err(libc::EIO),
            false => Ok(()),
        }
    }

    fn open_channel(&mut self) -> Result<i32, i32> {
        let (fd, channel) = Channel::new()?;
        // `fd` may be the number of a channel closed just now: remove that one first.
        self.reap();
        self.channels.insert(fd, channel);
        interpose::mark_channel(fd);
        Ok(fd)
    }
}
