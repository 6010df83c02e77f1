//! Dynamic connections: one target for many initiators, one initiator for many targets.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio_rdma::dc::{DcAddress, DcInitiator, DcPeer, DcTarget};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::{
    AckTimeout, DcKey, LinkLayer, Mtu, PortNum, QpAttr, QpState, Qpn, RnrTimer, TransitionError,
    Transport, WcStatus,
};
use tokio_rdma::verbs::AddressHandle;
use tokio_rdma::verbs::{Cq, Dct, Srq};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionQueue, Device, ExposedRegion, Imm, OpErrorKind, Pool,
    ProtectionDomain, QueuePair, RemoteRegion, SetupError, SharedReceiveQueue,
};

use crate::common::{Setup, in_every_mode, mode, pattern, run, within};

/// Returns a setup, or reports that `test` is skipped on a device without DC.
pub(super) fn setup(test: &str) -> Option<Setup> {
    let setup = Setup::new();
    if setup.a.attr().dc.is_none() {
        assert!(!setup.is_software(), "the software device has DC");
        crate::common::skipped(&format!("{test}: {} has no DC", setup.a.name()));
        return None;
    }
    Some(setup)
}

/// The objects of one node. The order of fields is the drop order.
pub(super) struct Node {
    pub(super) target: DcTarget,
    pub(super) srq: SharedReceiveQueue,
    pub(super) region: ExposedRegion,
    pub(super) pool: Pool,
    pub(super) queue: CompletionQueue,
    pub(super) pd: ProtectionDomain,
}

const REGION: usize = 16384;

impl Node {
    pub(super) fn new(device: &Device, mode_name: &str) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(device, mode(mode_name)).unwrap();
        Self::within(&pd, &queue)
    }

    fn within(pd: &ProtectionDomain, queue: &CompletionQueue) -> Self {
        let srq = SharedReceiveQueue::new(pd, queue, 64, 1).unwrap();
        let target = DcTarget::new(pd, &srq).unwrap();
        let region =
            ExposedRegion::new(pd, HostMemory::zeroed(REGION).unwrap(), Access::REMOTE_ALL)
                .unwrap();
        let pool = Pool::builder(pd).buffer_size(8192).buffers(64).build().unwrap();
        Self { target, srq, region, pool, queue: queue.clone(), pd: pd.clone() }
    }

    pub(super) fn remote(&self, offset: usize, len: usize) -> RemoteRegion {
        self.region.grant().slice(offset as u64..(offset + len) as u64).unwrap()
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.read(offset, &mut bytes).unwrap();
        bytes
    }

    pub(super) fn buffer(&self, bytes: &[u8]) -> BufMut {
        self.pool.copy_from(bytes).unwrap()
    }
}

/// Returns options with few retries. The timeout allows for answers that a thread delivers late.
pub(super) fn brief_options() -> RetryConfig {
    RetryConfig {
        timeout: AckTimeout::from_code(match crate::wire() {
            crate::common::Wire::Memory => 10,
            _ => 15,
        }),
        retry_count: 2,
        rnr_retry: 1,
        rnr_timer: RnrTimer::from_code(1),
    }
}

