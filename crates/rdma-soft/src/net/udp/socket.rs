//! A UDP socket with many datagrams per system call, and the options that the ICRC requires.
//!
//! Linux only. It writes identification 0 and "don't fragment" into IPv4 headers of an unconnected
//! socket with path MTU discovery, or the segment number for `UDP_SEGMENT` (`udp(7)`): measured on
//! 6.1 and 6.18. `UDP_GRO` joins datagrams that arrive together.

// These system calls have no safe wrapper in the dependencies.
#![allow(unsafe_code)]

use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_short, c_void, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use super::batch::{Batch, GROUPS};
use super::control_messages::{
    ErrorControl, ReceiveControls, SendControls, is_closed_port, read_controls, write_controls,
};
use crate::roce::ip_fields::IpFields;

/// Maximum messages per receive.
const MESSAGES: usize = 16;
/// Maximum bytes of a message, limited by IP.
const MAX_MESSAGE: usize = 1 << 16;
/// Requested buffer, limited by `net.core.rmem_max`.
const RECEIVE_BUFFER: c_int = 4 << 20;

/// Bytes kept of a packet that its host has refused. A connection request is shorter.
const QUOTE: usize = 512;
/// Maximum errors read at once, and attempts to receive despite errors.
const ERRORS: usize = 64;
const ATTEMPTS: usize = 8;

#[derive(Debug)]
pub(super) struct Socket {
    udp: UdpSocket,
    local: SocketAddr,
    /// A send may have taken the pending error, which the next receive then does not report.
    error_taken: AtomicBool,
}

impl Socket {
    pub(super) fn bind(address: SocketAddr) -> io::Result<Self> {
        let udp = UdpSocket::bind(address)?;
        // A blocking receive could miss packets while another thread polls: asked whether a
        // blocking socket is readable, Linux moves packets to a queue that the sleeping receiver
        // has already checked (`first_packet_length` in net/ipv4/udp.c). Seen on 6.1 with UC
        // messages.
        udp.set_nonblocking(true)?;
        let local = udp.local_addr()?;
        let socket = Self { udp, local, error_taken: AtomicBool::new(false) };
        if local.is_ipv4() {
            socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        } else {
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
            // SoftRoCE sends no UDP checksum.
            socket.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
        }
        let of_ip: &[(c_int, c_int)] = if local.is_ipv4() {
            &[(libc::IP_RECVERR, 1), (libc::IP_RECVTOS, 1), (libc::IP_RECVTTL, 1)]
        } else {
            &[
                (libc::IPV6_RECVERR, 1),
                (libc::IPV6_RECVTCLASS, 1),
                (libc::IPV6_RECVHOPLIMIT, 1),
                (libc::IPV6_FLOWINFO, 1),
                (libc::IPV6_FLOWINFO_SEND, 1),
                // Otherwise the kernel makes up a flow label for packets whose path has none.
                (libc::IPV6_AUTOFLOWLABEL, 0),
            ]
        };
        let level = if local.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
        let of_ip = of_ip.iter().map(|&(option, value)| (level, option, value));
        // Optional: they reduce system calls and loss, report closed ports, and pass the fields of
        // IP headers.
        for (level, option, value) in of_ip.chain([
            (libc::SOL_UDP, libc::UDP_GRO, 1),
            (libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER),
            (libc::SOL_SOCKET, libc::SO_SNDBUF, RECEIVE_BUFFER),
        ]) {
            if let Err(error) = socket.set(level, option, value) {
                rdma_provider::debug!(
                    %local,
                    level,
                    option,
                    %error,
                    "failed to set socket option; more system calls, losses or time-outs"
                );
            }
        }
        Ok(socket)
    }

    pub(super) const fn local(&self) -> SocketAddr {
        self.local
    }

    /// Returns the MTU of the route in bytes of an IP packet.
    pub(super) fn route_mtu(&self, peer: SocketAddr) -> io::Result<usize> {
        let mut local = self.local;
        local.set_port(0);
        let probe = UdpSocket::bind(local)?;
        probe.connect(peer)?;
        let (level, option) = if peer.is_ipv4() {
            (libc::IPPROTO_IP, libc::IP_MTU)
        } else {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU)
        };
        let (mut value, mut length): (c_int, _) = (0, mem::size_of::<c_int>() as socklen_t);
        // SAFETY: S4: the kernel writes at most `length` bytes, the size of `value`.
        let result = unsafe {
            libc::getsockopt(
                probe.as_raw_fd(),
                level,
                option,
                (&raw mut value).cast::<c_void>(),
                &raw mut length,
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(usize::try_from(value).unwrap_or(0))
        }
    }

