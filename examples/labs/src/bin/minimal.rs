//! Lab 1: the minimal flow, one verb at a time. See `examples/labs/docs/01-minimal.md`.
//!
//! The lab uses the bare verbs objects, as a C program does. Only the wait for an event is a
//! future.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Peer, Result, check, in_time};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::{
    AckTimeout, AddressVector, Data, Gid, PortNum, Psn, QpAttr, QpCaps, QpState, Qpn, RecvWr,
    RemoteAddr, RnrTimer, SendFlags, SendOp, SendWr, Transport, WcOpcode, WorkCompletion, WrId,
};
use tokio_rdma::verbs::{Channel, Cq, Qp, QpConfig};
use tokio_rdma::{Access, ExposedRegion};

fn main() -> ExitCode {
    labs::run("minimal", client, server)
}

async fn client(mut peer: Peer) -> Result<()> {
    let client = Side::new(&peer)?;
    // 5. Exchange of GID and queue pair number, then ibv_modify_qp(3) to RTR and RTS.
    client.connect(&mut peer).await?;
    let grant = peer.offered().await?;

    // 7. ibv_post_send(3) of a SEND, ibv_poll_cq(3) at both ends.
    client.region.write(0, b"hello")?;
    client.post(SendOp::Send, 0..5)?;
    check("SEND", client.poll()?.opcode, WcOpcode::SEND)?;

    // 8. WRITE and READ name the server's memory by address and key. The server does nothing.
    let there = RemoteAddr { addr: grant.addr() + 64, rkey: grant.rkey() };
    client.post(SendOp::Write(there), 0..5)?;
    check("WRITE", client.poll()?.opcode, WcOpcode::RDMA_WRITE)?;
    client.post(SendOp::Read(there), 64..69)?;
    check("READ", client.poll()?.opcode, WcOpcode::RDMA_READ)?;
    check("data read", client.text(64, 5)?, "hello".to_owned())?;
    println!("wrote 5 bytes at {:#x} and read them", there.addr);

    // 9. An event instead of polling: ibv_req_notify_cq(3), then check, then sleep.
    client.cq.arm(false)?;
    let counter = RemoteAddr { addr: grant.addr() + 128, rkey: grant.rkey() };
    client.post(SendOp::FetchAdd { remote: counter, add: 42 }, 128..136)?;
    in_time("the event", client.event()).await?;
    check("fetch-and-add", client.poll()?.opcode, WcOpcode::FETCH_ADD)?;
    check("the counter's old value", client.region.load(128)?, 0)?;
    println!("fetch-and-add changed 0 to 42; an event announced its completion");
    peer.barrier().await
    // 10. The objects may drop in any order: each holds a reference to its parents.
}

async fn server(mut peer: Peer) -> Result<()> {
    let server = Side::new(&peer)?;
    server.connect(&mut peer).await?;

    // 6. ibv_post_recv(3): a buffer, posted before the message can arrive.
    server.post_recv(WrId(1), 0..64)?;
    peer.offer(&server.region).await?;

    let received = server.poll()?;
    check(
        "receive",
        (received.opcode, received.byte_len, received.wr_id),
        (WcOpcode::RECV, 5, WrId(1)),
    )?;
    check("message", server.text(0, 5)?, "hello".to_owned())?;
    println!("received {} bytes into receive {:?}", received.byte_len, received.wr_id);

    // The remaining operations produce no completion here.
    peer.barrier().await?;
    check("data written", server.text(64, 5)?, "hello".to_owned())?;
    check("the counter", server.region.load(128)?, 42)
}

struct Side {
    qp: Qp,
    cq: Cq,
    channel: Channel,
    region: ExposedRegion,
    port: PortNum,
    gid: Gid,
    gid_index: u8,
}

/// A random start is better: packets of an earlier connection are then not accepted.
const FIRST_PACKET: u32 = 0x00ab_cdef;

