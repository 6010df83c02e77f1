//! Events of the whole device, in a process of their own because they disturb other tests.

mod common;

use common::*;
use rdma_ibverbs::ffi::*;

#[test]
fn emulated_port_goes_down_and_comes_back_and_then_the_device_is_lost() {
    let device = start(|_| {});
    let pair = Pair::with(RC, None, |attr| attr.retry_cnt = 1);
    device.set_port(0, false);
    assert_eq!(pair.context.event(), ibv_event_type::IBV_EVENT_PORT_ERR);
    assert_eq!(pair.context.port().state, ibv_port_state::IBV_PORT_DOWN);
    pair.a.post(Work::write(1, vec![pair.source.sge(0, 8)], &pair.target, 0));
    pair.a.queues.send.fails_with(1, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    device.set_port(0, true);
    assert_eq!(pair.context.event(), ibv_event_type::IBV_EVENT_PORT_ACTIVE);

    let again = Pair::new(RC);
    again.a.post(Work::write(2, vec![again.source.sge(0, 8)], &again.target, 0));
    again.a.queues.send.ok(2);
    again.b.post_recv(3, vec![]);
    device.lose_device(0);
    assert_eq!(again.context.event(), ibv_event_type::IBV_EVENT_DEVICE_FATAL);
    again.b.queues.recv.fails_with(3, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    assert_eq!(again.a.state(), ibv_qp_state::IBV_QPS_ERR);
}
