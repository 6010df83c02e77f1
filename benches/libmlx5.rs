//! Instructions of this crate and of libmlx5 alone, on an emulated ConnectX: user space only, as on
//! a NIC.
//!
//! ```text
//! libmlx5 side=SIDE [op=write|read|send] [depth=1] [rounds=256]
//! ```
//!
//! Each round posts `depth` operations of 8 bytes, lets the device execute them, and takes the
//! completions. `send` posts a receive on the other queue pair for each SEND, and takes the
//! completions of both. The sides in C:
//!
//! - `bare`: `ibv_post_send` for each operation, and `ibv_poll_cq`;
//! - `wr`: `ibv_wr_start` to `ibv_wr_complete` for each operation, and `ibv_poll_cq`;
//! - `extended`: `ibv_post_send` for each operation, and `ibv_start_poll`;
//! - `chain`: one chain of `depth` operations, of which the last is signalled, and `ibv_poll_cq`.
//!
//! The sides of this crate, which posts receives one by one, as its interface does:
//!
//! - `awaited`: one future per operation;
//! - `batch`: one batch of `depth` operations.
//!
//! `scripts/instructions libmlx5` counts the functions named `counted_*`, with all that they call,
//! after the rounds of the warm-up. They contain what a program does with an operation:
//!
//! - in C: writing a number to each work request, posting, and polling up to 32 completions at
//!   once. The other fields of the work requests are written once.
//! - in this crate: building the operations from buffers in an array, posting, polling each future
//!   until it is ready, and dropping it. Batches are filled, posted, polled, drained and emptied.
//!
//! Checking the results is not counted on either side.

#![allow(unsafe_code, missing_docs, clippy::undocumented_unsafe_blocks)]
// Every `unsafe` here calls libibverbs with live objects, as in the module below, or accesses the
// elements of `Slots`, whose owner is documented there.

#[path = "../testing/emulated-connectx/tests/common/mod.rs"]
mod verbs;

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use emulated_connectx::EmulatedConnectX;
use rdma_ibverbs::ffi::*;
use tokio_rdma::op::{BatchOp, Read, Recv, Send, Write};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, OpError, Pool,
    QueuePair, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const WORD: usize = 8;
/// Completions polled at once, as in this crate.
const TAKEN_AT_ONCE: usize = 32;
/// Rounds before counting. They fill caches, allocate, and bind the symbols of libraries.
const WARM_UP: usize = 128;

fn main() -> ExitCode {
    let emulated = verbs::start(|options| options.manual_stepping = true);
    match run(&emulated) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("libmlx5: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(emulated: &EmulatedConnectX) -> Result<()> {
    let mut values = HashMap::from([
        ("side", "awaited".to_owned()),
        ("op", "write".into()),
        ("depth", "1".into()),
        ("rounds", "256".into()),
    ]);
    for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
        let (name, value) = argument
            .split_once('=')
            .ok_or_else(|| format!("invalid argument {argument}, must be name=value"))?;
        *values.get_mut(name).ok_or_else(|| format!("unknown argument {name}"))? = value.to_owned();
    }
    let (depth, rounds) = (values["depth"].parse()?, values["rounds"].parse()?);
    let op = match &*values["op"] {
        "write" => Op::Write,
        "read" => Op::Read,
        "send" => Op::Send,
        other => return Err(format!("unknown operation {other}").into()),
    };
    match &*values["side"] {
        "bare" => run_side(emulated, Bare::new(op, depth, Posting::Singly, false), rounds),
        "wr" => run_side(emulated, Bare::new(op, depth, Posting::Builder, false), rounds),
        "extended" => run_side(emulated, Bare::new(op, depth, Posting::Singly, true), rounds),
        "chain" => run_side(emulated, Bare::new(op, depth, Posting::Chain, false), rounds),
        "awaited" => match op {
            Op::Write => run_side(emulated, Awaited::<Writes>::new(depth)?, rounds),
            Op::Read => run_side(emulated, Awaited::<Reads>::new(depth)?, rounds),
            Op::Send => run_side(emulated, Awaited::<Sends>::new(depth)?, rounds),
        },
        "batch" => match op {
            Op::Write => run_side(emulated, Batched::<Writes>::new(depth)?, rounds),
            Op::Read => run_side(emulated, Batched::<Reads>::new(depth)?, rounds),
            Op::Send => run_side(emulated, Batched::<Sends>::new(depth)?, rounds),
        },
        other => Err(format!("unknown side {other}").into()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Write,
    Read,
    Send,
}

/// A program, in C or with this crate.
trait Side {
    /// Posts the operations of a round.
    fn post(&mut self);

    /// Takes the completions of a round, and checks them.
    fn take(&mut self) -> Result<()>;
}

fn run_side(emulated: &EmulatedConnectX, mut side: impl Side, rounds: usize) -> Result<()> {
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            warmed_up();
        }
        side.post();
        emulated.run_until_idle(1 << 20);
        side.take()?;
    }
    Ok(())
}

