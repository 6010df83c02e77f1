use std::any::Any;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use super::{Inner, Local, QueuePair};
use crate::engine::{CompletionMode, CompletionQueue, Limits, QueuePairCore, SharedReceives};
use crate::error::{LimitError, SetupError};
use crate::memory::PdKey;
use crate::op::post_state::PostState;
use crate::op::{PathConfig, SharedReceiveQueue};
use crate::types::{
    Access, AtomicCapability, DataPath, DirectConfig, Gid, GidEntry, PortAttr, PortNum, PortState,
    Qkey, QpAttr, QpCaps, QpState, Qpn, Transport,
};
use crate::verbs::{Device, ProtectionDomain, Qp, QpConfig};

/// A builder for a [`QueuePair`].
///
/// ```
/// use tokio_rdma::QueuePair;
/// use tokio_rdma::types::{Qkey, Transport};
/// # use tokio_rdma::*;
///
/// # let pd = Device::software()?.protection_domain()?;
/// # let queue = CompletionQueue::new(pd.device(), CompletionMode::Event)?;
/// let datagrams = QueuePair::builder(&pd, &queue)
///     .transport(Transport::Ud)
///     .qkey(Qkey(0x1234))
///     .max_recv_wr(256)
///     .build()?;
/// datagrams.activate()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct QueuePairBuilder {
    pd: ProtectionDomain,
    send_queue: CompletionQueue,
    recv_queue: Option<CompletionQueue>,
    srq: Option<SharedReceiveQueue>,
    transport: Transport,
    caps: QpCaps,
    receives: Option<u32>,
    held: Option<Arc<dyn Any + Send + Sync>>,
    access: Option<Access>,
    qkey: Option<Qkey>,
    source: Source,
    path: PathConfig,
    pkey_index: Option<u16>,
    number: Option<Qpn>,
    solicited: bool,
    notifies: bool,
    direct: DirectConfig,
}

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Any,
    To(Gid),
    From(PortNum, u8),
    At(Arc<PortAttr>, GidEntry),
}

impl Source {
    pub(crate) fn choose(self, device: &Device) -> Result<(Arc<PortAttr>, GidEntry), SetupError> {
        let (port, entry) = match self {
            Self::Any => device.default_path()?,
            Self::To(peer) => device.path_to(peer)?,
            Self::From(port, gid_index) => device.path_from(port, gid_index)?,
            Self::At(port, entry) if port.state == PortState::Active => return Ok((port, entry)),
            Self::At(port, _) => return Err(SetupError::NoGid { port: port.port.0 }),
        };
        Ok((Arc::new(port), entry))
    }
}

impl QueuePairBuilder {
    pub(super) fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Self {
        Self {
            pd: pd.clone(),
            send_queue: queue.clone(),
            recv_queue: None,
            srq: None,
            transport: Transport::Rc,
            caps: QpCaps {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
            receives: None,
            held: None,
            access: None,
            qkey: None,
            source: Source::Any,
            path: PathConfig::default(),
            pkey_index: None,
            number: None,
            solicited: false,
            notifies: false,
            direct: DirectConfig::DEFAULT,
        }
    }

    /// Sets the service type; default RC. [`Transport::Dci`] requires a
    /// [`DcInitiator`](crate::dc::DcInitiator).
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Sets a separate completion queue for receives. With a shared receive queue, only its own is
    /// allowed.
    #[must_use]
    pub fn receive_completions(mut self, queue: &CompletionQueue) -> Self {
        self.recv_queue = Some(queue.clone());
        self
    }

    /// Uses a shared receive queue and its completion queue. [`max_recv_wr`](Self::max_recv_wr)
    /// must then be 0 or unset.
    #[must_use]
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// Sets the capacity of the send queue in work requests; default 128. Operations on a full
    /// queue wait. A device may grant more of this and the other sizes (`ibv_create_qp(3)`), see
    /// [`QueuePair::caps`].
    #[must_use]
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.caps.max_send_wr = work_requests;
        self
    }

    /// Sets the capacity of the receive queue in work requests; default 128.
    #[must_use]
    pub fn max_recv_wr(mut self, work_requests: u32) -> Self {
        self.receives = Some(work_requests);
        self
    }

