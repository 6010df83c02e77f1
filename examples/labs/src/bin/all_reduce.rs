//! Lab 6: ring all-reduce of f32 vectors with WRITE_WITH_IMM. See
//! `examples/labs/docs/06-all-reduce.md`.
//!
//! Each rank starts with a vector and ends with the sum of all. A vector is cut into one chunk per
//! rank. Chunk c starts at rank c and travels around the ring: each rank adds its own numbers and
//! forwards it. The last rank has the sum, which travels around once more. The order of additions
//! is fixed, ((x[c] + x[c+1]) + x[c+2]) + ..., so the result is bit-identical at every rank in
//! every run.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Peer, Result, check, in_time, long_ack_timeout};
use tokio::task::JoinSet;
use tokio_rdma::op::Recv;
use tokio_rdma::{
    BufMut, CompletionMode, ExposedRegion, Imm, Pool, QueuePair, QueuePairEndpoint, RemoteRegion,
};

fn main() -> ExitCode {
    labs::run("all_reduce", client, server)
}

fn length(peer: &Peer) -> usize {
    if peer.quick { 10_000 } else { 4_000_000 }
}

/// Runs the even ranks, so that nearly every step crosses between the two ends.
async fn client(mut peer: Peer) -> Result<()> {
    let length = length(&peer);
    println!(
        "{:>5} {:>9} {:>10} {:>12} {:>30}",
        "ranks", "numbers", "ms", "MB/s a rank", "differ from x[0] + x[1] + ..."
    );
    for ranks in 2..=8 {
        let inputs = vectors(ranks, length);
        let ring = sum_around_the_ring(&inputs);
        let time = reduce(&mut peer, 0, &inputs, &ring).await?;
        // For comparison. Floating-point addition is not associative.
        let plain = (0..length)
            .map(|at| inputs.iter().skip(1).fold(inputs[0][at], |sum, input| sum + input[at]));
        let differ =
            plain.zip(&ring).filter(|(plain, ring)| plain.to_bits() != ring.to_bits()).count();
        // A rank sends nearly twice its vector, for any number of ranks.
        let sent = (2 * (ranks - 1) * length.div_ceil(ranks) * 4) as f64;
        let (ms, rate) = (time.as_secs_f64() * 1e3, sent / 1e6 / time.as_secs_f64());
        println!("{ranks:>5} {length:>9} {ms:>10.1} {rate:>12.0} {differ:>30}");
    }
    Ok(())
}

/// Runs the odd ranks.
async fn server(mut peer: Peer) -> Result<()> {
    let length = length(&peer);
    for ranks in 2..=8 {
        let inputs = vectors(ranks, length);
        reduce(&mut peer, 1, &inputs, &sum_around_the_ring(&inputs)).await?;
    }
    Ok(())
}

/// Runs every second rank from `first` on, and returns the time.
async fn reduce(
    peer: &mut Peer,
    first: usize,
    inputs: &[Vec<f32>],
    expected: &[f32],
) -> Result<Duration> {
    let (ranks, length) = (inputs.len(), expected.len());
    let mut tasks = JoinSet::new();
    let ring = ring(peer, first, ranks, length.div_ceil(ranks)).await?;
    let ours = ring.len();
    let start = Instant::now();
    for rank in ring {
        let input = inputs[rank.rank].clone();
        tasks.spawn(rank.all_reduce(input));
    }
    let mut results = Vec::new();
    while let Some(result) =
        in_time("the ring", async { Ok::<_, labs::Failure>(tasks.join_next().await) }).await?
    {
        results.push(result??);
    }
    // A WRITE to a rank of the other end may still be in flight.
    peer.barrier().await?;
    let time = start.elapsed();
    check("number of results", results.len(), ours)?;
    for (_, result) in &results {
        let differs = |(is, should): (&f32, &f32)| is.to_bits() != should.to_bits();
        check(
            "position of the first wrong number",
            result.iter().zip(expected).position(differs),
            None,
        )?;
        check("length of a result", result.len(), length)?;
    }
    Ok(time)
}

fn vectors(ranks: usize, length: usize) -> Vec<Vec<f32>> {
    (0..ranks).map(|rank| vector(rank, length)).collect()
}

/// Computes the sum sequentially, in the order of the ring.
fn sum_around_the_ring(inputs: &[Vec<f32>]) -> Vec<f32> {
    let (ranks, length) = (inputs.len(), inputs[0].len());
    let chunk = length.div_ceil(ranks);
    let sum = |at: usize| {
        let first = at / chunk;
        (1..ranks).fold(inputs[first][at], |sum, step| sum + inputs[(first + step) % ranks][at])
    };
    (0..length).map(sum).collect()
}

/// Returns numbers whose sum depends on the order of additions.
fn vector(rank: usize, length: usize) -> Vec<f32> {
    let mut state = (rank as u32).wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 65536.0 - 128.0
    };
    (0..length).map(|_| next() * next()).collect()
}

struct Rank {
    rank: usize,
    ranks: usize,
    /// The number of f32 values in a chunk.
    chunk: usize,
    pool: Pool,
    to_next: QueuePair,
    /// Has a slot per step, so that no chunk is overwritten before it is read.
    next_inbox: RemoteRegion,
    inbox: ExposedRegion,
    /// One per step, all posted before the first.
    receives: Vec<Recv<BufMut>>,
    from_previous: QueuePair,
}

