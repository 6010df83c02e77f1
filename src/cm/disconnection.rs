/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disconnection {
    /// This side disconnected.
    Local,
    /// The peer disconnected or considers the connection dead, or the listener's program gave it up
    /// before this side's confirmation arrived.
    Peer,
    /// The device was removed.
    DeviceRemoved,
    /// The local address was moved to another device.
    AddressChanged,
    /// The peer did not answer the [keepalive](super::ConnectConfig::keepalive).
    Silent,
    /// The listener does not know the connection: it dropped the request before this side's
    /// confirmation arrived, or another process has taken its place.
    Unconfirmed,
    /// A [keepalive](super::ConnectConfig::keepalive) probe failed for another reason, which the
    /// log has: the peer's queue pair does not allow REMOTE_WRITE, the completion queue has failed,
    /// or the queue pair was already in the error state.
    ProbeFailed,
}
