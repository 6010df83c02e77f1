//! `Send`, `Sync`, `Unpin` and `Debug` of each public type and future.

use crate::torture;
use std::fmt::Debug;

use tokio_rdma::completion::*;
use tokio_rdma::connection::*;
use tokio_rdma::dc::*;
use tokio_rdma::doctor::{
    Capability, CapabilityStatus, Container, DeviceReport, Examination, Finding, Host,
    KernelDevice, LibraryState, LockLimit, NodeAccess, PciFunction, PortReport, Report, Severity,
};
use tokio_rdma::error::*;
use tokio_rdma::memory::*;
use tokio_rdma::op::*;
use tokio_rdma::types::{
    AckTimeout, AddressVector, AsyncEvent, AtomicCapability, Data, DcAttr, DcKey, DctTarget,
    DeviceAttr, Gid, GidEntry, GidKind, GidReason, IpPrefix, LinkLayer, Lkey, Mtu, PortAttr,
    PortNum, PortState, Psn, Qkey, QpAttr, QpAttrMask, QpCaps, QpState, Qpn, RankedGid, RecvWr,
    RemoteAddr, Rkey, RnrTimer, SendFlags, SendOp, SendTarget, SendWr, Sge, SrqCaps,
    TransitionError, Transport, UdTarget, WcFlags, WcOpcode, WcStatus, WindowBind, WorkCompletion,
    WrId,
};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::*;

fn free<T: std::marker::Send + Sync + Unpin + Debug + 'static>() {}
fn value<T: std::marker::Send + Sync + Unpin + Debug + Clone + 'static>() {}
fn future<T: Future + std::marker::Send + Sync + Unpin + Debug + 'static>() {}
fn error<T: std::error::Error + std::marker::Send + Sync + Unpin + 'static>() {}
fn sendable<T: Future + std::marker::Send>(future: T) -> T {
    future
}

macro_rules! each {
    ($check:ident: $($what:ty),* $(,)?) => { $( $check::<$what>(); )* };
}

#[test]
fn objects_are_send_sync_unpin_and_debug() {
    each!(
        value: BusyPoller, CompletionMode, CompletionQueue, CompletionQueueBuilder,
        CompletionQueueCounters
    );
    each!(value: DcPool, DcPoolPeer, DcPoolBuilder, DcPoolCounters, DcPolicy);
    each!(free: DcLease);
    each!(
        future: PooledOperation<Write<BufMut>>, PooledOperation<Read<BufMut>>,
        PooledOperation<Atomic>, PooledOperation<BatchOp<BufMut>>, PooledOperation<PendingDcLease>
    );
    each!(
        value: WorkQueueCounters, RemoteRegion, RetryConfig, QueuePair, QueuePairBuilder,
        QueuePairEndpoint
    );
    each!(
        value: SharedReceiveQueue, AddressHandle, Buf, Device, ExposedSlice, Pool, PoolBuilder,
        PoolError
    );
    each!(value: ProtectionDomain, Access, Imm);
    each!(
        free: DeviceEvents, HostMemory, Batch<BufMut>, Batch<Vec<Buf>>, BatchResult<BufMut>,
        Received<BufMut>
    );
    each!(free: BufMut, ExposedRegion, Lease, MemoryWindow);
    each!(free: DcInitiator, DcInitiatorBuilder, DcTarget, DcTargetBuilder);
    each!(
        free: verbs::Channel, verbs::Cq, verbs::Dct, verbs::Qp, verbs::QpConfig, verbs::Srq,
        verbs::PostError
    );
    each!(
        value: cm::ConnectConfig, cm::ListenConfig, cm::Disconnection, cm::ConnectStep,
        cm::RejectReason
    );
    each!(free: cm::Listener, cm::ConnectionRequest, cm::Route, cm::CmConnection);
    each!(
        value: software::DeviceControl, software::Faults, software::LinkCounters, software::Network
    );
    each!(value: software::CqCounters, software::SendCounters, software::ReceiveCounters);
}

#[test]
fn connections_are_send_sync_unpin_and_debug() {
    each!(free: Connection, Listener, ConnectionRequest, PreparedConnection);
    each!(value: ConnectionConfig, ListenerConfig, ConnectionCounters, Handshake);
    each!(error: CloseReason, EstablishError, HandshakeError, MessageError, Violation);
    fn futures(connection: &Connection, listener: &Listener, device: &Device) {
        drop(sendable(connection.send("x")));
        drop(sendable(connection.recv()));
        drop(sendable(connection.flush()));
        drop(sendable(connection.close()));
        drop(sendable(listener.accept()));
        drop(sendable(Connection::connect(device, "127.0.0.1:1")));
    }
    let _ = futures;
}

#[test]
fn values_are_send_sync_unpin_and_debug() {
    each!(
        value: DcAddress, DcAttr, DcKey, DcPeer, DctTarget<'static>, SendTarget<'static>,
        Posting<Destination<'static>>, Posting<Destination<'static>, Imm>,
        Posting<&'static DcPoolPeer>, Posting<&'static DcLease>
    );
    each!(
        value: AckTimeout, AddressVector, AsyncEvent, AtomicCapability, DeviceAttr, Gid, GidEntry,
        GidKind, LinkLayer, Lkey
    );
    each!(value: GidReason, IpPrefix, RankedGid);
    each!(
        value: Capability, Container, DeviceReport, Examination, Finding, Host, KernelDevice,
        LibraryState, LockLimit
    );
    each!(value: NodeAccess, PciFunction, PortReport, Report, Severity, CapabilityStatus);
    each!(
        value: Mtu, PortAttr, PortNum, PortState, Psn, Qkey, QpAttr, QpAttrMask, QpCaps, QpState,
        Qpn
    );
    each!(
        value: RemoteAddr, Rkey, RnrTimer, SendFlags, SendOp, Sge, SrqCaps, Transport, WcFlags,
        WcOpcode, WcStatus
    );
    each!(
        value: WorkCompletion, WrId, Data<'static>, WindowBind, RecvWr<'static>, SendWr<'static>,
        UdTarget<'static>
    );
}

#[test]
fn errors_are_send_sync_and_unpin() {
    each!(
        error: CompletionError, LimitError, OpError<()>, OpError<BufMut>, OpError<Vec<Buf>>,
        OpErrorKind, OpenError
    );
    each!(
        error: cm::ConnectError, OutOfBounds, SetupError, TryError<()>, TryError<BufMut>, VerbError,
        PoolError, TransitionError
    );
}

#[test]
fn operations_are_send_sync_unpin_futures() {
    each!(future: Send<BufMut>, Send<Buf>, Send<()>, Send<Vec<BufMut>>);
    each!(
        future: Send<ExposedSlice>, SendTo<Buf>, SendTo<BufMut>, Write<Buf>, Write<()>, Read<BufMut>
    );
    each!(
        future: Read<Vec<BufMut>>, Read<ExposedSlice>, Recv<BufMut>, Recv<Vec<BufMut>>, Recv<()>,
        Recv<ExposedSlice>
    );
    each!(future: Drive<std::future::Ready<()>>, Drive<Write<Buf>>);
    each!(future: PendingLease, Invalidate);
    each!(future: Atomic, BatchOp<BufMut>, BatchOp<Buf>, BatchOp<Vec<Buf>>);
}

#[test]
fn async_functions_are_send() {
    let (device, pd) = torture::device(&software::Network::new());
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let pool = Pool::new(&pd, 64, 1).unwrap();
    drop(sendable(pool.alloc(64)));
    drop(sendable(QueuePair::new(&pd, &queue).unwrap().close()));
}
