#![forbid(unsafe_code)]

use std::ffi::OsStr;

use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{AddressVector, Mtu, PortAttr, PortNum, StaticRate};
use crate::verbs::Device;

/// The path of packets to a peer: traffic class, service level, flow label, hop limit, rate, MTU
/// and partition.
///
/// Each field that is not set keeps its default or, for connections by address, the value that the
/// connection manager selects. Values out of range fail with [`SetupError`] when the queue pair,
/// connection or listener is created.
///
/// ```
/// use tokio_rdma::{ConnectionConfig, PathConfig};
///
/// let config = ConnectionConfig::default().path(PathConfig::default().dscp(26).hop_limit(8));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub struct PathConfig {
    /// Above 255 if the DSCP is out of range.
    traffic_class: Option<u16>,
    service_level: Option<u8>,
    flow_label: Option<u32>,
    hop_limit: Option<u8>,
    static_rate: Option<StaticRate>,
    max_mtu: Option<Mtu>,
    partition: Option<Partition>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Partition {
    Pkey(u16),
    Index(u16),
}

impl PathConfig {
    /// Sets the traffic class of RoCE packets, 0 to 255: six bits of DSCP, then two of ECN. It is
    /// `traffic_class` of `ibv_create_ah(3)`, and the type of service of `rdma_set_option(3)`.
    ///
    /// The default is the value of environment variable `TOKIO_RDMA_TRAFFIC_CLASS`, decimal or
    /// hexadecimal (`104` or `0x68`), which each queue pair and DC target reads when it is built.
    /// An invalid value fails with EINVAL. Without the variable, the default is 0 or, for
    /// connections by address, what the connection manager selects.
    pub const fn traffic_class(mut self, traffic_class: u8) -> Self {
        self.traffic_class = Some(traffic_class as u16);
        self
    }

    /// Sets the [traffic class](Self::traffic_class) to this DSCP, 0 to 63, with ECN bits 0: DSCP
    /// 26 is traffic class 104.
    pub const fn dscp(mut self, dscp: u8) -> Self {
        self.traffic_class = Some((dscp as u16) << 2);
        self
    }

    /// Sets the service level, 0 to 15, `sl` of `ibv_create_ah(3)`; default 0. InfiniBand switches
    /// select the virtual lane by it. On Ethernet it is the priority of VLAN tags, unless the
    /// kernel derives that from the traffic class.
    pub const fn service_level(mut self, service_level: u8) -> Self {
        self.service_level = Some(service_level);
        self
    }

    /// Sets the flow label of IPv6 packets, 20 bits, `flow_label` of `ibv_create_ah(3)`; default 0.
    /// Over IPv4, some adapters derive the UDP source port from it, by which switches choose
    /// between equal routes.
    pub const fn flow_label(mut self, flow_label: u32) -> Self {
        self.flow_label = Some(flow_label);
        self
    }

    /// Sets how many routers RoCE packets may pass, 1 to 255, `hop_limit` of `ibv_create_ah(3)`;
    /// default 64. The kernel may replace it by the hop limit of the IP route, as it does for
    /// SoftRoCE.
    pub const fn hop_limit(mut self, hop_limit: u8) -> Self {
        self.hop_limit = Some(hop_limit);
        self
    }

    /// Limits the rate at which the device sends to the peer, for a slower link of the peer or a
    /// switch, `static_rate` of `ibv_create_ah(3)`; default the rate of the port. A ConnectX
    /// without this rate takes a lower one, or none. The software device and SoftRoCE ignore it.
    pub const fn static_rate(mut self, rate: StaticRate) -> Self {
        self.static_rate = Some(rate);
        self
    }

    /// Limits the payload of a packet, `path_mtu` of `ibv_modify_qp(3)`; default the MTU of the
    /// port.
    ///
    /// A [`QueuePairEndpoint`](crate::QueuePairEndpoint) announces it to the peer. Connections by
    /// address do not, so both ends must set the same limit: devices refuse longer packets.
    pub const fn max_mtu(mut self, mtu: Mtu) -> Self {
        self.max_mtu = Some(mtu);
        self
    }

