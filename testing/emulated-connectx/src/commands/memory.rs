//! Commands for protection domains, memory regions, memory windows, address handles and UAR pages.

use super::{CORE_IN, CORE_OUT};
use crate::abi::{
    self, AllocMw, AllocMwResponse, CreateAh, CreateAhResponse, EBUSY, EFAULT, EINVAL, ENOMEM,
    EOPNOTSUPP, Mlx5CreateAhResponse, RegMr, RegMrResponse, UHW_OUT, access,
};
use crate::control::Link;
use crate::memory::{self, Buffer};
use crate::objects::{Handle, Mr, Pd};
use crate::requester;
use crate::state::State;
use crate::uverbs::{Reply, Request};
use crate::window::Mw;

#[derive(Clone, Copy, Debug)]
struct Region {
    pd: Handle,
    start: u64,
    length: u64,
    iova: u64,
    access: u32,
}

impl State {
    pub(crate) fn alloc_pd(&mut self, request: &mut Request<'_>) -> Reply {
        let (pd, number) = (self.handle(), self.number());
        self.pds.insert(pd, Pd { context: request.context });
        request.put(CORE_OUT, &pd);
        request.put(UHW_OUT, &number);
        Ok(())
    }

    pub(crate) fn destroy_pd(&mut self, pd: Handle) -> Reply {
        if !self.pds.contains_key(&pd) {
            return Err(EINVAL);
        }
        let used = self.mrs.values().any(|mr| mr.pd == pd)
            || self.qps.values().any(|qp| qp.pd == pd)
            || self.srqs.values().any(|srq| srq.pd == pd)
            || self.mws.values().any(|mw| mw.pd == pd)
            || self.ahs.values().any(|&(_, of)| of == pd);
        if used {
            return Err(EBUSY);
        }
        self.pds.remove(&pd);
        Ok(())
    }

    fn insert_region(&mut self, context: u32, region: Region) -> Result<(Handle, u32), i32> {
        const KNOWN: u32 = access::LOCAL_WRITE
            | access::REMOTE_WRITE
            | access::REMOTE_READ
            | access::REMOTE_ATOMIC
            | access::MW_BIND
            | access::ZERO_BASED
            | access::ON_DEMAND;
        /// `IB_UVERBS_ACCESS_OPTIONAL_RANGE`: flags that a device may ignore.
        const OPTIONAL: u32 = 0x3ff << 20;
        let Region { pd, start, length, iova, access: wanted } = region;
        if self.pds.get(&pd).is_none_or(|pd| pd.context != context) {
            return Err(EINVAL);
        }
        let remote_changes = wanted & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if wanted & !(KNOWN | OPTIONAL) != 0 || remote_changes && wanted & access::LOCAL_WRITE == 0
        {
            return Err(EINVAL);
        }
        if wanted & access::ON_DEMAND != 0 {
            return Err(EOPNOTSUPP);
        }
        if length == 0 || start.checked_add(length).is_none() || start & 0xfff != iova & 0xfff {
            return Err(EINVAL);
        }
        if !memory::populate(start, length, wanted & access::LOCAL_WRITE != 0) {
            return Err(EFAULT);
        }
        // SAFETY: `populate` found the range mapped, and writable if `access` requires that. The
        // program keeps it mapped until it destroys the region, `ibv_reg_mr(3)`.
        let memory = unsafe { Buffer::new(start, length) };
        let (mr, key) = (self.handle(), self.key());
        self.mrs.insert(mr, Mr { context, pd, key, iova, access: wanted, memory });
        self.mr_by_key.insert(key, mr);
        Ok((mr, key))
    }

    /// Executes the command that `ibv_reg_mr` sends.
    pub(crate) fn register_command(&mut self, request: &mut Request<'_>) -> Reply {
        let asked: RegMr = request.get(CORE_IN).ok_or(EINVAL)?;
        let RegMr { pd, start, length, hca_va: iova, access, .. } = asked;
        let (handle, key) =
            self.insert_region(request.context, Region { pd, start, length, iova, access })?;
        request.put(CORE_OUT, &RegMrResponse { handle, lkey: key, rkey: key });
        Ok(())
    }

