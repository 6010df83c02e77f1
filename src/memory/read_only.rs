#![allow(unsafe_code)]

use std::ptr::NonNull;

use bytes::Bytes;

use super::registration::Registration;
use crate::error::SetupError;
use crate::memory::{RemoteRegion, Storage};
use crate::types::Access;
use crate::verbs::ProtectionDomain;

/// Bytes that peers may read in place. Neither device nor peers may write, so other clones of the
/// [`Bytes`] can be read at the same time. The software device reads them as plain memory. Dropping
/// the region revokes the access, then drops the bytes.
#[derive(Debug)]
pub(crate) struct ReadOnlyRegion {
    registration: Registration,
}

struct SharedBytes(Bytes);

// SAFETY: S1: the bytes neither move nor change while the value lives, which holds a reference to
// them. Other references may exist, so the bytes are registered for reading only.
unsafe impl Storage for SharedBytes {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&self.0[..]).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl ReadOnlyRegion {
    pub(crate) fn new(pd: &ProtectionDomain, bytes: Bytes) -> Result<Self, SetupError> {
        Ok(Self {
            registration: Registration::new(pd, SharedBytes(bytes), Access::REMOTE_READ, false)?,
        })
    }

    pub(crate) fn grant(&self) -> RemoteRegion {
        self.registration.grant()
    }

    pub(crate) fn len(&self) -> u64 {
        self.registration.len() as u64
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::software::Network;
    use crate::{CompletionMode, CompletionQueue, Device, Pool, QueuePair};

    /// Runs under Miri, which rejects atomic accesses to read-only memory.
    // Shows S2, M1.
    #[test]
    fn peers_read_read_only_bytes_while_the_owner_reads_them() {
        static BYTES: [u8; 64] = [7; 64];
        let device = Device::software_in(&Network::new(), "reader0").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Cooperative).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 2).unwrap();
        for bytes in [Bytes::from_static(&BYTES), Bytes::from(BYTES.to_vec())] {
            let reader = bytes.clone();
            let seen = &reader[..];
            let region = ReadOnlyRegion::new(&pd, bytes).unwrap();
            for range in [0..64, 3..61, 8..16] {
                let len = (range.end - range.start) as usize;
                let mut read = pin!(
                    a.read(pool.try_alloc(len).unwrap(), region.grant().slice(range).unwrap())
                );
                let mut context = Context::from_waker(Waker::noop());
                let read = loop {
                    if let Poll::Ready(read) = read.as_mut().poll(&mut context) {
                        break read.unwrap();
                    }
                };
                assert_eq!(read[..], seen[..len]);
            }
        }
    }
}
