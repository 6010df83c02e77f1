use super::{DcLease, DcPoolPeer, PooledOperation};
use crate::engine::WorkRequest;
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion, Scatter};
#[cfg(doc)]
use crate::op::QueuePair;
use crate::op::operations;
use crate::op::{Atomic, Batch, BatchOp, Posting, Read, Send, Write};
use crate::types::Imm;

macro_rules! options {
    ($owner:ident) => {
        impl $owner {
            /// Returns its operations with a fence, see [`QueuePair::fenced`].
            pub fn fenced(&self) -> Posting<&Self> {
                self.posting().fenced()
            }

            /// Returns its operations with solicited messages, see [`QueuePair::solicited`].
            pub fn solicited(&self) -> Posting<&Self> {
                self.posting().solicited()
            }

            /// Returns its operations with immediate data, see [`QueuePair::with_imm`].
            pub fn with_imm(&self, imm: Imm) -> Posting<&Self, Imm> {
                self.posting().with_imm(imm)
            }

            fn posting(&self) -> Posting<&Self> {
                Posting::new(self)
            }
        }
    };
}

operations!([] DcPoolPeer, [PooledOperation]);
operations!([] DcLease, []);
options!(DcPoolPeer);
options!(DcLease);
