//! Completion queues, channels, shared receive queues, slots and states.

use super::*;
use rdma_provider::VerbError;
use rdma_provider::contract::{Channel as _, CqInit, Srq as _};
use rdma_provider::types::{DirectConfig, SrqCaps, WcStatus};

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

/// Returns true if a read would not block. The descriptor is a socket pair, so a peek equals
/// `poll(2)`.
fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let stream = std::os::unix::net::UnixStream::from(fd.as_fd().try_clone_to_owned().unwrap());
    let mut byte = [0];
    match (&stream).read(&mut byte) {
        Ok(_) => panic!("a test must not take the byte: use `peeked`"),
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
            false
        }
    }
}

#[test]
fn channel_descriptor_is_not_readable_without_events() {
    let network = Network::new();
    let context = network.open("a").unwrap();
    let channel = context.create_channel().unwrap();
    assert!(!is_readable(channel.fd()));
    assert_eq!(channel.next_event().unwrap(), None);
    assert!(!is_readable(context.event_fd()));
}

fn with_channel(network: &Network) -> (End, End, Channel) {
    let options = Options::default();
    let (a, mut b) = (End::new(network, "a", &options), End::new(network, "b", &options));
    let channel = b.context.create_channel().unwrap();
    let cq = b
        .context
        .create_cq(&CqInit { channel: Some(&channel), cookie: 77, ..CqInit::new(64) })
        .unwrap();
    let init = QpInit {
        transport: Transport::Rc,
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        caps: options.caps,
        direct: DirectConfig::DEFAULT,
    };
    b.qp = b.pd.create_qp(&init).unwrap();
    b.cq = cq;
    connect(&a, &b, &options);
    for id in 0..16 {
        b.recv(id, &[]).unwrap();
    }
    (a, b, channel)
}

fn send_solicited(a: &End, solicited: bool) {
    let flags =
        if solicited { SendFlags::SOLICITED | SendFlags::SIGNALED } else { SendFlags::SIGNALED };
    a.send_with(1, SendOp::Send, flags, Data::Sges(&[])).unwrap();
}

#[test]
fn arm_is_one_shot_and_ignores_queued_completions() {
    let (a, b, channel) = with_channel(&Network::new());
    send_solicited(&a, false);
    b.cq.arm(false).unwrap();
    assert_eq!(channel.next_event().unwrap(), None);
    send_solicited(&a, false);
    send_solicited(&a, false);
    assert_eq!(channel.next_event().unwrap(), Some(77));
    assert_eq!(channel.next_event().unwrap(), None);
    assert!(!is_readable(channel.fd()));
    b.cq.ack(1);
    assert_eq!(b.poll().len(), 3);
}

#[test]
fn solicited_arm_waits_for_solicited_or_failed() {
    let (a, b, channel) = with_channel(&Network::new());
    b.cq.arm(true).unwrap();
    send_solicited(&a, false);
    assert_eq!(channel.next_event().unwrap(), None);
    send_solicited(&a, true);
    assert_eq!(channel.next_event().unwrap(), Some(77));
    b.cq.arm(true).unwrap();
    b.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    assert_eq!(channel.next_event().unwrap(), Some(77));
    b.cq.ack(2);
}

#[test]
fn arm_for_next_is_not_weakened() {
    let (a, b, channel) = with_channel(&Network::new());
    b.cq.arm(false).unwrap();
    b.cq.arm(true).unwrap();
    send_solicited(&a, false);
    assert_eq!(channel.next_event().unwrap(), Some(77));
    b.cq.ack(1);
}

#[test]
fn events_of_a_dropped_queue_are_removed() {
    let (a, b, channel) = with_channel(&Network::new());
    b.cq.arm(false).unwrap();
    send_solicited(&a, false);
    drop(b);
    assert_eq!(channel.next_event().unwrap(), None);
    assert!(!is_readable(channel.fd()));
}

#[test]
fn overrun_fails_the_queue_and_its_queue_pairs() {
    let options = Options { cqe: 2, ..Options::default() };
    let (a, b) = connected(&Network::new(), &options);
    let (from, to) = (a.buffer(8), b.buffer(8));
    for id in 0..3 {
        a.send(id, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]).unwrap();
    }
    let error = a.cq.poll(&mut [WorkCompletion::default()]).unwrap_err();
    assert_eq!(error.errno, VerbError::EIO);
    assert!(a.cq.poll(&mut [WorkCompletion::default()]).is_err());
    assert_eq!(a.state(), QpState::Err);
    let expected = [AsyncEvent::CqError { cq: a.cq.id() }, AsyncEvent::QpFatal(a.qp.qpn())];
    assert_eq!(a.events(), expected);
    assert_eq!(b.state(), QpState::Rts);
}

