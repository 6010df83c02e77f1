//! Completion channels and the descriptors of asynchronous events: a real descriptor each, one end of a socket pair that
//! keeps records apart, so that `poll(2)`, `epoll(7)` and `fcntl(2)` need nothing of us.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::abi;
use crate::interpose;

#[derive(Debug)]
pub(crate) struct Channel {
    writer: OwnedFd,
    /// Of the end that the program reads: takes back what it has not read when an object goes.
    reader: OwnedFd,
    /// Records for which the socket had no room.
    backlog: VecDeque<Vec<u8>>,
}

impl Channel {
    /// A channel, and the descriptor that the program is given.
    pub(crate) fn new() -> Result<(RawFd, Self), i32> {
        let mut ends = [0; 2];
        // SAFETY: room for the two descriptors.
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
        // SAFETY: made above, and ours.
        let writer = unsafe { OwnedFd::from_raw_fd(writer) };
        // SAFETY: as above.
        let reader = unsafe { libc::fcntl(given, libc::F_DUPFD_CLOEXEC, 0) };
        if reader < 0 || !interpose::serves(given) {
            let errno = if reader < 0 { errno() } else { abi::EMFILE };
            // SAFETY: made above, and not given to anyone.
            unsafe { libc::close(given) };
            return Err(errno);
        }
        // SAFETY: made above, and ours.
        let reader = unsafe { OwnedFd::from_raw_fd(reader) };
        Ok((given, Self { writer, reader, backlog: VecDeque::new() }))
    }

    pub(crate) fn send(&mut self, record: &[u8]) {
        self.backlog.push_back(record.to_vec());
        self.flush();
    }

    /// Writes what there is room for.
    pub(crate) fn flush(&mut self) {
        while let Some(record) = self.backlog.front() {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: a descriptor of ours, and the record's bytes.
            let sent = unsafe {
                libc::send(self.writer.as_raw_fd(), record.as_ptr().cast(), record.len(), flags)
            };
            if sent < 0 {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Takes back the records that the program has not read and `unwanted` picks; how many.
    ///
    /// A record is either read by the program or taken here, never both, so that who counts what was sent knows what was
    /// read.
    pub(crate) fn take_back(&mut self, unwanted: impl Fn(&[u8]) -> bool) -> u32 {
        let mut unread = VecDeque::new();
        let mut record = [0; 64];
        loop {
            let room = record.as_mut_ptr().cast();
            // SAFETY: a descriptor of ours, and room for its records.
            let len = unsafe {
                libc::recv(self.reader.as_raw_fd(), room, record.len(), libc::MSG_DONTWAIT)
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

/// What is read from a completion channel: `struct ib_uverbs_comp_event_desc`.
pub(crate) fn completion_event(cq: u64) -> Vec<u8> {
    cq.to_ne_bytes().to_vec()
}

/// What is read from the descriptor of asynchronous events: `struct ib_uverbs_async_event_desc`.
pub(crate) fn async_event(element: u64, kind: u32) -> Vec<u8> {
    let mut record = element.to_ne_bytes().to_vec();
    record.extend(kind.to_ne_bytes());
    record.extend([0; 4]);
    record
}

/// Whom an asynchronous event is about.
pub(crate) fn element_of(record: &[u8]) -> Option<(u64, u32)> {
    let element = record.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))?;
    let kind = record.get(8..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))?;
    Some((element, kind))
}
