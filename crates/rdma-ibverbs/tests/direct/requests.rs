//! Requests in the forms of both sides, and all that are compared.

use rdma_ibverbs::contract::{PlainOp, PlainWr};
use rdma_ibverbs::ffi::{ibv_ah, ibv_sge};
use rdma_ibverbs::types::{
    AddressVector, Data, DcKey, DctTarget, Imm, Lkey, Qkey, Qpn, RemoteAddr, Rkey, SendFlags,
    SendOp, SendTarget, SendWr, Sge, Transport, UdTarget, WindowBind, WrId,
};

use crate::memory::address;

#[derive(Debug, Clone)]
pub struct Request {
    pub id: u64,
    pub op: SendOp,
    pub flags: SendFlags,
    pub data: Payload,
    pub target: Option<Target>,
}

#[derive(Debug, Clone)]
pub enum Payload {
    List(Vec<Sge>),
    Inline(Vec<u8>),
    Window(WindowBind),
}

/// A receiver, with the address handles of both sides.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub kind: Transport,
    pub address: AddressVector,
    pub ours: usize,
    pub theirs: *mut ibv_ah,
    pub number: u32,
    /// Q_Key, or key of a DC target.
    pub key: u64,
}

pub fn sge(number: u32, length: u32) -> Sge {
    let addr = 0x1122_3344_5566_0000 + u64::from(number) * 0x0101_0101;
    Sge { addr, length, lkey: Lkey(0xa1b2_c300 | number) }
}

pub const REMOTE: RemoteAddr = RemoteAddr { addr: 0x0123_4567_89ab_cdef, rkey: Rkey(0xfedc_ba98) };

impl Request {
    pub fn new(op: SendOp, data: Payload) -> Self {
        Self { id: 1, op, flags: SendFlags::SIGNALED, data, target: None }
    }

    pub fn flags(mut self, flags: SendFlags) -> Self {
        self.flags = flags;
        self
    }

    pub fn to(mut self, target: Option<Target>) -> Self {
        self.target = target;
        self
    }

    /// Returns a request of one block without data.
    pub fn filler(transport: Transport) -> Self {
        // libmlx5 only reads the handle.
        static BLANK: [u64; 32] = [0; 32];
        let target = matches!(transport, Transport::Ud | Transport::Dci).then(|| Target {
            kind: transport,
            address: AddressVector::new(
                rdma_ibverbs::types::PortNum(1),
                0,
                rdma_ibverbs::types::Gid([0; 16]),
            ),
            ours: 0,
            theirs: BLANK.as_ptr().cast_mut().cast(),
            number: 1,
            key: 1,
        });
        Self::new(SendOp::Send, Payload::List(Vec::new())).to(target)
    }

