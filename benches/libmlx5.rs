//! Instructions of this crate and of libmlx5 alone, on an emulated ConnectX: user space only, as on
//! a NIC.
//!
//! ```text
//! libmlx5 side=bare|extended|awaited|batch [depth=1] [rounds=1000]
//! ```
//!
//! Each round posts `depth` WRITEs of 8 bytes, lets the device execute them, and takes the
//! completions:
//!
//! - `bare`: `ibv_post_send` and `ibv_poll_cq`;
//! - `extended`: `ibv_post_send` and `ibv_start_poll`;
//! - `awaited`: futures of this crate;
//! - `batch`: one batch of this crate.
//!
//! Only functions named `counted_*` count; `scripts/instructions libmlx5` counts them.

#![allow(unsafe_code, missing_docs, clippy::undocumented_unsafe_blocks)]
// Every `unsafe` here calls libibverbs with live objects, as in the module below.

#[path = "../testing/emulated-connectx/tests/common/mod.rs"]
mod verbs;

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use emulated_connectx::EmulatedConnectX;
use rdma_sys::*;
use tokio_rdma::op::{BatchOp, Write};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair,
    RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const WORD: usize = 8;
/// Completions polled at once, like in this crate.
const BATCH: usize = 32;

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
        ("depth", "1".into()),
        ("rounds", "1000".into()),
    ]);
    for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
        let (name, value) = argument
            .split_once('=')
            .ok_or_else(|| format!("invalid argument {argument}, must be name=value"))?;
        *values.get_mut(name).ok_or_else(|| format!("unknown argument {name}"))? = value.to_owned();
    }
    let (depth, rounds) = (values["depth"].parse()?, values["rounds"].parse()?);
    match &*values["side"] {
        "bare" => Bare::new(false).run(emulated, depth, rounds),
        "extended" => Bare::new(true).run(emulated, depth, rounds),
        "awaited" => Awaited::new()?.run(emulated, depth, rounds),
        "batch" => Awaited::new()?.run_batches(emulated, depth, rounds),
        other => Err(format!("unknown side {other}").into()),
    }
}

// libmlx5 alone.

struct Bare {
    qps: [verbs::Qp; 2],
    cq: Arc<verbs::Cq>,
    /// The same queue, if polled by the extended interface.
    extended: Option<*mut ibv_cq_ex>,
    memory: verbs::Mr,
}

impl Bare {
    fn new(extended: bool) -> Self {
        let context = verbs::Context::open(0);
        let pd = verbs::Pd::new(&context);
        let (cq, extended) = if extended {
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
            (verbs::Cq::from_raw(raw.cast(), &context), Some(raw))
        } else {
            (verbs::Cq::new(&context, 255), None)
        };
        let qps = [(); 2].map(|()| verbs::Qp::new(&pd, verbs::RC, verbs::Queues::one(&cq)));
        qps[0].connect(qps[1].number(), context.route(), |_| {});
        qps[1].connect(qps[0].number(), context.route(), |_| {});
        Self { qps, cq, extended, memory: verbs::Mr::new(&pd, 2 * WORD, verbs::ALL) }
    }

    fn run(&self, emulated: &EmulatedConnectX, depth: usize, rounds: usize) -> Result<()> {
        let mut element = self.memory.sge(0, WORD);
        let mut request: ibv_send_wr = verbs::zeroed();
        request.sg_list = &raw mut element;
        request.num_sge = 1;
        request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request.send_flags = verbs::SIGNALED;
        request.wr.rdma.remote_addr = self.memory.address() + WORD as u64;
        request.wr.rdma.rkey = self.memory.key();
        let mut completions: [ibv_wc; BATCH] = verbs::zeroed();
        for _ in 0..rounds {
            counted_post(self.qps[0].raw, &mut request, depth);
            emulated.run_until_idle(1 << 20);
            let mut left = depth;
            while left > 0 {
                let wanted = left.min(BATCH);
                let found = match self.extended {
                    Some(queue) => counted_take_extended(queue, &mut completions[..wanted]),
                    None => counted_take(self.cq.0, &mut completions[..wanted]),
                };
                if found == 0
                    || completions[..found]
                        .iter()
                        .any(|wc| wc.status != ibv_wc_status::IBV_WC_SUCCESS)
                {
                    return Err("a completion is missing or failed".into());
                }
                left -= found;
            }
        }
        Ok(())
    }
}