    /// Sets the partition to that of this P_Key, for example `0x8001`; default the first entry of
    /// the port's table or, for connections by address, the partition of the route or the request.
    /// A partition that the table lacks fails with [`SetupError::NoPkey`].
    ///
    /// The highest bit of an entry of the port's [table](Device::pkey_table) makes the queue pair a
    /// full member of the partition; that of `pkey` is ignored. If the table has both entries, the
    /// queue pair is a full member. Packets are exchanged within a partition if the sender or the
    /// receiver is a full member; others are dropped, and [`PortAttr::bad_pkeys`] counts them.
    pub const fn pkey(mut self, pkey: u16) -> Self {
        self.partition = Some(Partition::Pkey(pkey));
        self
    }

    /// Sets the partition, like [`pkey`](Self::pkey), which it replaces, by the index of an entry,
    /// `pkey_index` of `ibv_modify_qp(3)`. An index beyond the table fails with
    /// [`SetupError::Limit`].
    pub const fn pkey_index(mut self, index: u16) -> Self {
        self.partition = Some(Partition::Index(index));
        self
    }

    /// Refuses settings for an iWARP device.
    pub(crate) fn check_without_route(&self) -> Result<(), SetupError> {
        if *self == Self::default() {
            return Ok(());
        }
        Err(SetupError::Unsupported {
            what: "the path of an iWARP device is that of a TCP connection; leave PathConfig at \
                   its default, and set priorities by the routing table or tc(8)",
        })
    }

    pub(crate) const fn names_partition(&self) -> bool {
        self.partition.is_some()
    }

    /// Returns the index of the partition in the table of `port`, or `None` if none is set.
    pub(crate) fn partition(
        &self,
        device: &Device,
        port: &PortAttr,
    ) -> Result<Option<u16>, SetupError> {
        match self.partition {
            None => Ok(None),
            Some(Partition::Index(index)) => {
                let last = port.pkeys.saturating_sub(1);
                LimitError::check("pkey_index", index.into(), last.into())?;
                Ok(Some(index))
            }
            Some(Partition::Pkey(asked)) => {
                let table = device.pkey_table(port.port)?;
                let port = port.port.0;
                let found = index_of(asked, &table);
                found.map(Some).ok_or(SetupError::NoPkey { port, asked, table })
            }
        }
    }

    /// Returns these settings without those that apply to datagrams too.
    pub(crate) fn without_partition(self) -> Self {
        Self { partition: None, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), SetupError> {
        let dscp = self.traffic_class.map_or(0, |class| class >> 2);
        LimitError::check("dscp", dscp.into(), 63)?;
        LimitError::check("service_level", self.service_level.unwrap_or(0).into(), 15)?;
        LimitError::check("flow_label", self.flow_label.unwrap_or(0).into(), (1 << 20) - 1)?;
        SetupError::at_least("hop_limit", self.hop_limit.unwrap_or(1).into(), 1)
    }

    /// Checks the settings, and that a port of the device has the partition if they name one.
    pub(crate) fn check_on(&self, device: &Device) -> Result<(), SetupError> {
        self.check()?;
        let mut found = Ok(());
        // One port suffices.
        for port in (1..=device.attr().ports).filter(|_| self.names_partition()) {
            let port = device.known_port(PortNum(port))?;
            found = self.partition(device, &port).map(drop);
            if found.is_ok() {
                break;
            }
        }
        found
    }

    /// Checks the settings and applies the default traffic class.
    pub(crate) fn resolved(mut self) -> Result<Self, SetupError> {
        self.check()?;
        if self.traffic_class.is_none() {
            self.traffic_class = default_traffic_class()?.map(u16::from);
        }
        Ok(self)
    }

    /// Takes the fields that are not set from `other`.
    #[cfg(not(loom))]
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            traffic_class: self.traffic_class.or(other.traffic_class),
            service_level: self.service_level.or(other.service_level),
            flow_label: self.flow_label.or(other.flow_label),
            hop_limit: self.hop_limit.or(other.hop_limit),
            static_rate: self.static_rate.or(other.static_rate),
            max_mtu: self.max_mtu.or(other.max_mtu),
            partition: self.partition.or(other.partition),
        }
    }

    /// Returns `address` with the fields that are set. Requires a [check](Self::check).
    pub(crate) fn applied(&self, address: AddressVector) -> AddressVector {
        AddressVector {
            traffic_class: self.traffic_class.map_or(address.traffic_class, |class| class as u8),
            service_level: self.service_level.unwrap_or(address.service_level),
            flow_label: self.flow_label.unwrap_or(address.flow_label),
            hop_limit: self.hop_limit.unwrap_or(address.hop_limit),
            static_rate: self.static_rate.unwrap_or(address.static_rate),
            ..address
        }
    }

    pub(crate) fn limited(&self, mtu: Mtu) -> Mtu {
        self.max_mtu.map_or(mtu, |max| max.min(mtu))
    }
}