/// Returns an initiator with few retries.
fn impatient(node: &Node) -> DcInitiator {
    DcInitiator::builder(&node.pd, &node.queue).retries(brief_options()).build().unwrap()
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

pub(super) fn state(initiator: &DcInitiator) -> QpState {
    initiator.query().unwrap().0
}

pub(super) async fn assert_works(
    from: &Node,
    initiator: &DcInitiator,
    peer: &DcPeer,
    to: &Node,
    seed: u8,
) {
    let bytes = pattern(100, seed);
    within("write", initiator.to(peer).write(from.buffer(&bytes), to.remote(0, 100)))
        .await
        .unwrap();
    assert_eq!(to.bytes(0, 100), bytes);
}

in_every_mode!(each_operation_works_over_dc, queued_work_keeps_its_target, batch_goes_to_one_peer);

async fn each_operation_works_over_dc(mode: &str) {
    let Some(setup) = setup("each_operation_works_over_dc") else { return };
    let (here, there) = (Node::new(&setup.a, mode), Node::new(&setup.b, mode));
    let initiator = DcInitiator::new(&here.pd, &here.queue).unwrap();
    let peer = initiator.peer(&there.target.address()).unwrap();
    let to = initiator.to(&peer);

    for (seed, len) in [1, 7, 255, 256, 4096, 8192].into_iter().enumerate() {
        let bytes = pattern(len, seed as u8);
        let buffer =
            within("write", to.write(here.buffer(&bytes), there.remote(8, len))).await.unwrap();
        assert_eq!(there.bytes(8, len), bytes);
        let mut buffer = buffer;
        buffer.fill(0xee);
        let buffer = within("read", to.read(buffer, there.remote(8, len))).await.unwrap();
        assert_eq!(&buffer[..], bytes);
    }
    within("inline", to.write_inline(b"inline", there.remote(32, 6))).await.unwrap();
    assert_eq!(there.bytes(32, 6), b"inline");
    within("try", to.try_write(here.buffer(b"tried"), there.remote(64, 5)).unwrap()).await.unwrap();
    let mut buffer = here.pool.try_alloc(5).unwrap();
    buffer.fill(0);
    let read =
        within("try", to.fenced().try_read(buffer, there.remote(64, 5)).unwrap()).await.unwrap();
    assert_eq!(&read[..], b"tried");

    let number = there.target.number();
    let receive = || there.srq.recv(there.pool.try_alloc(64).unwrap());
    let received = receive();
    within("send", to.send(here.buffer(b"hello"))).await.unwrap();
    let received = within("receive", received).await.unwrap();
    assert_eq!(
        (&received.buffer[..], received.qpn, received.imm, received.written),
        (&b"hello"[..], number, None, false)
    );
    let received = [receive(), receive(), receive(), receive()];
    let sends = (
        to.with_imm(Imm(0x0102_0304)).send(here.buffer(b"one")),
        to.send_inline(b"two"),
        to.solicited().with_imm(Imm(7)).send_inline(b"three"),
        to.try_send(here.buffer(b"four")).unwrap(),
    );
    within("send", sends.0).await.unwrap();
    within("send", sends.1).await.unwrap();
    within("send", sends.2).await.unwrap();
    within("send", sends.3).await.unwrap();
    let expected: [(&[u8], _); 4] = [
        (b"one", Some(Imm(0x0102_0304))),
        (b"two", None),
        (b"three", Some(Imm(7))),
        (b"four", None),
    ];
    for (receive, expected) in received.into_iter().zip(expected) {
        let received = within("receive", receive).await.unwrap();
        assert_eq!((&received.buffer[..], received.imm), expected);
    }
    let received = receive();
    within("write", to.with_imm(Imm(9)).write(here.buffer(b"news"), there.remote(96, 4)))
        .await
        .unwrap();
    let received = within("receive", received).await.unwrap();
    assert_eq!(
        (received.written, received.len, received.imm, received.qpn),
        (true, 4, Some(Imm(9)), number)
    );
    assert_eq!(there.bytes(96, 4), b"news");
    let received = receive();
    within("write", to.with_imm(Imm(10)).write_inline(b"brief", there.remote(96, 5)))
        .await
        .unwrap();
    let received = within("receive", received).await.unwrap();
    assert_eq!(
        (received.written, received.len, received.imm, received.qpn),
        (true, 5, Some(Imm(10)), number)
    );
    assert_eq!(there.bytes(96, 5), b"brief");

    there.region.store(0, 40).unwrap();
    assert_eq!(within("add", to.fetch_add(there.remote(0, 8), 2)).await.unwrap(), 40);
    assert_eq!(within("swap", to.compare_swap(there.remote(0, 8), 42, 7)).await.unwrap(), 42);
    assert_eq!(within("swap", to.compare_swap(there.remote(0, 8), 42, 8)).await.unwrap(), 7);
    assert_eq!(there.region.load(0).unwrap(), 7);
    let error = within("add", to.fetch_add(there.remote(4, 8), 2)).await.unwrap_err();
    assert!(matches!(error.kind(), OpErrorKind::Misaligned { .. }), "{error}");
    assert_eq!(initiator.counters().failed, 0);
}

/// Queues work over the initiator's capacity, for alternating targets.
async fn queued_work_keeps_its_target(mode: &str) {
    const TARGETS: usize = 5;
    const ROUNDS: usize = 40;
    let Some(setup) = setup("queued_work_keeps_its_target") else { return };
    let here = Node::new(&setup.a, mode);
    let initiator = DcInitiator::builder(&here.pd, &here.queue).max_send_wr(16).build().unwrap();
    let pd = setup.b.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.b, crate::common::mode(mode)).unwrap();
    let nodes: Vec<_> = (0..TARGETS).map(|_| Node::within(&pd, &queue)).collect();
    let peers: Vec<_> =
        nodes.iter().map(|node| initiator.peer(&node.target.address()).unwrap()).collect();
    let receives: Vec<_> =
        nodes.iter().map(|node| node.srq.recv(node.pool.try_alloc(64).unwrap())).collect();
    let (mut adds, mut writes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for (at, node) in nodes.iter().enumerate() {
            let peer = peers[at].clone();
            adds.push(initiator.to(&peer).fetch_add(node.remote(0, 8), 1 + at as u64));
            let tag = [round as u8, at as u8, 0x5a, !(round as u8)];
            writes.push(initiator.to(&peer).write_inline(&tag, node.remote(64 + 4 * round, 4)));
        }
    }
    let sends: Vec<_> = peers
        .iter()
        .enumerate()
        .map(|(at, peer)| initiator.to(peer).send_inline(&[at as u8; 3]))
        .collect();
    drop(peers);
    // In busy-poll mode, the thread may free slots as fast as they are used.
    assert!(
        mode == "busy_poll" || initiator.counters().waited > 0,
        "no work was queued: {:?}",
        initiator.counters()
    );
    for (number, add) in adds.into_iter().enumerate() {
        let (round, at) = (number / TARGETS, number % TARGETS);
        let before = within("add", add).await.unwrap();
        assert_eq!(before, (round * (1 + at)) as u64, "add {round} to target {at}");
    }
    for write in writes {
        within("write", write).await.unwrap();
    }
    for send in sends {
        within("send", send).await.unwrap();
    }
    for (at, (node, receive)) in nodes.iter().zip(receives).enumerate() {
        let received = within("receive", receive).await.unwrap();
        assert_eq!(
            (&received.buffer[..], received.qpn),
            (&[at as u8; 3][..], node.target.number())
        );
        for round in 0..ROUNDS {
            assert_eq!(
                node.bytes(64 + 4 * round, 4),
                [round as u8, at as u8, 0x5a, !(round as u8)]
            );
        }
    }
}

