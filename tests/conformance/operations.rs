//! Every operation on every transport in every completion mode, and its effects.

use tokio_rdma::error::LimitError;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::{Mtu, QpState, Qpn, Transport, WcFlags};
use tokio_rdma::{
    Access, Buf, BufMut, ExposedRegion, Imm, OpErrorKind, Pool, SetupError, SharedReceiveQueue,
};

use crate::common::pair::{Pair, QKEY, Shape, Side, connect, fenced};
use crate::common::{Setup, in_every_mode, pattern, run, rxe, transports, within};

const CONNECTED: [Transport; 2] = [Transport::Rc, Transport::Uc];
const ALL: [Transport; 3] = [Transport::Rc, Transport::Uc, Transport::Ud];

in_every_mode! {
    send_fills_the_next_receive,
    send_with_imm_delivers_data_and_immediate,
    inline_operations_copy_their_bytes_when_posted,
    write_reaches_exactly_its_range,
    write_with_imm_consumes_a_receive_and_reports_its_length,
    read_fills_the_whole_buffer,
    atomics_return_the_previous_value,
    lists_scatter_and_gather_in_order,
    zero_length_operations_complete,
    datagram_follows_its_header,
    shared_receives_serve_many_queue_pairs,
    fenced_write_waits_for_the_preceding_read,
    solicited_messages_carry_the_same_data,
    concurrent_operations_complete_in_order,
    lengths_around_packet_boundaries_arrive_whole,
}

/// Returns the flags that are defined for receives of a connection.
fn flags(setup: &Setup, flags: WcFlags) -> WcFlags {
    if setup.known(&rxe::GRH_ON_CONNECTIONS) { flags.difference(WcFlags::GRH) } else { flags }
}

async fn send_fills_the_next_receive(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, setup } = Pair::new(transport, mode);
        let receives = [b.qp.recv(b.blank(100)), b.qp.recv(b.blank(100))];
        for (len, receive) in [33, 100].into_iter().zip(receives) {
            let bytes = pattern(len, 1);
            let sent = a.qp.send(a.buffer(&bytes)).await.unwrap();
            assert_eq!(&sent[..], bytes, "the buffer is returned unchanged");
            let received = receive.await.unwrap();
            assert_eq!(&received.buffer[..], bytes);
            assert_eq!((received.len, received.imm, received.written), (len, None, false));
            assert_eq!(
                (received.qpn, flags(&setup, received.flags)),
                (b.qp.qpn(), WcFlags::empty())
            );
        }
        let receive = a.qp.recv(a.blank(10));
        b.qp.send(b.buffer(b"back").freeze()).await.unwrap();
        assert_eq!(&receive.await.unwrap().buffer[..], b"back");
    }
}

async fn send_with_imm_delivers_data_and_immediate(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, setup } = Pair::new(transport, mode);
        let receive = b.qp.recv(b.blank(16));
        a.qp.with_imm(Imm(0x0102_0304)).send(a.buffer(b"data")).await.unwrap();
        let received = receive.await.unwrap();
        assert_eq!((&received.buffer[..], received.imm), (&b"data"[..], Some(Imm(0x0102_0304))));
        assert_eq!((received.written, flags(&setup, received.flags)), (false, WcFlags::WITH_IMM));
    }
}

async fn inline_operations_copy_their_bytes_when_posted(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let region = b.region(64);
        let receives = [b.qp.recv(b.blank(64)), b.qp.recv(b.blank(64))];
        let mut bytes = pattern(64, 2);
        let first = a.qp.send_inline(&bytes);
        bytes.fill(0);
        let second = a.qp.send_inline(&bytes[..1]);
        bytes.fill(7);
        let write = a.qp.write_inline(&bytes[..8], region.grant());
        bytes.fill(1);
        first.await.unwrap();
        second.await.unwrap();
        write.await.unwrap();
        message(&a, &b).await;
        let [first, second] = receives;
        assert_eq!(&first.await.unwrap().buffer[..], pattern(64, 2));
        assert_eq!(&second.await.unwrap().buffer[..], [0]);
        assert_eq!(contents(&region, 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
    }
}

async fn write_reaches_exactly_its_range(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let region = b.region(8192);
        let source = a.buffer(&pattern(5001, 3)).freeze();
        let part = source.slice(1..).unwrap();
        let back: Buf = a.qp.write(part, region.grant().slice(7..).unwrap()).await.unwrap();
        assert_eq!(back.len(), 5000);
        // A UC completion means sent; a message posted after it arrives after the data.
        message(&a, &b).await;
        assert_eq!(contents(&region, 7, 5000), pattern(5001, 3)[1..]);
        assert_eq!(contents(&region, 0, 7), [0; 7]);
        assert!(contents(&region, 5007, 3185).iter().all(|&byte| byte == 0));
    }
}

