//! Asynchronous events, read for the user and for the crate itself.
//!
//! Every reader (the user's stream, an idle poll, a teardown) applies all pending events to the
//! device's queues and moves them to a backlog for the user. So a fatal event takes effect even if
//! the user reads no events.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use rdma_provider::locks::Mutex;

use crate::error::VerbError;
use crate::types::{AsyncEvent, Qpn};

const BACKLOG: usize = 4096;

#[derive(Default)]
pub(super) struct Events {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    backlog: VecDeque<AsyncEvent>,
    ended: Option<VerbError>,
    lost: u64,
    ports: PortEvents,
    queues: BTreeMap<u64, Arc<Fault>>,
    last_receives: BTreeMap<Qpn, Arc<AtomicBool>>,
    listeners: Vec<(EventKind, Weak<Listener>)>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PortEvents {
    pub(crate) changes: u64,
    pub(crate) removed: bool,
}

pub(crate) type Listener = dyn Fn() + Send + Sync;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    Any,
    Port,
}

pub(super) struct Fault {
    id: u64,
    errno: AtomicI32,
    listener: OnceLock<Box<Listener>>,
}

impl Fault {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self { id, errno: AtomicI32::new(0), listener: OnceLock::new() })
    }

    #[inline]
    pub(super) fn check(&self) -> Result<(), VerbError> {
        match self.errno.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(VerbError::new("ibv_get_async_event", errno)),
        }
    }

    pub(super) fn listen(&self, listener: Box<Listener>) -> Result<(), VerbError> {
        reserve()?;
        // A second listener would be equal: each `Cq` belongs to one `CompletionQueue`.
        let _ = self.listener.set(listener);
        Ok(())
    }
}

impl Events {
    /// Calls the listeners of all pending events on this thread, and returns the oldest event.
    pub(super) fn next(
        &self,
        next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>,
    ) -> Result<Option<AsyncEvent>, VerbError> {
        let Notifications { listeners, dead } = self.read(next);
        listeners.iter().for_each(|listener| listener());
        Notifications { listeners: Vec::new(), dead }.notify();
        let mut state = self.state.lock();
        match (state.backlog.pop_front(), state.ended) {
            (None, Some(error)) => Err(error),
            (event, _) => Ok(event),
        }
    }

    /// The listeners run on another thread, because this one may be draining a queue or changing
    /// the state of a queue pair.
    pub(super) fn take(&self, next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>) {
        self.read(next).notify();
    }

    fn read(
        &self,
        mut next: impl FnMut() -> Result<Option<AsyncEvent>, VerbError>,
    ) -> Notifications {
        let (mut dead, mut any) = (Vec::new(), false);
        let mut state = self.state.lock();
        let changes = state.ports.changes;
        while state.ended.is_none() {
            match next() {
                Ok(Some(event)) => {
                    any = true;
                    // Under the lock, so that no new queue with the same number is registered
                    // first.
                    state.apply(event, &mut dead);
                    state.enqueue(event);
                }
                Ok(None) => break,
                Err(error) => {
                    any = true;
                    state.ended = Some(error);
                    if error.is_device_gone() {
                        state.apply(AsyncEvent::DeviceFatal, &mut dead);
                    }
                }
            }
        }
        let ports = state.ports.changes != changes;
        let listeners = if any { state.listeners(ports) } else { Vec::new() };
        Notifications { listeners, dead }
    }

    pub(super) fn port_changes(&self) -> Option<u64> {
        let state = self.state.lock();
        state.ended.is_none().then_some(state.ports.changes)
    }

    pub(super) fn ports(&self) -> PortEvents {
        self.state.lock().ports
    }

    pub(super) fn listen(
        &self,
        kind: EventKind,
        listener: &Arc<Listener>,
    ) -> Result<(), VerbError> {
        reserve()?;
        let listeners = &mut self.state.lock().listeners;
        if listeners.len() == listeners.capacity() {
            listeners.retain(|(_, listener)| listener.strong_count() > 0);
        }
        listeners.push((kind, Arc::downgrade(listener)));
        Ok(())
    }

    pub(super) fn watch(&self, fault: &Arc<Fault>) {
        self.state.lock().queues.insert(fault.id, fault.clone());
    }

    /// Must precede the destruction of the queue, because another queue may then get its number.
    pub(super) fn unwatch(&self, fault: &Fault) {
        let removed = self.state.lock().queues.remove(&fault.id);
        // Dropped without the lock, because its listener is user code.
        drop(removed);
    }

    /// The flag is set when the device reports `LAST_WQE_REACHED` for queue pair `qpn`.
    pub(super) fn watch_last_receive(&self, qpn: Qpn) -> Arc<AtomicBool> {
        let reached = Arc::new(AtomicBool::new(false));
        self.state.lock().last_receives.insert(qpn, reached.clone());
        reached
    }

    /// Does nothing if a new queue pair with the same number has replaced the flag.
    pub(super) fn unwatch_last_receive(&self, qpn: Qpn, reached: &Arc<AtomicBool>) {
        let last_receives = &mut self.state.lock().last_receives;
        if last_receives.get(&qpn).is_some_and(|known| Arc::ptr_eq(known, reached)) {
            last_receives.remove(&qpn);
        }
    }
}