async fn batch_goes_to_one_peer(mode: &str) {
    let Some(setup) = setup("batch_goes_to_one_peer") else { return };
    let (here, there, other) =
        (Node::new(&setup.a, mode), Node::new(&setup.b, mode), Node::new(&setup.b, mode));
    let initiator = DcInitiator::builder(&here.pd, &here.queue).max_send_wr(8).build().unwrap();
    let peers = [&there, &other].map(|node| initiator.peer(&node.target.address()).unwrap());
    // The second batch exceeds the free slots and is queued.
    let batches: Vec<_> = [(&peers[0], &there, 1_u8), (&peers[1], &other, 2)]
        .into_iter()
        .map(|(peer, node, seed)| {
            let mut batch = Batch::new();
            for block in 0..6 {
                let bytes = pattern(64, seed ^ (block as u8) << 4);
                batch.write(here.buffer(&bytes), node.remote(64 * block, 64));
            }
            batch.read(here.pool.try_alloc(64).unwrap(), node.remote(64 * 5, 64));
            initiator.to(peer).post_batch(batch)
        })
        .collect();
    let mut full = Batch::new();
    full.write(here.buffer(b"x"), there.remote(1024, 1))
        .write(here.buffer(b"y"), there.remote(1024, 1));
    // A poll may already have completed the first batches.
    if let Ok(full) = initiator.to(&peers[0]).try_post_batch(full) {
        assert!(within("batch posted at once", full).await.is_ok());
    }
    drop(peers);
    for (batch, (node, seed)) in batches.into_iter().zip([(&there, 1_u8), (&other, 2)]) {
        let result = within("batch", batch).await;
        assert!(result.is_ok(), "{:?}", result.results());
        for block in 0..6 {
            assert_eq!(
                node.bytes(64 * block, 64),
                pattern(64, seed ^ (block as u8) << 4),
                "block {block} of {seed}"
            );
        }
        assert_eq!(&result.buffers()[6][..], pattern(64, seed ^ 5 << 4));
    }
}

