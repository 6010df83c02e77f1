//! What a test sees and steers: options, faults, held completions, counters, events.

use std::io;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::lint::Finding;
use crate::state::{self, State};
use crate::{abi, engine, interpose, sysfs, uar};

/// What the ports are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// InfiniBand: ports have LIDs.
    #[default]
    InfiniBand,
    /// Ethernet: RoCE v2, ports have IPv4 and IPv6 GIDs.
    Roce,
}

/// How to start the device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// What the ports are.
    pub link: Link,
    /// How many devices there are, `mlx5_0` and on: 1 to 4, all on one network.
    pub devices: usize,
    /// Nothing is executed but by [`EmulatedConnectX::step`] and [`EmulatedConnectX::run_until_idle`].
    pub manual_stepping: bool,
    /// The longest time that an acknowledgement is waited for, whatever a queue pair says.
    pub longest_timeout: Duration,
    /// The longest time between two attempts for a receiver that is not ready, whatever it asks for.
    pub longest_rnr_wait: Duration,
    /// After how long a doorbell record that is ahead of the doorbells is a [`Problem::MissedDoorbell`](crate::Problem::MissedDoorbell).
    pub doorbell_patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            link: Link::InfiniBand,
            devices: 1,
            manual_stepping: false,
            longest_timeout: Duration::from_millis(5),
            longest_rnr_wait: Duration::from_millis(2),
            // A busy machine may leave a thread between its record and its doorbell for as long as this.
            doorbell_patience: Duration::from_secs(5),
        }
    }
}

/// How a request or receive ends: `MLX5_CQE_SYNDROME_*`.
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

/// What has happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Stores into registers of send queues; two that follow each other quickly may count as one.
    pub doorbells: u64,
    /// Requests executed, with those that failed and without those that were flushed.
    pub requests: u64,
    /// Entries written into completion queues.
    pub completions: u64,
    /// Of these, errors; flushed ones too.
    pub errors: u64,
    /// Records put into completion channels.
    pub completion_events: u64,
    /// Asynchronous events.
    pub async_events: u64,
    /// Attempts for which the peer had no receive.
    pub rnr_naks: u64,
    /// Attempts that no one answered.
    pub timeouts: u64,
    /// Datagrams and unreliable requests that were lost: no one there, wrong key, no receive.
    pub dropped: u64,
    /// Bytes of the queues that the program has made, where the device reads requests and receives and writes completions.
    pub queue_bytes: u64,
}

/// In which order held completions are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// As they were held.
    InOrder,
    /// Queue pairs the other way round, each queue pair's own in order, as a device must.
    QueuePairsReversed,
    /// The oldest of each queue pair in turn.
    Interleaved,
}

/// The emulated device of this process. There is one; handles are alike.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedConnectX {
    _started: (),
}

fn lock() -> MutexGuard<'static, State> {
    state::lock_started()
}

