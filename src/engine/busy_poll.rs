use std::fmt;
use std::hint;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use rdma_provider::locks::Mutex;
use rustix::thread::{CpuSet, sched_setaffinity};

const ROUNDS_BEFORE_YIELD: u32 = 64;
/// Only a poll notices failures, so a queue that seems empty is polled after this many rounds.
const ROUNDS_BEFORE_POLL: u32 = 63;
const ROUNDS_LEFT_TO_POSTER: u32 = 2;

static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// A thread that polls completion queues and never sleeps while it has one. Clones share it.
///
/// The thread ends when the last clone and the last completion queue that uses it are dropped. If
/// more pollers spin than the process has cores, a `tracing` warning says so, because completions
/// then wait for the scheduler.
///
/// ```
/// use tokio_rdma::completion::BusyPoller;
/// # use tokio_rdma::*;
///
/// # let device = Device::software()?;
/// // One thread polls both queues.
/// let poller = BusyPoller::new()?;
/// let sends = CompletionQueue::new(&device, CompletionMode::BusyPoll(poller.clone()))?;
/// let receives = CompletionQueue::new(&device, CompletionMode::BusyPoll(poller))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct BusyPoller {
    handle: Arc<ThreadHandle>,
}

pub(super) trait Polled: Send + Sync {
    /// `None` if the answer would slow down other threads.
    fn glance(&self) -> Option<bool>;

    /// Takes the available completions unless another thread is draining; returns false if there
    /// was nothing to do. `left_out` polls were skipped after a [`glance`](Self::glance).
    fn poll(&self, left_out: u32) -> bool;
}

struct Watched {
    queue: Weak<dyn Polled>,
    found: u32,
    left_out: u32,
    /// The last poll found nothing after a glance had: the queue failed, or another thread was
    /// faster.
    contradicted: bool,
}

impl Watched {
    /// `None` if the queue was dropped.
    #[inline]
    fn poll(&mut self) -> Option<bool> {
        let queue = self.queue.upgrade()?;
        if self.left_out < ROUNDS_BEFORE_POLL
            && let Some(found) = queue.glance()
        {
            self.found = if found { self.found + 1 } else { 0 };
            // For some rounds, a completion is left to a task that awaits what it has just posted:
            // taking it here would cost a wake-up.
            if self.found < ROUNDS_LEFT_TO_POSTER {
                self.left_out += 1;
                return Some(found && !self.contradicted);
            }
        }
        let seen = std::mem::take(&mut self.found) > 0;
        let any = queue.poll(std::mem::take(&mut self.left_out));
        self.contradicted = seen && !any;
        Some(any)
    }
}

struct ThreadHandle {
    shared: Arc<PollerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct PollerState {
    queues: Mutex<Queues>,
    changed: AtomicBool,
    stop: AtomicBool,
    pinned: bool,
}

#[derive(Default)]
struct Queues {
    list: Vec<Weak<dyn Polled>>,
    /// Counted in [`SPINNING`].
    spins: bool,
}

impl BusyPoller {
    /// Starts an unpinned poller.
    ///
    /// # Errors
    ///
    /// The error of the operating system if the thread cannot be started.
    pub fn new() -> io::Result<Self> {
        Self::start(None)
    }

    /// Starts a poller on processor `core`, in the numbering of the operating system, which nothing
    /// else should use.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the core does not exist or the thread cannot be pinned there.
    pub fn pinned(core: usize) -> io::Result<Self> {
        if core >= CpuSet::MAX_CPU { Err(unpinnable(core)) } else { Self::start(Some(core)) }
    }

    fn start(core: Option<usize>) -> io::Result<Self> {
        let shared = Arc::new(PollerState {
            queues: Mutex::default(),
            changed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pinned: core.is_some(),
        });
        let (poller, (report, pinned)) = (shared.clone(), std::sync::mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("rdma-busy-poll".to_owned()).spawn(move || {
            let pinned = core.is_none_or(|core| pin(core).is_ok());
            if report.send(pinned).is_ok() && pinned {
                // Wakers contain their own panics. After any other panic the thread continues, for
                // its other queues.
                while catch_unwind(AssertUnwindSafe(|| poller.run())).is_err() {
                    rdma_provider::error!("a busy-poll thread panicked; continuing");
                    poller.changed.store(true, Ordering::Release);
                }
            }
        })?;
        if !pinned.recv().unwrap_or(false) {
            return Err(unpinnable(core.unwrap_or_default()));
        }
        Ok(Self { handle: Arc::new(ThreadHandle { shared, thread: Mutex::new(Some(thread)) }) })
    }

    pub(super) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.handle, &other.handle)
    }

