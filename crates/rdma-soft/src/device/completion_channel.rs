//! Events behind a file descriptor: completion channels and asynchronous events.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{read, retry_on_intr, write};

use rdma_provider::VerbError;
use rdma_provider::contract;

/// Queue whose descriptor is readable exactly while something is in it, and nobody holds it.
///
/// A byte is written when the queue turns non-empty and taken when it turns empty, both under its lock:
/// a burst of events costs one system call, and a connected pair of sockets is an ordinary descriptor
/// for any reactor on any Unix. Whoever makes the device raise events and looks for them itself holds it meanwhile,
/// which saves both calls.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    reader: UnixStream,
    writer: UnixStream,
}

#[derive(Debug)]
struct Queue<T> {
    events: VecDeque<T>,
    /// The byte is there.
    signalled: bool,
    /// Those who look without being told.
    holders: u32,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = UnixStream::pair()?;
        // Not `set_nonblocking`, and below not the stream's `read` and `write`: Miri lacks these for socket pairs.
        fcntl_setfl(&reader, OFlags::NONBLOCK)?;
        fcntl_setfl(&writer, OFlags::NONBLOCK)?;
        let queue = Queue { events: VecDeque::new(), signalled: false, holders: 0 };
        Ok(Self { queue: Mutex::new(queue), reader, writer })
    }

    pub(crate) fn push(&self, event: T) {
        let mut queue = self.queue.lock();
        queue.events.push_back(event);
        self.tell(&mut queue);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front()?;
        self.tell(&mut queue);
        Some(event)
    }

    /// Removes the events that `keep` refuses.
    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut queue = self.queue.lock();
        queue.events.retain(keep);
        self.tell(&mut queue);
    }

    /// From now on events are not told of, until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        self.queue.lock().holders += 1;
    }

    /// Ends a [`hold`](Self::hold): tells of what is left.
    pub(crate) fn release(&self) {
        let mut queue = self.queue.lock();
        queue.holders -= 1;
        self.tell(&mut queue);
    }

    /// Makes the descriptor say what is so.
    fn tell(&self, queue: &mut Queue<T>) {
        let any = !queue.events.is_empty();
        if any && !queue.signalled && queue.holders == 0 {
            queue.signalled = true;
            self.signal();
        } else if !any && queue.signalled {
            queue.signalled = false;
            self.unsignal();
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    fn signal(&self) {
        // One byte at most is ever in the pair, so the buffer cannot be full; both ends are ours, so
        // the pipe cannot be broken.
        if let Err(error) = retry_on_intr(|| write(&self.writer, &[1])) {
            tracing::error!(%error, "event descriptor cannot be signalled; a waiter may not wake");
        }
    }

    fn unsignal(&self) {
        if let Err(error) = retry_on_intr(|| read(&self.reader, &mut [0; 1])) {
            tracing::error!(%error, "event descriptor cannot be cleared; a waiter may spin");
        }
    }
}

/// What a channel knows of a completion queue.
#[derive(Debug)]
pub(crate) struct Subscriber {
    pub(crate) cookie: u64,
    /// Events given out and not yet acknowledged.
    pub(crate) unacknowledged: AtomicU32,
}

/// Completion channel, see [`contract::Channel`].
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Channel as _, Context as _, Cq as _};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let channel = context.create_channel()?;
/// let cq = context.create_cq(16, Some(&channel), 0, 7)?;
/// // The next completion makes `channel.fd()` readable.
/// cq.arm(false)?;
/// assert_eq!(channel.next_event()?, None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Channel(pub(crate) Arc<Mailbox<Arc<Subscriber>>>);

impl contract::Channel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn next_event(&self) -> Result<Option<u64>, VerbError> {
        Ok(self.0.pop().map(|subscriber| {
            subscriber.unacknowledged.fetch_add(1, Ordering::Relaxed);
            subscriber.cookie
        }))
    }

    fn hold(&self) {
        self.0.hold();
    }

    fn release(&self) {
        self.0.release();
    }
}

/// The verb failed with the reason the system gave.
pub(crate) fn os_error(verb: &'static str, error: &io::Error) -> VerbError {
    VerbError::new(verb, error.raw_os_error().unwrap_or(VerbError::EIO))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that a reader of the descriptor would find; they are gone then.
    fn drain(fd: BorrowedFd<'_>) -> usize {
        match read(fd, &mut [0; 16]) {
            Ok(count) => count,
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::WOULDBLOCK);
                0
            }
        }
    }

    #[test]
    fn descriptor_is_readable_exactly_while_events_wait() {
        let mailbox = Mailbox::new().unwrap();
        assert_eq!(drain(mailbox.fd()), 0);
        mailbox.push(1);
        mailbox.push(2);
        assert_eq!(mailbox.pop(), Some(1));
        mailbox.push(3);
        assert_eq!((mailbox.pop(), mailbox.pop(), mailbox.pop()), (Some(2), Some(3), None));
        assert_eq!(drain(mailbox.fd()), 0);
        mailbox.push(4);
        mailbox.push(5);
        mailbox.retain(|event| *event == 5);
        // One byte for all.
        assert_eq!(drain(mailbox.fd()), 1);
    }

    #[test]
    fn descriptor_is_silent_while_somebody_looks_without_it() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.hold();
        mailbox.hold();
        mailbox.push(1);
        assert_eq!(mailbox.pop(), Some(1));
        mailbox.push(2);
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 0, "another still looks");
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 1, "what is left is told");
    }

    #[test]
    fn what_was_told_before_holding_is_taken_back() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.push(1);
        mailbox.hold();
        assert_eq!((mailbox.pop(), drain(mailbox.fd())), (Some(1), 0));
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 0);
    }
}
