//! Datagrams on the emulated device.

mod common;

use common::*;
use emulated_connectx::{EmulatedConnectX, Link};
use rdma_ibverbs::ffi::*;

const QKEY: u32 = 0x1234;

fn device() -> EmulatedConnectX {
    start(|options| options.link = Link::Roce)
}

#[test]
fn roce_port_has_gids_of_both_kinds_and_both_families() {
    device();
    let context = Context::open(0);
    let port = context.port();
    assert_eq!((port.link_layer, port.lid), (2, 0));
    let gids = context.gids();
    let kinds: Vec<_> = gids.iter().map(|gid| gid.gid_type).collect();
    assert_eq!(kinds, [1, 2, 1, 2, 1, 2]);
    // SAFETY: any bytes are a GID.
    let of = |index: usize| unsafe { gids[index].gid.raw };
    assert_eq!(of(3)[10..], [0xff, 0xff, 192, 0, 2, 1]);
    assert_eq!(of(5)[..4], [0x20, 0x01, 0x0d, 0xb8]);
}

fn pair() -> (Qp, Qp, Mr, Mr, std::sync::Arc<Pd>) {
    let context = Context::open(0);
    let pd = Pd::new(&context);
    let (a, b) = (Cq::new(&context, 31), Cq::new(&context, 31));
    let (a, b) = (Qp::new(&pd, UD, Queues::one(&a)), Qp::new(&pd, UD, Queues::one(&b)));
    a.ready_for_datagrams(QKEY);
    b.ready_for_datagrams(QKEY);
    let (mut source, target) = (Mr::new(&pd, 4096, LOCAL), Mr::new(&pd, 4096, LOCAL));
    source.fill(|at| (at + 9) as u8);
    (a, b, source, target, pd)
}

#[test]
fn datagrams_carry_their_sender() {
    let device = device();
    let (a, b, source, target, pd) = pair();
    for (index, v4) in [(1, false), (3, true), (5, false)] {
        let mut route = pd.1.route();
        route.grh.sgid_index = index;
        route.grh.dgid = pd.1.gids()[usize::from(index)].gid;
        let ah = Ah::new(&pd, &route);
        for round in 0..40_u32 {
            b.post_recv(round.into(), vec![target.sge(0, 512)]);
            let list = vec![source.sge(0, 100 + round as usize)];
            let send = Work::new(1, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, list).immediate(round);
            a.post(send.to(&ah, b.number(), QKEY));
            a.queues.send.ok(1);
            let wc = b.queues.recv.ok(round.into());
            assert_eq!((wc.byte_len, wc.src_qp), (140 + round, a.number()));
            assert_eq!(wc.wc_flags & 3, 3, "immediate data, and a global route");
            let bytes = target.bytes();
            assert_eq!(bytes[40..140 + round as usize], source.bytes()[..100 + round as usize]);
            // SAFETY: any bytes are a GID.
            let gid = unsafe { route.grh.dgid.raw };
            match v4 {
                true => assert_eq!(
                    (bytes[20], &bytes[32..36], &bytes[36..40]),
                    (0x45, &gid[12..], &gid[12..])
                ),
                false => assert_eq!(
                    (bytes[0], &bytes[8..24], &bytes[24..40]),
                    (0x60, &gid[..], &gid[..])
                ),
            }
        }
    }
    device.assert_clean();
}

#[test]
fn datagrams_are_lost_without_a_receive_or_with_a_wrong_key() {
    let device = device();
    let (a, b, source, target, pd) = pair();
    let ah = Ah::new(&pd, &pd.1.route());
    let before = device.counters().dropped;
    let send = |id, qkey| a.post(Work::send(id, vec![source.sge(0, 8)]).to(&ah, b.number(), qkey));
    send(1, QKEY);
    a.queues.send.ok(1);
    b.post_recv(7, vec![target.sge(0, 64)]);
    send(2, QKEY + 1);
    a.queues.send.ok(2);
    assert!(b.queues.recv.poll().is_none());
    assert!(device.counters().dropped >= before + 2);
    // The high bit selects the sender's own key.
    send(3, 1 << 31);
    a.queues.send.ok(3);
    b.queues.recv.ok(7);
    device.assert_clean();
}

#[test]
fn unknown_address_is_refused() {
    device();
    let (_a, _b, _source, _target, pd) = pair();
    let mut route = pd.1.route();
    route.grh.dgid.raw = [0xfe; 16];
    // SAFETY: the protection domain and the attributes are alive.
    let ah = unsafe { ibv_create_ah(pd.0, &mut route) };
    assert!(ah.is_null());
}
