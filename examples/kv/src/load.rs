//! The load generator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use kv::{KvClient, Versioned};
use tokio::task::JoinSet;

use crate::Result;
use crate::args::{Choice, GetBy, LoadOptions};
use crate::place::{Target, close_all, patient};
use crate::report::Report;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    GetByRead,
    GetByMessage,
    Put,
}

impl Call {
    pub(crate) const ALL: [Self; 3] = [Self::GetByRead, Self::GetByMessage, Self::Put];
}

/// Nanoseconds, with three significant digits.
#[derive(Debug)]
pub(crate) struct Times([Histogram<u64>; 3]);

impl Times {
    fn new() -> Result<Self> {
        let times = || Histogram::new(3);
        Ok(Self([times()?, times()?, times()?]))
    }

    pub(crate) fn of(&self, call: Call) -> &Histogram<u64> {
        &self.0[call as usize]
    }

    fn record(&mut self, call: Call, time: Duration) -> Result<()> {
        Ok(self.0[call as usize].record(u64::try_from(time.as_nanos())?)?)
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.0.iter_mut().zip(&other.0).try_for_each(|(ours, theirs)| Ok(ours.add(theirs)?))
    }
}

pub(crate) async fn run(server: Target, load: LoadOptions) -> Result<Report> {
    let mut clients = Vec::new();
    for _ in 0..load.clients {
        let client = KvClient::connect_with(&server.device, server.address, patient()).await?;
        clients.push(Arc::new(client));
    }
    let keys = Arc::new(Keys::new(&load));
    let mut times = Times::new()?;
    for (task, result) in
        run_tasks(&clients, &load, |client, task| fill(client, load.clone(), task))
            .await?
            .into_iter()
            .enumerate()
    {
        result.map_err(|error| format!("failed to fill the table, task {task}: {error}"))?;
    }

    let start = Instant::now();
    let until = start + load.duration;
    for measured in run_tasks(&clients, &load, |client, task| {
        measure(client, load.clone(), keys.clone(), task, until)
    })
    .await?
    {
        times.add(&measured?)?;
    }
    let took = start.elapsed();

    let counters = close_all(clients).await?;
    Ok(Report::new(load, &server, took, &times, counters))
}

/// Runs a task for each concurrent call.
async fn run_tasks<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    clients: &[Arc<KvClient>],
    load: &LoadOptions,
    task: impl Fn(Arc<KvClient>, u32) -> F,
) -> Result<Vec<T>> {
    let mut tasks = JoinSet::new();
    for index in 0..load.clients * load.depth {
        let client = &clients[index as usize % clients.len()];
        tasks.spawn(task(client.clone(), index));
    }
    let mut done = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        done.push(ended?);
    }
    Ok(done)
}

/// Puts this task's part of the keys.
async fn fill(client: Arc<KvClient>, load: LoadOptions, task: u32) -> Result<()> {
    for key in (task..load.keys).step_by((load.clients * load.depth) as usize) {
        client.put(&key_of(key), &value_of(key, load.value)).await?;
    }
    Ok(())
}

/// Measures each call, and checks each value.
async fn measure(
    client: Arc<KvClient>,
    load: LoadOptions,
    keys: Arc<Keys>,
    task: u32,
    until: Instant,
) -> Result<Times> {
    let mut random = Rng::with_seed(load.seed.wrapping_add(task.into()));
    let mut times = Times::new()?;
    loop {
        let number = keys.choose(&mut random);
        let (key, value) = (key_of(number), value_of(number, load.value));
        let call = if random.u8(0..100) < load.puts {
            Call::Put
        } else if load.get == GetBy::Read || load.get == GetBy::Both && random.bool() {
            Call::GetByRead
        } else {
            Call::GetByMessage
        };
        let start = Instant::now();
        let found = match call {
            Call::Put => client.put(&key, &value).await.map(|_| None)?,
            Call::GetByRead => client.get(&key).await?,
            Call::GetByMessage => client.get_by_message(&key).await?,
        };
        let end = Instant::now();
        times.record(call, end - start)?;
        if call != Call::Put
            && found.as_ref().is_none_or(|Versioned { value: found, .. }| found != &value)
        {
            return Err(format!("key {number}: wrong value {found:?}").into());
        }
        if end >= until {
            return Ok(times);
        }
    }
}

fn key_of(number: u32) -> [u8; 8] {
    u64::from(number).to_be_bytes()
}

/// Returns the value of a key, which is the same in each PUT.
fn value_of(key: u32, len: u32) -> Vec<u8> {
    key.to_be_bytes().into_iter().cycle().take(len as usize).collect()
}

#[derive(Debug)]
struct Keys {
    count: u32,
    /// For Zipf, the cumulative frequency up to each key; empty for a uniform distribution.
    cumulative: Vec<f64>,
}

impl Keys {
    fn new(load: &LoadOptions) -> Self {
        let mut cumulative = Vec::new();
        if load.choice == Choice::Zipf {
            let mut sum = 0.0;
            cumulative.extend((1..=load.keys).map(|rank| {
                sum += f64::from(rank).powf(-0.99);
                sum
            }));
            cumulative.iter_mut().for_each(|part| *part /= sum);
        }
        Self { count: load.keys, cumulative }
    }

    fn choose(&self, random: &mut Rng) -> u32 {
        if self.cumulative.is_empty() {
            return random.u32(..self.count);
        }
        let draw = random.f64();
        (self.cumulative.partition_point(|&part| part <= draw) as u32).min(self.count - 1)
    }
}
