//! A server that is restarted while requests run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio_rdma::error::Outcome;
use tokio_rdma::peers::Reconnect;
use tokio_rdma::{CloseReason, Connection, Listener, MessageError};

use super::setup::{Hosts, MS, eager, run};
use crate::torture::soon;

/// How often the server executed each request.
type Executed = Arc<Mutex<BTreeMap<u64, u32>>>;

/// Executes and answers requests of one connection after another. Drops the last connection after
/// `limit` requests, without an answer to the last.
async fn serve_until(listener: &Listener, limit: u32, executed: &Executed) {
    let mut left = limit;
    while left > 0 {
        let connection = listener.accept().await.unwrap();
        while let Ok(Some(request)) = connection.recv().await {
            let number = u64::from_le_bytes(request[..].try_into().unwrap());
            *executed.lock().unwrap().entry(number).or_default() += 1;
            left -= 1;
            if left == 0 || connection.send(request).await.is_err() {
                break;
            }
        }
    }
}

/// Returns the outcome of a request: `Done` with an answer, otherwise the error's.
async fn request(connection: &Connection, number: u64) -> Outcome {
    let message = Bytes::copy_from_slice(&number.to_le_bytes());
    if connection.send(message.clone()).await.is_err() {
        return Outcome::NotSent;
    }
    match soon("answer", connection.recv()).await {
        Ok(Some(answer)) => {
            assert_eq!(answer, message);
            Outcome::Done
        }
        Ok(None) => Outcome::MaybeExecuted,
        Err(error) => {
            assert!(matches!(error, MessageError::Closed(_)), "{error:?}");
            error.outcome()
        }
    }
}

#[test]
fn requests_get_truthful_outcomes_while_the_server_restarts() {
    const RESTARTS: u64 = 25;
    run("restarts", || async {
        let hosts = Hosts::new().await;
        let executed = Executed::default();
        let client = hosts.reconnect(eager());
        let serving = async {
            for restart in 0..RESTARTS {
                let listener = hosts.listen().await;
                serve_until(&listener, 1 + restart as u32 % 5, &executed).await;
            }
        };
        let requesting = async {
            let mut outcomes = BTreeMap::new();
            let mut generations = Vec::new();
            for number in 0.. {
                let (generation, connection) = match client.connected().await {
                    Ok(connected) => connected,
                    Err(error) => panic!("{error}"),
                };
                if generations.last() != Some(&generation) {
                    generations.push(generation);
                }
                outcomes.insert(number, request(&connection, number).await);
                if executed.lock().unwrap().len() as u64 >= (0..RESTARTS).map(|n| 1 + n % 5).sum() {
                    break;
                }
            }
            (outcomes, generations)
        };
        let both = async { tokio::join!(serving, requesting) };
        let ((), (outcomes, generations)) = soon("restarts", both).await;
        let executed = executed.lock().unwrap().clone();
        for (number, outcome) in &outcomes {
            let times = executed.get(number).copied().unwrap_or(0);
            match outcome {
                Outcome::NotSent => assert_eq!(times, 0, "request {number}"),
                Outcome::MaybeExecuted => assert!(times <= 1, "request {number}"),
                Outcome::Done => assert_eq!(times, 1, "request {number}"),
            }
        }
        assert!(generations.len() as u64 >= RESTARTS, "{generations:?}");
        assert!(generations.windows(2).all(|pair| pair[0] < pair[1]), "{generations:?}");
        assert!(outcomes.values().any(|&outcome| outcome == Outcome::Done));
        assert!(outcomes.values().any(|&outcome| outcome == Outcome::MaybeExecuted));
        soon("close", client.close()).await.ok();
        drop(client);
        hosts.assert_clean().await;
    });
}

#[test]
fn failed_send_has_sent_nothing() {
    run("failed send", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        for received in [0, 1, 7, 40] {
            let (_, ours, theirs) = Hosts::next(&client, &listener).await;
            let receiving = async {
                let mut numbers = Vec::new();
                while numbers.len() < received {
                    numbers.push(theirs.recv().await.unwrap().unwrap());
                }
                theirs.abort();
                drop(theirs);
                numbers
            };
            let sending = async {
                let mut sent = 0_u32;
                while ours.send(sent.to_le_bytes().to_vec()).await.is_ok() {
                    sent += 1;
                }
                sent
            };
            let (numbers, sent) = soon("end", async { tokio::join!(receiving, sending) }).await;
            // The server has a prefix of the messages whose `send` returned `Ok`.
            let expected = (0..received as u32).map(|number| number.to_le_bytes().to_vec());
            assert!(numbers.iter().eq(expected.collect::<Vec<_>>().iter()));
            assert!(sent as usize >= received);
            let reason = soon("reason", ours.closed()).await;
            assert_eq!(reason.outcome(), Outcome::MaybeExecuted, "{reason}");
        }
    });
}

#[test]
fn clean_close_and_refusals_have_certain_outcomes() {
    run("certain outcomes", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        let (_, ours, theirs) = Hosts::next(&client, &listener).await;
        ours.send("last").await.unwrap();
        let both = async { tokio::join!(ours.close(), theirs.close()) };
        assert_eq!(soon("close", both).await, (Ok(()), Ok(())));
        assert_eq!(ours.close_reason().map(|reason| reason.outcome()), Some(Outcome::Done));
        let late = ours.send("late").await.unwrap_err();
        assert_eq!(late, MessageError::Closed(CloseReason::Clean));
        assert_eq!(late.outcome(), Outcome::MaybeExecuted, "the error does not tell which call");
        // A clean end leads to a new connection, too.
        assert_eq!(Hosts::next(&client, &listener).await.0, 2);
    });
}

#[test]
fn callers_that_wait_get_the_same_generation() {
    run("shared generation", || async {
        let hosts = Hosts::new().await;
        let client = Arc::new(hosts.reconnect(eager().first_delay(2 * MS)));
        let waiting = (0..8).map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.connected().await.map(|(number, _)| number) })
        });
        let waiting: Vec<_> = waiting.collect();
        let listener = hosts.listen().await;
        let theirs = soon("accept", listener.accept()).await.unwrap();
        for caller in waiting {
            assert_eq!(soon("connection", caller).await.unwrap(), Ok(1));
        }
        let (_, ours) = client.connected().await.unwrap();
        theirs.abort();
        soon("end", ours.closed()).await;
        assert_eq!(Hosts::next(&client, &listener).await.0, 2);
        assert_is_shared::<Reconnect>();
    });
}

fn assert_is_shared<T: Send + Sync + 'static>() {}
