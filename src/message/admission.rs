//! Which peers a [`Listener`](super::Listener) lets in, and how many: in all, and from each source address.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::config::ConnectionConfig;
use super::handshake::{Handshake, HandshakeError};
use crate::cm;
use rdma_provider::cm_contract::{Admit, CmAnswer, Verdict};

/// Why a [`Listener`](super::Listener) refuses a peer whose request it understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The listener has as many connections as
    /// [`max_connections`](super::ConnectionConfig::max_connections) allows.
    ListenerFull,
    /// The peer's address has as many connections as
    /// [`max_connections_per_source`](super::ConnectionConfig::max_connections_per_source) allows.
    SourceFull,
}

impl Refusal {
    /// Distinguishes the private data from those of a service's rejection (`handshake.rs`), which begin with the same magic and
    /// version.
    const KIND: u8 = 2;

    /// The private data of a rejection: magic, version, kind, code, zero.
    pub(super) fn encode(self) -> Vec<u8> {
        let code = match self {
            Self::ListenerFull => 1,
            Self::SourceFull => 2,
        };
        [&Handshake::MAGIC[..], &[Handshake::VERSION, Self::KIND, code, 0]].concat()
    }

    /// The refusal that a peer's listener has sent as private data, if it is one.
    pub(super) fn decode(private_data: &[u8]) -> Option<Self> {
        let (magic, rest) = private_data.split_first_chunk::<4>()?;
        let [Handshake::VERSION, Self::KIND, code, padding @ ..] = rest else { return None };
        let padded = !padding.is_empty() && padding.iter().all(|&byte| byte == 0);
        match (*magic == Handshake::MAGIC && padded, code) {
            (true, 1) => Some(Self::ListenerFull),
            (true, 2) => Some(Self::SourceFull),
            _ => None,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ListenerFull => "the listener has as many connections as its max_connections allows",
            Self::SourceFull => {
                "the listener has as many connections from this address as its max_connections_per_source allows"
            }
        })
    }
}

/// Counters of a [`Listener`](super::Listener).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Connections accepted that still hold memory: neither end has ended them, or the service holds a handle.
    pub open: u32,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Peers refused with [`Refusal::ListenerFull`].
    pub refused_full: u64,
    /// Peers refused with [`Refusal::SourceFull`].
    pub refused_source: u64,
    /// Peers rejected because their request carried no [`Handshake`] of this protocol.
    pub refused_protocol: u64,
    /// Handshakes that gave way to newer ones before their peer had confirmed, see
    /// [`handshakes`](super::ConnectionConfig::handshakes).
    pub gave_way: u64,
    /// Peers that asked, but disconnected or did not confirm before they were accepted.
    pub failed: u64,
}

/// The limits of a listener, and what counts against them.
#[derive(Debug)]
pub(super) struct Admission {
    max_connections: u32,
    max_per_source: u32,
    /// What every peer is answered.
    answer: CmAnswer,
    /// The provider may answer requests without the service.
    answering: AtomicBool,
    #[cfg(test)]
    never: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_source: HashMap<IpAddr, u32>,
    /// Connections that count against the limits: those that are open, and those whose queue pair is being made.
    places: u32,
    stats: ListenerStats,
}

/// A connection that counts against the limits until this is dropped.
pub(super) struct Admitted {
    admission: Arc<Admission>,
    source: IpAddr,
    accepted: bool,
}

