//! A queue pair of this crate, which posts directly.

use std::rc::Rc;

use rdma_ibverbs::contract::{
    Context as _, Cq as _, CqInit, Pd as _, PlainWr, PostError, Qp as _, QpInit,
};
use rdma_ibverbs::types::{
    DirectConfig, QpAttr, QpCaps, QpState, RecvWr, SendWr, Transport, WorkCompletion, WrId,
};
use rdma_ibverbs::{Cq, Qp, Srq, VerbError};

use crate::memory::{CompletionRing, Cqe, Rings};
use crate::requests::Request;
use crate::world::{World, attributes};

#[derive(Debug)]
pub struct Direct {
    pub qp: Qp,
    pub cq: Rc<Cq>,
    pub rings: Rings,
    pub entries: CompletionRing,
    transport: Transport,
}

impl Direct {
    pub fn new(world: &World, transport: Transport, caps: QpCaps, srq: Option<&Srq>) -> Self {
        let cq = Rc::new(world.context.create_cq(&CqInit::new(16)).unwrap());
        Self::on(&cq, world, transport, caps, srq)
    }

    /// Creates a queue pair on a completion queue that exists.
    pub fn on(
        cq: &Rc<Cq>,
        world: &World,
        transport: Transport,
        caps: QpCaps,
        srq: Option<&Srq>,
    ) -> Self {
        Self::configured(cq, world, transport, caps, srq, DirectConfig::DEFAULT)
    }

    pub fn configured(
        cq: &Rc<Cq>,
        world: &World,
        transport: Transport,
        caps: QpCaps,
        srq: Option<&Srq>,
        direct: DirectConfig,
    ) -> Self {
        assert!(cq.direct().is_some(), "the device posts directly by default");
        let init = QpInit { transport, send_cq: &**cq, recv_cq: &**cq, srq, caps, direct };
        let qp = world.pd.create_qp(&init).unwrap();
        let rings = Rings::of(qp.as_raw().as_ptr());
        world.silence(rings.register.start.cast());
        let entries = CompletionRing::taken(cq.as_raw().as_ptr());
        let direct = Self { qp, cq: cq.clone(), rings, entries, transport };
        direct.ready(world);
        direct
    }

    /// Moves the queue pair from RESET to RTS.
    pub fn ready(&self, world: &World) {
        for attr in attributes(world, self.transport) {
            self.qp.modify(&attr).unwrap();
        }
    }

    pub fn reset(&self) {
        self.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    }

    pub fn post(&self, list: &[Request]) -> Result<(), PostError> {
        let all: Vec<SendWr<'_>> = list.iter().map(Request::work).collect();
        // SAFETY: the device does not execute anything, and the tests keep what they scatter to.
        unsafe { self.qp.post_send(all.iter()) }
    }

    pub fn post_plain(&self, wr: PlainWr) -> bool {
        // SAFETY: as above; each test posts from one thread.
        unsafe { self.qp.post_plain([wr].into_iter()) }
    }

    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: as above.
        unsafe { self.qp.post_recv(list) }
    }

    pub fn put(&mut self, cqe: &Cqe) {
        // Only libmlx5 uses the user index.
        self.entries.put(&cqe.of(self.qp.qpn().0, 0x5a_5a5a));
    }

    pub fn poll(&self) -> Result<Option<WorkCompletion>, VerbError> {
        let mut out = [WorkCompletion { wr_id: WrId(u64::MAX), ..WorkCompletion::EMPTY }];
        Ok((self.cq.poll(&mut out)? == 1).then_some(out[0]))
    }
}
