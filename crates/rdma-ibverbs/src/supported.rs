//! Which requests the queue pairs of a transport execute.

use rdma_provider::types::{Data, SendOp, SendTarget, SendWr, Transport};

/// Returns true for the most common requests, which every reliable connection supports.
#[inline]
pub(super) fn is_plain(wr: &SendWr<'_>) -> bool {
    matches!(wr.data, Data::Sges([_])) && wr.target.is_none() && !wr.op.is_local()
}

/// Does the same as [`transport_supports`], with a shortcut.
#[inline]
pub(super) fn is_supported(transport: Transport, wr: &SendWr<'_>) -> bool {
    transport == Transport::Rc && is_plain(wr) || transport_supports(transport, wr)
}

/// Returns true if queue pairs of `transport` execute such requests.
pub(super) fn transport_supports(transport: Transport, wr: &SendWr<'_>) -> bool {
    let binds = matches!(transport, Transport::Rc | Transport::Uc);
    let has_operation = match wr.op {
        SendOp::Send | SendOp::SendWithImm(_) => true,
        SendOp::Write(_) | SendOp::WriteWithImm(..) => transport != Transport::Ud,
        SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
            matches!(transport, Transport::Rc | Transport::Dci)
        }
        SendOp::SendWithInvalidate(_) => transport == Transport::Rc,
        SendOp::LocalInvalidate(_) => return binds && matches!(wr.data, Data::Sges([])),
        SendOp::BindWindow => return binds && matches!(wr.data, Data::Window(_)),
    };
    let addressed = match wr.target {
        None => matches!(transport, Transport::Rc | Transport::Uc),
        Some(SendTarget::Datagram(_)) => transport == Transport::Ud,
        Some(SendTarget::Dc(_)) => transport == Transport::Dci,
    };
    // The result of an operation needs a local buffer.
    let placed = match wr.data {
        Data::Sges(_) => true,
        Data::Inline(_) => !wr.op.reads_back(),
        Data::Window(_) => false,
    };
    has_operation && addressed && placed
}