    /// Executes the method that `ibv_reg_mr_ex` calls, since rdma-core 59.
    pub(crate) fn register(&mut self, request: &mut Request<'_>) -> Reply {
        ids! {
            HANDLE = 0, PD = 1, IOVA = 3, ADDRESS = 4, LENGTH = 5, ACCESS = 6, FD = 7, LKEY = 9,
            RKEY = 10
        }
        if request.has(FD) {
            return Err(EOPNOTSUPP);
        }
        let number = |id| request.get::<u64>(id);
        let region = Region {
            pd: request.handle(PD)?,
            start: number(ADDRESS).ok_or(EINVAL)?,
            length: number(LENGTH).ok_or(EINVAL)?,
            iova: number(IOVA).ok_or(EINVAL)?,
            access: request.get(ACCESS).unwrap_or(0),
        };
        let (handle, key) = self.insert_region(request.context, region)?;
        request.set_handle(HANDLE, handle.into());
        request.put(LKEY, &key);
        request.put(RKEY, &key);
        Ok(())
    }

    pub(crate) fn destroy_mr(&mut self, mr: Handle) -> Reply {
        if !self.mrs.contains_key(&mr) {
            return Err(EINVAL);
        }
        if self.mws.values().any(|mw| mw.binding.is_some_and(|binding| binding.mr == mr)) {
            return Err(EBUSY);
        }
        self.remove_mr(mr);
        Ok(())
    }

    /// Allocates an unbound memory window. Type 1, which `ibv_bind_mw(3)` binds, is not emulated.
    pub(crate) fn alloc_mw(&mut self, request: &mut Request<'_>) -> Reply {
        const TYPE_2: u8 = 2;
        let asked: AllocMw = request.get(CORE_IN).ok_or(EINVAL)?;
        if self.pds.get(&asked.pd).is_none_or(|pd| pd.context != request.context) {
            return Err(EINVAL);
        }
        if asked.kind != TYPE_2 {
            return Err(EOPNOTSUPP);
        }
        let (handle, key) = (self.handle(), self.key());
        let mw = Mw { context: request.context, pd: asked.pd, key, binding: None };
        self.mws.insert(handle, mw);
        self.mw_by_index.insert(mw.index(), handle);
        request.put(CORE_OUT, &AllocMwResponse { handle, rkey: key });
        Ok(())
    }

    pub(crate) fn destroy_mw(&mut self, mw: Handle) -> Reply {
        let gone = self.mws.remove(&mw).ok_or(EINVAL)?;
        self.mw_by_index.remove(&gone.index());
        Ok(())
    }

    /// Creates an address handle. On Ethernet, libmlx5 takes the MAC address of the GID from the
    /// response.
    pub(crate) fn create_ah(&mut self, request: &mut Request<'_>) -> Reply {
        let asked: CreateAh = request.get(CORE_IN).ok_or(EINVAL)?;
        let attr = asked.attr;
        let own = self.contexts.get(&request.context).ok_or(EINVAL)?.device;
        let known = self.pds.get(&asked.pd).is_some_and(|pd| pd.context == request.context);
        if !known || attr.port != 1 {
            return Err(EINVAL);
        }
        if attr.is_global != 0 {
            self.port(own).check_gid(attr.sgid_index)?;
        }
        let mut answer = Mlx5CreateAhResponse {
            response_length: size_of::<Mlx5CreateAhResponse>() as u32,
            dmac: [0; 6],
            reserved: [0; 6],
        };
        if self.options.link == Link::Roce {
            if attr.is_global == 0 {
                return Err(EINVAL);
            }
            answer.dmac = requester::mac_of(self, &attr.dgid).ok_or(libc::EHOSTUNREACH)?;
        }
        let ah = self.handle();
        self.ahs.insert(ah, (request.context, asked.pd));
        request.put(CORE_OUT, &CreateAhResponse { handle: ah });
        request.put(UHW_OUT, &answer);
        Ok(())
    }

    pub(crate) fn destroy_ah(&mut self, ah: Handle) -> Reply {
        self.ahs.remove(&ah).map(drop).ok_or(EINVAL)
    }

    pub(crate) fn allocate_uar(&mut self, request: &mut Request<'_>) -> Reply {
        ids! {
            HANDLE = abi::DRIVER, OFFSET = abi::DRIVER + 2, LENGTH = abi::DRIVER + 3, PAGE =
            abi::DRIVER + 4
        }
        let (page, offset) = self.uar.allocate().ok_or(ENOMEM)?;
        let uar = self.handle();
        self.uars.insert(uar, (request.context, page));
        request.set_handle(HANDLE, uar.into());
        request.put(OFFSET, &offset);
        request.put(LENGTH, &4096_u32);
        request.put(PAGE, &page);
        Ok(())
    }

    pub(crate) fn destroy_uar(&mut self, uar: Handle) -> Reply {
        let (_, page) = self.uars.remove(&uar).ok_or(EINVAL)?;
        self.uar.free(page);
        Ok(())
    }
}
