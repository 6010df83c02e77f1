//! Control messages of a UDP socket (`cmsg(3)`): what a packet has besides address and payload.

// Control messages have no safe wrapper in the dependencies.
#![allow(unsafe_code)]

use std::mem;

use libc::c_int;

use super::batch::Group;
use crate::roce::ip_fields::IpFields;

/// Space of segment size, traffic class, hop limit and flow label, aligned for their headers.
pub(super) type ReceiveControls = [u64; 12];
/// Space of segment size, traffic class and hop limit.
pub(super) type SendControls = [u64; 9];
/// Space of an error with an address.
pub(super) type ErrorControl = [u64; 16];

/// Sets the segment size of several datagrams, and what differs from the kernel's defaults.
pub(super) fn write_controls(
    group: &Group,
    message: &mut libc::msghdr,
    controls: &mut SendControls,
) {
    if group.count > 1 {
        let kind = (libc::SOL_UDP, libc::UDP_SEGMENT);
        write_control(message, controls, kind, group.segment as u16);
    }
    // The flow label is part of the address.
    let (plain, IpFields { traffic_class, hop_limit, .. }) = (IpFields::default(), group.ip_fields);
    let (class_kind, hops_kind) = if group.to.is_ipv4() {
        ((libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IP, libc::IP_TTL))
    } else {
        ((libc::IPPROTO_IPV6, libc::IPV6_TCLASS), (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT))
    };
    if traffic_class != plain.traffic_class {
        write_control(message, controls, class_kind, c_int::from(traffic_class));
    }
    if hop_limit != plain.hop_limit {
        write_control(message, controls, hops_kind, c_int::from(hop_limit));
    }
}

/// Appends a control message with an integer.
fn write_control<T: Copy>(
    message: &mut libc::msghdr,
    controls: &mut SendControls,
    (level, kind): (c_int, c_int),
    value: T,
) {
    const { assert!(mem::size_of::<T>() <= mem::size_of::<c_int>()) };
    let size = mem::size_of::<T>() as u32;
    let at: usize = message.msg_controllen as _;
    message.msg_control = controls.as_mut_ptr().cast();
    // SAFETY: S4: at most three control messages of an integer are appended to an empty header, for
    // which `controls` has space. Each occupies a multiple of the alignment of a header.
    unsafe {
        let header = controls.as_mut_ptr().cast::<u8>().add(at).cast::<libc::cmsghdr>();
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(size) as _;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        message.msg_controllen = (at + libc::CMSG_SPACE(size) as usize) as _;
    }
}

/// Returns the length of joined datagrams, if several, and the fields of their IP headers, which
/// are equal: the kernel joins no others (`inet_gro_receive`, `ipv6_gro_receive`).
pub(super) fn read_controls(message: &libc::msghdr) -> (Option<usize>, IpFields) {
    let (mut segment, mut ip_fields) = (None, IpFields::default());
    // SAFETY: S4: the kernel has written `msg_controllen` bytes, within which the macros stay; an
    // integer is read only where a header announces it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let (data, length) = (libc::CMSG_DATA(header), (*header).cmsg_len as usize);
            let has = |bytes: usize| length >= libc::CMSG_LEN(bytes as u32) as usize;
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if kind == (libc::IPPROTO_IP, libc::IP_TOS) && has(1) {
                ip_fields.traffic_class = data.read();
            } else if has(mem::size_of::<c_int>()) {
                let value = data.cast::<c_int>().read_unaligned();
                match kind {
                    (libc::SOL_UDP, libc::UDP_GRO) => {
                        segment = usize::try_from(value).ok().filter(|&size| size > 0);
                    }
                    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                        ip_fields.traffic_class = value as u8
                    }
                    (libc::IPPROTO_IP, libc::IP_TTL)
                    | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                        ip_fields.hop_limit = value as u8
                    }
                    (libc::IPPROTO_IPV6, libc::IPV6_FLOWINFO) => {
                        ip_fields.flow_label = u32::from_be(value as u32) & 0xf_ffff;
                    }
                    _ => {}
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    (segment, ip_fields)
}

/// Returns true if an ICMP message reports a closed port.
pub(super) fn is_closed_port(message: &libc::msghdr) -> bool {
    type Report = libc::sock_extended_err;
    const SIZE: u32 = mem::size_of::<Report>() as u32;
    // SAFETY: S4: the kernel has written `msg_controllen` bytes, within which the macros stay; a
    // report, which consists of integers, is read only where a header announces it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if matches!(
                kind,
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            ) && (*header).cmsg_len as usize >= libc::CMSG_LEN(SIZE) as usize
            {
                let report = libc::CMSG_DATA(header).cast::<Report>().read_unaligned();
                return report.ee_errno == libc::ECONNREFUSED as u32
                    && matches!(
                        report.ee_origin,
                        libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6
                    );
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    false
}
