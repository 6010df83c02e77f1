//! The formats that software and adapter share in memory: segments of work queue entries (WQEs) and
//! completion queue entries (CQEs), as `infiniband/mlx5dv.h` declares them.
//!
//! All numbers are big-endian. Sizes and offsets are asserted to be as in mlx5dv.h
//! (rdma-core 44; unchanged in 64).

use std::fmt;
use std::mem::offset_of;

macro_rules! big_endian {
    ($($name:ident, $number:ty;)*) => {
        $(
            #[doc = concat!("A `", stringify!($number), "` in big-endian byte order.")]
            #[derive(Clone, Copy, PartialEq, Eq, Default)]
            #[repr(transparent)]
            pub struct $name($number);

            impl $name {
                /// Stores a number.
                #[inline]
                #[must_use]
                pub const fn new(number: $number) -> Self {
                    Self(number.to_be())
                }

                /// Returns the number.
                #[inline]
                #[must_use]
                pub const fn get(self) -> $number {
                    <$number>::from_be(self.0)
                }
            }

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, "{:#x}", self.get())
                }
            }
        )*
    };
}

big_endian! {
    Be16, u16;
    Be32, u32;
    Be64, u64;
}

/// Bytes of a basic block, the unit of a send queue's indices.
pub const BLOCK: usize = 64;
/// Bytes of a segment, the unit of a WQE's length.
pub const SEGMENT: usize = 16;
/// Segments in a block.
pub(super) const SEGMENTS_OF_BLOCK: u32 = 4;
/// Maximum segments of a WQE: six bits hold its length.
pub const MAX_SEGMENTS: u32 = 63;

/// Operations of send WQEs, `MLX5_OPCODE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// `MLX5_OPCODE_NOP`.
    Nop = 0x00,
    /// `MLX5_OPCODE_SEND_INVAL`.
    SendInvalidate = 0x01,
    /// `MLX5_OPCODE_RDMA_WRITE`.
    Write = 0x08,
    /// `MLX5_OPCODE_RDMA_WRITE_IMM`.
    WriteWithImm = 0x09,
    /// `MLX5_OPCODE_SEND`.
    Send = 0x0a,
    /// `MLX5_OPCODE_SEND_IMM`.
    SendWithImm = 0x0b,
    /// `MLX5_OPCODE_RDMA_READ`.
    Read = 0x10,
    /// `MLX5_OPCODE_ATOMIC_CS`.
    CompareSwap = 0x11,
    /// `MLX5_OPCODE_ATOMIC_FA`.
    FetchAdd = 0x12,
    /// `MLX5_OPCODE_UMR`: binds and invalidates memory windows.
    Umr = 0x25,
}

impl Opcode {
    /// Returns the operation with this code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::Nop,
            0x01 => Self::SendInvalidate,
            0x08 => Self::Write,
            0x09 => Self::WriteWithImm,
            0x0a => Self::Send,
            0x0b => Self::SendWithImm,
            0x10 => Self::Read,
            0x11 => Self::CompareSwap,
            0x12 => Self::FetchAdd,
            0x25 => Self::Umr,
            _ => return None,
        })
    }
}

/// Bits of [`Control::flags`], `MLX5_WQE_CTRL_*`.
pub mod control {
    /// Writes a CQE for a success, too: `MLX5_WQE_CTRL_CQ_UPDATE`.
    pub const SIGNALED: u8 = 2 << 2;
    /// Raises a solicited event at the peer: `MLX5_WQE_CTRL_SOLICITED`.
    pub const SOLICITED: u8 = 1 << 1;
    /// Waits for earlier READs and atomics: `MLX5_WQE_CTRL_FENCE`.
    pub const FENCE: u8 = 4 << 5;
    /// Waits for the UMR before it: `MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`.
    pub const SMALL_FENCE: u8 = 1 << 5;
}

/// The first segment of each send WQE, `struct mlx5_wqe_ctrl_seg`. Its first eight bytes are also
/// the value of the doorbell.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Control {
    /// Index of the WQE's first block << 8 | [`Opcode`].
    pub index_opcode: Be32,
    /// Queue pair number << 8 | number of segments.
    pub qpn_segments: Be32,
    /// Checksum; unused.
    pub signature: u8,
    /// Stream of a DC initiator; 0 without streams.
    pub stream: [u8; 2],
    /// Bits of [`control`].
    pub flags: u8,
    /// Immediate data, or the key to invalidate.
    pub immediate: Be32,
}

