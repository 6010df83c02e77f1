//! Asynchronous device events as a stream.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::task::AtomicWaker;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::contained::{ContainedWaker, contained};
use crate::error::{NoRuntime, VerbError};
use crate::types::AsyncEvent;
use crate::verbs::{Device, Listener};

impl Device {
    /// Watches the asynchronous events of this device: faults and changes that belong to no work request.
    ///
    /// Each event is given to one stream only; of those that nobody takes, the latest 4096 are kept. Operations learn of faults by their own results; this is to know
    /// why, and of ports.
    ///
    /// # Errors
    ///
    /// Kind `Unsupported` with [`NoRuntime`] outside of a Tokio runtime with an I/O driver. Else if the descriptor cannot be
    /// registered with the current runtime, or there is no thread to tell of events that another task has read.
    pub fn events(&self) -> io::Result<DeviceEvents> {
        let fd = NoRuntime::or_registered(|| readable(self))??;
        let waker = Arc::new(AtomicWaker::new());
        let told = waker.clone();
        // Called where another task or a reactor has read the events.
        let listener: Arc<Listener> = Arc::new(move || contained(|| told.wake()));
        self.on_events(&listener)?;
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

/// Readable while the device has asynchronous events that nobody has read. A descriptor of its own: one cannot be registered
/// twice.
pub(super) fn readable(device: &Device) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = device.event_fd().try_clone_to_owned()?;
    // Deprecated because an `AsRawFd` can lie about its descriptor; an `OwnedFd` does not.
    #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
    AsyncFd::with_interest(fd, Interest::READABLE)
}

/// Stream of a device's asynchronous events; ends when the device is gone. See [`Device::events`].
///
/// # Cancel safety
///
/// Dropping it, or a future of its next item, loses no event that was not given yet.
pub struct DeviceEvents {
    fd: AsyncFd<OwnedFd>,
    device: Device,
    /// Woken when another task has read events, which are in the backlog then and not in the descriptor.
    waker: Arc<AtomicWaker>,
    _listener: Arc<Listener>,
    /// For the descriptor: a panic would keep the driver from waking others.
    wakers: ContainedWaker,
    ended: bool,
}

impl Stream for DeviceEvents {
    type Item = Result<AsyncEvent, VerbError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        // Before the backlog is looked at, so that whoever fills it afterwards wakes us.
        self.waker.register(context.waker());
        loop {
            match self.device.next_event() {
                Ok(Some(event)) => {
                    tracing::info!(?event, "asynchronous event");
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
            match ready!(wakers.poll(context, |context| fd.poll_read_ready(context))) {
                // An event meanwhile makes the descriptor ready anew, and one before is looked for again.
                Ok(mut ready) => ready.clear_ready(),
                // The runtime shuts down.
                Err(_) => {
                    self.ended = true;
                    return Poll::Ready(None);
                }
            }
        }
    }
}

impl fmt::Debug for DeviceEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEvents").field("device", &self.device).finish()
    }
}
