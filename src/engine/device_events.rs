use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::task::AtomicWaker;
use rdma_provider::later::contained;

use crate::contained::ContainedWaker;
use crate::coop::within_budget;
use crate::error::{NoRuntime, VerbError};
use crate::readable::Readable;
use crate::types::{AsyncEvent, PortNum, PortState};
use crate::verbs::{Device, EventKind, Listener};

impl Device {
    /// Returns a stream of the device's asynchronous events: faults and changes that belong to no
    /// work request, for example of a port. Operations report faults by their own results; events
    /// add the reason.
    ///
    /// Each event is delivered to one stream only. The latest 4096 undelivered events are kept.
    ///
    /// # Errors
    ///
    /// - Kind `Unsupported` with [`NoRuntime`] outside of a Tokio runtime with an I/O driver;
    /// - an I/O error if the descriptor cannot be registered with the current runtime, or the
    ///   thread that reports events read by another task cannot be started.
    pub fn events(&self) -> io::Result<DeviceEvents> {
        let fd = NoRuntime::or_registered(|| readable(self))??;
        let (waker, listener) = listen(self, EventKind::Any)?;
        Ok(DeviceEvents {
            fd,
            device: self.clone(),
            waker,
            _listener: listener,
            wakers: ContainedWaker::default(),
            ended: false,
        })
    }
}

/// The waker is woken, while the listener exists, after other code has read events of `kind`.
fn listen(
    device: &Device,
    kind: EventKind,
) -> Result<(Arc<AtomicWaker>, Arc<Listener>), VerbError> {
    let waker = Arc::new(AtomicWaker::new());
    let notified = waker.clone();
    let listener: Arc<Listener> = Arc::new(move || contained(|| notified.wake()));
    device.on_events(kind, &listener)?;
    Ok((waker, listener))
}

/// Duplicates the descriptor, because it can be registered only once.
pub(super) fn readable(device: &Device) -> io::Result<Readable<OwnedFd>> {
    let fd = device.event_fd().try_clone_to_owned()?;
    Readable::new(fd)
}

/// A stream of a device's asynchronous events, which ends when the device is gone. See
/// [`Device::events`].
///
/// # Cancel safety
///
/// Dropping the stream, or a future of its next item, loses no undelivered event.
pub struct DeviceEvents {
    fd: Readable<OwnedFd>,
    device: Device,
    /// Woken when another task has read events into the backlog: the descriptor is then no longer
    /// readable.
    waker: Arc<AtomicWaker>,
    _listener: Arc<Listener>,
    /// Contains panics of wakers, which would keep the I/O driver from waking other tasks.
    wakers: ContainedWaker,
    ended: bool,
}

impl Stream for DeviceEvents {
    type Item = Result<AsyncEvent, VerbError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        // Before the backlog is read, so that a later addition wakes this task.
        self.waker.register(context.waker());
        within_budget(context, |context| {
            loop {
                match self.device.next_event() {
                    Ok(Some(event)) => {
                        rdma_provider::info!(
                            device = self.device.name(),
                            ?event,
                            "asynchronous event"
                        );
                        return Poll::Ready(Some(Ok(event)));
                    }
                    Ok(None) => {}
                    Err(error) => {
                        self.ended = true;
                        return Poll::Ready(if error.errno == VerbError::ENODEV {
                            None
                        } else {
                            Some(Err(error))
                        });
                    }
                }
                let Self { fd, wakers, .. } = &mut *self;
                // A later event makes the descriptor readable again; the loop finds an earlier one.
                if !ready!(wakers.poll(context, |context| fd.poll_readable(context))) {
                    // The runtime is shutting down.
                    self.ended = true;
                    return Poll::Ready(None);
                }
            }
        })
    }
}

impl fmt::Debug for DeviceEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEvents").field("device", &self.device).finish()
    }
}

pub(crate) fn all_ports_are_down(device: &Device) -> bool {
    let mut ports = (1..=device.attr().ports).map(|number| device.port(PortNum(number)));
    // A failed query tells nothing; the next use of the device gives the reason.
    ports.all(|port| port.is_ok_and(|port| port.state != PortState::Active))
}

/// Notices the removal of a device and changes of its ports. Leaves the events to the user's
/// streams.
pub(crate) struct PortChanges {
    device: Device,
    seen: u64,
    waker: Arc<AtomicWaker>,
    _listener: Arc<Listener>,
}

impl PortChanges {
    /// Returns `None`, with a warning in the log, if the thread that reports events read by other
    /// code cannot be started.
    pub(crate) fn new(device: &Device) -> Option<Self> {
        let (waker, listener) = listen(device, EventKind::Port)
            .inspect_err(|error| {
                rdma_provider::warn!(
                    device = device.name(),
                    %error,
                    "failed to watch asynchronous events; changes of ports are not noticed"
                );
            })
            .ok()?;
        let mut new = Self { device: device.clone(), seen: 0, waker, _listener: listener };
        new.skip();
        Some(new)
    }

    pub(crate) fn skip(&mut self) {
        self.device.read_events();
        self.seen = self.device.port_events().changes;
    }

    /// Waits for a change by the descriptor of events. Returns at once if the device was removed.
    pub(crate) async fn wait_by_descriptor(&mut self) {
        self.device.read_events();
        if self.device.port_events().removed {
            return;
        }
        let fd = NoRuntime::or_registered(|| readable(&self.device));
        let fd = fd.map_err(io::Error::from).and_then(|registered| registered);
        let fd = fd.inspect_err(|error| {
            rdma_provider::warn!(
                device = self.device.name(),
                %error,
                "failed to watch asynchronous events; changes of ports are noticed late"
            );
        });
        self.wait(fd.ok().as_ref()).await;
    }

    /// Waits, without a descriptor, until other code reads events, as the reactor of a connection
    /// does.
    pub(crate) async fn wait_by_readers(&mut self) {
        self.wait(None).await;
    }

    async fn wait(&mut self, fd: Option<&Readable<OwnedFd>>) {
        poll_fn(|context| {
            // Before the events are read, so that a later reader wakes this task.
            self.waker.register(context.waker());
            loop {
                self.device.read_events();
                let changes = self.device.port_events().changes;
                if changes != std::mem::replace(&mut self.seen, changes) {
                    return Poll::Ready(());
                }
                let Some(fd) = fd else { return Poll::Pending };
                if !ready!(fd.poll_readable(context)) {
                    // The runtime is shutting down.
                    return Poll::Pending;
                }
            }
        })
        .await;
    }
}
