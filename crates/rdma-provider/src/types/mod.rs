//! Values of the verbs interface: requests to a device and its responses.
//!
//! The types perform no I/O and contain no `unsafe`. Every type implements `Debug`. Codes that a
//! device may invent are kept as values instead of being refused.

#![forbid(unsafe_code)]

mod access;
mod addr;
mod caps;
mod cm;
mod direct;
mod event;
mod id;
mod qp;
mod transition;
mod wc;
mod wr;

pub use access::Access;
pub use addr::{AddressVector, Gid, GidEntry, GidKind, LinkLayer, Mtu, StaticRate};
pub use caps::{
    AtomicCapability, ClockAttr, DataPath, DcAttr, DeviceAttr, PhysicalState, PortAttr, PortState,
    QpCaps, SrqCaps, WireProtocol,
};
pub use cm::RejectReason;
pub use direct::{DirectConfig, ScatterToCqe};
pub use event::AsyncEvent;
pub use id::{DcKey, Imm, Lkey, PortNum, Psn, Qkey, Qpn, Rkey, WrId};
pub use qp::{AckTimeout, QpAttr, QpAttrMask, QpState, RnrTimer, Transport};
pub use transition::{
    Transition, TransitionError, check_dct_transition, check_transition, dct_transition, transition,
};
pub use wc::{Timestamp, TimestampedCompletion, WcFlags, WcOpcode, WcStatus, WorkCompletion};
pub use wr::{
    Data, DctTarget, RecvWr, RemoteAddr, SendFlags, SendOp, SendTarget, SendWr, Sge, UdTarget,
    WindowBind,
};