#[test]
fn polling_a_completion_frees_send_slots_up_to_it() {
    let caps = QpCaps { max_send_wr: 4, ..Options::default().caps };
    let (a, b) = connected(&Network::new(), &Options { caps, ..Options::default() });
    let to = b.buffer(8);
    let post = |flags| a.send_with(1, SendOp::Write(to.remote(0)), flags, Data::Inline(&[1; 8]));
    for _ in 0..3 {
        post(SendFlags::empty()).unwrap();
    }
    post(SendFlags::SIGNALED).unwrap();
    let full = post(SendFlags::empty()).unwrap_err();
    assert_eq!((full.posted, full.error.errno), (0, VerbError::ENOMEM));
    assert_eq!(a.poll().len(), 1);
    for _ in 0..4 {
        post(SendFlags::empty()).unwrap();
    }
    assert_eq!(post(SendFlags::SIGNALED).unwrap_err().error.errno, VerbError::ENOMEM);
}

#[test]
fn receive_queue_is_full_until_completions_are_polled() {
    let caps = QpCaps { max_recv_wr: 2, ..Options::default().caps };
    let (a, b) = connected(&Network::new(), &Options { caps, ..Options::default() });
    b.recv(1, &[]).unwrap();
    b.recv(2, &[]).unwrap();
    assert_eq!(b.recv(3, &[]).unwrap_err().error.errno, VerbError::ENOMEM);
    send_solicited(&a, false);
    assert_eq!(b.recv(3, &[]).unwrap_err().error.errno, VerbError::ENOMEM);
    assert_eq!(b.poll().len(), 1);
    b.recv(3, &[]).unwrap();
}

#[test]
fn posting_depends_on_the_queue_pair_state() {
    let network = Network::new();
    let options = Options::default();
    let (a, b) = (End::new(&network, "a", &options), End::new(&network, "b", &options));
    let refused =
        |result: Result<(), PostError>| result.unwrap_err().error.errno == VerbError::EINVAL;
    assert!(refused(a.send(1, SendOp::Send, &[])) && refused(a.recv(1, &[])));
    a.to_init(&options);
    b.to_init(&options);
    assert!(refused(a.send(1, SendOp::Send, &[])));
    a.recv(1, &[]).unwrap();
    a.to_rtr(&options, &b);
    b.to_rtr(&options, &a);
    assert!(refused(a.send(1, SendOp::Send, &[])));
    b.to_rts(&options);
    b.send(2, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&a.poll()), [(1, WcStatus::SUCCESS)]);
    assert_eq!(a.events(), [AsyncEvent::CommunicationEstablished(a.qp.qpn())]);
    a.to_rts(&options);
    a.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    a.recv(3, &[]).unwrap();
    a.send_with(4, SendOp::Send, SendFlags::empty(), Data::Sges(&[])).unwrap();
    assert_eq!(outcome(&a.poll()), [(3, WcStatus::WR_FLUSH_ERR), (4, WcStatus::WR_FLUSH_ERR)]);
    a.recv(5, &[]).unwrap();
    a.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    assert_eq!(a.poll(), []);
    assert_eq!(a.qp.query().unwrap(), (QpState::Reset, QpAttr::to_state(QpState::Reset)));
}