#[test]
fn target_has_a_number_from_rtr_on() {
    let Some(setup) = setup("target_has_a_number_from_rtr_on") else { return };
    let (port, gid) = setup.a.default_path().unwrap();
    let pd = setup.a.protection_domain().unwrap();
    let cq = Cq::new(&setup.a, 16, None, 1).unwrap();
    let srq = Srq::new(&pd, tokio_rdma::types::SrqCaps { max_wr: 8, max_sge: 1 }).unwrap();
    let dct = Dct::new(&pd, &cq, &srq, DcKey(5)).unwrap();
    let is = |state, number: bool| {
        assert_eq!(dct.query().unwrap().0, state);
        assert_eq!(dct.number().is_some(), number, "{state:?}");
    };
    is(QpState::Reset, false);
    let early = dct.modify(&QpAttr::to_state(QpState::Rtr)).unwrap_err();
    assert!(matches!(early, SetupError::Transition(TransitionError::Illegal { .. })), "{early}");
    let init =
        QpAttr { pkey_index: Some(0), port: Some(port.port), ..QpAttr::to_state(QpState::Init) };
    let incomplete = dct.modify(&init).unwrap_err();
    assert!(
        matches!(incomplete, SetupError::Transition(TransitionError::Attributes { .. })),
        "{incomplete}"
    );
    is(QpState::Reset, false);
    dct.modify(&QpAttr { access: Some(Access::REMOTE_WRITE), ..init }).unwrap();
    is(QpState::Init, false);
    let mut address = tokio_rdma::types::AddressVector::new(port.port, gid.index, gid.gid);
    address.hop_limit = 64;
    dct.modify(&QpAttr {
        address: Some(address),
        path_mtu: Some(Mtu::Mtu1024),
        min_rnr_timer: Some(RnrTimer::from_code(12)),
        ..QpAttr::to_state(QpState::Rtr)
    })
    .unwrap();
    is(QpState::Rtr, true);
    let (number, attr) = (dct.number().unwrap(), dct.query().unwrap().1);
    assert!((2..Qpn::MAX.0).contains(&number.0), "{number}");
    assert_eq!((attr.path_mtu, attr.access), (Some(Mtu::Mtu1024), Some(Access::REMOTE_WRITE)));
    for to in [QpState::Rts, QpState::Err, QpState::Reset] {
        assert!(dct.modify(&QpAttr::to_state(to)).is_err(), "{to:?}");
    }
    is(QpState::Rtr, true);
    assert_eq!(dct.number(), Some(number));
    dct.destroy().unwrap();
}

#[test]
fn mismatched_dc_addresses_are_refused() {
    let Some(setup) = setup("mismatched_dc_addresses_are_refused") else { return };
    let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
    let initiator = DcInitiator::new(&here.pd, &here.queue).unwrap();
    let good = there.target.address();
    assert_eq!(DcAddress::from_bytes(&good.to_bytes()), Ok(good));
    let other = match good.link_layer {
        LinkLayer::Ethernet => LinkLayer::InfiniBand,
        _ => LinkLayer::Ethernet,
    };
    for (bad, named) in [
        (DcAddress { link_layer: other, ..good }, "link layers"),
        (DcAddress { mtu: Mtu::Mtu256, ..good }, "path MTUs"),
    ] {
        match initiator.peer(&bad) {
            Err(SetupError::Mismatch { what, .. }) => assert!(what.starts_with(named), "{what}"),
            refused => panic!("{named}: {refused:?}"),
        }
    }
    let small = DcInitiator::builder(&here.pd, &here.queue).mtu(Mtu::Mtu256).build().unwrap();
    small.peer(&DcAddress { mtu: Mtu::Mtu256, ..good }).unwrap();
    let nowhere = DcInitiator::builder(&here.pd, &here.queue).source(PortNum(1), 255).build();
    assert!(matches!(nowhere, Err(SetupError::NoGid { port: 1 })), "{nowhere:?}");
    let queue_pair = QueuePair::builder(&here.pd, &here.queue).transport(Transport::Dci).build();
    assert!(matches!(queue_pair, Err(SetupError::Unsupported { .. })), "{queue_pair:?}");
    let foreign = DcTarget::new(&setup.a.protection_domain().unwrap(), &here.srq);
    assert!(matches!(foreign, Err(SetupError::Foreign { .. })), "{foreign:?}");
}

