use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::CmId;
use crate::error::{LimitError, SetupError};
use crate::op::{self, QueuePair, QueuePairBuilder};
use crate::types::{
    Gid, GidEntry, GidKind, PortAttr, PortNum, QpAttr, QpState, TransitionError, Transport,
};
use crate::verbs::{Device, entry_with};
use rdma_provider::cm_contract::{CmAnswer, CmId as _, CmParams, CmPeer, CmRoute};

use super::config::ConnectConfig;
use super::error::ConnectError;

#[derive(Debug, Clone)]
pub(super) struct LocalSource {
    pub(super) port: PortNum,
    attr: Arc<PortAttr>,
    pub(super) entry: GidEntry,
    /// If the connection manager selects it.
    pkey_index: Option<u16>,
}

impl LocalSource {
    pub(super) fn find(
        device: &Device,
        id: &CmId,
        route: &CmRoute<'_>,
    ) -> Result<Self, ConnectError> {
        let is_iwarp = device.attr().is_iwarp();
        let find = |attr: Arc<PortAttr>| {
            let entry = if is_iwarp {
                // iWARP has no GIDs in packets and routes, and the kernel's table is empty while
                // it is renewed.
                let none = GidEntry::new(0, Gid::default(), GidKind::Iwarp);
                attr.gids.first().copied().unwrap_or(none)
            } else {
                entry_with(&attr, route.source, route.destination)?
            };
            Some(Self { port: route.port, attr, entry, pkey_index: None })
        };
        let path = match find(device.known_port(route.port)?) {
            Some(path) => Some(path),
            // The event of an address added a moment ago may still be on its way.
            None => find(Arc::new(device.port(route.port)?)),
        };
        let mut path = path.ok_or(SetupError::NoGid { port: route.port.0 })?;
        // Most ports have one partition, and need no system call.
        if path.attr.pkeys > 1 {
            path.pkey_index = id.qp_attr(QpState::Init)?.pkey_index;
        }
        Ok(path)
    }

    pub(super) fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        let source = op::Source::At(self.attr.clone(), self.entry);
        builder.port_and_gid(source).default_pkey_index(self.pkey_index)
    }

    /// Refuses another partition than the connection manager's.
    pub(super) fn join_partition(
        &self,
        queue_pair: &QueuePair,
        config: &ConnectConfig,
    ) -> Result<(), SetupError> {
        let device = queue_pair.protection_domain().device();
        if device.attr().is_iwarp() {
            return config.path.check_without_route();
        }
        let asked = config.path.partition(device, &self.attr)?;
        if asked.is_none() && self.pkey_index.is_none() {
            return Ok(());
        }
        // The application or an earlier attempt may have moved the queue pair.
        let present = queue_pair.query()?.1.pkey_index.unwrap_or_default();
        let wanted = asked.unwrap_or(present);
        if let Some(selected) = self.pkey_index.filter(|selected| *selected != wanted) {
            let what = "P_Key indexes of the queue pair and the connection (use prepare)";
            return Err(SetupError::mismatch(what, wanted, selected));
        }
        if wanted == present {
            return Ok(());
        }
        queue_pair.modify(&QpAttr { pkey_index: Some(wanted), ..QpAttr::to_state(QpState::Init) })
    }

    pub(super) fn check(&self, device: &Device, queue_pair: &QueuePair) -> Result<(), SetupError> {
        self.check_source(device, queue_pair, Transport::Rc)?;
        match queue_pair.last_state()? {
            QpState::Init => Ok(()),
            actual => Err(TransitionError::NotInState { claimed: QpState::Init, actual }.into()),
        }
    }

    pub(super) fn check_source(
        &self,
        device: &Device,
        queue_pair: &QueuePair,
        transport: Transport,
    ) -> Result<(), SetupError> {
        let same_device = queue_pair.protection_domain().device().same(device);
        SetupError::check_same(same_device, "queue pair")?;
        if queue_pair.transport() != transport {
            let what = "transports of the queue pair and the connection manager";
            let (ours, theirs) = (queue_pair.transport(), transport);
            return Err(SetupError::mismatch(what, format!("{ours:?}"), format!("{theirs:?}")));
        }
        let (port, entry) = queue_pair.port_and_gid();
        if port != self.port {
            let what = "ports of the queue pair and the path to the peer (use prepare)";
            return Err(SetupError::mismatch(what, port, self.port));
        }
        if entry.gid != self.entry.gid && !queue_pair.protection_domain().device().attr().is_iwarp()
        {
            let what = "GIDs of the queue pair and the path to the peer (use prepare)";
            return Err(SetupError::mismatch(what, entry.gid, self.entry.gid));
        }
        Ok(())
    }
}

