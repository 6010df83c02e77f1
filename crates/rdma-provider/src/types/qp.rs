//! State and attributes of a queue pair, `ibv_modify_qp(3)`.

use bitflags::bitflags;

use super::{Access, AddressVector, Mtu, PortNum, Psn, Qkey, Qpn};

/// Service type of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection: every operation, delivered once and in order.
    Rc,
    /// Unreliable connection: SEND and WRITE, no acknowledgement.
    Uc,
    /// Unreliable datagram: SEND of at most one MTU to any queue pair.
    Ud,
    /// Initiator of dynamic connections: the operations of RC, to a target that each work request names. It receives
    /// nothing: its `max_recv_wr` is 0.
    Dci,
}

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum QpState {
    /// Just created; takes no work.
    Reset = 0,
    /// Takes receives, does not use them yet.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send: fully working.
    Rts = 3,
    /// Send queue drained: work queues up and does not start.
    Sqd = 4,
    /// Send queue error (UC, UD): receives go on.
    Sqe = 5,
    /// All work is flushed.
    Err = 6,
}

impl QpState {
    /// Every state, in the order of their codes.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];
}

bitflags! {
    /// Which attributes of [`QpAttr`] are given: `attr_mask` of `ibv_modify_qp(3)`, same bits.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct QpAttrMask: u32 {
        /// Target state.
        const STATE = 1;
        /// State the caller believes the queue pair to be in.
        const CUR_STATE = 1 << 1;
        /// Event wanted when drained.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// What a peer may do.
        const ACCESS_FLAGS = 1 << 3;
        /// Partition.
        const PKEY_INDEX = 1 << 4;
        /// Port.
        const PORT = 1 << 5;
        /// Queue key.
        const QKEY = 1 << 6;
        /// Route to the peer.
        const AV = 1 << 7;
        /// Path MTU.
        const PATH_MTU = 1 << 8;
        /// Acknowledgement timeout.
        const TIMEOUT = 1 << 9;
        /// Transport retries.
        const RETRY_CNT = 1 << 10;
        /// Receiver-not-ready retries.
        const RNR_RETRY = 1 << 11;
        /// First sequence number expected.
        const RQ_PSN = 1 << 12;
        /// READ and atomic requests issued at once.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// Alternate path.
        const ALT_PATH = 1 << 14;
        /// Receiver-not-ready delay asked of the peer.
        const MIN_RNR_TIMER = 1 << 15;
        /// First sequence number sent.
        const SQ_PSN = 1 << 16;
        /// READ and atomic requests served at once.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// Path migration state.
        const PATH_MIG_STATE = 1 << 18;
        /// Queue sizes.
        const CAP = 1 << 19;
        /// Peer's queue pair.
        const DEST_QPN = 1 << 20;
    }
}

/// Time to wait for an acknowledgement: a code of 5 bits meaning 4.096 µs × 2^code; 0 waits for ever.
///
/// Devices may wait up to four times as long.
///
/// ```
/// use rdma_provider::types::AckTimeout;
///
/// // 4.096 µs × 2^14 is about 67 ms.
/// assert_eq!(AckTimeout::from_code(14).nanoseconds(), Some(67_108_864));
/// assert_eq!(AckTimeout::from_code(0).nanoseconds(), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// The code as it is written in the attribute, 0 to 31; larger values saturate.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        Self(if code > 31 { 31 } else { code })
    }

    /// The code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time meant; `None` is for ever.
    #[must_use]
    pub const fn nanoseconds(self) -> Option<u64> {
        if self.0 == 0 { None } else { Some(4096 << self.0) }
    }
}

/// Time a peer shall wait after "receiver not ready": a code of 5 bits, 0.01 ms to 655.36 ms.
///
/// ```
/// use rdma_provider::types::RnrTimer;
///
/// // 0.64 ms.
/// assert_eq!(RnrTimer::from_code(12).nanoseconds(), 640_000);
/// assert_eq!(RnrTimer::from_code(0).nanoseconds(), 655_360_000);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// Hundredths of a millisecond by code (IBTA table 45).
    const CENTI_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    /// The code as it is written in the attribute; only the low 5 bits count. Code 0 is the longest, 655.36 ms.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        Self(code & 31)
    }

    /// The code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time meant.
    #[must_use]
    pub const fn nanoseconds(self) -> u64 {
        Self::CENTI_MS[self.0 as usize] as u64 * 10_000
    }
}

