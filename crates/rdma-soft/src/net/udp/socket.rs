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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_short, c_void, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use rdma_provider::types::AddressVector;

use super::batch::{Batch, GROUPS};
use super::control_messages::{
    ErrorControl, ReceiveControls, SendControls, is_closed_port, read_controls, write_controls,
};
use super::interface::index_of;
use crate::roce::ip_fields::IpFields;

/// Maximum messages per receive.
const MESSAGES: usize = 16;
/// Maximum bytes of a message, limited by IP.
const MAX_MESSAGE: usize = 1 << 16;
/// Requested buffer, limited by `net.core.rmem_max`.
const RECEIVE_BUFFER: c_int = 4 << 20;

/// Hop limit of multicast, as of unicast.
const HOPS: c_int = AddressVector::DEFAULT_HOP_LIMIT as c_int;

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
        let socket = Self::new(UdpSocket::bind(address)?)?;
        // Multicast leaves by the interface of the address, with the hop limit of unicast.
        // Optional: an interface may lack multicast.
        let options = match address.ip() {
            IpAddr::V4(ip) => [
                (libc::IPPROTO_IP, libc::IP_MULTICAST_IF, c_int::from_ne_bytes(ip.octets())),
                (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, HOPS),
            ],
            IpAddr::V6(_) => [
                (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, index_of(address.ip()) as c_int),
                (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, HOPS),
            ],
        };
        for (level, option, value) in options {
            if let Err(error) = socket.set(level, option, value) {
                rdma_provider::debug!(
                    %address,
                    option,
                    %error,
                    "failed to set socket option; packets to multicast groups may be lost"
                );
            }
        }
        Ok(socket)
    }

    /// Binds `group`, beside the sockets of other members, and joins it on the interface that has
    /// the address `own` and the index `interface`.
    pub(super) fn join(group: SocketAddr, own: IpAddr, interface: u32) -> io::Result<Self> {
        let family = if group.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // SAFETY: S4: without memory. The descriptor is new, so nothing else owns it.
        let udp = unsafe {
            let fd = libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            UdpSocket::from(OwnedFd::from_raw_fd(fd))
        };
        set(&udp, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        let (mut group, ip) = (group, group.ip());
        if let SocketAddr::V6(v6) = &mut group {
            // Groups of a link have an interface.
            v6.set_scope_id(interface);
            set(&udp, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, interface as c_int)?;
        }
        let mut name = MaybeUninit::<sockaddr_storage>::zeroed();
        let length = write_address(group, 0, &mut name);
        // SAFETY: S4: the kernel reads `length` bytes of the address.
        if unsafe { libc::bind(udp.as_raw_fd(), name.as_ptr().cast(), length) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // Only packets that arrive at the interface, whatever other sockets have joined.
        match (ip, own) {
            (IpAddr::V4(ip), IpAddr::V4(own)) => {
                set(&udp, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
                udp.join_multicast_v4(&ip, &own)?;
            }
            (IpAddr::V6(ip), _) => udp.join_multicast_v6(&ip, interface)?,
            (IpAddr::V4(_), IpAddr::V6(_)) => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Self::new(udp)
    }

    fn new(udp: UdpSocket) -> io::Result<Self> {
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
        set(&self.udp, level, option, value)
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

fn set(socket: &UdpSocket, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    let length = mem::size_of::<c_int>() as socklen_t;
    // SAFETY: S4: the kernel reads `length` bytes of `value`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast::<c_void>(),
            length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
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
mod tests;
