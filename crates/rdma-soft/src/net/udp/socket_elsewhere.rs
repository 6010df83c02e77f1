//! Socket stub for systems that, unlike Linux, do not define the IPv4 identification.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use super::batch::Batch;
use crate::roce::ip_fields::IpFields;

/// An uninhabited type.
#[derive(Debug)]
pub(super) enum Socket {}

impl Socket {
    pub(super) fn bind(_: SocketAddr) -> io::Result<Self> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    pub(super) fn join(_: SocketAddr, _: IpAddr, _: u32) -> io::Result<Self> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    pub(super) const fn local(&self) -> SocketAddr {
        match *self {}
    }

    pub(super) fn route_mtu(&self, _: SocketAddr) -> io::Result<usize> {
        match *self {}
    }

    #[cfg(test)]
    pub(super) fn limit_receive_buffer(&self, _: i32) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn receive(&self, _: &mut Inbox, _: bool) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn is_readable(&self) -> bool {
        match *self {}
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    pub(super) fn send(&self, _: &Batch) -> Result<(), (u64, io::Error)> {
        match *self {}
    }

    pub(super) fn close(&self) {
        match *self {}
    }
}

pub(super) struct Datagram<'a> {
    pub(super) source: SocketAddr,
    pub(super) ip_fields: IpFields,
    pub(super) segment: u16,
    pub(super) bytes: &'a [u8],
}

pub(super) struct Inbox;

impl Inbox {
    pub(super) const fn new() -> Self {
        Self
    }

    pub(super) const fn is_full(&self) -> bool {
        false
    }

    pub(super) const fn is_empty(&self) -> bool {
        true
    }

    pub(super) fn refusals(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        std::iter::empty()
    }

    pub(super) fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        std::iter::empty()
    }
}
