//! Work requests.

use bitflags::bitflags;

use super::{Access, AddressVector, DcKey, Imm, Lkey, Qkey, Qpn, Rkey, WrId};

/// A scatter/gather element: registered local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Key of the registration.
    pub lkey: Lkey,
}

/// An address in a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteAddr {
    /// Address in the peer's registration.
    pub addr: u64,
    /// Key of the peer's registration.
    pub rkey: Rkey,
}

/// The operation of a send work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// Message to the peer's next receive.
    Send,
    /// Message with immediate data.
    SendWithImm(Imm),
    /// Message after which the peer's device invalidates its key.
    SendWithInvalidate(Rkey),
    /// Write to the peer's memory.
    Write(RemoteAddr),
    /// Write to the peer's memory that consumes a receive for the immediate data.
    WriteWithImm(RemoteAddr, Imm),
    /// Read from the peer's memory.
    Read(RemoteAddr),
    /// Atomic compare-and-swap of 8 bytes, which returns the original value.
    CompareSwap {
        /// Remote 8 bytes, 8-byte aligned.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Atomic addition to 8 bytes, which returns the original value.
    FetchAdd {
        /// Remote 8 bytes, 8-byte aligned.
        remote: RemoteAddr,
        /// Value to add, wrapping.
        add: u64,
    },
    /// Revokes the window with this key, bound by this queue pair. Sends no packet.
    LocalInvalidate(Rkey),
    /// Binds a window as described by [`Data::Window`]. Sends no packet.
    BindWindow,
}

impl SendOp {
    /// Returns true if the peer responds with data, for which a fence waits.
    #[must_use]
    pub const fn reads_back(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Returns true if the peer is not involved.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate(_) | Self::BindWindow)
    }
}

bitflags! {
    /// Flags of a send, `ibv_post_send(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Waits for earlier READs and atomics of the queue pair (RC).
        const FENCE = 1;
        /// Reports success too.
        const SIGNALED = 1 << 1;
        /// Raises a solicited event at the receiver.
        const SOLICITED = 1 << 2;
    }
}

/// The local data of a send.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// Registered memory.
    Sges(&'a [Sge]),
    /// Bytes copied while posting, at most `max_inline`.
    Inline(&'a [u8]),
    /// Parameters of [`SendOp::BindWindow`] only.
    Window(&'a WindowBind),
}

/// A binding of a memory window of type 2, `struct ibv_mw_bind_info` of `ibv_bind_mw(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowBind {
    /// [`Mw::handle`](crate::contract::Mw::handle): an `ibv_mw` pointer of libibverbs.
    pub window: usize,
    /// [`Mr::handle`](crate::contract::Mr::handle): an `ibv_mr` pointer of libibverbs.
    pub region: usize,
    /// Current key of the window.
    pub current: Rkey,
    /// New key, with another low byte; see [`Rkey::next`].
    pub rkey: Rkey,
    /// Local key of the registration.
    pub lkey: Lkey,
    /// First byte that the peer may access.
    pub addr: u64,
    /// Length in bytes; at least 1.
    pub len: u64,
    /// Rights of the peer, of [`Access::REMOTE_ALL`].
    pub access: Access,
}

/// The receiver of a datagram.
#[derive(Debug, Clone, Copy)]
pub struct UdTarget<'a> {
    /// Route.
    pub address: &'a AddressVector,
    /// Address handle: an `ibv_ah` pointer of libibverbs; unused by the software device.
    pub handle: usize,
    /// Receiving queue pair.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: Qkey,
}

/// The DC target of a work request.
#[derive(Debug, Clone, Copy)]
pub struct DctTarget<'a> {
    /// Route.
    pub address: &'a AddressVector,
    /// Address handle, read only while posting; see [`UdTarget::handle`].
    pub handle: usize,
    /// Number of the target.
    pub number: Qpn,
    /// Its access key.
    pub key: DcKey,
}

/// The receiver of a work request.
#[derive(Debug, Clone, Copy)]
pub enum SendTarget<'a> {
    /// Datagram receiver (UD).
    Datagram(UdTarget<'a>),
    /// DC target.
    Dc(DctTarget<'a>),
}

impl<'a> From<UdTarget<'a>> for SendTarget<'a> {
    fn from(target: UdTarget<'a>) -> Self {
        Self::Datagram(target)
    }
}

impl<'a> From<DctTarget<'a>> for SendTarget<'a> {
    fn from(target: DctTarget<'a>) -> Self {
        Self::Dc(target)
    }
}

/// A send work request.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Operation.
    pub op: SendOp,
    /// Flags.
    pub flags: SendFlags,
    /// Local data.
    pub data: Data<'a>,
    /// Receiver, for UD and DC only.
    pub target: Option<SendTarget<'a>>,
}

/// A receive work request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Memory for the message, in order.
    pub sges: &'a [Sge],
}
