//! Asynchronous events: read in one place, for users and for the crate itself.
//!
//! Whoever reads, be it a user's stream, an idle poll or the end of a queue pair, takes all there are into one backlog. What
//! they mean for queues of this device is seen to there and then; the events themselves stay for the user. So an event
//! is stolen from nobody, and one that nobody asks for is not missed by the queue that it ends.

#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use parking_lot::Mutex;

use crate::error::VerbError;
use crate::types::{AsyncEvent, Qpn};

/// Events kept for a user who does not ask for them; then the oldest go.
const BACKLOG: usize = 4096;

/// The events of an open device.
#[derive(Default)]
pub(super) struct Events {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Read, and not yet given.
    backlog: VecDeque<AsyncEvent>,
    /// The device has no more.
    ended: Option<VerbError>,
    /// Events that nobody asked for in time.
    lost: u64,
    /// Completion queues that live.
    queues: Vec<Weak<Fault>>,
    /// Queue pairs with a shared receive queue: set once they draw nothing more.
    drawing: HashMap<Qpn, Arc<AtomicBool>>,
    listeners: Vec<Weak<Listener>>,
}

/// Told that events are there.
pub(crate) type Listener = dyn Fn() + Send + Sync;

/// What an event says of a completion queue.
pub(super) struct Fault {
    id: u64,
    /// An `errno(3)`; 0: nothing.
    errno: AtomicI32,
    /// Told when it is set.
    listener: OnceLock<Box<Listener>>,
}

impl Fault {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self { id, errno: AtomicI32::new(0), listener: OnceLock::new() })
    }

    /// The error of the queue, if an event has said that it is dead.
    #[inline]
    pub(super) fn check(&self) -> Result<(), VerbError> {
        match self.errno.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(VerbError::new("ibv_get_async_event", errno)),
        }
    }

    /// Calls `listener`, once, on a thread of its own, when an event says that the queue is dead.
    pub(super) fn listen(&self, listener: Box<Listener>) -> Result<(), VerbError> {
        reserve()?;
        // Whoever comes second has the same to say: there is one awaited queue to each bare one.
        let _ = self.listener.set(listener);
        Ok(())
    }

    fn tell(&self) {
        if let Some(listener) = self.listener.get() {
            listener();
        }
    }
}

impl Events {
    /// Reads all there are with `next`; the oldest that was not given yet. Listeners are told here and now.
    pub(super) fn next(
        &self,
        next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>,
    ) -> Result<Option<AsyncEvent>, VerbError> {
        let News { listeners, dead } = self.read(next);
        listeners.iter().for_each(|listener| listener());
        News { listeners: Vec::new(), dead }.tell();
        let mut state = self.state.lock();
        match (state.backlog.pop_front(), state.ended) {
            (None, Some(error)) => Err(error),
            (event, _) => Ok(event),
        }
    }

    /// Reads all there are with `next`. Nobody is told on this thread: it may be in the middle of a drain, or of a change of
    /// state.
    pub(super) fn take(&self, next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>) {
        self.read(next).tell();
    }

    fn read(&self, mut next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>) -> News {
        let (mut dead, mut any) = (Vec::new(), false);
        let mut state = self.state.lock();
        while state.ended.is_none() {
            match next() {
                Ok(Some(event)) => {
                    any = true;
                    // Under the lock: a number is not given to another object before the event is understood.
                    state.understand(event, &mut dead);
                    state.keep(event);
                }
                Ok(None) => break,
                Err(error) => {
                    any = true;
                    state.ended = Some(error);
                    if error.is_device_gone() {
                        state.understand(AsyncEvent::DeviceFatal, &mut dead);
                    }
                }
            }
        }
        News { listeners: if any { state.listeners() } else { Vec::new() }, dead }
    }

    /// Calls `listener` whenever events were read, as long as it lives.
    pub(super) fn listen(&self, listener: &Arc<Listener>) -> Result<(), VerbError> {
        reserve()?;
        self.state.lock().listeners.push(Arc::downgrade(listener));
        Ok(())
    }

    /// Watches over a completion queue, as long as it lives.
    pub(super) fn watch(&self, fault: &Arc<Fault>) {
        let queues = &mut self.state.lock().queues;
        if queues.len() == queues.capacity() {
            queues.retain(|queue| queue.strong_count() > 0);
        }
        queues.push(Arc::downgrade(fault));
    }

    /// What becomes true when queue pair `qpn`, in the error state, takes no more receives from its shared queue.
    pub(super) fn watch_last_receive(&self, qpn: Qpn) -> Arc<AtomicBool> {
        let reached = Arc::new(AtomicBool::new(false));
        self.state.lock().drawing.insert(qpn, reached.clone());
        reached
    }

