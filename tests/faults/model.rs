//! What memory may look like.

/// A WRITE, as it was posted.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    /// Work request.
    pub(crate) index: usize,
    pub(crate) at: usize,
    pub(crate) bytes: &'static [u8],
}

impl Write {
    /// Byte that it leaves at `at`.
    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at.checked_sub(self.at)?).copied()
    }
}

/// All WRITEs to a piece of memory that nobody else writes.
#[derive(Debug)]
pub(crate) struct Model {
    initial: &'static [u8],
    writes: Vec<Write>,
    /// All of them done.
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

    /// Panics unless each byte of `found`, from `at`, is that of `base` or of one of the WRITEs from `first` to
    /// before `end`, which may or may not have been executed yet.
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
                "{what}: byte {offset} at {at} is {found}, expected {base}; WRITEs {first}..{end} are open"
            );
        }
    }

    /// After all WRITEs before `index`.
    pub(crate) fn before(&self, index: usize) -> Vec<u8> {
        let mut image = self.initial.to_vec();
        for write in self.writes.iter().filter(|write| write.index < index) {
            image[write.at..write.at + write.bytes.len()].copy_from_slice(write.bytes);
        }
        image
    }
}
