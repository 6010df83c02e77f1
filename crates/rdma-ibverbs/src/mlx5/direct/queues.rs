//! The queues of a queue pair or DC target.

use std::sync::Arc;

use super::receive_queue::ReceiveQueue;
use super::send_queue::SendQueue;
use super::shared_receive_queue::SharedReceiveQueue;

/// The queues of a queue pair or DC target, as posters use them; or these that complete in one
/// completion queue.
#[derive(Debug, Clone)]
pub(crate) struct Queues {
    /// `None` for a DC target, or without capacity.
    pub(super) send: Option<Arc<SendQueue>>,
    pub(super) receive: Receives,
}

impl Queues {
    /// Returns the queues that complete in each of two completion queues, of sends and of receives.
    /// A completion in the wrong one then finds no queue: two threads would use it at once.
    pub(super) fn halves(&self) -> [Self; 2] {
        let sends = Self { receive: Receives::None, ..self.clone() };
        [sends, Self { send: None, ..self.clone() }]
    }
}

/// The receives of a queue pair.
#[derive(Debug, Clone)]
pub(super) enum Receives {
    /// It receives nothing.
    None,
    Own(Arc<ReceiveQueue>),
    Shared(Arc<SharedReceiveQueue>),
}
