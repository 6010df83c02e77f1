//! Tests of the socket.

use std::net::Ipv4Addr;

use super::*;
use crate::roce::icrc::Header;

fn pair(ip: IpAddr) -> (Socket, Socket) {
    let bind = || Socket::bind(SocketAddr::new(ip, 0)).unwrap();
    (bind(), bind())
}

fn header_between(from: &Socket, to: &Socket) -> Header {
    let (from, to) = (from.local(), to.local());
    Header {
        source: from.ip(),
        source_port: from.port(),
        destination: to.ip(),
        destination_port: to.port(),
    }
}

fn plain(to: SocketAddr) -> (SocketAddr, IpFields) {
    (to, IpFields::default())
}

fn exchange(ip: IpAddr, lengths: &[usize]) {
    let (from, to) = pair(ip);
    let header = header_between(&from, &to);
    let mut batch = Batch::new();
    for (at, &length) in lengths.iter().enumerate() {
        assert!(batch.has_capacity());
        batch.push(&header, plain(to.local()), true, |out| {
            out.extend(std::iter::repeat_n(at as u8, length))
        });
    }
    from.send(&batch).unwrap();
    let mut inbox = Inbox::new();
    let mut received = 0;
    while received < lengths.len() {
        to.receive(&mut inbox, true).unwrap();
        for Datagram { source, segment, bytes, .. } in inbox.datagrams() {
            assert_eq!(source, from.local());
            let (covered, check) = bytes.split_last_chunk::<4>().unwrap();
            assert_eq!(covered, vec![received as u8; lengths[received]]);
            assert!(
                header.verify(covered, u32::from_le_bytes(*check), segment),
                "{received}: as the kernel sends it"
            );
            received += 1;
        }
    }
}

#[test]
fn datagrams_arrive_whole_and_in_order() {
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        exchange(ip, &[12]);
        exchange(ip, &[16, 1040, 1036, 1036, 1036, 20, 12, 12, 12, 4110, 4110]);
        exchange(ip, &[4112; 15]);
        exchange(ip, &[4112; 24]);
    }
}

#[test]
fn packets_carry_the_ip_fields_of_their_path() {
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let (from, to) = pair(ip);
        let header = header_between(&from, &to);
        let default = IpFields::default();
        let flow_label = if ip.is_ipv4() { 0 } else { 0xf_a3b7 };
        let cases = [
            default,
            IpFields { traffic_class: 105, ..default },
            IpFields { traffic_class: 184, hop_limit: 8, flow_label },
            IpFields { hop_limit: 255, ..default },
            IpFields { flow_label, ..default },
        ];
        for ip_fields in cases {
            // Alone, and with a segment size.
            for count in [1, 3] {
                let mut batch = Batch::new();
                for _ in 0..count {
                    let path = (to.local(), ip_fields);
                    batch.push(&header, path, true, |out| out.extend_from_slice(&[7; 12]));
                }
                from.send(&batch).unwrap();
                let (mut inbox, mut arrived) = (Inbox::new(), 0);
                while arrived < count {
                    to.receive(&mut inbox, true).unwrap();
                    for datagram in inbox.datagrams() {
                        assert_eq!(datagram.ip_fields, ip_fields);
                        arrived += 1;
                    }
                }
            }
        }
    }
}

#[test]
fn members_of_a_group_receive_each_packet_on_their_interface() {
    // Groups of this process, on the loopback interface.
    let [b, c] = (std::process::id() as u16).to_be_bytes();
    for (ip, group) in [
        (Ipv4Addr::LOCALHOST.into(), IpAddr::from([239, 254, b, c])),
        (
            IpAddr::V6(Ipv6Addr::LOCALHOST),
            IpAddr::from([0xff15, 0, 0, 0, 0, 0, 0xfe, 0x0100 | u16::from(c)]),
        ),
    ] {
        let (from, _) = pair(ip);
        let port = from.local().port();
        let to = SocketAddr::new(group, port);
        let join = || Socket::join(to, ip, index_of(ip)).unwrap();
        let members = [join(), join()];
        let header =
            Header { source: ip, source_port: port, destination: group, destination_port: port };
        let mut batch = Batch::new();
        let plain = IpFields::default();
        batch.push(&header, (to, plain), true, |out| out.extend_from_slice(&[7; 12]));
        if let Err((_, error)) = from.send(&batch) {
            // `ip -6 route add local ff00::/8 dev lo` adds the route.
            assert!(ip.is_ipv6() && error.raw_os_error() == Some(libc::ENETUNREACH), "{error}");
            continue;
        }
        for member in &members {
            let mut inbox = Inbox::new();
            member.receive(&mut inbox, true).unwrap();
            let Datagram { source, segment, bytes, .. } = inbox.datagrams().next().unwrap();
            let (covered, check) = bytes.split_last_chunk::<4>().unwrap();
            assert_eq!((source.ip(), covered), (ip, &[7; 12][..]));
            assert!(header.verify(covered, u32::from_le_bytes(*check), segment));
        }
        drop(members);
        from.send(&batch).unwrap();
        assert!(!from.is_readable(), "a socket of the address receives no multicast");
    }
}

