//! Work that may block.
//!
//! It runs on a thread of its own, because the program may occupy the runtime's blocking pool, or
//! on the calling thread if none can be started.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;

use rdma_provider::later;
use rdma_provider::locks::Mutex;
use tokio::sync::oneshot;

use crate::contained::wakes_contained;

pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) {
    let work = Arc::new(Mutex::new(Some(work)));
    let sent = Arc::clone(&work);
    let thread = thread::Builder::new().name("rdma-blocking".to_owned());
    if let Err(error) = thread.spawn(move || take_and_run(&sent)) {
        rdma_provider::warn!(
            %error,
            "failed to start a thread for work that may block; blocking the current thread"
        );
        take_and_run(&work);
    }
}

fn take_and_run(work: &Mutex<Option<impl FnOnce()>>) {
    let work = work.lock().take();
    if let Some(work) = work {
        later::caught_panic(work);
    }
}

/// Runs `work` to the end even if the future is dropped. Propagates its panic.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (result, received) = oneshot::channel();
    spawn(move || {
        // Without a receiver the future was dropped.
        let _ = result.send(catch_unwind(AssertUnwindSafe(work)));
    });
    match wakes_contained(received).await {
        Ok(Ok(value)) => value,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => unreachable!("the work sends its result"),
    }
}
