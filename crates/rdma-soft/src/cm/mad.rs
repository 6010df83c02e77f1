//! Encoding of messages as MADs of 256 bytes to queue pair 1 (IBTA 12.6, 12.11, 13.4.3).
//!
//! [`Mad::decode`] accepts any input. It ignores fields without meaning on RoCE (LIDs, end-to-end
//! contexts, the alternate path) and private data that programs do not receive.
//!
//! Requests have rdma_cm's form: a TCP port, and IP addresses before the private data.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rdma_provider::types::{AckTimeout, Gid, Mtu, Psn, Qkey, Qpn, RejectReason};

use super::message::{
    About, CmTimeout, CommId, Drep, Dreq, Mad, Message, Mra, PathFields, Private, Rej, Rep, Req,
    Rtu, SidrRep, SidrReq, SidrStatus,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MadError {
    Length(usize),
    Header {
        field: &'static str,
        found: u8,
    },
    /// A message type that RoCE does not use, or an unknown one.
    Attribute(u16),
    /// A request that no listener could accept. Its sender waits for an answer.
    Request {
        transaction: u64,
        remote_id: CommId,
        reason: RejectReason,
    },
}

/// Bytes of a management datagram (IBTA 13.4.2).
pub(super) const SIZE: usize = 256;

/// Offsets in the MAD header, with constant values.
mod header {
    pub(super) const BASE_VERSION: (usize, u8) = (0, 1);
    /// Communication management.
    pub(super) const CLASS: (usize, u8) = (1, 7);
    pub(super) const CLASS_VERSION: (usize, u8) = (2, 2);
    /// Send.
    pub(super) const METHOD: (usize, u8) = (3, 3);
    pub(super) const TRANSACTION: usize = 8;
    pub(super) const ATTRIBUTE: usize = 16;
}

mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
}

/// Offsets after the header, IBTA 12.6.5. Numbers in parentheses are bits.
mod at {
    /// In every message except SIDR_REQ and SIDR_REP.
    pub(super) const LOCAL_ID: usize = 24;
    pub(super) const REMOTE_ID: usize = 28;

    pub(super) mod req {
        pub(crate) const SERVICE: usize = 32;
        pub(crate) const GUID: usize = 40;
        pub(crate) const QPN: usize = 56;
        pub(crate) const RESPONDER_RESOURCES: usize = 59;
        pub(crate) const INITIATOR_DEPTH: usize = 63;
        /// Remote timeout (5), transport (2), end-to-end flow control.
        pub(crate) const REMOTE_TIMEOUT: usize = 67;
        pub(crate) const STARTING_PSN: usize = 68;
        /// Local timeout (5), retries (3).
        pub(crate) const LOCAL_TIMEOUT: usize = 71;
        pub(crate) const PKEY: usize = 72;
        /// MTU (4), reliable datagram domain, RNR retries (3).
        pub(crate) const MTU: usize = 74;
        /// Message retries (4), shared receive queue, extended transport (3).
        pub(crate) const MAX_RETRIES: usize = 75;
        pub(crate) const LIDS: usize = 76;
        pub(crate) const LOCAL_GID: usize = 80;
        pub(crate) const REMOTE_GID: usize = 96;
        /// Flow label (20), reserved (6), rate (6).
        pub(crate) const FLOW_LABEL: usize = 112;
        pub(crate) const TRAFFIC_CLASS: usize = 116;
        pub(crate) const HOP_LIMIT: usize = 117;
        /// Service level (4), subnet local, reserved (3).
        pub(crate) const SERVICE_LEVEL: usize = 118;
        /// Acknowledgement timeout (5).
        pub(crate) const ACK_TIMEOUT: usize = 119;
        pub(crate) const ADDRESSES: usize = 164;
        pub(crate) const PRIVATE: usize = 200;
    }

    pub(super) mod rep {
        pub(crate) const QPN: usize = 36;
        pub(crate) const STARTING_PSN: usize = 44;
        pub(crate) const RESPONDER_RESOURCES: usize = 48;
        pub(crate) const INITIATOR_DEPTH: usize = 49;
        /// Acknowledgement delay (5), failover (2), end-to-end flow control.
        pub(crate) const ACK_DELAY: usize = 50;
        /// RNR retries (3), shared receive queue.
        pub(crate) const RNR_RETRY: usize = 51;
        pub(crate) const GUID: usize = 52;
        pub(crate) const PRIVATE: usize = 60;
    }

