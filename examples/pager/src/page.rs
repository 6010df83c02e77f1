//! Pages, and contents that can be computed.

/// Bytes per page.
pub const PAGE: usize = 4096;

/// Page contents in the programs and tests. They differ by seed, page and version, so that an old,
/// torn or wrong page is detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content {
    /// Any number.
    pub seed: u64,
}

impl Content {
    /// Returns `version` of a page; owners begin with 0.
    #[must_use]
    pub fn of(&self, page: u64, version: u64) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        // SplitMix64, whose sequences for different seeds do not overlap in practice.
        let mut state = mix(mix(mix(self.seed) ^ page) ^ version);
        for word in bytes.as_chunks_mut().0 {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            *word = mix(state).to_le_bytes();
        }
        bytes
    }
}

fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_differ_by_seed_page_and_version() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..4 {
            for page in 0..64 {
                for version in 0..4 {
                    assert!(seen.insert(Content { seed }.of(page, version)));
                }
            }
        }
        assert_eq!(Content { seed: 1 }.of(2, 3), Content { seed: 1 }.of(2, 3));
    }
}
