//! Child processes that use what their parent opened.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio_rdma::{CompletionMode, CompletionQueue, Connection, Device, Listener, Pool};

use crate::alone::alone;
use crate::torture::{Flavour, LONG, bounded, pair, soon};
use crate::udp;

/// Runs `child` in a child process. Returns true if it does not panic.
///
/// A lock that another thread of this process holds at the fork stays locked in the child, where a
/// call may wait for it for ever. Such a child is ended, and another one started.
#[allow(unsafe_code, reason = "calls of the C library")]
fn succeeds_in_child(child: impl Fn()) -> bool {
    const SECONDS: u32 = 15;
    for _ in 0..4 {
        // SAFETY: S3: the calls take no pointers. The child process has only this thread; glibc
        // lets it allocate.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: S3: as above. The signal ends the child.
            unsafe { libc::alarm(SECONDS) };
            let failed = catch_unwind(AssertUnwindSafe(&child)).is_err();
            // SAFETY: S3: as above. No destructor of the parent's objects runs.
            unsafe { libc::_exit(i32::from(failed)) };
        }
        let mut status = 0;
        // SAFETY: S3: the call writes `status` only.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        if libc::WIFEXITED(status) {
            return libc::WEXITSTATUS(status) == 0;
        }
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM, "{status}");
    }
    false
}

fn assert_names_fork<T>(what: &str, result: Result<T, impl std::fmt::Display>) {
    let Err(error) = result else { panic!("{what} succeeds in the child process") };
    let text = error.to_string();
    assert!(text.contains("before fork(2)"), "{what}: {text}");
}

#[test]
fn child_of_fork_gets_errors_from_devices_of_its_parent() {
    if !alone("fork::child_of_fork_gets_errors_from_devices_of_its_parent") {
        return;
    }
    bounded("a child process", LONG, || {
        let network = udp::network(&["a", "b"]);
        let [a, b] = ["a", "b"].map(|name| Device::software_in(&network, name).unwrap());
        let runtime = Flavour::MultiThread.runtime();
        let (listener, ours, theirs) = runtime.block_on(async {
            let at = a.default_path().unwrap().1.gid.to_ip();
            let listener = Listener::bind(&a, (at, 0)).await.unwrap();
            let (ours, theirs) = tokio::join!(
                listener.accept(),
                Connection::connect(&b, listener.local_addr().unwrap())
            );
            (listener, ours.unwrap(), theirs.unwrap())
        });
        let pd = a.protection_domain().unwrap();
        let queue = CompletionQueue::new(&a, CompletionMode::Event).unwrap();
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let (one, other) = pair(&pd, &queue);
        let child = || {
            Flavour::CurrentThread.runtime().block_on(async {
                let address = listener.local_addr().unwrap();
                assert_names_fork("a pool", Pool::new(&pd, 64, 1));
                assert_names_fork("a queue", CompletionQueue::new(&a, CompletionMode::Event));
                let send = one.send(pool.try_alloc(64).unwrap());
                assert_names_fork("a SEND", soon("a SEND", send).await);
                let receive = other.recv(pool.try_alloc(64).unwrap());
                assert_names_fork("a receive", soon("a receive", receive).await);
                let connect = Connection::connect(&b, address);
                assert_names_fork("connect", soon("connect", connect).await);
                assert_names_fork("bind", soon("bind", Listener::bind(&a, "0.0.0.0:0")).await);
                assert_names_fork("accept", soon("accept", listener.accept()).await);
                assert_names_fork("recv", soon("recv", theirs.recv()).await);
                let flushed = async {
                    ours.send("message").await?;
                    ours.flush().await
                };
                assert_names_fork("flush", soon("flush", flushed).await);
            });
        };
        assert!(succeeds_in_child(child));
        // The parent's connection is unharmed.
        runtime.block_on(async {
            soon("a message", ours.send("message")).await.unwrap();
            assert_eq!(soon("a message", theirs.recv()).await.unwrap().unwrap(), "message");
        });
    });
}
