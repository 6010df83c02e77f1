//! State and attributes of a queue pair, `ibv_modify_qp(3)`.

use bitflags::bitflags;

use super::{Access, AddressVector, Mtu, PortNum, Psn, Qkey, Qpn};

/// The transport service of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection: all operations, once and in order.
    Rc,
    /// Unreliable connection: SEND and WRITE, unacknowledged.
    Uc,
    /// Unreliable datagram: SEND of at most one MTU to any UD queue pair.
    Ud,
    /// Initiator of dynamic connections: RC operations to the target of each work request; no
    /// receives.
    Dci,
}

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum QpState {
    /// Initial state without work.
    Reset = 0,
    /// Accepts receives, but does not use them.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send: fully operational.
    Rts = 3,
    /// Send queue drained: posted sends wait.
    Sqd = 4,
    /// Send queue error (UC, UD): receives continue.
    Sqe = 5,
    /// All work is flushed.
    Err = 6,
}

impl QpState {
    /// All states, in the order of their codes.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];
}

bitflags! {
    /// The attributes of [`QpAttr`] that are set, bits of `attr_mask` of `ibv_modify_qp(3)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct QpAttrMask: u32 {
        /// Target state.
        const STATE = 1;
        /// Expected current state.
        const CUR_STATE = 1 << 1;
        /// Event request for a drained send queue.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// Access rights of the peer.
        const ACCESS_FLAGS = 1 << 3;
        /// Partition key index.
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
        /// First expected PSN.
        const RQ_PSN = 1 << 12;
        /// READs and atomics issued at once.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// Alternate path.
        const ALT_PATH = 1 << 14;
        /// Delay requested after "receiver not ready".
        const MIN_RNR_TIMER = 1 << 15;
        /// First sent PSN.
        const SQ_PSN = 1 << 16;
        /// READs and atomics served at once.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// Path migration state.
        const PATH_MIG_STATE = 1 << 18;
        /// Queue sizes.
        const CAP = 1 << 19;
        /// Peer's queue pair number.
        const DEST_QPN = 1 << 20;
    }
}

/// An acknowledgement timeout: a 5-bit code for 4.096 µs × 2^code; 0 means infinite (IBTA
/// 11.2.4.2).
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
    /// Creates a timeout; codes above 31 saturate.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        Self(if code > 31 { 31 } else { code })
    }

    /// Returns the code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the timeout in nanoseconds; `None` if infinite.
    #[must_use]
    pub const fn nanoseconds(self) -> Option<u64> {
        if self.0 == 0 { None } else { Some(4096 << self.0) }
    }
}

/// The delay requested of the peer after "receiver not ready": a 5-bit code, 0.01 ms to 655.36 ms.
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
    /// Delays by code, in units of 0.01 ms (IBTA table 45).
    const CENTI_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    /// Creates a delay from the low 5 bits; code 0 is the longest delay.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        Self(code & 31)
    }

    /// Returns the code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the delay in nanoseconds.
    #[must_use]
    pub const fn nanoseconds(self) -> u64 {
        Self::CENTI_MS[self.0 as usize] as u64 * 10_000
    }
}

/// Attributes for `ibv_modify_qp(3)`: fields that are `Some` are set.
/// [`transition`](super::transition()) lists required and allowed ones.
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
    /// Expected current state; a mismatch is an error.
    pub current_state: Option<QpState>,
    /// Request for [`AsyncEvent::SendQueueDrained`](super::AsyncEvent::SendQueueDrained).
    pub notify_drained: Option<bool>,
    /// Remote access rights.
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
    /// Receiver-not-ready retries, 0 to 6; 7 is unlimited.
    pub rnr_retry: Option<u8>,
    /// First expected PSN.
    pub rq_psn: Option<Psn>,
    /// First sent PSN.
    pub sq_psn: Option<Psn>,
    /// READs and atomics issued at once.
    pub max_rd_atomic: Option<u8>,
    /// READs and atomics served at once.
    pub max_dest_rd_atomic: Option<u8>,
    /// Delay requested after "receiver not ready".
    pub min_rnr_timer: Option<RnrTimer>,
    /// Peer's queue pair number.
    pub dest_qpn: Option<Qpn>,
}

impl QpAttr {
    /// Creates attributes with only the target state set.
    #[must_use]
    pub fn to_state(state: QpState) -> Self {
        Self { state: Some(state), ..Self::default() }
    }

    /// Returns the set of attributes that are `Some`.
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
