//! Newtypes of numbers: queue pair numbers, packet sequence numbers, keys, ports.

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
    /// A queue pair number: 24 bits. 0 and 1 are the management queue pairs; 0xffffff is multicast.
    Qpn(u32)
}
number! {
    /// A local key, which names a registration in a scatter/gather element.
    Lkey(u32)
}
number! {
    /// A remote key, which names a registration in requests of a peer.
    Rkey(u32)
}
number! {
    /// A queue key of datagrams: a receiver accepts only packets with its key.
    Qkey(u32)
}
number! {
    /// A port of a device, numbered from 1.
    PortNum(u8)
}
number! {
    /// A caller's identifier of a work request, returned in its completion.
    WrId(u64)
}
number! {
    /// Immediate data: four bytes that accompany a message, in host order. On the wire, and in
    /// `imm_data` of `ibv_post_send(3)`, they are big-endian.
    Imm(u32)
}

/// An access key of a DC target, which accepts only packets with its key. Secret, so `Debug` omits
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DcKey(pub u64);

impl fmt::Debug for DcKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DcKey(..)")
    }
}

impl Rkey {
    /// Returns the key of a window's next binding: low byte plus 1, wrapping, `ibv_inc_rkey(3)`.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 & !0xff | (self.0.wrapping_add(1) & 0xff))
    }
}

impl Qkey {
    /// The Q_Key of multicast groups and datagrams of the connection manager, `RDMA_UDP_QKEY`.
    pub const RDMA_UDP: Self = Self(0x0123_4567);
}

impl Qpn {
    /// The largest queue pair number.
    pub const MAX: Self = Self(0x00ff_ffff);

    /// The destination of datagrams to a multicast group.
    pub const MULTICAST: Self = Self(0x00ff_ffff);
}

/// A packet sequence number (PSN): 24 bits that wrap.
///
/// Comparison is by signed distance (IBTA 9.7.2), hence no `Ord`: a number less than 2^23 steps
/// ahead is later.
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

    /// Creates a number from the low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & Self::MASK)
    }

    /// Returns the 24-bit value.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Returns the number `steps` packets later.
    #[must_use]
    pub const fn add(self, steps: u32) -> Self {
        Self(self.0.wrapping_add(steps) & Self::MASK)
    }

    /// Returns the number `steps` packets earlier.
    #[must_use]
    pub const fn sub(self, steps: u32) -> Self {
        Self(self.0.wrapping_sub(steps) & Self::MASK)
    }

    /// Returns the signed distance `self - earlier`, in -2^23 .. 2^23.
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
