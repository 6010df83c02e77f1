//! Descriptors that Tokio's I/O driver watches for readability.

use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::task::{Context, Poll, Waker, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::unconstrained;

#[derive(Debug)]
pub(crate) struct Readable<T: AsRawFd>(AsyncFd<T>);

impl<T: AsRawFd> Readable<T> {
    /// `io` must own its descriptor.
    pub(crate) fn new(io: T) -> io::Result<Self> {
        // Deprecated because an `AsRawFd` can lie about its descriptor; those of this crate own it.
        #[allow(deprecated, reason = "its successor is newer than the oldest supported Tokio")]
        AsyncFd::with_interest(io, Interest::READABLE).map(Self)
    }

    pub(crate) fn get_ref(&self) -> &T {
        self.0.get_ref()
    }

    /// Calls `read` until the descriptor is not readable and the I/O driver holds `waker`, which
    /// then calls this again. Breaks if the runtime has shut down.
    pub(crate) fn serve(&self, waker: &Waker, mut read: impl FnMut()) -> ControlFlow<()> {
        let mut context = Context::from_waker(waker);
        loop {
            let ready = poll_fn(|context| self.0.poll_read_ready(context));
            // The waker may run within a task whose budget is used up, for which the descriptor
            // would seem not to be readable.
            match pin!(unconstrained(ready)).poll(&mut context) {
                Poll::Ready(Ok(mut ready)) => {
                    read();
                    // Keeps the readiness if the descriptor has become readable since the poll.
                    ready.clear_ready();
                }
                Poll::Ready(Err(_)) => return ControlFlow::Break(()),
                Poll::Pending => return ControlFlow::Continue(()),
            }
        }
    }

    /// Returns true if the descriptor has become readable, or false if the runtime shuts down.
    pub(crate) fn poll_readable(&self, context: &mut Context<'_>) -> Poll<bool> {
        let readable = ready!(self.0.poll_read_ready(context));
        Poll::Ready(readable.map(|mut ready| ready.clear_ready()).is_ok())
    }
}
