//! Attempts: delays, deadlines, errors that end them, and dropped handles.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures::StreamExt;
use futures::future::poll_immediate;
use tokio::time::Instant;
use tokio_rdma::cm::ConnectError;
use tokio_rdma::error::NoRuntime;
use tokio_rdma::peers::{
    Reconnect, ReconnectCause, ReconnectError, ReconnectPolicy, ReconnectState,
};
use tokio_rdma::{CloseReason, Connection, EstablishError, RdmaListener, cm};

use super::setup::{HOUR, Hosts, MS, config, eager, is_waiting, paused, run, serve};
use crate::torture::{eventually, soon};

fn refused() -> EstablishError {
    ConnectError::Refused { address: ([127, 0, 0, 1], 9).into(), in_process: true }.into()
}

/// Returns a handle whose attempts are refused at once, and the number of them.
fn refused_by_all(policy: ReconnectPolicy) -> (Reconnect, Arc<AtomicU32>) {
    let attempts = Arc::new(AtomicU32::new(0));
    let counted = attempts.clone();
    let client = Reconnect::with_connector(policy, move || {
        counted.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Err::<Connection, _>(refused()))
    });
    (client.unwrap(), attempts)
}

#[test]
fn delays_double_with_jitter_up_to_the_greatest() {
    paused("delays", || async {
        let policy = ReconnectPolicy::default().first_delay(100 * MS).greatest_delay(3 * HOUR);
        let (client, attempts) = refused_by_all(policy);
        let mut states = client.states();
        let mut whole = 100 * MS;
        let mut waits = Vec::new();
        while waits.len() < 24 {
            let Some(ReconnectState::Waiting { delay, cause }) = states.next().await else {
                continue;
            };
            assert_eq!(cause, ReconnectCause::Attempt(refused()));
            assert!(delay >= whole / 2 && delay <= whole, "{delay:?} of {whole:?}");
            waits.push((Instant::now(), delay));
            whole = (whole * 2).min(3 * HOUR);
        }
        for pair in waits.windows(2) {
            // The attempts take no virtual time, and Tokio's timer rounds to milliseconds.
            let waited = pair[1].0 - pair[0].0;
            assert!(waited >= pair[0].1 && waited <= pair[0].1 + 2 * MS, "{waits:?}");
        }
        let fractions = waits.iter().zip(0..).map(|((_, delay), step)| {
            let whole = (100 * MS * (1 << step)).min(3 * HOUR);
            delay.as_secs_f64() / whole.as_secs_f64()
        });
        let spread = fractions.fold((1.0_f64, 0.0_f64), |(low, high), fraction| {
            (low.min(fraction), high.max(fraction))
        });
        assert!(spread.1 - spread.0 > 0.05, "no jitter: {waits:?}");
        assert_eq!(attempts.load(Ordering::Relaxed), 24);
    });
}

#[test]
fn refused_until_the_deadline_ends_with_its_error() {
    paused("deadline", || async {
        let policy = ReconnectPolicy::default().deadline(Some(HOUR)).greatest_delay(60_000 * MS);
        let (client, attempts) = refused_by_all(policy);
        let start = Instant::now();
        let error = client.connected().await.unwrap_err();
        let ReconnectError::TimedOut { after, attempts: counted, cause } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((*after, cause), (HOUR, &ReconnectCause::Attempt(refused())));
        assert_eq!(*counted, attempts.load(Ordering::Relaxed));
        // At least half of each delay is waited for.
        assert!((60..=150).contains(counted), "{counted} attempts");
        assert!(start.elapsed() >= HOUR);
        assert_eq!(client.state(), ReconnectState::Failed(error.clone()));
        assert_eq!(client.connected().await.unwrap_err(), error, "it is final");
        assert!(error.to_string().contains("within 3600s"), "{error}");
    });
}

#[test]
fn refused_by_a_device_until_the_deadline_ends_with_its_error() {
    run("refused", || async {
        let hosts = Hosts::new().await;
        let client = hosts.reconnect(eager().deadline(Some(100 * MS)));
        let error = soon("deadline", client.connected()).await.unwrap_err();
        let ReconnectError::TimedOut { cause, .. } = error else { panic!("{error:?}") };
        let refused = ConnectError::Refused { address: hosts.address, in_process: true };
        match cause {
            ReconnectCause::Attempt(cause) => assert_eq!(cause, refused.into()),
            // On a busy machine, not even the first attempt is answered.
            cause => assert!(matches!(cause, ReconnectCause::AttemptTimedOut { .. }), "{cause}"),
        }
        hosts.assert_clean().await;
    });
}

