//! The interface for tests: options, faults, held completions, counters, events.

use std::io;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::lint::Finding;
use crate::state::{self, State};
use crate::{abi, engine, interpose, sysfs, uar};

/// The link layer of the ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// InfiniBand: ports have LIDs.
    #[default]
    InfiniBand,
    /// Ethernet with RoCE v2: ports have IPv4 and IPv6 GIDs.
    Roce,
}

/// Options of [`EmulatedConnectX::start`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The link layer of the ports.
    pub link: Link,
    /// Number of devices, `mlx5_0` and on, all on one network: 1 to 4.
    pub devices: usize,
    /// Whether requests execute only in [`EmulatedConnectX::step`] and
    /// [`EmulatedConnectX::run_until_idle`].
    pub manual_stepping: bool,
    /// Upper limit of the ACK timeout that a queue pair sets, unless that is 0, infinite.
    pub longest_timeout: Duration,
    /// Upper limit of the RNR wait that a receiver asks for.
    pub longest_rnr_wait: Duration,
    /// Time for which a doorbell record may be ahead of the doorbells. Beyond it is a
    /// [`Problem::MissedDoorbell`](crate::Problem::MissedDoorbell).
    pub doorbell_patience: Duration,
    /// Whether short data goes into the CQE for queue pairs created with
    /// `MLX5_QP_FLAG_SCATTER_CQE`.
    pub scatter_to_cqe: bool,
    /// Whether WQEs stored to registers are compared with the ring, for
    /// [`Problem::BlueFlameMismatch`](crate::Problem::BlueFlameMismatch). Only for tests that
    /// wait for each WQE before they post the next: the device sees no more than the latest store
    /// to a register.
    pub check_blue_flame: bool,
    /// Whether each WQE is copied at its doorbell and compared at its execution, for
    /// [`Problem::OverwrittenEntry`](crate::Problem::OverwrittenEntry).
    pub check_overwritten: bool,
    /// Maximum number of CQEs in a compressed session, which completion queues get that the
    /// program creates with compression. Below 2, the device does not offer it.
    pub compressed_session: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            link: Link::InfiniBand,
            devices: 1,
            manual_stepping: false,
            longest_timeout: Duration::from_millis(5),
            longest_rnr_wait: Duration::from_millis(2),
            // A busy machine may suspend a thread for this long between record and doorbell.
            doorbell_patience: Duration::from_secs(5),
            scatter_to_cqe: true,
            check_blue_flame: false,
            check_overwritten: false,
            compressed_session: 0,
        }
    }
}

/// The completion status of a request or receive: `MLX5_CQE_SYNDROME_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// `IBV_WC_LOC_LEN_ERR`.
    LocalLength,
    /// `IBV_WC_LOC_QP_OP_ERR`.
    LocalQueuePairOperation,
    /// `IBV_WC_LOC_PROT_ERR`.
    LocalProtection,
    /// `IBV_WC_WR_FLUSH_ERR`.
    WorkRequestFlushed,
    /// `IBV_WC_MW_BIND_ERR`.
    MemoryWindowBind,
    /// `IBV_WC_LOC_ACCESS_ERR`.
    LocalAccess,
    /// `IBV_WC_REM_INV_REQ_ERR`.
    RemoteInvalidRequest,
    /// `IBV_WC_REM_ACCESS_ERR`.
    RemoteAccess,
    /// `IBV_WC_REM_OP_ERR`.
    RemoteOperation,
    /// `IBV_WC_RETRY_EXC_ERR`.
    RetryExceeded,
    /// `IBV_WC_RNR_RETRY_EXC_ERR`.
    RnrRetryExceeded,
    /// `IBV_WC_REM_ABORT_ERR`.
    RemoteAborted,
}

impl Status {
    pub(crate) fn syndrome(self) -> u8 {
        match self {
            Self::LocalLength => 0x01,
            Self::LocalQueuePairOperation => 0x02,
            Self::LocalProtection => 0x04,
            Self::WorkRequestFlushed => 0x05,
            Self::MemoryWindowBind => 0x06,
            Self::LocalAccess => 0x11,
            Self::RemoteInvalidRequest => 0x12,
            Self::RemoteAccess => 0x13,
            Self::RemoteOperation => 0x14,
            Self::RetryExceeded => 0x15,
            Self::RnrRetryExceeded => 0x16,
            Self::RemoteAborted => 0x22,
        }
    }
}

