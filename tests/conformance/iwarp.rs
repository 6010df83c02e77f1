//! What an iWARP device lacks is known from its attributes and refused with a text.

use std::time::Duration;

use tokio_rdma::cm::{self, ConnectConfig, ConnectError};
use tokio_rdma::error::{OpErrorKind, SetupError};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::PathConfig;
use tokio_rdma::types::{AtomicCapability, Imm, QpAttr, QpState, Transport};
use tokio_rdma::{Access, Batch, CompletionQueue, ExposedRegion, QueuePair};

use crate::common::pair::{Pair, Side};
use crate::common::{self, Setup, in_every_mode};

in_every_mode!(lacks_are_refused, read_to_one_buffer_shows_that_earlier_writes_have_arrived);

fn unsupported<T: std::fmt::Debug>(result: Result<T, SetupError>, text: &str) {
    match result.unwrap_err() {
        SetupError::Unsupported { what } => assert!(what.contains(text), "{what}"),
        other => panic!("{other:?} instead of {text}"),
    }
}

async fn lacks_are_refused(mode: &str) {
    let setup = Setup::new();
    if !setup.a.attr().is_iwarp() {
        let attr = setup.a.attr();
        assert!(attr.immediate && attr.iova);
        assert_eq!(attr.max_read_sge, attr.max_sge);
        return;
    }
    let attr = setup.a.attr();
    assert!(!attr.immediate && attr.max_mw == 0 && attr.max_read_sge == 1);
    assert_eq!(attr.atomic, AtomicCapability::None);

    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.a, common::mode(mode)).unwrap();
    let builder = || QueuePair::builder(&pd, &queue);
    for transport in [Transport::Uc, Transport::Ud] {
        unsupported(builder().transport(transport).build(), "RC only");
    }
    let path = PathConfig::default().dscp(26);
    unsupported(builder().path(path).build(), "PathConfig");
    let qp = builder().build().unwrap();
    unsupported(qp.connect(&qp.endpoint()), "connect by address");
    let memory = HostMemory::zeroed(4096).unwrap();
    unsupported(ExposedRegion::at(&pd, memory, 0, Access::REMOTE_READ), "DeviceAttr::iova");

    // Settings of a connection by address.
    let listener =
        cm::Listener::bind(&setup.b, (setup.b.default_address().unwrap(), 0)).await.unwrap();
    let keepalive = ConnectConfig::default().keepalive(Some(Duration::from_secs(1)));
    for (config, text) in [(keepalive, "keepalive"), (ConnectConfig::default().path(path), "path")]
    {
        let route = cm::resolve(&setup.a, listener.local_addr()).await.unwrap();
        match route.connect(&qp, &config).await.unwrap_err() {
            ConnectError::Setup { error, .. } => unsupported(Err::<(), _>(*error), text),
            other => panic!("{other:?}"),
        }
    }

    let pair = Pair::new(Transport::Rc, mode);
    let Pair { a, b, .. } = &pair;
    let (region, refused) = (b.region(64), |kind: OpErrorKind, text: &str| {
        let OpErrorKind::Unsupported { what } = kind else { panic!("{kind:?}") };
        assert!(what.contains(text), "{what}");
    });
    let (remote, word) = (region.grant(), region.grant().slice(..8).unwrap());
    let imm = a.qp.with_imm(Imm(1));
    refused(imm.send(a.buffer(b"x")).await.unwrap_err().kind(), "DeviceAttr::immediate");
    refused(imm.write(a.buffer(b"x"), remote).await.unwrap_err().kind(), "DeviceAttr::immediate");
    refused(a.qp.fetch_add(word, 1).await.unwrap_err().kind(), "DeviceAttr::atomic");
    refused(a.qp.compare_swap(word, 0, 1).await.unwrap_err().kind(), "DeviceAttr::atomic");
    let two = vec![a.blank(8), a.blank(8)];
    match a.qp.read(two, remote.slice(..16).unwrap()).await.unwrap_err().kind() {
        OpErrorKind::Limit(limit) => assert_eq!((limit.asked, limit.allowed), (2, 1)),
        other => panic!("{other:?}"),
    }
    let mut batch = Batch::new();
    batch.send_with_imm(a.buffer(b"x"), Imm(1));
    let result = a.qp.post_batch(batch).await;
    assert!(!result.is_ok(), "{result:?}");

    // Nothing was posted, so the connection still works.
    let receive = b.qp.recv(b.blank(8));
    a.qp.send(a.buffer(b"fine")).await.unwrap();
    assert_eq!(&receive.await.unwrap().buffer[..], b"fine");
    unsupported_reset(a);
}

fn unsupported_reset(side: &Side) {
    match side.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap_err() {
        SetupError::Verb(error) => assert!(error.verb.contains("siw cannot reset"), "{error}"),
        other => panic!("{other:?}"),
    }
}

/// On iWARP, a WRITE completes when TCP has it.
async fn read_to_one_buffer_shows_that_earlier_writes_have_arrived(mode: &str) {
    let pair = Pair::new(Transport::Rc, mode);
    let Pair { a, b, .. } = &pair;
    let region = b.region(4096);
    for round in 0..20_u8 {
        let bytes = [round; 4096];
        a.qp.write(a.buffer(&bytes), region.grant()).await.unwrap();
        a.qp.read(a.blank(1), region.grant().slice(..1).unwrap()).await.unwrap();
        let mut arrived = [0; 4096];
        region.read(0, &mut arrived).unwrap();
        assert!(arrived == bytes, "round {round}");
    }
}
