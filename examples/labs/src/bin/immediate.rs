//! Lab 3: immediate data, and how it consumes receives. See `examples/labs/docs/03-immediate.md`.

use std::process::ExitCode;
use std::time::Duration;

use labs::{Peer, Result, check, in_time, long_ack_timeout};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::types::WcStatus;
use tokio_rdma::{CompletionMode, Imm};

fn main() -> ExitCode {
    labs::run("immediate", client, server)
}

/// Sends operations that do or do not consume a receive of the server.
async fn client(mut peer: Peer) -> Result<()> {
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let remote = peer.offered().await?;
    let pool = end.pool(64, 16)?;

    in_time("WRITE", qp.write(pool.copy_from(b"quiet")?, remote.slice(..5)?)).await?;
    peer.barrier().await?;

    peer.barrier().await?;
    in_time(
        "WRITE with immediate",
        qp.with_imm(Imm(1)).write(pool.copy_from(b"heard")?, remote.slice(..5)?),
    )
    .await?;

    peer.barrier().await?;
    in_time("SEND with immediate", qp.with_imm(Imm(2)).send(pool.copy_from(b"message")?)).await?;

    peer.barrier().await?;
    let sends = [
        qp.with_imm(Imm(10)).write(pool.copy_from(b"a")?, remote.slice(..1)?),
        qp.with_imm(Imm(11)).send(pool.copy_from(b"b")?),
        qp.with_imm(Imm(12)).write(pool.try_alloc(0)?, remote.slice(..0)?),
    ];
    for send in sends {
        in_time("a send", send).await?;
    }
    peer.barrier().await?;

    // The peer's device answers "receiver not ready" (RNR). The sender retries up to `rnr_retry`
    // times.
    let qp = end.queue_pair()?;
    peer.connect_with(&qp, &RetryConfig { rnr_retry: 1, ..long_ack_timeout() }).await?;
    let refused = qp.with_imm(Imm(3)).write(pool.copy_from(b"late")?, remote.slice(..4)?);
    let status = match tokio::time::timeout(Duration::from_secs(10), refused).await? {
        Ok(_) => return Err("a WRITE with immediate completed without a receive".into()),
        Err(error) => error.status(),
    };
    check("status without a receive", status, Some(WcStatus::RNR_RETRY_EXC_ERR))?;
    println!("without a receive: {}", WcStatus::RNR_RETRY_EXC_ERR);
    peer.barrier().await
}

async fn server(mut peer: Peer) -> Result<()> {
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let memory = end.expose(4096)?;
    let pool = end.pool(64, 16)?;

    // A plain WRITE consumes no receive.
    let receive = qp.recv(pool.try_alloc(64)?);
    peer.offer(&memory).await?;
    peer.barrier().await?;
    check("receive completed by a WRITE", receive.is_finished(), false)?;
    println!("WRITE: the receive is still posted");

    // With immediate data it does. The receive's buffer stays empty: the data is where the WRITE
    // named.
    peer.barrier().await?;
    let received = in_time("the receive", receive).await?;
    check("immediate", received.imm, Some(Imm(1)))?;
    check(
        "written, bytes, bytes in the buffer",
        (received.written, received.len, received.buffer.len()),
        (true, 5, 0),
    )?;
    let mut bytes = [0; 5];
    memory.read(0, &mut bytes)?;
    check("memory", &bytes, b"heard")?;
    println!(
        "WRITE with immediate: {} bytes in memory, none in the receive's buffer, immediate {:?}",
        received.len, received.imm
    );

    // A SEND with immediate has its message in the buffer.
    let receive = qp.recv(pool.try_alloc(64)?);
    peer.barrier().await?;
    let received = in_time("the receive", receive).await?;
    check(
        "message",
        (&received.buffer[..], received.imm, received.written),
        (&b"message"[..], Some(Imm(2)), false),
    )?;
    println!(
        "SEND with immediate: {} bytes in the buffer, immediate {:?}",
        received.len, received.imm
    );

    // Receives are consumed in the order in which they were posted, by either operation.
    let receives =
        [qp.recv(pool.try_alloc(64)?), qp.recv(pool.try_alloc(64)?), qp.recv(pool.try_alloc(64)?)];
    peer.barrier().await?;
    for (receive, imm) in receives.into_iter().zip(10..) {
        check("immediate", in_time("a receive", receive).await?.imm, Some(Imm(imm)))?;
    }
    println!("three receives in order: a WRITE, a SEND, a WRITE of 0 bytes");
    peer.barrier().await?;

    // A connection without a posted receive.
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    peer.barrier().await
}