/// The retries of a peer without config of its own. SoftRoCE treats 7 as infinite, so it would
/// never detect that this side is gone.
const PEER_RETRIES: u8 = 6;
/// Infinite, because the program's own deadlines limit how long a receive may be missing.
const PEER_RNR_RETRIES: u8 = 7;

#[derive(Debug, Clone, Copy)]
pub(super) struct Reads {
    pub(super) serve: u8,
    pub(super) issue: u8,
}

impl Reads {
    pub(super) fn of(device: &Device, config: &ConnectConfig) -> Result<Self, LimitError> {
        let (serve, issue) = (device.attr().max_qp_rd_atom, device.attr().max_qp_init_rd_atom);
        let Some(asked) = config.reads else { return Ok(Self { serve, issue }) };
        LimitError::check("reads", asked.into(), serve.min(issue).into())?;
        Ok(Self { serve: asked, issue: asked })
    }

    pub(super) fn agreed(self, peer: &CmPeer) -> Self {
        Self {
            serve: self.serve.min(peer.responder_resources),
            issue: self.issue.min(peer.initiator_depth),
        }
    }

    /// The parameters are for the peer; our own retries apply to this side only.
    pub(super) fn params<'a>(
        self,
        queue_pair: &QueuePair,
        private_data: &'a [u8],
        deadline: Duration,
    ) -> CmParams<'a> {
        CmParams {
            qpn: queue_pair.qpn(),
            private_data,
            responder_resources: self.serve,
            initiator_depth: self.issue,
            retry_count: PEER_RETRIES,
            rnr_retry: PEER_RNR_RETRIES,
            // Later than the caller's deadline, whose error is more precise.
            timeout: deadline.saturating_add(Duration::from_secs(1)),
            srq: queue_pair.shares_receives(),
        }
    }

    pub(super) const fn answer(self, private_data: Vec<u8>) -> CmAnswer {
        CmAnswer {
            private_data,
            responder_resources: self.serve,
            initiator_depth: self.issue,
            retry_count: PEER_RETRIES,
            rnr_retry: PEER_RNR_RETRIES,
        }
    }
}

