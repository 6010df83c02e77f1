//! The emulated devices as libibverbs lists, opens and describes them, on InfiniBand.

mod common;

use common::*;
use emulated_connectx::{EmulatedConnectX, Options};
use rdma_ibverbs::ffi::*;

fn device() -> EmulatedConnectX {
    start(|options| options.devices = 2)
}

#[test]
fn emulated_devices_are_listed_and_no_others() {
    device();
    assert_eq!(names(), ["mlx5_0", "mlx5_1"]);
}

#[test]
fn second_start_returns_the_device_or_refuses_other_options() {
    device();
    device();
    let error = EmulatedConnectX::start(Options::default()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
    let mut none = Options::default();
    none.devices = 0;
    assert_eq!(EmulatedConnectX::start(none).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn emulated_device_reports_its_capabilities() {
    device();
    let context = Context::open(1);
    let mut attr: ibv_device_attr = zeroed();
    // SAFETY: an open context, and space for the answer.
    assert_eq!(unsafe { ibv_query_device(context.0, &mut attr) }, 0);
    assert_eq!((attr.vendor_id, attr.vendor_part_id, attr.phys_port_cnt), (0x2c9, 0x101b, 1));
    assert_eq!(attr.max_mcast_grp, 0);
    assert!(attr.max_qp > 0 && attr.max_sge >= 4 && attr.max_srq > 0 && attr.max_mw > 0);
    let mut extended: ibv_device_attr_ex = zeroed();
    // SAFETY: as above.
    assert_eq!(unsafe { ibv_query_device_ex(context.0, std::ptr::null(), &mut extended) }, 0);
    assert_eq!(extended.orig_attr.node_guid, attr.node_guid);
    let mut dv: mlx5dv_context = zeroed();
    // SAFETY: as above.
    assert_eq!(unsafe { mlx5dv_query_device(context.0, &mut dv) }, 0);
}

#[test]
fn emulated_infiniband_port_has_a_lid_and_two_gids() {
    device();
    for number in 0..2 {
        let context = Context::open(number);
        let port = context.port();
        assert_eq!(port.state, ibv_port_state::IBV_PORT_ACTIVE);
        assert_eq!((port.link_layer, port.lid), (1, number as u16 + 1));
        let gids = context.gids();
        assert_eq!(gids.len(), 2);
        assert!(gids.iter().all(|gid| gid.gid_type == 0));
        for (index, gid) in gids.iter().enumerate() {
            let mut queried: ibv_gid = zeroed();
            // SAFETY: an open context, and space for the answer.
            assert_eq!(unsafe { ibv_query_gid(context.0, 1, index as i32, &mut queried) }, 0);
            // SAFETY: any bytes are a GID.
            assert_eq!(unsafe { queried.raw }, unsafe { gid.gid.raw });
        }
        let mut pkey = 0;
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_query_pkey(context.0, 1, 0, &mut pkey) }, 0);
        assert_eq!(pkey, 0xffff);
    }
}

#[test]
fn devices_reach_each_other() {
    device();
    let nodes: Vec<_> = (0..2)
        .map(|number| {
            let context = Context::open(number);
            let pd = Pd::new(&context);
            let cq = Cq::new(&context, 15);
            (Qp::new(&pd, RC, Queues::one(&cq)), Mr::new(&pd, 64, ALL), context.route())
        })
        .collect();
    nodes[0].0.connect(nodes[1].0.number(), nodes[1].2, |_| {});
    nodes[1].0.connect(nodes[0].0.number(), nodes[0].2, |_| {});
    let (a, mr, _) = &nodes[0];
    a.post(Work::write(5, vec![mr.sge(0, 8)], &nodes[1].1, 0));
    a.queues.send.ok(5);
    device().assert_clean();
}