    fn set(&self, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
        let length = mem::size_of::<c_int>() as socklen_t;
        // SAFETY: S4: the kernel reads `length` bytes of `value`.
        let result = unsafe {
            libc::setsockopt(
                self.udp.as_raw_fd(),
                level,
                option,
                (&raw const value).cast::<c_void>(),
                length,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Limits the buffer like `net.core.rmem_max`.
    #[cfg(test)]
    pub(super) fn limit_receive_buffer(&self, limit: c_int) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_RCVBUF, limit)
    }

    /// Receives pending messages; `wait`: at least one, or none after [`close`](Self::close).
    pub(super) fn receive(&self, inbox: &mut Inbox, wait: bool) -> io::Result<()> {
        inbox.count = 0;
        inbox.refusals.clear();
        let reported = wait && self.poll(-1)? & libc::POLLERR != 0;
        if reported || self.error_taken.load(Ordering::Relaxed) {
            self.error_taken.store(false, Ordering::Relaxed);
            self.take_errors(&mut inbox.refusals);
        }
        let mut vectors: [libc::iovec; MESSAGES] =
            [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES];
        // SAFETY: S4: all-zero is an empty header, filled below.
        let mut headers: [libc::mmsghdr; MESSAGES] = unsafe { mem::zeroed() };
        let buffers = inbox.bytes.chunks_exact_mut(MAX_MESSAGE);
        let places = buffers.zip(inbox.names.iter_mut()).zip(&mut inbox.controls);
        for ((vector, header), ((buffer, name), control)) in
            vectors.iter_mut().zip(&mut headers).zip(places)
        {
            *vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: MAX_MESSAGE };
            let message = &mut header.msg_hdr;
            message.msg_iov = vector;
            message.msg_iovlen = 1;
            message.msg_name = name.as_mut_ptr().cast();
            message.msg_namelen = mem::size_of::<sockaddr_storage>() as socklen_t;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = mem::size_of::<ReceiveControls>() as _;
        }
        let mut attempts = 0;
        let count = loop {
            // SAFETY: S4: headers name memory of `inbox` and `vectors` with its length; both
            // outlive the call and nothing else refers to them.
            let count = unsafe {
                let (headers, count) = (headers.as_mut_ptr(), MESSAGES as u32);
                libc::recvmmsg(
                    self.udp.as_raw_fd(),
                    headers,
                    count,
                    libc::MSG_DONTWAIT as _,
                    ptr::null_mut(),
                )
            };
            if let Ok(count) = usize::try_from(count) {
                break count;
            }
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::WouldBlock {
                return Ok(());
            }
            // The call reports the error of a packet sent before, once. The report itself may be
            // missing: the kernel drops it while the receive buffer is full.
            self.take_errors(&mut inbox.refusals);
            attempts += 1;
            if attempts == ATTEMPTS {
                // An error that lasts is reported by the next call.
                return if inbox.refusals.is_empty() { Err(error) } else { Ok(()) };
            }
        };
        for ((arrival, header), name) in
            inbox.arrivals.iter_mut().zip(&headers[..count]).zip(inbox.names.iter())
        {
            let message = &header.msg_hdr;
            let length = header.msg_len as usize;
            // SAFETY: S4: the kernel has written `msg_namelen` bytes of the address.
            let source = unsafe { address_of(name, message.msg_namelen) };
            let whole = message.msg_flags & libc::MSG_TRUNC == 0;
            let source = source.filter(|_| whole && length <= MAX_MESSAGE);
            let (segment, ip_fields) = read_controls(message);
            let segment = segment.unwrap_or(length).max(1);
            *arrival = Arrival { source, ip_fields, length, segment };
        }
        inbox.count = count;
        Ok(())
    }

    /// Reads the errors of packets sent before, which ICMP messages have reported, and adds
    /// reports of closed ports to `refusals`.
    fn take_errors(&self, refusals: &mut Vec<Refusal>) {
        for _ in 0..ERRORS {
            let mut name = MaybeUninit::<sockaddr_storage>::zeroed();
            let (mut packet, mut control): ([u8; QUOTE], ErrorControl) = ([0; QUOTE], [0; 16]);
            let mut vector =
                libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
            // SAFETY: S4: all-zero is an empty header, filled below.
            let mut message: libc::msghdr = unsafe { mem::zeroed() };
            message.msg_iov = &raw mut vector;
            message.msg_iovlen = 1;
            message.msg_name = name.as_mut_ptr().cast();
            message.msg_namelen = mem::size_of::<sockaddr_storage>() as socklen_t;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = mem::size_of::<ErrorControl>() as _;
            // SAFETY: S4: the header names the memory above with its length, which outlives the
            // call.
            let length = unsafe {
                let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
                libc::recvmsg(self.udp.as_raw_fd(), &raw mut message, flags)
            };
            let Ok(length) = usize::try_from(length) else { return };
            // SAFETY: S4: the kernel has written `msg_namelen` bytes of the address.
            let to = unsafe { address_of(&name, message.msg_namelen) };
            if let Some(to) = to.filter(|_| is_closed_port(&message)) {
                refusals.push(Refusal { to, packet: packet[..length].to_vec() });
            }
        }
    }