#[test]
fn peer_of_another_domain_is_refused() {
    run(1, "foreign", async {
        let Some(setup) = setup("peer_of_another_domain_is_refused") else {
            return;
        };
        let (here, there, other) = (
            Node::new(&setup.a, "event"),
            Node::new(&setup.b, "event"),
            Node::new(&setup.a, "event"),
        );
        let initiators =
            [&here, &other].map(|node| DcInitiator::new(&node.pd, &node.queue).unwrap());
        let peer = initiators[1].peer(&there.target.address()).unwrap();
        let to = initiators[0].to(&peer);
        let foreign = |kind| matches!(kind, OpErrorKind::Foreign { .. });
        let error =
            within("write", to.write(here.buffer(b"x"), there.remote(0, 1))).await.unwrap_err();
        assert!(foreign(error.kind()) && error.into_buffer()[..] == *b"x");
        assert!(foreign(
            within("add", to.fetch_add(there.remote(0, 8), 1)).await.unwrap_err().kind()
        ));
        let mut batch = Batch::new();
        batch.send(here.buffer(b"x"));
        assert!(
            within("batch", to.post_batch(batch))
                .await
                .results()
                .iter()
                .all(|part| foreign(part.unwrap_err()))
        );
        assert_eq!((initiators[0].counters().posted, state(&initiators[0])), (0, QpState::Rts));
        let second = DcInitiator::new(&other.pd, &other.queue).unwrap();
        for initiator in [&initiators[1], &second] {
            assert_works(&other, initiator, &peer, &there, 3).await;
        }
    });
}

/// Checks that work for the address from `wrong` fails, that later work is flushed, and that a
/// repair succeeds.
async fn fails_and_is_repaired(
    test: &str,
    statuses: &[WcStatus],
    wrong: impl FnOnce(&Node) -> DcAddress,
) {
    let Some(setup) = setup(test) else { return };
    let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
    let (initiator, bystander) = (impatient(&here), impatient(&here));
    let good = initiator.peer(&there.target.address()).unwrap();
    let bad = initiator.peer(&wrong(&there)).unwrap();
    assert_works(&here, &initiator, &good, &there, 1).await;

    let before =
        within("before", initiator.to(&good).write(here.buffer(b"before"), there.remote(200, 6)));
    let failing = initiator.to(&bad).write(here.buffer(b"failing"), there.remote(300, 7));
    let behind = initiator.to(&good).write(here.buffer(b"behind"), there.remote(400, 6));
    before.await.unwrap();
    let error = within("failing", failing).await.unwrap_err();
    assert!(error.status().is_some_and(|status| statuses.contains(&status)), "{error}");
    assert_eq!(&error.into_buffer()[..], b"failing");
    let flushed = within("behind", behind).await.unwrap_err();
    assert_eq!(flushed.status(), Some(WcStatus::WR_FLUSH_ERR));
    assert_eq!((there.bytes(300, 7), there.bytes(400, 6)), (vec![0; 7], vec![0; 6]));

    // The error state affects this initiator only.
    assert_eq!(state(&initiator), QpState::Err);
    let late = within("late", initiator.to(&good).write(here.buffer(b"late"), there.remote(0, 4)))
        .await
        .unwrap_err();
    assert_eq!(late.status(), Some(WcStatus::WR_FLUSH_ERR));
    assert_works(&here, &bystander, &good, &there, 2).await;
    assert!(!bystander.repair().unwrap());

    assert!(initiator.repair().unwrap());
    assert!(!initiator.repair().unwrap(), "the initiator works already");
    assert_eq!(state(&initiator), QpState::Rts);
    assert_works(&here, &initiator, &good, &there, 4).await;
    for seed in 5..8 {
        within("failing", initiator.to(&bad).write(here.buffer(b"x"), there.remote(0, 1)))
            .await
            .unwrap_err();
        assert!(initiator.repair().unwrap());
        assert_works(&here, &initiator, &good, &there, seed).await;
    }
    assert_eq!(there.target.query().unwrap().0, QpState::Rtr);
}

