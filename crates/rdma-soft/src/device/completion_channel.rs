//! Event queues with a file descriptor.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Waker;

use rdma_provider::later;
use rdma_provider::locks::Mutex;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{read, retry_on_intr, write};
use smallvec::SmallVec;

use rdma_provider::VerbError;
use rdma_provider::contract;

/// An event queue whose descriptor is readable exactly while it is non-empty, not held and without
/// wakers.
///
/// A byte is written to a socket pair when the queue becomes non-empty and read when it becomes
/// empty, under the lock: a burst of events costs one system call. Callers that pop without the
/// descriptor [hold](Self::hold) the queue, which saves both calls. So do wakers, which are called
/// once the thread holds no lock.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    reader: UnixStream,
    writer: UnixStream,
}

/// The capacity that an empty queue keeps.
const KEPT: usize = 64;

#[derive(Debug)]
struct Queue<T> {
    events: VecDeque<T>,
    /// The byte is in the socket pair.
    signalled: bool,
    /// Number of [`hold`](Mailbox::hold)s.
    holders: u32,
    /// With their keys.
    wakers: SmallVec<[(u64, Waker); 1]>,
    next_key: u64,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = UnixStream::pair()?;
        // `fcntl`, `read` and `write` because Miri lacks the `UnixStream` methods for socket pairs.
        fcntl_setfl(&reader, OFlags::NONBLOCK)?;
        fcntl_setfl(&writer, OFlags::NONBLOCK)?;
        let queue = Queue {
            events: VecDeque::new(),
            signalled: false,
            holders: 0,
            wakers: SmallVec::new(),
            next_key: 0,
        };
        Ok(Self { queue: Mutex::new(queue), reader, writer })
    }

    pub(crate) fn push(&self, event: T) {
        let mut queue = self.queue.lock();
        queue.events.push_back(event);
        self.announce(&mut queue);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front()?;
        self.update_readiness(&mut queue);
        Some(event)
    }

    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut queue = self.queue.lock();
        queue.events.retain(keep);
        self.update_readiness(&mut queue);
    }

    /// Keeps the descriptor unreadable until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        self.queue.lock().holders += 1;
    }

    /// Ends a [`hold`](Self::hold).
    pub(crate) fn release(&self) {
        let mut queue = self.queue.lock();
        queue.holders -= 1;
        if !queue.events.is_empty() {
            self.announce(&mut queue);
        }
    }

    /// Calls `waker` at each event from now on. Returns its key.
    pub(crate) fn add_waker(&self, waker: &Waker) -> u64 {
        let waker = waker.clone();
        let mut queue = self.queue.lock();
        let key = queue.next_key;
        queue.next_key += 1;
        queue.wakers.push((key, waker));
        key
    }

    /// Removes a waker. After the last one, events in the queue make the descriptor readable.
    pub(crate) fn remove_waker(&self, key: u64) {
        let mut queue = self.queue.lock();
        let at = queue.wakers.iter().position(|&(known, _)| known == key);
        let removed = at.map(|at| queue.wakers.swap_remove(at));
        self.update_readiness(&mut queue);
        drop(queue);
        // Possibly the last reference to a task.
        drop(removed);
    }

    /// Announces the events of a queue that has some.
    fn announce(&self, queue: &mut Queue<T>) {
        if queue.holders == 0 {
            for (_, waker) in &queue.wakers {
                later::wake([waker.clone()]);
            }
        }
        self.update_readiness(queue);
    }

    /// Makes the descriptor's readiness match the queue.
    fn update_readiness(&self, queue: &mut Queue<T>) {
        let any = !queue.events.is_empty();
        if !any && queue.events.capacity() > KEPT {
            // The memory of a burst.
            queue.events.shrink_to(KEPT);
        }
        if any && !queue.signalled && queue.holders == 0 && queue.wakers.is_empty() {
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
        // One byte never fills the buffer, and `self` owns both ends.
        if let Err(error) = retry_on_intr(|| write(&self.writer, &[1])) {
            rdma_provider::error!(
                fd = ?self.fd(),
                %error,
                "failed to signal event descriptor; a waiter may miss events"
            );
        }
    }

    fn unsignal(&self) {
        if let Err(error) = retry_on_intr(|| read(&self.reader, &mut [0; 1])) {
            rdma_provider::error!(
                fd = ?self.fd(),
                %error,
                "failed to clear event descriptor; a waiter may spin"
            );
        }
    }
}

#[derive(Debug)]
pub(crate) struct Subscriber {
    pub(crate) cookie: u64,
    /// Events returned and not yet acknowledged.
    pub(crate) unacknowledged: AtomicU32,
}

