//! Long messages of the peer: memory for them, READs of them, and what is not read any more.

use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::core::Core;
use super::error::CloseReason;
use super::inbound::Incoming;
use super::lifecycle::Event;
use super::message_memory::{Arrived, Chore, Done, Landing, Made};

impl Core {
    /// Starts to fetch long messages, and takes those that are there.
    pub(super) fn fetch(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        while let Some(&number) = self.inbox.waiting.front()
            && self.protocol.phase().takes_messages()
        {
            let Some(message) = self.inbox.messages.get_mut((number - self.inbox.base) as usize)
            else {
                unreachable!("it is offered")
            };
            let Incoming::Offered(region) = *message else { unreachable!("it waits") };
            if self.inbox.memory > 0
                && self.inbox.memory + region.len() > self.limits.receive_memory
            {
                break;
            }
            match self.landings.find(number, region.len()) {
                Ok(buffer) => {
                    *message = Incoming::Landing(Landing::whole(&self.qp, buffer, region))
                }
                Err(chore) => {
                    *message = Incoming::Preparing(region);
                    self.add_chore(chore);
                }
            }
            self.inbox.memory += region.len();
            self.inbox.waiting.pop_front();
            self.inbox.fetching.push_back(number);
        }
        while let Some(&number) = self.inbox.fetching.front() {
            let Some(message) = self.inbox.messages.get_mut((number - self.inbox.base) as usize)
            else {
                break;
            };
            match message {
                Incoming::Landed(_) => {}
                Incoming::Landing(landing) => match landing.poll(&self.qp, context) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(Arrived::Message(bytes))) => *message = Incoming::Landed(bytes),
                    Poll::Ready(Ok(Arrived::Region(region))) => {
                        *message = Incoming::Releasing;
                        let chore = self.landings.release(number, region);
                        self.add_chore(chore);
                        break;
                    }
                    Poll::Ready(Err(kind)) => {
                        *message = Incoming::Lost;
                        return self.failed(kind, context);
                    }
                },
                Incoming::Preparing(_) | Incoming::Releasing => break,
                Incoming::Here(_) | Incoming::Offered(_) | Incoming::Lost => {
                    unreachable!("it is being fetched")
                }
            }
            self.inbox.fetching.pop_front();
            self.protocol.flow.done();
        }
        Ok(())
    }

    /// Leaves something to a thread that may block.
    pub(super) fn add_chore(&mut self, chore: Chore) {
        self.after.help |= self.chores.add(chore);
    }

    /// It has done something.
    pub(super) fn on_done(&mut self, done: Done, bell: &Waker) {
        self.landings.not_kept(done.not_kept);
        // Of an end that has ended there is nothing left that is being fetched.
        let message = self.inbox.get(done.number);
        match (message, done.result) {
            (_, Err(reason)) => self.on(Event::End(reason)),
            (Some(message @ Incoming::Preparing(_)), Ok(made)) => {
                let Incoming::Preparing(remote) = *message else { unreachable!("as matched") };
                *message = Incoming::Landing(match made {
                    Made::Buffer(buffer) => Landing::whole(&self.qp, buffer, remote),
                    Made::Region(region) => Landing::parts(&self.qp, region, remote),
                    Made::Message(_) => unreachable!("it was to be registered"),
                });
            }
            (Some(message @ Incoming::Releasing), Ok(Made::Message(bytes))) => {
                *message = Incoming::Landed(bytes)
            }
            (_, Ok(made)) => self.after.unneeded.push(made),
        }
        self.progress(bell);
    }

    /// Throws away what arrives after this end was closed.
    pub(super) fn discard(&mut self) -> Result<(), CloseReason> {
        // What nobody will read need not be fetched; what is being fetched is awaited.
        while self.inbox.fetching.is_empty()
            && let Some(number) = self.inbox.waiting.pop_front()
        {
            if let Some(message) = self.inbox.get(number) {
                *message = Incoming::Landed(Bytes::new());
            }
            self.protocol.flow.done();
        }
        while let Some(message) = self.inbox.pop() {
            self.counters.discarded += 1;
            match message {
                Incoming::Here(buffer) => self.post_receive(buffer),
                Incoming::Landed(bytes) => {
                    self.inbox.memory -= bytes.len() as u64;
                    self.after.discarded.push(bytes);
                }
                _ => unreachable!("only what is ready is taken"),
            }
            self.protocol.flow.release_message();
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::OpErrorKind;
    use crate::memory::RemoteRegion;
    use crate::message::{Connection, ConnectionConfig};
    use crate::software::Network;
    use crate::types::Rkey;
    use crate::verbs::Device;

    /// An end that the peer has offered messages of these lengths, and is not connected: READs are refused.
    fn offered(config: &ConnectionConfig, lens: impl IntoIterator<Item = u64>) -> Core {
        let pd =
            Device::software_in(&Network::new(), "offered").unwrap().protection_domain().unwrap();
        let mut core = Connection::prepare(&pd, config).unwrap().core;
        for len in lens {
            core.inbox.push(Incoming::Offered(RemoteRegion::new(0x1000, len, Rkey(7))));
        }
        core
    }

    #[test]
    fn memory_is_registered_by_one_helper_and_not_under_the_lock() {
        let mut core = offered(&ConnectionConfig::default(), [20_000, 3 << 20, 20_000]);
        core.progress(Waker::noop());
        assert!(
            core.inbox.messages.iter().all(|message| matches!(message, Incoming::Preparing(_)))
        );
        assert!(core.take_after().help, "one is asked for");
        core.progress(Waker::noop());
        assert!(!core.take_after().help, "and not another");
        for _ in 0..3 {
            assert!(matches!(
                core.chores.pop().unwrap().run().result,
                Ok(Made::Buffer(_) | Made::Region(_))
            ));
        }
        assert!(core.chores.pop().is_none());
        assert!(core.ended().is_none());
    }

    #[test]
    fn offers_beyond_the_memory_for_messages_wait_and_are_no_chores() {
        let config = ConnectionConfig::default().receive_memory(1 << 20);
        let mut core = offered(&config, std::iter::repeat_n(600_000, 10));
        core.progress(Waker::noop());
        assert_eq!((core.chores.take().len(), core.inbox.waiting.len()), (1, 9));
    }

    #[test]
    fn buffer_that_comes_back_meanwhile_is_used_and_what_was_set_aside_is_free_again() {
        let config = ConnectionConfig::default().receive_memory(64 << 10);
        let mut core = offered(&config, []);
        let register = |core: &mut Core| core.landings.find(0, 20_000).unwrap_err().run();
        let (first, second) = (register(&mut core), register(&mut core));
        assert_eq!((first.not_kept, second.not_kept), (0, 0));
        let third = core.landings.find(0, 20_000).unwrap_err();
        drop(first);
        let third = third.run();
        // 64 KiB are two buffers of 32: the third was of its own from the start.
        assert_eq!(third.not_kept, 0);
        drop((second, third));
        let mut core = offered(&config, []);
        let (first, late) = (register(&mut core), core.landings.find(0, 20_000).unwrap_err());
        drop(first);
        let late = late.run();
        assert_eq!(late.not_kept, 32 << 10);
        core.landings.not_kept(late.not_kept);
        assert!(core.landings.find(0, 20_000).is_err_and(|chore| chore.run().not_kept == 0));
    }

    #[test]
    fn memory_for_an_end_that_has_ended_is_dropped() {
        let mut core = offered(&ConnectionConfig::default(), [20_000]);
        core.progress(Waker::noop());
        let done = core.chores.pop().unwrap().run();
        core.on(Event::End(CloseReason::Silent));
        core.on_done(done, Waker::noop());
        assert_eq!(core.take_after().unneeded.len(), 1);
        let mut core = offered(&ConnectionConfig::default(), [20_000]);
        core.progress(Waker::noop());
        let done = core.chores.pop().unwrap().run();
        core.on_done(done, Waker::noop());
        // It is read at once; here that is refused.
        let refused =
            matches!(core.ended(), Some(CloseReason::Operation(OpErrorKind::State { .. })));
        assert!(refused, "{:?}", core.ended());
    }
}