impl Side {
    fn new(peer: &Peer) -> Result<Self> {
        let device = peer.device();
        let (port, gid) = peer.path()?;
        // 1. ibv_alloc_pd(3): the objects of a protection domain may be used together.
        let pd = device.protection_domain()?;
        // 2. ibv_reg_mr(3): memory that the device, and peers with the key, may access.
        let region = ExposedRegion::new(&pd, HostMemory::zeroed(4096)?, Access::REMOTE_ALL)?;
        // 3. ibv_create_comp_channel(3), ibv_create_cq(3): completions, and the events that
        //    announce them.
        let channel = Channel::new(device)?;
        let cq = Cq::new(device, 16, Some(&channel), 0)?;
        // 4. ibv_create_qp(3), and ibv_modify_qp(3) to INIT: receives can be posted.
        let caps = QpCaps {
            max_send_wr: 8,
            max_recv_wr: 8,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let qp = Qp::new(&pd, &cq, &cq, None, &QpConfig::new(Transport::Rc, caps))?;
        qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(port.port),
            access: Some(Access::REMOTE_ALL),
            ..QpAttr::to_state(QpState::Init)
        })?;
        Ok(Self { qp, cq, channel, region, port: port.port, gid: gid.gid, gid_index: gid.index })
    }

    async fn connect(&self, peer: &mut Peer) -> Result<()> {
        let theirs =
            peer.exchange(&[&self.gid.0[..], &self.qp.qpn().0.to_be_bytes()].concat()).await?;
        let (gid, qpn) =
            theirs.split_first_chunk::<16>().ok_or("malformed GID of the other end")?;
        let qpn = Qpn(u32::from_be_bytes(qpn.try_into()?));
        self.modify(Gid(*gid), qpn)?;
        println!("connected: {} to {qpn}", self.qp.qpn());
        // Neither side may send before both are connected.
        peer.barrier().await
    }

    /// Moves the queue pair to RTR, where it receives, and to RTS, where it also sends.
    fn modify(&self, peer: Gid, qpn: Qpn) -> Result<()> {
        let mtu = self.cq.device().port(self.port)?.active_mtu;
        self.qp.modify(&QpAttr {
            address: Some(AddressVector::new(self.port, self.gid_index, peer)),
            path_mtu: Some(mtu),
            dest_qpn: Some(qpn),
            rq_psn: Some(Psn::new(FIRST_PACKET)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(RnrTimer::from_code(12)),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.qp.modify(&QpAttr {
            sq_psn: Some(Psn::new(FIRST_PACKET)),
            timeout: Some(AckTimeout::from_code(14)),
            retry_count: Some(6),
            rnr_retry: Some(6),
            max_rd_atomic: Some(1),
            ..QpAttr::to_state(QpState::Rts)
        })?;
        Ok(())
    }

    fn post_recv(&self, wr_id: WrId, bytes: std::ops::Range<usize>) -> Result<()> {
        let buffer = self.region.slice(bytes)?.sge();
        // SAFETY: S1: the bytes belong to `self.region`, which drops after `self.qp`.
        unsafe { self.qp.post_recv(&[RecvWr { wr_id, sges: &[buffer] }])? };
        Ok(())
    }

    fn post(&self, op: SendOp, bytes: std::ops::Range<usize>) -> Result<()> {
        let sges = [self.region.slice(bytes)?.sge()];
        let request = SendWr {
            wr_id: WrId(7),
            op,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(&sges),
            target: None,
        };
        // SAFETY: S1: the bytes belong to `self.region`, which drops after `self.qp`.
        unsafe { self.qp.post_send(&[request])? };
        Ok(())
    }

    /// Returns the next completion, which must be successful.
    fn poll(&self) -> Result<WorkCompletion> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = [WorkCompletion::default()];
        while self.cq.poll(&mut found)? == 0 {
            if Instant::now() > deadline {
                return Err("no completion for 10 s".into());
            }
            std::thread::yield_now();
        }
        let [completion] = found;
        if !completion.status.is_success() {
            return Err(format!("{:?}: {}", completion.opcode, completion.status).into());
        }
        Ok(completion)
    }

    /// Sleeps until the channel has an event, and acknowledges it.
    async fn event(&self) -> Result<()> {
        #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
        let channel = AsyncFd::with_interest(self.channel.clone(), Interest::READABLE)?;
        loop {
            let mut ready = channel.readable().await?;
            if self.channel.next_event()?.is_some() {
                self.cq.acknowledge(1);
                return Ok(());
            }
            ready.clear_ready();
        }
    }

    fn text(&self, offset: usize, len: usize) -> Result<String> {
        let mut bytes = vec![0; len];
        self.region.read(offset, &mut bytes)?;
        Ok(String::from_utf8(bytes)?)
    }
}