    pub(super) mod mra {
        pub(crate) const ABOUT: usize = 32;
        /// Service timeout (5).
        pub(crate) const TIMEOUT: usize = 33;
    }

    pub(super) mod rej {
        pub(crate) const ABOUT: usize = 32;
        pub(crate) const REASON: usize = 34;
        pub(crate) const PRIVATE: usize = 108;
    }

    pub(super) mod dreq {
        pub(crate) const REMOTE_QPN: usize = 32;
    }

    pub(super) mod sidr {
        pub(crate) const REQUEST_ID: usize = 24;
        pub(crate) const PKEY: usize = 28;
        pub(crate) const REQ_SERVICE: usize = 32;
        pub(crate) const ADDRESSES: usize = 40;
        pub(crate) const REQ_PRIVATE: usize = 76;
        pub(crate) const STATUS: usize = 28;
        pub(crate) const QPN: usize = 32;
        pub(crate) const REP_SERVICE: usize = 36;
        pub(crate) const QKEY: usize = 44;
        pub(crate) const REP_PRIVATE: usize = 120;
    }
}

const NO_LID: u32 = u32::MAX;
/// The prefix of rdma_cm's service ids for TCP ports.
const TCP_SERVICE: u64 = 0x0106_0000;
/// The prefix of its service ids for UDP ports.
pub(super) const UDP_SERVICE: u64 = 0x0111_0000;

type Bytes = [u8; SIZE];

