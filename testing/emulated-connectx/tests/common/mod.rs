//! libibverbs objects for tests. Each is destroyed on drop, which must succeed.

#![allow(
    dead_code,
    missing_docs,
    unused_imports,
    unreachable_pub,
    clippy::undocumented_unsafe_blocks
)]
// Every `unsafe` here calls libibverbs with live objects, or zeroes a structure of numbers.

mod dc;

use std::ffi::{CStr, c_int};
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use emulated_connectx::{EmulatedConnectX, Options};
use rdma_ibverbs::ffi::*;

pub use dc::*;

pub const LOCAL: u32 = 1;
pub const ALL: u32 = 1 | 2 | 4 | 8;
pub const SIGNALED: u32 = 2;
pub const SOLICITED: u32 = 4;
pub const INLINE: u32 = 8;
pub const PATIENCE: Duration = Duration::from_secs(600);

pub fn start(change: impl FnOnce(&mut Options)) -> EmulatedConnectX {
    let mut options = Options::default();
    change(&mut options);
    EmulatedConnectX::start(options).unwrap()
}

pub fn zeroed<T>() -> T {
    unsafe { mem::zeroed() }
}

/// Waits until `done` returns `true`; panics after [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "timed out after {PATIENCE:?} waiting for {what}");
        std::thread::yield_now();
    }
}

pub struct Context(pub *mut ibv_context);
unsafe impl Send for Context {}
unsafe impl Sync for Context {}

pub fn names() -> Vec<String> {
    unsafe {
        let mut count = 0;
        let list = ibv_get_device_list(&mut count);
        assert!(!list.is_null(), "{}", std::io::Error::last_os_error());
        let name = |index| {
            CStr::from_ptr(ibv_get_device_name(*list.add(index))).to_str().unwrap().to_owned()
        };
        let names = (0..count as usize).map(name).collect();
        ibv_free_device_list(list);
        names
    }
}

impl Context {
    pub fn open(number: usize) -> Arc<Self> {
        unsafe {
            let mut count = 0;
            let list = ibv_get_device_list(&mut count);
            assert!(!list.is_null() && number < count as usize, "there are {count} devices");
            let raw = ibv_open_device(*list.add(number));
            assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
            ibv_free_device_list(list);
            Arc::new(Self(raw))
        }
    }

    pub fn port(&self) -> ibv_port_attr {
        let mut attr = zeroed();
        assert_eq!(unsafe { ibv_query_port(self.0, 1, &mut attr) }, 0);
        attr
    }

    pub fn gids(&self) -> Vec<ibv_gid_entry> {
        let mut entries: [ibv_gid_entry; 16] = zeroed();
        let count = unsafe { ibv_query_gid_table(self.0, entries.as_mut_ptr(), entries.len(), 0) };
        entries[..usize::try_from(count).unwrap()].to_vec()
    }

    /// Returns the device's own address, with a global route.
    pub fn route(&self) -> ibv_ah_attr {
        let gids = self.gids();
        let index = gids.iter().position(|gid| gid.gid_type == 2).unwrap_or(0);
        let mut attr: ibv_ah_attr = zeroed();
        attr.port_num = 1;
        attr.dlid = self.port().lid;
        attr.is_global = 1;
        attr.grh.sgid_index = gids[index].gid_index as u8;
        attr.grh.hop_limit = 7;
        attr.grh.dgid = gids[index].gid;
        attr
    }

    /// Takes and acknowledges an asynchronous event; returns its type.
    pub fn event(&self) -> u32 {
        // The type as a number: the binding's enumeration is incomplete.
        #[repr(C)]
        struct Event(u64, u32);
        let mut event = Event(0, 0);
        unsafe {
            let mut poll =
                libc::pollfd { fd: (*self.0).async_fd, events: libc::POLLIN, revents: 0 };
            assert_eq!(libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32), 1, "no event");
            assert_eq!(ibv_get_async_event(self.0, (&raw mut event).cast()), 0);
            ibv_ack_async_event((&raw mut event).cast());
        }
        event.1
    }

    pub fn has_event(&self) -> bool {
        let mut poll =
            libc::pollfd { fd: unsafe { (*self.0).async_fd }, events: libc::POLLIN, revents: 0 };
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_close_device(self.0) }, 0);
    }
}

pub struct Pd(pub *mut ibv_pd, pub Arc<Context>);
unsafe impl Send for Pd {}
unsafe impl Sync for Pd {}