/// Marks the end of the warm-up: callgrind sets its counters to zero here.
#[inline(never)]
fn warmed_up() {
    black_box(());
}

// libmlx5 alone.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Posting {
    Singly,
    Builder,
    Chain,
}

struct Bare {
    op: Op,
    depth: usize,
    posting: Posting,
    qps: [verbs::Qp; 2],
    cq: Arc<verbs::Cq>,
    /// The same queue, if polled by the extended interface.
    extended: Option<*mut ibv_cq_ex>,
    /// One work request, or a chain of `depth`.
    requests: Vec<ibv_send_wr>,
    receives: Vec<ibv_recv_wr>,
    _elements: Box<[ibv_sge; 2]>,
    _memory: verbs::Mr,
    completions: [ibv_wc; TAKEN_AT_ONCE],
}

impl Bare {
    fn new(op: Op, depth: usize, posting: Posting, extended: bool) -> Self {
        let context = verbs::Context::open(0);
        let pd = verbs::Pd::new(&context);
        let (cq, extended) = if extended {
            let raw = extended_queue(&context);
            (verbs::Cq::from_raw(raw.cast(), &context), Some(raw))
        } else {
            (verbs::Cq::new(&context, 255), None)
        };
        let qps = [(); 2].map(|()| match posting {
            Posting::Builder => builder_queue_pair(&pd, &context, &cq),
            _ => verbs::Qp::new(&pd, verbs::RC, verbs::Queues::one(&cq)),
        });
        qps[0].connect(qps[1].number(), context.route(), |_| {});
        qps[1].connect(qps[0].number(), context.route(), |_| {});

        let memory = verbs::Mr::new(&pd, 2 * WORD, verbs::ALL);
        let mut elements = Box::new([memory.sge(0, WORD), memory.sge(WORD, WORD)]);
        let length = if posting == Posting::Chain { depth } else { 1 };
        let mut requests = Vec::new();
        requests.resize_with(length, || {
            let mut request: ibv_send_wr = verbs::zeroed();
            request.sg_list = &raw mut elements[0];
            request.num_sge = 1;
            request.opcode = match op {
                Op::Write => WRITE,
                Op::Read => READ,
                Op::Send => SEND,
            };
            request.wr.rdma.remote_addr = memory.address() + WORD as u64;
            request.wr.rdma.rkey = memory.key();
            request
        });
        requests[length - 1].send_flags = verbs::SIGNALED;
        let mut receives = Vec::new();
        receives.resize_with(length, || {
            let mut receive: ibv_recv_wr = verbs::zeroed();
            receive.sg_list = &raw mut elements[1];
            receive.num_sge = 1;
            receive
        });
        for at in 1..length {
            requests[at - 1].next = &raw mut requests[at];
            receives[at - 1].next = &raw mut receives[at];
        }
        let completions = verbs::zeroed();
        Self {
            op,
            depth,
            posting,
            qps,
            cq,
            extended,
            requests,
            receives,
            _elements: elements,
            _memory: memory,
            completions,
        }
    }
}

impl Side for Bare {
    fn post(&mut self) {
        let (depth, [qp, peer]) = (black_box(self.depth), [self.qps[0].raw, self.qps[1].raw]);
        if self.op == Op::Send {
            match self.posting {
                Posting::Chain => counted_post_receive_chain(peer, &mut self.receives),
                _ => counted_post_receives_bare(peer, &mut self.receives[0], depth),
            }
        }
        match (self.posting, self.op) {
            (Posting::Singly, _) if depth == 1 => counted_post_bare_one(qp, &mut self.requests[0]),
            (Posting::Singly, _) => counted_post_bare(qp, &mut self.requests[0], depth),
            (Posting::Chain, _) => counted_post_chain(qp, &mut self.requests),
            (Posting::Builder, op) => {
                let qp = unsafe { ibv_qp_to_qp_ex(qp) };
                let request = &mut self.requests[0];
                match op {
                    Op::Write => counted_post_builder::<WRITE>(qp, request, depth),
                    Op::Read => counted_post_builder::<READ>(qp, request, depth),
                    Op::Send => counted_post_builder::<SEND>(qp, request, depth),
                }
            }
        }
    }

