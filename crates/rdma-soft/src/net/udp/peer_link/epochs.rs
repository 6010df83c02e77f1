//! Bytes in flight to a peer, counted by the epoch in which they were sent.

/// Unsent bytes, and bytes sent in the current and previous epoch; older ones do not count.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    current: u64,
    admitted: Sum,
    /// Indexed by the low bit of the epoch.
    sent: [Sum; 2],
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    bytes: u64,
    pairs: u32,
}

/// The bytes in flight of one queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) bytes: u32,
    /// `None` if unsent.
    pub(super) epoch: Option<u64>,
}

impl Epochs {
    pub(super) const fn current(&self) -> u64 {
        self.current
    }

    /// Returns the counted bytes and their queue pairs.
    pub(super) fn total(&self) -> (u32, u32) {
        let all = [self.admitted, self.sent[0], self.sent[1]];
        let (bytes, pairs) =
            all.iter().fold((0, 0), |(bytes, pairs), sum| (bytes + sum.bytes, pairs + sum.pairs));
        (u32::try_from(bytes).unwrap_or(u32::MAX), pairs)
    }

    pub(super) fn counts(&self, load: Load) -> bool {
        load.epoch.is_none_or(|epoch| epoch + 1 >= self.current)
    }

    fn sum_of(&mut self, load: Load) -> Option<&mut Sum> {
        let counts = self.counts(load);
        let sum = match load.epoch {
            None => &mut self.admitted,
            Some(epoch) => &mut self.sent[(epoch % 2) as usize],
        };
        counts.then_some(sum)
    }

    /// Adds unsent bytes, or bytes sent from `epoch` on.
    pub(super) fn add(&mut self, bytes: u32, epoch: Option<u64>) -> Load {
        let load =
            Load { bytes, epoch: epoch.map(|epoch| epoch.max(self.current.saturating_sub(1))) };
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

    /// Reduces `load` to at most `bytes`.
    pub(super) fn lower(&mut self, load: Load, bytes: u32) -> Load {
        let bytes = bytes.min(load.bytes);
        if let Some(sum) = self.sum_of(load) {
            sum.bytes -= u64::from(load.bytes - bytes);
        }
        Load { bytes, ..load }
    }

    pub(super) fn advance(&mut self) {
        self.current += 1;
        self.sent[(self.current % 2) as usize] = Sum::default();
    }
}