impl Pd {
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        let raw = unsafe { ibv_alloc_pd(context.0) };
        assert!(!raw.is_null());
        Arc::new(Self(raw, context.clone()))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_dealloc_pd(self.0) }, 0);
    }
}

pub struct Mr(pub *mut ibv_mr, Vec<u64>, Arc<Pd>);
unsafe impl Send for Mr {}

impl Mr {
    pub fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Self {
        let mut memory = vec![0_u64; len.div_ceil(8)];
        let raw = unsafe { ibv_reg_mr(pd.0, memory.as_mut_ptr().cast(), len, access as i32) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Self(raw, memory, pd.clone())
    }

    pub fn address(&self) -> u64 {
        self.1.as_ptr() as u64
    }

    pub fn key(&self) -> u32 {
        unsafe { (*self.0).rkey }
    }

    pub fn sge(&self, from: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.address() + from as u64,
            length: len as u32,
            lkey: unsafe { (*self.0).lkey },
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let len = self.1.len() * 8;
        let first = std::hint::black_box(self.1.as_ptr()).cast::<u8>();
        (0..len).map(|at| unsafe { first.add(at).read_volatile() }).collect()
    }

    pub fn word(&self, at: usize) -> u64 {
        unsafe { self.1.as_ptr().add(at).read_volatile() }
    }

    pub fn fill(&mut self, byte: impl Fn(usize) -> u8) {
        let first = self.1.as_mut_ptr().cast::<u8>();
        (0..self.1.len() * 8).for_each(|at| unsafe { first.add(at).write_volatile(byte(at)) });
    }

    pub fn set_word(&mut self, at: usize, word: u64) {
        unsafe { self.1.as_mut_ptr().add(at).write_volatile(word) };
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_dereg_mr(self.0) }, 0);
    }
}

pub struct Channel(pub *mut ibv_comp_channel, Arc<Context>);
unsafe impl Send for Channel {}
unsafe impl Sync for Channel {}

impl Channel {
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        let raw = unsafe { ibv_create_comp_channel(context.0) };
        assert!(!raw.is_null());
        assert_eq!(unsafe { libc::fcntl((*raw).fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        Arc::new(Self(raw, context.clone()))
    }

    pub fn is_readable(&self, wait: Duration) -> bool {
        let mut poll =
            libc::pollfd { fd: unsafe { (*self.0).fd }, events: libc::POLLIN, revents: 0 };
        unsafe { libc::poll(&mut poll, 1, wait.as_millis() as i32) == 1 }
    }

    /// Takes and acknowledges a pending event; returns its queue.
    pub fn take(&self) -> Option<*mut ibv_cq> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        unsafe {
            if ibv_get_cq_event(self.0, &mut cq, &mut context) != 0 {
                return None;
            }
            ibv_ack_cq_events(cq, 1);
        }
        Some(cq)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_destroy_comp_channel(self.0) }, 0);
    }
}

pub struct Cq(pub *mut ibv_cq, Arc<Context>, Option<Arc<Channel>>);
unsafe impl Send for Cq {}
unsafe impl Sync for Cq {}

impl Cq {
    pub fn new(context: &Arc<Context>, entries: i32) -> Arc<Self> {
        Self::with(context, entries, None)
    }

    pub fn with(context: &Arc<Context>, entries: i32, channel: Option<&Arc<Channel>>) -> Arc<Self> {
        let of = channel.map_or(ptr::null_mut(), |channel| channel.0);
        let raw = unsafe { ibv_create_cq(context.0, entries, ptr::null_mut(), of, 0) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Arc::new(Self(raw, context.clone(), channel.cloned()))
    }

    /// Wraps a queue created elsewhere.
    pub fn from_raw(raw: *mut ibv_cq, context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self(raw, context.clone(), None))
    }

    pub fn poll(&self) -> Option<ibv_wc> {
        let mut wc = zeroed();
        match unsafe { ibv_poll_cq(self.0, 1, &mut wc) } {
            0 => None,
            1 => Some(wc),
            error => panic!("ibv_poll_cq: {error}"),
        }
    }

    #[track_caller]
    pub fn next(&self) -> ibv_wc {
        let mut found = None;
        until("a completion", || {
            found = self.poll();
            found.is_some()
        });
        found.unwrap()
    }

    /// Asserts that the next completion is a success of `id`.
    #[track_caller]
    pub fn ok(&self, id: u64) -> ibv_wc {
        let wc = self.next();
        assert_eq!((wc.status, wc.wr_id), (ibv_wc_status::IBV_WC_SUCCESS, id), "status, id");
        wc
    }

