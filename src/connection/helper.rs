use std::sync::Weak;

use rdma_message_proto::lifecycle::Event;

use super::error::CloseReason;
use super::shared::ConnectionInner;

/// At most one per connection, whatever the peer offers.
pub(super) struct Helper {
    shared: Weak<ConnectionInner>,
    running: bool,
}

impl Helper {
    pub(super) fn new(shared: Weak<ConnectionInner>) -> Self {
        Self { shared, running: true }
    }

    pub(super) fn run(mut self) {
        while let Some(shared) = self.shared.upgrade()
            && let Some(job) = shared.with(|state, _| state.memory.jobs.pop())
        {
            let done = job.run();
            shared.with(|state, waker| state.on_job_done(done, waker));
        }
        self.running = false;
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let (true, Some(shared)) = (self.running, self.shared.upgrade()) {
            // It panicked. Otherwise receivers of the message would never be woken.
            shared.with(|state, _| state.on(Event::Terminate(CloseReason::Memory)));
            shared.connection_waker.wake_driver();
        }
    }
}
