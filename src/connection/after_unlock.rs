//! Work that a connection defers until its lock is released.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::inbox::{Incoming, Message};
use super::message_memory::{FetchMemory, Job, JobOutput};
use super::outbox::Sent;
use crate::cm::CmConnection;
use crate::contained::contained;
use crate::memory::{Buf, BufMut, Pool, ReadOnlyRegion};
use crate::op::Recv;

/// Wakers and values to be called and dropped without the lock, because both may run code of the
/// service.
#[derive(Debug, Default)]
pub(super) struct AfterUnlock {
    wakers: SmallVec<[Waker; 2]>,
    /// A field below is not empty.
    has_other: bool,
    dropped: SmallVec<[Dropped; 1]>,
    /// Messages sent from the service's memory. Several are acknowledged at once.
    sent: SmallVec<[Buf; 4]>,
    /// True if jobs are queued without a helper thread.
    start_helper: bool,
    wake_driver: bool,
}

/// A value whose destructor may run code of the service, deregister memory or block.
#[derive(Debug)]
#[allow(dead_code, reason = "the values are dropped only")]
pub(super) enum Dropped {
    Waker(Waker),
    /// A message that the peer has fetched.
    Fetched(ReadOnlyRegion),
    Message(Message),
    /// The result of a job that is not needed any more.
    Output(JobOutput),
    /// Detached operations.
    Receives(VecDeque<Recv<BufMut>>),
    Sends(VecDeque<Sent>),
    /// Messages that can no longer be received, some with a fetch in flight.
    Lost(VecDeque<Incoming>),
    Jobs(VecDeque<Job>),
    Link(Arc<CmConnection>),
    /// Buffers that a side does not need any more.
    Pool(Pool),
    FetchMemory(FetchMemory),
    Buffer(BufMut),
}

impl AfterUnlock {
    pub(super) fn wake(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.wakers.push(waker);
        }
    }

    pub(super) fn wake_all(&mut self, wakers: impl Iterator<Item = Waker>) {
        self.wakers.extend(wakers);
    }

    pub(super) fn wake_driver(&mut self) {
        (self.has_other, self.wake_driver) = (true, true);
    }

    pub(super) fn start_helper(&mut self) {
        (self.has_other, self.start_helper) = (true, true);
    }

    /// Returns a sent message to the service.
    pub(super) fn return_sent(&mut self, message: Buf) {
        self.has_other = true;
        self.sent.push(message);
    }

    pub(super) fn wakes_driver(&self) -> bool {
        self.wake_driver
    }

    pub(super) fn starts_helper(&self) -> bool {
        self.start_helper
    }

    pub(super) fn discard(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.drop(Dropped::Waker(waker));
        }
    }

    pub(super) fn drop(&mut self, value: Dropped) {
        self.has_other = true;
        self.dropped.push(value);
    }

    pub(super) fn drop_pool(&mut self, pool: Option<Pool>) {
        if let Some(pool) = pool {
            self.drop(Dropped::Pool(pool));
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_other && self.wakers.is_empty()
    }

    /// Takes the waker of one task if there is no other work, which is common.
    #[inline]
    pub(super) fn take_single_waker(&mut self) -> Option<Waker> {
        let is_single = !self.has_other && self.wakers.len() == 1;
        is_single.then(|| self.wakers.pop()).flatten()
    }

    /// Takes at most one waker and one sent message if there is no other work. To move all of it
    /// takes longer.
    pub(super) fn take_few(&mut self) -> Option<(Option<Waker>, Option<Buf>)> {
        let has_few = self.wakers.len() <= 1
            && self.sent.len() <= 1
            && self.dropped.is_empty()
            && !self.start_helper
            && !self.wake_driver;
        if !has_few {
            return None;
        }
        self.has_other = false;
        Some((self.wakers.pop(), self.sent.pop()))
    }

    /// Calls wakers and drops values.
    pub(super) fn run(self) {
        for waker in self.wakers {
            contained(|| waker.wake());
        }
        for value in self.dropped {
            contained(|| drop(value));
        }
        for buffer in self.sent {
            contained(|| drop(buffer));
        }
    }
}

#[cfg(all(test, not(loom)))]
impl AfterUnlock {
    pub(super) fn dropped(&self) -> &[Dropped] {
        &self.dropped
    }
}
