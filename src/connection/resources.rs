//! The protection domain and buffers of a connection, and its lease of shared completion queues.
//!
//! Creating a domain and buffers takes longer than connecting, so a closed connection leaves them
//! to the next one of the same settings on its device. Only one connection has them at a time: keys
//! work throughout a protection domain, so memory exposed to one peer must be inaccessible to
//! others.

#![forbid(unsafe_code)]

use std::fmt;
use std::mem;
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;

use super::config::{Completions, ConnectionConfig};
use super::shared_completions::{QueueLease, SharedCompletions};
use crate::engine::CompletionQueue;
use crate::error::SetupError;
use crate::memory::Pool;
use crate::verbs::{Device, ProtectionDomain};

#[derive(Debug)]
struct Resources {
    receive_pool: Pool,
    send_pool: Option<Pool>,
    pd: ProtectionDomain,
    /// The references to `pd` of these resources; `None` if they cannot be reused.
    references: Option<usize>,
    sizes: Sizes,
}

/// Connections with the same sizes can reuse the resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    /// Size and number of the first receive buffers, and of send buffers.
    receives: (usize, usize),
    sends: (usize, usize),
}

/// The maximum of unused resources of a device. Few suffice, because connections that close leave
/// theirs to those being made; with `preallocate`, each may hold over a mebibyte.
pub(super) const MAX_IDLE: usize = 8;

/// The shared completion queues and unused resources of an open device, kept while it has a
/// connection or listener.
pub(super) struct ResourceCache {
    device: Device,
    idle: Mutex<Vec<Resources>>,
    pub(super) queues: SharedCompletions,
}

static CACHES: Mutex<Vec<Weak<ResourceCache>>> = Mutex::new(Vec::new());

impl ResourceCache {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        // May hold a last reference, so dropped after the lock.
        let mut seen = Vec::new();
        let mut caches = CACHES.lock();
        caches.retain(|cache| cache.strong_count() > 0);
        seen.extend(caches.iter().filter_map(Weak::upgrade));
        let known = seen.iter().find(|cache| cache.device.same(device)).cloned();
        let cache = known.unwrap_or_else(|| {
            let new = Arc::new(Self {
                device: device.clone(),
                idle: Mutex::default(),
                queues: SharedCompletions::default(),
            });
            caches.push(Arc::downgrade(&new));
            new
        });
        drop(caches);
        drop(seen);
        cache
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn idle(&self) -> usize {
        self.idle.lock().len()
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn take(
        self: Arc<Self>,
        config: &ConnectionConfig,
    ) -> Result<ConnectionResources, SetupError> {
        let queues = self.retry_without_idle(|| Queues::new(&self, config))?;
        let sizes = Sizes::of(config);
        let found = {
            let mut idle = self.idle.lock();
            let at = idle.iter().rposition(|resources| resources.sizes == sizes);
            at.map(|at| idle.swap_remove(at))
        };
        let resources = match found {
            Some(resources) => resources,
            None => self.retry_without_idle(|| {
                let mut new = Resources::new(self.device.protection_domain()?, config)?;
                new.references = Some(new.pd.references());
                Ok(new)
            })?,
        };
        Ok(ConnectionResources { resources: Some(resources), queues, cache: Some(self) })
    }

    /// If `make` fails, drops unused resources, which count towards the limits of the device and of
    /// locked memory, and tries once more.
    fn retry_without_idle<T>(
        &self,
        make: impl Fn() -> Result<T, SetupError>,
    ) -> Result<T, SetupError> {
        make().or_else(|error| {
            let idle = mem::take(&mut *self.idle.lock());
            if idle.is_empty() {
                return Err(error);
            }
            drop(idle);
            make()
        })
    }

    fn give_back(&self, resources: Resources) {
        let mut idle = self.idle.lock();
        if idle.len() == MAX_IDLE {
            // The oldest has waited longest, perhaps for settings that are no longer used.
            let oldest = idle.remove(0);
            idle.push(resources);
            drop(idle);
            drop(oldest);
        } else {
            idle.push(resources);
        }
    }
}

impl fmt::Debug for ResourceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResourceCache")
            .field("device", &self.device)
            .field("idle", &self.idle.lock().len())
            .finish()
    }
}

impl Sizes {
    fn of(config: &ConnectionConfig) -> Self {
        Self { receives: config.first_buffers(), sends: config.first_send_buffers() }
    }
}

impl Resources {
    fn new(pd: ProtectionDomain, config: &ConnectionConfig) -> Result<Self, SetupError> {
        let sizes = Sizes::of(config);
        let pool = |(size, buffers)| Pool::new(&pd, size, buffers);
        let receive_pool = pool(sizes.receives)?;
        let send_pool = if sizes.sends.1 == 0 { None } else { Some(pool(sizes.sends)?) };
        Ok(Self { receive_pool, send_pool, pd, references: None, sizes })
    }

    /// Returns true if no queue pair, region or buffer uses the resources. An object that the
    /// device did not release keeps a reference.
    fn is_unused(&self) -> bool {
        self.references == Some(self.pd.references())
            && self.receive_pool.available() == self.receive_pool.total()
            && self.send_pool.iter().all(|pool| pool.available() == pool.total())
    }
}

#[derive(Debug)]
enum Queues {
    Given(CompletionQueue),
    Leased(QueueLease),
}

impl Queues {
    fn new(cache: &Arc<ResourceCache>, config: &ConnectionConfig) -> Result<Self, SetupError> {
        Ok(match &config.completions {
            Completions::Given(queue) => Self::Given(queue.clone()),
            Completions::Mode(mode) => {
                let entries = [config.max_send_wr, config.most_receives()];
                Self::Leased(QueueLease::new(cache.clone(), mode, entries)?)
            }
        })
    }
}

/// Dropped after everything that uses them, they are left to another connection.
pub(super) struct ConnectionResources {
    /// `None` only in `drop`.
    resources: Option<Resources>,
    queues: Queues,
    /// `None` for a protection domain of the application, which other objects may use.
    cache: Option<Arc<ResourceCache>>,
}

impl ConnectionResources {
    pub(super) fn in_domain(
        pd: &ProtectionDomain,
        config: &ConnectionConfig,
    ) -> Result<Self, SetupError> {
        let queues = Queues::new(&ResourceCache::of(pd.device()), config)?;
        Ok(Self { resources: Some(Resources::new(pd.clone(), config)?), queues, cache: None })
    }

    fn get(&self) -> &Resources {
        let Some(resources) = &self.resources else { unreachable!("taken by `drop` only") };
        resources
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.get().pd
    }

    pub(super) fn queues(&self) -> [CompletionQueue; 2] {
        match &self.queues {
            Queues::Given(queue) => [queue.clone(), queue.clone()],
            Queues::Leased(lease) => lease.queues.clone(),
        }
    }

    pub(super) fn pools(&self) -> (Pool, Option<Pool>) {
        let resources = self.get();
        (resources.receive_pool.clone(), resources.send_pool.clone())
    }
}

impl Drop for ConnectionResources {
    fn drop(&mut self) {
        if let (Some(resources), Some(cache)) = (self.resources.take(), &self.cache)
            && resources.is_unused()
        {
            cache.give_back(resources);
        }
    }
}

impl fmt::Debug for ConnectionResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.resources.fmt(f)
    }
}
