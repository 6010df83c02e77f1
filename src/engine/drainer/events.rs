//! Events of a completion queue: when one is requested, and which thread or task takes it.

use std::sync::Arc;

use tokio::runtime;

use super::{Drainer, State};
use crate::engine::arm::{self, Arm, Armed};
use crate::engine::completion_mode::CompletionMode;
use crate::engine::reactor::{self, Reactors};
use crate::engine::runtime::is_current;
use crate::sync::{MutexGuard, Ordering, lock, try_lock};
use crate::verbs::{Channel, Device};

impl Drainer {
    /// Completions must be noticed even if no task waits: an abandoned operation holds buffers, and
    /// capacity that others wait for.
    pub(in crate::engine) fn ensure_watched(self: &Arc<Self>) {
        if !self.mode.arms() {
            return;
        }
        let mut state = lock(&self.state);
        self.finish_remaining(&mut state);
        arm::before_park(&mut Draining { queue: self, state: &mut state });
        self.release(state);
        self.reactors.watch(self);
    }

    #[inline]
    pub(crate) fn watch(self: &Arc<Self>) -> bool {
        let watched = self.reactors.watch(self);
        if matches!(self.mode, CompletionMode::Hybrid) {
            self.arm_beside_spinning();
        }
        watched
    }

    fn arm_beside_spinning(&self) {
        // Later events arm the queue again, because two runtimes watch it now.
        let mut state = lock(&self.state);
        arm::arm_beside_spinning(&mut Draining { queue: self, state: &mut state }, is_current);
        self.release(state);
    }

    fn arm_instead(&self, mut state: MutexGuard<'_, State>) {
        arm::stop_spinning(&mut Draining { queue: self, state: &mut state });
        self.release(state);
    }

    fn awaited(&self) -> Arm {
        // In this order, a concurrent change can only lead to more events.
        let waiting = self.waiting.load(Ordering::Acquire);
        match waiting.saturating_sub(self.solicited.load(Ordering::Relaxed)) {
            _ if waiting == 0 => Arm::Off,
            0 => Arm::Solicited,
            _ => Arm::All,
        }
    }
}

impl reactor::Watched for Drainer {
    fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    fn device(&self) -> &Device {
        self.cq.device()
    }

    fn may_spin(&self) -> bool {
        matches!(self.mode, CompletionMode::Hybrid)
    }

    fn on_event(&self, runtime: Option<runtime::Id>) -> bool {
        let mut state = lock(&self.state);
        // Another runtime gets no event of an unarmed queue, and this one may be blocked.
        let may_spin =
            |&own: &runtime::Id| state.completion_wakers > 0 && self.reactors.is_only(own);
        let runtime = runtime.filter(may_spin);
        let draining = &mut Draining { queue: self, state: &mut state };
        let begins = arm::on_event_or_spin(draining, runtime);
        self.release(state);
        begins
    }

    fn spin(&self, runtime: runtime::Id, rounds: u32) -> Option<u32> {
        let state = if rounds == 0 { Some(lock(&self.state)) } else { try_lock(&self.state) };
        // Another thread polls.
        let Some(mut state) = state else { return Some(rounds + 1) };
        if state.spinning != Some(runtime) {
            return None;
        }
        while self.drain_batch(&mut state) {}
        // Tasks that receive find some first.
        let completions = state.counters.completions;
        if std::mem::replace(&mut state.spun, completions) != completions {
            self.release(state);
            if rounds > 0 {
                self.spin.found(rounds);
            }
            return Some(1);
        }
        if self.spin.allows(rounds) {
            self.release(state);
            self.process_packets();
            return Some(rounds + 1);
        }
        self.spin.missed();
        self.arm_instead(state);
        if !self.reactors.watches_packets() {
            self.cq.device().stop_processing();
        }
        None
    }

    #[cold]
    fn stop_spinning(&self, runtime: runtime::Id) {
        let state = lock(&self.state);
        if state.spinning == Some(runtime) {
            self.arm_instead(state);
        }
    }

    #[cold]
    fn wake_to_repoll(&self) {
        let mut state = lock(&self.state);
        let State { queues, woken, .. } = &mut *state;
        for attached in queues.iter().flatten() {
            attached.queue.wake_to_repoll(woken);
        }
        self.release(state);
    }

    fn reactors(&self) -> &Reactors {
        &self.reactors
    }
}

pub(super) struct Draining<'a> {
    pub(super) queue: &'a Drainer,
    pub(super) state: &'a mut State,
}

impl Armed for Draining<'_> {
    type Runtime = runtime::Id;

    fn drain(&mut self) -> bool {
        let before = self.state.counters.completions;
        while self.queue.drain_batch(self.state) {}
        self.state.counters.completions != before
    }

    fn arm(&mut self, arm: Arm) -> bool {
        match self.queue.cq.arm(arm == Arm::Solicited) {
            Ok(()) => {
                self.state.counters.arms += 1;
                true
            }
            Err(error) => {
                self.queue.fail(self.state, error);
                false
            }
        }
    }

    fn take_event(&mut self) -> bool {
        let Some(channel) = &self.queue.channel else { return false };
        match channel.next_event() {
            Ok(Some(_)) => {
                self.state.counters.events += 1;
                self.state.unacknowledged += 1;
                // Acknowledging takes a lock and wakes a thread that destroys the queue, so it is
                // rare.
                if self.state.unacknowledged == u32::from(u16::MAX) {
                    self.queue.cq.acknowledge(std::mem::take(&mut self.state.unacknowledged));
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.queue.fail(self.state, error);
                false
            }
        }
    }

    fn awaited(&self) -> Arm {
        self.queue.awaited()
    }

    fn request(&mut self) -> &mut arm::Request {
        &mut self.state.request
    }

    fn spinning(&mut self) -> &mut Option<runtime::Id> {
        &mut self.state.spinning
    }
}