    /// Sets the scatter/gather elements of a work request (buffers in a `Vec`); default 4.
    #[must_use]
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.caps.max_send_sge = elements;
        self.caps.max_recv_sge = elements;
        self
    }

    /// Sets the maximum of inline bytes, which take queue memory; default 64.
    #[must_use]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.caps.max_inline = bytes;
        self
    }

    /// Sets the peer's access to exposed regions of the protection domain (RC, UC); default all.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets the queue key that datagrams must have (UD); default 0.
    #[must_use]
    pub fn qkey(mut self, qkey: Qkey) -> Self {
        self.qkey = Some(qkey);
        self
    }

    /// Chooses port and GID by [`Device::path_to`](crate::Device::path_to) instead of
    /// [`Device::default_path`](crate::Device::default_path). A peer may drop packets from a GID
    /// other than that of the [`endpoint`](QueuePair::endpoint).
    #[must_use]
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.source = Source::To(peer.into());
        self
    }

    /// Sets port and GID index, whatever [`Device::gids`](crate::Device::gids) prefers.
    #[must_use]
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.source = Source::From(port, gid_index);
        self
    }

    /// Sets the path of its packets (RC, UC, DC). Each address handle of datagrams has its own in
    /// the [`AddressVector`](crate::types::AddressVector), but the partition belongs to the queue
    /// pair.
    #[must_use]
    pub fn path(mut self, path: PathConfig) -> Self {
        self.path = path;
        self
    }

    /// Sets how it uses the direct data path of an mlx5 adapter. Anything but the default is
    /// refused on other devices.
    #[must_use]
    pub fn direct(mut self, config: DirectConfig) -> Self {
        self.direct = config;
        self
    }

    pub(crate) fn device(&self) -> &Device {
        self.pd.device()
    }

    /// The value is dropped after everything it refers to.
    pub(crate) fn holding(mut self, held: impl Any + Send + Sync) -> Self {
        self.held = Some(Arc::new(held));
        self
    }

    pub(crate) fn number(mut self, number: Option<Qpn>) -> Self {
        self.number = number;
        self
    }

    /// Makes receives raise events only for failures and solicited messages, because the peer sends
    /// no others. Has no effect on devices whose flushed receives may raise no such event, like
    /// Linux's SoftRoCE.
    pub(crate) fn solicited(mut self) -> Self {
        self.solicited = true;
        self
    }

    /// Lets receives report to a [completion waker](QueuePair::wake_on_completion) if their queue
    /// is in event or hybrid mode. In other modes, operations that wait spin.
    pub(crate) fn notifies(mut self) -> Self {
        self.notifies = true;
        self
    }

    /// Applies to a path without a partition.
    pub(crate) fn default_pkey_index(mut self, index: Option<u16>) -> Self {
        self.pkey_index = index;
        self
    }

    pub(crate) fn port_and_gid(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// Creates the queue pair, in INIT: receives can be posted, nothing arrives yet.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Limit`] above a limit of the device, or for `max_recv_wr` with a shared
    ///   receive queue; this or [`SetupError::TooSmall`] for a [`path`](Self::path) out of range;
    /// - [`SetupError::Verb`] for an invalid [default traffic class](PathConfig::traffic_class), or
    ///   if the device refuses;
    /// - [`SetupError::CompletionQueueFull`] if a completion queue has too few unreserved entries;
    /// - [`SetupError::Foreign`] for queues of another device or protection domain;
    /// - [`SetupError::OtherCompletionQueue`] if [`receive_completions`](Self::receive_completions)
    ///   contradicts the shared receive queue;
    /// - [`SetupError::NoGid`] without an active port or the requested GID;
    /// - [`SetupError::NoPkey`] if the port's table lacks the partition of the path;
    /// - [`SetupError::Unsupported`] for [`Transport::Dci`], and for settings that the transport or
    ///   the device lacks.
    pub fn build(self) -> Result<QueuePair, SetupError> {
        if self.transport == Transport::Dci {
            return Err(SetupError::Unsupported {
                what: "transport DC needs a DcInitiator instead of a QueuePair",
            });
        }
        self.build_any()
    }

    pub(crate) fn build_any(self) -> Result<QueuePair, SetupError> {
        let Self {
            pd,
            send_queue,
            recv_queue,
            srq,
            transport,
            mut caps,
            receives,
            held,
            access,
            qkey,
            source,
            path,
            pkey_index,
            number,
            solicited,
            notifies,
            direct,
        } = self;
        let device = pd.device();
        let (connected, datagram) =
            (matches!(transport, Transport::Rc | Transport::Uc), transport == Transport::Ud);
        if access.is_some() && !connected {
            return Err(SetupError::Unsupported {
                what: "`access` applies to the transports RC and UC only",
            });
        }
        if qkey.is_some() && !datagram {
            return Err(SetupError::Unsupported {
                what: "`qkey` applies to the transport UD only",
            });
        }
        if path.without_partition() != PathConfig::default() && datagram {
            return Err(SetupError::Unsupported {
                what: "`path` applies to the transports RC, UC and DC only, except its partition",
            });
        }
        if device.attr().is_iwarp() {
            if transport != Transport::Rc {
                return Err(SetupError::Unsupported {
                    what: "an iWARP device has the transport RC only",
                });
            }
            path.check_without_route()?;
        }
        let path = path.resolved()?;
        let recv_queue = match (&srq, recv_queue) {
            (None, asked) => {
                caps.max_recv_wr = receives.unwrap_or(caps.max_recv_wr);
                asked.unwrap_or_else(|| send_queue.clone())
            }
            // Its work request numbers are valid only on its own completion queue, which reserves
            // entries for them.
            (Some(srq), asked) => {
                let queue = srq.completion_queue();
                if let Some(asked) =
                    asked.filter(|asked| !Arc::ptr_eq(asked.shared(), queue.shared()))
                {
                    let (asked, queue) = (asked.id(), queue.id());
                    return Err(SetupError::OtherCompletionQueue { asked, queue });
                }
                let field = "max_recv_wr beside a shared receive queue";
                LimitError::check(field, receives.unwrap_or(0).into(), 0)?;
                caps.max_recv_wr = 0;
                queue.clone()
            }
        };
        let (access, qkey) = (access.unwrap_or(Access::REMOTE_ALL), qkey.unwrap_or(Qkey(0)));
        let fixed_gid = matches!(source, Source::From(..) | Source::At(..));
        let (port, gid) = source.choose(device)?;
        let pkey_index = path.partition(device, &port)?.or(pkey_index).unwrap_or(0);
        let config = QpConfig { transport, caps, direct };
        let (send_cq, recv_cq) = (send_queue.cq(), recv_queue.cq());
        let srq_verbs = srq.as_ref().map(SharedReceiveQueue::verbs);
        let qp = Qp::numbered(&pd, send_cq, recv_cq, srq_verbs, &config, number)?;
        let (granted, qpn) = (qp.caps(), qp.qpn());
        qp.modify(&QpAttr {
            pkey_index: Some(pkey_index),
            port: Some(port.port),
            access: connected.then_some(access),
            qkey: datagram.then_some(qkey),
            ..QpAttr::to_state(QpState::Init)
        })?;

        // For the requested depth, not the granted one.
        let limits = |depth, max_sge| Limits {
            depth,
            max_sge,
            max_read_sge: max_sge.min(device.attr().max_read_sge),
            max_inline: granted.max_inline,
            max_message: if datagram {
                port.active_mtu.bytes() as u64
            } else {
                port.max_msg_size.into()
            },
            pd: PdKey(pd.id()),
            solicited: false,
            notifies: false,
        };
        let send = limits(caps.max_send_wr, granted.max_send_sge);
        let signals_failures =
            matches!(device.attr().data_path, DataPath::Software | DataPath::Direct);
        // A receive may be larger than any message.
        let receive = Limits {
            max_message: u64::MAX,
            solicited: solicited && signals_failures,
            notifies: notifies
                && matches!(
                    recv_queue.shared().mode(),
                    CompletionMode::Event | CompletionMode::Hybrid
                ),
            ..limits(caps.max_recv_wr, granted.max_recv_sge)
        };
        let core = QueuePairCore::new(
            qp,
            (send_queue.shared(), send),
            (recv_queue.shared(), srq.is_none().then_some(receive)),
            srq.map(|srq| SharedReceives::new(srq.work_queue().clone(), srq)),
        )?;
        let span = tracing::info_span!("queue_pair", %qpn, ?transport);
        span.in_scope(|| rdma_provider::debug!(?caps, "created queue pair"));
        let local = Local {
            port: port.port,
            gid,
            fixed_gid,
            lid: port.lid,
            link_layer: port.link_layer,
            path,
            mtu: path.limited(port.active_mtu),
            reads: device.attr().max_qp_rd_atom.min(device.attr().max_qp_init_rd_atom),
        };
        let post_state = PostState::new(&*core.qp()?, core.send());
        let inner = Inner {
            send: core.send().clone(),
            core,
            transport,
            immediate: device.attr().immediate,
            atomics: device.attr().atomic != AtomicCapability::None,
            qpn,
            caps: granted,
            psn: AtomicU32::new(device.random_psn()?.value()),
            local,
            atomic_results: OnceLock::new(),
            span,
            pd,
            queues: [send_queue, recv_queue],
            _held: held,
        };
        Ok(QueuePair { inner: Arc::new(inner), post_state })
    }
}
