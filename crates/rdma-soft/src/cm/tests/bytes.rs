//! Tests of the encoding: captured messages, our own, and random bytes.

use rdma_provider::types::{AckTimeout, Mtu, Psn, Qkey, RejectReason};

use super::super::fuzzing;
use super::super::mad::MadError;
use super::super::message::{
    About, CmTimeout, Drep, Dreq, Mra, PathFields, Private, Rej, Rep, Req, Rtu, SidrRep, SidrReq,
    SidrStatus,
};
use super::*;

const CAPTURES: [(&str, &[u8]); 5] = [
    ("cm_rej_v4", include_bytes!("../../../tests/captures/cm_rej_v4.pcap")),
    ("cm_rping_v4", include_bytes!("../../../tests/captures/cm_rping_v4.pcap")),
    ("cm_rping_v6", include_bytes!("../../../tests/captures/cm_rping_v6.pcap")),
    (
        "soft_cm_client_rping_v4",
        include_bytes!("../../../tests/captures/soft_cm_client_rping_v4.pcap"),
    ),
    (
        "soft_cm_server_rping_v4",
        include_bytes!("../../../tests/captures/soft_cm_server_rping_v4.pcap"),
    ),
];

/// Returns the datagrams to queue pair 1 in a capture of Ethernet frames.
fn datagrams(mut capture: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    capture = &capture[24..];
    while let Some((record, rest)) = capture.split_first_chunk::<16>() {
        let length = u32::from_le_bytes(*record[8..].first_chunk().unwrap()) as usize;
        let (frame, rest) = rest.split_at(length);
        capture = rest;
        let ip = &frame[14..];
        let udp = &ip[if ip[0] >> 4 == 4 { 20 } else { 40 }..];
        // A UD SEND_ONLY with DETH; the ICRC is at the end.
        let transport = &udp[8..];
        if transport[0] == 0x64 {
            found.push(&transport[20..transport.len() - 4]);
        }
    }
    found
}

fn decoded(capture: &[u8]) -> Vec<Mad> {
    datagrams(capture).into_iter().map(|bytes| Mad::decode(bytes).unwrap()).collect()
}

fn capture(name: &str) -> &'static [u8] {
    CAPTURES.iter().find(|capture| capture.0 == name).unwrap().1
}

#[test]
fn captured_kernel_messages_round_trip() {
    let mut count = 0;
    for (name, capture) in CAPTURES {
        for bytes in datagrams(capture) {
            let mad = Mad::decode(bytes).unwrap();
            assert_eq!(mad.encode(), bytes, "{name}: {mad:?}");
            if let Message::Req(req) = &mad.message {
                assert_eq!(
                    Gid::from(req.source.ip()),
                    req.local_gid,
                    "{name}: the REQ contains its sender's address"
                );
            }
            count += 1;
        }
    }
    assert_eq!(count, 22);
    let kinds =
        |name| decoded(capture(name)).iter().map(|mad| kind(&mad.message)).collect::<Vec<_>>();
    assert_eq!(kinds("cm_rej_v4"), ["REQ", "REJ"]);
    for name in ["cm_rping_v4", "cm_rping_v6", "soft_cm_client_rping_v4", "soft_cm_server_rping_v4"]
    {
        assert_eq!(kinds(name), ["REQ", "REP", "RTU", "DREQ", "DREP"], "{name}");
    }
}

