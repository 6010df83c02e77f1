//! Work queue entries (WQEs) as libmlx5 writes them: `struct mlx5_wqe_ctrl_seg` and the segments
//! after it.

use std::fmt;

use crate::abi::access;

/// Size of the blocks that send WQEs consist of.
pub(crate) const BLOCK: usize = 64;
const SEGMENT: usize = 16;

/// The operation of a send WQE: `MLX5_OPCODE_*`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    Nop,
    SendInvalidate,
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
    /// Memory registration by a user (UMR): binds or invalidates a memory window.
    Umr,
}

impl Operation {
    fn new(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::Nop,
            0x01 => Self::SendInvalidate,
            0x08 => Self::Write,
            0x09 => Self::WriteImm,
            0x0a => Self::Send,
            0x0b => Self::SendImm,
            0x10 => Self::Read,
            0x11 => Self::CompareSwap,
            0x12 => Self::FetchAdd,
            0x25 => Self::Umr,
            _ => return None,
        })
    }

    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    fn has_remote(self) -> bool {
        matches!(self, Self::Write | Self::WriteImm | Self::Read) || self.is_atomic()
    }

    pub(crate) fn writes_locally(self) -> bool {
        self == Self::Read || self.is_atomic()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    pub(crate) index: u16,
    pub(crate) opcode: u8,
    pub(crate) qpn: u32,
    /// Length of the WQE in 16-byte segments.
    pub(crate) segments: u8,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) immediate: [u8; 4],
}