#[test]
fn hanging_attempt_is_given_up_after_its_timeout() {
    run("hanging attempt", || async {
        let policy = eager().attempt_timeout(MS);
        let client =
            Reconnect::with_connector(policy, std::future::pending::<Result<_, _>>).unwrap();
        let mut states = client.states();
        let cause = soon("second attempt", async {
            let mut cause = None;
            while let Some(state) = states.next().await {
                match state {
                    ReconnectState::Waiting { cause: of_wait, .. } => cause = Some(of_wait),
                    ReconnectState::Connecting { attempt } if attempt > 3 => break,
                    _ => {}
                }
            }
            cause
        });
        assert_eq!(cause.await, Some(ReconnectCause::AttemptTimedOut { after: MS }));
    });
}

#[test]
fn permanent_errors_end_the_attempts() {
    run("permanent", || async {
        let hosts = Hosts::new().await;
        let streams = RdmaListener::bind(&hosts.server, hosts.address).await.unwrap();
        let accepting = async {
            let _ = streams.accept().await;
            std::future::pending::<()>().await
        };
        let client = hosts.reconnect(eager());
        let error = tokio::select! {
            result = soon("refusal", client.connected()) => result.unwrap_err(),
            () = accepting => unreachable!(),
        };
        let ReconnectError::Permanent { attempts: 1, cause: ReconnectCause::Attempt(cause) } =
            &error
        else {
            panic!("{error:?}")
        };
        assert!(matches!(cause, EstablishError::Refused { .. }), "{cause:?}");
        assert_eq!(soon("last state", client.states().collect::<Vec<_>>()).await.len(), 1);

        // The settings are refused before a packet is sent.
        let invalid = config().max_send_wr(u32::MAX);
        let client = Reconnect::new(&hosts.client, hosts.address, &invalid, eager()).unwrap();
        let error = soon("error", client.connected()).await.unwrap_err();
        assert!(matches!(error, ReconnectError::Permanent { attempts: 1, .. }), "{error:?}");
    });
}

#[test]
fn policy_decides_which_errors_are_retried() {
    run("retry_when", || async {
        let (client, attempts) = refused_by_all(eager().retry_when(|_| false));
        let error = soon("error", client.connected()).await.unwrap_err();
        assert!(matches!(error, ReconnectError::Permanent { attempts: 1, .. }), "{error:?}");
        assert_eq!(attempts.load(Ordering::Relaxed), 1);

        let rejected = EstablishError::Rejected {
            address: ([127, 0, 0, 1], 9).into(),
            user_data: "busy".into(),
        };
        let mut attempt = 0;
        let policy = eager().retry_when(|error| matches!(error, EstablishError::Rejected { .. }));
        let client = Reconnect::with_connector(policy, move || {
            attempt += 1;
            let error = if attempt < 5 { rejected.clone() } else { refused() };
            std::future::ready(Err(error))
        });
        let error = soon("error", client.unwrap().connected()).await.unwrap_err();
        assert!(matches!(error, ReconnectError::Permanent { attempts: 5, .. }), "{error:?}");
    });
}

#[test]
fn handle_dropped_during_an_attempt_leaves_nothing_behind() {
    run("dropped attempt", || async {
        let hosts = Hosts::new().await;
        let listener = cm::Listener::bind(&hosts.server, hosts.address).await.unwrap();
        for _ in 0..20 {
            let client = hosts.reconnect(eager());
            let states = client.states();
            // The listener does not accept, so the attempt waits for its answer.
            let control = hosts.network.control("client").unwrap();
            eventually("attempt", || control.queue_pairs() > 0).await;
            assert_eq!(client.state(), ReconnectState::Connecting { attempt: 1 });
            drop(client);
            let last = soon("last state", states.collect::<Vec<_>>()).await;
            assert_eq!(last, [ReconnectState::Closed]);
            eventually("withdrawal", || control.queue_pairs() == 0).await;
        }
        drop(listener);
        hosts.assert_clean().await;
    });
}

#[test]
fn dropped_connector_future_shows_that_the_task_has_ended() {
    run("task", || async {
        let held = Arc::new(());
        for close in [false, true] {
            let inner = held.clone();
            let client = Reconnect::with_connector(eager(), move || {
                let inner = inner.clone();
                async move {
                    std::future::pending::<()>().await;
                    drop(inner);
                    Err(refused())
                }
            })
            .unwrap();
            eventually("attempt", || Arc::strong_count(&held) > 2).await;
            if close {
                client.close().await.unwrap();
                assert_eq!(client.connected().await.unwrap_err(), ReconnectError::Closed);
            } else {
                drop(client);
            }
            eventually("end of the task", || Arc::strong_count(&held) == 1).await;
        }
    });
}