/// Prefers the entry of a full member.
fn index_of(pkey: u16, table: &[u16]) -> Option<u16> {
    const FULL_MEMBER: u16 = 0x8000;
    let partition = pkey & !FULL_MEMBER;
    let find = |entry| table.iter().position(|&found| found == entry);
    // An entry without partition is empty.
    let found = find(partition | FULL_MEMBER).or_else(|| find(partition));
    found.filter(|_| partition != 0).and_then(|index| u16::try_from(index).ok())
}

pub(crate) fn default_traffic_class() -> Result<Option<u8>, VerbError> {
    std::env::var_os(TRAFFIC_CLASS).as_deref().map(parse_traffic_class).transpose()
}

fn parse_traffic_class(text: &OsStr) -> Result<u8, VerbError> {
    const INVALID: &str = "TOKIO_RDMA_TRAFFIC_CLASS (must be 0 to 255, or 0x0 to 0xff)";
    let text = text.to_str().unwrap_or_default();
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |digits| (digits, 16));
    let parsed = u8::from_str_radix(digits, radix).ok();
    // The function above accepts a sign.
    let parsed = parsed.filter(|_| !digits.starts_with('+'));
    parsed.ok_or(VerbError::new(INVALID, VerbError::EINVAL))
}

const TRAFFIC_CLASS: &str = "TOKIO_RDMA_TRAFFIC_CLASS";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Gid;

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let path = PathConfig::default();
        let limit = |field, asked, allowed| {
            LimitError::check(field, asked, allowed).map_err(SetupError::from)
        };
        let cases = [
            (path.dscp(64), limit("dscp", 64, 63)),
            (path.service_level(16), limit("service_level", 16, 15)),
            (path.flow_label(1 << 20), limit("flow_label", 1 << 20, 0xf_ffff)),
            (path.hop_limit(0), SetupError::at_least("hop_limit", 0, 1)),
        ];
        for (path, expected) in cases {
            assert!(expected.is_err());
            assert_eq!(path.check(), expected);
        }
        let largest = path.traffic_class(255).service_level(15).flow_label(0xf_ffff).hop_limit(255);
        assert_eq!(largest.check(), Ok(()));
        assert_eq!(path.check(), Ok(()));
    }

    #[test]
    fn partition_is_found_by_its_number_and_preferably_as_full_member() {
        let table = [0xffff, 0, 0x0001, 0x8001, 0x0002, 0x8000];
        for (pkey, expected) in [
            (0xffff, Some(0)),
            (0x7fff, Some(0)),
            (0x8001, Some(3)),
            (0x0001, Some(3)),
            (0x8002, Some(4)),
            (0x8003, None),
            (0, None),
            (0x8000, None),
        ] {
            assert_eq!(index_of(pkey, &table), expected, "{pkey:#x}");
        }
    }

    #[test]
    fn fields_that_are_not_set_keep_their_values() {
        let address = AddressVector {
            traffic_class: 1,
            service_level: 2,
            flow_label: 3,
            hop_limit: 4,
            static_rate: StaticRate::GBPS_25,
            ..AddressVector::new(PortNum(1), 0, Gid::default())
        };
        let path = PathConfig::default();
        assert_eq!(path.applied(address), address);
        assert_eq!(path.limited(Mtu::Mtu1024), Mtu::Mtu1024);
        let path = path.dscp(26).max_mtu(Mtu::Mtu512);
        assert_eq!(path.applied(address), AddressVector { traffic_class: 104, ..address });
        assert_eq!(path.limited(Mtu::Mtu1024), Mtu::Mtu512);
        assert_eq!(path.limited(Mtu::Mtu256), Mtu::Mtu256);
    }

    #[test]
    fn traffic_class_of_the_environment_is_decimal_or_hexadecimal() {
        for (text, expected) in [("0", 0), ("104", 104), ("255", 255), ("0x68", 104), ("0xFF", 255)]
        {
            assert_eq!(parse_traffic_class(OsStr::new(text)), Ok(expected));
        }
        for text in ["", "256", "-1", "+1", "0x+1", "0x", "0x100", "68h", " 104", "AF31"] {
            let refused = parse_traffic_class(OsStr::new(text)).unwrap_err().to_string();
            let expected = "TOKIO_RDMA_TRAFFIC_CLASS (must be 0 to 255, or 0x0 to 0xff): \
                            Invalid argument (os error 22)";
            assert_eq!(refused, expected, "{text:?}");
        }
    }
}