/// A completion channel, see [`contract::Channel`].
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Channel as _, Context as _, Cq as _, CqInit};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let channel = context.create_channel()?;
/// let init = CqInit { channel: Some(&channel), cookie: 7, ..CqInit::new(16) };
/// let cq = context.create_cq(&init)?;
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

    fn add_waker(&self, waker: &Waker) -> Option<u64> {
        Some(self.0.add_waker(waker))
    }

    fn remove_waker(&self, key: u64) {
        self.0.remove_waker(key);
    }
}

pub(crate) fn os_error(verb: &'static str, error: &io::Error) -> VerbError {
    VerbError::new(verb, error.raw_os_error().unwrap_or(VerbError::EIO))
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use rdma_provider::locks::held;

    use super::*;

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
    fn descriptor_is_readable_exactly_while_events_are_queued() {
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
        assert_eq!(drain(mailbox.fd()), 1);
    }

    #[test]
    fn empty_queue_frees_the_memory_of_a_burst() {
        let mailbox = Mailbox::new().unwrap();
        let capacity = || mailbox.queue.lock().events.capacity();
        (0..10 * KEPT).for_each(|event| mailbox.push(event));
        assert!(capacity() >= 10 * KEPT);
        (0..10 * KEPT).for_each(|event| assert_eq!(mailbox.pop(), Some(event)));
        assert!(capacity() <= KEPT, "{}", capacity());
        (0..10 * KEPT).for_each(|event| mailbox.push(event));
        mailbox.retain(|_| false);
        assert!(capacity() <= KEPT, "{}", capacity());
    }

    #[test]
    fn held_queue_does_not_signal_its_descriptor() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.hold();
        mailbox.hold();
        mailbox.push(1);
        assert_eq!(mailbox.pop(), Some(1));
        mailbox.push(2);
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 0, "the other hold remains");
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 1, "the remaining event is signalled");
    }

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn waker() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count::default());
        (count.clone(), count.into())
    }

    // Shows C2.
    #[test]
    fn wakers_are_called_in_place_of_the_descriptor() {
        let mailbox = Mailbox::new().unwrap();
        let ((first, one), (second, other)) = (waker(), waker());
        let woken = || [&first, &second].map(|count| count.0.swap(0, Ordering::Relaxed));
        let (one, other) = (mailbox.add_waker(&one), mailbox.add_waker(&other));
        mailbox.push(1);
        mailbox.push(2);
        assert_eq!((woken(), drain(mailbox.fd())), ([2, 2], 0));
        assert_eq!(mailbox.pop(), Some(1));
        mailbox.remove_waker(one);
        assert_eq!((woken(), drain(mailbox.fd())), ([0, 0], 0), "one waker remains");
        mailbox.push(3);
        assert_eq!((woken(), drain(mailbox.fd())), ([0, 1], 0));
        mailbox.remove_waker(other);
        assert_eq!((woken(), drain(mailbox.fd())), ([0, 0], 1), "two events remain");
    }

    #[test]
    fn event_before_the_first_waker_leaves_no_readable_descriptor() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.push(1);
        mailbox.add_waker(&waker().1);
        assert_eq!((mailbox.pop(), drain(mailbox.fd())), (Some(1), 0));
    }

    // Shows C2.
    #[test]
    fn waker_is_called_when_the_last_hold_of_a_queue_with_events_ends() {
        let mailbox = Mailbox::new().unwrap();
        let (count, waker) = waker();
        mailbox.add_waker(&waker);
        for _ in 0..2 {
            mailbox.hold();
        }
        mailbox.push(1);
        mailbox.release();
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "the other hold remains");
        mailbox.release();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(mailbox.pop(), Some(1));
        mailbox.hold();
        mailbox.release();
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "the queue is empty");
    }

    // Shows F2.
    #[test]
    fn waker_that_uses_the_queue_is_called_without_a_lock() {
        struct Reader(Mailbox<u32>, Mutex<Vec<u32>>);

        impl Wake for Reader {
            fn wake(self: Arc<Self>) {
                assert_eq!(held(), 0);
                self.1.lock().extend(self.0.pop());
            }
        }

        let reader = Arc::new(Reader(Mailbox::new().unwrap(), Mutex::default()));
        let mailbox = &reader.0;
        let seen = || std::mem::take(&mut *reader.1.lock());
        let key = mailbox.add_waker(&reader.clone().into());
        mailbox.push(1);
        assert_eq!(seen(), [1]);
        // Completions are added under the lock of their queue.
        let lock = Mutex::new(());
        let guard = lock.lock();
        mailbox.push(2);
        assert!(seen().is_empty());
        drop(guard);
        assert_eq!(seen(), [2]);
        mailbox.hold();
        mailbox.push(3);
        mailbox.release();
        assert_eq!(seen(), [3]);
        mailbox.remove_waker(key);
    }

    #[test]
    fn pop_while_held_clears_descriptor() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.push(1);
        mailbox.hold();
        assert_eq!((mailbox.pop(), drain(mailbox.fd())), (Some(1), 0));
        mailbox.release();
        assert_eq!(drain(mailbox.fd()), 0);
    }
}
