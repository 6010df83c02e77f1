//! What is underway to a peer, by when it was sent.

/// Who has been let in, but has not sent yet; what was sent since the page was turned; what was sent before. What was sent before
/// that counts no more.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Number of the page of now.
    now: u64,
    entered: Sum,
    /// The page of now and the one before it, by the lowest bit of their numbers.
    sent: [Sum; 2],
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    bytes: u64,
    pairs: u32,
}

/// What one queue pair has underway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) bytes: u32,
    /// On which page; none if it has not been sent yet.
    pub(super) page: Option<u64>,
}

impl Pages {
    pub(super) const fn now(&self) -> u64 {
        self.now
    }

    /// Bytes that count, and of how many queue pairs.
    pub(super) fn total(&self) -> (u32, u32) {
        let all = [self.entered, self.sent[0], self.sent[1]];
        let (bytes, pairs) =
            all.iter().fold((0, 0), |(bytes, pairs), sum| (bytes + sum.bytes, pairs + sum.pairs));
        (u32::try_from(bytes).unwrap_or(u32::MAX), pairs)
    }

    pub(super) fn counts(&self, load: Load) -> bool {
        load.page.is_none_or(|page| page + 1 >= self.now)
    }

    fn sum_of(&mut self, load: Load) -> Option<&mut Sum> {
        let counts = self.counts(load);
        let sum = match load.page {
            None => &mut self.entered,
            Some(page) => &mut self.sent[(page % 2) as usize],
        };
        counts.then_some(sum)
    }

    /// Adds what somebody will send, or began to send when this was the page of now.
    pub(super) fn add(&mut self, bytes: u32, page: Option<u64>) -> Load {
        let load = Load { bytes, page: page.map(|page| page.max(self.now.saturating_sub(1))) };
        if let Some(sum) = self.sum_of(load) {
            sum.bytes += u64::from(bytes);
            sum.pairs += 1;
        }
        load
    }

    pub(super) fn remove(&mut self, load: Load) {
        if let Some(sum) = self.sum_of(load) {
            sum.bytes -= u64::from(load.bytes);
            sum.pairs -= 1;
        }
    }

    /// No more than `bytes` of it are left.
    pub(super) fn lower(&mut self, load: Load, bytes: u32) -> Load {
        let bytes = bytes.min(load.bytes);
        if let Some(sum) = self.sum_of(load) {
            sum.bytes -= u64::from(load.bytes - bytes);
        }
        Load { bytes, ..load }
    }

    /// What stands on the page before this one counts no more.
    pub(super) fn turn(&mut self) {
        self.now += 1;
        self.sent[(self.now % 2) as usize] = Sum::default();
    }
}