    pub fn work(&self) -> SendWr<'_> {
        let data = match &self.data {
            Payload::List(list) => Data::Sges(list),
            Payload::Inline(bytes) => Data::Inline(bytes),
            Payload::Window(bind) => Data::Window(bind),
        };
        let target = self.target.as_ref().map(|target| {
            let (address, handle, number) = (&target.address, target.ours, Qpn(target.number));
            if target.kind == Transport::Ud {
                let qkey = Qkey(target.key as u32);
                SendTarget::Datagram(UdTarget { address, handle, qpn: number, qkey })
            } else {
                let key = DcKey(target.key);
                SendTarget::Dc(DctTarget { address, handle, number, key })
            }
        });
        SendWr { wr_id: WrId(self.id), op: self.op, flags: self.flags, data, target }
    }

    /// Returns it in the form for a single buffer of a connected queue pair.
    pub fn plain(&self) -> Option<PlainWr> {
        match &self.data {
            Payload::List(list) if self.target.is_none() => match list[..] {
                [buffer] if buffer.length > 0 => {
                    let Self { id, op, flags, .. } = *self;
                    Some(PlainWr { wr_id: WrId(id), op: PlainOp::of(op)?, flags, buffer })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the list of `ibv_post_send(3)`.
    pub fn raw_list(&self) -> Vec<ibv_sge> {
        match &self.data {
            Payload::List(sges) => crate::library::list(sges),
            Payload::Inline(bytes) => {
                let (addr, length) = (address(bytes.as_ptr()), bytes.len() as u32);
                vec![ibv_sge { addr, length, lkey: 0 }]
            }
            Payload::Window(_) => Vec::new(),
        }
    }

    pub fn is_umr(&self) -> bool {
        self.op.is_local()
    }

    pub fn is_atomic(&self) -> bool {
        matches!(self.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    /// Returns the number of segments before the data: control, receiver, remote address, operands.
    pub fn header(&self) -> usize {
        let remote = match self.op {
            SendOp::Write(_) | SendOp::WriteWithImm(..) | SendOp::Read(_) => 1,
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 2,
            _ => 0,
        };
        1 + if self.target.is_some() { 3 } else { 0 } + remote
    }
}

/// Returns the operations of `transport` that have data.
pub fn operations(transport: Transport) -> Vec<SendOp> {
    let imm = Imm(0x0102_0384);
    let send = [SendOp::Send, SendOp::SendWithImm(imm)];
    let write = [SendOp::Write(REMOTE), SendOp::WriteWithImm(REMOTE, imm)];
    let invalidate = [SendOp::SendWithInvalidate(Rkey(0x7788_99aa))];
    let (read, atomics) = ([SendOp::Read(REMOTE)], atomics());
    match transport {
        Transport::Ud => send.to_vec(),
        Transport::Uc => [&send[..], &write].concat(),
        Transport::Dci => [&send[..], &write, &read, &atomics].concat(),
        Transport::Rc => [&send[..], &write, &read, &atomics, &invalidate].concat(),
    }
}

fn atomics() -> [SendOp; 2] {
    let remote = REMOTE;
    let (compare, swap) = (0x1111_2222_3333_4444, 0x5555_6666_7777_8888);
    [
        SendOp::CompareSwap { remote, compare, swap },
        SendOp::FetchAdd { remote, add: 0x9999_aaaa_bbbb_cccc },
    ]
}

/// Returns lists of up to `max` buffers, with empty ones at all kinds of places.
pub fn lists(max: usize) -> Vec<Vec<Sge>> {
    let mut lists = vec![Vec::new()];
    for length in 1..=max {
        let full: Vec<_> = (0..length).map(|at| sge(at as u32, 1 + at as u32 * 77)).collect();
        let without = |places: &[usize]| {
            let mut list = full.clone();
            places.iter().for_each(|&place| list[place].length = 0);
            list
        };
        lists.push(full.clone());
        lists.extend([without(&[0]), without(&[length - 1]), without(&[length / 2])]);
        lists.push(without(&[0, length - 1, length / 2]));
        if length <= 4 {
            lists.push(without(&(0..length).collect::<Vec<_>>()));
        }
    }
    // The largest length that a segment has.
    lists.push(vec![sge(0, 0x7fff_ffff)]);
    lists
}

/// Returns inline data of all kinds of lengths up to `max`.
pub fn inline(max: usize) -> Vec<Vec<u8>> {
    let lengths = [0, 1, 3, 4, 11, 12, 13, 27, 28, 29, 44, 60, 61, 124, 125, 252, 253, max];
    let bytes = |length| (0..length).map(|at| (at * 7 + 1) as u8).collect();
    lengths.into_iter().filter(|&length| length <= max).map(bytes).collect()
}

/// Returns all combinations of flags.
pub fn flags() -> Vec<SendFlags> {
    (0..8).map(SendFlags::from_bits_truncate).collect()
}

/// Returns all requests of `transport` with lists of `lists`, and inline data of `inline`.
pub fn with_data(
    transport: Transport,
    lists: &[Vec<Sge>],
    inline: &[Vec<u8>],
    target: Option<Target>,
) -> Vec<Request> {
    let mut all = Vec::new();
    for op in operations(transport) {
        let plain = Request::new(op, Payload::List(Vec::new())).to(target);
        for list in lists {
            all.push(Request { data: Payload::List(list.clone()), ..plain.clone() });
        }
        if plain.is_atomic() {
            all.push(Request { data: Payload::List(vec![sge(1, 8)]), ..plain.clone() });
        }
        if !op.reads_back() {
            for bytes in inline {
                all.push(Request { data: Payload::Inline(bytes.clone()), ..plain.clone() });
            }
        }
    }
    all
}