impl State {
    fn apply(&mut self, event: AsyncEvent, dead: &mut Vec<Arc<Fault>>) {
        self.ports.removed |= event == AsyncEvent::DeviceFatal;
        // An event without a name of its own may be a change of a port, too.
        self.ports.changes += u64::from(matches!(
            event,
            AsyncEvent::PortActive(_)
                | AsyncEvent::PortError(_)
                | AsyncEvent::GidChange(_)
                | AsyncEvent::LidChange(_)
                | AsyncEvent::PkeyChange(_)
                | AsyncEvent::SubnetManagerChange(_)
                | AsyncEvent::ClientReregister(_)
                | AsyncEvent::DeviceFatal
                | AsyncEvent::Other(_)
        ));
        let is_dead: &dyn Fn(&Fault) -> bool = match event {
            AsyncEvent::DeviceFatal => &|_| true,
            AsyncEvent::CqError { cq } => &move |fault| fault.id == cq,
            AsyncEvent::LastWqeReached(qpn) => {
                if let Some(reached) = self.last_receives.get(&qpn) {
                    reached.store(true, Ordering::Release);
                }
                return;
            }
            _ => return,
        };
        for fault in self.queues.values().filter(|fault| is_dead(fault)) {
            if fault.errno.swap(VerbError::EIO, Ordering::Relaxed) == 0 {
                dead.push(fault.clone());
            }
        }
    }

    fn enqueue(&mut self, event: AsyncEvent) {
        if self.backlog.len() == BACKLOG {
            self.backlog.pop_front();
            self.lost += 1;
            if self.lost.is_power_of_two() {
                rdma_provider::warn!(
                    lost = self.lost,
                    "asynchronous event backlog full; dropping the oldest events"
                );
            }
        }
        self.backlog.push_back(event);
    }

    fn listeners(&mut self, ports: bool) -> Vec<Arc<Listener>> {
        self.listeners.retain(|(_, listener)| listener.strong_count() > 0);
        let interested = self.listeners.iter().filter(|(of, _)| ports || *of == EventKind::Any);
        interested.filter_map(|(_, listener)| listener.upgrade()).collect()
    }
}

struct Notifications {
    listeners: Vec<Arc<Listener>>,
    dead: Vec<Arc<Fault>>,
}

impl Notifications {
    /// Uses a new thread, because listeners run user code and this one may hold locks. Events are
    /// rare.
    fn notify(self) {
        self.notify_on(|run| {
            thread::Builder::new().name("rdma-events".to_owned()).spawn(run).map(drop)
        });
    }

    fn notify_on(mut self, spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>) {
        self.dead.retain(|fault| fault.listener.get().is_some());
        if self.listeners.is_empty() && self.dead.is_empty() {
            return;
        }
        let notifications = Arc::new(self);
        let sent = Arc::clone(&notifications);
        if let Err(error) = spawn(Box::new(move || sent.notify_here())) {
            rdma_provider::warn!(
                %error,
                "failed to start a thread for asynchronous events; using the reserve thread"
            );
            match reserve() {
                Ok(reserve) if reserve.send(notifications).is_ok() => {}
                // The reserve thread never ends.
                _ => unreachable!("registering a listener starts the reserve thread"),
            }
        }
    }

    fn notify_here(&self) {
        self.listeners.iter().for_each(|listener| listener());
        self.dead.iter().filter_map(|fault| fault.listener.get()).for_each(|listener| listener());
    }
}

/// Calls listeners if no other thread can be started, so that waiting tasks always learn of a lost
/// device. Serves all devices and starts with the first listener.
fn reserve() -> Result<Sender<Arc<Notifications>>, VerbError> {
    static RESERVE: Mutex<Option<Sender<Arc<Notifications>>>> = Mutex::new(None);
    let mut reserve = RESERVE.lock();
    if let Some(reserve) = &*reserve {
        return Ok(reserve.clone());
    }
    let (send, receive) = mpsc::channel::<Arc<Notifications>>();
    let notify = move || {
        for notifications in receive {
            // The panic hook has reported it; later notifications must be delivered.
            let _ = catch_unwind(AssertUnwindSafe(|| notifications.notify_here()));
        }
    };
    let started = thread::Builder::new().name("rdma-events".to_owned()).spawn(notify);
    started.map_err(|error| VerbError::no_thread(&error))?;
    Ok(reserve.insert(send).clone())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::contained::tests::HANG;

    // Shows C1, F3.
    #[test]
    fn notifications_use_the_reserve_thread_when_no_other_starts() {
        let (called, calls) = mpsc::channel();
        let notify = |fault: Arc<Fault>| {
            let notifications = Notifications { listeners: Vec::new(), dead: vec![fault] };
            notifications.notify_on(|_| Err(io::ErrorKind::WouldBlock.into()));
        };
        // A panicking listener does not affect later ones.
        let panicking = Fault::new(1);
        panicking.listen(Box::new(|| panic!("intended"))).unwrap();
        notify(panicking);
        for id in 2..5 {
            let (fault, called) = (Fault::new(id), called.clone());
            fault.listen(Box::new(move || called.send(id).unwrap())).unwrap();
            notify(fault);
            assert_eq!(calls.recv_timeout(HANG), Ok(id));
        }
    }
}
