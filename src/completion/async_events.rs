//! Asynchronous device events as a stream.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::VerbError;
use crate::types::AsyncEvent;
use crate::verbs::Device;

/// Watches the asynchronous events of `device`: faults and changes that belong to no work request.
///
/// Each event is given to one stream only. Operations learn of faults by their own results; this is to know
/// why, and of ports.
///
/// # Errors
///
/// If the descriptor cannot be registered with the current runtime.
///
/// # Panics
///
/// Outside of a Tokio runtime with an I/O driver, as [`AsyncFd::new`].
pub fn events(device: &Device) -> io::Result<DeviceEvents> {
    // Deprecated because an `AsRawFd` can lie about its descriptor; ours owns it.
    #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
    let fd = AsyncFd::with_interest(EventFd(device.clone()), Interest::READABLE)?;
    Ok(DeviceEvents { fd, ended: false })
}

/// Stream of a device's asynchronous events; ends when the device is gone. See [`events`].
///
/// # Cancel safety
///
/// Dropping it, or a future of its next item, loses no event that was not given yet.
pub struct DeviceEvents {
    fd: AsyncFd<EventFd>,
    ended: bool,
}

struct EventFd(Device);

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.event_fd().as_raw_fd()
    }
}

impl Stream for DeviceEvents {
    type Item = Result<AsyncEvent, VerbError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            let ready = ready!(self.fd.poll_read_ready(context));
            let next = self.fd.get_ref().0.next_event();
            match (next, ready) {
                (Ok(Some(event)), _) => {
                    tracing::info!(?event, "asynchronous event");
                    return Poll::Ready(Some(Ok(event)));
                }
                (Ok(None), Ok(mut ready)) => ready.clear_ready(),
                (Err(error), _) if error.errno == VerbError::ENODEV => {
                    self.ended = true;
                    return Poll::Ready(None);
                }
                (Err(error), _) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
                // The runtime shuts down.
                (Ok(None), Err(_)) => {
                    self.ended = true;
                    return Poll::Ready(None);
                }
            }
        }
    }
}

impl fmt::Debug for DeviceEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEvents").field("device", &self.fd.get_ref().0).finish()
    }
}