#[test]
fn fields_of_captured_handshake_match_linux() {
    let all = decoded(capture("cm_rping_v4"));
    let Message::Req(req) = &all[0].message else { panic!("{all:?}") };
    let expected = Req {
        local_id: 0xd4ad_f8aa,
        service_port: 7174,
        guid: 0xfffe_0000_0100_0000,
        qpn: Qpn(0x11),
        responder_resources: 1,
        initiator_depth: 1,
        remote_timeout: CmTimeout(20),
        local_timeout: CmTimeout(20),
        starting_psn: Psn::new(0x83_6a8a),
        retry_count: 7,
        mtu: Mtu::Mtu4096,
        rnr_retry: 7,
        max_retries: 15,
        srq: false,
        pkey: 0xffff,
        local_gid: Gid::from(std::net::Ipv4Addr::new(10, 9, 0, 1)),
        remote_gid: Gid::from(std::net::Ipv4Addr::new(10, 9, 0, 2)),
        path: PathFields { flow_label: 0x321ee, ..PathFields::PLAIN },
        ack_timeout: AckTimeout::from_code(19),
        source: "10.9.0.1:40216".parse().unwrap(),
        destination: [10, 9, 0, 2].into(),
        private_data: Private::empty(),
    };
    assert_eq!(**req, Req { guid: req.guid, ..expected });
    let Message::Rep(rep) = &all[1].message else { panic!("{all:?}") };
    assert_eq!((rep.local_id, rep.remote_id), (0xd7ad_f8aa, 0xd4ad_f8aa));
    assert_eq!((rep.qpn, rep.starting_psn), (Qpn(0x11), Psn::new(0x24_a506)));
    assert_eq!((rep.rnr_retry, rep.srq, rep.ack_delay), (7, false, CmTimeout(15)));
    let Message::Dreq(dreq) = &all[3].message else { panic!("{all:?}") };
    assert_eq!(dreq.remote_qpn, Qpn(0x11));
    assert!(all.iter().all(|mad| mad.transaction == all[0].transaction));

    let Message::Req(req) = &decoded(capture("cm_rping_v6"))[0].message else { panic!() };
    assert_eq!(
        (req.source.ip().to_string(), req.destination.to_string()),
        ("fd00::1".into(), "fd00::2".into())
    );
    let Message::Rej(rej) = &decoded(capture("cm_rej_v4"))[1].message else { panic!() };
    assert_eq!(
        (rej.local_id, rej.about, rej.reason),
        (0, About::Req, RejectReason::INVALID_SERVICE_ID)
    );
}

/// Returns one message of each type with all fields at their maximum.
fn every_message() -> Vec<Message> {
    let (local_id, remote_id) = (0x8123_4567, 0xfedc_ba98);
    let gid = |first| Gid(std::array::from_fn(|at| first + at as u8));
    let request = |source: &str, destination: &str| {
        Message::Req(Box::new(Req {
            local_id,
            service_port: 0xfffe,
            guid: u64::MAX - 1,
            qpn: Qpn(0xff_fffe),
            responder_resources: 254,
            initiator_depth: 253,
            remote_timeout: CmTimeout(31),
            local_timeout: CmTimeout(30),
            starting_psn: Psn::new(0xab_cdef),
            retry_count: 6,
            mtu: Mtu::Mtu1024,
            rnr_retry: 5,
            max_retries: 14,
            srq: true,
            pkey: 0x8001,
            local_gid: gid(1),
            remote_gid: gid(101),
            path: PathFields {
                flow_label: 0xf_fffe,
                traffic_class: 0xa5,
                service_level: 15,
                hop_limit: 254,
                rate: 62,
                subnet_local: true,
            },
            ack_timeout: AckTimeout::from_code(29),
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            private_data: Private::from_wire(std::array::from_fn(|at| at as u8)),
        }))
    };
    let mut all = vec![
        request("10.0.0.1:65534", "10.255.0.2"),
        request("[fd00::1]:1", "fd00::ffff:2"),
        Message::Rej(Box::new(Rej {
            local_id,
            remote_id,
            about: About::Rep,
            reason: RejectReason(0xfffe),
            private_data: Private::from_wire(std::array::from_fn(|at| at as u8)),
        })),
        Message::Rep(Box::new(Rep {
            local_id,
            remote_id,
            qpn: Qpn(0xab_cdef),
            starting_psn: Psn::new(0xff_fffe),
            responder_resources: 255,
            initiator_depth: 254,
            rnr_retry: 7,
            srq: true,
            guid: 0x0123_4567_89ab_cdef,
            ack_delay: CmTimeout(31),
            private_data: Private::from_wire(std::array::from_fn(|at| at as u8)),
        })),
        Message::Rtu(Rtu { local_id, remote_id }),
        Message::Dreq(Dreq { local_id, remote_id, remote_qpn: Qpn(0xab_cdef) }),
        Message::Drep(Drep { local_id, remote_id }),
        Message::SidrReq(Box::new(SidrReq {
            request_id: 0xdead_beef,
            pkey: 0x8001,
            service: 0x0111_1c06,
            addresses: Some((([10, 1, 2, 3], 0x9876).into(), [10, 4, 5, 6].into())),
            private_data: Private::from_wire(std::array::from_fn(|at| at as u8)),
        })),
        Message::SidrRep(Box::new(SidrRep {
            request_id: 0xdead_beef,
            status: SidrStatus(5),
            qpn: Qpn(0xab_cdef),
            service: u64::MAX,
            qkey: Qkey(0x8001_0001),
            private_data: Private::from_wire(std::array::from_fn(|at| at as u8)),
        })),
    ];
    for about in [About::Req, About::Rep, About::Other] {
        all.push(Message::Mra(Mra { local_id, remote_id, about, service_timeout: CmTimeout(31) }));
    }
    all
}

