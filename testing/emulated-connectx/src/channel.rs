//! Completion channels and descriptors of asynchronous events.
//!
//! Each is one end of a `SOCK_SEQPACKET` pair, which keeps records apart. The descriptor is real,
//! so `poll(2)`, `epoll(7)` and `fcntl(2)` need no emulation.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::abi;
use crate::interpose;

#[derive(Debug)]
pub(crate) struct Channel {
    writer: OwnedFd,
    /// A duplicate of the program's end, by which unread records are removed.
    reader: OwnedFd,
    backlog: VecDeque<Vec<u8>>,
}

impl Channel {
    pub(crate) fn new() -> Result<(RawFd, Self), i32> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has space for two descriptors.
        let result = unsafe {
            libc::socketpair(
                libc::AF_UNIX,
                libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
                0,
                ends.as_mut_ptr(),
            )
        };
        if result != 0 {
            return Err(errno());
        }
        let [given, writer] = ends;
        // SAFETY: created above; nothing else owns it.
        let writer = unsafe { OwnedFd::from_raw_fd(writer) };
        // SAFETY: `given` is an open descriptor.
        let reader = unsafe { libc::fcntl(given, libc::F_DUPFD_CLOEXEC, 0) };
        if reader < 0 || !interpose::serves(given) {
            let errno = if reader < 0 { errno() } else { abi::EMFILE };
            // SAFETY: created above; the program does not know it yet.
            unsafe { libc::close(given) };
            return Err(errno);
        }
        // SAFETY: created above; nothing else owns it.
        let reader = unsafe { OwnedFd::from_raw_fd(reader) };
        Ok((given, Self { writer, reader, backlog: VecDeque::new() }))
    }

    pub(crate) fn send(&mut self, record: &[u8]) {
        self.backlog.push_back(record.to_vec());
        self.flush();
    }

    /// Sends queued records until the socket is full.
    pub(crate) fn flush(&mut self) {
        while let Some(record) = self.backlog.front() {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: the socket is open; pointer and length describe `record`.
            let sent = unsafe {
                libc::send(self.writer.as_raw_fd(), record.as_ptr().cast(), record.len(), flags)
            };
            if sent < 0 {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Removes the unread records that `unwanted` selects and returns their number.
    ///
    /// A record is either read by the program or removed here, never both. The sender can therefore
    /// compute how many were read.
    pub(crate) fn remove_unread(&mut self, unwanted: impl Fn(&[u8]) -> bool) -> u32 {
        let mut unread = VecDeque::new();
        let mut record = [0; 64];
        loop {
            let start = record.as_mut_ptr().cast();
            // SAFETY: the socket is open; pointer and length describe `record`.
            let len = unsafe {
                libc::recv(self.reader.as_raw_fd(), start, record.len(), libc::MSG_DONTWAIT)
            };
            match usize::try_from(len) {
                Ok(len) if len > 0 => unread.push_back(record[..len].to_vec()),
                _ => break,
            }
        }
        unread.append(&mut self.backlog);
        let before = unread.len();
        unread.retain(|record| !unwanted(record));
        let taken = before - unread.len();
        self.backlog = unread;
        self.flush();
        taken as u32
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Returns a record of a completion channel: `struct ib_uverbs_comp_event_desc`.
pub(crate) fn completion_event(cq: u64) -> Vec<u8> {
    cq.to_ne_bytes().to_vec()
}

/// Returns a record of an asynchronous event: `struct ib_uverbs_async_event_desc`.
pub(crate) fn async_event(element: u64, kind: u32) -> Vec<u8> {
    let mut record = element.to_ne_bytes().to_vec();
    record.extend(kind.to_ne_bytes());
    record.extend([0; 4]);
    record
}

pub(crate) fn element_of(record: &[u8]) -> Option<(u64, u32)> {
    let element = record.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))?;
    let kind = record.get(8..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))?;
    Some((element, kind))
}
