//! Asynchronous events.

use std::io;

use rdma_provider::types::AsyncEvent;

use super::completion_channel::Mailbox;

/// The asynchronous events of an open device.
#[derive(Debug)]
pub(crate) struct Events {
    device: String,
    pub(crate) mailbox: Mailbox<AsyncEvent>,
}

impl Events {
    pub(super) fn new(device: &str) -> io::Result<Self> {
        Ok(Self { device: device.to_owned(), mailbox: Mailbox::new()? })
    }

    pub(crate) fn raise(&self, event: AsyncEvent) {
        rdma_provider::info!(device = self.device, ?event, "asynchronous event");
        self.mailbox.push(event);
    }
}
