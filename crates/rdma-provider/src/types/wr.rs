//! Work requests: what is asked of a device.

use bitflags::bitflags;

use super::{Access, AddressVector, DcKey, Imm, Lkey, Qkey, Qpn, Rkey, WrId};

/// Scatter/gather element: a piece of registered local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Registration that covers them.
    pub lkey: Lkey,
}

/// Piece of a peer's memory, as the wire names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteAddr {
    /// Address in the peer's registration.
    pub addr: u64,
    /// Its key.
    pub rkey: Rkey,
}

/// What a send work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// Message into the peer's next receive.
    Send,
    /// The same, with immediate data.
    SendWithImm(Imm),
    /// The same; the peer's device invalidates its key.
    SendWithInvalidate(Rkey),
    /// Into the peer's memory.
    Write(RemoteAddr),
    /// Into the peer's memory, and consumes a receive that reports the immediate data.
    WriteWithImm(RemoteAddr, Imm),
    /// From the peer's memory.
    Read(RemoteAddr),
    /// Atomic compare-and-swap of 8 bytes; the original value comes back.
    CompareSwap {
        /// The 8 bytes, 8-aligned.
        remote: RemoteAddr,
        /// Swap only if equal to this.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Atomic addition to 8 bytes; the original value comes back.
    FetchAdd {
        /// The 8 bytes, 8-aligned.
        remote: RemoteAddr,
        /// Value to add, wrapping.
        add: u64,
    },
    /// Nothing is sent: the window of this key, bound by this queue pair, ends to be within reach of the peer.
    LocalInvalidate(Rkey),
    /// Nothing is sent: what [`Data::Window`] says comes within reach of the peer.
    BindWindow,
}

impl SendOp {
    /// True if the peer answers with data: READ and atomics, which a fence waits for.
    #[must_use]
    pub const fn reads_back(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// True for what the own device does without telling the peer.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate(_) | Self::BindWindow)
    }
}

bitflags! {
    /// Modifiers of a send work request, `ibv_post_send(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Wait for earlier READs and atomics of this queue pair (RC).
        const FENCE = 1;
        /// Report success too, not only failure.
        const SIGNALED = 1 << 1;
        /// Raise a solicited event at the receiver.
        const SOLICITED = 1 << 2;
    }
}

/// Local bytes of a send work request.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// Registered memory.
    Sges(&'a [Sge]),
    /// Copied while posting; at most `max_inline` bytes.
    Inline(&'a [u8]),
    /// What a [`SendOp::BindWindow`] binds, and no other.
    Window(&'a WindowBind),
}

/// Binding of a memory window of type 2, `struct ibv_mw_bind_info` of `ibv_bind_mw(3)`.
///
/// The numbers are those of [`Mw::handle`](crate::contract::Mw::handle) and [`Mr::handle`](crate::contract::Mr::handle).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowBind {
    /// The provider's number of the window: an `ibv_mw` of libibverbs.
    pub window: usize,
    /// The provider's number of the registration: an `ibv_mr` of libibverbs.
    pub region: usize,
    /// The window's key now.
    pub current: Rkey,
    /// The key it is to have: another low byte, the rest the same. See [`Rkey::next`].
    pub rkey: Rkey,
    /// Key of the registration.
    pub lkey: Lkey,
    /// First byte that the peer may reach.
    pub addr: u64,
    /// Bytes; at least 1.
    pub len: u64,
    /// What the peer may do: any of [`Access::REMOTE_ALL`].
    pub access: Access,
}

/// Receiver of a datagram.
#[derive(Debug, Clone, Copy)]
pub struct UdTarget<'a> {
    /// Route.
    pub address: &'a AddressVector,
    /// The provider's address handle: an `ibv_ah` of libibverbs, unused by the software device.
    pub handle: usize,
    /// Receiving queue pair.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: Qkey,
}

/// Target of dynamic connections, as a work request of an initiator names it.
#[derive(Debug, Clone, Copy)]
pub struct DctTarget<'a> {
    /// Route.
    pub address: &'a AddressVector,
    /// The provider's address handle: an `ibv_ah` of libibverbs, unused by the software device. It is looked at while
    /// posting only.
    pub handle: usize,
    /// Number of the target.
    pub number: Qpn,
    /// Its access key.
    pub key: DcKey,
}

/// Receiver of a work request that names one.
#[derive(Debug, Clone, Copy)]
pub enum SendTarget<'a> {
    /// Of a datagram (UD).
    Datagram(UdTarget<'a>),
    /// Of a dynamic connection (DC).
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

/// Send work request.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// What to do.
    pub op: SendOp,
    /// Modifiers.
    pub flags: SendFlags,
    /// With which local bytes.
    pub data: Data<'a>,
    /// Receiver, for UD and DC only.
    pub target: Option<SendTarget<'a>>,
}

/// Receive work request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// Where the message goes; filled in order.
    pub sges: &'a [Sge],
}