/// Attributes for `ibv_modify_qp(3)`: those that are `Some` are given.
///
/// Which are required and which are allowed depends on the transition; see [`super::transition()`].
///
/// ```
/// use rdma_provider::types::{Access, PortNum, QpAttr, QpAttrMask, QpState};
///
/// let to_init = QpAttr {
///     pkey_index: Some(0),
///     port: Some(PortNum(1)),
///     access: Some(Access::REMOTE_WRITE),
///     ..QpAttr::to_state(QpState::Init)
/// };
/// let given = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
/// assert_eq!(to_init.mask(), given | QpAttrMask::ACCESS_FLAGS);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpAttr {
    /// Target state.
    pub state: Option<QpState>,
    /// State the caller believes the queue pair to be in; a mismatch is refused.
    pub current_state: Option<QpState>,
    /// Ask for [`AsyncEvent::SendQueueDrained`](super::AsyncEvent::SendQueueDrained).
    pub notify_drained: Option<bool>,
    /// What a peer may do; remote rights only.
    pub access: Option<Access>,
    /// Index into the partition key table.
    pub pkey_index: Option<u16>,
    /// Port.
    pub port: Option<PortNum>,
    /// Queue key (UD).
    pub qkey: Option<Qkey>,
    /// Route to the peer.
    pub address: Option<AddressVector>,
    /// Path MTU.
    pub path_mtu: Option<Mtu>,
    /// Acknowledgement timeout.
    pub timeout: Option<AckTimeout>,
    /// Transport retries, 0 to 7.
    pub retry_count: Option<u8>,
    /// Receiver-not-ready retries, 0 to 6; 7 retries for ever.
    pub rnr_retry: Option<u8>,
    /// First sequence number expected.
    pub rq_psn: Option<Psn>,
    /// First sequence number sent.
    pub sq_psn: Option<Psn>,
    /// READ and atomic requests issued at once.
    pub max_rd_atomic: Option<u8>,
    /// READ and atomic requests served at once.
    pub max_dest_rd_atomic: Option<u8>,
    /// Receiver-not-ready delay asked of the peer.
    pub min_rnr_timer: Option<RnrTimer>,
    /// Peer's queue pair.
    pub dest_qpn: Option<Qpn>,
}

impl QpAttr {
    /// Attributes that move a queue pair to `state`, nothing else given.
    #[must_use]
    pub fn to_state(state: QpState) -> Self {
        Self { state: Some(state), ..Self::default() }
    }

    /// Which attributes are given.
    #[must_use]
    pub fn mask(&self) -> QpAttrMask {
        let mut mask = QpAttrMask::empty();
        let mut add = |given: bool, bit| mask.set(bit, given);
        add(self.state.is_some(), QpAttrMask::STATE);
        add(self.current_state.is_some(), QpAttrMask::CUR_STATE);
        add(self.notify_drained.is_some(), QpAttrMask::EN_SQD_ASYNC_NOTIFY);
        add(self.access.is_some(), QpAttrMask::ACCESS_FLAGS);
        add(self.pkey_index.is_some(), QpAttrMask::PKEY_INDEX);
        add(self.port.is_some(), QpAttrMask::PORT);
        add(self.qkey.is_some(), QpAttrMask::QKEY);
        add(self.address.is_some(), QpAttrMask::AV);
        add(self.path_mtu.is_some(), QpAttrMask::PATH_MTU);
        add(self.timeout.is_some(), QpAttrMask::TIMEOUT);
        add(self.retry_count.is_some(), QpAttrMask::RETRY_CNT);
        add(self.rnr_retry.is_some(), QpAttrMask::RNR_RETRY);
        add(self.rq_psn.is_some(), QpAttrMask::RQ_PSN);
        add(self.sq_psn.is_some(), QpAttrMask::SQ_PSN);
        add(self.max_rd_atomic.is_some(), QpAttrMask::MAX_QP_RD_ATOMIC);
        add(self.max_dest_rd_atomic.is_some(), QpAttrMask::MAX_DEST_RD_ATOMIC);
        add(self.min_rnr_timer.is_some(), QpAttrMask::MIN_RNR_TIMER);
        add(self.dest_qpn.is_some(), QpAttrMask::DEST_QPN);
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_follow_their_tables() {
        assert_eq!(AckTimeout::from_code(0).nanoseconds(), None);
        assert_eq!(AckTimeout::from_code(14).nanoseconds(), Some(67_108_864));
        assert_eq!(RnrTimer::from_code(0).nanoseconds(), 655_360_000);
        assert_eq!(RnrTimer::from_code(1).nanoseconds(), 10_000);
        assert_eq!(RnrTimer::from_code(31).nanoseconds(), 491_520_000);
    }
}
