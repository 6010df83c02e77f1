//! Handles of the C library, which only objects of real devices have.

#![allow(unsafe_code, reason = "what handles point to")]

use tokio_rdma::raw::ffi::{
    ibv_modify_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_query_qp,
};
use tokio_rdma::types::{QpAttr, QpState};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, ExposedRegion, Pool, QueuePair, SharedReceiveQueue,
};

use crate::common::{Setup, hardware};

#[test]
fn raw_handles_refer_to_their_objects() {
    let setup = Setup::new();
    let (device, real) = (&setup.a, hardware().is_some());
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
    let qp = QueuePair::new(&pd, &queue).unwrap();
    let srq = SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_WRITE).unwrap();
    let buffer = Pool::new(&pd, 64, 1).unwrap().try_alloc(64).unwrap();
    let Some(context) = device.as_raw() else {
        assert!(!real, "a real device has a handle");
        assert_eq!(
            (pd.as_raw(), queue.as_raw(), qp.as_raw(), srq.as_raw()),
            (None, None, None, None)
        );
        return assert_eq!((region.as_raw(), buffer.as_raw()), (None, None));
    };
    assert!(real, "a software device has none");
    let context = context.as_ptr();
    // SAFETY: the objects live to the end of the test, and handles are only read.
    unsafe {
        assert_eq!((*pd.as_raw().unwrap().as_ptr()).context, context);
        let cq = queue.as_raw().unwrap().as_ptr();
        assert_eq!((*cq).context, context);
        assert_eq!((*srq.as_raw().unwrap().as_ptr()).context, context);
        assert_eq!((*region.as_raw().unwrap().as_ptr()).rkey, region.grant().rkey().0);
        assert_eq!((*buffer.as_raw().unwrap().as_ptr()).context, context);
        let raw = qp.as_raw().unwrap().as_ptr();
        assert_eq!(((*raw).qp_num, (*raw).send_cq), (qp.qpn().0, cq));
        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) =
            (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(
            ibv_query_qp(raw, &mut attr, ibv_qp_attr_mask::IBV_QP_STATE.0 as i32, &mut init),
            0
        );
        assert_eq!(attr.qp_state, (*raw).state);
        // Attributes that the crate does not set, or not so: here the RNR timer, in RTS.
        qp.connect(&qp.endpoint()).unwrap();
        attr.min_rnr_timer = 9;
        let timer = ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0 as i32;
        assert_eq!(ibv_modify_qp(raw, &mut attr, timer), 0);
        attr.min_rnr_timer = 0;
        assert_eq!(ibv_query_qp(raw, &mut attr, timer, &mut init), 0);
        assert_eq!(attr.min_rnr_timer, 9);
        assert_eq!(qp.query().unwrap().0, QpState::Rts);
        qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
        drop(qp.clone());
        assert!(qp.as_raw().is_some());
    }
}