/// An address in the peer's memory, `struct mlx5_wqe_raddr_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Remote {
    /// Address.
    pub address: Be64,
    /// Key.
    pub key: Be32,
    /// Zero.
    pub reserved: u32,
}

/// The operands of an atomic operation, `struct mlx5_wqe_atomic_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Operands {
    /// The value to add or to swap in.
    pub swap_add: Be64,
    /// The expected value.
    pub compare: Be64,
}

/// A piece of local memory, `struct mlx5_wqe_data_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DataSegment {
    /// Length in bytes; 0 means 2^31.
    pub length: Be32,
    /// Key.
    pub key: Be32,
    /// Address.
    pub address: Be64,
}

impl DataSegment {
    /// The end of a receive's list, `MLX5_INVALID_LKEY`.
    pub const END: Self =
        Self { length: Be32::new(0), key: Be32::new(0x100), address: Be64::new(0) };
}

/// Marks inline data, `MLX5_INLINE_SEG`; the other bits of the word are the length.
pub const INLINE: u32 = 1 << 31;

/// The destination of a datagram or DC request, `struct mlx5_wqe_av`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Route {
    /// The access key of a DC target; for a datagram, the Q_Key << 32.
    pub key: Be64,
    /// Number of the receiver, with [`Route::EXTENDED`].
    pub number: Be32,
    /// Static rate and service level.
    pub rate_service_level: u8,
    /// Force loopback and source path bits.
    pub loopback_path_bits: u8,
    /// Destination LID, or UDP source port.
    pub lid: Be16,
    /// Zero.
    pub reserved: [u8; 4],
    /// Destination MAC address.
    pub mac: [u8; 6],
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// GID flag, source GID index and flow label.
    pub source_flow: Be32,
    /// Destination GID.
    pub gid: [u8; 16],
}

impl Route {
    /// Marks the 48-byte form in [`number`](Self::number), `MLX5_EXTENDED_UD_AV`.
    pub const EXTENDED: u32 = 1 << 31;
}

/// The first segment of a shared receive, `struct mlx5_wqe_srq_next_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Next {
    /// Zero.
    pub reserved0: [u8; 2],
    /// Index of the WQE that follows in the list.
    pub index: Be16,
    /// Checksum; unused.
    pub signature: u8,
    /// Zero.
    pub reserved1: [u8; 11],
}

/// The scope of a UMR, `struct mlx5_wqe_umr_ctrl_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct UmrControl {
    /// Bits of [`umr`].
    pub flags: u8,
    /// Zero.
    pub reserved0: [u8; 3],
    /// Length of the translation in 16-byte units, rounded up to a multiple of 4.
    pub klm_octowords: Be16,
    /// Zero.
    pub translation_offset: Be16,
    /// Fields of [`MkeyContext`] that change: bits of [`mkey_mask`].
    pub mkey_mask: Be64,
    /// Zero.
    pub reserved1: [u8; 32],
}

/// Bits of [`UmrControl::flags`], `MLX5_WQE_UMR_CTRL_FLAG_*`.
pub mod umr {
    /// The translation is part of the WQE.
    pub const INLINE: u8 = 1 << 7;
    /// Fails unless the key is free.
    pub const CHECK_FREE: u8 = 1 << 5;
    /// Sets the translation from its offset on.
    pub const TRANSLATION_OFFSET: u8 = 1 << 4;
    /// Fails unless the key belongs to the queue pair.
    pub const CHECK_QPN: u8 = 1 << 3;
}

/// Bits of [`UmrControl::mkey_mask`], `MLX5_WQE_UMR_CTRL_MKEY_MASK_*`.
pub mod mkey_mask {
    /// Length.
    pub const LEN: u64 = 1;
    /// First address.
    pub const START_ADDRESS: u64 = 1 << 6;
    /// Low byte of the key.
    pub const MKEY: u64 = 1 << 13;
    /// Queue pair that owns the window.
    pub const QPN: u64 = 1 << 14;
    /// Right to write locally.
    pub const LOCAL_WRITE: u64 = 1 << 18;
    /// Right to READ.
    pub const REMOTE_READ: u64 = 1 << 19;
    /// Right to WRITE.
    pub const REMOTE_WRITE: u64 = 1 << 20;
    /// Right to atomics.
    pub const ATOMIC: u64 = 1 << 21;
    /// Whether the key is free.
    pub const FREE: u64 = 1 << 29;
}