async fn write_with_imm_consumes_a_receive_and_reports_its_length(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, setup } = Pair::new(transport, mode);
        let region = b.region(8192);
        let (first, second, third) = (b.qp.recv(b.blank(4)), b.qp.recv(()), b.qp.recv(()));
        let bytes = pattern(5000, 4);
        let target = region.grant().slice(100..).unwrap();
        a.qp.with_imm(Imm(u32::MAX)).write(a.buffer(&bytes), target).await.unwrap();
        a.qp.with_imm(Imm(0)).write((), target).await.unwrap();
        let received = first.await.unwrap();
        assert_eq!(
            (received.len, received.imm, received.written),
            (5000, Some(Imm(u32::MAX)), true)
        );
        let flags = flags(&setup, received.flags);
        assert_eq!(
            (received.buffer.len(), flags),
            (0, WcFlags::WITH_IMM),
            "its buffer is not used"
        );
        assert_eq!(contents(&region, 100, 5000), bytes);
        let received = second.await.unwrap();
        assert_eq!((received.len, received.imm, received.written), (0, Some(Imm(0)), true));
        let mut word = [1; 8];
        let write = a.qp.with_imm(Imm(3)).write_inline(&word, region.grant().slice(8..16).unwrap());
        word.fill(2);
        write.await.unwrap();
        let received = third.await.unwrap();
        assert_eq!((received.len, received.imm, received.written), (8, Some(Imm(3)), true));
        assert_eq!(contents(&region, 7, 10), [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
    }
}

async fn read_fills_the_whole_buffer(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let region = b.region(8192);
    region.write(0, &pattern(8192, 5)).unwrap();
    for (offset, len) in [(0, 8192), (3, 5001), (8191, 1)] {
        let remote = region.grant().slice(offset..offset + len).unwrap();
        let buffer = a.qp.read(a.blank(len as usize), remote).await.unwrap();
        assert_eq!(&buffer[..], &pattern(8192, 5)[offset as usize..][..len as usize]);
    }
    for transport in transports(&[Transport::Uc, Transport::Ud]) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let error = a.qp.read(a.blank(8), b.region(8).grant()).await.unwrap_err();
        assert_eq!(
            error.kind(),
            OpErrorKind::Unsupported { what: "READ (transport RC or DC required)" }
        );
        assert_eq!(error.into_buffer().len(), 8, "the buffer is returned");
    }
}

async fn atomics_return_the_previous_value(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let region = b.region(64);
    let word = region.grant().slice(16..24).unwrap();
    region.store(16, 40).unwrap();
    assert_eq!(a.qp.fetch_add(word, 2).await.unwrap(), 40);
    assert_eq!(region.load(16).unwrap(), 42);
    assert_eq!(a.qp.compare_swap(word, 41, 1).await.unwrap(), 42, "not equal: nothing is stored");
    assert_eq!(region.load(16).unwrap(), 42);
    assert_eq!(a.qp.compare_swap(word, 42, u64::MAX).await.unwrap(), 42);
    assert_eq!(a.qp.fetch_add(word, 3).await.unwrap(), u64::MAX);
    assert_eq!(region.load(16).unwrap(), 2, "addition wraps");
    assert_eq!((region.load(8).unwrap(), region.load(24).unwrap()), (0, 0));
    for transport in transports(&[Transport::Uc, Transport::Ud]) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let word = b.region(8).grant();
        let unsupported =
            OpErrorKind::Unsupported { what: "atomics (transport RC or DC required)" };
        assert_eq!(a.qp.fetch_add(word, 1).await.unwrap_err().kind(), unsupported);
        assert_eq!(a.qp.compare_swap(word, 0, 1).await.unwrap_err().kind(), unsupported);
    }
}