#[test]
fn closed_port_is_reported_with_the_packet_and_impedes_no_other() {
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let (from, to) = pair(ip);
        // The kernel assigns no port below 1024 to the sockets of other tests.
        let closed = SocketAddr::new(ip, 1);
        let send = |to, fill: u8| {
            let mut batch = Batch::new();
            batch.push_sealed(&[fill; 300], plain(to));
            from.send(&batch).unwrap();
        };
        let mut inbox = Inbox::new();
        for round in 0..20 {
            send(closed, round);
            let mut reported = Vec::new();
            while reported.is_empty() {
                from.receive(&mut inbox, true).unwrap();
                let refusals = inbox.refusals().map(|(to, packet)| (to, packet.to_vec()));
                reported.extend(refusals);
            }
            assert_eq!(reported, [(closed, vec![round; 300])]);
            // The report of the first one is pending while the others are sent.
            send(closed, 100);
            send(to.local(), round);
            send(from.local(), round);
            for socket in [&to, &from] {
                let mut arrived = Vec::new();
                while arrived.is_empty() {
                    socket.receive(&mut inbox, true).unwrap();
                    arrived.extend(inbox.datagrams().map(|datagram| datagram.bytes.to_vec()));
                }
                assert_eq!(arrived, [[round; 300]]);
            }
            while from.is_readable() {
                from.receive(&mut inbox, false).unwrap();
                assert!(inbox.refusals().all(|(to, packet)| to == closed && packet[0] == 100));
            }
        }
    }
}

#[test]
fn closed_port_is_reported_although_a_later_send_takes_the_error() {
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let (from, to) = pair(ip);
        let closed = SocketAddr::new(ip, 1);
        let send = |to: &[SocketAddr]| {
            let mut batch = Batch::new();
            to.iter().for_each(|&to| batch.push_sealed(&[7; 300], plain(to)));
            from.send(&batch).unwrap();
        };
        // The error is pending when the first or the second packet is sent.
        for later in [&[to.local()][..], &[closed, to.local()]] {
            send(&[closed]);
            while !from.is_readable() {
                std::thread::yield_now();
            }
            send(later);
            let mut inbox = Inbox::new();
            from.receive(&mut inbox, false).unwrap();
            let refused: Vec<_> = inbox.refusals().map(|(to, _)| to).collect();
            assert!(refused.contains(&closed));
            while from.is_readable() {
                from.receive(&mut inbox, true).unwrap();
            }
        }
    }
}

#[test]
fn many_reports_of_closed_ports_do_not_fail_a_receive() {
    let (from, _) = pair(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let closed = SocketAddr::new(from.local().ip(), 1);
    // As many as the receive buffer holds, which may be fewer.
    for _ in 0..2 * ERRORS * ATTEMPTS {
        let mut batch = Batch::new();
        batch.push_sealed(&[7; 20], plain(closed));
        from.send(&batch).unwrap();
    }
    while from.is_readable() {
        from.receive(&mut Inbox::new(), false).unwrap();
    }
}

#[test]
fn closed_port_whose_report_is_lost_is_no_error_of_the_socket() {
    let (from, to) = pair(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let send = |from: &Socket, to| {
        let mut batch = Batch::new();
        batch.push_sealed(&[7; 300], plain(to));
        from.send(&batch).unwrap();
    };
    from.limit_receive_buffer(4096).unwrap();
    (0..100).for_each(|_| send(&to, from.local()));
    // The buffer is full, so that the kernel notes the error without a report.
    send(&from, SocketAddr::new(from.local().ip(), 1));
    let mut inbox = Inbox::new();
    from.receive(&mut inbox, true).unwrap();
    assert!(inbox.datagrams().count() > 0 && inbox.refusals().count() == 0);
}

#[test]
fn refused_packets_are_counted_and_all_others_are_sent() {
    let (from, to) = pair(IpAddr::V4(Ipv4Addr::LOCALHOST));
    // An IPv4 socket cannot send there.
    let refused = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 1);
    let mut batch = Batch::new();
    for (fill, to) in [refused, to.local(), refused, refused, to.local()].iter().enumerate() {
        batch.push_sealed(&[fill as u8; 100], plain(*to));
    }
    let (lost, error) = from.send(&batch).unwrap_err();
    assert_eq!((lost, error.raw_os_error()), (3, Some(libc::EAFNOSUPPORT)));
    let (mut inbox, mut arrived) = (Inbox::new(), Vec::new());
    while arrived.len() < 2 {
        to.receive(&mut inbox, true).unwrap();
        arrived.extend(inbox.datagrams().map(|datagram| datagram.bytes[0]));
    }
    assert_eq!(arrived, [1, 4]);
}

#[test]
fn closing_ends_waiting() {
    let socket = std::sync::Arc::new(Socket::bind("127.0.0.1:0".parse().unwrap()).unwrap());
    let waiting = std::sync::Arc::clone(&socket);
    let waiter = std::thread::spawn(move || {
        let mut inbox = Inbox::new();
        let result = waiting.receive(&mut inbox, true);
        (result.is_ok(), inbox.datagrams().count())
    });
    std::thread::sleep(std::time::Duration::from_millis(20));
    socket.close();
    assert_eq!(waiter.join().unwrap().1, 0);
}

#[test]
fn route_of_loopback_takes_the_largest_packets() {
    let socket = Socket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    assert!(socket.route_mtu("127.0.0.2:4791".parse().unwrap()).unwrap() > 4096 + 80);
}