/// The statuses that devices report for a missing target or another key.
const NO_ANSWER: [WcStatus; 4] = [
    WcStatus::RETRY_EXC_ERR,
    WcStatus::REM_INV_REQ_ERR,
    WcStatus::REM_ACCESS_ERR,
    WcStatus::REM_OP_ERR,
];

#[test]
fn wrong_key_fails_and_the_initiator_is_repaired() {
    run(1, "wrong key", async {
        fails_and_is_repaired(
            "wrong_key_fails_and_the_initiator_is_repaired",
            &NO_ANSWER,
            |there| {
                let address = there.target.address();
                DcAddress { key: DcKey(!address.key.0), ..address }
            },
        )
        .await;
    });
}

#[test]
fn unknown_target_fails_and_the_initiator_is_repaired() {
    run(1, "unknown target", async {
        fails_and_is_repaired(
            "unknown_target_fails_and_the_initiator_is_repaired",
            &NO_ANSWER,
            |there| {
                let dropped = DcTarget::new(&there.pd, &there.srq).unwrap();
                dropped.address()
            },
        )
        .await;
    });
}

#[test]
fn target_refuses_operations_it_does_not_allow() {
    run(1, "access", async {
        let refused = [WcStatus::REM_ACCESS_ERR, WcStatus::REM_INV_REQ_ERR];
        fails_and_is_repaired("target_refuses_operations_it_does_not_allow", &refused, |there| {
            let reads = DcTarget::builder(&there.pd, &there.srq)
                .access(Access::REMOTE_READ)
                .build()
                .unwrap();
            let address = reads.address();
            // The target must outlive this closure.
            std::mem::forget(reads);
            address
        })
        .await;
    });
}

#[test]
fn write_to_deregistered_memory_fails_the_initiator() {
    run(1, "key of memory", async {
        let Some(setup) = setup("write_to_deregistered_memory_fails_the_initiator") else {
            return;
        };
        let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
        let initiator = impatient(&here);
        let peer = initiator.peer(&there.target.address()).unwrap();
        let region =
            ExposedRegion::new(&there.pd, HostMemory::zeroed(64).unwrap(), Access::REMOTE_ALL)
                .unwrap();
        let remote = region.grant();
        drop(region);
        let error = within("write", initiator.to(&peer).write(here.buffer(b"x"), remote))
            .await
            .unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::REM_ACCESS_ERR));
        assert!(initiator.repair().unwrap());
        assert_works(&here, &initiator, &peer, &there, 1).await;
    });
}

