//! Lab 7: transfer of a paged key-value cache from a prefill node to a decode node. See
//! `examples/labs/docs/07-kv-transfer.md`.
//!
//! An inference server keeps the keys and values of all tokens, per layer, in blocks of some
//! tokens. The prefill node computes the blocks of a prompt; the decode node continues from there.
//! On either node a block occupies any free page.
//!
//! ```text
//!   decode                                                  prefill
//!     │ ─── SEND: prompt number, free pages ────────────────▶ │
//!     │ ◀── layer 0: WRITE, WRITE, ..., WRITE_WITH_IMM ────── │   one doorbell, one completion
//!     │ ◀── layer 1: ...                                      │   while layer 2 is computed
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
/// Bytes of one layer of a block: keys and values of 16 tokens, 8 heads of 64 2-byte numbers.
const BLOCK: usize = 2 * 16 * 8 * 64 * 2;

fn main() -> ExitCode {
    labs::run("kv_transfer", decode, prefill)
}

fn prompts(peer: &Peer) -> u32 {
    if peer.quick { 3 } else { 50 }
}

async fn prefill(mut peer: Peer) -> Result<()> {
    let mut node = Node::new(&mut peer, 1).await?;
    // Posted before the barrier releases the decode node.
    node.remote = Some(peer.offered().await?);
    node.receives.push(node.qp.recv(node.pool.try_alloc(4096)?));
    peer.barrier().await?;
    for prompt in 0..prompts(&peer) {
        node.serve(prompt).await?;
    }
    peer.barrier().await
}

async fn decode(mut peer: Peer) -> Result<()> {
    let mut node = Node::new(&mut peer, 2).await?;
    peer.offer(&node.cache).await?;
    peer.barrier().await?;
    let (prompts, mut times) = (prompts(&peer), Vec::new());
    for prompt in 0..prompts {
        times.push(node.fetch(prompt).await?);
    }
    times.sort_unstable();
    let middle = times[times.len() / 2];
    let bytes = LAYERS * BLOCKS * BLOCK;
    println!(
        "{prompts} prompts of {} MiB in {BLOCKS} blocks and {LAYERS} layers, every block verified",
        bytes >> 20
    );
    println!(
        "{:.2} ms each (p50), {:.0} MB/s",
        middle.as_secs_f64() * 1e3,
        bytes as f64 / 1e6 / middle.as_secs_f64()
    );
    peer.barrier().await
}

struct Node {
    qp: QueuePair,
    cache: ExposedRegion,
    pool: Pool,
    /// On the prefill node, one for the next request. On the decode node, one per layer.
    receives: Vec<Recv<BufMut>>,
    /// On the prefill node, the cache of the decode node.
    remote: Option<RemoteRegion>,
    /// Picks free pages.
    random: u32,
}

impl Node {
    async fn new(peer: &mut Peer, random: u32) -> Result<Self> {
        let end = peer.end(&CompletionMode::Event)?;
        let (cache, pool) = (end.expose(LAYERS * PAGES * BLOCK)?, end.pool(4096, 16)?);
        let qp = end.queue_pair()?;
        peer.connect(&qp).await?;
        Ok(Self { qp, cache, pool, receives: Vec::new(), remote: None, random })
    }

    /// Serves one prompt on the prefill node, layer by layer.
    async fn serve(&mut self, prompt: u32) -> Result<()> {
        let request = in_time("a request", self.receives.pop().ok_or("no receive posted")?).await?;
        let wanted = parse(&request.buffer, prompt)?;
        drop(request);
        self.receives.push(self.qp.recv(self.pool.try_alloc(4096)?));
        let (ours, remote) =
            (self.free_pages(), self.remote.ok_or("the decode node's cache is unknown")?);
        for layer in 0..LAYERS {
            let mut batch = Batch::new();
            for (block, (&from, &to)) in ours.iter().zip(&wanted).enumerate() {
                self.cache.write(offset(layer, from), &content(prompt, layer, block))?;
                let data = self.cache.slice(offset(layer, from)..offset(layer, from) + BLOCK)?;
                let start = offset(layer, to) as u64;
                let there = remote.slice(start..start + BLOCK as u64)?;
                // The immediate announces the layer. Operations execute in order, so the other
                // blocks are in place.
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

    /// Requests a prompt on the decode node and verifies each layer. Returns the time.
    async fn fetch(&mut self, prompt: u32) -> Result<Duration> {
        // Blocks of an earlier prompt must not pass the check.
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
            let received = in_time("a layer", receive).await?;
            check("layer", received.imm, Some(Imm(layer as u32)))?;
            time = start.elapsed();
            let mut bytes = vec![0; BLOCK];
            for (block, &page) in pages.iter().enumerate() {
                self.cache.read(offset(layer, page), &mut bytes)?;
                if bytes != content(prompt, layer, block) {
                    return Err(format!(
                        "prompt {prompt}, layer {layer}, block {block}: wrong content"
                    )
                    .into());
                }
            }
        }
        // The prefill node must not have written to other pages.
        let mut bytes = vec![0; BLOCK];
        for page in (0..PAGES).filter(|page| !pages.contains(page)) {
            self.cache.read(offset(LAYERS - 1, page), &mut bytes)?;
            check(
                "bytes written to a page that was not offered",
                bytes.iter().filter(|&&byte| byte != 0).count(),
                0,
            )?;
        }
        Ok(time)
    }

    /// Returns random distinct pages for a prompt.
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

/// Decodes the pages of a request. The peer is not trusted.
fn parse(bytes: &[u8], prompt: u32) -> Result<Vec<usize>> {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut numbers = words.iter().map(|&word| u32::from_be_bytes(word));
    check("prompt of the request", numbers.next(), Some(prompt))?;
    let pages: Vec<usize> = numbers.map(|page| page as usize).collect();
    if !rest.is_empty() || pages.len() != BLOCKS || pages.iter().any(|&page| page >= PAGES) {
        return Err(format!("malformed request of {} bytes", bytes.len()).into());
    }
    Ok(pages)
}

fn offset(layer: usize, page: usize) -> usize {
    (layer * PAGES + page) * BLOCK
}

/// Returns sample data, which differs for each prompt, layer and block.
fn content(prompt: u32, layer: usize, block: usize) -> Vec<u8> {
    let first = prompt as usize * 7919 + layer * 104_729 + block * 1_299_709 + 1;
    (0..BLOCK).map(|at| (first ^ at.wrapping_mul(first) >> 7) as u8).collect()
}
