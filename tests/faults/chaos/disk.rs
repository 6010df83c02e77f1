//! The records of a server, which outlive it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// The requests that a server has executed.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    /// The increments of the server's counter, in their order.
    increments: Vec<u64>,
    /// Numbers that WRITEs have left in memory.
    written: Vec<u64>,
    /// The increments of a server that is a process.
    file: Option<File>,
}

impl Disk {
    /// Opens the records of a server that is a process, which may be running or killed.
    pub(crate) fn open(path: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path).expect("a record");
        let bytes = std::fs::read(path).expect("a record");
        let (ids, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "an increment is recorded by one write of eight bytes");
        let increments = ids.iter().map(|&id| u64::from_le_bytes(id)).collect();
        Self { increments, written: Vec::new(), file: Some(file) }
    }

    /// Increments the counter, and returns its value.
    pub(crate) fn increment(&mut self, id: u64) -> u64 {
        if let Some(file) = &mut self.file {
            file.write_all(&id.to_le_bytes()).expect("space for records");
        }
        self.increments.push(id);
        self.increments.len() as u64
    }

    /// Records a number that a WRITE has left.
    pub(crate) fn found(&mut self, id: u64) {
        self.written.push(id);
    }

    /// Returns the number of WRITEs.
    pub(crate) fn writes(&self) -> u64 {
        self.written.len() as u64
    }

    /// Returns all requests, and the value of the counter after those that increment it.
    pub(crate) fn executed(&self) -> impl Iterator<Item = (u64, Option<u64>)> {
        let increments = self.increments.iter().copied().zip((1..).map(Some));
        increments.chain(self.written.iter().map(|&id| (id, None)))
    }
}