#[test]
fn refused_modifications_change_nothing() {
    let (a, _b) = connected(&Network::new(), &Options::default());
    let before = a.qp.query().unwrap();
    let rts = QpAttr::default();
    for attr in [
        QpAttr { current_state: Some(QpState::Rtr), ..rts },
        QpAttr::to_state(QpState::Init),
        QpAttr { path_mtu: Some(Mtu::Mtu256), ..rts },
        QpAttr { state: Some(QpState::Sqd), timeout: Some(AckTimeout::from_code(1)), ..rts },
    ] {
        assert_eq!(a.qp.modify(&attr).unwrap_err().errno, VerbError::EINVAL, "{attr:?}");
        assert_eq!(a.qp.query().unwrap(), before);
    }
    a.qp.modify(&QpAttr::to_state(QpState::Sqd)).unwrap();
    let sqd = QpAttr::default();
    for attr in [
        QpAttr { pkey_index: Some(1), ..sqd },
        QpAttr { port: Some(PortNum(2)), ..sqd },
        QpAttr { retry_count: Some(8), ..sqd },
        QpAttr { max_rd_atomic: Some(17), ..sqd },
        QpAttr { address: Some(AddressVector::new(PortNum(1), 1, a.address().dgid)), ..sqd },
    ] {
        assert_eq!(a.qp.modify(&attr).unwrap_err().errno, VerbError::EINVAL, "{attr:?}");
    }
}

#[test]
fn drained_send_queue_notifies_and_delays_new_work() {
    let network = Network::simulated(3, Faults::none());
    let (a, b) = connected(&network, &Options::default());
    let (from, to) = (a.buffer(3000), b.buffer(3000));
    a.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 3000)]).unwrap();
    a.qp.modify(&QpAttr { notify_drained: Some(true), ..QpAttr::to_state(QpState::Sqd) }).unwrap();
    a.send(2, SendOp::Write(to.remote(0)), &[from.sge(0, 3000)]).unwrap();
    assert_eq!(a.events(), []);
    assert!(network.run_until_idle(Duration::from_secs(1)));
    assert_eq!(outcome(&a.poll()), [(1, WcStatus::SUCCESS)]);
    assert_eq!(a.events(), [AsyncEvent::SendQueueDrained(a.qp.qpn())]);
    a.qp.modify(&QpAttr::to_state(QpState::Rts)).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(2, WcStatus::SUCCESS)]);
}

#[test]
fn shared_receive_queue_serves_queue_pairs_and_reports_its_limit() {
    let network = Network::new();
    let options = Options::default();
    let context = network.open("server").unwrap();
    let pd = context.create_pd().unwrap();
    let cq = context.create_cq(&CqInit::new(64)).unwrap();
    let srq = pd.create_srq(SrqCaps { max_wr: 4, max_sge: 1 }).unwrap();
    let buffer = Buffer::new(&pd, 64, Access::LOCAL_WRITE);
    let post = |id: u64| {
        let sges = [buffer.sge(id as usize * 8, 8)];
        // SAFETY: the buffer outlives the queue.
        unsafe { srq.post_recv(&[RecvWr { wr_id: WrId(id), sges: &sges }]) }
    };
    let pairs: Vec<_> = (0..2)
        .map(|index| {
            let client = End::new(&network, &format!("client{index}"), &options);
            let init = QpInit {
                transport: Transport::Rc,
                send_cq: &cq,
                recv_cq: &cq,
                srq: Some(&srq),
                caps: options.caps,
                direct: DirectConfig::DEFAULT,
            };
            let qp = pd.create_qp(&init).unwrap();
            let server = End {
                qp,
                cq: context.create_cq(&CqInit::new(1)).unwrap(),
                pd: context.create_pd().unwrap(),
                context: network.open("server").unwrap(),
                network: network.clone(),
            };
            connect(&client, &server, &options);
            assert_eq!(server.recv(1, &[]).unwrap_err().error.errno, VerbError::EINVAL);
            (client, server)
        })
        .collect();
    (0..4).for_each(|id| post(id).unwrap());
    assert_eq!(post(4).unwrap_err().error.errno, VerbError::ENOMEM);
    assert_eq!(srq.set_limit(5).unwrap_err().errno, VerbError::EINVAL);
    srq.set_limit(2).unwrap();
    for (index, (client, _)) in pairs.iter().chain(&pairs).enumerate().take(3) {
        let flags = SendFlags::SIGNALED;
        client.send_with(1, SendOp::Send, flags, Data::Inline(&[index as u8; 8])).unwrap();
        assert_eq!(client.wait(1)[0].status, WcStatus::SUCCESS);
    }
    let event = context.next_event().unwrap();
    assert_eq!(
        (event, srq.limit().unwrap()),
        (Some(AsyncEvent::SrqLimitReached { srq: srq.id() }), 0)
    );
    let mut out = [WorkCompletion::default(); 8];
    assert_eq!(cq.poll(&mut out).unwrap(), 3);
    assert_eq!(out[..3].iter().map(|done| done.wr_id.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(buffer.bytes(8, 8), [1; 8]);
    (5..8).for_each(|id| post(id).unwrap());
    // Unused receives are not flushed. The queue pair reports that it takes no more.
    let server = &pairs[0].1;
    server.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    assert_eq!(cq.poll(&mut out).unwrap(), 0);
    assert_eq!(context.next_event().unwrap(), Some(AsyncEvent::LastWqeReached(server.qp.qpn())));
}

#[test]
fn lost_device_flushes_work_and_reports_device_fatal() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &Options { timeout: 1, ..Options::default() });
        a.recv(1, &[]).unwrap();
        network.control("a").unwrap().kill();
        assert_eq!(outcome(&a.poll()), [(1, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(a.context.next_event().unwrap(), Some(AsyncEvent::DeviceFatal));
        assert_eq!(a.context.next_event().unwrap_err().errno, VerbError::ENODEV);
        assert_eq!(a.context.create_pd().unwrap_err().errno, VerbError::EIO);
        a.send(2, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&a.poll()), [(2, WcStatus::WR_FLUSH_ERR)]);
        b.send(3, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(3, WcStatus::RETRY_EXC_ERR)]);
        drop((a, b));
        assert!(network.control("a").is_none());
        network.open("a").unwrap();
    }
}