impl EmulatedConnectX {
    /// Starts the device, or gives the one that was started.
    ///
    /// From here on libibverbs of this process finds `mlx5_0` (and on), and no other device.
    ///
    /// # Errors
    ///
    /// No memory, or no room for the device's files below the directory of temporary files. `InvalidInput`: `devices` is
    /// not 1 to 4. `Unsupported`: the linker has not exported the calls that are taken over. `AlreadyExists`: it was started with another link or another number of devices.
    pub fn start(options: Options) -> io::Result<Self> {
        if !(1..=4).contains(&options.devices) {
            let message = format!("devices is {}, and may be 1 to 4", options.devices);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let missing = interpose::missing();
        if !missing.is_empty() {
            let message =
                format!("{missing:?} are not exported: link with -C link-arg=-Wl,--export-dynamic");
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        let (link, devices) = (options.link, options.devices);
        uar::prepare()?;
        if state::begin(options) {
            engine::spawn()?;
        }
        let state = lock();
        if (state.options.link, state.options.devices) != (link, devices) {
            let message =
                format!("{:?} of {} devices runs", state.options.link, state.options.devices);
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        let root = sysfs::build(&state.ports())?;
        drop(state);
        interpose::activate(root);
        Ok(Self { _started: () })
    }

    /// Executes one request of one queue pair, which of them in turn; `false` if none is ready.
    ///
    /// With manual stepping each attempt for a peer that is not ready, or not there, is a step, without the wait between.
    pub fn step(&self) -> bool {
        let mut state = lock();
        state.collect();
        state.step_one()
    }

    /// Steps until nothing is ready; how many steps it took, at most `limit`.
    pub fn run_until_idle(&self, limit: usize) -> usize {
        (0..limit).take_while(|_| self.step()).count()
    }

    /// Begins or ends manual stepping.
    pub fn set_manual_stepping(&self, manual: bool) {
        lock().options.manual_stepping = manual;
    }

    /// The `after`-th request from now (0: the next) of queue pair `qpn`, or of any, fails with `status` instead of being
    /// executed, and the queue pair goes to the error state.
    pub fn fail_request(&self, qpn: Option<u32>, after: u64, status: Status) {
        lock().faults.push(Fault { qpn, after, status });
    }

    /// From now on completions of queue pair `qpn`, or of all, are kept back.
    pub fn hold_completions(&self, qpn: Option<u32>) {
        lock().policy.held = Some(qpn);
    }

    /// How many completions are kept back.
    pub fn held_completions(&self) -> usize {
        lock().policy.waiting.len()
    }

    /// Ends holding, and writes what was held.
    pub fn release_completions(&self, order: Release) {
        lock().release(order);
    }

    /// From now on completions are written so much later; zero ends that.
    pub fn delay_completions(&self, delay: Duration) {
        lock().policy.delay = delay;
    }

    /// What has happened since the start.
    pub fn counters(&self) -> Counters {
        lock().counters
    }

    /// What was found wrong with what the program wrote.
    pub fn findings(&self) -> Vec<Finding> {
        lock().lint.findings.clone()
    }

    /// As [`findings`](Self::findings), which are forgotten.
    pub fn take_findings(&self) -> Vec<Finding> {
        std::mem::take(&mut lock().lint.findings)
    }

    /// # Panics
    ///
    /// Something was found.
    #[track_caller]
    pub fn assert_clean(&self) {
        let findings = self.findings();
        assert!(findings.is_empty(), "the emulated device found: {findings:#?}");
    }

    /// Takes port 1 of `device` down or up, with `IBV_EVENT_PORT_ERR` or `IBV_EVENT_PORT_ACTIVE`. While it is down nothing
    /// leaves or reaches the device.
    ///
    /// # Panics
    ///
    /// There is no such device.
    pub fn set_port(&self, device: usize, up: bool) {
        let mut state = lock();
        assert!(device < state.options.devices, "there are {} devices", state.options.devices);
        if state.port_up[device] != up {
            state.port_up[device] = up;
            state.device_event(
                device,
                1,
                if up { abi::event::PORT_ACTIVE } else { abi::event::PORT_ERR },
            );
        }
    }

    /// `device` is lost: `IBV_EVENT_DEVICE_FATAL` for all who have it open, and all its queue pairs are in the error state.
    pub fn lose_device(&self, device: usize) {
        lock().lose_device(device);
    }

    /// Queue pair `qpn` fails: `IBV_EVENT_QP_FATAL`, and the error state. `false`: there is none.
    pub fn fail_queue_pair(&self, qpn: u32) -> bool {
        let mut state = lock();
        let Some(qp) = state.qp_by_number.get(&qpn).copied() else { return false };
        state.qp_event(qp, abi::event::QP_FATAL);
        state.fail_qp(qp);
        true
    }

    /// How many queue pairs there are, of all devices.
    pub fn queue_pairs(&self) -> usize {
        lock().qps.len()
    }
}

/// A request to come that fails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    qpn: Option<u32>,
    after: u64,
    status: Status,
}

/// How the request of queue pair `qpn` that comes now is to fail, if it is.
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

/// What happens to completions before they are written.
#[derive(Debug, Default)]
pub(crate) struct Policy {
    /// Which are held: of one queue pair, or of all.
    pub(crate) held: Option<Option<u32>>,
    pub(crate) delay: Duration,
    pub(crate) waiting: Vec<Waiting>,
}

/// A completion that is kept back.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) cq: u32,
    pub(crate) qpn: u32,
    pub(crate) cqe: crate::cqe::Cqe,
    /// When it is written; `None` when it is released.
    pub(crate) due: Option<Instant>,
}

impl Policy {
    /// Whether a completion of `qpn` waits: until when, or until it is released.
    ///
    /// One of a queue pair whose earlier ones wait does too: their order is kept.
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

    /// All that were held, as they are to be written.
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
                let mut turns = vec![0_usize; qps.len()];
                let mut keyed: Vec<_> = all
                    .into_iter()
                    .map(|waiting| {
                        let of = place(waiting.qpn);
                        turns[of] += 1;
                        (turns[of], waiting)
                    })
                    .collect();
                keyed.sort_by_key(|&(turn, _)| turn);
                return keyed.into_iter().map(|(_, waiting)| waiting).collect();
            }
        }
        all
    }
}