    /// Asserts that the next completion is `id` with `status`.
    #[track_caller]
    pub fn fails_with(&self, id: u64, status: ibv_wc_status::Type) {
        let wc = self.next();
        assert_eq!((wc.status, wc.wr_id), (status, id), "status, id");
    }

    pub fn arm(&self, solicited: bool) {
        assert_eq!(unsafe { ibv_req_notify_cq(self.0, solicited.into()) }, 0);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_destroy_cq(self.0) }, 0);
    }
}

pub struct Srq(pub *mut ibv_srq, Arc<Pd>);
unsafe impl Send for Srq {}
unsafe impl Sync for Srq {}

impl Srq {
    pub fn new(pd: &Arc<Pd>, max_wr: u32, max_sge: u32) -> Arc<Self> {
        let attr = ibv_srq_attr { max_wr, max_sge, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        let raw = unsafe { ibv_create_srq(pd.0, &mut init) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Arc::new(Self(raw, pd.clone()))
    }

    pub fn post(&self, id: u64, mut list: Vec<ibv_sge>) {
        let mut wr = receive(id, &mut list);
        assert_eq!(unsafe { ibv_post_srq_recv(self.0, &mut wr, &mut ptr::null_mut()) }, 0);
    }

    pub fn limit(&self, limit: u32) -> i32 {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        unsafe { ibv_modify_srq(self.0, &mut attr, ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32) }
    }

    pub fn query(&self) -> ibv_srq_attr {
        let mut attr = zeroed();
        assert_eq!(unsafe { ibv_query_srq(self.0, &mut attr) }, 0);
        attr
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_destroy_srq(self.0) }, 0);
    }
}

fn receive(id: u64, list: &mut [ibv_sge]) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: id,
        next: ptr::null_mut(),
        sg_list: list.as_mut_ptr(),
        num_sge: list.len() as i32,
    }
}

pub struct Ah(pub *mut ibv_ah, Arc<Pd>);
unsafe impl Send for Ah {}
unsafe impl Sync for Ah {}

impl Ah {
    pub fn new(pd: &Arc<Pd>, attr: &ibv_ah_attr) -> Arc<Self> {
        let raw = unsafe { ibv_create_ah(pd.0, ptr::from_ref(attr).cast_mut()) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Arc::new(Self(raw, pd.clone()))
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_destroy_ah(self.0) }, 0);
    }
}

pub struct Queues {
    pub send: Arc<Cq>,
    pub recv: Arc<Cq>,
    pub srq: Option<Arc<Srq>>,
}

impl Queues {
    pub fn one(cq: &Arc<Cq>) -> Self {
        Self { send: cq.clone(), recv: cq.clone(), srq: None }
    }
}

pub struct Qp {
    pub raw: *mut ibv_qp,
    pub pd: Arc<Pd>,
    pub queues: Queues,
}
unsafe impl Send for Qp {}
unsafe impl Sync for Qp {}

pub const RC: ibv_qp_type::Type = ibv_qp_type::IBV_QPT_RC;
pub const UC: ibv_qp_type::Type = ibv_qp_type::IBV_QPT_UC;
pub const UD: ibv_qp_type::Type = ibv_qp_type::IBV_QPT_UD;

impl Qp {
    pub fn new(pd: &Arc<Pd>, kind: ibv_qp_type::Type, queues: Queues) -> Self {
        Self::with_signals(pd, kind, queues, false)
    }

