//! A queue pair of libmlx5, posted to by `ibv_post_send(3)` or `ibv_wr_post(3)`.

use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use rdma_ibverbs::ffi::*;
use rdma_ibverbs::types::{QpCaps, QpState, RecvWr, SendFlags, SendOp, Sge, Transport};

use crate::memory::{CompletionRing, Cqe, Rings, zeroed};
use crate::requests::{Payload, Request};
use crate::world::{World, attributes};

/// How to post.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// `ibv_post_send`.
    Chain,
    /// `ibv_wr_*`.
    Extended,
}

#[derive(Debug)]
pub struct Library {
    pub qp: *mut ibv_qp,
    pub cq: *mut ibv_cq,
    pub srq: Option<*mut ibv_srq>,
    pub way: Way,
    pub rings: Rings,
    pub entries: CompletionRing,
    /// libmlx5's index of the queue pair, which completions name.
    pub user_index: u32,
    transport: Transport,
    /// Another queue pair destroys the completion queue.
    beside: bool,
}

fn check<T>(pointer: *mut T) -> *mut T {
    assert!(!pointer.is_null(), "{}", std::io::Error::last_os_error());
    pointer
}

pub fn list(sges: &[Sge]) -> Vec<ibv_sge> {
    let raw = |sge: &Sge| ibv_sge { addr: sge.addr, length: sge.length, lkey: sge.lkey.0 };
    sges.iter().map(raw).collect()
}

impl Library {
    /// Creates a queue pair with its own completion queue, and makes it ready to send.
    pub fn new(
        world: &World,
        transport: Transport,
        way: Way,
        caps: QpCaps,
        srq: Option<*mut ibv_srq>,
    ) -> Self {
        // SAFETY: the context is open.
        let cq = check(unsafe {
            ibv_create_cq(world.raw_context(), 16, ptr::null_mut(), ptr::null_mut(), 0)
        });
        Self::on(cq, CompletionRing::of(cq), world, transport, way, caps, srq)
    }

    /// Creates a queue pair beside this one, on the same completion queue.
    pub fn beside(&self, world: &World, caps: QpCaps) -> Self {
        let mut entries = CompletionRing::of(self.cq);
        entries.next = self.entries.next;
        let Self { transport, way, srq, .. } = *self;
        let mut made = Self::on(self.cq, entries, world, transport, way, caps, srq);
        made.beside = true;
        made
    }

