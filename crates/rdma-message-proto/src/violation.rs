#![warn(missing_docs)]

use std::fmt;

/// A protocol violation by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A missing or invalid header.
    Header {
        /// Header; 0 if missing.
        header: u32,
    },
    /// An invalid payload length for the kind of frame.
    FrameLength {
        /// Bytes.
        len: usize,
    },
    /// More receives announced than in use.
    Credits {
        /// Receives announced.
        announced: u32,
        /// Receives in use.
        in_use: u32,
    },
    /// More frames sent than receives posted.
    Window {
        /// Number posted.
        receives: u32,
    },
    /// More messages done than offered.
    Done {
        /// Messages reported done.
        announced: u32,
        /// Messages offered.
        offered: u32,
    },
    /// The receives of unfetched offers announced.
    Unfetched {
        /// Receives still in use.
        in_use: u32,
        /// Offered messages not done.
        offered: u32,
    },
    /// An offer that is empty or exceeds the address space.
    Offer {
        /// Address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A message above the announced limit.
    TooLong {
        /// Bytes.
        len: u64,
        /// Limit in bytes.
        allowed: u64,
    },
    /// Another frame within a message of several frames.
    Incomplete {
        /// Bytes of the message that have arrived.
        len: u64,
    },
    /// A message of too many frames.
    Frames {
        /// Limit, which depends on the receives.
        allowed: u32,
    },
    /// An invalid change of the peer's receives.
    Resize {
        /// Receives announced.
        receives: u32,
        /// Bytes of each announced.
        size: u32,
    },
    /// A skipped receive that is needed.
    Skip,
    /// A message after `Fin`.
    AfterFinish,
    /// An acknowledgement of a `Fin` that was not sent.
    NotFinished,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Header { header } => write!(f, "invalid frame header {header:#010x}"),
            Self::FrameLength { len } => {
                write!(f, "invalid payload length of {len} bytes for the kind of frame")
            }
            Self::Credits { announced, in_use } => {
                write!(f, "{announced} receives announced as free, only {in_use} in use")
            }
            Self::Window { receives } => {
                write!(f, "more frames sent than receives posted ({receives})")
            }
            Self::Done { announced, offered } => {
                write!(f, "{announced} messages reported fetched, only {offered} offered")
            }
            Self::Unfetched { in_use, offered } => write!(
                f,
                "receives announced as free that hold offered messages: {offered} not fetched, \
                 {in_use} in use"
            ),
            Self::Offer { addr, len } => write!(f, "invalid offer of {len} bytes at {addr:#x}"),
            Self::TooLong { len, allowed } => {
                write!(f, "message of {len} bytes, at most {allowed} allowed (max_message)")
            }
            Self::Incomplete { len } => {
                write!(f, "another frame within a message, of which {len} bytes have arrived")
            }
            Self::Frames { allowed } => write!(f, "message of more than {allowed} frames"),
            Self::Resize { receives, size } => {
                write!(f, "invalid change to {receives} receives of {size} bytes")
            }
            Self::Skip => f.write_str("receive skipped that the peer must use"),
            Self::AfterFinish => f.write_str("message sent after Fin"),
            Self::NotFinished => f.write_str("acknowledgement of a Fin that was not sent"),
        }
    }
}

impl std::error::Error for Violation {}
