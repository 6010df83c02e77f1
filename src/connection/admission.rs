use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use futures::future::BoxFuture;
use rdma_message_proto::handshake::{Handshake, HandshakeError, Service};
use rdma_message_proto::refusal::RefusalReason;
use rdma_provider::cm_contract::{Admit, CmAnswer, Verdict};
use rdma_provider::locks::Mutex;

use super::budget::BufferBudget;
use super::error::CloseReason;
use super::listener_config::ListenerConfig;
use crate::cm;

/// Counters of a [`Listener`](super::Listener). A peer that repeats a refused request counts again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Established connections, including those that wait for [`accept`](super::Listener::accept),
    /// until both peers have closed them and the application holds no handle.
    pub open: u32,
    /// Established connections.
    pub accepted: u64,
    /// Peers refused with [`RefusalReason::ListenerFull`].
    pub refused_full: u64,
    /// Peers refused with [`RefusalReason::SourceFull`].
    pub refused_source: u64,
    /// Peers refused with [`RefusalReason::OutOfBuffers`].
    pub refused_buffers: u64,
    /// Peers rejected because their request had no valid [`Handshake`].
    pub refused_protocol: u64,
    /// Handshakes evicted before their peer confirmed; see
    /// [`handshakes`](super::ListenerConfig::handshakes).
    pub evicted: u64,
    /// Peers that disconnected or did not confirm before they were established.
    pub failed: u64,
}

#[derive(Debug)]
pub(super) struct Admission {
    max_connections: u32,
    max_per_source: u32,
    pub(super) service: Service,
    budget: BufferBudget,
    first_buffers: u64,
    answer: CmAnswer,
    answering: AtomicBool,
    #[cfg(test)]
    never: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_source: BTreeMap<IpAddr, u32>,
    connections: u32,
    stats: ListenerStats,
    accepted: BTreeMap<u64, Weak<dyn Accepted>>,
    next: u64,
    shutting_down: bool,
}

pub(super) trait Accepted: fmt::Debug + Send + Sync {
    fn is_terminated(&self) -> bool;
    fn drain(&self);
    fn abort(&self, reason: CloseReason);
    fn closed(&self) -> BoxFuture<'_, CloseReason>;
}

/// Dropping it cancels the reservation.
pub(super) struct Admitted {
    admission: Arc<Admission>,
    source: IpAddr,
    accepted: Option<u64>,
}

