//! The clients of the checker: all write and read the same few keys and record the answers.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use kv::history::{Event, Outcome, check};
use kv::stamp::Stamp;
use kv::{KvClient, KvError, ReadCounters, Refusal};
use tokio::task::JoinSet;

use crate::Result;
use crate::args::CheckOptions;
use crate::place::{Target, close_all, patient};

#[derive(Debug)]
pub(crate) struct Checked {
    calls: usize,
    keys: u32,
    refused: u64,
    counters: ReadCounters,
}

struct Writer {
    client: Arc<KvClient>,
    number: u32,
    random: Rng,
    /// The prefix of all keys: the table may hold keys of an earlier run.
    run: u64,
    longest: usize,
    /// The origin of the clock that all writers share.
    epoch: Instant,
    until: Instant,
}

/// Runs the clients, then checks their history.
pub(crate) async fn run(server: Target, asked: CheckOptions) -> Result<Checked> {
    let mut config = patient();
    if asked.accept_torn {
        config = config.accept_torn();
    }
    let (epoch, run) = (Instant::now(), fastrand::u64(..));
    let mut clients = Vec::new();
    let mut tasks = JoinSet::new();
    for number in 0..asked.clients {
        let client =
            Arc::new(KvClient::connect_with(&server.device, server.address, config.clone()).await?);
        let max_value = client.layout().max_value();
        if max_value < Stamp::LEN || client.layout().max_key() < key_of(0, 0).len() {
            return Err(format!(
                "the table must allow keys of {} and values of {} bytes",
                key_of(0, 0).len(),
                Stamp::LEN
            )
            .into());
        }
        for call in 0..asked.depth {
            let number = number * asked.depth + call;
            let writer = Writer {
                client: client.clone(),
                number,
                random: Rng::with_seed(asked.seed.wrapping_add(number.into())),
                run,
                longest: asked.value.map_or(max_value, |value| max_value.min(value as usize)),
                epoch,
                until: Instant::now() + asked.duration,
            };
            tasks.spawn(writer.work(asked.keys));
        }
        clients.push(client);
    }
    let (mut history, mut refused) = (Vec::new(), 0);
    while let Some(done) = tasks.join_next().await {
        let (seen, full) = done??;
        history.extend(seen);
        refused += full;
    }
    let counters = close_all(clients).await?;
    // A long history takes a while to check.
    let calls = history.len();
    tokio::task::spawn_blocking(move || check(&history)).await??;
    Ok(Checked { calls, keys: asked.keys, refused, counters })
}

impl Writer {
    /// Returns the history, and the number of PUTs to full buckets.
    async fn work(mut self, keys: u32) -> Result<(Vec<Event>, u64)> {
        let (mut seen, mut refused) = (Vec::new(), 0);
        for sequence in 0.. {
            let key = self.random.u32(..keys);
            let start = self.now();
            let outcome = self.call(key, sequence).await?;
            let end = self.now();
            match outcome {
                Some(outcome) => seen.push(Event { key, start, end, outcome }),
                None => refused += 1,
            }
            if Instant::now() >= self.until {
                break;
            }
        }
        Ok((seen, refused))
    }

    /// Makes a call and returns its outcome, or `None` for a PUT to a full bucket.
    async fn call(&mut self, key: u32, sequence: u64) -> Result<Option<Outcome>> {
        let name = key_of(self.run, key);
        let found = match self.random.u8(0..100) {
            0..45 => self.client.get(&name).await?,
            45..55 => self.client.get_by_message(&name).await?,
            55..60 => {
                let deleted = self.client.delete(&name).await?;
                return Ok(Some(
                    deleted.map_or(Outcome::Absent, |version| Outcome::Deleted { version }),
                ));
            }
            _ => {
                let stamp = Stamp { key, writer: self.number, sequence };
                return match self.client.put(&name, &stamp.value(self.longest)).await {
                    Ok(version) => Ok(Some(Outcome::Put { version, stamp })),
                    Err(KvError::Refused(Refusal::Full { .. })) => Ok(None),
                    Err(error) => Err(error.into()),
                };
            }
        };
        Ok(Some(found.map_or(Outcome::Absent, |found| Outcome::Found {
            version: found.version,
            value: Stamp::decode(&found.value, self.longest),
        })))
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }
}

fn key_of(run: u64, key: u32) -> [u8; 12] {
    let mut name = [0; 12];
    name[..8].copy_from_slice(&run.to_be_bytes());
    name[8..].copy_from_slice(&key.to_be_bytes());
    name
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadCounters { reads, torn, fallbacks } = self.counters;
        writeln!(
            f,
            "{} calls on {} keys, all answers correct: whole values, linearizable",
            self.calls, self.keys
        )?;
        write!(
            f,
            "{reads} READs, {torn} torn; GETs that fell back to a message: {fallbacks}; \
             PUTs to a full bucket: {}",
            self.refused
        )
    }
}