#[test]
fn waiting_callers_fail_when_the_handle_is_closed() {
    run("close", || async {
        let (client, _) = refused_by_all(eager().first_delay(HOUR).greatest_delay(HOUR));
        let mut waiting = pin!(client.connected());
        assert!(poll_immediate(&mut waiting).await.is_none());
        eventually("wait", || is_waiting(&client.state())).await;
        assert_eq!(client.close().await, Ok(()));
        assert_eq!(soon("error", waiting).await.unwrap_err(), ReconnectError::Closed);
        assert_eq!(client.close().await, Ok(()), "closing again has no effect");
    });
}

#[test]
fn close_ends_the_connection_cleanly() {
    run("clean close", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let client = hosts.reconnect(eager());
        let (_, ours, theirs) = Hosts::next(&client, &listener).await;
        let both = async { tokio::join!(client.close(), theirs.close()) };
        assert_eq!(soon("close", both).await, (Ok(()), Ok(())));
        assert_eq!(ours.close_reason(), Some(CloseReason::Clean));
        assert_eq!(client.state(), ReconnectState::Closed);
        drop((ours, theirs, listener));
        hosts.assert_clean().await;
    });
}

#[test]
fn retry_now_ends_a_long_wait() {
    run("retry_now", || async {
        let hosts = Hosts::new().await;
        let client = hosts.reconnect(eager().first_delay(HOUR).greatest_delay(HOUR));
        eventually("wait", || is_waiting(&client.state())).await;
        let serving = serve(hosts.listen().await);
        assert!(is_waiting(&client.state()));
        client.retry_now();
        assert_eq!(soon("connection", client.connected()).await.unwrap().0, 1);
        serving.abort();
    });
}

#[test]
fn slow_observer_sees_the_newest_state() {
    run("states", || async {
        let hosts = Hosts::new().await;
        let client = hosts.reconnect(eager());
        let mut states = client.states();
        assert!(states.next().await.is_some_and(|state| !state.is_final()));
        eventually(
            "attempts",
            || matches!(client.state(), ReconnectState::Connecting { attempt } if attempt > 5),
        )
        .await;
        let serving = serve(hosts.listen().await);
        soon("connection", client.connected()).await.unwrap();
        // It has missed all others.
        assert_eq!(states.next().await, Some(ReconnectState::Connected { generation: 1 }));
        assert!(poll_immediate(states.next()).await.is_none());
        client.close().await.ok();
        assert_eq!(soon("state", states.next()).await, Some(ReconnectState::Closed));
        assert_eq!(soon("end", states.next()).await, None);
        serving.abort();
    });
}

#[test]
fn runtime_without_a_timer_is_an_error() {
    let builder = || tokio::runtime::Builder::new_current_thread();
    let without = builder().enable_io().build().unwrap();
    let missing = |_: &_| Reconnect::with_connector(eager(), || std::future::ready(Err(refused())));
    assert_eq!(without.block_on(async { missing(&()).map(drop) }), Err(NoRuntime::Time));
    assert_eq!(missing(&()).map(drop), Err(NoRuntime::Outside));
}

#[test]
fn callers_learn_that_the_runtime_has_shut_down() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (client, _) = {
        let _entered = runtime.enter();
        refused_by_all(eager())
    };
    drop(runtime);
    let connected = crate::torture::block_on(client.connected());
    assert_eq!(connected.unwrap_err(), ReconnectError::Runtime);
}

#[test]
fn panic_of_connector_or_policy_reaches_waiting_callers() {
    fn refuse() -> std::future::Ready<Result<Connection, EstablishError>> {
        std::future::ready(Err(refused()))
    }
    run("panics", || async {
        let connector = Reconnect::with_connector(eager(), || {
            let rack = 7;
            assert_ne!(rack, 7, "no route to rack {rack}");
            refuse()
        });
        let attempt = Reconnect::with_connector(eager(), || async {
            tokio::task::yield_now().await;
            if refuse().await.is_err() {
                panic!("no route to rack 7");
            }
            refuse().await
        });
        let policy =
            Reconnect::with_connector(eager().retry_when(|_| panic!("no route to rack 7")), refuse);
        for client in [connector, attempt, policy] {
            let client = client.unwrap();
            let error = soon("the panic", client.connected()).await.unwrap_err();
            let ReconnectError::Panicked { message } = &error else { panic!("{error:?}") };
            assert!(message.contains("no route to rack 7"), "{message}");
            assert!(error.to_string().ends_with(message), "{error}");
            assert_eq!(client.state(), ReconnectState::Failed(error));
            soon("close", client.close()).await.unwrap();
        }
    });
}
