//! The event channel of each open device, and the dispatch of its events to the inboxes of ids.
//! Wakers that Tokio's reactor calls ([`Reactors`]) drain the channel directly.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rdma_provider::locks::Mutex;
use tokio::runtime::{self, Handle};

use crate::dispatch::{Any, CmChannel, CmId};
use crate::error::{NoRuntime, VerbError};
use crate::verbs::Device;
use rdma_provider::cm_contract::{CmChannel as _, CmEvent, CmEventKind};
use rdma_provider::contract::Context as _;

use super::disposer::{Disposer, Hold};
use super::endpoint::on_blocking_thread;
use super::error::ConnectError;
use super::event_reactor::Reactors;
use super::inbox::Inbox;

pub(super) struct Router {
    pub(super) device: Device,
    pub(super) channel: Arc<CmChannel>,
    inboxes: Mutex<BTreeMap<u64, Arc<Inbox>>>,
    drain_state: Mutex<DrainState>,
    pub(super) reactors: Reactors,
    disposer: Arc<Disposer<Arc<CmId>>>,
}

/// Allows one drain at a time, so that each id's events stay in order.
#[derive(Debug, Default)]
struct DrainState {
    busy: bool,
    again: bool,
}

struct DrainLock<'a>(&'a Mutex<DrainState>);

impl<'a> DrainLock<'a> {
    fn try_lock(drain_state: &'a Mutex<DrainState>) -> Option<Self> {
        let mut state = drain_state.lock();
        if std::mem::replace(&mut state.busy, true) {
            state.again = true;
            return None;
        }
        Some(Self(drain_state))
    }
}

impl Drop for DrainLock<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
    }
}

/// If its runtime drops it, it is scheduled in another one.
struct DrainTask {
    router: Option<Arc<Router>>,
    runtime: runtime::Id,
    gone: Vec<runtime::Id>,
}

impl Drop for DrainTask {
    fn drop(&mut self) {
        if let Some(router) = self.router.take() {
            let mut gone = std::mem::take(&mut self.gone);
            gone.push(self.runtime);
            router.schedule_drain(gone);
        }
    }
}

const QUOTA: usize = 64;

/// By address of the device, which a live router keeps alive, so that no other device has the
/// address.
static ROUTERS: Mutex<Vec<(usize, Weak<Router>)>> = Mutex::new(Vec::new());

fn find(routers: &[(usize, Weak<Router>)], device: &Device) -> Option<Arc<Router>> {
    let address = device.address();
    routers.iter().filter(|(of, _)| *of == address).find_map(|(_, router)| router.upgrade())
}

/// Makes an id of a port space.
pub(super) type CreateId = fn(&Router) -> Result<CmId, VerbError>;

impl Router {
    /// Lets the current runtime watch the router, which is dropped with its last id.
    pub(super) async fn of(device: &Device) -> Result<Arc<Self>, ConnectError> {
        let router = match Self::known(device) {
            Some(router) => router,
            None if !device.may_block() => Self::make(device)?,
            // librdmacm reads sysfs.
            None => {
                let device = device.clone();
                on_blocking_thread(move || Ok(Self::make(&device)?)).await?
            }
        };
        router.watch()?;
        Ok(router)
    }

    fn make(device: &Device) -> Result<Arc<Self>, VerbError> {
        let router = Arc::new(Self {
            device: device.clone(),
            // Before the lock on all routers is taken, because this may block.
            channel: Arc::new(device.context().create_cm_channel()?),
            inboxes: Mutex::default(),
            drain_state: Mutex::default(),
            reactors: Reactors::default(),
            disposer: Arc::default(),
        });
        let mut routers = ROUTERS.lock();
        if let Some(known) = find(&routers, device) {
            // The channel is closed without the lock.
            drop(routers);
            return Ok(known);
        }
        routers.retain(|(_, router)| router.strong_count() > 0);
        routers.push((device.address(), Arc::downgrade(&router)));
        Ok(router)
    }

    fn known(device: &Device) -> Option<Arc<Self>> {
        find(&ROUTERS.lock(), device)
    }

    /// Does not block: librdmacm writes one command, and the kernel takes a short lock.
    pub(super) fn create_id(&self) -> Result<CmId, VerbError> {
        self.channel.create_id()
    }

    /// Does not block either.
    pub(super) fn create_datagram_id(&self) -> Result<CmId, VerbError> {
        self.channel.create_datagram_id()
    }

    pub(super) fn watch(self: &Arc<Self>) -> Result<(), NoRuntime> {
        self.reactors.watch(self)
    }

    pub(super) fn wake_waiters(&self) {
        let inboxes: Vec<_> = self.inboxes.lock().values().cloned().collect();
        inboxes.iter().for_each(|inbox| inbox.wake_all());
    }

    pub(super) fn add(&self, key: u64, inbox: &Arc<Inbox>) {
        self.inboxes.lock().insert(key, Arc::clone(inbox));
    }

    pub(super) fn remove(&self, key: u64) {
        let removed = self.inboxes.lock().remove(&key);
        drop(removed);
    }

    pub(super) fn dispose(self: &Arc<Self>, ids: impl IntoIterator<Item = Arc<CmId>>) {
        if !self.channel.may_block() {
            return ids.into_iter().for_each(drop);
        }
        // The closure keeps the router alive, so that a bind of the same address finds this
        // disposer and waits.
        let router = Arc::clone(self);
        self.disposer.dispose(ids, move || router.schedule_drain(Vec::new()));
    }

    /// Delays [`disposed`](Self::disposed) of others while the result lives, because an id that a
    /// thread uses may follow to [`dispose`](Self::dispose).
    pub(super) fn hold_disposed(&self) -> Hold<Arc<CmId>> {
        self.disposer.hold()
    }

