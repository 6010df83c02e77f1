//! The most common completions, decoded in place: successful SENDs, WRITEs and READs, and messages
//! that arrived in a receive of their queue pair.

use std::ptr::NonNull;

use rdma_provider::types::{Qpn, WcOpcode, WcStatus, WorkCompletion, WrId};

use super::super::doorbell::from_device;
use super::super::layout::{Cqe, Opcode, cqe};
use super::super::queues::Receives;
use super::super::scatter;
use super::{CompletionQueue, INDEX, QPN, State, copy_of, op_own, received};

/// Completions of requests by operation, and whether they have a length; `None` for those that
/// [`CompletionQueue::next`] decodes.
const REQUESTS: [Option<(WcOpcode, bool)>; 256] = {
    let mut requests = [None; 256];
    requests[Opcode::Send as usize] = Some((WcOpcode::SEND, false));
    requests[Opcode::Write as usize] = Some((WcOpcode::RDMA_WRITE, false));
    requests[Opcode::Read as usize] = Some((WcOpcode::RDMA_READ, true));
    requests
};

/// A message whose data are in memory.
const MESSAGE: u8 = cqe::SEND << 4;
/// A message whose data are in the CQE.
const SHORT_MESSAGE: u8 = MESSAGE | cqe::INLINE_32;

/// The result of [`CompletionQueue::next_common`].
pub(super) enum Next {
    Completion(WorkCompletion),
    /// No entry belongs to software.
    Empty,
    /// An entry that it does not decode.
    Other,
}

impl CompletionQueue {
    /// Removes the oldest completion if it belongs to request `wr_id` and is a common one.
    /// Otherwise removes nothing.
    #[inline(always)]
    pub fn take_request(&self, wr_id: WrId) -> Option<WorkCompletion> {
        let mut state = self.state.lock();
        let index = state.consumer;
        let entry = self.cqe(index);
        // All other bits are zero: kind REQUEST, no inline data, not solicited.
        if op_own(entry) != self.owner(index) || state.failed.is_some() {
            return None;
        }
        let completion = take_request_at(&state, entry, |found| found == wr_id)?;
        state.consumer = index.wrapping_add(1);
        self.setup.consumer.release(state.consumer & INDEX);
        Some(completion)
    }

    /// Decodes and removes the oldest CQE if it is a common one, without telling the adapter.
    #[inline]
    pub(super) fn next_common(&self, state: &mut State) -> Next {
        let index = state.consumer;
        let entry = self.cqe(index);
        // The owner bit becomes zero if the entry belongs to software.
        let kind = op_own(entry) ^ self.owner(index);
        let completion = match kind & !cqe::SOLICITED {
            0 => take_request_at(state, entry, |_| true),
            MESSAGE => take_message_at(state, entry, false),
            SHORT_MESSAGE => take_message_at(state, entry, true),
            _ if kind & cqe::OWNER != 0 || kind >> 4 == cqe::INVALID => return Next::Empty,
            _ => None,
        };
        let Some(completion) = completion else { return Next::Other };
        state.consumer = index.wrapping_add(1);
        Next::Completion(completion)
    }
}

/// Decodes a successful request that is `wanted`, and frees its capacity.
#[inline]
fn take_request_at(
    state: &State,
    entry: NonNull<Cqe>,
    wanted: impl Fn(WrId) -> bool,
) -> Option<WorkCompletion> {
    from_device();
    let entry = entry.as_ptr();
    // SAFETY: S3: within the ring.
    let (opcode_qpn, counter, length) = unsafe {
        (
            (&raw const (*entry).opcode_qpn).read_volatile().get(),
            (&raw const (*entry).counter).read_volatile().get(),
            (&raw const (*entry).length).read_volatile().get(),
        )
    };
    let (opcode, has_length) = REQUESTS[(opcode_qpn >> 24) as usize]?;
    let send = state.table.find_send(opcode_qpn & QPN)?;
    let completed = send.find(counter).filter(|completed| wanted(completed.wr_id))?;
    send.free(completed);
    Some(WorkCompletion {
        wr_id: completed.wr_id,
        opcode,
        byte_len: if has_length { length } else { 0 },
        qpn: Qpn(opcode_qpn & QPN),
        ..WorkCompletion::EMPTY
    })
}

/// Decodes a message in a receive of its queue pair, and retires the receive. `is_short` if the
/// message is in the CQE: then it must fit the first buffer.
#[inline]
fn take_message_at(state: &State, entry: NonNull<Cqe>, is_short: bool) -> Option<WorkCompletion> {
    let entry = copy_of(entry);
    let queues = state.table.find(entry.opcode_qpn.get() & QPN)?;
    let Receives::Own(receives) = &queues.receive else { return None };
    let oldest = receives.oldest()?;
    // SAFETY: S1, S2: the receive is in flight until it is retired below. The adapter puts no
    // data into CQEs if it registers memory under other addresses.
    let copy = || unsafe { scatter::to_first_buffer(receives.entries(), oldest.place, &entry) };
    if is_short && !copy() {
        return None;
    }
    receives.retire(&oldest);
    Some(received(&entry, oldest.wr_id, WcStatus::SUCCESS))
}