    /// Creates a queue pair whose requests all complete visibly if `all`.
    pub fn with_signals(pd: &Arc<Pd>, kind: ibv_qp_type::Type, queues: Queues, all: bool) -> Self {
        let cap = ibv_qp_cap {
            max_send_wr: 32,
            max_recv_wr: 32,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: queues.send.0,
            recv_cq: queues.recv.0,
            srq: queues.srq.as_ref().map_or(ptr::null_mut(), |srq| srq.0),
            cap,
            qp_type: kind,
            sq_sig_all: all.into(),
        };
        let raw = unsafe { ibv_create_qp(pd.0, &mut init) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Self { raw, pd: pd.clone(), queues }
    }

    pub fn number(&self) -> u32 {
        unsafe { (*self.raw).qp_num }
    }

    pub fn modify(&self, attr: &ibv_qp_attr, mask: ibv_qp_attr_mask) -> i32 {
        unsafe { ibv_modify_qp(self.raw, ptr::from_ref(attr).cast_mut(), mask.0 as i32) }
    }

    pub fn to(&self, state: ibv_qp_state::Type) -> i32 {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = state;
        self.modify(&attr, ibv_qp_attr_mask::IBV_QP_STATE)
    }

    pub fn query(&self) -> (ibv_qp_attr, ibv_qp_init_attr) {
        let (mut attr, mut init) = (zeroed(), zeroed());
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
        assert_eq!(unsafe { ibv_query_qp(self.raw, &mut attr, mask, &mut init) }, 0);
        (attr, init)
    }

    pub fn state(&self) -> ibv_qp_state::Type {
        self.query().0.qp_state
    }

    /// Connects to queue pair `peer` at `route`; `change` may modify the attributes.
    pub fn connect(&self, peer: u32, route: ibv_ah_attr, change: impl Fn(&mut ibv_qp_attr)) {
        use ibv_qp_attr_mask as m;
        let reliable = unsafe { (*self.raw).qp_type } == RC;
        let mut attr: ibv_qp_attr = zeroed();
        attr.port_num = 1;
        attr.qp_access_flags = ALL;
        attr.path_mtu = ibv_mtu::IBV_MTU_4096;
        attr.dest_qp_num = peer;
        attr.ah_attr = route;
        attr.max_dest_rd_atomic = 4;
        attr.max_rd_atomic = 4;
        attr.min_rnr_timer = 1;
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        change(&mut attr);
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        let mask = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS;
        assert_eq!(self.modify(&attr, mask), 0, "to INIT");
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_AV
            | m::IBV_QP_PATH_MTU
            | m::IBV_QP_DEST_QPN
            | m::IBV_QP_RQ_PSN;
        let more = m::IBV_QP_MAX_DEST_RD_ATOMIC | m::IBV_QP_MIN_RNR_TIMER;
        assert_eq!(self.modify(&attr, if reliable { mask | more } else { mask }), 0, "to RTR");
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        let mask = m::IBV_QP_STATE | m::IBV_QP_SQ_PSN;
        let more = m::IBV_QP_TIMEOUT
            | m::IBV_QP_RETRY_CNT
            | m::IBV_QP_RNR_RETRY
            | m::IBV_QP_MAX_QP_RD_ATOMIC;
        assert_eq!(self.modify(&attr, if reliable { mask | more } else { mask }), 0, "to RTS");
    }

    pub fn ready_for_datagrams(&self, qkey: u32) {
        use ibv_qp_attr_mask as m;
        let mut attr: ibv_qp_attr = zeroed();
        attr.port_num = 1;
        attr.qkey = qkey;
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        let mask = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_QKEY;
        assert_eq!(self.modify(&attr, mask), 0);
        assert_eq!(self.to(ibv_qp_state::IBV_QPS_RTR), 0);
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        assert_eq!(self.modify(&attr, m::IBV_QP_STATE | m::IBV_QP_SQ_PSN), 0);
    }

    pub fn post_recv(&self, id: u64, mut list: Vec<ibv_sge>) {
        let mut wr = receive(id, &mut list);
        assert_eq!(unsafe { ibv_post_recv(self.raw, &mut wr, &mut ptr::null_mut()) }, 0);
    }

    pub fn post(&self, work: Work) {
        assert_eq!(self.try_post(vec![work]), 0);
    }

    pub fn try_post(&self, mut works: Vec<Work>) -> i32 {
        let mut wrs: Vec<_> = works.iter_mut().map(Work::raw).collect();
        for at in 1..wrs.len() {
            let next = &raw mut wrs[at];
            wrs[at - 1].next = next;
        }
        unsafe { ibv_post_send(self.raw, wrs.as_mut_ptr(), &mut ptr::null_mut()) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        assert_eq!(unsafe { ibv_destroy_qp(self.raw) }, 0);
    }
}

pub struct Work {
    pub id: u64,
    pub opcode: ibv_wr_opcode::Type,
    pub list: Vec<ibv_sge>,
    pub flags: u32,
    pub immediate: u32,
    pub remote: (u64, u32),
    pub operands: (u64, u64),
    pub to: Option<(Arc<Ah>, u32, u32)>,
}

impl Work {
    pub fn new(id: u64, opcode: ibv_wr_opcode::Type, list: Vec<ibv_sge>) -> Self {
        let (remote, operands) = ((0, 0), (0, 0));
        Self { id, opcode, list, flags: SIGNALED, immediate: 0, remote, operands, to: None }
    }

    pub fn send(id: u64, list: Vec<ibv_sge>) -> Self {
        Self::new(id, ibv_wr_opcode::IBV_WR_SEND, list)
    }

    pub fn write(id: u64, list: Vec<ibv_sge>, mr: &Mr, from: u64) -> Self {
        Self::new(id, ibv_wr_opcode::IBV_WR_RDMA_WRITE, list).at(mr.address() + from, mr.key())
    }

    pub fn read(id: u64, list: Vec<ibv_sge>, mr: &Mr, from: u64) -> Self {
        Self::new(id, ibv_wr_opcode::IBV_WR_RDMA_READ, list).at(mr.address() + from, mr.key())
    }

    pub fn at(mut self, address: u64, key: u32) -> Self {
        self.remote = (address, key);
        self
    }

    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    pub fn immediate(mut self, immediate: u32) -> Self {
        self.immediate = immediate;
        self
    }

    pub fn operands(mut self, compare_add: u64, swap: u64) -> Self {
        self.operands = (compare_add, swap);
        self
    }

    pub fn to(mut self, ah: &Arc<Ah>, number: u32, qkey: u32) -> Self {
        self.to = Some((ah.clone(), number, qkey));
        self
    }

    fn raw(&mut self) -> ibv_send_wr {
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = self.id;
        wr.sg_list = self.list.as_mut_ptr();
        wr.num_sge = self.list.len() as i32;
        wr.opcode = self.opcode;
        wr.send_flags = self.flags;
        wr.imm_data_invalidated_rkey_union.imm_data = self.immediate.to_be();
        let (remote_addr, rkey) = self.remote;
        match (self.opcode, &self.to) {
            (_, Some((ah, remote_qpn, remote_qkey))) => {
                wr.wr.ud = ud_t { ah: ah.0, remote_qpn: *remote_qpn, remote_qkey: *remote_qkey };
            }
            (
                ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
                | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
                None,
            ) => {
                let (compare_add, swap) = self.operands;
                wr.wr.atomic = atomic_t { remote_addr, compare_add, swap, rkey };
            }
            _ => wr.wr.rdma = rdma_t { remote_addr, rkey },
        }
        wr
    }
}

/// Two connected queue pairs of one device, each with a completion queue, and memory.
pub struct Pair {
    pub a: Qp,
    pub b: Qp,
    pub source: Mr,
    pub target: Mr,
    pub pd: Arc<Pd>,
    pub context: Arc<Context>,
}

impl Pair {
    pub fn new(kind: ibv_qp_type::Type) -> Self {
        Self::with(kind, None, |_| {})
    }

    pub fn with(
        kind: ibv_qp_type::Type,
        srq: Option<(u32, u32)>,
        change: impl Fn(&mut ibv_qp_attr),
    ) -> Self {
        let context = Context::open(0);
        let pd = Pd::new(&context);
        let cqs = [Cq::new(&context, 127), Cq::new(&context, 127)];
        let srq = srq.map(|(max_wr, max_sge)| Srq::new(&pd, max_wr, max_sge));
        let a = Qp::new(&pd, kind, Queues::one(&cqs[0]));
        let b = Qp::new(&pd, kind, Queues { srq, ..Queues::one(&cqs[1]) });
        let route = context.route();
        a.connect(b.number(), route, &change);
        b.connect(a.number(), route, &change);
        let (mut source, target) = (Mr::new(&pd, 8192, LOCAL), Mr::new(&pd, 8192, ALL));
        source.fill(|at| (at * 7 + at / 256) as u8);
        Self { a, b, source, target, pd, context }
    }

    /// Asserts that the next completions of `a` are successes of `ids`.
    #[track_caller]
    pub fn succeed(&self, ids: std::ops::Range<u64>) {
        for id in ids {
            self.a.queues.send.ok(id);
        }
    }

    pub fn srq(&self) -> &Srq {
        self.b.queues.srq.as_ref().unwrap()
    }
}

/// Calls `mlx5dv_init_obj`, which the binding lacks.
pub fn init_obj(object: &mut mlx5dv_obj, kinds: u64) {
    // SAFETY: libmlx5 has this function, with this signature.
    unsafe {
        let init: extern "C" fn(*mut mlx5dv_obj, u64) -> c_int =
            std::mem::transmute(libmlx5(c"mlx5dv_init_obj"));
        assert_eq!(init(object, kinds), 0);
    }
}

/// Returns a function of libmlx5.
pub fn libmlx5(name: &std::ffi::CStr) -> *mut std::ffi::c_void {
    // SAFETY: the library is loaded already, by libibverbs.
    unsafe {
        let library = libc::dlopen(c"libmlx5.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let symbol = libc::dlsym(library, name.as_ptr());
        assert!(!symbol.is_null());
        symbol
    }
}