#[test]
fn every_message_round_trips() {
    for message in every_message() {
        let mad = Mad { transaction: 0xfedc_ba98_7654_3210, message };
        assert_eq!(Mad::decode(&mad.encode()), Ok(mad));
    }
}

#[test]
fn invalid_datagrams_fail_with_named_error() {
    let good = Mad { transaction: 5, message: every_message().remove(0) }.encode();
    assert_eq!(Mad::decode(&good[1..]), Err(MadError::Length(255)));
    assert_eq!(Mad::decode(&[]), Err(MadError::Length(0)));
    let changed = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[at] = value;
        Mad::decode(&bytes)
    };
    for (at, field) in ["base version", "class", "class version", "method"].into_iter().enumerate()
    {
        assert_eq!(changed(at, 0x81), Err(MadError::Header { field, found: 0x81 }));
    }
    // LAP: alternate paths exist only on InfiniBand.
    assert_eq!(changed(17, 0x19), Err(MadError::Attribute(0x19)));
    assert_eq!(changed(16, 0x01), Err(MadError::Attribute(0x0110)));
    let refused =
        |reason| Err(MadError::Request { transaction: 5, remote_id: 0x8123_4567, reason });
    // UDP's port space, and a foreign service.
    assert_eq!(changed(37, 0x11), refused(RejectReason::INVALID_SERVICE_ID));
    assert_eq!(changed(32, 1), refused(RejectReason::INVALID_SERVICE_ID));
    // Unreliable transport, and the extended kind.
    assert_eq!(changed(67, 20 << 3 | 2), refused(RejectReason::INVALID_TRANSPORT));
    assert_eq!(changed(75, 1), refused(RejectReason::INVALID_TRANSPORT));
    assert_eq!(changed(74, 0x67), refused(RejectReason::INVALID_MTU));
    // Neither address family, and another version.
    assert_eq!(changed(165, 0x50), refused(RejectReason::UNSUPPORTED));
    assert_eq!(changed(164, 0x10), refused(RejectReason::UNSUPPORTED));
}

// Shows S4.
#[test]
fn random_inputs_keep_invariants() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut good: Vec<[u8; 256]> = CAPTURES
        .iter()
        .flat_map(|capture| datagrams(capture.1))
        .map(|bytes| bytes.try_into().unwrap())
        .collect();
    good.extend(
        every_message().into_iter().map(|message| Mad { transaction: 1, message }.encode()),
    );
    for _ in 0..100_000 {
        let mut bytes = Vec::new();
        for _ in 0..random.usize(1..5) {
            let mut one = good[random.usize(..good.len())];
            for _ in 0..random.usize(..4) {
                one[random.usize(..256)] = random.u8(..);
            }
            bytes.extend_from_slice(&one);
        }
        bytes.truncate(random.usize(bytes.len() - 16..=bytes.len()));
        fuzzing::mad(&bytes);
    }
}

#[test]
fn sidr_req_gets_unsupported() {
    let mut pair = Pair::new();
    let request = Message::SidrReq(Box::new(SidrReq {
        request_id: 9,
        pkey: 0xffff,
        service: 0x0111_1c06,
        addresses: None,
        private_data: Private::empty(),
    }));
    pair.b.on_message(1, A, Mad { transaction: 77, message: request }, psn);
    let sent = Out::of(&mut pair.b).sent;
    let [(A, Mad { transaction: 77, message: Message::SidrRep(rep) })] = &sent[..] else {
        panic!("{sent:?}")
    };
    assert_eq!(
        (rep.request_id, rep.status, rep.service),
        (9, SidrStatus::UNSUPPORTED, 0x0111_1c06)
    );
    pair.b.on_message(1, A, sent[0].1.clone(), psn);
    let out = Out::of(&mut pair.b);
    assert!(out.sent.is_empty() && out.events.is_empty());
    assert_eq!(pair.b.sizes(), [0; 4]);
}

#[test]
fn unacceptable_request_gets_rej_with_reason() {
    let mut pair = Pair::new();
    pair.b.reject_unacceptable(1, A, 5, 0x1234, RejectReason::INVALID_TRANSPORT);
    pair.b.reject_unacceptable(1, A, 5, 0, RejectReason::INVALID_TRANSPORT);
    let sent = Out::of(&mut pair.b).sent;
    let [(A, Mad { transaction: 5, message: Message::Rej(rej) })] = &sent[..] else {
        panic!("{sent:?}")
    };
    assert_eq!((rej.local_id, rej.remote_id, rej.about), (0, 0x1234, About::Req));
    assert_eq!(rej.reason, RejectReason::INVALID_TRANSPORT);
}
