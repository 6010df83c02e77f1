//! Numbers with a meaning: queue pairs, packet sequence, keys, ports.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

number! {
    /// Queue pair number, 24 bits. 0 and 1 are the management queue pairs, 0xffffff is multicast.
    Qpn(u32)
}
number! {
    /// Local key: names a registration in a scatter/gather element.
    Lkey(u32)
}
number! {
    /// Remote key: lets a peer name a registration of ours.
    Rkey(u32)
}
number! {
    /// Queue key of unreliable datagrams: a packet is accepted only if its key is the receiver's.
    Qkey(u32)
}
number! {
    /// Port of a device, counted from 1.
    PortNum(u8)
}
number! {
    /// Caller's number of a work request; comes back in its completion.
    WrId(u64)
}
number! {
    /// Immediate data: four bytes that travel beside a message.
    ///
    /// The value is in host order; it is big-endian on the wire, as `imm_data` of `ibv_post_send(3)`.
    Imm(u32)
}

/// Access key of a DC target: a packet is taken only if its key is the target's.
///
/// Whoever knows it may use the target, so it is not printed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DcKey(pub u64);

impl fmt::Debug for DcKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DcKey(..)")
    }
}

impl Rkey {
    /// The key with which a memory window is bound next: its low byte counted up, wrapping, `ibv_inc_rkey(3)`.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 & !0xff | (self.0.wrapping_add(1) & 0xff))
    }
}

impl Qpn {
    /// Largest queue pair number.
    pub const MAX: Self = Self(0x00ff_ffff);
}

/// Packet sequence number: 24 bits that wrap.
///
/// Comparison is by signed distance (`IBTA 9.7.2`), hence no `Ord`: of two numbers the one less than
/// 2^23 steps ahead is the later.
///
/// ```
/// use rdma_provider::types::Psn;
///
/// let last = Psn::new(0x00ff_ffff);
/// let next = last.add(1);
/// assert_eq!(next, Psn::new(0));
/// assert_eq!(next.distance_from(last), 1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    const MASK: u32 = 0x00ff_ffff;

    /// Keeps the low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & Self::MASK)
    }

    /// The 24-bit value.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// `steps` packets later.
    #[must_use]
    pub const fn add(self, steps: u32) -> Self {
        Self(self.0.wrapping_add(steps) & Self::MASK)
    }

    /// `steps` packets earlier.
    #[must_use]
    pub const fn sub(self, steps: u32) -> Self {
        Self(self.0.wrapping_sub(steps) & Self::MASK)
    }

    /// Signed distance `self - earlier`, in -2^23 .. 2^23.
    #[must_use]
    pub const fn distance_from(self, earlier: Self) -> i32 {
        ((self.0.wrapping_sub(earlier.0) << 8) as i32) >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#x})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_key_of_a_window_counts_in_the_low_byte_only() {
        assert_eq!(Rkey(0x1234_5677).next(), Rkey(0x1234_5678));
        assert_eq!(Rkey(0x1234_56ff).next(), Rkey(0x1234_5600));
        assert_eq!(Rkey(u32::MAX).next(), Rkey(0xffff_ff00));
    }

    #[test]
    fn distance_of_sequence_numbers_is_signed_and_wraps() {
        const HALF: u32 = 1 << 23;
        for base in [0, 1, HALF - 1, HALF, 0xff_ffff] {
            let earlier = Psn::new(base);
            for steps in [0, 1, 2, 1_000, HALF - 1] {
                assert_eq!(earlier.add(steps).distance_from(earlier), steps as i32, "{base:#x}");
                assert_eq!(earlier.sub(steps).distance_from(earlier), -(steps as i32), "{base:#x}");
                assert_eq!(earlier.add(steps).sub(steps), earlier);
            }
            assert_eq!(earlier.add(HALF).distance_from(earlier), -(HALF as i32));
            assert_eq!(earlier.add(HALF), earlier.sub(HALF));
            assert!(earlier.add(0xffff_ffff).value() <= 0xff_ffff);
        }
        assert_eq!(
            (Psn::new(0xff_ffff).add(1), Psn::new(0).sub(1)),
            (Psn::new(0), Psn::new(0xff_ffff))
        );
        assert_eq!(Psn::new(0x0100_0005), Psn::new(5));
    }

    #[test]
    fn access_key_is_not_printed() {
        assert_eq!(format!("{:?}", DcKey(0x1234_5678)), "DcKey(..)");
    }

    #[test]
    fn psn_distance_wraps_at_24_bits() {
        assert_eq!(Psn::new(0).distance_from(Psn::new(0xff_ffff)), 1);
        assert_eq!(Psn::new(0xff_ffff).distance_from(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x80_0000).distance_from(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0xff_ffff).add(2), Psn::new(1));
        assert_eq!(Psn::new(1).sub(2), Psn::new(0xff_ffff));
    }
}