impl Admission {
    pub(super) fn new(config: &ListenerConfig, answer: CmAnswer) -> Arc<Self> {
        let connection = &config.connection;
        Arc::new(Self {
            max_connections: config.max_connections,
            max_per_source: config.max_connections_per_source,
            service: connection.service,
            budget: connection.budget.clone(),
            first_buffers: connection.first_bytes(),
            answer,
            answering: AtomicBool::new(false),
            #[cfg(test)]
            never: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    pub(super) fn set_answering(&self, answering: bool) {
        self.answering.store(answering, Ordering::Relaxed);
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn never_answer(&self) {
        self.never.store(true, Ordering::Relaxed);
    }

    pub(super) fn check(&self, source: IpAddr) -> Result<(), RefusalReason> {
        self.state.lock().check(self, source, self.first_buffers)
    }

    pub(super) fn has_capacity(&self, source: IpAddr) -> bool {
        self.state.lock().refusal(self, source, self.first_buffers).is_none()
    }

    /// Must be called before the buffers are allocated.
    pub(super) fn reserve(self: &Arc<Self>, source: IpAddr) -> Result<Admitted, RefusalReason> {
        self.reserve_with(source, self.first_buffers)
    }

    /// Reserves a connection whose buffers are allocated.
    pub(super) fn reserve_prepared(
        self: &Arc<Self>,
        source: IpAddr,
    ) -> Result<Admitted, RefusalReason> {
        self.reserve_with(source, 0)
    }

    fn reserve_with(
        self: &Arc<Self>,
        source: IpAddr,
        buffers: u64,
    ) -> Result<Admitted, RefusalReason> {
        let mut state = self.state.lock();
        state.check(self, source, buffers)?;
        *state.by_source.entry(source).or_default() += 1;
        state.connections += 1;
        Ok(Admitted { admission: Arc::clone(self), source, accepted: None })
    }

    pub(super) fn count_failed(&self) {
        self.state.lock().stats.failed += 1;
    }

    pub(super) fn answer(&self) -> Option<&CmAnswer> {
        #[cfg(test)]
        if self.never.load(Ordering::Relaxed) {
            return None;
        }
        self.answering.load(Ordering::Relaxed).then_some(&self.answer)
    }

    pub(super) fn handshake<'a>(
        &self,
        private_data: &'a [u8],
    ) -> Result<(Handshake, &'a [u8]), HandshakeError> {
        Handshake::decode_for(self.service, private_data)
            .inspect_err(|_| self.state.lock().stats.refused_protocol += 1)
    }

    pub(super) fn stats(&self) -> ListenerStats {
        self.state.lock().stats
    }

    pub(super) fn shut_down(&self) -> Vec<Arc<dyn Accepted>> {
        let mut state = self.state.lock();
        state.shutting_down = true;
        state.accepted.values().filter_map(Weak::upgrade).collect()
    }
}

impl Admitted {
    pub(super) fn accepted(mut self, connection: Weak<dyn Accepted>) -> Self {
        let mut guard = self.admission.state.lock();
        let state = &mut *guard;
        state.stats.open += 1;
        state.stats.accepted += 1;
        self.accepted = Some(state.next);
        state.accepted.insert(state.next, connection);
        state.next += 1;
        drop(guard);
        self
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.admission.state.lock().shutting_down
    }
}

/// Returns data that tells the peer the defect of its handshake; empty if it cannot.
pub(super) fn rejection(error: &HandshakeError, service: Service) -> Vec<u8> {
    match error {
        HandshakeError::Service { ours, .. } => RefusalReason::OtherService(*ours).encode(),
        _ if error.is_foreign() => match service {
            Service::Messages => cm::FOR_MESSAGES.to_vec(),
            Service::Bytes => cm::FOR_STREAMS.to_vec(),
        },
        _ => Vec::new(),
    }
}

impl State {
    fn refusal(&self, limits: &Admission, source: IpAddr, buffers: u64) -> Option<RefusalReason> {
        let from_source = self.by_source.get(&source).copied().unwrap_or_default();
        if self.shutting_down {
            Some(RefusalReason::ShuttingDown)
        } else if self.connections >= limits.max_connections {
            Some(RefusalReason::ListenerFull)
        } else if from_source >= limits.max_per_source {
            Some(RefusalReason::SourceFull)
        } else if !limits.budget.has(buffers) {
            Some(RefusalReason::OutOfBuffers)
        } else {
            None
        }
    }

    fn check(
        &mut self,
        limits: &Admission,
        source: IpAddr,
        buffers: u64,
    ) -> Result<(), RefusalReason> {
        let Some(reason) = self.refusal(limits, source, buffers) else { return Ok(()) };
        match reason {
            RefusalReason::ListenerFull => self.stats.refused_full += 1,
            RefusalReason::SourceFull => self.stats.refused_source += 1,
            RefusalReason::OutOfBuffers => self.stats.refused_buffers += 1,
            _ => {}
        }
        Err(reason)
    }
}

impl Admit for Admission {
    fn admit(&self, source: IpAddr, private_data: &[u8]) -> Verdict {
        if let Err(error) = self.handshake(private_data) {
            // Every forged request logs this, so it is not a warning.
            rdma_provider::debug!(peer = %source, %error, "rejected connection request");
            return Verdict::Reject(rejection(&error, self.service));
        }
        let Some(answer) = self.answer() else { return Verdict::Ask };
        match self.check(source) {
            Ok(()) => Verdict::Answer(answer.clone()),
            Err(reason) => {
                rdma_provider::debug!(peer = %source, %reason, "rejected connection request");
                Verdict::Reject(reason.encode())
            }
        }
    }

    fn evicted(&self) {
        self.state.lock().stats.evicted += 1;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.admission.state.lock();
        state.connections -= 1;
        if let Some(number) = self.accepted {
            state.stats.open -= 1;
            state.accepted.remove(&number);
        }
        if let Some(open) = state.by_source.get_mut(&self.source) {
            *open -= 1;
            if *open == 0 {
                state.by_source.remove(&self.source);
            }
        }
    }
}

impl fmt::Debug for Admitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admitted").field("source", &self.source).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::connection::shared::ConnectionInner;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn connection_limits_apply_in_total_and_per_source_until_release() {
        let config = ListenerConfig::default().max_connections(3).max_connections_per_source(2);
        let admission = Admission::new(&config, CmAnswer::default());
        let mut ours: Vec<_> = (0..2)
            .map(|_| admission.reserve(ip(1)).unwrap().accepted(Weak::<ConnectionInner>::new()))
            .collect();
        assert_eq!(admission.reserve(ip(1)).unwrap_err(), RefusalReason::SourceFull);
        let other = admission.reserve(ip(2)).unwrap();
        assert_eq!(admission.check(ip(3)), Err(RefusalReason::ListenerFull));
        assert_eq!(
            (admission.stats().open, admission.stats().accepted),
            (2, 2),
            "one is not complete yet"
        );
        let other = other.accepted(Weak::<ConnectionInner>::new());
        let stats = admission.stats();
        assert_eq!(
            (stats.open, stats.accepted, stats.refused_full, stats.refused_source),
            (3, 3, 1, 1)
        );
        ours.pop();
        assert_eq!((admission.check(ip(1)), admission.check(ip(3))), (Ok(()), Ok(())));
        assert!(!other.is_shutting_down());
        assert!(admission.shut_down().is_empty(), "these connections do not exist");
        assert_eq!(admission.check(ip(3)), Err(RefusalReason::ShuttingDown));
        assert!(other.is_shutting_down());
        assert_eq!(admission.state.lock().accepted.len(), 2);
        drop((ours, other));
        let state = admission.state.lock();
        assert_eq!((state.stats.open, state.by_source.len(), state.accepted.len()), (0, 0, 0));
    }

    #[test]
    fn refusal_reasons_round_trip_as_private_data() {
        let other_content = [Service::Messages, Service::Bytes].map(RefusalReason::OtherService);
        let limits =
            [RefusalReason::ListenerFull, RefusalReason::SourceFull, RefusalReason::ShuttingDown];
        for refusal in limits.into_iter().chain(other_content) {
            let mut bytes = refusal.encode();
            assert_eq!(RefusalReason::decode(&bytes), Some(refusal));
            bytes.resize(148, 0);
            assert_eq!(RefusalReason::decode(&bytes), Some(refusal), "with padding");
            bytes[147] = 1;
            assert_eq!(RefusalReason::decode(&bytes), None);
        }
        for other in [
            &b""[..],
            b"tRDM",
            b"tRDM\x02\x02\x01",
            b"tRDM\x02\x02\x06\0",
            b"tRDM\x02\x01\0\0",
            b"tRDM\x01\x02\x01\0",
        ] {
            assert_eq!(RefusalReason::decode(other), None);
        }
    }
}