async fn lists_scatter_and_gather_in_order(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let bytes = pattern(6000, 6);
        let pieces = |side: &Side| {
            vec![side.buffer(&bytes[..1]), side.buffer(&bytes[1..1]), side.buffer(&bytes[1..5990])]
        };
        let mut gathered = pieces(&a);
        gathered.push(a.buffer(&bytes[5990..]));

        let receive = b.qp.recv(vec![b.blank(10), b.blank(5000), b.blank(3000)]);
        let back: Vec<BufMut> = a.qp.send(gathered).await.unwrap();
        assert_eq!(back.iter().map(|piece| piece.len()).collect::<Vec<_>>(), [1, 0, 5989, 10]);
        let received = receive.await.unwrap();
        assert_eq!(received.len, 6000);
        assert_eq!(
            received.buffer.iter().map(|piece| piece.len()).collect::<Vec<_>>(),
            [10, 5000, 990]
        );
        assert_eq!(
            received.buffer.iter().flat_map(|piece| piece.to_vec()).collect::<Vec<_>>(),
            bytes
        );

        let region = b.region(6000);
        a.qp.write(back, region.grant()).await.unwrap();
        message(&a, &b).await;
        assert_eq!(contents(&region, 0, 6000), bytes);
        if transport == Transport::Rc {
            let read =
                a.qp.read(vec![a.blank(4000), a.blank(2), a.blank(1998)], region.grant())
                    .await
                    .unwrap();
            assert_eq!(read.iter().flat_map(|piece| piece.to_vec()).collect::<Vec<_>>(), bytes);
        }
        // One element over the limit; empty elements do not count.
        let five = (0..5).map(|_| a.buffer(b"x")).collect::<Vec<_>>();
        let error = a.qp.send(five).await.unwrap_err();
        let allowed = u64::from(a.qp.caps().max_send_sge);
        let limit = LimitError { field: "scatter/gather elements (max_sge)", asked: 5, allowed };
        assert_eq!(error.kind(), OpErrorKind::Limit(limit));
        assert_eq!(error.into_buffer().len(), 5);
    }
}

async fn zero_length_operations_complete(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let region = b.region(8);
        let receives = [b.qp.recv(b.blank(8)), b.qp.recv(b.blank(8)), b.qp.recv(b.blank(8))];
        a.qp.send(()).await.unwrap();
        a.qp.send(a.buffer(b"")).await.unwrap();
        a.qp.send_inline(b"").await.unwrap();
        for receive in receives {
            let received = receive.await.unwrap();
            assert_eq!((received.len, received.buffer.len()), (0, 0));
        }
        let nowhere = region.grant().slice(8..).unwrap();
        a.qp.write((), nowhere).await.unwrap();
        a.qp.write_inline(b"", nowhere).await.unwrap();
        if transport == Transport::Rc {
            a.qp.read((), nowhere).await.unwrap();
        }
        let receive = b.qp.recv(());
        a.qp.with_imm(Imm(9)).send(()).await.unwrap();
        let received = receive.await.unwrap();
        assert_eq!((received.len, received.imm), (0, Some(Imm(9))));
        assert_eq!(contents(&region, 0, 8), [0; 8]);
        assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    }
}

async fn datagram_follows_its_header(mode: &str) {
    if transports(&[Transport::Ud]).next().is_none() {
        // The faults of the network lose datagrams.
        return;
    }
    let Pair { a, b, .. } = Pair::new(Transport::Ud, mode);
    let route = a.route_to(&b);
    for (len, imm) in [(0, None), (1, Some(Imm(5))), (4095, None), (4096, Some(Imm(6)))] {
        let receive = b.qp.recv(b.blank(5000));
        let bytes = pattern(len, 7);
        let sent = match imm {
            None => a.qp.send_to(a.buffer(&bytes), &route, b.qp.qpn(), QKEY).await,
            Some(imm) => {
                a.qp.with_imm(imm).send_to(a.buffer(&bytes), &route, b.qp.qpn(), QKEY).await
            }
        };
        assert_eq!(sent.unwrap().len(), len);
        let received = receive.await.unwrap();
        assert_eq!((received.len, received.imm, received.src_qpn), (40 + len, imm, a.qp.qpn()));
        // A datagram by LID has no header, but its 40 bytes are reserved.
        assert_eq!(received.flags.contains(WcFlags::GRH), route.address().dlid == 0);
        assert_eq!(&received.buffer[40..], bytes);
    }
    let error = a.qp.send_to(a.buffer(&[0; 4097]), &route, b.qp.qpn(), QKEY).await.unwrap_err();
    let limit = LimitError {
        field: "message bytes (the path MTU for datagrams)",
        asked: 4097,
        allowed: 4096,
    };
    assert_eq!(error.kind(), OpErrorKind::Limit(limit));
    let connected = OpErrorKind::Unsupported { what: "SEND without a destination; use send_to" };
    assert_eq!(a.qp.send(()).await.unwrap_err().kind(), connected);
    assert_eq!(a.qp.send_inline(b"x").await.unwrap_err().kind(), connected);
    let write = a.qp.write((), b.region(8).grant()).await.unwrap_err();
    assert_eq!(
        write.kind(),
        OpErrorKind::Unsupported { what: "WRITE (transport RC, UC or DC required)" }
    );
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let error = a.qp.send_to((), &a.route_to(&b), Qpn(7), QKEY).await.unwrap_err();
        assert_eq!(
            error.kind(),
            OpErrorKind::Unsupported { what: "datagrams (transport UD required)" }
        );
    }
}

