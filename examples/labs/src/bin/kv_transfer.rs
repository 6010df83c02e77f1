//! Lab 7: a paged key-value cache goes from a prefill node to a decode node. `docs/labs/07-kv-transfer.md`
//!
//! A model that serves prompts keeps keys and values of all tokens so far, for each layer, in blocks of some tokens. One node
//! fills them (prefill), another goes on from there (decode). Blocks lie on whatever pages were free, at either node.
//!
//! ```text
//!   decode                                                prefill
//!     │ ─── SEND: number, pages that are free here ─────────▶ │
//!     │ ◀── layer 0: WRITE, WRITE, ..., WRITE with immediate ─ │   one doorbell, one completion
//!     │ ◀── layer 1: ...                                       │   while layer 2 is computed
//! ```

use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Peer, Result, check, in_time};
use tokio_rdma::op::Recv;
use tokio_rdma::{
    Batch, BufMut, CompletionMode, ExposedRegion, Imm, Pool, QueuePair, RemoteRegion,
};

/// Layers of the model, pages of a node, blocks of a prompt.
const LAYERS: usize = 8;
const PAGES: usize = 64;
const BLOCKS: usize = 24;
/// Bytes of one layer of a block: keys and values of 16 tokens, 8 heads of 64 numbers of 2 bytes.
const BLOCK: usize = 2 * 16 * 8 * 64 * 2;

fn main() -> ExitCode {
    labs::run("kv_transfer", decode, prefill)
}

fn prompts(peer: &Peer) -> u32 {
    if peer.quick { 3 } else { 50 }
}

async fn prefill(mut peer: Peer) -> Result<()> {
    let mut node = Node::new(&mut peer, 1).await?;
    // Where blocks may be written. The first request has its receive when the other node hears of ours.
    node.remote = Some(peer.offered().await?);
    node.receives.push(node.qp.recv(node.pool.try_alloc(4096)?));
    peer.meet().await?;
    for prompt in 0..prompts(&peer) {
        node.serve(prompt).await?;
    }
    peer.meet().await
}

async fn decode(mut peer: Peer) -> Result<()> {
    let mut node = Node::new(&mut peer, 2).await?;
    peer.offer(&node.cache).await?;
    peer.meet().await?;
    let (prompts, mut times) = (prompts(&peer), Vec::new());
    for prompt in 0..prompts {
        times.push(node.take(prompt).await?);
    }
    times.sort_unstable();
    let middle = times[times.len() / 2];
    let bytes = LAYERS * BLOCKS * BLOCK;
    println!(
        "{prompts} prompts of {} MiB in {BLOCKS} blocks and {LAYERS} layers, each block verified",
        bytes >> 20
    );
    println!(
        "{:.2} ms each (p50), {:.0} MB/s",
        middle.as_secs_f64() * 1e3,
        bytes as f64 / 1e6 / middle.as_secs_f64()
    );
    peer.meet().await
}

struct Node {
    qp: QueuePair,
    /// Pages of all layers.
    cache: ExposedRegion,
    pool: Pool,
    /// At the prefill node, the next request; at the decode node, the news of each layer.
    receives: Vec<Recv<BufMut>>,
    /// At the prefill node, the cache of the other.
    remote: Option<RemoteRegion>,
    /// For free pages in no order.
    random: u32,
}

impl Node {
    /// Connected to the other.
    async fn new(peer: &mut Peer, random: u32) -> Result<Self> {
        let end = peer.end(&CompletionMode::Event)?;
        let (cache, pool) = (end.expose(LAYERS * PAGES * BLOCK)?, end.pool(4096, 16)?);
        let qp = end.queue_pair()?;
        peer.connect(&qp).await?;
        Ok(Self { qp, cache, pool, receives: Vec::new(), remote: None, random })
    }