impl Control {
    pub(crate) fn parse(block: &[u8; BLOCK]) -> Self {
        let word = |at: usize| {
            u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let flags = block[11];
        Self {
            index: (word(0) >> 8) as u16,
            opcode: word(0) as u8,
            qpn: word(4) >> 8,
            segments: word(4) as u8 & 0x3f,
            signaled: flags & 8 != 0,
            solicited: flags & 2 != 0,
            immediate: [block[12], block[13], block[14], block[15]],
        }
    }

    pub(crate) fn blocks(&self) -> u16 {
        (usize::from(self.segments.max(1)) * SEGMENT).div_ceil(BLOCK) as u16
    }
}

/// The destination of a datagram or a DC request: `struct mlx5_wqe_av`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    /// Access key of a DC target; for a datagram, the Q_Key in the high half.
    pub(crate) key: u64,
    pub(crate) qpn: u32,
    pub(crate) service_level: u8,
    pub(crate) lid: u16,
    pub(crate) route: Option<GlobalRoute>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GlobalRoute {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) source_index: u8,
    pub(crate) flow_label: u32,
    pub(crate) gid: [u8; 16],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

#[derive(Clone, Debug)]
pub(crate) enum Data {
    Inline(Vec<u8>),
    Memory(Local),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Local {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) key: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Send {
    pub(crate) operation: Operation,
    pub(crate) address: Option<Address>,
    pub(crate) remote: Option<Remote>,
    /// The value to add or swap in, and the value to compare with.
    pub(crate) operands: [u64; 2],
    pub(crate) data: Vec<Data>,
    pub(crate) umr: Option<Umr>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Malformed(pub(crate) String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

struct Segments<'a>(&'a [u8]);

impl<'a> Segments<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(|| {
            Malformed(format!("truncated {what}: {} bytes missing", len - self.0.len()))
        })?;
        self.0 = rest;
        Ok(taken)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn double(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}

impl Send {
    /// Parses a WQE. `addressed`: whether WQEs of this queue pair contain an address.
    pub(crate) fn parse(
        control: &Control,
        bytes: &[u8],
        addressed: bool,
    ) -> Result<Self, Malformed> {
        let operation = Operation::new(control.opcode).ok_or_else(|| {
            Malformed(format!("opcode {:#x} is not supported by the emulation", control.opcode))
        })?;
        let mut rest = Segments(bytes);
        rest.take(SEGMENT, "control segment")?;
        let mut send = Self {
            operation,
            address: None,
            remote: None,
            operands: [0; 2],
            data: Vec::new(),
            umr: None,
        };
        if operation == Operation::Nop {
            return Ok(send);
        }
        if operation == Operation::Umr {
            send.umr = Some(Umr::parse(control, &mut rest)?);
            return Ok(send);
        }
        if addressed {
            send.address = Some(Address::parse(&mut rest)?);
        }
        if operation.has_remote() {
            let remote = rest.take(SEGMENT, "remote address segment")?;
            send.remote = Some(Remote { address: double(remote, 0), key: word(remote, 8) });
        }
        if operation.is_atomic() {
            let operands = rest.take(SEGMENT, "atomic segment")?;
            send.operands = [double(operands, 0), double(operands, 8)];
        }
        while !rest.0.is_empty() {
            if let Some(data) = Data::parse(&mut rest)? {
                send.data.push(data);
            }
        }
        Ok(send)
    }
}

/// A change of a memory window: `struct mlx5_wqe_umr_ctrl_seg` and the segments after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Umr {
    /// The window's key before the change.
    pub(crate) key: u32,
    /// The low byte of the key after the change.
    pub(crate) variant: u8,
    /// The queue pair that owns the binding; all ones if there is none.
    pub(crate) qpn: u32,
    /// `None`: the window is invalidated.
    pub(crate) bind: Option<Bind>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bind {
    /// `ibv_access_flags`.
    pub(crate) access: u32,
    /// The address of the first byte in requests.
    pub(crate) start: u64,
    pub(crate) memory: Local,
}

impl Umr {
    fn parse(control: &Control, rest: &mut Segments<'_>) -> Result<Self, Malformed> {
        const INLINE: u8 = 1 << 7;
        const CHECK_FREE: u8 = 1 << 5;
        const TRANSLATION_OFFSET: u8 = 1 << 4;
        const CHECK_QPN: u8 = 1 << 3;
        /// Fields to change: free, the key's low byte, the queue pair.
        const ALWAYS: u64 = 1 << 29 | 1 << 13 | 1 << 14;
        /// Length, start, and the rights.
        const TO_BIND: u64 = 1 << 0 | 1 << 6 | 1 << 18 | 1 << 19 | 1 << 20 | 1 << 21;
        const FREE: u8 = 1 << 6;
        /// Size of the inline list, in units of 16 bytes: one element, padded to 64 bytes.
        const ONE_ELEMENT: u16 = 4;
        let first = rest.take(3 * SEGMENT, "UMR control segment")?;
        let context = rest.take(4 * SEGMENT, "memory key context")?;
        let (flags, mask) = (first[0], double(first, 8));
        let list = u16::from_be_bytes([first[4], first[5]]);
        let number = word(context, 4);
        let mut umr = Self {
            key: u32::from_be_bytes(control.immediate),
            variant: number as u8,
            qpn: number >> 8,
            bind: None,
        };
        let expect = |right: bool, what: &str| {
            if right { Ok(()) } else { Err(Malformed(format!("UMR: {what}"))) }
        };
        let checks = flags & (CHECK_FREE | CHECK_QPN);
        expect(
            flags & !(CHECK_FREE | CHECK_QPN) == INLINE | TRANSLATION_OFFSET,
            &format!("flags {flags:#x}, only an inline list is emulated"),
        )?;
        if context[0] & FREE != 0 {
            expect(checks == CHECK_QPN, "an invalidation must check the queue pair number")?;
            expect(mask == ALWAYS, &format!("mask {mask:#x} of an invalidation"))?;
            expect(list == 0 && rest.0.is_empty(), "an invalidation has no list")?;
            expect(umr.qpn == 0xff_ffff, "an invalidated key has queue pair number 0xffffff")?;
            return Ok(umr);
        }
        expect(checks == CHECK_FREE, "a binding must check that the window is free")?;
        expect(mask == ALWAYS | TO_BIND, &format!("mask {mask:#x} of a binding"))?;
        expect(list == ONE_ELEMENT, &format!("list of {list} units, expected {ONE_ELEMENT}"))?;
        expect(umr.qpn == control.qpn, "the binding names another queue pair")?;
        let element = rest.take(4 * SEGMENT, "list of a binding")?;
        let memory = Local {
            address: double(element, 8),
            len: u64::from(word(element, 0)),
            key: word(element, 4),
        };
        expect(double(context, 24) == memory.len, "length of the key and of its list differ")?;
        expect(rest.0.is_empty(), "bytes after the list")?;
        let access = [
            (1 << 3, access::LOCAL_WRITE),
            (1 << 4, access::REMOTE_READ),
            (1 << 5, access::REMOTE_WRITE),
            (1 << 6, access::REMOTE_ATOMIC),
        ];
        let granted = access.iter().filter(|(bit, _)| context[2] & bit != 0);
        umr.bind = Some(Bind {
            access: granted.fold(0, |all, (_, right)| all | right),
            start: double(context, 16),
            memory,
        });
        Ok(umr)
    }
}

impl Address {
    fn parse(rest: &mut Segments<'_>) -> Result<Self, Malformed> {
        /// Flag of the long form, which includes a global route.
        const EXTENDED: u32 = 1 << 31;
        const HAS_ROUTE: u32 = 1 << 30;
        let short = rest.take(SEGMENT, "address")?;
        let target = word(short, 8);
        let mut address = Self {
            key: double(short, 0),
            qpn: target & 0xff_ffff,
            service_level: short[12] & 15,
            lid: u16::from_be_bytes([short[14], short[15]]),
            route: None,
        };
        if target & EXTENDED != 0 {
            let long = rest.take(2 * SEGMENT, "long address")?;
            let route = word(long, 12);
            let gid: [u8; 16] = *long[16..].first_chunk().expect("32 bytes");
            // On Ethernet there is always a route, and the bit is not set.
            address.route = (route & HAS_ROUTE != 0 || gid != [0; 16]).then_some(GlobalRoute {
                traffic_class: long[10],
                hop_limit: long[11],
                source_index: (route >> 20) as u8,
                flow_label: route & 0xf_ffff,
                gid,
            });
        }
        Ok(address)
    }
}

impl Data {
    fn parse(rest: &mut Segments<'_>) -> Result<Option<Self>, Malformed> {
        const INLINE: u32 = 1 << 31;
        let first = rest.0.get(..4).ok_or_else(|| Malformed("truncated data segment".into()))?;
        let count = word(first, 0);
        if count & INLINE != 0 {
            let len = (count & !INLINE) as usize;
            let whole = (4 + len).next_multiple_of(SEGMENT);
            let segment = rest.take(whole, "inline data")?;
            return Ok(Some(Self::Inline(segment[4..4 + len].to_vec())));
        }
        Local::parse(rest.take(SEGMENT, "data segment")?).map(|local| local.map(Self::Memory))
    }
}

impl Local {
    fn parse(segment: &[u8]) -> Result<Option<Self>, Malformed> {
        let (count, key, address) = (word(segment, 0), word(segment, 4), double(segment, 8));
        // An empty list is written as zeros.
        if count == 0 && key == 0 && address == 0 {
            return Ok(None);
        }
        let len = if count == 0 { 1 << 31 } else { u64::from(count) };
        Ok(Some(Self { address, len, key }))
    }
}

/// Returns the scatter list of a receive, which a special key terminates.
pub(crate) fn receive(segments: &[u8]) -> Vec<Local> {
    const LAST: u32 = 0x100;
    let mut list = Vec::new();
    for segment in segments.chunks_exact(SEGMENT) {
        let (len, key, address) = (word(segment, 0), word(segment, 4), double(segment, 8));
        if key == LAST {
            break;
        }
        if len != 0 {
            list.push(Local { address, len: u64::from(len), key });
        }
    }
    list
}