#[test]
fn port_outage_only_delays_work() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &Options::default());
        let control = network.control("b").unwrap();
        control.set_port(false);
        let to = b.buffer(8);
        a.send_with(1, SendOp::Write(to.remote(0)), SendFlags::SIGNALED, Data::Inline(&[1; 8]))
            .unwrap();
        assert_eq!(a.poll(), []);
        control.set_port(true);
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
        assert_eq!(
            b.events(),
            [AsyncEvent::PortError(PortNum(1)), AsyncEvent::PortActive(PortNum(1))]
        );
    }
}

#[test]
fn same_name_opens_the_same_device() {
    let network = Network::new();
    let (a, again, b) =
        (network.open("a").unwrap(), network.open("a").unwrap(), network.open("b").unwrap());
    let gid = |context: &Context| context.port(PortNum(1)).unwrap().gids[0].gid;
    assert_eq!(gid(&a), gid(&again));
    assert_ne!(gid(&a), gid(&b));
    assert_eq!(a.port(PortNum(2)).unwrap_err().errno, VerbError::EINVAL);
}

#[test]
fn many_queue_pairs_share_a_completion_queue() {
    // Each pair opens the device: two descriptors, of which a process has 1024 by default.
    const PAIRS: usize = 200;
    let network = Network::new();
    let options = Options {
        caps: QpCaps { max_send_wr: 16384, ..Options::default().caps },
        ..Options::default()
    };
    let a = End::new(&network, "a", &options);
    let cq = a.context.create_cq(&CqInit::new(PAIRS as u32 * 2)).unwrap();
    let target = a.buffer(PAIRS * 8);
    let end = || {
        let init = QpInit {
            transport: Transport::Rc,
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            caps: options.caps,
            direct: DirectConfig::DEFAULT,
        };
        let context = network.open("a").unwrap();
        let pd = context.create_pd().unwrap();
        let unused = context.create_cq(&CqInit::new(1)).unwrap();
        End {
            qp: a.pd.create_qp(&init).unwrap(),
            cq: unused,
            pd,
            context,
            network: network.clone(),
        }
    };
    let pairs: Vec<_> = (0..PAIRS).map(|_| (end(), end())).collect();
    for (from, to) in &pairs {
        connect(from, to, &options);
    }
    for (index, (from, _)) in pairs.iter().enumerate() {
        let op = SendOp::Write(target.remote(index * 8));
        from.send_with(
            index as u64,
            op,
            SendFlags::SIGNALED,
            Data::Inline(&(index as u64).to_ne_bytes()),
        )
        .unwrap();
    }
    let mut out = vec![WorkCompletion::default(); PAIRS];
    assert_eq!(cq.poll(&mut out).unwrap(), PAIRS);
    for (index, done) in out.iter().enumerate() {
        assert_eq!((done.wr_id.0, done.qpn), (index as u64, pairs[index].0.qp.qpn()));
        assert_eq!(target.word(index * 8), index as u64);
    }
    drop(pairs);
    assert_eq!(cq.poll(&mut out).unwrap(), 0);
}