/// The key that a UMR changes, `struct mlx5_wqe_mkey_context_seg`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MkeyContext {
    /// [`MkeyContext::FREE`] or 0.
    pub free: u8,
    /// Zero.
    pub reserved1: u8,
    /// Bits of [`mkey_access`].
    pub access: u8,
    /// Zero.
    pub sf: u8,
    /// Queue pair << 8 | low byte of the key.
    pub qpn_mkey: Be32,
    /// Zero.
    pub reserved2: u32,
    /// Zero.
    pub flags_pd: Be32,
    /// First address.
    pub start_address: Be64,
    /// Length in bytes.
    pub len: Be64,
    /// Zero.
    pub rest: [u32; 8],
}

impl MkeyContext {
    /// The key is free, `MLX5_WQE_MKEY_CONTEXT_FREE`.
    pub const FREE: u8 = 1 << 6;
    /// The queue pair number of a key without owner.
    pub const NO_QUEUE_PAIR: u32 = 0xff_ffff;
}

/// Bits of [`MkeyContext::access`], `MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_*`.
pub mod mkey_access {
    /// Local writes.
    pub const LOCAL_WRITE: u8 = 1 << 3;
    /// READs.
    pub const REMOTE_READ: u8 = 1 << 4;
    /// WRITEs.
    pub const REMOTE_WRITE: u8 = 1 << 5;
    /// Atomics.
    pub const ATOMIC: u8 = 1 << 6;
}

/// The memory behind a window, `struct mlx5_wqe_umr_klm_seg`, padded to a block.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Klm {
    /// Length in bytes, at most 2^31.
    pub length: Be32,
    /// Local key of the registration.
    pub key: Be32,
    /// First address.
    pub address: Be64,
    /// Zero.
    pub padding: [u64; 6],
}

/// A CQE, `struct mlx5_cqe64`. In a queue of 128-byte entries it is the second half.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Cqe {
    /// Not used here.
    pub rsvd0: [u8; 2],
    /// Not used here.
    pub wqe_id: Be16,
    /// Not used here.
    pub rsvd4: [u8; 13],
    /// Low 7 bits of the destination LID.
    pub path_bits: u8,
    /// Not used here.
    pub rsvd18: [u8; 4],
    /// Source LID.
    pub source_lid: Be16,
    /// GRH (bits 28, 29), service level (24 to 27) and source queue pair.
    pub flags_source: Be32,
    /// Not used here.
    pub hds: [u8; 4],
    /// User index of libmlx5, not used here.
    pub user_index: Be32,
    /// Immediate data, invalidated key, or partition key index.
    pub immediate: Be32,
    /// Not used here.
    pub app: [u8; 4],
    /// Length in bytes.
    pub length: Be32,
    /// Time stamp; in an error CQE, its last two bytes are vendor code and syndrome.
    pub timestamp: [u8; 8],
    /// Opcode of the request << 24 | queue pair number.
    pub opcode_qpn: Be32,
    /// Index of the WQE.
    pub counter: Be16,
    /// Checksum; unused.
    pub signature: u8,
    /// [Kind](cqe) << 4 | format << 2 | solicited << 1 | owner.
    pub op_own: u8,
}

/// A CQE of a compressed session, `struct mlx5_mini_cqe8` of Linux. Counter and operation belong to
/// a request; a receive has a hash there.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MiniCqe {
    /// Index of the WQE.
    pub counter: Be16,
    /// Opcode.
    pub opcode: u8,
    /// Not used here.
    pub reserved: u8,
    /// Length in bytes.
    pub length: Be32,
}

/// Mini-CQEs in an entry.
pub const MINIS: usize = 8;