    /// Returns true if a packet or an error is pending or the socket is closed.
    pub(super) fn is_readable(&self) -> bool {
        self.poll(0).is_ok_and(|events| events != 0)
    }

    /// Waits `timeout` ms (-1: no limit) for a packet, an error or closure; returns the events.
    fn poll(&self, timeout: c_int) -> io::Result<c_short> {
        let mut wanted =
            libc::pollfd { fd: self.udp.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: S4: the kernel accesses the one element passed.
        let ready = unsafe { libc::poll(&raw mut wanted, 1, timeout) };
        if ready < 0 { Err(io::Error::last_os_error()) } else { Ok(wanted.revents) }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }

    /// Sends a batch. Refused packets are lost: returns their number and the first reason.
    pub(super) fn send(&self, batch: &Batch) -> Result<(), (u64, io::Error)> {
        let groups = batch.groups();
        let mut names = [const { MaybeUninit::<sockaddr_storage>::uninit() }; GROUPS];
        let mut vectors: [libc::iovec; GROUPS] =
            [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; GROUPS];
        let mut controls: [SendControls; GROUPS] = [[0; 9]; GROUPS];
        // SAFETY: S4: all-zero is an empty header, filled below.
        let mut headers: [libc::mmsghdr; GROUPS] = unsafe { mem::zeroed() };
        let places = names.iter_mut().zip(&mut vectors).zip(&mut controls).zip(&mut headers);
        for (group, (((name, vector), control), header)) in groups.iter().zip(places) {
            let bytes = batch.bytes_of(group);
            // The kernel only reads, but `iovec` is mutable.
            *vector =
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let message = &mut header.msg_hdr;
            message.msg_iov = vector;
            message.msg_iovlen = 1;
            message.msg_namelen = write_address(group.to, group.ip_fields.flow_label, name);
            message.msg_name = name.as_mut_ptr().cast();
            write_controls(group, message, control);
        }
        let (mut at, mut lost, mut failed_at) = (0, None, None);
        while at < groups.len() {
            let rest = &mut headers[at..groups.len()];
            // SAFETY: S4: headers name memory of `batch` and of the arrays above with its length;
            // all outlive the call, which only reads them.
            let sent = unsafe {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                libc::sendmmsg(
                    self.udp.as_raw_fd(),
                    rest.as_mut_ptr(),
                    rest.len() as u32,
                    flags as _,
                )
            };
            // If packets were sent before, the call does not report the error that it has taken.
            if sent < rest.len() as c_int {
                self.error_taken.store(true, Ordering::Relaxed);
            }
            match usize::try_from(sent) {
                Ok(sent) if sent > 0 => at += sent,
                _ => {
                    let error = io::Error::last_os_error();
                    // The error may be of a packet sent before. It is reported once.
                    let is_first = failed_at.replace(at) != Some(at);
                    if error.kind() == io::ErrorKind::Interrupted
                        || is_first && error.kind() != io::ErrorKind::WouldBlock
                    {
                        continue;
                    }
                    let count = u64::from(groups[at].count);
                    let (before, first) = lost.take().unwrap_or((0, error));
                    lost = Some((before + count, first));
                    at += 1;
                }
            }
        }
        lost.map_or(Ok(()), Err)
    }

    /// Ends current and later calls of [`receive`](Self::receive).
    pub(super) fn close(&self) {
        // SAFETY: S4: no memory is passed. It wakes receivers despite ENOTCONN (`shutdown(2)`).
        unsafe { libc::shutdown(self.udp.as_raw_fd(), libc::SHUT_RD) };
    }
}

/// Buffers for received messages.
pub(super) struct Inbox {
    bytes: Box<[u8]>,
    names: Box<[MaybeUninit<sockaddr_storage>; MESSAGES]>,
    controls: [ReceiveControls; MESSAGES],
    arrivals: [Arrival; MESSAGES],
    count: usize,
    refusals: Vec<Refusal>,
}

/// A packet for a port that no process of the destination has.
struct Refusal {
    to: SocketAddr,
    /// The packet, or its start.
    packet: Vec<u8>,
}

/// A message: datagrams of one sender, the last may be shorter.
#[derive(Debug, Clone, Copy, Default)]
struct Arrival {
    /// `None` if the message must be ignored.
    source: Option<SocketAddr>,
    ip_fields: IpFields,
    length: usize,
    segment: usize,
}

/// A datagram that has arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Datagram<'a> {
    pub(super) source: SocketAddr,
    pub(super) ip_fields: IpFields,
    /// Its index in a message that the kernel has joined.
    pub(super) segment: u16,
    pub(super) bytes: &'a [u8],
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; MAX_MESSAGE * MESSAGES].into_boxed_slice(),
            names: Box::new([const { MaybeUninit::zeroed() }; MESSAGES]),
            controls: [ReceiveControls::default(); MESSAGES],
            arrivals: [Arrival::default(); MESSAGES],
            count: 0,
            refusals: Vec::new(),
        }
    }

    /// Returns the destinations and the first bytes of packets for closed ports, which a forger may
    /// have sent.
    pub(super) fn refusals(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        self.refusals.iter().map(|refusal| (refusal.to, &*refusal.packet))
    }

    /// Returns true if more messages may be pending.
    pub(super) const fn is_full(&self) -> bool {
        self.count == MESSAGES
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        let buffers = self.bytes.chunks_exact(MAX_MESSAGE);
        let messages = self.arrivals[..self.count].iter().zip(buffers);
        let known =
            messages.filter_map(|(arrival, buffer)| Some((arrival.source?, arrival, buffer)));
        known.flat_map(|(source, arrival, buffer)| {
            let datagrams = buffer[..arrival.length].chunks(arrival.segment);
            let ip_fields = arrival.ip_fields;
            datagrams.zip(0..).map(move |(bytes, segment)| Datagram {
                source,
                ip_fields,
                segment,
                bytes,
            })
        })
    }
}