/// Event counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Doorbells of send queues. Two in quick succession may count as one.
    pub doorbells: u64,
    /// Requests executed: failed ones included, flushed ones not.
    pub requests: u64,
    /// CQEs written.
    pub completions: u64,
    /// Error CQEs written, flushed requests and receives included.
    pub errors: u64,
    /// CQEs written that contain data, `MLX5_QP_FLAG_SCATTER_CQE`.
    pub scattered: u64,
    /// Compressed sessions written; their CQEs are part of `completions`.
    pub compressed_sessions: u64,
    /// Events sent to completion channels.
    pub completion_events: u64,
    /// Asynchronous events.
    pub async_events: u64,
    /// Attempts that found no receive at the peer.
    pub rnr_naks: u64,
    /// Attempts without an answer.
    pub timeouts: u64,
    /// Datagrams and UC requests dropped: no peer, wrong key, or no receive.
    pub dropped: u64,
    /// Bytes of all send, receive, shared receive and completion queues that the program has
    /// created.
    pub queue_bytes: u64,
}

/// The order in which held completions are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// The order in which they completed.
    InOrder,
    /// Queue pairs in reverse; each queue pair's completions in order, as a device guarantees.
    QueuePairsReversed,
    /// Round robin over the queue pairs, oldest completions first.
    Interleaved,
}

/// The emulated device of this process. All handles refer to the same device.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedConnectX {
    _started: (),
}

fn lock() -> MutexGuard<'static, State> {
    state::lock_started()
}