    fn take(&mut self) -> Result<()> {
        let receives = if self.op == Op::Send { self.depth } else { 0 };
        let mut left = receives + if self.posting == Posting::Chain { 1 } else { self.depth };
        while left > 0 {
            let out = &mut self.completions[..left.min(TAKEN_AT_ONCE)];
            let found = match self.extended {
                Some(queue) => counted_take_extended(queue, out),
                None => counted_take_bare(self.cq.0, out),
            };
            let succeeded = |wc: &ibv_wc| wc.status == ibv_wc_status::IBV_WC_SUCCESS;
            if found == 0 || !out[..found].iter().all(succeeded) {
                return Err("a completion is missing or failed".into());
            }
            left -= found;
        }
        Ok(())
    }
}

const WRITE: ibv_wr_opcode::Type = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
const READ: ibv_wr_opcode::Type = ibv_wr_opcode::IBV_WR_RDMA_READ;
const SEND: ibv_wr_opcode::Type = ibv_wr_opcode::IBV_WR_SEND;

fn extended_queue(context: &verbs::Context) -> *mut ibv_cq_ex {
    let mut attr: ibv_cq_init_attr_ex = verbs::zeroed();
    attr.cqe = 255;
    attr.wc_flags = u64::from(
        (ibv_create_cq_wc_flags::IBV_WC_EX_WITH_BYTE_LEN
            | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_IMM
            | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM
            | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SRC_QP)
            .0,
    );
    let raw = unsafe { ibv_create_cq_ex(context.0, &raw mut attr) };
    assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
    raw
}

