//! Queue pairs: their queues, and the completion queues that find them.
//!
//! A reset or destruction locks the completion queues, so that no poll decodes a completion of the
//! earlier work: a reset reuses the ring from its start, a destruction frees it. Remaining
//! completions of the queue pair are removed.

use std::sync::Arc;

use rdma_provider::VerbError;

use super::completion_queue::{CompletionQueue, Locked};
use super::queues::{Queues, Receives};
use super::receive_queue::ReceiveQueue;
use super::registers::ThreadDomain;
use super::send_queue::SendQueue;
use super::shared_receive_queue::SharedReceiveQueue;

/// The error of a queue that was created without capacity.
const NO_CAPACITY: VerbError =
    VerbError::new("post to a queue without capacity", VerbError::ENOMEM);

/// A queue pair that posts directly.
#[derive(Debug)]
pub(crate) struct QueuePair {
    qpn: u32,
    queues: Arc<Queues>,
    send_cq: Arc<CompletionQueue>,
    recv_cq: Arc<CompletionQueue>,
    /// Keeps its doorbell register.
    _domain: Arc<ThreadDomain>,
}

impl QueuePair {
    pub(super) fn attached(
        qpn: u32,
        queues: Arc<Queues>,
        send_cq: Arc<CompletionQueue>,
        recv_cq: Arc<CompletionQueue>,
        domain: Arc<ThreadDomain>,
    ) -> Self {
        let pair = Self { qpn, queues, send_cq, recv_cq, _domain: domain };
        match pair.lock() {
            [Some(mut sends), Some(mut receives)] => {
                let [sent, received] = pair.queues.halves().map(Arc::new);
                sends.attach(qpn, sent);
                receives.attach(qpn, received);
            }
            both => {
                for mut queue in both.into_iter().flatten() {
                    queue.attach(qpn, pair.queues.clone());
                }
            }
        }
        pair
    }

    #[inline]
    pub(crate) fn send(&self) -> Result<&SendQueue, VerbError> {
        self.queues.send.as_deref().ok_or(NO_CAPACITY)
    }

    /// Returns its own receive queue.
    pub(crate) fn receive(&self) -> Result<&ReceiveQueue, VerbError> {
        match &self.queues.receive {
            Receives::Own(queue) => Ok(queue),
            Receives::None | Receives::Shared(_) => Err(NO_CAPACITY),
        }
    }

    /// Calls `reset`, and forgets all work if it succeeds.
    pub(crate) fn reset(
        &self,
        reset: impl FnOnce() -> Result<(), VerbError>,
    ) -> Result<(), VerbError> {
        let mut locked = self.lock();
        reset()?;
        for queue in locked.iter_mut().flatten() {
            queue.remove_completions(self.qpn);
        }
        if let Some(send) = &self.queues.send {
            send.reset();
        }
        if let Receives::Own(receive) = &self.queues.receive {
            receive.reset();
        }
        Ok(())
    }

    /// Calls `destroy`, and removes the queue pair from its completion queues if it succeeds.
    pub(crate) fn destroy(
        &self,
        destroy: impl FnOnce() -> Result<(), VerbError>,
    ) -> Result<(), VerbError> {
        let mut locked = self.lock();
        destroy()?;
        for queue in locked.iter_mut().flatten() {
            queue.detach(self.qpn);
        }
        Ok(())
    }

    /// Locks its completion queues, in an order that all queue pairs follow.
    fn lock(&self) -> [Option<Locked<'_>>; 2] {
        let (first, second) = (Arc::as_ptr(&self.send_cq), Arc::as_ptr(&self.recv_cq));
        match first.cmp(&second) {
            std::cmp::Ordering::Equal => [Some(self.send_cq.lock()), None],
            std::cmp::Ordering::Less => [Some(self.send_cq.lock()), Some(self.recv_cq.lock())],
            std::cmp::Ordering::Greater => {
                let recv = self.recv_cq.lock();
                [Some(self.send_cq.lock()), Some(recv)]
            }
        }
    }
}

/// A DC target whose receives complete in a queue that is read directly.
#[derive(Debug)]
pub(crate) struct Target {
    queues: Arc<Queues>,
    recv_cq: Arc<CompletionQueue>,
}

impl Target {
    pub(crate) fn new(srq: &Arc<SharedReceiveQueue>, recv_cq: &Arc<CompletionQueue>) -> Self {
        let queues = Queues { send: None, receive: Receives::Shared(srq.clone()) };
        Self { queues: Arc::new(queues), recv_cq: recv_cq.clone() }
    }

    /// Calls `modify`, which returns the number of the target once it has one, and returns its
    /// result. The first message of the target may complete before `modify` returns.
    pub(crate) fn modify(
        &self,
        modify: impl FnOnce() -> Result<Option<u32>, VerbError>,
    ) -> Result<Option<u32>, VerbError> {
        let mut queue = self.recv_cq.lock();
        let number = modify()?;
        if let Some(number) = number {
            queue.attach(number, self.queues.clone());
        }
        Ok(number)
    }

    /// Calls `destroy`, and removes the target `number` if it succeeds.
    pub(crate) fn destroy(
        &self,
        number: Option<u32>,
        destroy: impl FnOnce() -> Result<(), VerbError>,
    ) -> Result<(), VerbError> {
        let mut queue = self.recv_cq.lock();
        destroy()?;
        if let Some(number) = number {
            queue.detach(number);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::heap::{CompletionMemory, Limits, ReceiveMemory, SendMemory};
    use super::super::layout::{Opcode, cqe};
    use super::*;
    use rdma_provider::types::{Lkey, RecvWr, Sge, Transport, WorkCompletion, WrId};

    /// Writes a CQE without inline data as the first of the queue.
    fn put(memory: &CompletionMemory, opcode: u8, kind: u8) {
        let mut entry = [0; 64];
        entry[56..60].copy_from_slice(&(u32::from(opcode) << 24 | QPN).to_be_bytes());
        entry[63] = kind << 4;
        memory.ring.write(0, &entry);
    }

    const QPN: u32 = 0x77;

    #[test]
    fn completion_in_the_wrong_queue_fails_it_and_completes_nothing() {
        let limits = Limits { transport: Transport::Rc, max_wr: 4, max_sge: 1, max_inline: 0 };
        let (sends, receives) = (SendMemory::new(4, 0), ReceiveMemory::new(4, 1));
        let memories = [CompletionMemory::new(4, 64), CompletionMemory::new(4, 64)];
        // SAFETY: S3: the memory is dropped after the queues.
        let (queues, cqs) = unsafe {
            let send = Some(Arc::new(sends.queue(QPN, limits)));
            let receive = Receives::Own(Arc::new(receives.own()));
            (Queues { send, receive }, [memories[0].queue(1), memories[1].queue(2)])
        };
        let Receives::Own(own) = &queues.receive else { unreachable!() };
        let sges = [Sge { addr: 8, length: 8, lkey: Lkey(1) }];
        // SAFETY: S1: nothing executes the work.
        unsafe { own.post(&[RecvWr { wr_id: WrId(5), sges: &sges }]) }.unwrap();
        for (cq, half) in cqs.iter().zip(queues.halves()) {
            cq.lock().attach(QPN, Arc::new(half));
        }
        put(&memories[0], 0, cqe::SEND);
        put(&memories[1], Opcode::Write as u8, cqe::REQUEST);
        for cq in &cqs {
            let error = cq.poll(&mut [WorkCompletion::EMPTY]).unwrap_err();
            assert!(error.to_string().contains("work request is not in flight"), "{error}");
        }
        assert!(own.oldest().is_some(), "the receive is still posted");
    }
}
