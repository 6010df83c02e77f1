//! The client. RDMA and TCP rounds alternate, so that other load on the machine affects both.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rdma::Device;
use tokio_rdma::types::Gid;

use crate::args::Options;
use crate::case::{Case, Over, Verb};
use crate::device::{Reach, open, peer_of, queues};
use crate::lane::Lane;
use crate::measure::{Round, Tally, Until, Usage};
use crate::meet::{Channel, DEADLINE, End, Reply, Request, unexpected};
use crate::report::{Entry, Report};
use crate::{Result, messages, queue_pair, tcp};

/// Runs all measurements. If `here`, this process counts the usage of both ends.
pub(crate) async fn measure(
    options: &Options,
    address: SocketAddr,
    reach: &Reach,
    here: bool,
) -> Result<Report> {
    let device = open(reach)?;
    let stream = timeout(DEADLINE, TcpStream::connect(address))
        .await
        .map_err(|_| format!("{address} does not accept the connection"))?;
    let stream = stream.map_err(|error| format!("no server at {address}: {error}"))?;
    let mut client = Client { device, channel: Channel::new(stream)?, server: String::new(), here };

    let progress = ProgressBar::new(
        u64::from(options.rounds) * (options.cases.len() * options.overs.len()) as u64,
    );
    progress
        .set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} rounds, {msg}, {eta} left")?);
    let port = match peer_of(address.ip()) {
        Some(peer) => client.device.path_to(Gid::from(peer)),
        None => client.device.default_path(),
    };
    // A measurement of TCP alone needs no port.
    let device = client.device.clone();
    let counters = || {
        let (port, _) = port.as_ref().ok()?;
        device.port_counters(port.port).ok()
    };
    let before = counters().unwrap_or_default();
    let mut entries = Vec::new();
    for case in &options.cases {
        let mut rounds: Vec<(Over, Vec<Round>)> =
            options.overs.iter().map(|&over| (over, Vec::new())).collect();
        for _ in 0..options.rounds {
            for (over, rounds) in &mut rounds {
                progress.set_message(format!("{over}, {} bytes", case.size));
                let case = Case { over: *over, ..case.clone() };
                let round = client.round(&case, options).await;
                rounds.push(round.map_err(|error| {
                    format!("{} of {} over {over}: {error}", case.work, case.verb)
                })?);
                progress.inc(1);
            }
            // Alternates which transport runs first.
            rounds.reverse();
        }
        rounds.sort_by_key(|(over, _)| *over == Over::Tcp);
        for (over, rounds) in rounds {
            entries.push(Entry::new(over, case.size, &rounds)?);
        }
    }
    progress.finish_and_clear();
    client.channel.send(&Request::Exit).await?;
    let mut counted = counters().unwrap_or_default();
    counted.retain(|name, count| {
        *count = count.saturating_sub(before.get(name).copied().unwrap_or_default());
        *count > 0
    });
    Report::new(options, &client.device, client.server, here, entries, counted)
}

struct Client {
    device: Device,
    channel: Channel,
    /// The name of the server's device.
    server: String,
    here: bool,
}

impl Client {
    /// Runs one round on new connections, so that no thread or task of another round interferes.
    async fn round(&mut self, case: &Case, options: &Options) -> Result<Round> {
        let lanes = self.open(case).await?;
        let (lanes, _) = run(lanes, options.warm_up).await?;

        let reply = self.channel.request(&Request::Begin).await?;
        let Reply::Begun = reply else { return Err(unexpected(&reply)) };
        let (before, start) = (Usage::now()?, Instant::now());
        let (mut lanes, tallies) = run(lanes, options.duration).await?;
        let (time, used) = (start.elapsed(), Usage::now()?.since(before));

        for lane in &mut lanes {
            lane.check().await?;
        }
        let reply = self
            .channel
            .request(&Request::End(lanes.iter().map(Lane::operations).collect()))
            .await?;
        let Reply::Ended(theirs) = reply else { return Err(unexpected(&reply)) };
        for lane in lanes {
            timeout(DEADLINE, lane.close())
                .await
                .map_err(|_| "closing a connection timed out")??;
        }
        let reply = self.channel.request(&Request::Close).await?;
        let Reply::Closed = reply else { return Err(unexpected(&reply)) };

        let usage = if self.here { used } else { used.and(theirs) };
        let mut sum = Tally::new()?;
        for tally in tallies {
            sum.operations += tally.operations;
            sum.times.add(tally.times)?;
        }
        Ok(Round { operations: sum.operations, time, times: sum.times, usage })
    }

    async fn open(&mut self, case: &Case) -> Result<Vec<Lane>> {
        if case.over == Over::Tcp {
            let theirs = self.exchange(case, vec![End::Tcp(None); case.lanes]).await?;
            let mut lanes = Vec::new();
            for end in &theirs {
                lanes.push(Lane::Tcp(tcp::Lane::connect(end, case).await?));
            }
            return Ok(lanes);
        }
        let pd = self.device.protection_domain()?;
        let queues = queues(&self.device, case)?;
        let queues = queues.iter().cycle().take(case.lanes);
        let peer = peer_of(self.channel.stream().peer_addr()?.ip());
        if case.verb == Verb::Messages {
            let prepare = |queue| messages::Prepared::new(&pd, queue, case, peer);
            let prepared = queues.map(prepare).collect::<Result<Vec<_>>>()?;
            let ours = prepared.iter().map(messages::Prepared::end).collect::<Result<_>>()?;
            let theirs = self.exchange(case, ours).await?;
            let pairs = prepared.into_iter().zip(&theirs);
            return pairs
                .map(|(prepared, end)| {
                    Ok(Lane::Messages(messages::Lane::connect(prepared, end, case)?))
                })
                .collect();
        }
        let max_message = queue_pair::message_limits(case)[0];
        let prepare = |queue| queue_pair::Prepared::new(&pd, queue, case, peer, max_message);
        let prepared = queues.map(prepare).collect::<Result<Vec<_>>>()?;
        let theirs =
            self.exchange(case, prepared.iter().map(queue_pair::Prepared::end).collect()).await?;
        let pairs = prepared.into_iter().zip(&theirs);
        pairs
            .map(|(prepared, end)| {
                Ok(Lane::QueuePair(queue_pair::Lane::connect(prepared, end, case)?))
            })
            .collect()
    }

    async fn exchange(&mut self, case: &Case, ours: Vec<End>) -> Result<Vec<End>> {
        match self.channel.request(&Request::Open(case.clone(), ours)).await? {
            Reply::Opened(device, theirs) if theirs.len() == case.lanes => {
                self.server = device;
                Ok(theirs)
            }
            other => Err(unexpected(&other)),
        }
    }
}

async fn run(lanes: Vec<Lane>, time: Duration) -> Result<(Vec<Lane>, Vec<Tally>)> {
    let until = Until::after(time);
    let mut tasks = JoinSet::new();
    for (index, mut lane) in lanes.into_iter().enumerate() {
        tasks.spawn(async move {
            let tally = lane.run(until).await?;
            Ok::<_, crate::Failure>((index, lane, tally))
        });
    }
    let mut done = Vec::new();
    let all = async {
        while let Some(ended) = tasks.join_next().await {
            done.push(ended??);
        }
        Ok::<_, crate::Failure>(())
    };
    timeout(time + DEADLINE, all)
        .await
        .map_err(|_| format!("operations in flight {DEADLINE:?} after the end of the round"))??;
    done.sort_by_key(|(index, ..)| *index);
    Ok(done.into_iter().map(|(_, lane, tally)| (lane, tally)).unzip())
}
