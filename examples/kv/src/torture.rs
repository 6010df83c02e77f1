//! The checker's clients: all of them write and read the same few keys, and remember what they were told.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use kv::history::{Event, What, check};
use kv::stamp::Stamp;
use kv::{ClientConfig, KvClient, KvError, ReadCounters, Refusal};
use tokio::task::JoinSet;

use crate::Result;
use crate::args::CheckOptions;
use crate::place::{Target, part};

/// What was checked and found right.
#[derive(Debug)]
pub(crate) struct Checked {
    calls: usize,
    keys: u32,
    refused: u64,
    counters: ReadCounters,
}

/// One task.
struct Writer {
    client: Arc<KvClient>,
    number: u32,
    random: Rng,
    /// Bytes before the number of a key: tables may have keys of an earlier run.
    run: u64,
    longest: usize,
    /// Of the clock that all writers share.
    zero: Instant,
    until: Instant,
}

/// Has clients write and read until the time is over, and checks what they saw.
pub(crate) async fn run(server: Target, asked: CheckOptions) -> Result<Checked> {
    let mut config = ClientConfig::default();
    if asked.accept_torn {
        config = config.accept_torn();
    }
    let (zero, run) = (Instant::now(), fastrand::u64(..));
    let mut clients = Vec::new();
    let mut tasks = JoinSet::new();
    for number in 0..asked.clients {
        let client =
            Arc::new(KvClient::connect_with(&server.device, server.address, config.clone()).await?);
        let max_value = client.layout().max_value();
        if max_value < Stamp::LEN || client.layout().max_key() < key_of(0, 0).len() {
            return Err(format!(
                "keys of {} and values of {} bytes are needed",
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
                zero,
                until: Instant::now() + asked.duration,
            };
            tasks.spawn(writer.work(asked.keys));
        }
        clients.push(client);
    }
    let (mut history, mut refused) = (Vec::new(), 0);
    while let Some(done) = tasks.join_next().await {
        let (seen, not_done) = done??;
        history.extend(seen);
        refused += not_done;
    }
    let counters = part(clients).await?;
    // Long histories take their time.
    let calls = history.len();
    tokio::task::spawn_blocking(move || check(&history)).await??;
    Ok(Checked { calls, keys: asked.keys, refused, counters })
}

impl Writer {
    /// What it has seen, and how many PUTs there was no room for.
    async fn work(mut self, keys: u32) -> Result<(Vec<Event>, u64)> {
        let (mut seen, mut refused) = (Vec::new(), 0);
        for sequence in 0.. {
            let key = self.random.u32(..keys);
            let start = self.now();
            let what = self.call(key, sequence).await?;
            let end = self.now();
            match what {
                Some(what) => seen.push(Event { key, start, end, what }),
                None => refused += 1,
            }
            if Instant::now() >= self.until {
                break;
            }
        }
        Ok((seen, refused))
    }

    /// What came of a call; `None` if there was no room.
    async fn call(&mut self, key: u32, sequence: u64) -> Result<Option<What>> {
        let name = key_of(self.run, key);
        let found = match self.random.u8(0..100) {
            0..45 => self.client.get(&name).await?,
            45..55 => self.client.get_by_message(&name).await?,
            55..60 => {
                let deleted = self.client.delete(&name).await?;
                return Ok(Some(deleted.map_or(What::Absent, |version| What::Deleted { version })));
            }
            _ => {
                let stamp = Stamp { key, writer: self.number, sequence };
                return match self.client.put(&name, &stamp.value(self.longest)).await {
                    Ok(version) => Ok(Some(What::Put { version, stamp })),
                    Err(KvError::Refused(Refusal::Full { .. })) => Ok(None),
                    Err(error) => Err(error.into()),
                };
            }
        };
        Ok(Some(found.map_or(What::Absent, |found| What::Found {
            version: found.version,
            value: Stamp::of(&found.value, self.longest),
        })))
    }

    fn now(&self) -> u64 {
        self.zero.elapsed().as_nanos() as u64
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
            "{} calls on {} keys, all answers right: whole values, linearizable",
            self.calls, self.keys
        )?;
        write!(
            f,
            "{reads} READs, torn: {torn}; GETs that asked the server in the end: {fallbacks}; no room: {}",
            self.refused
        )
    }
}
