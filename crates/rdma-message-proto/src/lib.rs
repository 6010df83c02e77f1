//! The message protocol of tokio-rdma without I/O, tasks, clocks or buffers.
//!
//! [`Protocol`](protocol::Protocol) checks what the peer sends, and decides what one end of a
//! connection sends and when it ends. tokio-rdma posts the frames, moves the bytes and calls the
//! wakers.
//!
//! ```text
//!   protocol           one end of a connection
//!      ├─ lifecycle    its phases; end: why it ended
//!      ├─ flow         credits, and the proof that two ends never wait for each other
//!      │    └─ window  how receives change; frame: the header of each SEND
//!      ├─ growth       when receives change
//!      ├─ incoming     checks of received frames beyond credits
//!      ├─ framing      the length and the number of the frames of a message
//!      ├─ sending      how a message is sent, and what senders and flushes wait for
//!      └─ timers       deadlines
//!   handshake          private data of a connection request; refusal: of a rejection
//! ```
//!
//! # On the wire
//!
//! A connection uses one reliable queue pair. Each SEND is a solicited frame, whose header is the
//! immediate data, or on iWARP the end of the payload ([`frame`]). A WRITE with immediate data is a
//! notification: it has no header, because the immediate is the application's.
//!
//! | Frame | Payload | Its receive is reposted |
//! |---|---|---|
//! | Data | a message, or the last part of one | when the application has taken the message |
//! | Part | part of a message, not empty; a Part or Data follows | with that Data |
//! | Offer | address, length, key of a longer message | at once; its credit returns like a Data's |
//! | Ack | none | at once |
//! | Ping | none; requests an Ack | at once |
//! | Fin | none; no message follows | at once |
//! | Abort | none; the sender ends without finishing | never |
//! | Resize | a change of the sender's receives ([`window`]) | at once |
//! | Resize | none; uses up a receive that the peer wants to skip | never |
//!
//! While connecting, each end announces the size and the number of its receives, whether it has
//! them from the start, and its longest message ([`handshake`]: 24 bytes of private data). Flag 1
//! says that the connection carries a byte stream.
//!
//! # Messages
//!
//! [`sending`] chooses by the length: one Data frame; Part frames and a Data frame, which are sent
//! without another frame between them and keep their receives until the application takes the
//! message; or an Offer. The receiver READs an offered message and counts it as done in its next
//! header. Only then, or when the queue pair is closed, does the sender deregister the memory. It
//! does so even after an abort, because the peer would otherwise report its refused READ as the
//! reason of the end.
//!
//! # Byte streams
//!
//! A stream uses the same frames, credits, phases and deadlines. A Data frame carries at least one
//! byte, and there are no boundaries. A Part and a notification are violations. Bytes that do not
//! fill a frame are held while earlier frames are in flight; a Fin follows all held bytes.
//!
//! # The end
//!
//! A connection closes cleanly when both ends have sent a Fin, all offers are fetched, and each end
//! has acknowledged the other's Fin by a bit of its headers. The acknowledgements of the device do
//! not suffice, because they may be lost with a peer that closes its queue pair. An end that has
//! acknowledged a Fin of an idle peer gives the peer one second to finish.
//!
//! An Abort is sent after the posted work. The end waits for its acknowledgement for at most a
//! second, and not at all if the Abort lacks a credit.
//!
//! tokio-rdma re-exports the types of [`handshake`], [`RefusalReason`] and [`Violation`]. The rest
//! of the interface may change with any version.
//!
//! [`RefusalReason`]: refusal::RefusalReason

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "most modules are for tokio-rdma only; the others warn")]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

pub mod end;
pub mod flow;
pub mod frame;
pub mod framing;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
mod growth;
pub mod handshake;
pub mod incoming;
pub mod lifecycle;
#[cfg(test)]
mod model;
pub mod protocol;
pub mod refusal;
pub mod sending;
#[cfg(test)]
mod texts;
pub mod timers;
mod violation;
pub mod window;

pub use violation::Violation;