    /// Prefill: fills the blocks of a prompt, layer by layer, and writes each layer to where the other node wants it.
    async fn serve(&mut self, prompt: u32) -> Result<()> {
        let request = in_time("a request", self.receives.pop().ok_or("no receive")?).await?;
        let wanted = parse(&request.buffer, prompt)?;
        drop(request);
        self.receives.push(self.qp.recv(self.pool.try_alloc(4096)?));
        let (ours, remote) = (self.free_pages(), self.remote.ok_or("no cache to write to")?);
        for layer in 0..LAYERS {
            let mut batch = Batch::new();
            for (block, (&from, &to)) in ours.iter().zip(&wanted).enumerate() {
                self.cache.write(place(layer, from), &content(prompt, layer, block))?;
                let data = self.cache.slice(place(layer, from)..place(layer, from) + BLOCK)?;
                let start = place(layer, to) as u64;
                let there = remote.slice(start..start + BLOCK as u64)?;
                // The last one tells that the layer is there: those before it are in place by then.
                if block + 1 < BLOCKS {
                    batch.write(data, there);
                } else {
                    batch.write_with_imm(data, there, Imm(layer as u32));
                }
            }
            in_time("a layer", async { self.qp.post_batch(batch).await.into_buffers() }).await?;
        }
        Ok(())
    }

    /// Decode: asks for the blocks of a prompt, and verifies each layer when it is told of it. How long that took.
    async fn take(&mut self, prompt: u32) -> Result<Duration> {
        // Nothing of an earlier prompt may be taken for this one's.
        self.cache.write(0, &vec![0; self.cache.len()])?;
        let pages = self.free_pages();
        for _ in 0..LAYERS {
            self.receives.push(self.qp.recv(self.pool.try_alloc(0)?));
        }
        let numbers = std::iter::once(prompt).chain(pages.iter().map(|&page| page as u32));
        let request: Vec<u8> = numbers.flat_map(u32::to_be_bytes).collect();
        let start = Instant::now();
        in_time("the request", self.qp.send(self.pool.copy_from(&request)?)).await?;
        let mut time = Duration::ZERO;
        for (layer, receive) in std::mem::take(&mut self.receives).into_iter().enumerate() {
            let told = in_time("a layer", receive).await?;
            check("layer", told.imm, Some(Imm(layer as u32)))?;
            time = start.elapsed();
            let mut bytes = vec![0; BLOCK];
            for (block, &page) in pages.iter().enumerate() {
                self.cache.read(place(layer, page), &mut bytes)?;
                if bytes != content(prompt, layer, block) {
                    return Err(format!(
                        "prompt {prompt}, layer {layer}, block {block}: wrong content"
                    )
                    .into());
                }
            }
        }
        // Pages that were not offered are as they were.
        let mut bytes = vec![0; BLOCK];
        for page in (0..PAGES).filter(|page| !pages.contains(page)) {
            self.cache.read(place(LAYERS - 1, page), &mut bytes)?;
            check(
                "bytes written to a page that was not offered",
                bytes.iter().filter(|&&byte| byte != 0).count(),
                0,
            )?;
        }
        Ok(time)
    }

    /// Pages for a prompt, in no order.
    fn free_pages(&mut self) -> Vec<usize> {
        let mut pages: Vec<usize> = (0..PAGES).collect();
        for at in 0..BLOCKS {
            self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            pages.swap(at, at + (self.random >> 8) as usize % (PAGES - at));
        }
        pages.truncate(BLOCKS);
        pages
    }
}

/// Pages that a request offers. The peer may be anybody: it says what it likes.
fn parse(bytes: &[u8], prompt: u32) -> Result<Vec<usize>> {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut numbers = words.iter().map(|&word| u32::from_be_bytes(word));
    check("prompt of the request", numbers.next(), Some(prompt))?;
    let pages: Vec<usize> = numbers.map(|page| page as usize).collect();
    if !rest.is_empty() || pages.len() != BLOCKS || pages.iter().any(|&page| page >= PAGES) {
        return Err(format!("a request of {} bytes that is none", bytes.len()).into());
    }
    Ok(pages)
}

/// Where a page's block of a layer is.
fn place(layer: usize, page: usize) -> usize {
    (layer * PAGES + page) * BLOCK
}

/// Stands for keys and values: other ones for each prompt, layer and block.
fn content(prompt: u32, layer: usize, block: usize) -> Vec<u8> {
    let first = prompt as usize * 7919 + layer * 104_729 + block * 1_299_709 + 1;
    (0..BLOCK).map(|at| (first ^ at.wrapping_mul(first) >> 7) as u8).collect()
}