    /// Queue pair `qpn` is gone; `reached` is its own, for its number may have gone to another already.
    pub(super) fn forget_last_receive(&self, qpn: Qpn, reached: &Arc<AtomicBool>) {
        let drawing = &mut self.state.lock().drawing;
        if drawing.get(&qpn).is_some_and(|known| Arc::ptr_eq(known, reached)) {
            drawing.remove(&qpn);
        }
    }
}

impl State {
    fn understand(&mut self, event: AsyncEvent, dead: &mut Vec<Arc<Fault>>) {
        let is_dead: &dyn Fn(&Fault) -> bool = match event {
            AsyncEvent::DeviceFatal => &|_| true,
            AsyncEvent::CqError { cq } => &move |fault| fault.id == cq,
            AsyncEvent::LastWqeReached(qpn) => {
                if let Some(reached) = self.drawing.get(&qpn) {
                    reached.store(true, Ordering::Release);
                }
                return;
            }
            _ => return,
        };
        for fault in self.queues.iter().filter_map(Weak::upgrade).filter(|fault| is_dead(fault)) {
            if fault.errno.swap(VerbError::EIO, Ordering::Relaxed) == 0 {
                dead.push(fault);
            }
        }
    }

    fn keep(&mut self, event: AsyncEvent) {
        if self.backlog.len() == BACKLOG {
            self.backlog.pop_front();
            self.lost += 1;
            if self.lost.is_power_of_two() {
                tracing::warn!(
                    lost = self.lost,
                    "asynchronous events that nobody takes are forgotten"
                );
            }
        }
        self.backlog.push_back(event);
    }

    fn listeners(&mut self) -> Vec<Arc<Listener>> {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        self.listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Who is to hear of what was read.
struct News {
    listeners: Vec<Arc<Listener>>,
    dead: Vec<Arc<Fault>>,
}

impl News {
    /// Tells them, on a thread of its own: what they do runs code of users, which no lock may be held for. News are rare.
    fn tell(self) {
        self.tell_by(|news| {
            thread::Builder::new().name("rdma-events".to_owned()).spawn(news).map(drop)
        });
    }

    /// As [`tell`](Self::tell), on a thread that `spawn` starts; on the one in reserve, if it cannot.
    fn tell_by(mut self, spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>) {
        self.dead.retain(|fault| fault.listener.get().is_some());
        if self.listeners.is_empty() && self.dead.is_empty() {
            return;
        }
        let news = Arc::new(self);
        let told = Arc::clone(&news);
        if let Err(error) = spawn(Box::new(move || told.tell_here())) {
            tracing::warn!(%error, "no thread for an asynchronous event but the one in reserve");
            match reserve() {
                Ok(reserve) if reserve.send(news).is_ok() => {}
                // It was started before there was anybody to tell, and does not end.
                _ => unreachable!("who listens has made sure of it"),
            }
        }
    }

    fn tell_here(&self) {
        self.listeners.iter().for_each(|listener| listener());
        self.dead.iter().for_each(|fault| fault.tell());
    }
}

/// `EAGAIN` of `errno(3)`.
const EAGAIN: i32 = 11;

/// The thread that tells news when no other can be started: one for all devices, started with the first listener, so that
/// who sleeps hears of the end of his device on a machine that has run out of threads.
fn reserve() -> Result<Sender<Arc<News>>, VerbError> {
    static RESERVE: Mutex<Option<Sender<Arc<News>>>> = Mutex::new(None);
    let mut reserve = RESERVE.lock();
    if let Some(reserve) = &*reserve {
        return Ok(reserve.clone());
    }
    let (send, receive) = mpsc::channel::<Arc<News>>();
    let tell = move || {
        for news in receive {
            // A panic of a user's code is said by its hook, and holds up nobody else's news.
            let _ = catch_unwind(AssertUnwindSafe(|| news.tell_here()));
        }
    };
    let started = thread::Builder::new().name("rdma-events".to_owned()).spawn(tell);
    started.map_err(|error| {
        VerbError::new("pthread_create", error.raw_os_error().unwrap_or(EAGAIN))
    })?;
    Ok(reserve.insert(send).clone())
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Events")
            .field("backlog", &state.backlog.len())
            .field("lost", &state.lost)
            .field("ended", &state.ended)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn news_for_which_no_thread_can_be_started_are_told_by_the_one_in_reserve() {
        let (heard, hears) = mpsc::channel();
        let tell = |fault: Arc<Fault>| {
            let news = News { listeners: Vec::new(), dead: vec![fault] };
            news.tell_by(|_| Err(io::Error::from_raw_os_error(EAGAIN)));
        };
        // One whose code panics is no harm to those after it.
        let rude = Fault::new(1);
        rude.listen(Box::new(|| panic!("as told"))).unwrap();
        tell(rude);
        for id in 2..5 {
            let (fault, heard) = (Fault::new(id), heard.clone());
            fault.listen(Box::new(move || heard.send(id).unwrap())).unwrap();
            tell(fault);
            assert_eq!(hears.recv_timeout(Duration::from_secs(60)), Ok(id));
        }
    }
}
