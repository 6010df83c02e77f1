//! Fetches the peer's long messages by READ.

use std::task::{Context, Poll, Waker};

use rdma_message_proto::lifecycle::Event;
use rdma_provider::later;

use super::error::CloseReason;
use super::inbox::{Arrived, FetchedMessage, Incoming};
use super::message_memory::{Fetch, FetchOutput, JobDone, JobOutput};
use super::state::ConnectionState;

impl ConnectionState {
    /// Starts fetches within `receive_memory`, and takes completed ones in order.
    pub(super) fn fetch(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        while let Some(&number) = self.inbox.unfetched.front()
            && self.protocol.phase().takes_messages()
        {
            let Some(message) = self.inbox.messages.get_mut((number - self.inbox.base) as usize)
            else {
                unreachable!("offers to be fetched are in the inbox")
            };
            let Incoming::Offered(region) = *message else {
                unreachable!("only offers are to be fetched")
            };
            if self.inbox.fetch_bytes > 0
                && self.inbox.fetch_bytes + region.len() > self.limits.receive_memory
            {
                break;
            }
            match self.memory.fetch.find(number, region.len()) {
                Ok(buffer) => {
                    *message = Incoming::Fetching(Fetch::whole(&self.io.qp, buffer, region))
                }
                Err(job) => {
                    *message = Incoming::Preparing(region);
                    self.memory.jobs.add(job);
                }
            }
            self.inbox.fetch_bytes += region.len();
            self.inbox.unfetched.pop_front();
            self.inbox.fetching.push_back(number);
        }
        while let Some(&number) = self.inbox.fetching.front() {
            let Some(message) = self.inbox.get(number) else { break };
            match message {
                Incoming::Arrived(Arrived::Fetched(_)) => {}
                Incoming::Fetching(fetch) => match fetch.poll(&self.io.qp, context) {
                    Poll::Pending => {
                        self.watch_by_driver();
                        break;
                    }
                    Poll::Ready(Ok(FetchOutput::Message(buffer))) => {
                        *message =
                            Incoming::Arrived(Arrived::Fetched(FetchedMessage::Registered(buffer)))
                    }
                    Poll::Ready(Ok(FetchOutput::Region(region))) => {
                        *message = Incoming::Releasing;
                        let job = self.memory.fetch.release(number, region);
                        self.memory.jobs.add(job);
                        break;
                    }
                    Poll::Ready(Err(kind)) => {
                        *message = Incoming::Lost;
                        return self.on_failure(kind.into(), context);
                    }
                },
                Incoming::Preparing(_) | Incoming::Releasing => break,
                Incoming::Arrived(Arrived::Buffered(_) | Arrived::Fragmented { .. })
                | Incoming::Offered(_)
                | Incoming::Lost => {
                    unreachable!("not being fetched")
                }
            }
            self.inbox.fetching.pop_front();
            self.protocol.flow.done();
        }
        Ok(())
    }

    pub(super) fn shrink_fetch_memory(&mut self) {
        if self.inbox.messages.is_empty() {
            let emptied = self.memory.fetch.emptied();
            let unused = std::mem::replace(&mut self.memory.fetch, emptied);
            later::dispose(unused);
        }
    }

    pub(super) fn on_job_done(&mut self, done: JobDone, waker: &Waker) {
        self.memory.fetch.cancel_reservation(done.unpooled);
        // After termination no fetch is left.
        let message = self.inbox.get(done.number);
        match (message, done.result) {
            (_, Err(reason)) => self.on(Event::Terminate(reason)),
            (Some(message @ Incoming::Preparing(_)), Ok(made)) => {
                let Incoming::Preparing(remote) = *message else { unreachable!("as matched") };
                *message = Incoming::Fetching(match made {
                    JobOutput::Buffer(buffer) => Fetch::whole(&self.io.qp, buffer, remote),
                    JobOutput::Region(region) => Fetch::parts(&self.io.qp, region, remote),
                    JobOutput::Message(_) => unreachable!("a registration job"),
                });
            }
            (Some(message @ Incoming::Releasing), Ok(JobOutput::Message(bytes))) => {
                *message = Incoming::Arrived(Arrived::Fetched(FetchedMessage::Heap(bytes)))
            }
            (_, Ok(made)) => later::dispose(made),
        }
        self.progress(waker);
        // This thread belongs to the driver's runtime, which may not run, so the task that waits
        // for the message watches the READ, too.
        if !self.inbox.fetching.is_empty() {
            self.wake_receivers();
        }
    }