impl Admission {
    /// Admits as many connections as `config` allows, and answers each with `answer`.
    pub(super) fn new(config: &ConnectionConfig, answer: CmAnswer) -> Arc<Self> {
        Arc::new(Self {
            max_connections: config.max_connections,
            max_per_source: config.max_connections_per_source,
            answer,
            answering: AtomicBool::new(false),
            #[cfg(test)]
            never: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// Lets the provider answer requests without the service, or leaves them to the service.
    pub(super) fn set_answering(&self, answering: bool) {
        self.answering.store(answering, Ordering::Relaxed);
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn never_answer(&self) {
        self.never.store(true, Ordering::Relaxed);
    }

    /// Fails, and counts the refusal, if another connection from `source` is one too many.
    pub(super) fn check(&self, source: IpAddr) -> Result<(), Refusal> {
        self.state.lock().check(self, source)
    }

    /// True if another connection from `source` is not one too many.
    pub(super) fn may_enter(&self, source: IpAddr) -> bool {
        self.state.lock().refusal(self, source).is_none()
    }

    /// Counts a connection from `source` against the limits, unless it is one too many.
    pub(super) fn enter(self: &Arc<Self>, source: IpAddr) -> Result<Admitted, Refusal> {
        let mut state = self.state.lock();
        state.check(self, source)?;
        *state.by_source.entry(source).or_default() += 1;
        state.places += 1;
        Ok(Admitted { admission: Arc::clone(self), source, accepted: false })
    }

    /// Counts a peer that asked and did not go through with it.
    pub(super) fn failed(&self) {
        self.state.lock().stats.failed += 1;
    }

    /// What the provider answers, if it may.
    pub(super) fn answer(&self) -> Option<&CmAnswer> {
        #[cfg(test)]
        if self.never.load(Ordering::Relaxed) {
            return None;
        }
        self.answering.load(Ordering::Relaxed).then_some(&self.answer)
    }

    /// Decodes a request's handshake, and counts requests without one.
    pub(super) fn handshake<'a>(
        &self,
        private_data: &'a [u8],
    ) -> Result<(Handshake, &'a [u8]), HandshakeError> {
        Handshake::decode(private_data)
            .inspect_err(|_| self.state.lock().stats.refused_protocol += 1)
    }

    pub(super) fn stats(&self) -> ListenerStats {
        self.state.lock().stats
    }
}

impl Admitted {
    /// Counts the connection as accepted: it is complete.
    pub(super) fn accepted(mut self) -> Self {
        self.accepted = true;
        let mut state = self.admission.state.lock();
        state.stats.open += 1;
        state.stats.accepted += 1;
        drop(state);
        self
    }
}

impl State {
    fn refusal(&self, limits: &Admission, source: IpAddr) -> Option<Refusal> {
        let of_source = self.by_source.get(&source).copied().unwrap_or_default();
        if self.places >= limits.max_connections {
            Some(Refusal::ListenerFull)
        } else if of_source >= limits.max_per_source {
            Some(Refusal::SourceFull)
        } else {
            None
        }
    }

    fn check(&mut self, limits: &Admission, source: IpAddr) -> Result<(), Refusal> {
        let Some(refusal) = self.refusal(limits, source) else { return Ok(()) };
        match refusal {
            Refusal::ListenerFull => self.stats.refused_full += 1,
            Refusal::SourceFull => self.stats.refused_source += 1,
        }
        Err(refusal)
    }
}

impl Admit for Admission {
    fn admit(&self, source: IpAddr, private_data: &[u8]) -> Verdict {
        let Some(answer) = self.answer() else { return Verdict::Ask };
        if let Err(error) = self.handshake(private_data) {
            // Not a warning: each forged request would log one.
            tracing::debug!(peer = %source, %error, "rejected");
            // Tells the peer's program what it has met.
            return Verdict::Reject(if error.is_foreign() {
                cm::FOR_MESSAGES.to_vec()
            } else {
                Vec::new()
            });
        }
        match self.check(source) {
            Ok(()) => Verdict::Answer(answer.clone()),
            Err(refusal) => {
                tracing::debug!(peer = %source, %refusal, "rejected");
                Verdict::Reject(refusal.encode())
            }
        }
    }

    fn gave_way(&self) {
        self.state.lock().stats.gave_way += 1;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.admission.state.lock();
        state.places -= 1;
        if self.accepted {
            state.stats.open -= 1;
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

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn connections_are_limited_in_all_and_for_each_source_and_give_their_place_back() {
        let config = ConnectionConfig::default().max_connections(3).max_connections_per_source(2);
        let admission = Admission::new(&config, CmAnswer::default());
        let mut ours: Vec<_> = (0..2).map(|_| admission.enter(ip(1)).unwrap().accepted()).collect();
        assert_eq!(admission.enter(ip(1)).unwrap_err(), Refusal::SourceFull);
        let other = admission.enter(ip(2)).unwrap();
        assert_eq!(admission.check(ip(3)), Err(Refusal::ListenerFull));
        assert_eq!(
            (admission.stats().open, admission.stats().accepted),
            (2, 2),
            "one is not complete yet"
        );
        let other = other.accepted();
        let stats = admission.stats();
        assert_eq!(
            (stats.open, stats.accepted, stats.refused_full, stats.refused_source),
            (3, 3, 1, 1)
        );
        ours.pop();
        assert_eq!((admission.check(ip(1)), admission.check(ip(3))), (Ok(()), Ok(())));
        drop((ours, other));
        assert_eq!((admission.stats().open, admission.state.lock().by_source.len()), (0, 0));
    }

    #[test]
    fn refusals_travel_as_private_data_and_other_bytes_are_none() {
        for refusal in [Refusal::ListenerFull, Refusal::SourceFull] {
            let mut bytes = refusal.encode();
            assert_eq!(Refusal::decode(&bytes), Some(refusal));
            bytes.resize(148, 0);
            assert_eq!(Refusal::decode(&bytes), Some(refusal), "as it is padded");
            bytes[147] = 1;
            assert_eq!(Refusal::decode(&bytes), None);
        }
        for other in [
            &b""[..],
            b"tRDM",
            b"tRDM\x01\x02\x01",
            b"tRDM\x01\x02\x03\0",
            b"tRDM\x01\x01\0\0",
            b"tRDM\x02\x02\x01\0",
        ] {
            assert_eq!(Refusal::decode(other), None);
        }
    }
}
