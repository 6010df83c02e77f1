//! An RDMA WRITE between two software devices by synchronous verbs, without runtime or threads.
//!
//! `cargo run -p rdma-soft --example write`
//!
//! ```text
//!  a: registered source ── post_send(WRITE) ──▶ network in memory ──▶ b: registered target
//!  a: poll the completion queue ◀── completion
//! ```

#![allow(unsafe_code, reason = "device memory is registered by address")]

use std::cell::UnsafeCell;
use std::error::Error;
use std::ptr::NonNull;

use rdma_soft::contract::{Context as _, Cq as _, CqInit, Mr as _, Pd as _, Qp as _, QpInit};
use rdma_soft::types::{
    Access, AckTimeout, AddressVector, Data, DirectConfig, Mtu, PortNum, Psn, QpAttr, QpCaps,
    QpState, RemoteAddr, RnrTimer, SendFlags, SendOp, SendWr, Sge, Transport, WcStatus,
    WorkCompletion, WrId,
};
use rdma_soft::{Context, Cq, Network, Pd, Qp};

/// A device and the objects of one connection.
struct Side {
    qp: Qp,
    cq: Cq,
    pd: Pd,
    context: Context,
}

impl Side {
    fn open(network: &Network, name: &str) -> Result<Self, Box<dyn Error>> {
        let context = network.open(name)?;
        let pd = context.create_pd()?;
        let cq = context.create_cq(&CqInit::new(16))?;
        let caps = QpCaps {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInit {
            transport: Transport::Rc,
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            caps,
            direct: DirectConfig::DEFAULT,
        };
        let qp = pd.create_qp(&init)?;
        Ok(Self { qp, cq, pd, context })
    }

    /// Moves the queue pair from RESET to RTS, `ibv_modify_qp(3)`.
    fn connect(&self, peer: &Self) -> Result<(), Box<dyn Error>> {
        let port = PortNum(1);
        let address = AddressVector::new(port, 0, peer.context.port(port)?.gids[0].gid);
        self.qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(port),
            access: Some(Access::REMOTE_WRITE),
            ..QpAttr::to_state(QpState::Init)
        })?;
        self.qp.modify(&QpAttr {
            address: Some(address),
            path_mtu: Some(Mtu::Mtu4096),
            dest_qpn: Some(peer.qp.qpn()),
            rq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(RnrTimer::from_code(12)),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.qp.modify(&QpAttr {
            timeout: Some(AckTimeout::from_code(14)),
            retry_count: Some(7),
            rnr_retry: Some(7),
            sq_psn: Some(Psn::new(0)),
            max_rd_atomic: Some(1),
            ..QpAttr::to_state(QpState::Rts)
        })?;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let network = Network::new();
    let (a, b) = (Side::open(&network, "a")?, Side::open(&network, "b")?);
    a.connect(&b)?;
    b.connect(&a)?;

    // While registered, memory is accessed by pointers only.
    let (source, target) = (UnsafeCell::new(*b"hello, b"), UnsafeCell::new([0_u8; 8]));
    let (from, to) = (NonNull::from(&source).cast::<u8>(), NonNull::from(&target).cast::<u8>());
    // SAFETY: the memory outlives the registration, which is dropped below; meanwhile no reference
    // to it exists.
    let from_mr = unsafe { a.pd.register(from, 8, source.get() as u64, Access::empty(), false)? };
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    // SAFETY: as above.
    let to_mr = unsafe { b.pd.register(to, 8, target.get() as u64, access, false)? };

    let sges = [Sge { addr: source.get() as u64, length: 8, lkey: from_mr.lkey() }];
    let remote = RemoteAddr { addr: target.get() as u64, rkey: to_mr.rkey() };
    let write = SendWr {
        wr_id: WrId(1),
        op: SendOp::Write(remote),
        flags: SendFlags::SIGNALED,
        data: Data::Sges(&sges),
        target: None,
    };
    // SAFETY: the source stays valid and untouched until the completion is polled.
    unsafe { a.qp.post_send([write]) }.map_err(|refused| refused.error)?;

    let mut completions = [WorkCompletion::default(); 1];
    while a.cq.poll(&mut completions)? == 0 {
        std::thread::yield_now();
    }
    assert_eq!((completions[0].wr_id, completions[0].status), (WrId(1), WcStatus::SUCCESS));
    drop((from_mr, to_mr));
    let arrived = target.into_inner();
    println!("b has {:?}", std::str::from_utf8(&arrived)?);
    assert_eq!(&arrived, b"hello, b");
    Ok(())
}