impl EmulatedConnectX {
    /// Starts the device, or returns the running one.
    ///
    /// From then on, libibverbs in this process finds `mlx5_0` (and on) and no other device.
    ///
    /// # Errors
    ///
    /// - `InvalidInput`: `devices` is not 1 to 4.
    /// - `Unsupported`: the linker did not export the interposed functions.
    /// - `AlreadyExists`: the device runs with another link or another number of devices.
    /// - Other kinds: no memory, or no space for the device's files in the temporary directory.
    pub fn start(options: Options) -> io::Result<Self> {
        if !(1..=4).contains(&options.devices) {
            let message = format!("invalid number of devices: {}, must be 1 to 4", options.devices);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let missing = interpose::missing();
        if !missing.is_empty() {
            let message = format!(
                "functions not exported: {missing:?}; link with -C link-arg=-Wl,--export-dynamic"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        let (link, devices) = (options.link, options.devices);
        uar::prepare()?;
        if state::begin(options) {
            engine::spawn()?;
        }
        let state = lock();
        if (state.options.link, state.options.devices) != (link, devices) {
            let message = format!(
                "already started: link {:?}, {} devices",
                state.options.link, state.options.devices
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        let root = sysfs::build(&state.ports())?;
        drop(state);
        interpose::activate(root);
        Ok(Self { _started: () })
    }

    /// Executes one request, of the next queue pair in round-robin order; returns `false` if none
    /// is ready.
    ///
    /// Each attempt to reach a peer that is not ready or does not answer is one step. Steps do not
    /// observe the wait between attempts.
    pub fn step(&self) -> bool {
        let mut state = lock();
        let any = state.step();
        state.write_runs();
        any
    }

    /// Steps until nothing is ready, at most `limit` times; returns the number of steps. CQEs of
    /// all steps may share a compressed session.
    pub fn run_until_idle(&self, limit: usize) -> usize {
        let mut state = lock();
        let steps = (0..limit).take_while(|_| state.step()).count();
        state.write_runs();
        steps
    }

    /// Enables or disables manual stepping.
    pub fn set_manual_stepping(&self, manual: bool) {
        lock().options.manual_stepping = manual;
    }

    /// Makes a request of queue pair `qpn`, or of any, fail with `status` instead of executing it.
    /// `after` requests precede it (0: the next one fails). The queue pair moves to the error
    /// state.
    pub fn fail_request(&self, qpn: Option<u32>, after: u64, status: Status) {
        lock().faults.push(Fault { qpn, after, status });
    }

    /// Holds the completions of queue pair `qpn`, or of all, from now on.
    pub fn hold_completions(&self, qpn: Option<u32>) {
        lock().policy.held = Some(qpn);
    }

    /// Returns the number of completions held or delayed.
    pub fn held_completions(&self) -> usize {
        lock().policy.waiting.len()
    }

    /// Stops holding and writes the held completions in `order`.
    pub fn release_completions(&self, order: Release) {
        let mut state = lock();
        state.release(order);
        state.write_runs();
    }

    /// Delays completions by `delay` from now on; zero ends that.
    pub fn delay_completions(&self, delay: Duration) {
        lock().policy.delay = delay;
    }

    /// Returns the event counts since the start.
    pub fn counters(&self) -> Counters {
        lock().counters
    }

    /// Returns the errors found in what the program wrote.
    pub fn findings(&self) -> Vec<Finding> {
        lock().lint.findings.clone()
    }

    /// Returns the [`findings`](Self::findings) and clears them.
    pub fn take_findings(&self) -> Vec<Finding> {
        std::mem::take(&mut lock().lint.findings)
    }

    /// Asserts that there are no findings.
    ///
    /// # Panics
    ///
    /// If there are findings.
    #[track_caller]
    pub fn assert_clean(&self) {
        let findings = self.findings();
        assert!(findings.is_empty(), "findings of the emulated device: {findings:#?}");
    }

    /// Takes port 1 of `device` down or up, with `IBV_EVENT_PORT_ERR` or `IBV_EVENT_PORT_ACTIVE`.
    /// While it is down, the device neither sends nor receives.
    ///
    /// # Panics
    ///
    /// If `device` does not exist.
    pub fn set_port(&self, device: usize, up: bool) {
        let mut state = lock();
        assert!(
            device < state.options.devices,
            "no such device, there are {}",
            state.options.devices
        );
        if state.port_up[device] != up {
            state.port_up[device] = up;
            state.device_event(
                device,
                1,
                if up { abi::event::PORT_ACTIVE } else { abi::event::PORT_ERR },
            );
        }
    }

    /// Simulates the loss of `device`: `IBV_EVENT_DEVICE_FATAL` for all its contexts, and the error
    /// state for all its queue pairs.
    pub fn lose_device(&self, device: usize) {
        lock().lose_device(device);
    }

    /// Moves queue pair `qpn` to the error state, with `IBV_EVENT_QP_FATAL`. Returns `false` if it
    /// does not exist.
    pub fn fail_queue_pair(&self, qpn: u32) -> bool {
        let mut state = lock();
        let Some(qp) = state.qp_by_number.get(&qpn).copied() else { return false };
        state.qp_event(qp, abi::event::QP_FATAL);
        state.fail_qp(qp);
        true
    }

    /// Returns the number of queue pairs on all devices.
    pub fn queue_pairs(&self) -> usize {
        lock().qps.len()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    qpn: Option<u32>,
    after: u64,
    status: Status,
}

/// Counts down the faults for a request of queue pair `qpn`; returns the status with which it
/// fails, if any.
pub(crate) fn fault(faults: &mut Vec<Fault>, qpn: u32) -> Option<Status> {
    let mut due = None;
    for (at, fault) in faults.iter_mut().enumerate() {
        if fault.qpn.is_some_and(|of| of != qpn) {
            continue;
        }
        match fault.after.checked_sub(1) {
            Some(after) => fault.after = after,
            None if due.is_none() => due = Some(at),
            None => {}
        }
    }
    due.map(|at| faults.remove(at).status)
}

#[derive(Debug, Default)]
pub(crate) struct Policy {
    /// `Some` while holding: the queue pair, or `None` for all.
    pub(crate) held: Option<Option<u32>>,
    pub(crate) delay: Duration,
    pub(crate) waiting: Vec<Waiting>,
}

#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) cq: u32,
    pub(crate) qpn: u32,
    pub(crate) cqe: crate::cqe::Cqe,
    /// Time at which it is written; `None` until released.
    pub(crate) due: Option<Instant>,
}

impl Policy {
    /// Returns whether a completion of `qpn` must wait: until a time, or (`None`) until released.
    ///
    /// To keep the order, it also waits behind earlier completions of its queue pair.
    pub(crate) fn waits(&self, qpn: u32) -> Option<Option<Instant>> {
        if self.held.is_some_and(|of| of.is_none_or(|of| of == qpn)) {
            return Some(None);
        }
        let last = self.waiting.iter().rev().find(|waiting| waiting.qpn == qpn);
        match last {
            Some(last) => Some(last.due.map(|due| due.max(Instant::now() + self.delay))),
            None if self.delay.is_zero() => None,
            None => Some(Some(Instant::now() + self.delay)),
        }
    }

    /// Stops holding and returns the completions in the order of writing.
    pub(crate) fn released(&mut self, order: Release) -> Vec<Waiting> {
        self.held = None;
        let mut all = std::mem::take(&mut self.waiting);
        let mut qps: Vec<u32> = Vec::new();
        for waiting in &all {
            if !qps.contains(&waiting.qpn) {
                qps.push(waiting.qpn);
            }
        }
        let place = |qpn| qps.iter().position(|&of| of == qpn).unwrap_or(0);
        match order {
            Release::InOrder => {}
            Release::QueuePairsReversed => {
                all.sort_by_key(|waiting| std::cmp::Reverse(place(waiting.qpn)))
            }
            Release::Interleaved => {
                let mut rounds = vec![0_usize; qps.len()];
                let mut keyed: Vec<_> = all
                    .into_iter()
                    .map(|waiting| {
                        let of = place(waiting.qpn);
                        rounds[of] += 1;
                        (rounds[of], waiting)
                    })
                    .collect();
                keyed.sort_by_key(|&(round, _)| round);
                return keyed.into_iter().map(|(_, waiting)| waiting).collect();
            }
        }
        all
    }
}