    pub(super) fn serve(&self, queue: Weak<dyn Polled>) {
        self.handle.shared.queues.lock().push(queue);
        self.handle.shared.changed.store(true, Ordering::Release);
        if let Some(thread) = &*self.handle.thread.lock() {
            thread.thread().unpark();
        }
    }
}

impl Queues {
    fn push(&mut self, queue: Weak<dyn Polled>) {
        self.list.push(queue);
        if std::mem::replace(&mut self.spins, true) {
            return;
        }
        let pollers = SPINNING.fetch_add(1, Ordering::Relaxed) + 1;
        let cores = thread::available_parallelism().map_or(usize::MAX, Into::into);
        // Once, at the first poller too many.
        if pollers.checked_sub(1) == Some(cores) {
            rdma_provider::warn!(
                pollers,
                cores,
                "more busy-poll threads spin than this process has cores; completions wait for \
                 the scheduler: share a BusyPoller between completion queues"
            );
        }
    }

    fn retain(&mut self, keep: impl Fn(&Weak<dyn Polled>) -> bool) {
        self.list.retain(keep);
        if self.list.is_empty() && std::mem::take(&mut self.spins) {
            SPINNING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn pin(core: usize) -> rustix::io::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores)
}

fn unpinnable(core: usize) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("cannot pin a thread to core {core}"))
}

impl PollerState {
    fn run(&self) {
        let (mut queues, mut idle) = (Vec::new(), 0);
        while !self.stop.load(Ordering::Acquire) {
            if self.changed.swap(false, Ordering::Acquire) {
                queues.clear();
                queues.extend(self.queues.lock().list.iter().map(|queue| Watched {
                    queue: queue.clone(),
                    found: 0,
                    left_out: 0,
                    contradicted: false,
                }));
            }
            if queues.is_empty() {
                // `serve` and the drop of the handle store their change before they unpark this
                // thread.
                thread::park();
                continue;
            }
            let (mut any, mut gone) = (false, false);
            for queue in &mut queues {
                match queue.poll() {
                    Some(found) => any |= found,
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
        self.shared.queues.lock().retain(|_| false);
        let Some(thread) = self.thread.lock().take() else { return };
        thread.thread().unpark();
        // The poller itself may drop the last reference to a queue, and with it this handle.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            rdma_provider::error!(
                "a busy-poll thread panicked; its completion queues were no longer polled"
            );
        }
    }
}

impl fmt::Debug for BusyPoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusyPoller")
            .field("queues", &self.handle.shared.queues.lock().list.len())
            .field("pinned", &self.handle.shared.pinned)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue whose entries are never taken, as after a failure.
    struct Failed;

    impl Polled for Failed {
        fn glance(&self) -> Option<bool> {
            Some(true)
        }

        fn poll(&self, _left_out: u32) -> bool {
            false
        }
    }

    #[test]
    fn failed_queue_counts_as_idle() {
        let queue: Arc<dyn Polled> = Arc::new(Failed);
        let mut watched =
            Watched { queue: Arc::downgrade(&queue), found: 0, left_out: 0, contradicted: false };
        let busy = (0..10 * ROUNDS_BEFORE_POLL).filter(|_| watched.poll() == Some(true)).count();
        assert!(busy < ROUNDS_LEFT_TO_POSTER as usize, "{busy}");
        drop(queue);
        assert_eq!(watched.poll(), None);
    }

    #[test]
    fn pinning_to_a_missing_core_is_refused() {
        for core in [CpuSet::MAX_CPU, 9999, usize::MAX] {
            assert_eq!(
                BusyPoller::pinned(core).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{core}"
            );
        }
    }
}