/// Creates a queue pair for `ibv_wr_start`.
fn builder_queue_pair(
    pd: &Arc<verbs::Pd>,
    context: &verbs::Context,
    cq: &Arc<verbs::Cq>,
) -> verbs::Qp {
    use ibv_qp_create_send_ops_flags as op;
    let mut init: ibv_qp_init_attr_ex = verbs::zeroed();
    init.send_cq = cq.0;
    init.recv_cq = cq.0;
    init.cap = ibv_qp_cap {
        max_send_wr: 32,
        max_recv_wr: 32,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 64,
    };
    init.qp_type = verbs::RC;
    init.pd = pd.0;
    init.comp_mask = (ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
        | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
        .0;
    init.send_ops_flags = u64::from(
        (op::IBV_QP_EX_WITH_RDMA_WRITE | op::IBV_QP_EX_WITH_RDMA_READ | op::IBV_QP_EX_WITH_SEND).0,
    );
    let raw = unsafe { ibv_create_qp_ex(context.0, &raw mut init) };
    assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
    verbs::Qp { raw, pd: pd.clone(), queues: verbs::Queues::one(cq) }
}

#[inline(never)]
fn counted_post_bare(qp: *mut ibv_qp, request: &mut ibv_send_wr, depth: usize) {
    for _ in 0..depth {
        post_bare(qp, request);
    }
}

#[inline(never)]
fn counted_post_bare_one(qp: *mut ibv_qp, request: &mut ibv_send_wr) {
    post_bare(qp, request);
}

#[inline(always)]
fn post_bare(qp: *mut ibv_qp, request: &mut ibv_send_wr) {
    request.wr_id += 1;
    assert_eq!(unsafe { ibv_post_send(qp, request, &mut ptr::null_mut()) }, 0);
}

#[inline(never)]
fn counted_post_receives_bare(qp: *mut ibv_qp, request: &mut ibv_recv_wr, depth: usize) {
    for _ in 0..depth {
        request.wr_id += 1;
        assert_eq!(unsafe { ibv_post_recv(qp, request, &mut ptr::null_mut()) }, 0);
    }
}

#[inline(never)]
fn counted_post_chain(qp: *mut ibv_qp, chain: &mut [ibv_send_wr]) {
    for request in &mut *chain {
        request.wr_id += 1;
    }
    assert_eq!(unsafe { ibv_post_send(qp, chain.as_mut_ptr(), &mut ptr::null_mut()) }, 0);
}

#[inline(never)]
fn counted_post_receive_chain(qp: *mut ibv_qp, chain: &mut [ibv_recv_wr]) {
    for request in &mut *chain {
        request.wr_id += 1;
    }
    assert_eq!(unsafe { ibv_post_recv(qp, chain.as_mut_ptr(), &mut ptr::null_mut()) }, 0);
}

/// Posts what `request` describes.
#[inline(never)]
fn counted_post_builder<const OPCODE: ibv_wr_opcode::Type>(
    qp: *mut ibv_qp_ex,
    request: &mut ibv_send_wr,
    depth: usize,
) {
    for _ in 0..depth {
        request.wr_id += 1;
        unsafe {
            ibv_wr_start(qp);
            (*qp).wr_id = request.wr_id;
            (*qp).wr_flags = request.send_flags;
            let remote = &request.wr.rdma;
            match OPCODE {
                WRITE => ibv_wr_rdma_write(qp, remote.rkey, remote.remote_addr),
                READ => ibv_wr_rdma_read(qp, remote.rkey, remote.remote_addr),
                _ => ibv_wr_send(qp),
            }
            let element = &*request.sg_list;
            ibv_wr_set_sge(qp, element.lkey, element.addr, element.length);
            assert_eq!(ibv_wr_complete(qp), 0);
        }
    }
}

#[inline(never)]
fn counted_take_bare(cq: *mut ibv_cq, out: &mut [ibv_wc]) -> usize {
    let found = unsafe { ibv_poll_cq(cq, out.len() as i32, out.as_mut_ptr()) };
    usize::try_from(found).unwrap_or(0)
}

/// Reads what `ibv_poll_cq` returns for a completion.
#[inline(never)]
fn counted_take_extended(cq: *mut ibv_cq_ex, out: &mut [ibv_wc]) -> usize {
    unsafe {
        let mut attr: ibv_poll_cq_attr = verbs::zeroed();
        if ibv_start_poll(cq, &raw mut attr) != 0 {
            return 0;
        }
        let mut found = 0;
        loop {
            let wc = &mut out[found];
            (wc.wr_id, wc.status) = ((*cq).wr_id, (*cq).status);
            wc.opcode = ibv_wc_read_opcode(cq);
            wc.wc_flags = ibv_wc_read_wc_flags(cq);
            wc.byte_len = ibv_wc_read_byte_len(cq);
            wc.qp_num = ibv_wc_read_qp_num(cq);
            found += 1;
            if found == out.len() || ibv_next_poll(cq) != 0 {
                break;
            }
        }
        ibv_end_poll(cq);
        found
    }
}

// This crate.

/// An operation of this crate that returns its buffer.
trait Operation {
    type Future: Future<Output = std::result::Result<BufMut, OpError<BufMut>>> + Unpin;
    const RECEIVED: bool = false;

    fn post(qp: &QueuePair, buffer: BufMut, remote: RemoteRegion) -> Self::Future;
    fn add(batch: &mut Batch<BufMut>, buffer: BufMut, remote: RemoteRegion);
}

struct Writes;
struct Reads;
struct Sends;

impl Operation for Writes {
    type Future = Write<BufMut>;

    #[inline(always)]
    fn post(qp: &QueuePair, buffer: BufMut, remote: RemoteRegion) -> Write<BufMut> {
        qp.write(buffer, remote)
    }

    #[inline(always)]
    fn add(batch: &mut Batch<BufMut>, buffer: BufMut, remote: RemoteRegion) {
        batch.write(buffer, remote);
    }
}

impl Operation for Reads {
    type Future = Read<BufMut>;

    #[inline(always)]
    fn post(qp: &QueuePair, buffer: BufMut, remote: RemoteRegion) -> Read<BufMut> {
        qp.read(buffer, remote)
    }

    #[inline(always)]
    fn add(batch: &mut Batch<BufMut>, buffer: BufMut, remote: RemoteRegion) {
        batch.read(buffer, remote);
    }
}

impl Operation for Sends {
    type Future = Send<BufMut>;
    const RECEIVED: bool = true;

    #[inline(always)]
    fn post(qp: &QueuePair, buffer: BufMut, _remote: RemoteRegion) -> Send<BufMut> {
        qp.send(buffer)
    }

    #[inline(always)]
    fn add(batch: &mut Batch<BufMut>, buffer: BufMut, _remote: RemoteRegion) {
        batch.send(buffer);
    }
}

/// An array whose elements move in and out without any bookkeeping that would be counted.
///
/// Between rounds, all buffers are initialised, and neither futures nor results are. None is ever
/// dropped: the process ends instead.
type Slots<T> = Box<[MaybeUninit<T>]>;

fn slots<T>(count: usize) -> Slots<T> {
    Box::new_uninit_slice(count)
}

/// The results of futures `F`.
type Results<F> = Slots<<F as Future>::Output>;

struct Endpoints {
    qps: [QueuePair; 2],
    pool: Pool,
    region: ExposedRegion,
}

impl Endpoints {
    fn new(depth: usize) -> Result<Self> {
        let device = Device::open("mlx5_0")?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
        let qps = [QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?];
        qps[0].connect(&qps[1].endpoint())?;
        qps[1].connect(&qps[0].endpoint())?;
        let region = ExposedRegion::new(&pd, vec![0; WORD], Access::REMOTE_ALL)?;
        Ok(Self { qps, pool: Pool::new(&pd, WORD, 2 * depth)?, region })
    }

    fn buffers(&self, count: usize) -> Result<Vec<BufMut>> {
        (0..count).map(|_| Ok(self.pool.try_alloc(WORD)?)).collect()
    }

    fn slots(&self, count: usize) -> Result<Slots<BufMut>> {
        Ok(self.buffers(count)?.into_iter().map(MaybeUninit::new).collect())
    }
}

/// The receives of the SENDs of a round.
struct Receives {
    buffers: Slots<BufMut>,
    futures: Slots<Recv<BufMut>>,
    results: Results<Recv<BufMut>>,
}

impl Receives {
    fn new(endpoints: &Endpoints, count: usize) -> Result<Self> {
        let buffers = endpoints.slots(count)?;
        Ok(Self { buffers, futures: slots(count), results: slots(count) })
    }

    fn post(&mut self, qp: &QueuePair) {
        if !self.buffers.is_empty() {
            counted_post_receives(qp, &self.buffers, &mut self.futures);
        }
    }

    fn take(&mut self) -> Result<()> {
        if !self.buffers.is_empty() {
            let mut context = Context::from_waker(Waker::noop());
            counted_take(&mut context, &mut self.futures, &mut self.results);
            for (buffer, result) in self.buffers.iter_mut().zip(&self.results) {
                let received = unsafe { result.assume_init_read() }?;
                if received.len != WORD {
                    return Err("a message has another length".into());
                }
                buffer.write(received.buffer);
            }
        }
        Ok(())
    }
}

struct Awaited<O: Operation> {
    receives: Receives,
    buffers: Slots<BufMut>,
    futures: Slots<O::Future>,
    results: Results<O::Future>,
    endpoints: Endpoints,
}

impl<O: Operation> Awaited<O> {
    fn new(depth: usize) -> Result<Self> {
        let endpoints = Endpoints::new(depth)?;
        Ok(Self {
            receives: Receives::new(&endpoints, if O::RECEIVED { depth } else { 0 })?,
            buffers: endpoints.slots(depth)?,
            futures: slots(depth),
            results: slots(depth),
            endpoints,
        })
    }
}

impl<O: Operation> Side for Awaited<O> {
    fn post(&mut self) {
        let Endpoints { qps: [qp, peer], region, .. } = &self.endpoints;
        self.receives.post(peer);
        let remote = black_box(region.grant());
        if let ([buffer], [future]) = (&self.buffers[..], &mut self.futures[..]) {
            future.write(counted_post_one::<O>(qp, remote, unsafe { buffer.assume_init_read() }));
        } else {
            counted_post::<O>(qp, remote, &self.buffers, &mut self.futures);
        }
    }

    fn take(&mut self) -> Result<()> {
        let mut context = Context::from_waker(Waker::noop());
        if let ([future], [result]) = (&self.futures[..], &mut self.results[..]) {
            let future = unsafe { future.assume_init_read() };
            result.write(counted_take_one(&mut context, future));
        } else {
            counted_take(&mut context, &mut self.futures, &mut self.results);
        }
        for (buffer, result) in self.buffers.iter_mut().zip(&self.results) {
            buffer.write(unsafe { result.assume_init_read() }?);
        }
        self.receives.take()
    }
}

struct Batched<O: Operation> {
    receives: Receives,
    buffers: Vec<BufMut>,
    /// Empty, to be filled and posted.
    batch: Option<Batch<BufMut>>,
    posted: Option<BatchOp<BufMut>>,
    endpoints: Endpoints,
    operation: std::marker::PhantomData<O>,
}

impl<O: Operation> Batched<O> {
    fn new(depth: usize) -> Result<Self> {
        let endpoints = Endpoints::new(depth)?;
        Ok(Self {
            receives: Receives::new(&endpoints, if O::RECEIVED { depth } else { 0 })?,
            buffers: (0..depth)
                .map(|_| endpoints.pool.try_alloc(WORD))
                .collect::<std::result::Result<_, _>>()?,
            batch: Some(Batch::new()),
            posted: None,
            endpoints,
            operation: std::marker::PhantomData,
        })
    }
}

impl<O: Operation> Side for Batched<O> {
    fn post(&mut self) {
        let Endpoints { qps: [qp, peer], region, .. } = &self.endpoints;
        self.receives.post(peer);
        let batch = self.batch.take().unwrap_or_default();
        self.posted =
            Some(counted_post_batch::<O>(qp, black_box(region.grant()), &mut self.buffers, batch));
    }

    fn take(&mut self) -> Result<()> {
        let posted = self.posted.take().ok_or("no batch was posted")?;
        let mut context = Context::from_waker(Waker::noop());
        let batch = counted_take_batch(&mut context, posted, &mut self.buffers);
        self.batch = Some(batch.ok_or("an operation of the batch failed")?);
        self.receives.take()
    }
}

#[inline(never)]
fn counted_post<O: Operation>(
    qp: &QueuePair,
    remote: RemoteRegion,
    buffers: &[MaybeUninit<BufMut>],
    futures: &mut [MaybeUninit<O::Future>],
) {
    for (buffer, future) in buffers.iter().zip(futures) {
        future.write(O::post(qp, unsafe { buffer.assume_init_read() }, remote));
    }
}

#[inline(never)]
fn counted_post_one<O: Operation>(
    qp: &QueuePair,
    remote: RemoteRegion,
    buffer: BufMut,
) -> O::Future {
    O::post(qp, buffer, remote)
}

#[inline(never)]
fn counted_post_receives(
    qp: &QueuePair,
    buffers: &[MaybeUninit<BufMut>],
    futures: &mut [MaybeUninit<Recv<BufMut>>],
) {
    for (buffer, future) in buffers.iter().zip(futures) {
        future.write(qp.recv(unsafe { buffer.assume_init_read() }));
    }
}

/// Polls each future until it is ready, because a ready operation occasionally yields to other
/// tasks.
#[inline(never)]
fn counted_take<F: Future + Unpin>(
    context: &mut Context<'_>,
    futures: &mut [MaybeUninit<F>],
    results: &mut [MaybeUninit<F::Output>],
) {
    for (future, out) in futures.iter_mut().zip(results) {
        out.write(ready(context, unsafe { future.assume_init_mut() }));
        unsafe { future.assume_init_drop() };
    }
}

#[inline(never)]
fn counted_take_one<F: Future + Unpin>(context: &mut Context<'_>, mut future: F) -> F::Output {
    ready(context, &mut future)
}

#[inline(always)]
fn ready<F: Future + Unpin>(context: &mut Context<'_>, future: &mut F) -> F::Output {
    loop {
        if let Poll::Ready(result) = Pin::new(&mut *future).poll(context) {
            return result;
        }
    }
}

#[inline(never)]
fn counted_post_batch<O: Operation>(
    qp: &QueuePair,
    remote: RemoteRegion,
    buffers: &mut Vec<BufMut>,
    mut batch: Batch<BufMut>,
) -> BatchOp<BufMut> {
    for buffer in buffers.drain(..) {
        O::add(&mut batch, buffer, remote);
    }
    qp.post_batch(batch)
}

/// Returns the emptied batch, or `None` if an operation failed.
#[inline(never)]
fn counted_take_batch(
    context: &mut Context<'_>,
    mut posted: BatchOp<BufMut>,
    buffers: &mut Vec<BufMut>,
) -> Option<Batch<BufMut>> {
    let mut result = ready(context, &mut posted);
    if !result.is_ok() {
        return None;
    }
    result.append_to(buffers);
    Some(result.into_batch())
}