    pub(super) fn discard(&mut self) {
        // Offers are not fetched any more; fetches in progress are awaited.
        while self.inbox.fetching.is_empty()
            && let Some(number) = self.inbox.unfetched.pop_front()
        {
            if let Some(message) = self.inbox.get(number) {
                *message = Incoming::Arrived(Arrived::Fetched(FetchedMessage::default()));
            }
            self.protocol.flow.done();
        }
        for _ in self.inbox.notifications.drain(..) {
            self.protocol.flow.release_message();
        }
        while let Some(message) = self.inbox.pop() {
            self.counters.discarded += 1;
            match message {
                Arrived::Buffered(buffer) => self.post_receive(buffer),
                Arrived::Fragmented { parts, last, .. } => self.join(parts, last, true, |_| ()),
                Arrived::Fetched(message) => {
                    self.inbox.fetch_bytes -= message.len() as u64;
                    later::dispose(message);
                }
            }
            self.protocol.flow.release_message();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::connection::{Connection, ConnectionConfig};
    use crate::error::OpErrorKind;
    use crate::memory::RemoteRegion;
    use crate::software::Network;
    use crate::types::Rkey;
    use crate::verbs::Device;

    /// Creates an unconnected side with offers of these lengths. Its READs are refused.
    fn offered(config: &ConnectionConfig, lens: impl IntoIterator<Item = u64>) -> ConnectionState {
        let pd =
            Device::software_in(&Network::new(), "offered").unwrap().protection_domain().unwrap();
        let mut state = Connection::prepare(&pd, config).unwrap().state;
        for len in lens {
            state.inbox.push(Incoming::Offered(RemoteRegion::new(0x1000, len, Rkey(7))));
        }
        *state
    }

    #[test]
    fn memory_is_registered_by_one_helper_and_not_under_the_lock() {
        let mut state = offered(&ConnectionConfig::default(), [20_000, 3 << 20, 20_000]);
        state.progress(Waker::noop());
        assert!(
            state.inbox.messages.iter().all(|message| matches!(message, Incoming::Preparing(_)))
        );
        assert!(state.memory.jobs.start(), "a helper is requested");
        state.progress(Waker::noop());
        assert!(!state.memory.jobs.start(), "only one helper");
        for _ in 0..3 {
            assert!(matches!(
                state.memory.jobs.pop().unwrap().run().result,
                Ok(JobOutput::Buffer(_) | JobOutput::Region(_))
            ));
        }
        assert!(state.memory.jobs.pop().is_none());
        assert!(state.close_reason().is_none());
    }

    #[test]
    fn offers_beyond_receive_memory_wait_without_jobs() {
        let config = ConnectionConfig::default().receive_memory(1 << 20);
        let mut state = offered(&config, std::iter::repeat_n(600_000, 10));
        state.progress(Waker::noop());
        assert_eq!((state.memory.jobs.take().len(), state.inbox.unfetched.len()), (1, 9));
    }

    #[test]
    fn returned_buffer_is_reused_and_its_reservation_released() {
        let config = ConnectionConfig::default().receive_memory(64 << 10);
        let mut state = offered(&config, []);
        let register =
            |state: &mut ConnectionState| state.memory.fetch.find(0, 20_000).unwrap_err().run();
        let (first, second) = (register(&mut state), register(&mut state));
        assert_eq!((first.unpooled, second.unpooled), (0, 0));
        let third = state.memory.fetch.find(0, 20_000).unwrap_err();
        drop(first);
        let third = third.run();
        // 64 KiB hold two buffers of 32 KiB: the third one was not pooled from the start.
        assert_eq!(third.unpooled, 0);
        drop((second, third));
        let mut state = offered(&config, []);
        let (first, late) = (register(&mut state), state.memory.fetch.find(0, 20_000).unwrap_err());
        drop(first);
        let late = late.run();
        assert_eq!(late.unpooled, 32 << 10);
        state.memory.fetch.cancel_reservation(late.unpooled);
        assert!(state.memory.fetch.find(0, 20_000).is_err_and(|job| job.run().unpooled == 0));
    }

    #[test]
    fn memory_for_a_terminated_connection_is_dropped() {
        let mut state = offered(&ConnectionConfig::default(), [20_000]);
        state.progress(Waker::noop());
        let done = state.memory.jobs.pop().unwrap().run();
        state.on(Event::Terminate(CloseReason::Silent));
        state.on_job_done(done, Waker::noop());
        assert!(state.memory.fetch.find(0, 20_000).is_ok(), "the buffer is in its pool again");
        let mut state = offered(&ConnectionConfig::default(), [20_000]);
        state.progress(Waker::noop());
        let done = state.memory.jobs.pop().unwrap().run();
        state.on_job_done(done, Waker::noop());
        // The READ is posted at once and refused.
        let refused =
            matches!(state.close_reason(), Some(CloseReason::Operation(OpErrorKind::State { .. })));
        assert!(refused, "{:?}", state.close_reason());
    }
}