#[cfg(all(test, not(loom), not(miri)))]
mod device_tests {
    use std::process::Command;

    use futures::future::join;

    use super::*;
    use crate::cm::{ConnectConfig, Listener, resolve};
    use crate::dc::{DcInitiator, DcTarget};
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::op::{QueuePair, SharedReceiveQueue};
    use crate::software::Network;
    use crate::verbs::Device;

    /// Runs the test of this name again in a process with this default, because the environment of
    /// this process belongs to all tests. Returns false in that process.
    fn runs_with_default(test: &str, value: &str) -> bool {
        if std::env::var_os(TRAFFIC_CLASS).is_some_and(|found| found == *value) {
            return false;
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("op::path::device_tests::{test}")]);
        let output = child.env(TRAFFIC_CLASS, value).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        true
    }

    #[test]
    fn default_traffic_class_applies_to_paths_that_set_none() {
        if runs_with_default("default_traffic_class_applies_to_paths_that_set_none", "0x68") {
            return;
        }
        let device = Device::software().unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let builder = QueuePair::builder(&pd, &queue);
        let class = |qp: &QueuePair| qp.query().unwrap().1.address.unwrap().traffic_class;

        let unset = builder.clone().build().unwrap();
        let set = builder.clone().path(PathConfig::default().dscp(46)).build().unwrap();
        unset.connect(&set.endpoint()).unwrap();
        set.connect(&unset.endpoint()).unwrap();
        assert_eq!((class(&unset), class(&set)), (104, 184));

        let srq = SharedReceiveQueue::new(&pd, &queue, 1, 1).unwrap();
        let target = DcTarget::new(&pd, &srq).unwrap();
        let initiator = DcInitiator::builder(&pd, &queue).build().unwrap();
        assert_eq!(initiator.peer(&target.address()).unwrap().route().traffic_class, 104);
        assert_eq!(target.query().unwrap().1.address.unwrap().traffic_class, 104);

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
            // The environment does not override the path of a queue pair.
            let path = PathConfig::default().dscp(46);
            let accepting = async {
                let request = listener.accept().await.unwrap();
                let qp = request.prepare(builder.clone().path(path)).build().unwrap();
                (request.accept(&qp, &ConnectConfig::default()).await.unwrap(), qp)
            };
            let connecting = async {
                let route = resolve(&device, listener.local_addr()).await.unwrap();
                let qp = route.prepare(builder.clone()).build().unwrap();
                (route.connect(&qp, &ConnectConfig::default()).await.unwrap(), qp)
            };
            let ((_link, ours), (_peer, theirs)) = join(connecting, accepting).await;
            assert_eq!((class(&ours), class(&theirs)), (104, 184));
        });
    }

    #[test]
    fn reset_initiator_stays_in_its_partition_when_the_table_has_changed() {
        let network = Network::new();
        let device = Device::software_in(&network, "reordered").unwrap();
        let control = network.control("reordered").unwrap();
        control.set_pkeys(&[0xffff, 0x8001, 0x8002]);
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let path = PathConfig::default().pkey(0x8001);
        let initiator = DcInitiator::builder(&pd, &queue).path(path).build().unwrap();
        let index = || initiator.query().unwrap().1.pkey_index;
        assert_eq!(index(), Some(1));
        control.set_pkeys(&[0xffff, 0x8002, 0x8001]);
        initiator.reset().unwrap();
        assert_eq!(index(), Some(2));
        control.set_pkeys(&[0xffff]);
        let missing = SetupError::NoPkey { port: 1, asked: 0x8001, table: vec![0xffff] };
        assert_eq!(initiator.reset().unwrap_err(), missing);
    }

    #[test]
    fn malformed_default_is_refused_where_it_would_apply() {
        if runs_with_default("malformed_default_is_refused_where_it_would_apply", "AF31") {
            return;
        }
        let device = Device::software().unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let refused = QueuePair::new(&pd, &queue).unwrap_err();
        assert_eq!(refused, default_traffic_class().unwrap_err().into());
        let set = QueuePair::builder(&pd, &queue).path(PathConfig::default().dscp(0));
        assert!(set.build().is_ok());
    }
}