// Shows S1.
#[test]
fn operations_end_when_the_target_is_destroyed_under_load() {
    run(3, "target gone", async {
        let Some(setup) = setup("operations_end_when_the_target_is_destroyed_under_load") else {
            return;
        };
        let (here, kept) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
        let initiator = impatient(&here);
        let stable = initiator.peer(&kept.target.address()).unwrap();
        for round in 0..8_u8 {
            let node = Node::within(&kept.pd, &kept.queue);
            let peer = initiator.peer(&node.target.address()).unwrap();
            let Node { target, srq, region, pool, .. } = node;
            let receives: Vec<_> = (0..8).map(|_| srq.recv(pool.try_alloc(64).unwrap())).collect();
            let remote = region.grant().slice(..64).unwrap();
            let bytes = pattern(64, round);
            let load: Vec<_> = (0..32)
                .map(|number| match number % 8 {
                    0 => initiator.to(&peer).send(here.buffer(&bytes)),
                    _ => initiator.to(&peer).write(here.buffer(&bytes), remote),
                })
                .collect();
            if round % 2 == 1 {
                tokio::task::yield_now().await;
            }
            drop(target);
            let memory: HostMemory = region.into_storage().expect("the region is unused");
            let (mut done, mut failed) = (0, 0);
            for operation in load {
                match within("load", operation).await {
                    Ok(_) => done += 1,
                    Err(error) => {
                        assert!(error.status().is_some(), "{error}");
                        failed += 1;
                    }
                }
            }
            assert_eq!(done + failed, 32);
            drop(memory);
            // Receives without a message fail when the shared queue is dropped.
            drop(srq);
            for receive in receives {
                match within("receive", receive).await {
                    Ok(received) => assert_eq!(&received.buffer[..], bytes),
                    Err(error) => assert!(matches!(error.kind(), OpErrorKind::Closed), "{error}"),
                }
            }
            assert_eq!(pool.available(), 64, "all buffers are returned");
            let late = initiator.to(&peer).write_inline(b"x", remote.slice(..1).unwrap());
            within("late", late).await.expect_err("the target is destroyed");
            assert!(initiator.repair().unwrap());
            assert_works(&here, &initiator, &stable, &kept, round).await;
            assert_eq!(here.pool.available(), 64);
        }
    });
}

#[test]
fn message_without_a_receive_waits_or_fails_as_configured() {
    run(1, "no receive", async {
        let Some(setup) = setup("message_without_a_receive_waits_or_fails_as_configured") else {
            return;
        };
        let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
        let hasty = impatient(&here);
        let peer = hasty.peer(&there.target.address()).unwrap();
        let error = within("send", hasty.to(&peer).send(here.buffer(b"early"))).await.unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::RNR_RETRY_EXC_ERR));
        assert!(hasty.repair().unwrap());
        assert_works(&here, &hasty, &peer, &there, 1).await;

        let patient = DcInitiator::new(&here.pd, &here.queue).unwrap();
        let mut send = patient.to(&peer).send(here.buffer(b"in time"));
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        assert!(poll(&mut send).is_pending());
        assert_works(&here, &hasty, &peer, &there, 2).await;
        let receive = there.srq.recv(there.pool.try_alloc(64).unwrap());
        within("send", send).await.unwrap();
        assert_eq!(&within("receive", receive).await.unwrap().buffer[..], b"in time");
    });
}

// The work includes operations whose futures are dropped.
// Shows S1.
#[test]
fn reset_fails_work_in_flight_and_queued() {
    run(1, "reset", async {
        let Some(setup) = setup("reset_fails_work_in_flight_and_queued") else { return };
        let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
        let initiator = DcInitiator::builder(&here.pd, &here.queue).max_send_wr(8).build().unwrap();
        let peer = initiator.peer(&there.target.address()).unwrap();
        for round in 0..4_u8 {
            let mut work = vec![initiator.to(&peer).send(here.buffer(b"stuck"))];
            work.extend((0..20).map(|_| {
                initiator.to(&peer).write(here.buffer(&[0xbb; 8]), there.remote(8192, 8))
            }));
            let abandoned = work.split_off(11);
            assert!(poll(&mut work[0]).is_pending());
            drop(abandoned);
            assert!(initiator.counters().waiting > 0);
            initiator.reset().unwrap();
            assert_eq!((initiator.counters().in_flight, initiator.counters().waiting), (0, 0));
            assert_eq!(
                here.pool.available(),
                64 - work.len(),
                "buffers of dropped operations are returned"
            );
            for operation in work {
                let error = within("stuck", operation).await.unwrap_err();
                let expected = matches!(error.kind(), OpErrorKind::Closed)
                    || error.status() == Some(WcStatus::WR_FLUSH_ERR);
                assert!(expected, "{error}");
            }
            assert_eq!((here.pool.available(), there.bytes(8192, 8)), (64, vec![0; 8]));
            assert_works(&here, &initiator, &peer, &there, round).await;
        }
    });
}

