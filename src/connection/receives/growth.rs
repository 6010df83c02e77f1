use rdma_message_proto::window::FIRST_SIZE;
use rdma_provider::later;

use crate::connection::receives::Receives;
use crate::connection::state::ConnectionState;
use crate::memory::BufMut;

impl ConnectionState {
    /// If `buffer` has another size than was announced last, another one replaces it.
    pub(in crate::connection) fn post_receive(&mut self, mut buffer: BufMut) {
        self.receives.replace_other(&mut buffer);
        let receive = self.io.qp.recv(buffer);
        self.note_refusal(receive.refusal());
        self.receives.posted.push_back(receive);
    }

    pub(in crate::connection) fn post_receives(&mut self, number: u32) {
        for _ in 0..number {
            match self.receives.pool().try_alloc(self.receives.size) {
                Ok(buffer) => self.post_receive(buffer),
                Err(error) => unreachable!("the pool has a buffer for each receive: {error}"),
            }
        }
    }

    #[cold]
    pub(in crate::connection) fn grow_receives(&mut self) {
        self.settle_receives();
        let Some(number) = self.protocol.growth() else { return };
        if self.receives.leaving.is_some() {
            return;
        }
        let before = self.protocol.receives();
        match self.receives.register(number, before, &mut self.memory.budget) {
            Ok(()) => {
                let missing = self.protocol.grow(self.posted_receives(), self.receives.size as u32);
                self.post_receives(missing);
            }
            Err(error) => {
                self.note_failed_growth(&error);
                self.protocol.refuse_growth();
            }
        }
        // It watches for the side to be idle.
        self.io.wake_driver();
    }

    pub(in crate::connection) fn shrink_receives(&mut self) {
        self.exchange_long_receives();
        let Some(number) = self.protocol.shrinkage() else { return };
        let Receives { first, leaving, .. } = &self.receives;
        let is_free = leaving.is_none() && first.available() >= number as usize;
        if is_free && self.inbox.messages.is_empty() {
            let from = self.posted_receives();
            self.receives.leaving = self.receives.grown.take();
            self.receives.replaces_first = false;
            self.receives.size = FIRST_SIZE as usize;
            self.post_receives(number);
            self.protocol.shrink(from);
        }
    }

    /// Makes the peer skip as many receives as still have long buffers after shrinking, repeatedly
    /// if these are not the oldest.
    fn exchange_long_receives(&mut self) {
        let long_receives_left = self.receives.long_receives_left(self.protocol.receives());
        // A message in a long buffer cannot be skipped, because the next receive has another
        // buffer.
        if long_receives_left > 0 && !self.has_messages() && self.protocol.may_resize() {
            let from = self.posted_receives();
            self.post_receives(long_receives_left);
            self.protocol.exchange(long_receives_left, from);
        }
    }

    fn posted_receives(&self) -> u32 {
        self.protocol.flow.used_receives().wrapping_add(self.receives.posted.len() as u32)
    }

    /// Returns the long buffers to the budget once the peer has skipped their receives and no frame
    /// is in one.
    pub(in crate::connection) fn settle_receives(&mut self) {
        let is_settled = self.protocol.flow.may_resize()
            && self.receives.long_receives_left(self.protocol.receives()) == 0;
        if is_settled && let Some(pool) = self.receives.leaving.take() {
            self.memory.budget.shrink(pool.bytes());
            later::dispose(pool);
            // The list has had an entry for each long buffer.
            self.receives.posted.shrink_to(self.protocol.receives() as usize);
        }
    }

    fn has_messages(&self) -> bool {
        !self.inbox.messages.is_empty() || self.protocol.incomplete_frames() > 0
    }

    pub(in crate::connection) fn on_skip(&mut self, buffer: BufMut) {
        drop(buffer);
        self.settle_receives();
        self.exchange_long_receives();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::connection::{Connection, ConnectionConfig};
    use crate::software::Network;
    use crate::verbs::Device;

    /// Connects two devices, and sends until the second one has long buffers.
    async fn grown() -> [Connection; 2] {
        let network = Network::new();
        let prepared = ["one", "two"].map(|name| {
            let pd = Device::software_in(&network, name).unwrap().protection_domain().unwrap();
            Connection::prepare(&pd, &ConnectionConfig::default().keepalive(None)).unwrap()
        });
        let ends = prepared.each_ref().map(|own| (own.endpoint(), own.handshake(&[]).unwrap()));
        let [one, two] = prepared;
        let one = one.establish(&ends[1].0, &ends[1].1).unwrap();
        let two = two.establish(&ends[0].0, &ends[0].1).unwrap();
        while two.counters().buffer_memory < 100_000 {
            one.send(vec![7; 2000]).await.unwrap();
            two.recv().await.unwrap();
        }
        [one, two]
    }

    #[test]
    fn side_that_has_shrunk_keeps_no_entries_for_its_long_buffers() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let [one, two] = grown().await;
            while two.handle().shared.with(|state, _| state.receives.posted.len()) < 64 {
                let mut sent = 0;
                while one.try_send(vec![7; 2000]).is_ok() {
                    sent += 1;
                }
                for _ in 0..sent {
                    two.recv().await.unwrap();
                }
            }
            let capacity = || two.handle().shared.with(|state, _| state.receives.posted.capacity());
            assert!(capacity() >= 64, "{}", capacity());
            let is_grown = || {
                let grown = || two.handle().shared.with(|state, _| state.receives.grown.is_some());
                grown() || two.handle().shared.with(|state, _| state.receives.are_leaving())
            };
            for _ in 0..10_000 {
                tokio::task::yield_now().await;
                two.handle().shared.with(|state, _| {
                    state.settle_receives();
                    state.shrink_receives();
                    state.send_due();
                });
            }
            assert!(!is_grown());
            assert!(capacity() < 20, "{}", capacity());
        });
    }

    #[test]
    fn message_that_crosses_a_return_neither_repeats_it_nor_prevents_a_growth() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let [one, two] = grown().await;
            let leaving = || two.handle().shared.with(|state, _| state.receives.are_leaving());
            let mut crossed = false;
            for _ in 0..1000 {
                tokio::task::yield_now().await;
                // Without a poll of the other side between.
                two.handle().shared.with(|state, _| {
                    state.settle_receives();
                    state.shrink_receives();
                    state.send_due();
                });
                if leaving() {
                    one.try_send("crosses").unwrap();
                    crossed = true;
                    break;
                }
            }
            assert!(crossed);
            let frames =
                || one.handle().shared.with(|state, _| state.protocol.sending.flush_point());
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            let before = frames();
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            assert_eq!(frames(), before, "no frames while nothing happens");
            // It grows again although messages wait all the time.
            one.try_send("waits").unwrap();
            while two.counters().inbox < 2 {
                tokio::task::yield_now().await;
            }
            assert_eq!(two.recv().await.unwrap().unwrap(), "crosses");
            one.send(vec![7; 2000]).await.unwrap();
            while two.counters().inbox < 2 {
                tokio::task::yield_now().await;
            }
            assert!(two.handle().shared.with(|state, _| state.receives.grown.is_some()));
            assert!(!leaving());
        });
    }
}
