//! Receives of a responder.

use smallvec::SmallVec;

use rdma_provider::types::{Access, RecvWr, Sge, WcStatus, WorkCompletion, WrId};

use crate::memory::dma::{Gather, Payload};
use crate::memory::keys::Keys;

use super::{Receiver, Refusal, Responder};

#[derive(Debug)]
pub(crate) struct ReceiveWqe {
    pub(super) wr_id: WrId,
    pub(super) position: u32,
    pub(super) length: u64,
    pub(super) sges: SmallVec<[Sge; 1]>,
}

impl Default for ReceiveWqe {
    fn default() -> Self {
        Self { wr_id: WrId(0), position: 0, length: 0, sges: SmallVec::new() }
    }
}

impl ReceiveWqe {
    pub(crate) fn assign(&mut self, wr: &RecvWr<'_>, position: u32) {
        self.wr_id = wr.wr_id;
        self.position = position;
        self.length = wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        self.sges.clear();
        self.sges.extend_from_slice(wr.sges);
    }
}

impl Responder {
    /// Takes the next receive unless one is held. Returns whether one is held now.
    #[inline]
    pub(super) fn take_receive(&mut self, out: &mut impl Receiver) -> bool {
        if self.receive_held {
            return true;
        }
        self.receive_held = if self.config.shared {
            out.take_shared(&mut self.receive)
        } else if let Some(front) = self.queue.front_mut() {
            std::mem::swap(front, &mut self.receive);
            self.queue.pop();
            true
        } else {
            false
        };
        self.receive_held
    }

    #[inline]
    pub(super) fn fill_receive(
        &mut self,
        payload: &Payload<'_, '_>,
        keys: &Keys,
    ) -> Result<(), Refusal> {
        let len = payload.len();
        if len == 0 {
            return Ok(());
        }
        let at = self.received as usize;
        // A message has at most 2^31 bytes (IBTA 9.4.3).
        if (at + len) as u64 > self.receive.length.min(1 << 31) {
            self.received += len as u32;
            return Err(Refusal::TOO_LONG);
        }
        let pd = self.config.receive_pd;
        if let [only] = self.receive.sges.as_slice() {
            let addr = only.addr.checked_add(at as u64).ok_or(Refusal::RECEIVE)?;
            let target = keys
                .resolve(only.lkey.0, pd, addr, len, Access::LOCAL_WRITE)
                .map_err(|_| Refusal::RECEIVE)?;
            payload.copy_to(std::slice::from_ref(&target));
        } else {
            let mut target = Gather::new();
            keys.gather(&self.receive.sges, pd, at, len, Access::LOCAL_WRITE, &mut target)
                .map_err(|_| Refusal::RECEIVE)?;
            payload.copy_to(&target);
        }
        self.received += len as u32;
        Ok(())
    }

    #[inline]
    pub(super) fn finish_receive(
        &mut self,
        completion: &WorkCompletion,
        solicited: bool,
        out: &mut impl Receiver,
    ) {
        self.receive_held = false;
        out.complete(self.receive.position, completion, solicited);
    }

    /// Returns the held receive and stops holding it.
    pub(crate) fn take_held_receive(&mut self) -> Option<&mut ReceiveWqe> {
        std::mem::take(&mut self.receive_held).then_some(&mut self.receive)
    }

    pub(super) fn fail_receive(&mut self, status: WcStatus, out: &mut impl Receiver) {
        let mut completion = self.completion(self.receive.wr_id, status);
        if status == WcStatus::LOC_LEN_ERR {
            completion.byte_len = self.received;
            completion.imm_or_rkey = self.receive.length.min(u64::from(u32::MAX)) as u32;
        }
        self.finish_receive(&completion, false, out);
    }
}