    fn on(
        cq: *mut ibv_cq,
        entries: CompletionRing,
        world: &World,
        transport: Transport,
        way: Way,
        caps: QpCaps,
        srq: Option<*mut ibv_srq>,
    ) -> Self {
        let qp = create(world, transport, way, caps, cq, srq);
        let rings = Rings::of(qp);
        world.silence(rings.register.start.cast());
        let beside = false;
        let mut made = Self { qp, cq, srq, way, rings, entries, user_index: 0, transport, beside };
        made.ready(world);
        made.learn(world);
        made
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).qp_num }
    }

    /// Learns the user index from the entry of a flushed request.
    fn learn(&mut self, world: &World) {
        assert_eq!(self.post(&[Request::filler(self.transport)]), 0);
        self.to(QpState::Err);
        let start = Instant::now();
        let first = self.entries.at(self.entries.next);
        let last = first.part(first.len - 1, 1);
        let mine = |byte: u8| byte >> 4 != 15 && byte & 1 == self.entries.owner(self.entries.next);
        while !mine(last.read()[0]) {
            assert!(start.elapsed() < Duration::from_secs(600), "no flushed completion");
            std::thread::yield_now();
        }
        let at = first.len - 64 + 32;
        let bytes = first.read();
        self.user_index = u32::from_be_bytes([0, bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let flushed = self.poll().unwrap();
        assert_eq!(flushed.status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        self.entries.next += 1;
        self.reset();
        self.ready(world);
    }

    pub fn ready(&self, world: &World) {
        for attr in attributes(world, self.transport) {
            let mut raw: ibv_qp_attr = zeroed();
            raw.qp_state = attr.state.unwrap() as u32;
            raw.pkey_index = attr.pkey_index.unwrap_or(0);
            raw.port_num = attr.port.map_or(0, |port| port.0);
            raw.qkey = attr.qkey.map_or(0, |key| key.0);
            raw.qp_access_flags = attr.access.map_or(0, |_| 2 | 4 | 8);
            raw.sq_psn = attr.sq_psn.map_or(0, |psn| psn.value());
            raw.rq_psn = attr.rq_psn.map_or(0, |psn| psn.value());
            raw.dest_qp_num = attr.dest_qpn.map_or(0, |number| number.0);
            raw.path_mtu = attr.path_mtu.map_or(1, |mtu| mtu as u32);
            raw.max_dest_rd_atomic = attr.max_dest_rd_atomic.unwrap_or(0);
            raw.max_rd_atomic = attr.max_rd_atomic.unwrap_or(0);
            raw.min_rnr_timer = attr.min_rnr_timer.map_or(0, |timer| timer.code());
            raw.timeout = attr.timeout.map_or(0, |timeout| timeout.code());
            raw.retry_cnt = attr.retry_count.unwrap_or(0);
            raw.rnr_retry = attr.rnr_retry.unwrap_or(0);
            if let Some(address) = attr.address {
                raw.ah_attr.port_num = 1;
                raw.ah_attr.dlid = address.dlid;
                raw.ah_attr.is_global = 1;
                raw.ah_attr.grh.dgid.raw = address.dgid.0;
                raw.ah_attr.grh.sgid_index = address.sgid_index;
                raw.ah_attr.grh.hop_limit = address.hop_limit;
            }
            // SAFETY: the queue pair is alive, the attributes local.
            let error = unsafe { ibv_modify_qp(self.qp, &raw mut raw, attr.mask().bits() as i32) };
            assert_eq!(error, 0, "to {:?}", attr.state);
        }
    }

    fn to(&self, state: QpState) {
        let mut raw: ibv_qp_attr = zeroed();
        raw.qp_state = state as u32;
        // SAFETY: the queue pair is alive, the attributes local.
        assert_eq!(unsafe { ibv_modify_qp(self.qp, &raw mut raw, 1) }, 0);
    }

    pub fn reset(&self) {
        self.to(QpState::Reset);
    }

    pub fn fail(&self) {
        self.to(QpState::Err);
    }

    /// Posts a list; returns the `errno`.
    pub fn post(&self, requests: &[Request]) -> i32 {
        match self.way {
            Way::Chain => self.post_chain(requests),
            Way::Extended => self.post_extended(requests),
        }
    }

    fn post_chain(&self, requests: &[Request]) -> i32 {
        let mut lists: Vec<_> = requests.iter().map(Request::raw_list).collect();
        let mut chain: Vec<ibv_send_wr> = Vec::new();
        for (request, list) in requests.iter().zip(&mut lists) {
            chain.push(chained(request, list));
        }
        for at in 1..chain.len() {
            chain[at - 1].next = &raw mut chain[at];
        }
        // SAFETY: the queue pair is alive, chain and lists are local.
        unsafe { ibv_post_send(self.qp, chain.as_mut_ptr(), &mut ptr::null_mut()) }
    }

    fn post_extended(&self, requests: &[Request]) -> i32 {
        // SAFETY: the queue pair is alive, and was created for these calls.
        unsafe {
            let x = check(ibv_qp_to_qp_ex(self.qp));
            ibv_wr_start(x);
            for request in requests {
                extended(x, request);
            }
            ibv_wr_complete(x)
        }
    }

    /// Posts receives; returns the `errno` and how many were posted before the refused one.
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (i32, usize)> {
        let mut lists: Vec<_> = wrs.iter().map(|wr| list(wr.sges)).collect();
        let mut chain = receives(wrs, &mut lists);
        let first = if wrs.is_empty() { ptr::null_mut() } else { chain.as_mut_ptr() };
        let mut refused = ptr::null_mut();
        // SAFETY: the queues are alive, chain and lists are local.
        let error = unsafe {
            match self.srq {
                Some(srq) => ibv_post_srq_recv(srq, first, &raw mut refused),
                None => ibv_post_recv(self.qp, first, &raw mut refused),
            }
        };
        if error == 0 {
            return Ok(());
        }
        Err((error, (refused.addr() - first.addr()) / size_of::<ibv_recv_wr>()))
    }

    pub fn put(&mut self, cqe: &Cqe) {
        self.entries.put(&cqe.of(self.number(), self.user_index));
    }

    /// Polls a completion. Fields that libmlx5 does not write are 0xee.
    pub fn poll(&self) -> Option<ibv_wc> {
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: the queue is alive; any bytes are a completion.
        unsafe {
            wc.as_mut_ptr().cast::<u8>().write_bytes(0xee, size_of::<ibv_wc>());
            match ibv_poll_cq(self.cq, 1, wc.as_mut_ptr()) {
                0 => None,
                1 => Some(wc.assume_init()),
                error => panic!("ibv_poll_cq: {error}"),
            }
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // SAFETY: created by this object.
        unsafe {
            assert_eq!(ibv_destroy_qp(self.qp), 0);
            if !self.beside {
                assert_eq!(ibv_destroy_cq(self.cq), 0);
            }
        }
    }
}

fn receives(wrs: &[RecvWr<'_>], lists: &mut [Vec<ibv_sge>]) -> Vec<ibv_recv_wr> {
    let mut chain: Vec<_> = wrs
        .iter()
        .zip(lists)
        .map(|(wr, list)| ibv_recv_wr {
            wr_id: wr.wr_id.0,
            next: ptr::null_mut(),
            sg_list: list.as_mut_ptr(),
            num_sge: list.len() as i32,
        })
        .collect();
    for at in 1..chain.len() {
        chain[at - 1].next = &raw mut chain[at];
    }
    chain
}

/// Creates a queue pair of libmlx5.
pub fn create(
    world: &World,
    transport: Transport,
    way: Way,
    caps: QpCaps,
    cq: *mut ibv_cq,
    srq: Option<*mut ibv_srq>,
) -> *mut ibv_qp {
    use ibv_qp_create_send_ops_flags as o;
    let mut init: ibv_qp_init_attr_ex = zeroed();
    (init.send_cq, init.recv_cq, init.pd) = (cq, cq, world.raw_pd());
    init.srq = srq.unwrap_or(ptr::null_mut());
    init.cap = ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline,
    };
    init.qp_type = match transport {
        Transport::Rc => ibv_qp_type::IBV_QPT_RC,
        Transport::Uc => ibv_qp_type::IBV_QPT_UC,
        Transport::Ud => ibv_qp_type::IBV_QPT_UD,
        Transport::Dci => ibv_qp_type::IBV_QPT_DRIVER,
    };
    if way == Way::Chain {
        // `ibv_qp_init_attr_ex` starts with the fields of `ibv_qp_init_attr`.
        // SAFETY: domain and queues are alive.
        return check(unsafe { ibv_create_qp(init.pd, (&raw mut init).cast()) });
    }
    let mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
        | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.comp_mask = mask.0;
    let send = o::IBV_QP_EX_WITH_SEND | o::IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = o::IBV_QP_EX_WITH_RDMA_WRITE | o::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let windows = o::IBV_QP_EX_WITH_LOCAL_INV | o::IBV_QP_EX_WITH_BIND_MW;
    let read = o::IBV_QP_EX_WITH_RDMA_READ
        | o::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | o::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    let operations = match transport {
        Transport::Ud => send,
        Transport::Uc => send | write | windows,
        Transport::Dci => send | write | read,
        Transport::Rc => send | write | read | windows | o::IBV_QP_EX_WITH_SEND_WITH_INV,
    };
    init.send_ops_flags = operations.0.into();
    // SAFETY: domain and queues are alive.
    check(unsafe {
        if transport == Transport::Dci {
            let mut dv: mlx5dv_qp_init_attr = zeroed();
            dv.comp_mask = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into();
            dv.dc_init_attr.dc_type = mlx5dv_dc_type::MLX5DV_DCTYPE_DCI;
            mlx5dv_create_qp(world.raw_context(), &raw mut init, &raw mut dv)
        } else {
            ibv_create_qp_ex(world.raw_context(), &raw mut init)
        }
    })
}

fn flags(request: &Request) -> u32 {
    let mut flags = 0;
    for (ours, theirs) in
        [(SendFlags::FENCE, 1), (SendFlags::SIGNALED, 2), (SendFlags::SOLICITED, 4)]
    {
        flags |= if request.flags.contains(ours) { theirs } else { 0 };
    }
    flags
}

/// Returns a request as `ibv_post_send(3)` takes it; `list` has its buffers or inline data.
fn chained(request: &Request, list: &mut [ibv_sge]) -> ibv_send_wr {
    use ibv_wr_opcode as code;
    let mut wr: ibv_send_wr = zeroed();
    wr.wr_id = request.id;
    (wr.sg_list, wr.num_sge) = (list.as_mut_ptr(), list.len() as i32);
    wr.send_flags = flags(request);
    if matches!(request.data, Payload::Inline(_)) {
        wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    }
    if let Some(target) = request.target {
        wr.wr.ud =
            ud_t { ah: target.theirs, remote_qpn: target.number, remote_qkey: target.key as u32 };
    }
    let immediate = &mut wr.imm_data_invalidated_rkey_union;
    let rdma =
        |at: rdma_ibverbs::types::RemoteAddr| rdma_t { remote_addr: at.addr, rkey: at.rkey.0 };
    match request.op {
        SendOp::Send => wr.opcode = code::IBV_WR_SEND,
        SendOp::SendWithImm(imm) => {
            wr.opcode = code::IBV_WR_SEND_WITH_IMM;
            immediate.imm_data = imm.0.to_be();
        }
        SendOp::SendWithInvalidate(key) => {
            wr.opcode = code::IBV_WR_SEND_WITH_INV;
            immediate.invalidated_rkey = key.0;
        }
        SendOp::Write(at) => {
            (wr.opcode, wr.wr.rdma) = (code::IBV_WR_RDMA_WRITE, rdma(at));
        }
        SendOp::WriteWithImm(at, imm) => {
            (wr.opcode, wr.wr.rdma) = (code::IBV_WR_RDMA_WRITE_WITH_IMM, rdma(at));
            immediate.imm_data = imm.0.to_be();
        }
        SendOp::Read(at) => (wr.opcode, wr.wr.rdma) = (code::IBV_WR_RDMA_READ, rdma(at)),
        SendOp::CompareSwap { remote, compare, swap } => {
            wr.opcode = code::IBV_WR_ATOMIC_CMP_AND_SWP;
            let (remote_addr, rkey) = (remote.addr, remote.rkey.0);
            wr.wr.atomic = atomic_t { remote_addr, compare_add: compare, swap, rkey };
        }
        SendOp::FetchAdd { remote, add } => {
            wr.opcode = code::IBV_WR_ATOMIC_FETCH_AND_ADD;
            let (remote_addr, rkey) = (remote.addr, remote.rkey.0);
            wr.wr.atomic = atomic_t { remote_addr, compare_add: add, swap: 0, rkey };
        }
        SendOp::LocalInvalidate(key) => {
            wr.opcode = code::IBV_WR_LOCAL_INV;
            immediate.invalidated_rkey = key.0;
        }
        SendOp::BindWindow => {
            wr.opcode = code::IBV_WR_BIND_MW;
            let (mw, rkey, bind_info) = window(request);
            wr.bind_mw_tso_union.bind_mw = bind_mw_t { mw, rkey, bind_info };
        }
    }
    wr
}

/// Returns window, new key and memory of a binding.
fn window(request: &Request) -> (*mut ibv_mw, u32, ibv_mw_bind_info) {
    let Payload::Window(bind) = &request.data else { panic!("a binding has a window") };
    let mw: *mut ibv_mw = ptr::with_exposed_provenance_mut(bind.window);
    // SAFETY: the window is alive.
    unsafe { (*mw).rkey = bind.current.0 };
    let info = ibv_mw_bind_info {
        mr: ptr::with_exposed_provenance_mut(bind.region),
        addr: bind.addr,
        length: bind.len,
        mw_access_flags: bind.access.bits(),
    };
    (mw, bind.rkey.0, info)
}

/// Adds a request to a batch.
///
/// # Safety
///
/// `ibv_wr_start` was called, for a queue pair created for these operations.
unsafe fn extended(x: *mut ibv_qp_ex, request: &Request) {
    // SAFETY: the caller's promise.
    unsafe {
        ((*x).wr_id, (*x).wr_flags) = (request.id, flags(request));
        match request.op {
            SendOp::Send => ibv_wr_send(x),
            SendOp::SendWithImm(imm) => ibv_wr_send_imm(x, imm.0.to_be()),
            SendOp::SendWithInvalidate(key) => ibv_wr_send_inv(x, key.0),
            SendOp::Write(at) => ibv_wr_rdma_write(x, at.rkey.0, at.addr),
            SendOp::WriteWithImm(at, imm) => {
                ibv_wr_rdma_write_imm(x, at.rkey.0, at.addr, imm.0.to_be())
            }
            SendOp::Read(at) => ibv_wr_rdma_read(x, at.rkey.0, at.addr),
            SendOp::CompareSwap { remote, compare, swap } => {
                ibv_wr_atomic_cmp_swp(x, remote.rkey.0, remote.addr, compare, swap)
            }
            SendOp::FetchAdd { remote, add } => {
                ibv_wr_atomic_fetch_add(x, remote.rkey.0, remote.addr, add)
            }
            SendOp::LocalInvalidate(key) => return ibv_wr_local_inv(x, key.0),
            SendOp::BindWindow => {
                let (mw, rkey, info) = window(request);
                return ibv_wr_bind_mw(x, mw, rkey, &raw const info);
            }
        }
        match &request.data {
            Payload::List(sges) => {
                let list = list(sges);
                ibv_wr_set_sge_list(x, list.len(), list.as_ptr());
            }
            Payload::Inline(bytes) => {
                ibv_wr_set_inline_data(x, bytes.as_ptr().cast_mut().cast(), bytes.len())
            }
            Payload::Window(_) => panic!("no operation with a window"),
        }
        if let Some(target) = request.target {
            if (*x).qp_base.qp_type == ibv_qp_type::IBV_QPT_UD {
                ibv_wr_set_ud_addr(x, target.theirs, target.number, target.key as u32);
            } else {
                let dc = check(mlx5dv_qp_ex_from_ibv_qp_ex(x));
                let (number, key) = (target.number, target.key);
                mlx5dv_wr_set_dc_addr(dc, target.theirs, number, key);
            }
        }
    }
}

/// A shared receive queue of libmlx5.
#[derive(Debug)]
pub struct LibrarySrq {
    pub srq: *mut ibv_srq,
}

impl LibrarySrq {
    pub fn new(world: &World, max_wr: u32, max_sge: u32) -> Self {
        let attr = ibv_srq_attr { max_wr, max_sge, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain is alive.
        Self { srq: check(unsafe { ibv_create_srq(world.raw_pd(), &raw mut init) }) }
    }
}

impl Drop for LibrarySrq {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // SAFETY: created by this object; its queue pairs are gone.
        assert_eq!(unsafe { ibv_destroy_srq(self.srq) }, 0);
    }
}