    /// Waits until the ids given to [`dispose`](Self::dispose) are destroyed and nothing
    /// [holds](Self::hold_disposed) it, for at most a second. Other devices' ids count too if they
    /// compete for the same addresses.
    pub(super) async fn disposed(&self) -> Result<(), ConnectError> {
        if !self.channel.may_block() {
            return Ok(());
        }
        let port_space = self.channel.port_space();
        // A last reference is dropped on the thread below, because that closes a channel.
        let all: Vec<_> = ROUTERS.lock().iter().filter_map(|(_, known)| known.upgrade()).collect();
        on_blocking_thread(move || {
            let end = Instant::now() + Duration::from_secs(1);
            let rivals = all.iter().filter(|router| router.channel.port_space() == port_space);
            rivals.for_each(|router| router.disposer.wait_until_idle(end));
            Ok(())
        })
        .await
    }

    pub(super) fn drain(self: &Arc<Self>) {
        // A peer can cause any number of events, so a task continues after `QUOTA` of them.
        let (mut left, mut refused) = (QUOTA, Vec::new());
        loop {
            // If another drain is running, it continues instead.
            let Some(lock) = DrainLock::try_lock(&self.drain_state) else { break };
            while left > 0 && !self.disposer.is_stalled() {
                match self.channel.take_event() {
                    Ok(Some(event)) => {
                        left -= 1;
                        if let Some(id) = self.dispatch(event) {
                            refused.push(Arc::new(id));
                        }
                        if self.channel.is_empty() {
                            break;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        rdma_provider::error!(
                            device = self.device.name(),
                            %error,
                            "failed to read a connection manager event; retrying at the next wake"
                        );
                        break;
                    }
                }
            }
            drop(lock);
            if left == 0 || !std::mem::take(&mut self.drain_state.lock().again) {
                break;
            }
        }
        if !refused.is_empty() {
            // Together, to occupy only one thread.
            self.dispose(refused);
        }
        if left == 0 {
            self.schedule_drain(Vec::new());
        }
    }

    fn schedule_drain(self: &Arc<Self>, gone: Vec<runtime::Id>) {
        // The reactor's wakers may run outside of any runtime context.
        let current = Handle::try_current().ok().filter(|_| gone.is_empty());
        let runtime = current.or_else(|| self.reactors.handle(&gone));
        // Otherwise no task waits, and the channel stays readable for a later waiter.
        if let Some(runtime) = runtime {
            let mut next =
                DrainTask { router: Some(Arc::clone(self)), runtime: runtime.id(), gone };
            drop(runtime.spawn(async move {
                if let Some(router) = next.router.take() {
                    router.drain();
                }
            }));
        }
    }

    fn dispatch(self: &Arc<Self>, event: CmEvent<Any>) -> Option<CmId> {
        let CmEvent { key, kind } = event;
        rdma_provider::trace!(key, ?kind, "connection event");
        let inbox = self.inboxes.lock().get(&key).cloned();
        let Some(inbox) = inbox else {
            // The event's id has been destroyed.
            return match kind {
                CmEventKind::ConnectRequest { id, .. } => Some(id),
                _ => None,
            };
        };
        if let CmEventKind::ConnectRequest { id, peer } = kind {
            let Some(requests) = &inbox.requests else { return Some(id) };
            let refused = requests.push(id, peer);
            if refused.is_none() {
                inbox.wake_one();
            }
            return refused;
        }
        inbox.on_event(kind);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_provider::cm_contract::CmId as _;

    #[test]
    fn draining_many_events_yields_to_other_tasks() {
        const EVENTS: usize = 5 * QUOTA / 2;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let device = Device::software_in(&crate::software::Network::new(), "flooded").unwrap();
            let router = Router::make(&device).unwrap();
            let ids: Vec<_> = (0..EVENTS)
                .map(|_| {
                    let (id, inbox) = (router.create_id().unwrap(), Inbox::new(None));
                    router.add(id.key(), &inbox);
                    let unreachable = ([127, 0, 0, 1], 1).into();
                    id.resolve_addr(None, unreachable, std::time::Duration::from_secs(1)).unwrap();
                    (id, inbox)
                })
                .collect();
            let inboxes: Vec<_> = ids.iter().map(|(_, inbox)| inbox.clone()).collect();
            let filed = move || {
                inboxes.iter().filter(|inbox| inbox.state(|state| state.address.is_some())).count()
            };
            router.drain();
            assert_eq!(filed(), QUOTA);
            // Runs between the next two drains.
            let other = tokio::spawn({
                let filed = filed.clone();
                async move { filed() }
            });
            assert_eq!(other.await.unwrap(), 2 * QUOTA);
            tokio::spawn(async {}).await.unwrap();
            assert_eq!(filed(), EVENTS);
        });
    }

    #[test]
    fn open_device_shares_one_router_while_in_use() {
        let network = crate::software::Network::new();
        let open = || Device::software_in(&network, "routed").unwrap();
        let (first, second) = (open(), open());
        let router = Router::make(&first).unwrap();
        // Loses a race against the first.
        assert!(Arc::ptr_eq(&router, &Router::make(&first.clone()).unwrap()));
        assert!(Arc::ptr_eq(&router, &Router::known(&first).unwrap()));
        assert!(Router::known(&second).is_none());
        assert!(!Arc::ptr_eq(&router, &Router::make(&second).unwrap()));
        let gone = Arc::downgrade(&router);
        drop(router);
        assert!(gone.upgrade().is_none());
    }
}