#[inline(never)]
fn counted_post(qp: *mut ibv_qp, request: &mut ibv_send_wr, depth: usize) {
    for _ in 0..depth {
        request.wr_id += 1;
        assert_eq!(unsafe { ibv_post_send(qp, request, &mut ptr::null_mut()) }, 0);
    }
}

#[inline(never)]
fn counted_take(cq: *mut ibv_cq, out: &mut [ibv_wc]) -> usize {
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

struct Awaited {
    qps: [QueuePair; 2],
    pool: Pool,
    region: ExposedRegion,
}

impl Awaited {
    fn new() -> Result<Self> {
        let device = Device::open("mlx5_0")?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
        let qps = [QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?];
        qps[0].connect(&qps[1].endpoint())?;
        qps[1].connect(&qps[0].endpoint())?;
        let region = ExposedRegion::new(&pd, vec![0; WORD], Access::REMOTE_ALL)?;
        Ok(Self { qps, pool: Pool::new(&pd, WORD, BATCH)?, region })
    }

    fn run(&self, emulated: &EmulatedConnectX, depth: usize, rounds: usize) -> Result<()> {
        let mut buffers = (0..depth)
            .map(|_| self.pool.try_alloc(WORD))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let mut writes = Vec::with_capacity(depth);
        let remote = self.region.grant();
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..rounds {
            counted_write(&self.qps[0], remote, &mut buffers, &mut writes);
            emulated.run_until_idle(1 << 20);
            counted_await(&mut context, &mut writes, &mut buffers)?;
        }
        Ok(())
    }

    fn run_batches(&self, emulated: &EmulatedConnectX, depth: usize, rounds: usize) -> Result<()> {
        let mut buffers = (0..depth)
            .map(|_| self.pool.try_alloc(WORD))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let mut batch = Batch::new();
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..rounds {
            let posted =
                counted_write_batch(&self.qps[0], self.region.grant(), &mut buffers, batch);
            emulated.run_until_idle(1 << 20);
            batch = counted_await_batch(&mut context, posted, &mut buffers)?;
        }
        Ok(())
    }
}

#[inline(never)]
fn counted_write_batch(
    qp: &QueuePair,
    remote: RemoteRegion,
    buffers: &mut Vec<BufMut>,
    mut batch: Batch<BufMut>,
) -> BatchOp<BufMut> {
    for buffer in buffers.drain(..) {
        batch.write(buffer, remote);
    }
    qp.post_batch(batch)
}

#[inline(never)]
fn counted_await_batch(
    context: &mut Context<'_>,
    mut posted: BatchOp<BufMut>,
    buffers: &mut Vec<BufMut>,
) -> Result<Batch<BufMut>> {
    let mut result = loop {
        if let Poll::Ready(result) = Pin::new(&mut posted).poll(context) {
            break result;
        }
    };
    if !result.is_ok() {
        return Err("a WRITE of the batch failed".into());
    }
    buffers.extend(result.drain());
    Ok(result.into_batch())
}

#[inline(never)]
fn counted_write(
    qp: &QueuePair,
    remote: RemoteRegion,
    buffers: &mut Vec<BufMut>,
    writes: &mut Vec<Write<BufMut>>,
) {
    for buffer in buffers.drain(..) {
        writes.push(qp.write(buffer, remote));
    }
}

#[inline(never)]
fn counted_await(
    context: &mut Context<'_>,
    writes: &mut Vec<Write<BufMut>>,
    buffers: &mut Vec<BufMut>,
) -> Result<()> {
    for mut write in writes.drain(..) {
        let buffer = loop {
            // A ready operation occasionally yields to other tasks.
            if let Poll::Ready(result) = Pin::new(&mut write).poll(context) {
                break result?;
            }
        };
        buffers.push(black_box(buffer));
    }
    Ok(())
}
