//! A dedicated thread that polls completion queues.

use std::fmt;
use std::hint;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

/// Empty rounds before an unpinned poller lets others have the core.
const ROUNDS_BEFORE_YIELD: u32 = 64;
/// Processors that a set of them has room for (`CPU_SETSIZE`). Whoever puts another into one aborts the process.
const CORES: usize = 1024;

/// A thread that polls all completion queues given to it, and never sleeps while there is one; clones share it.
///
/// It ends when the last clone, and the last completion queue that uses it, is dropped.
///
/// ```
/// use tokio_rdma::completion::BusyPoller;
/// # use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// // One thread polls both queues.
/// let poller = BusyPoller::new()?;
/// let sends = CompletionQueue::new(&device, CompletionMode::BusyPoll(poller.clone()))?;
/// let receives = CompletionQueue::new(&device, CompletionMode::BusyPoll(poller))?;
/// let qp = QueuePair::builder(&pd, &sends).receive_completions(&receives).build()?;
/// # qp.connect(&qp.endpoint())?;
/// # let counter = ExposedRegion::new(&pd, vec![0; 8], Access::REMOTE_ATOMIC)?;
/// assert_eq!(qp.fetch_add(counter.grant(), 1).await?, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BusyPoller {
    handle: Arc<ThreadHandle>,
}

/// What a poller polls: a completion queue.
pub(super) trait Polled: Send + Sync {
    /// Takes what completions there are, unless somebody else is at it; false if there was nothing to do.
    fn poll(&self) -> bool;
}

struct ThreadHandle {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    queues: Mutex<Vec<Weak<dyn Polled>>>,
    /// `queues` has grown, or the thread shall end.
    changed: AtomicBool,
    stop: AtomicBool,
    pinned: bool,
}

impl BusyPoller {
    /// A poller that runs wherever the system puts it.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn new() -> io::Result<Self> {
        Self::start(None)
    }

    /// A poller on processor `core`, counted as the system does. Nothing else should run there.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if there is no such core or it cannot be pinned there.
    pub fn pinned(core: usize) -> io::Result<Self> {
        if core >= CORES { Err(unpinnable(core)) } else { Self::start(Some(core)) }
    }

    fn start(core: Option<usize>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Vec::new()),
            changed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pinned: core.is_some(),
        });
        let (poller, (report, pinned)) = (shared.clone(), std::sync::mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("rdma-busy-poll".to_owned()).spawn(move || {
            let pinned =
                core.is_none_or(|id| core_affinity::set_for_current(core_affinity::CoreId { id }));
            if report.send(pinned).is_ok() && pinned {
                // Wakers that panic are contained where they are woken. Should anything else panic, all other queues that
                // this thread serves shall not wait for ever.
                while catch_unwind(AssertUnwindSafe(|| poller.run())).is_err() {
                    tracing::error!("a busy-poll thread panicked and goes on");
                    poller.changed.store(true, Ordering::Release);
                }
            }
        })?;
        if !pinned.recv().unwrap_or(false) {
            return Err(unpinnable(core.unwrap_or_default()));
        }
        Ok(Self { handle: Arc::new(ThreadHandle { shared, thread: Mutex::new(Some(thread)) }) })
    }

    /// Adds a queue.
    pub(super) fn serve(&self, queue: Weak<dyn Polled>) {
        self.handle.shared.queues.lock().push(queue);
        self.handle.shared.changed.store(true, Ordering::Release);
        if let Some(thread) = &*self.handle.thread.lock() {
            thread.thread().unpark();
        }
    }
}

fn unpinnable(core: usize) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("cannot pin a thread to core {core}"))
}

impl Shared {
    fn run(&self) {
        let (mut queues, mut idle) = (Vec::new(), 0);
        while !self.stop.load(Ordering::Acquire) {
            if self.changed.swap(false, Ordering::Acquire) {
                queues.clone_from(&self.queues.lock());
            }
            if queues.is_empty() {
                // `serve` and the end both unpark, after they have stored what is to be seen here.
                thread::park();
                continue;
            }
            let (mut any, mut gone) = (false, false);
            for queue in &queues {
                match queue.upgrade() {
                    Some(queue) => any |= queue.poll(),
                    None => gone = true,
                }
            }
            if gone {
                self.queues.lock().retain(|queue| queue.strong_count() > 0);
                self.changed.store(true, Ordering::Release);
            }
            if any {
                idle = 0;
                continue;
            }
            idle += 1;
            hint::spin_loop();
            if !self.pinned && idle >= ROUNDS_BEFORE_YIELD {
                idle = 0;
                thread::yield_now();
            }
        }
    }
}

impl Drop for ThreadHandle {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.lock().take() else { return };
        thread.thread().unpark();
        // The poller itself may be the last holder of a queue, and with it of this.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("a busy-poll thread panicked");
        }
    }
}

impl fmt::Debug for BusyPoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusyPoller")
            .field("queues", &self.handle.shared.queues.lock().len())
            .field("pinned", &self.handle.shared.pinned)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_that_are_not_there_are_refused() {
        for core in [CORES, 9999, usize::MAX] {
            assert_eq!(
                BusyPoller::pinned(core).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{core}"
            );
        }
    }
}
