//! A model of the contents that WRITEs may leave in memory.

#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub(crate) index: usize,
    pub(crate) at: usize,
    pub(crate) bytes: &'static [u8],
}

impl Write {
    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at.checked_sub(self.at)?).copied()
    }
}

/// The WRITEs to memory that has no other writer.
#[derive(Debug)]
pub(crate) struct Model {
    initial: &'static [u8],
    writes: Vec<Write>,
    newest: Vec<u8>,
}

impl Model {
    pub(crate) fn new(initial: &'static [u8]) -> Self {
        Self { initial, writes: Vec::new(), newest: initial.to_vec() }
    }

    pub(crate) fn write(&mut self, index: usize, at: usize, bytes: &'static [u8]) {
        self.newest[at..at + bytes.len()].copy_from_slice(bytes);
        self.writes.push(Write { index, at, bytes });
    }

    pub(crate) fn newest(&self) -> &[u8] {
        &self.newest
    }

    /// Checks the bytes `found` at `at`: each is from `base` or from one of WRITEs `first..end`,
    /// which may or may not have been executed.
    pub(crate) fn check(
        &self,
        what: &str,
        found: &[u8],
        at: usize,
        base: &[u8],
        first: usize,
        end: usize,
    ) {
        assert_eq!(found.len(), base.len());
        if found == base {
            return;
        }
        for (offset, (&found, &base)) in found.iter().zip(base).enumerate() {
            let mut later = self.writes.iter().filter(|write| (first..end).contains(&write.index));
            let right = found == base || later.any(|write| write.byte(at + offset) == Some(found));
            assert!(
                right,
                "{what}: byte {offset} at {at} is {found}, expected {base}; \
                 WRITEs {first}..{end} are in flight"
            );
        }
    }

    /// Returns the contents after all WRITEs before `index`.
    pub(crate) fn before(&self, index: usize) -> Vec<u8> {
        let mut image = self.initial.to_vec();
        for write in self.writes.iter().filter(|write| write.index < index) {
            image[write.at..write.at + write.bytes.len()].copy_from_slice(write.bytes);
        }
        image
    }
}
