//! Lab 3: immediate data, and how it consumes receives. `docs/labs/03-immediate.md`

use std::process::ExitCode;
use std::time::Duration;

use labs::{Peer, Result, check, in_time, patient};
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::WcStatus;
use tokio_rdma::{CompletionMode, Imm};

fn main() -> ExitCode {
    labs::run("immediate", client, server)
}

/// What the client does uses up receives of the server, or does not; the two meet after each step.
async fn client(mut peer: Peer) -> Result<()> {
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let remote = peer.offered().await?;
    let pool = end.pool(64, 16)?;

    in_time("WRITE", qp.write(pool.copy_from(b"quiet")?, remote.slice(..5)?)).await?;
    peer.meet().await?;

    peer.meet().await?;
    in_time(
        "WRITE with immediate",
        qp.write_with_imm(pool.copy_from(b"heard")?, remote.slice(..5)?, Imm(1)),
    )
    .await?;

    peer.meet().await?;
    in_time("SEND with immediate", qp.send_with_imm(pool.copy_from(b"message")?, Imm(2))).await?;

    peer.meet().await?;
    let sends = [
        qp.write_with_imm(pool.copy_from(b"a")?, remote.slice(..1)?, Imm(10)),
        qp.send_with_imm(pool.copy_from(b"b")?, Imm(11)),
        qp.write_with_imm(pool.try_alloc(0)?, remote.slice(..0)?, Imm(12)),
    ];
    for send in sends {
        in_time("a send", send).await?;
    }
    peer.meet().await?;

    // Without a receive the peer's device says "not ready": the sender's repeats, as often as it was told to.
    let qp = end.queue_pair()?;
    peer.connect_with(&qp, &ConnectOptions { rnr_retry: 1, ..patient() }).await?;
    let refused = qp.write_with_imm(pool.copy_from(b"late")?, remote.slice(..4)?, Imm(3));
    let status = match tokio::time::timeout(Duration::from_secs(10), refused).await? {
        Ok(_) => return Err("a WRITE with immediate was told to nobody".into()),
        Err(error) => error.status(),
    };
    check("status without a receive", status, Some(WcStatus::RNR_RETRY_EXC_ERR))?;
    println!("no receive: {}", WcStatus::RNR_RETRY_EXC_ERR);
    peer.meet().await
}

async fn server(mut peer: Peer) -> Result<()> {
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let memory = end.expose(4096)?;
    let room = end.pool(64, 16)?;

    // A WRITE alone consumes nothing, and the server is not told.
    let receive = qp.recv(room.try_alloc(64)?);
    peer.offer(&memory).await?;
    peer.meet().await?;
    check("receives that are done after a WRITE", receive.is_finished(), false)?;
    println!("WRITE: the receive is still posted");

    // With immediate data it consumes that receive. Its buffer stays empty: the data went where the WRITE said.
    peer.meet().await?;
    let told = in_time("the receive", receive).await?;
    check("immediate", told.imm, Some(Imm(1)))?;
    check(
        "written, bytes, bytes in the buffer",
        (told.written, told.len, told.buffer.len()),
        (true, 5, 0),
    )?;
    let mut bytes = [0; 5];
    memory.read(0, &mut bytes)?;
    check("memory", &bytes, b"heard")?;
    println!(
        "WRITE with immediate: {} bytes in memory, none in the buffer of the receive, immediate {:?}",
        told.len, told.imm
    );

    // SEND with immediate: the same four bytes, beside a message that is in the buffer.
    let receive = qp.recv(room.try_alloc(64)?);
    peer.meet().await?;
    let told = in_time("the receive", receive).await?;
    check(
        "message",
        (&told.buffer[..], told.imm, told.written),
        (&b"message"[..], Some(Imm(2)), false),
    )?;
    println!("SEND with immediate: {} bytes in the buffer, immediate {:?}", told.len, told.imm);

    // Receives are consumed in the order in which they were posted, by whatever needs one.
    let receives =
        [qp.recv(room.try_alloc(64)?), qp.recv(room.try_alloc(64)?), qp.recv(room.try_alloc(64)?)];
    peer.meet().await?;
    for (receive, imm) in receives.into_iter().zip(10..) {
        check("immediate", in_time("a receive", receive).await?.imm, Some(Imm(imm)))?;
    }
    println!("three receives, in order: a WRITE, a SEND, a WRITE of no bytes");
    peer.meet().await?;

    // A connection without a receive.
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    peer.meet().await
}