/// Reads a sender's address.
///
/// # Safety
///
/// `name` holds an address of `length` bytes.
unsafe fn address_of(
    name: &MaybeUninit<sockaddr_storage>,
    length: socklen_t,
) -> Option<SocketAddr> {
    let length = length as usize;
    // SAFETY: S4: family and length are checked before either layout is read; both consist of
    // integers, for which any bytes are valid. The storage is initialised, and aligned for both.
    unsafe {
        let family = name.as_ptr().cast::<libc::sa_family_t>().read();
        match c_int::from(family) {
            libc::AF_INET if length >= mem::size_of::<sockaddr_in>() => {
                let v4 = name.as_ptr().cast::<sockaddr_in>().read();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 if length >= mem::size_of::<sockaddr_in6>() => {
                let v6 = name.as_ptr().cast::<sockaddr_in6>().read();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddr::V6(SocketAddrV6::new(
                    ip,
                    u16::from_be(v6.sin6_port),
                    0,
                    v6.sin6_scope_id,
                )))
            }
            _ => None,
        }
    }
}

/// Writes an address and returns its length.
fn write_address(
    address: SocketAddr,
    flow_label: u32,
    name: &mut MaybeUninit<sockaddr_storage>,
) -> socklen_t {
    match address {
        SocketAddr::V4(v4) => write_v4(v4, name),
        SocketAddr::V6(v6) => write_v6(v6, flow_label, name),
    }
}

fn write_v4(address: SocketAddrV4, name: &mut MaybeUninit<sockaddr_storage>) -> socklen_t {
    let v4 = sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: S4: the storage fits any address.
    unsafe { name.as_mut_ptr().cast::<sockaddr_in>().write(v4) };
    mem::size_of::<sockaddr_in>() as socklen_t
}

fn write_v6(
    address: SocketAddrV6,
    flow_label: u32,
    name: &mut MaybeUninit<sockaddr_storage>,
) -> socklen_t {
    let v6 = sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: address.port().to_be(),
        sin6_flowinfo: flow_label.to_be(),
        sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
        sin6_scope_id: address.scope_id(),
    };
    // SAFETY: S4: the storage fits any address.
    unsafe { name.as_mut_ptr().cast::<sockaddr_in6>().write(v6) };
    mem::size_of::<sockaddr_in6>() as socklen_t
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::roce::icrc::Header;

    fn pair(ip: IpAddr) -> (Socket, Socket) {
        let bind = || Socket::bind(SocketAddr::new(ip, 0)).unwrap();
        (bind(), bind())
    }

    fn plain(to: SocketAddr) -> (SocketAddr, IpFields) {
        (to, IpFields::default())
    }

    fn exchange(ip: IpAddr, lengths: &[usize]) {
        let (from, to) = pair(ip);
        let header = Header {
            source: ip,
            source_port: from.local().port(),
            destination: ip,
            destination_port: to.local().port(),
        };
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
            let header = Header {
                source: ip,
                source_port: from.local().port(),
                destination: ip,
                destination_port: to.local().port(),
            };
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
}