async fn shared_receives_serve_many_queue_pairs(mode: &str) {
    for transport in transports(&ALL) {
        let setup = Setup::new();
        let shape = Shape::new(transport, mode);
        let pd = setup.b.protection_domain().unwrap();
        let queue = tokio_rdma::CompletionQueue::new(&setup.b, shape.mode.clone()).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &queue, 16, 2).unwrap();
        let pool = tokio_rdma::Pool::new(&pd, 4096, 16).unwrap();
        let server = || {
            let builder = tokio_rdma::QueuePair::builder(&pd, &queue)
                .transport(transport)
                .shared_receive_queue(&srq);
            let builder = if transport == Transport::Ud { builder.qkey(QKEY) } else { builder };
            builder.build().unwrap()
        };
        let servers = [server(), server()];
        let clients: Vec<_> = servers
            .iter()
            .map(|server| {
                let device = setup.a.clone();
                let pd = device.protection_domain().unwrap();
                let queue =
                    tokio_rdma::CompletionQueue::new(&device, crate::common::mode(mode)).unwrap();
                let builder = tokio_rdma::QueuePair::builder(&pd, &queue).transport(transport);
                let builder = if transport == Transport::Ud { builder.qkey(QKEY) } else { builder };
                let qp = builder.build().unwrap();
                connect(&qp, server, Mtu::Mtu4096, &tokio_rdma::op::RetryConfig::default());
                (qp, pd)
            })
            .collect();
        let mut receives =
            (0..6).map(|_| srq.recv(pool.try_alloc(200).unwrap())).collect::<Vec<_>>().into_iter();
        let header = if transport == Transport::Ud { 40 } else { 0 };
        for round in 0..3_u8 {
            for ((client, client_pd), server) in clients.iter().zip(&servers) {
                let bytes = pattern(100, round);
                let buffer = client_pd.register(bytes.clone()).unwrap();
                if transport == Transport::Ud {
                    let gid = server.endpoint().gid;
                    let index = setup.a.default_path().unwrap().1.index;
                    let mut address = tokio_rdma::types::AddressVector::new(
                        tokio_rdma::types::PortNum(1),
                        index,
                        gid,
                    );
                    address.dlid = server.endpoint().lid;
                    let route = client_pd.address_handle(&address).unwrap();
                    client.send_to(buffer, &route, server.qpn(), QKEY).await.unwrap();
                } else {
                    client.send(buffer).await.unwrap();
                }
                let received = receives.next().unwrap().await.unwrap();
                assert_eq!((received.qpn, received.len), (server.qpn(), header + 100));
                assert_eq!(&received.buffer[header..], bytes);
            }
        }
        let own = servers[0].recv(pool.try_alloc(8).unwrap()).await.unwrap_err();
        assert!(matches!(own.kind(), OpErrorKind::Unsupported { .. }), "{own}");
    }
}

async fn fenced_write_waits_for_the_preceding_read(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let region = b.region(8192);
    region.write(0, &pattern(8192, 8)).unwrap();
    let read = a.qp.read(a.blank(8192), region.grant());
    let write = a.qp.fenced().write(a.buffer(&[0; 8192]), region.grant());
    assert_eq!(&read.await.unwrap()[..], pattern(8192, 8));
    fenced(&a, region.grant(), write).await.unwrap();
    assert_eq!(contents(&region, 0, 8192), vec![0; 8192]);
}

async fn solicited_messages_carry_the_same_data(mode: &str) {
    for transport in transports(&CONNECTED) {
        let Pair { a, b, .. } = Pair::new(transport, mode);
        let receives = [b.qp.recv(b.blank(8)), b.qp.recv(b.blank(8))];
        let solicited = a.qp.solicited();
        solicited.send(a.buffer(b"first")).await.unwrap();
        let second = solicited.fenced().send(a.buffer(b"second"));
        fenced(&a, b.region(8).grant(), second).await.unwrap();
        for (receive, bytes) in receives.into_iter().zip([&b"first"[..], b"second"]) {
            assert_eq!(&receive.await.unwrap().buffer[..], bytes);
        }
    }
}

