/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disconnection {
    /// This side disconnected.
    Local,
    /// The peer disconnected, its connection manager considers the connection dead, or the
    /// listener's program gave the connection up before this side's confirmation arrived.
    Peer,
    /// The device was removed.
    DeviceRemoved,
    /// The local address was moved to another device.
    AddressChanged,
    /// The peer did not answer the [keepalive](super::ConnectionOptions::keepalive).
    Silent,
    /// The listener does not know the connection: it dropped the request, possibly in favour of
    /// others, before this side's confirmation arrived, or another process has taken its place.
    Unconfirmed,
    /// A [keepalive](super::ConnectionOptions::keepalive) probe failed otherwise; the log has the
    /// status:
    ///
    /// - the peer's queue pair does not allow REMOTE_WRITE;
    /// - the completion queue has failed;
    /// - other work failed, or the peer attempted a forbidden operation, so the queue pair was
    ///   already in the error state.
    ProbeFailed,
}