/// Fields of [`Cqe::op_own`].
pub mod cqe {
    /// The owner bit, which changes with each pass over the ring.
    pub const OWNER: u8 = 1;
    /// The message raised a solicited event.
    pub const SOLICITED: u8 = 1 << 1;
    /// A request completed: `MLX5_CQE_REQ`.
    pub const REQUEST: u8 = 0;
    /// A WRITE with immediate data arrived: `MLX5_CQE_RESP_WR_IMM`.
    pub const WRITE_WITH_IMM: u8 = 1;
    /// A SEND arrived: `MLX5_CQE_RESP_SEND`.
    pub const SEND: u8 = 2;
    /// A SEND with immediate data arrived: `MLX5_CQE_RESP_SEND_IMM`.
    pub const SEND_WITH_IMM: u8 = 3;
    /// A SEND that invalidated a key arrived: `MLX5_CQE_RESP_SEND_INV`.
    pub const SEND_WITH_INVALIDATE: u8 = 4;
    /// A request failed: `MLX5_CQE_REQ_ERR`.
    pub const REQUEST_ERROR: u8 = 13;
    /// A receive failed: `MLX5_CQE_RESP_ERR`.
    pub const RECEIVE_ERROR: u8 = 14;
    /// The entry has never been written: `MLX5_CQE_INVALID`.
    pub const INVALID: u8 = 15;
    /// The bits of the format.
    pub const FORMAT: u8 = 3 << 2;
    /// The first 32 bytes of the CQE are data: `MLX5_INLINE_SCATTER_32`.
    pub const INLINE_32: u8 = 1 << 2;
    /// The 64 bytes before the CQE are data: `MLX5_INLINE_SCATTER_64`.
    pub const INLINE_64: u8 = 2 << 2;
    /// The CQE begins a compressed session.
    pub const COMPRESSED: u8 = 3 << 2;
}

// Sizes and offsets in mlx5dv.h.
const _: () = {
    assert!(size_of::<Control>() == SEGMENT && align_of::<Control>() == 4);
    assert!(offset_of!(Control, qpn_segments) == 4 && offset_of!(Control, signature) == 8);
    assert!(offset_of!(Control, stream) == 9 && offset_of!(Control, flags) == 11);
    assert!(offset_of!(Control, immediate) == 12);
    assert!(size_of::<Remote>() == SEGMENT && offset_of!(Remote, key) == 8);
    assert!(size_of::<Operands>() == SEGMENT && offset_of!(Operands, compare) == 8);
    assert!(size_of::<DataSegment>() == SEGMENT && offset_of!(DataSegment, key) == 4);
    assert!(offset_of!(DataSegment, address) == 8);
    assert!(size_of::<Route>() == 3 * SEGMENT && offset_of!(Route, number) == 8);
    assert!(offset_of!(Route, rate_service_level) == 12 && offset_of!(Route, lid) == 14);
    assert!(offset_of!(Route, mac) == 20 && offset_of!(Route, traffic_class) == 26);
    assert!(offset_of!(Route, source_flow) == 28 && offset_of!(Route, gid) == 32);
    assert!(size_of::<Next>() == SEGMENT && offset_of!(Next, index) == 2);
    assert!(size_of::<UmrControl>() == 3 * SEGMENT && offset_of!(UmrControl, klm_octowords) == 4);
    assert!(offset_of!(UmrControl, mkey_mask) == 8);
    assert!(size_of::<MkeyContext>() == BLOCK && offset_of!(MkeyContext, access) == 2);
    assert!(offset_of!(MkeyContext, qpn_mkey) == 4 && offset_of!(MkeyContext, start_address) == 16);
    assert!(offset_of!(MkeyContext, len) == 24);
    assert!(size_of::<Klm>() == BLOCK && offset_of!(Klm, address) == 8);
    assert!(size_of::<Cqe>() == 64 && offset_of!(Cqe, path_bits) == 17);
    assert!(offset_of!(Cqe, source_lid) == 22 && offset_of!(Cqe, flags_source) == 24);
    assert!(offset_of!(Cqe, user_index) == 32 && offset_of!(Cqe, immediate) == 36);
    assert!(offset_of!(Cqe, length) == 44 && offset_of!(Cqe, timestamp) == 48);
    assert!(offset_of!(Cqe, opcode_qpn) == 56 && offset_of!(Cqe, counter) == 60);
    assert!(offset_of!(Cqe, op_own) == 63);
    assert!(size_of::<[MiniCqe; MINIS]>() == size_of::<Cqe>() && align_of::<MiniCqe>() == 4);
    assert!(offset_of!(MiniCqe, opcode) == 2 && offset_of!(MiniCqe, length) == 4);
};
