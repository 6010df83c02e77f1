//! The number and size of an end's receives, and how the peer learns of changes.
//!
//! An end posts new receives before it announces them with a `Resize` frame. Posted receives cannot
//! be taken back, so the `Resize` asks the peer to skip receives of another size. The peer uses up
//! each of them by a `Resize` without payload.
//!
//! The device uses receives in the order of posting. Both ends number them from the start of the
//! connection, so the peer knows the size of the receive for each frame:
//!
//! ```text
//!   receive        0 … 7    8 … 11   12 …
//!   size           384      16384    16384
//!                           ▲ from: later receives have the announced size
//! ```

use crate::Violation;
use crate::flow::RESERVE;

/// The receives for messages of an idle end: two requests and two notifications.
pub const FIRST_MESSAGES: u32 = 4;

/// The size of the first receives. With the reserve and two spare buffers, they fit a page.
pub const FIRST_SIZE: u32 = 384;

/// A change of receives, encoded as four big-endian numbers of 32 bits in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resize {
    /// The receives from now on, including the reserve and those to skip.
    pub receives: u32,
    /// The receives that the peer must skip.
    pub skip: u32,
    /// The number of the first receive of `size`; ignored if the size is the same.
    pub from: u32,
    /// The size of receives posted from now on.
    pub size: u32,
}

impl Resize {
    pub const LEN: usize = 16;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let fields = [self.receives, self.skip, self.from, self.size];
        for (bytes, field) in bytes.chunks_exact_mut(4).zip(fields) {
            bytes.copy_from_slice(&field.to_be_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let [receives, skip, from, size] = std::array::from_fn(|field| {
            let at = field * 4;
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        });
        Some(Self { receives, skip, from, size })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    size: u32,
    /// The first receive of another size, and that size.
    change: Option<(u32, u32)>,
}

impl Sizes {
    pub fn new(size: u32) -> Self {
        Self { size, change: None }
    }

    /// Requires that receive `number` is not used yet.
    pub fn at(&self, number: u32) -> u32 {
        match self.change {
            Some((from, size)) if is_reached(number, from) => size,
            _ => self.size,
        }
    }

    /// Applies a change that receive `next` has reached.
    pub fn settle(&mut self, next: u32) {
        if let Some((from, size)) = self.change
            && is_reached(next, from)
        {
            *self = Self::new(size);
        }
    }

    pub fn last(&self) -> u32 {
        self.change.map_or(self.size, |(_, size)| size)
    }

    pub fn is_settled(&self) -> bool {
        self.change.is_none()
    }

    /// The next frame uses receive `next`. The size of a used receive must not change, and another
    /// change of size must not be pending.
    pub fn change(&mut self, resize: Resize, next: u32) -> Result<(), Violation> {
        self.settle(next);
        if resize.size == self.size && self.change.is_none() {
            return Ok(());
        }
        let ahead = resize.from.wrapping_sub(next);
        if self.change.is_some_and(|(_, size)| size != resize.size) || ahead > resize.receives {
            return Err(Violation::Resize { receives: resize.receives, size: resize.size });
        }
        self.change.get_or_insert((resize.from, resize.size));
        Ok(())
    }
}

/// Requires that the numbers, which wrap, differ by less than 2^31.
fn is_reached(number: u32, from: u32) -> bool {
    number.wrapping_sub(from) < 1 << 31
}

/// Returns the number of first receives of an end with up to `receives`. Both include the reserve.
pub fn first_receives(receives: u32) -> u32 {
    receives.min(RESERVE + FIRST_MESSAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resize(receives: u32, from: u32, size: u32) -> Resize {
        Resize { receives, skip: 0, from, size }
    }

    #[test]
    fn announcements_round_trip_and_have_one_length() {
        let announced = Resize { receives: 68, skip: 60, from: u32::MAX - 3, size: 8192 };
        assert_eq!(Resize::from_bytes(&announced.to_bytes()), Some(announced));
        for len in [0, 4, 15, 17, 20] {
            assert_eq!(Resize::from_bytes(&vec![0; len]), None, "{len} bytes");
        }
    }

    #[test]
    fn size_changes_at_the_announced_receive_also_where_numbers_wrap() {
        for start in [0, u32::MAX - 2, (1 << 31) - 2] {
            let at = |ahead| start.wrapping_add(ahead);
            let mut sizes = Sizes::new(512);
            sizes.change(resize(12, at(4), 8192), start).unwrap();
            let found: Vec<u32> = (0..6).map(|ahead| sizes.at(at(ahead))).collect();
            assert_eq!(found, [512, 512, 512, 512, 8192, 8192]);
            for (next, is_settled) in [(3, false), (4, true)] {
                sizes.settle(at(next));
                assert_eq!((sizes.last(), sizes.is_settled()), (8192, is_settled));
            }
        }
    }

    #[test]
    fn change_of_used_or_already_changed_receives_is_a_violation() {
        let refused = |resize: Resize| {
            Err(Violation::Resize { receives: resize.receives, size: resize.size })
        };
        let mut sizes = Sizes::new(512);
        for from in [9, 23] {
            let used = resize(12, from, 8192);
            assert_eq!(sizes.change(used, 10), refused(used));
        }
        assert_eq!(sizes.change(resize(12, 12, 8192), 10), Ok(()));
        let again = resize(12, 14, 512);
        assert_eq!(sizes.change(again, 11), refused(again));
        // More receives of the same size.
        assert_eq!(sizes.change(resize(20, 15, 8192), 11), Ok(()));
        assert_eq!((sizes.at(11), sizes.at(12)), (512, 8192));
        assert_eq!(sizes.change(resize(12, 14, 512), 12), Ok(()));
    }
}