/// Does nothing if the connection manager does it.
pub(super) fn make_ready(
    id: &CmId,
    queue_pair: &QueuePair,
    reads: Reads,
    config: &ConnectConfig,
) -> Result<(), ConnectError> {
    if queue_pair.protection_domain().device().attr().is_iwarp() {
        return Ok(());
    }
    let (retries, path) = (config.retries, config.path.or(queue_pair.local().path));
    let mut receive = id.qp_attr(QpState::Rtr)?;
    receive.address = receive.address.map(|address| path.applied(address));
    receive.path_mtu = receive.path_mtu.map(|mtu| path.limited(mtu));
    receive.min_rnr_timer = Some(retries.rnr_timer);
    receive.max_dest_rd_atomic = Some(reads.serve);
    queue_pair.modify(&receive)?;
    let mut send = id.qp_attr(QpState::Rts)?;
    send.timeout = Some(retries.timeout);
    send.retry_count = Some(retries.retry_count);
    send.rnr_retry = Some(retries.rnr_retry);
    send.max_rd_atomic = Some(reads.issue);
    queue_pair.modify(&send)?;
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use futures::future::join;

    use super::*;
    use crate::cm::error::ConnectStep;
    use crate::cm::{CmConnection, Listener, resolve};
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::op::{PathConfig, RetryConfig};
    use crate::software::Network;
    use crate::types::{AckTimeout, Mtu, RejectReason, RnrTimer};

    fn builder() -> (Device, QueuePairBuilder) {
        let device = Device::software_in(&Network::new(), "config").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        (device, QueuePair::builder(&pd, &queue))
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test);
    }

    /// Returns the queue pair that connects and the one that accepts, each with its connection.
    async fn connected(
        listener: &Listener,
        builder: &QueuePairBuilder,
        [ours, theirs]: [&ConnectConfig; 2],
    ) -> [(QueuePair, CmConnection); 2] {
        let passive = async {
            let request = listener.accept().await.unwrap();
            let qp = request.prepare(builder.clone()).build().unwrap();
            let link = request.accept(&qp, theirs).await.unwrap();
            (qp, link)
        };
        let active = async {
            let route = resolve(listener.device(), listener.local_addr()).await.unwrap();
            let qp = route.prepare(builder.clone()).build().unwrap();
            let link = route.connect(&qp, ours).await.unwrap();
            (qp, link)
        };
        join(active, passive).await.into()
    }

    #[test]
    fn path_of_the_settings_overrides_that_of_the_queue_pair() {
        let (device, builder) = builder();
        let path = PathConfig::default();
        let builder = builder.path(path.dscp(26).hop_limit(8));
        let config = ConnectConfig::default().path(path.dscp(46).max_mtu(Mtu::Mtu512));
        run(async {
            let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
            for (qp, _link) in connected(&listener, &builder, [&config, &config]).await {
                let attr = qp.query().unwrap().1;
                let address = attr.address.unwrap();
                assert_eq!((address.traffic_class, address.hop_limit), (184, 8));
                assert_eq!(attr.path_mtu, Some(Mtu::Mtu512));
            }

            let bad = ConnectConfig::default().path(path.hop_limit(0));
            let route = resolve(&device, listener.local_addr()).await.unwrap();
            let qp = route.prepare(builder).build().unwrap();
            let refused = route.connect(&qp, &bad).await.map(drop).unwrap_err();
            assert_eq!(refused, SetupError::at_least("hop_limit", 0, 1).unwrap_err().into());
        });
    }

    /// Returns a builder on a device with these P_Keys.
    fn builder_with(network: &Network, name: &str, pkeys: &[u16]) -> (Device, QueuePairBuilder) {
        let device = Device::software_in(network, name).unwrap();
        network.control(name).unwrap().set_pkeys(pkeys);
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let builder = QueuePair::builder(&pd, &queue);
        (device, builder)
    }

    #[test]
    fn accepting_queue_pair_joins_the_partition_of_the_connecting_one() {
        let network = Network::new();
        let (near, connecting) = builder_with(&network, "near", &[0xffff, 0x8001, 0x8002]);
        let (far, accepting) = builder_with(&network, "far", &[0xffff, 0x8003, 0x0001]);
        let none = ConnectConfig::default();
        let path = PathConfig::default();
        run(async {
            let address = (far.default_path().unwrap().1.gid.to_ip(), 0);
            let listener = Listener::bind(&far, address).await.unwrap();
            let to = listener.local_addr();
            // Named by the queue pair, or by the settings of the connection.
            for (builder, config) in [
                (connecting.clone().path(path.pkey(0x8001)), none.clone()),
                (connecting.clone(), none.clone().path(path.pkey(0x8001))),
            ] {
                let passive = async {
                    let request = listener.accept().await.unwrap();
                    let qp = request.prepare(accepting.clone()).build().unwrap();
                    let link = request.accept(&qp, &none).await.unwrap();
                    (qp, link)
                };
                let active = async {
                    let route = resolve(&near, to).await.unwrap();
                    let qp = route.prepare(builder).build().unwrap();
                    let link = route.connect(&qp, &config).await.unwrap();
                    (qp, link)
                };
                let ((ours, _link), (theirs, _peer)) = join(active, passive).await;
                let index = |qp: &QueuePair| qp.query().unwrap().1.pkey_index;
                assert_eq!((index(&ours), index(&theirs)), (Some(1), Some(2)));
            }

            // The accepting side insists on another partition.
            let passive = async {
                let request = listener.accept().await.unwrap();
                let builder = accepting.clone().path(path.pkey(0x8003));
                let qp = request.prepare(builder).build().unwrap();
                request.accept(&qp, &none).await.unwrap_err()
            };
            let active = async {
                let route = resolve(&near, to).await.unwrap();
                let qp = route.prepare(connecting.clone()).build().unwrap();
                route.connect(&qp, &none).await.unwrap_err()
            };
            let (rejected, refused) = join(active, passive).await;
            let what = "P_Key indexes of the queue pair and the connection (use prepare)";
            let expected = ConnectError::from(SetupError::mismatch(what, 1, 0));
            assert_eq!(refused, expected.during(ConnectStep::Prepare, refused.address().unwrap()));
            assert_eq!(reason(&rejected), RejectReason::CONSUMER);

            // An attempt that fails moves the queue pair, and the next one moves it back.
            let route = resolve(&near, to).await.unwrap();
            let qp = route.prepare(connecting.clone()).build().unwrap();
            let config = none.clone().path(path.pkey(0x8001)).keepalive(Some(Duration::ZERO));
            route.connect(&qp, &config).await.unwrap_err();
            assert_eq!(qp.query().unwrap().1.pkey_index, Some(1));
            let passive = async {
                let request = listener.accept().await.unwrap();
                let theirs = request.prepare(accepting.clone()).build().unwrap();
                (request.accept(&theirs, &none).await.unwrap(), theirs)
            };
            let active = async {
                let route = resolve(&near, to).await.unwrap();
                route.connect(&qp, &none.clone().path(path.pkey(0xffff))).await.unwrap()
            };
            let (_link, (_peer, theirs)) = join(active, passive).await;
            let index = |qp: &QueuePair| qp.query().unwrap().1.pkey_index;
            assert_eq!((index(&qp), index(&theirs)), (Some(0), Some(0)));

            // Its port lacks the partition.
            let route = resolve(&near, to).await.unwrap();
            let builder = connecting.clone().path(path.pkey(0x8002));
            let qp = route.prepare(builder).build().unwrap();
            let rejected = route.connect(&qp, &none).await.unwrap_err();
            assert_eq!(reason(&rejected), RejectReason::UNSUPPORTED);

            // This side's port lacks it.
            let route = resolve(&near, to).await.unwrap();
            let qp = route.prepare(connecting.clone()).build().unwrap();
            let config = none.clone().path(path.pkey(0x8003));
            let refused = route.connect(&qp, &config).await.unwrap_err();
            let table = vec![0xffff, 0x8001, 0x8002];
            let missing = SetupError::NoPkey { port: 1, asked: 0x8003, table };
            assert_eq!(refused, ConnectError::from(missing).during(ConnectStep::Prepare, to));
        });
    }

    fn reason(error: &ConnectError) -> RejectReason {
        match error {
            ConnectError::Rejected { reason, .. } => *reason,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn connected_queue_pair_has_the_timers_and_reads_of_its_options() {
        let (device, builder) = builder();
        let of = |code, reads| {
            let retries = RetryConfig {
                timeout: AckTimeout::from_code(code),
                retry_count: code - 15,
                rnr_retry: code - 16,
                rnr_timer: RnrTimer::from_code(code + 1),
            };
            (retries, ConnectConfig::default().retries(retries).reads(reads))
        };
        let [ours, theirs] = [of(18, 5), of(20, 3)];
        run(async {
            let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
            let pairs = connected(&listener, &builder, [&ours.1, &theirs.1]).await;
            for ((qp, _link), retries) in pairs.into_iter().zip([ours.0, theirs.0]) {
                let attr = qp.query().unwrap().1;
                let found = RetryConfig {
                    timeout: attr.timeout.unwrap(),
                    retry_count: attr.retry_count.unwrap(),
                    rnr_retry: attr.rnr_retry.unwrap(),
                    rnr_timer: attr.min_rnr_timer.unwrap(),
                };
                assert_eq!(found, retries);
                // Both agree on the smaller number.
                assert_eq!((attr.max_rd_atomic, attr.max_dest_rd_atomic), (Some(3), Some(3)));
            }
        });
    }
}