async fn concurrent_operations_complete_in_order(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let count = 400_u32;
    let receives: Vec<_> = (0..count).map(|_| b.qp.recv(b.blank(4))).collect();
    let sends: Vec<_> = (0..count).map(|at| a.qp.send(a.buffer(&at.to_be_bytes()))).collect();
    for (at, (send, receive)) in sends.into_iter().zip(receives).enumerate() {
        send.await.unwrap();
        let bytes: [u8; 4] = receive.await.unwrap().buffer[..].try_into().unwrap();
        assert_eq!(u32::from_be_bytes(bytes), at as u32);
    }
    let counters = a.qp.send_counters();
    assert_eq!((counters.posted, counters.waiting, counters.failed), (u64::from(count), 0, 0));
}

async fn lengths_around_packet_boundaries_arrive_whole(mode: &str) {
    for transport in transports(&CONNECTED) {
        for mtu in Mtu::ALL {
            let packet = mtu.bytes();
            let lengths = [0, 1, packet - 1, packet, packet + 1, 2 * packet, 3 * packet + 5];
            let long = (mtu == Mtu::Mtu1024).then_some(1 << 20);
            let largest = long.unwrap_or(3 * packet + 5);
            let shape = Shape { mtu, buffer_size: largest, ..Shape::new(transport, mode) };
            let Pair { a, b, .. } = Pair::shaped(Setup::new(), &shape);
            let region = b.region(largest);
            for len in lengths.into_iter().chain(long) {
                round_trip(&a, &b, &region, len).await;
            }
        }
    }
}

async fn round_trip(a: &Side, b: &Side, region: &tokio_rdma::ExposedRegion, len: usize) {
    let what = format!("{:?}, {len} bytes", a.qp.transport());
    let bytes = pattern(len, 9);
    region.write(0, &vec![0; len]).unwrap();
    let receive = b.qp.recv(b.blank(len));
    let buffer = within(&what, a.qp.send(a.buffer(&bytes))).await.unwrap();
    let received = within(&what, receive).await.unwrap();
    assert_eq!(received.len, len, "{what}");
    assert!(received.buffer[..] == bytes, "{what}: the message differs");

    let notice = b.qp.recv(());
    let remote = region.grant().slice(..len as u64).unwrap();
    let buffer = within(&what, a.qp.with_imm(Imm(1)).write(buffer, remote)).await.unwrap();
    assert_eq!(within(&what, notice).await.unwrap().len, len, "{what}");
    assert!(contents(region, 0, len) == bytes, "{what}: the written bytes differ");
    drop(buffer);

    if a.qp.transport() == Transport::Rc {
        let read = within(&what, a.qp.read(a.blank(len), remote)).await.unwrap();
        assert!(read[..] == bytes, "{what}: the read bytes differ");
    }
}

/// Sends a message from `a` to `b`; earlier WRITEs of `a` have then arrived.
async fn message(a: &Side, b: &Side) {
    let receive = b.qp.recv(());
    a.qp.send(()).await.unwrap();
    receive.await.unwrap();
}

fn contents(region: &tokio_rdma::ExposedRegion, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

// Huge pages are used if the system has some, on-demand paging if the device supports it.
#[test]
fn memory_of_every_kind_is_written_and_read() {
    run(1, "memory_of_every_kind", async {
        let Pair { a, b, .. } = Pair::new(Transport::Rc, "event");
        let on_demand = b.pd.device().attr().on_demand_paging;
        for access in [Access::REMOTE_ALL, Access::REMOTE_ALL | Access::ON_DEMAND] {
            let memory = HostMemory::huge((2 << 20) + 5000).unwrap();
            let region = match ExposedRegion::new(&b.pd, memory, access) {
                Err(SetupError::Unsupported { what })
                    if !on_demand && access.contains(Access::ON_DEMAND) =>
                {
                    assert_eq!(what, "the device lacks on-demand paging");
                    continue;
                }
                region => region.unwrap(),
            };
            let pool =
                Pool::builder(&a.pd).buffer_size(5000).buffers(3).huge_pages(true).build().unwrap();
            let bytes = pattern(5000, 9);
            let end = region.grant().slice(2 << 20..(2 << 20) + 5000).unwrap();
            let buffer =
                within("write", a.qp.write(pool.copy_from(&bytes).unwrap(), end)).await.unwrap();
            drop(buffer);
            let read = within("read", a.qp.read(pool.try_alloc(5000).unwrap(), end)).await.unwrap();
            assert!(read[..] == bytes[..]);
            assert_eq!(region.into_storage::<HostMemory>().unwrap().len(), (2 << 20) + 5000);
        }
    });
}
