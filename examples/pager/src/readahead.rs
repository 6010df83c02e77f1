//! Who reads in order, and what comes next: a machine without I/O.

use std::ops::Range;

/// Readers in order that are told apart.
const STREAMS: usize = 8;

/// Pages in order before one believes in it.
const RUN: u32 = 3;

/// Pages asked for ahead at first; twice as many each time, up to the bound.
const FIRST: u64 = 4;

/// Finds sequences among the pages that are used.
#[derive(Debug)]
pub(crate) struct Readahead {
    /// The one that went on last is first.
    streams: Vec<Stream>,
    most: u64,
}

/// A sequence.
#[derive(Debug)]
struct Stream {
    /// The page that would be in order.
    next: u64,
    run: u32,
    /// End of what was asked for ahead.
    asked: u64,
    window: u64,
}

impl Readahead {
    /// That asks for up to `most` pages ahead, 0: never.
    pub(crate) fn new(most: u64) -> Self {
        Self { streams: Vec::with_capacity(STREAMS), most }
    }

    /// A page is used: what to fetch ahead, now.
    pub(crate) fn used(&mut self, page: u64) -> Range<u64> {
        if self.most == 0 {
            return 0..0;
        }
        let after = page.saturating_add(1);
        // A page that is used several times in a row is no new sequence.
        let Some(at) =
            self.streams.iter().position(|stream| page == stream.next || after == stream.next)
        else {
            self.streams.truncate(STREAMS - 1);
            self.streams.insert(
                0,
                Stream { next: after, run: 1, asked: after, window: FIRST.min(self.most) },
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
        // More when half of it is used up, so that what comes next is on its way before it is wanted.
        if stream.run < RUN || stream.asked - after > stream.window / 2 {
            return 0..0;
        }
        let from = stream.asked;
        stream.asked = after.saturating_add(stream.window);
        stream.window = (stream.window * 2).min(self.most);
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
    fn a_reader_in_order_finds_all_that_follows_asked_for_once_and_not_too_far_ahead() {
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
    fn random_and_backward_and_repeated_reads_ask_for_nothing() {
        let mut readahead = Readahead::new(32);
        assert_eq!(asked(&mut readahead, [5, 900, 17, 4000, 23, 1, 77, 5, 12, 800]), NOTHING);
        assert_eq!(asked(&mut readahead, (3000..3100).rev()), NOTHING);
        assert_eq!(asked(&mut readahead, [7000; 100]), NOTHING);
        assert_eq!(asked(&mut Readahead::new(0), 0..100), NOTHING);
    }

    #[test]
    fn readers_in_turn_are_told_apart_up_to_a_number() {
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
    fn the_last_page_of_all_is_no_end_of_the_world() {
        let mut readahead = Readahead::new(8);
        let ahead = asked(&mut readahead, u64::MAX - 10..=u64::MAX);
        assert!(ahead.iter().all(|&page| page > u64::MAX - 10));
    }
}