#[test]
fn initiators_and_targets_drop_in_any_order() {
    run(1, "order", async {
        let Some(setup) = setup("initiators_and_targets_drop_in_any_order") else { return };
        for order in 0..6 {
            let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
            let initiator = DcInitiator::new(&here.pd, &here.queue).unwrap();
            let peer = initiator.peer(&there.target.address()).unwrap();
            assert_works(&here, &initiator, &peer, &there, order).await;
            let Node { target, srq, region, pool, queue, pd } = there;
            // Stays in flight, because no receive is posted.
            let stuck = initiator.to(&peer).send(here.buffer(b"stuck"));
            let receive = |srq: &SharedReceiveQueue| srq.recv(pool.try_alloc(64).unwrap());
            match order {
                0 => {
                    drop((srq, queue, pd));
                    drop(target);
                    drop(initiator);
                }
                1 => {
                    drop(initiator);
                    drop((target, srq));
                }
                2 => {
                    drop(peer);
                    drop(initiator);
                    let (first, second) = (receive(&srq), receive(&srq));
                    drop(srq);
                    drop(target);
                    // The message may have reached the target before its initiator was dropped.
                    match within("first receive", first).await {
                        Ok(received) => assert_eq!(&received.buffer[..], b"stuck"),
                        Err(error) => assert_eq!(error.kind(), OpErrorKind::Closed, "{error}"),
                    }
                    let error = within("second receive", second)
                        .await
                        .expect_err("the message is delivered once");
                    assert_eq!(error.kind(), OpErrorKind::Closed, "{error}");
                }
                3 => {
                    let route: AddressHandle = here.pd.address_handle(peer.route()).unwrap();
                    drop((queue, pd, target));
                    drop(initiator);
                    drop(route);
                }
                4 => {
                    let (other, clone) = (target.clone(), initiator.clone());
                    drop((target, initiator));
                    let received = receive(&srq);
                    within("receive", received).await.unwrap();
                    drop((other, clone));
                }
                _ => drop((pd, queue, srq, initiator, target)),
            }
            // In order 4 a receive was posted; otherwise the send fails with its initiator.
            match within("stuck", stuck).await {
                Ok(_) => assert_eq!(order, 4),
                Err(error) => assert!(
                    error.status().is_some() || error.kind() == OpErrorKind::Closed,
                    "{error}"
                ),
            }
            assert_eq!(here.pool.available(), 64);
            drop(region);
        }
    });
}

#[test]
fn ten_thousand_addresses_through_eight_initiators() {
    const ADDRESSES: usize = 10_000;
    const TARGETS: usize = 200;
    run(3, "10,000 addresses", async {
        let Some(setup) = setup("ten_thousand_addresses_through_eight_initiators") else { return };
        let here = Node::new(&setup.a, "event");
        let initiators: Vec<_> = (0..8)
            .map(|_| DcInitiator::builder(&here.pd, &here.queue).max_send_wr(16).build().unwrap())
            .collect();
        let there = Node::new(&setup.b, "event");
        let targets: Vec<_> =
            (0..TARGETS).map(|_| DcTarget::new(&there.pd, &there.srq).unwrap()).collect();
        let words = ExposedRegion::new(
            &there.pd,
            HostMemory::zeroed(8 * ADDRESSES).unwrap(),
            Access::REMOTE_ALL,
        );
        let words = words.unwrap();
        let peers: Vec<_> = (0..ADDRESSES)
            .map(|at| {
                let bytes = targets[at % TARGETS].address().to_bytes();
                initiators[0].peer(&DcAddress::from_bytes(&bytes).unwrap()).unwrap()
            })
            .collect();
        let word = |at: usize| words.grant().slice(8 * at as u64..8 * at as u64 + 8).unwrap();
        for chunk in (0..ADDRESSES).collect::<Vec<_>>().chunks(1000) {
            let adds: Vec<_> = chunk
                .iter()
                .map(|&at| initiators[at % 8].to(&peers[at]).fetch_add(word(at), at as u64))
                .collect();
            for add in adds {
                let mut add = pin!(add);
                assert_eq!(within("add", &mut add).await.unwrap(), 0);
            }
        }
        for at in 0..ADDRESSES {
            assert_eq!(words.load(8 * at).unwrap(), at as u64);
        }
        assert!(initiators.iter().all(|initiator| initiator.counters().posted == 1250));
    });
}
