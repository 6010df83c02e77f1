//! Spans and events of the crate in `tracing`.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::alone::alone;
use crate::torture::{Flavour, LONG, bounded, device, pair, soon};
use futures::StreamExt;
use tokio_rdma::completion::BusyPoller;
use tokio_rdma::software::Network;
use tokio_rdma::types::Rkey;
use tokio_rdma::{CompletionMode, CompletionQueue, ExposedRegion, Pool, RemoteRegion};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

#[derive(Clone)]
struct Journal {
    lines: Arc<Mutex<Vec<String>>>,
    spans: Arc<AtomicU64>,
    max: Level,
}

impl Journal {
    fn new(max: Level) -> Self {
        Self { lines: Arc::default(), spans: Arc::default(), max }
    }

    fn has(&self, what: &[&str]) -> bool {
        self.count(what) > 0
    }

    fn count(&self, what: &[&str]) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| what.iter().all(|part| line.contains(part))).count()
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Journal {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.max && metadata.target().starts_with("tokio_rdma")
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.max.into())
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = Line(format!("span {}", span.metadata().name()));
        span.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
        Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{}", event.metadata().level()));
        event.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Executes one WRITE that succeeds and one that fails.
async fn succeed_and_fail() {
    let network = Network::new();
    let (device, pd) = device(&network);
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let (ours, theirs) = pair(&pd, &queue);
    let pool = Pool::new(&pd, 8, 4).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 8], tokio_rdma::Access::REMOTE_ALL).unwrap();
    let receive = theirs.recv(pool.try_alloc(8).unwrap());
    soon("a write", ours.write(pool.try_alloc(8).unwrap(), region.grant())).await.unwrap();
    let wrong = RemoteRegion::new(region.grant().addr(), 8, Rkey(!region.grant().rkey().0));
    soon("a wrong key", ours.write(pool.try_alloc(8).unwrap(), wrong)).await.unwrap_err();
    soon("a flush", receive).await.unwrap_err();
    let mut events = device.events().unwrap();
    soon("an event", events.next()).await.unwrap().unwrap();
}

// One test, because the maximum level is shared by all subscribers of the process.
#[test]
fn spans_and_events_report_queue_pair_activity() {
    // Callsites cache whether any subscriber of the process is interested.
    if !alone("spans::spans_and_events_report_queue_pair_activity") {
        return;
    }
    bounded("tracing", 2 * LONG, || {
        let runtime = Flavour::CurrentThread.runtime();
        let debug = Journal::new(Level::DEBUG);
        tracing::subscriber::with_default(debug.clone(), || runtime.block_on(succeed_and_fail()));
        assert_eq!(debug.count(&["span queue_pair", "qpn=", "transport=Rc"]), 2);
        assert!(debug.has(&["DEBUG", "queue pair changed state", "to=Rts"]));
        assert!(debug.has(&["WARN", "work request failed", "remote access error"]));
        assert!(debug.has(&["DEBUG", "flushed"]));
        assert!(debug.has(&["INFO", "asynchronous event", "QpAccessError"]));
        assert!(!debug.has(&["TRACE"]), "work requests are not logged at the debug level");

        let trace = Journal::new(Level::TRACE);
        tracing::subscriber::with_default(trace.clone(), || runtime.block_on(succeed_and_fail()));
        assert_eq!(trace.count(&["TRACE", "posted", "wr_id="]), 3, "two writes and a receive");
        assert_eq!(trace.count(&["TRACE", "completed", "wr_id="]), 3);

        let pollers = Journal::new(Level::WARN);
        tracing::subscriber::with_default(pollers.clone(), || {
            let cores = std::thread::available_parallelism().unwrap().get();
            let (device, _) = device(&Network::new());
            let poll =
                |poller| CompletionQueue::new(&device, CompletionMode::BusyPoll(poller)).unwrap();
            let warning = ["WARN", "more busy-poll threads spin", &format!("cores={cores}")];
            // Dropped queues do not count.
            (0..=cores).for_each(|_| drop(poll(BusyPoller::new().unwrap())));
            assert!(!pollers.has(&warning));
            let threads: Vec<_> = (0..cores + 2).map(|_| BusyPoller::new().unwrap()).collect();
            // A second queue of a thread is no further poller.
            let queues: Vec<_> =
                (0..2 * cores).map(|at| poll(threads[at % cores].clone())).collect();
            assert!(!pollers.has(&warning));
            let more: Vec<_> = threads[cores..].iter().map(|thread| poll(thread.clone())).collect();
            assert_eq!(pollers.count(&warning), 1, "one warning for all");
            drop((queues, more));
        });
    });
}