impl Mad {
    pub(super) fn encode(&self) -> Bytes {
        let mut mad = [0; SIZE];
        for (at, value) in
            [header::BASE_VERSION, header::CLASS, header::CLASS_VERSION, header::METHOD]
        {
            mad[at] = value;
        }
        put(&mut mad, header::TRANSACTION, self.transaction.to_be_bytes());
        let attribute = match &self.message {
            Message::Req(req) => encode_request(req, &mut mad),
            Message::Rep(rep) => encode_response(rep, &mut mad),
            Message::Mra(mra) => {
                put_ids(&mut mad, mra.local_id, mra.remote_id);
                mad[at::mra::ABOUT] = (mra.about as u8) << 6;
                mad[at::mra::TIMEOUT] = mra.service_timeout.0 << 3;
                attribute::MRA
            }
            Message::Rej(rej) => {
                put_ids(&mut mad, rej.local_id, rej.remote_id);
                mad[at::rej::ABOUT] = (rej.about as u8) << 6;
                put(&mut mad, at::rej::REASON, rej.reason.0.to_be_bytes());
                put_private(&mut mad, at::rej::PRIVATE, &rej.private_data);
                attribute::REJ
            }
            Message::Rtu(rtu) => {
                put_ids(&mut mad, rtu.local_id, rtu.remote_id);
                attribute::RTU
            }
            Message::Dreq(dreq) => {
                put_ids(&mut mad, dreq.local_id, dreq.remote_id);
                put_24(&mut mad, at::dreq::REMOTE_QPN, dreq.remote_qpn.0);
                attribute::DREQ
            }
            Message::Drep(drep) => {
                put_ids(&mut mad, drep.local_id, drep.remote_id);
                attribute::DREP
            }
            Message::SidrReq(req) => {
                put(&mut mad, at::sidr::REQUEST_ID, req.request_id.to_be_bytes());
                put(&mut mad, at::sidr::PKEY, req.pkey.to_be_bytes());
                put(&mut mad, at::sidr::REQ_SERVICE, req.service.to_be_bytes());
                if let Some((source, destination)) = req.addresses {
                    put(&mut mad, at::sidr::ADDRESSES, encode_addresses(source, destination));
                }
                put_private(&mut mad, at::sidr::REQ_PRIVATE, &req.private_data);
                attribute::SIDR_REQ
            }
            Message::SidrRep(rep) => {
                put(&mut mad, at::sidr::REQUEST_ID, rep.request_id.to_be_bytes());
                mad[at::sidr::STATUS] = rep.status.0;
                put_24(&mut mad, at::sidr::QPN, rep.qpn.0);
                put(&mut mad, at::sidr::REP_SERVICE, rep.service.to_be_bytes());
                put(&mut mad, at::sidr::QKEY, rep.qkey.0.to_be_bytes());
                put_private(&mut mad, at::sidr::REP_PRIVATE, &rep.private_data);
                attribute::SIDR_REP
            }
        };
        put(&mut mad, header::ATTRIBUTE, attribute.to_be_bytes());
        mad
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, MadError> {
        let mad: &Bytes = bytes.try_into().map_err(|_| MadError::Length(bytes.len()))?;
        for (field, (at, expected)) in [
            ("base version", header::BASE_VERSION),
            ("class", header::CLASS),
            ("class version", header::CLASS_VERSION),
            ("method", header::METHOD),
        ] {
            if mad[at] != expected {
                return Err(MadError::Header { field, found: mad[at] });
            }
        }
        let transaction = u64::from_be_bytes(get(mad, header::TRANSACTION));
        let (local_id, remote_id) = (get_32(mad, at::LOCAL_ID), get_32(mad, at::REMOTE_ID));
        let message = match u16::from_be_bytes(get(mad, header::ATTRIBUTE)) {
            attribute::REQ => {
                let request = decode_request(mad);
                let request = request.map_err(|reason| MadError::Request {
                    transaction,
                    remote_id: local_id,
                    reason,
                })?;
                Message::Req(Box::new(request))
            }
            attribute::REP => Message::Rep(Box::new(decode_response(mad))),
            attribute::MRA => Message::Mra(Mra {
                local_id,
                remote_id,
                about: about(mad[at::mra::ABOUT]),
                service_timeout: CmTimeout(mad[at::mra::TIMEOUT] >> 3),
            }),
            attribute::REJ => Message::Rej(Box::new(Rej {
                local_id,
                remote_id,
                about: about(mad[at::rej::ABOUT]),
                reason: RejectReason(u16::from_be_bytes(get(mad, at::rej::REASON))),
                private_data: get_private(mad, at::rej::PRIVATE),
            })),
            attribute::RTU => Message::Rtu(Rtu { local_id, remote_id }),
            attribute::DREQ => Message::Dreq(Dreq {
                local_id,
                remote_id,
                remote_qpn: Qpn(get_24(mad, at::dreq::REMOTE_QPN)),
            }),
            attribute::DREP => Message::Drep(Drep { local_id, remote_id }),
            attribute::SIDR_REQ => Message::SidrReq(Box::new(SidrReq {
                request_id: get_32(mad, at::sidr::REQUEST_ID),
                pkey: u16::from_be_bytes(get(mad, at::sidr::PKEY)),
                service: u64::from_be_bytes(get(mad, at::sidr::REQ_SERVICE)),
                addresses: decode_addresses(&get(mad, at::sidr::ADDRESSES)),
                private_data: get_private(mad, at::sidr::REQ_PRIVATE),
            })),
            attribute::SIDR_REP => Message::SidrRep(Box::new(SidrRep {
                request_id: get_32(mad, at::sidr::REQUEST_ID),
                status: SidrStatus(mad[at::sidr::STATUS]),
                qpn: Qpn(get_24(mad, at::sidr::QPN)),
                service: u64::from_be_bytes(get(mad, at::sidr::REP_SERVICE)),
                qkey: Qkey(get_32(mad, at::sidr::QKEY)),
                private_data: get_private(mad, at::sidr::REP_PRIVATE),
            })),
            other => return Err(MadError::Attribute(other)),
        };
        Ok(Self { transaction, message })
    }
}

fn encode_request(req: &Req, mad: &mut Bytes) -> u16 {
    use at::req;
    put(mad, at::LOCAL_ID, req.local_id.to_be_bytes());
    put(mad, req::SERVICE, (TCP_SERVICE | u64::from(req.service_port)).to_be_bytes());
    put(mad, req::GUID, req.guid.to_be_bytes());
    put_24(mad, req::QPN, req.qpn.0);
    mad[req::RESPONDER_RESOURCES] = req.responder_resources;
    mad[req::INITIATOR_DEPTH] = req.initiator_depth;
    // Transport 0: reliable connection, without end-to-end flow control.
    mad[req::REMOTE_TIMEOUT] = req.remote_timeout.0 << 3;
    put_24(mad, req::STARTING_PSN, req.starting_psn.value());
    mad[req::LOCAL_TIMEOUT] = req.local_timeout.0 << 3 | (req.retry_count & 7);
    put(mad, req::PKEY, req.pkey.to_be_bytes());
    mad[req::MTU] = (req.mtu as u8) << 4 | (req.rnr_retry & 7);
    mad[req::MAX_RETRIES] = req.max_retries << 4 | u8::from(req.srq) << 3;
    put(mad, req::LIDS, NO_LID.to_be_bytes());
    put(mad, req::LOCAL_GID, req.local_gid.0);
    put(mad, req::REMOTE_GID, req.remote_gid.0);
    let PathFields { flow_label, traffic_class, service_level, hop_limit, rate, subnet_local } =
        req.path;
    put(mad, req::FLOW_LABEL, (flow_label << 12 | u32::from(rate & 63)).to_be_bytes());
    mad[req::TRAFFIC_CLASS] = traffic_class;
    mad[req::HOP_LIMIT] = hop_limit;
    mad[req::SERVICE_LEVEL] = service_level << 4 | u8::from(subnet_local) << 3;
    mad[req::ACK_TIMEOUT] = req.ack_timeout.code() << 3;
    put(mad, req::ADDRESSES, encode_addresses(req.source, req.destination));
    put_private(mad, req::PRIVATE, &req.private_data);
    attribute::REQ
}

fn decode_request(mad: &Bytes) -> Result<Req, RejectReason> {
    use at::req;
    let service = u64::from_be_bytes(get(mad, req::SERVICE));
    if service & !0xffff != TCP_SERVICE {
        return Err(RejectReason::INVALID_SERVICE_ID);
    }
    let (remote_timeout, extended) = (mad[req::REMOTE_TIMEOUT], mad[req::MAX_RETRIES] & 7);
    if remote_timeout & 6 != 0 || extended != 0 {
        return Err(RejectReason::INVALID_TRANSPORT);
    }
    let mtu = Mtu::from_code(mad[req::MTU] >> 4).ok_or(RejectReason::INVALID_MTU)?;
    let (source, destination) =
        decode_addresses(&get(mad, req::ADDRESSES)).ok_or(RejectReason::UNSUPPORTED)?;
    let flow = get_32(mad, req::FLOW_LABEL);
    let level = mad[req::SERVICE_LEVEL];
    Ok(Req {
        local_id: get_32(mad, at::LOCAL_ID),
        service_port: service as u16,
        guid: u64::from_be_bytes(get(mad, req::GUID)),
        qpn: Qpn(get_24(mad, req::QPN)),
        responder_resources: mad[req::RESPONDER_RESOURCES],
        initiator_depth: mad[req::INITIATOR_DEPTH],
        remote_timeout: CmTimeout(remote_timeout >> 3),
        local_timeout: CmTimeout(mad[req::LOCAL_TIMEOUT] >> 3),
        starting_psn: Psn::new(get_24(mad, req::STARTING_PSN)),
        retry_count: mad[req::LOCAL_TIMEOUT] & 7,
        mtu,
        rnr_retry: mad[req::MTU] & 7,
        max_retries: mad[req::MAX_RETRIES] >> 4,
        srq: mad[req::MAX_RETRIES] & 8 != 0,
        pkey: u16::from_be_bytes(get(mad, req::PKEY)),
        local_gid: Gid(get(mad, req::LOCAL_GID)),
        remote_gid: Gid(get(mad, req::REMOTE_GID)),
        path: PathFields {
            flow_label: flow >> 12,
            traffic_class: mad[req::TRAFFIC_CLASS],
            service_level: level >> 4,
            hop_limit: mad[req::HOP_LIMIT],
            rate: flow as u8 & 63,
            subnet_local: level & 8 != 0,
        },
        ack_timeout: AckTimeout::from_code(mad[req::ACK_TIMEOUT] >> 3),
        source,
        destination,
        private_data: get_private(mad, req::PRIVATE),
    })
}

fn encode_response(rep: &Rep, mad: &mut Bytes) -> u16 {
    use at::rep;
    put_ids(mad, rep.local_id, rep.remote_id);
    put_24(mad, rep::QPN, rep.qpn.0);
    put_24(mad, rep::STARTING_PSN, rep.starting_psn.value());
    mad[rep::RESPONDER_RESOURCES] = rep.responder_resources;
    mad[rep::INITIATOR_DEPTH] = rep.initiator_depth;
    mad[rep::ACK_DELAY] = rep.ack_delay.0 << 3;
    mad[rep::RNR_RETRY] = rep.rnr_retry << 5 | u8::from(rep.srq) << 4;
    put(mad, rep::GUID, rep.guid.to_be_bytes());
    put_private(mad, rep::PRIVATE, &rep.private_data);
    attribute::REP
}

fn decode_response(mad: &Bytes) -> Rep {
    use at::rep;
    Rep {
        local_id: get_32(mad, at::LOCAL_ID),
        remote_id: get_32(mad, at::REMOTE_ID),
        qpn: Qpn(get_24(mad, rep::QPN)),
        starting_psn: Psn::new(get_24(mad, rep::STARTING_PSN)),
        responder_resources: mad[rep::RESPONDER_RESOURCES],
        initiator_depth: mad[rep::INITIATOR_DEPTH],
        rnr_retry: mad[rep::RNR_RETRY] >> 5,
        srq: mad[rep::RNR_RETRY] & 16 != 0,
        guid: u64::from_be_bytes(get(mad, rep::GUID)),
        ack_delay: CmTimeout(mad[rep::ACK_DELAY] >> 3),
        private_data: get_private(mad, rep::PRIVATE),
    }
}

/// Encodes rdma_cm's IP header: version 0, IP version, source port and both addresses.
fn encode_addresses(source: SocketAddr, destination: IpAddr) -> [u8; 36] {
    let mut all = [0; 36];
    let version = if source.is_ipv4() { 4 } else { 6 };
    all[1] = version << 4;
    put(&mut all, 2, source.port().to_be_bytes());
    for (at, ip) in [(4, source.ip()), (20, destination)] {
        match ip {
            IpAddr::V4(ip) => put(&mut all, at + 12, ip.octets()),
            IpAddr::V6(ip) => put(&mut all, at, ip.octets()),
        }
    }
    all
}

fn decode_addresses(all: &[u8; 36]) -> Option<(SocketAddr, IpAddr)> {
    let ip = |at| match all[1] >> 4 {
        4 => Some(IpAddr::V4(Ipv4Addr::from(get::<4>(all, at + 12)))),
        6 => Some(IpAddr::V6(Ipv6Addr::from(get::<16>(all, at)))),
        _ => None,
    };
    // Another major version has another layout.
    if all[0] >> 4 != 0 {
        return None;
    }
    Some((SocketAddr::new(ip(4)?, u16::from_be_bytes(get(all, 2))), ip(20)?))
}

const fn about(byte: u8) -> About {
    match byte >> 6 {
        0 => About::Req,
        1 => About::Rep,
        _ => About::Other,
    }
}

// All offsets are constants and lie within the datagram; a test covers every message.

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut found = [0; N];
    found.copy_from_slice(&bytes[at..at + N]);
    found
}

fn get_24(mad: &Bytes, at: usize) -> u32 {
    let [high, middle, low] = get(mad, at);
    u32::from_be_bytes([0, high, middle, low])
}

fn get_32(mad: &Bytes, at: usize) -> u32 {
    u32::from_be_bytes(get(mad, at))
}

fn get_private<const N: usize>(mad: &Bytes, at: usize) -> Private<N> {
    Private::from_wire(get(mad, at))
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn put_24(mad: &mut Bytes, at: usize, value: u32) {
    let [_, high, middle, low] = value.to_be_bytes();
    put(mad, at, [high, middle, low]);
}

fn put_ids(mad: &mut Bytes, local_id: CommId, remote_id: CommId) {
    put(mad, at::LOCAL_ID, local_id.to_be_bytes());
    put(mad, at::REMOTE_ID, remote_id.to_be_bytes());
}

fn put_private<const N: usize>(mad: &mut Bytes, at: usize, data: &Private<N>) {
    mad[at..at + N].copy_from_slice(data.bytes());
}
