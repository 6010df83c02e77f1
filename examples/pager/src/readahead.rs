//! Detection of sequential readers, and their next pages. A state machine without I/O.

use std::ops::Range;

/// Concurrent sequences that are distinguished.
const STREAMS: usize = 8;

/// Pages in order that make a sequence.
const RUN: u32 = 3;

/// Initial prefetch window, doubled each time up to the limit.
const FIRST: u64 = 4;

#[derive(Debug)]
pub(crate) struct Readahead {
    /// Most recently continued first.
    streams: Vec<Stream>,
    limit: u64,
}

#[derive(Debug)]
struct Stream {
    /// The next page in order.
    next: u64,
    run: u32,
    /// End of the range prefetched.
    asked: u64,
    window: u64,
}

impl Readahead {
    /// Prefetches up to `limit` pages ahead; 0: none.
    pub(crate) fn new(limit: u64) -> Self {
        Self { streams: Vec::with_capacity(STREAMS), limit }
    }

    /// Records an access; returns the pages to prefetch now.
    pub(crate) fn used(&mut self, page: u64) -> Range<u64> {
        if self.limit == 0 {
            return 0..0;
        }
        let after = page.saturating_add(1);
        // Repeated use of a page is not a new sequence.
        let Some(at) =
            self.streams.iter().position(|stream| page == stream.next || after == stream.next)
        else {
            self.streams.truncate(STREAMS - 1);
            self.streams.insert(
                0,
                Stream { next: after, run: 1, asked: after, window: FIRST.min(self.limit) },
            );
            return 0..0;
        };
        self.streams[..=at].rotate_right(1);
        let stream = &mut self.streams[0];
        if page != stream.next {
            return 0..0;
        }
        stream.next = after;
        stream.run = stream.run.saturating_add(1);
        stream.asked = stream.asked.max(after);
        // Prefetch again when half of the window is used, so that pages arrive before their use.
        if stream.run < RUN || stream.asked - after > stream.window / 2 {
            return 0..0;
        }
        let from = stream.asked;
        stream.asked = after.saturating_add(stream.window);
        stream.window = (stream.window * 2).min(self.limit);
        from..stream.asked.max(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: [u64; 0] = [];

    fn asked(readahead: &mut Readahead, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        pages.into_iter().flat_map(|page| readahead.used(page)).collect()
    }

    #[test]
    fn sequential_reader_gets_each_page_prefetched_once_within_the_limit() {
        let mut readahead = Readahead::new(32);
        let mut ahead = Vec::new();
        for page in 100..1100 {
            ahead.extend(readahead.used(page));
            assert!(ahead.last().is_none_or(|&last| last <= page + 32), "{page}");
            if page >= 102 {
                assert!(ahead.last() > Some(&page), "{page}");
            }
        }
        let expected: Vec<u64> = (103..=*ahead.last().unwrap()).collect();
        assert_eq!(ahead, expected);
    }

    #[test]
    fn random_backward_and_repeated_reads_prefetch_nothing() {
        let mut readahead = Readahead::new(32);
        assert_eq!(asked(&mut readahead, [5, 900, 17, 4000, 23, 1, 77, 5, 12, 800]), NOTHING);
        assert_eq!(asked(&mut readahead, (3000..3100).rev()), NOTHING);
        assert_eq!(asked(&mut readahead, [7000; 100]), NOTHING);
        assert_eq!(asked(&mut Readahead::new(0), 0..100), NOTHING);
    }

    #[test]
    fn interleaved_readers_are_distinguished_up_to_a_limit() {
        let mut readahead = Readahead::new(8);
        let turns =
            (0..50).flat_map(|step| (0..STREAMS as u64).map(move |reader| reader * 10_000 + step));
        let ahead = asked(&mut readahead, turns);
        for reader in 0..STREAMS as u64 {
            assert!(ahead.contains(&(reader * 10_000 + 49)), "{reader}");
        }
        let crowd =
            (0..50).flat_map(|step| (0..=STREAMS as u64).map(move |reader| reader * 10_000 + step));
        assert_eq!(asked(&mut Readahead::new(8), crowd), NOTHING);
    }

    #[test]
    fn last_page_number_does_not_overflow() {
        let mut readahead = Readahead::new(8);
        let ahead = asked(&mut readahead, u64::MAX - 10..=u64::MAX);
        assert!(ahead.iter().all(|&page| page > u64::MAX - 10));
    }
}