/// The addresses that a rank's neighbours need.
struct RankAddress {
    to_next: QueuePairEndpoint,
    from_previous: QueuePairEndpoint,
    inbox: RemoteRegion,
}

const RANK_ADDRESS_LEN: usize = 2 * QueuePairEndpoint::ENCODED_LEN + RemoteRegion::ENCODED_LEN;

impl RankAddress {
    fn encode(rank: &Rank) -> Vec<u8> {
        let (to_next, from_previous) =
            (rank.to_next.endpoint().to_bytes(), rank.from_previous.endpoint().to_bytes());
        [&to_next[..], &from_previous, &rank.inbox.grant().to_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let (to_next, rest) = bytes.split_at(QueuePairEndpoint::ENCODED_LEN);
        let (from_previous, inbox) = rest.split_at(QueuePairEndpoint::ENCODED_LEN);
        Ok(Self {
            to_next: QueuePairEndpoint::from_bytes(to_next)?,
            from_previous: QueuePairEndpoint::from_bytes(from_previous)?,
            inbox: RemoteRegion::from_bytes(inbox).ok_or("malformed inbox address")?,
        })
    }
}

async fn ring(peer: &mut Peer, first: usize, ranks: usize, chunk: usize) -> Result<Vec<Rank>> {
    let (steps, bytes) = (2 * (ranks - 1), 4 * chunk);
    let mut ring = Vec::new();
    for rank in (first..ranks).step_by(2) {
        let end = peer.end(&CompletionMode::Event)?;
        let (to_next, from_previous) = (end.queue_pair()?, end.queue_pair()?);
        let inbox = end.expose(steps * bytes)?;
        let pool = end.pool(bytes, 2)?;
        let buffers = end.pool(1, steps)?;
        let mut receives = Vec::new();
        for _ in 0..steps {
            receives.push(from_previous.recv(buffers.try_alloc(1)?));
        }
        let next_inbox = inbox.grant();
        ring.push(Rank {
            rank,
            ranks,
            chunk,
            pool,
            to_next,
            next_inbox,
            inbox,
            receives,
            from_previous,
        });
    }
    let ours: Vec<u8> = ring.iter().flat_map(RankAddress::encode).collect();
    let theirs = peer.exchange(&ours).await?;
    check(
        "length of the other end's addresses",
        theirs.len(),
        (ranks - ring.len()) * RANK_ADDRESS_LEN,
    )?;
    // Rank r is entry r / 2 of its end.
    let address = |rank: usize| {
        let end = if rank % 2 == first { &ours } else { &theirs };
        RankAddress::decode(&end[rank / 2 * RANK_ADDRESS_LEN..][..RANK_ADDRESS_LEN])
    };
    for rank in &mut ring {
        let (next, previous) =
            (address((rank.rank + 1) % ranks)?, address((rank.rank + ranks - 1) % ranks)?);
        rank.to_next.connect_with(&next.from_previous, &long_ack_timeout())?;
        rank.from_previous.connect_with(&previous.to_next, &long_ack_timeout())?;
        rank.next_inbox = next.inbox;
    }
    peer.barrier().await?;
    Ok(ring)
}

impl Rank {
    /// Returns the rank, too: it must stay alive while the previous rank awaits acknowledgements.
    async fn all_reduce(mut self, mut numbers: Vec<f32>) -> Result<(Self, Vec<f32>)> {
        let (ranks, rank) = (self.ranks, self.rank);
        let receives = std::mem::take(&mut self.receives);
        for (step, receive) in receives.into_iter().enumerate() {
            // The chunk of the previous step. In the second half it is a complete sum.
            let (send, take) =
                ((rank + 2 * ranks - step) % ranks, (rank + 2 * ranks - step - 1) % ranks);
            let sent = self.send(step, &numbers[self.range(send, numbers.len())])?;
            let received = in_time("a chunk", receive).await?;
            check("step", received.imm, Some(Imm(step as u32)))?;
            let range = self.range(take, numbers.len());
            let mut bytes = vec![0; 4 * range.len()];
            self.inbox.read(step * 4 * self.chunk, &mut bytes)?;
            for (own, theirs) in numbers[range].iter_mut().zip(bytes.chunks_exact(4)) {
                let theirs = f32::from_le_bytes(theirs.try_into()?);
                *own = if step < ranks - 1 { theirs + *own } else { theirs };
            }
            in_time("a WRITE", sent).await?;
        }
        Ok((self, numbers))
    }

    /// Writes a chunk into the next rank's slot for this step, with the step as immediate data.
    fn send(&self, step: usize, chunk: &[f32]) -> Result<tokio_rdma::op::Write<BufMut>> {
        let mut buffer = self.pool.try_alloc(4 * chunk.len())?;
        for (bytes, number) in buffer.chunks_exact_mut(4).zip(chunk) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let start = (step * 4 * self.chunk) as u64;
        let address = self.next_inbox.slice(start..start + buffer.len() as u64)?;
        Ok(self.to_next.with_imm(Imm(step as u32)).write(buffer, address))
    }

    /// Returns the index range of a chunk. The last chunks may be shorter, or empty.
    fn range(&self, chunk: usize, length: usize) -> std::ops::Range<usize> {
        length.min(chunk * self.chunk)..length.min((chunk + 1) * self.chunk)
    }
}
