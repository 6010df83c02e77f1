//! The server, which creates the ends that the client asks for and reports its resource usage.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rdma::{Device, ProtectionDomain};

use crate::case::{Case, Over, Verb};
use crate::device::{Reach, describe, open, peer_of, queues};
use crate::measure::Usage;
use crate::meet::{Channel, DEADLINE, End, Reply, Request};
use crate::{Result, messages, queue_pair, tcp};

const ROUND_TIMEOUT: Duration = Duration::from_secs(2 * 3600);

pub(crate) async fn listen(address: SocketAddr) -> Result<()> {
    let device = open(&Reach::From(address.ip()))?;
    let listener = TcpListener::bind(address).await?;
    // Scripts wait for this line.
    println!("listening on {} with {}", listener.local_addr()?, device.name());
    let (stream, _) = listener.accept().await?;
    serve(stream, &device).await
}

pub(crate) fn bind_here() -> Result<(std::net::TcpListener, SocketAddr)> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

pub(crate) async fn serve_here(listener: std::net::TcpListener) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (stream, _) =
        timeout(DEADLINE, listener.accept()).await.map_err(|_| "the client does not connect")??;
    serve(stream, &open(&Reach::Process)?).await
}

async fn serve(stream: TcpStream, device: &Device) -> Result<()> {
    let (local, peer) = (stream.local_addr()?.ip(), stream.peer_addr()?.ip());
    let mut channel = Channel::new(stream)?;
    let mut session: Option<Session> = None;
    let mut before = Usage::default();
    while let Some(request) = channel.receive(ROUND_TIMEOUT).await? {
        let reply = match (request, &mut session) {
            (Request::Open(case, ends), None) => {
                match Session::open(device, &case, &ends, local, peer).await {
                    Ok((opened, ends)) => {
                        session = Some(opened);
                        Reply::Opened(describe(device), ends)
                    }
                    Err(error) => Reply::Failed(error.to_string()),
                }
            }
            (Request::Begin, Some(_)) => {
                before = Usage::now()?;
                Reply::Begun
            }
            (Request::End(operations), Some(session)) => {
                let used = Usage::now()?.since(before);
                match session.check(&operations).await {
                    Ok(()) => Reply::Ended(used),
                    Err(error) => Reply::Failed(error.to_string()),
                }
            }
            (Request::Close, Some(_)) => {
                session = None;
                Reply::Closed
            }
            (Request::Exit, None) => return Ok(()),
            (request, _) => Reply::Failed(format!("unexpected request {request:?}")),
        };
        channel.send(&reply).await?;
    }
    match session {
        None => Ok(()),
        Some(_) => Err("the client exited in the middle of a round".into()),
    }
}

/// The server's ends of the lanes of a case.
struct Session {
    lanes: Vec<Lane>,
    tasks: JoinSet<Result<()>>,
}

enum Lane {
    QueuePair(queue_pair::Server),
    Messages(messages::Server),
    Tcp(tcp::Server),
}

/// The limits of a case.
const MAX_CASE: Case =
    Case { size: 1 << 30, depth: 4096, lanes: 1024, queues: 256, batch: 4096, ..Case::EXAMPLE };

impl Session {
    async fn open(
        device: &Device,
        case: &Case,
        theirs: &[End],
        local: IpAddr,
        peer: IpAddr,
    ) -> Result<(Self, Vec<End>)> {
        let wanted = [case.size, case.depth, case.lanes, case.queues, case.batch];
        let max = [MAX_CASE.size, MAX_CASE.depth, MAX_CASE.lanes, MAX_CASE.queues, MAX_CASE.batch];
        if wanted.iter().zip(max).any(|(&wanted, max)| !(1..=max).contains(&wanted))
            || theirs.len() != case.lanes
        {
            return Err(format!("{case:?} with {} ends exceeds the limits", theirs.len()).into());
        }
        let mut session = Self { lanes: Vec::new(), tasks: JoinSet::new() };
        let mut ours = Vec::new();
        if case.over == Over::Tcp {
            for _ in theirs {
                let listener = TcpListener::bind((local, 0)).await?;
                ours.push(End::Tcp(Some(listener.local_addr()?)));
                let (lane, serving) = tcp::Server::new(listener, case);
                session.start(Lane::Tcp(lane), serving);
            }
            return Ok((session, ours));
        }
        let pd: ProtectionDomain = device.protection_domain()?;
        let queues = queues(device, case)?;
        for (theirs, queue) in theirs.iter().zip(queues.iter().cycle()) {
            if case.verb == Verb::Messages {
                let prepared = messages::Prepared::new(&pd, queue, case, peer_of(peer))?;
                ours.push(prepared.end()?);
                let (lane, serving) = messages::Server::connect(prepared, theirs, case)?;
                session.start(Lane::Messages(lane), serving);
            } else {
                let max_message = queue_pair::message_limits(case)[1];
                let prepared =
                    queue_pair::Prepared::new(&pd, queue, case, peer_of(peer), max_message)?;
                ours.push(prepared.end());
                let (lane, serving) = queue_pair::Server::connect(prepared, theirs, case)?;
                session.start(Lane::QueuePair(lane), serving);
            }
        }
        Ok((session, ours))
    }

    fn start(&mut self, lane: Lane, serving: impl Future<Output = Result<()>> + Send + 'static) {
        self.lanes.push(lane);
        self.tasks.spawn(serving);
    }

    /// Compares the received data with the number of operations that the client reports.
    async fn check(&mut self, operations: &[u64]) -> Result<()> {
        while let Some(ended) = self.tasks.try_join_next() {
            ended??;
        }
        for (lane, &operations) in self.lanes.iter().zip(operations) {
            match lane {
                Lane::QueuePair(lane) => lane.check(operations).await?,
                Lane::Messages(lane) => lane.check(operations).await?,
                Lane::Tcp(lane) => lane.check(operations).await?,
            }
        }
        Ok(())
    }
}
