//! Partitions: which queue pairs may exchange packets (IBTA 10.9).

/// Full membership of the default partition.
pub(crate) const DEFAULT_PKEY: u16 = 0xffff;

/// The bit of a P_Key that makes it a full member of the partition in the other bits.
const FULL_MEMBER: u16 = 0x8000;

/// Returns whether queue pairs with these P_Keys may exchange packets: they are in one partition,
/// and at least one of them is a full member (IBTA 10.9.3).
#[inline]
pub(crate) const fn may_communicate(ours: u16, theirs: u16) -> bool {
    is_same_partition(ours, theirs) && (ours | theirs) & FULL_MEMBER != 0
}

/// Returns true for full members of one partition, the usual case of the above, which takes fewer
/// instructions.
#[inline]
pub(crate) const fn are_full_members(ours: u16, theirs: u16) -> bool {
    ours == theirs && ours & FULL_MEMBER != 0
}

/// Returns the index of the best entry of `table` for packets with `pkey`: a full member if
/// possible.
pub(crate) fn find(table: &[u16], pkey: u16) -> Option<u16> {
    let fits = |full| {
        table.iter().position(|&entry| {
            is_valid(entry) && may_communicate(entry, pkey) && (entry & FULL_MEMBER != 0) == full
        })
    };
    fits(true).or_else(|| fits(false)).and_then(|index| u16::try_from(index).ok())
}

/// Returns false for an empty entry of a table.
pub(crate) const fn is_valid(pkey: u16) -> bool {
    pkey & !FULL_MEMBER != 0
}

pub(crate) const fn is_same_partition(ours: u16, theirs: u16) -> bool {
    (ours ^ theirs) & !FULL_MEMBER == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limited_members_reach_full_members_only() {
        for (ours, theirs, expected) in [
            (0xffff, 0xffff, true),
            (0xffff, 0x7fff, true),
            (0x7fff, 0xffff, true),
            (0x7fff, 0x7fff, false),
            (0x8001, 0x0001, true),
            (0x8001, 0x8002, false),
            (0x8001, 0xffff, false),
        ] {
            assert_eq!(may_communicate(ours, theirs), expected, "{ours:#x}, {theirs:#x}");
            let full = expected && ours == theirs;
            assert_eq!(are_full_members(ours, theirs), full, "{ours:#x}, {theirs:#x}");
        }
    }

    #[test]
    fn full_members_of_a_table_are_preferred() {
        let table = [0, 0x0001, 0x8001, 0x8002, 0x0003];
        assert_eq!(find(&table, 0x8001), Some(2));
        assert_eq!(find(&table, 0x0002), Some(3));
        assert_eq!(find(&table, 0x8003), Some(4));
        assert_eq!(find(&table, 0x0003), None, "both are limited members");
        assert_eq!(find(&table, 0x8000), None, "an empty entry");
    }
}
