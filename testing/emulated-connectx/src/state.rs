//! The state of all devices, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::abi::{event, state};
use crate::channel::{self, Channel};
use crate::control::{Counters, Fault, Options, Policy};
use crate::interpose;
use crate::lint::Lint;
use crate::objects::{Context, ContextId, Cq, Handle, Kind, Mr, Pd, Qp, Srq};
use crate::port::{self, Port};
use crate::uar::Uar;
use crate::window::Mw;

static STATE: OnceLock<Mutex<State>> = OnceLock::new();

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) options: Options,
    pub(crate) started: Instant,
    pub(crate) contexts: HashMap<ContextId, Context>,
    next_context: ContextId,
    next_handle: Handle,
    next_number: u32,
    next_key: u32,
    pub(crate) pds: BTreeMap<Handle, Pd>,
    pub(crate) mrs: BTreeMap<Handle, Mr>,
    pub(crate) mr_by_key: HashMap<u32, Handle>,
    pub(crate) mws: BTreeMap<Handle, Mw>,
    /// Memory windows by the upper 24 bits of their keys, which bindings do not change.
    pub(crate) mw_by_index: HashMap<u32, Handle>,
    pub(crate) cqs: BTreeMap<Handle, Cq>,
    pub(crate) srqs: BTreeMap<Handle, Srq>,
    pub(crate) qps: BTreeMap<Handle, Qp>,
    pub(crate) qp_by_number: HashMap<u32, Handle>,
    /// Address handles with their protection domain.
    pub(crate) ahs: BTreeMap<Handle, (ContextId, Handle)>,
    /// UAR objects with their page.
    pub(crate) uars: BTreeMap<Handle, (ContextId, u32)>,
    pub(crate) uar: Uar,
    pub(crate) channels: HashMap<i32, Channel>,
    /// Queue pairs whose send queue may have work.
    pub(crate) ready: BTreeSet<Handle>,
    /// The queue pair served last.
    pub(crate) last_served: Handle,
    pub(crate) port_up: Vec<bool>,
    pub(crate) lost: Vec<bool>,
    pub(crate) counters: Counters,
    pub(crate) lint: Lint,
    pub(crate) faults: Vec<Fault>,
    pub(crate) policy: Policy,
    pub(crate) next_audit: Instant,
    /// Completion queues with a run of CQEs to write.
    pub(crate) runs: BTreeSet<Handle>,
    /// Overrun completion queues, whose queue pairs must fail.
    pub(crate) overrun: Vec<Handle>,
}

/// Creates the state; returns `false` if it exists.
pub(crate) fn begin(options: Options) -> bool {
    let mut fresh = false;
    STATE.get_or_init(|| {
        fresh = true;
        Mutex::new(State::new(options))
    });
    fresh
}

pub(crate) fn lock_started() -> MutexGuard<'static, State> {
    // Poison marks another test's panic; this test continues.
    STATE.get().expect("the device was started").lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a context of device `number`; returns `None` if the device does not exist.
pub(crate) fn open_context(number: usize) -> Option<ContextId> {
    let mut state = lock_started();
    if number >= state.options.devices {
        return None;
    }
    state.next_context += 1;
    let context = state.next_context;
    state.contexts.insert(context, Context { device: number, events: None });
    Some(context)
}

impl State {
    fn new(options: Options) -> Self {
        let devices = options.devices;
        Self {
            options,
            started: Instant::now(),
            contexts: HashMap::new(),
            next_context: 0,
            next_handle: 0,
            // Above 0 and 1, which are special, as on real devices.
            next_number: 0x40,
            next_key: 0x10,
            pds: BTreeMap::new(),
            mrs: BTreeMap::new(),
            mr_by_key: HashMap::new(),
            mws: BTreeMap::new(),
            mw_by_index: HashMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            qp_by_number: HashMap::new(),
            ahs: BTreeMap::new(),
            uars: BTreeMap::new(),
            uar: Uar::default(),
            channels: HashMap::new(),
            ready: BTreeSet::new(),
            last_served: 0,
            port_up: vec![true; devices],
            lost: vec![false; devices],
            counters: Counters::default(),
            lint: Lint::default(),
            faults: Vec::new(),
            policy: Policy::default(),
            next_audit: Instant::now(),
            runs: BTreeSet::new(),
            overrun: Vec::new(),
        }
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        (0..self.options.devices).map(|device| self.port(device)).collect()
    }

    pub(crate) fn port(&self, device: usize) -> Port {
        Port { device, link: self.options.link, up: self.port_up[device] }
    }

    pub(crate) fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        self.next_handle
    }

    /// Returns an unused 24-bit number for a queue or queue pair. Numbers are not reused.
    pub(crate) fn number(&mut self) -> u32 {
        self.next_number += 1;
        assert!(self.next_number < 1 << 24, "queue numbers are exhausted");
        self.next_number
    }

    pub(crate) fn number_was_assigned(&self, number: u32) -> bool {
        number <= self.next_number
    }

    pub(crate) fn key(&mut self) -> u32 {
        self.next_key += 1;
        assert!(self.next_key < 1 << 24, "memory keys are exhausted");
        self.next_key << 8 | self.next_key & 0xff
    }

    pub(crate) fn reap(&mut self) {
        for (fd, context) in interpose::closed() {
            match context {
                None => {
                    self.channels.remove(&fd);
                }
                Some(context) => self.close_context(context),
            }
        }
    }

    /// Destroys all objects of `context`, as the kernel does when the descriptor closes.
    fn close_context(&mut self, context: ContextId) {
        let qps: Vec<_> =
            self.qps.iter().filter(|(_, qp)| qp.context == context).map(|(&qp, _)| qp).collect();
        for qp in qps {
            self.remove_qp(qp);
        }
        self.srqs.retain(|_, srq| srq.context != context);
        let cqs: Vec<_> =
            self.cqs.iter().filter(|(_, cq)| cq.context == context).map(|(&cq, _)| cq).collect();
        for cq in cqs {
            self.remove_cq(cq);
        }
        let mrs: Vec<_> =
            self.mrs.iter().filter(|(_, mr)| mr.context == context).map(|(&mr, _)| mr).collect();
        for mr in mrs {
            self.remove_mr(mr);
        }
        self.mws.retain(|_, mw| mw.context != context);
        let mws = &self.mws;
        self.mw_by_index.retain(|_, mw| mws.contains_key(mw));
        self.ahs.retain(|_, &mut (of, _)| of != context);
        self.pds.retain(|_, pd| pd.context != context);
        let uar = &mut self.uar;
        self.uars.retain(|_, &mut (of, page)| {
            if of == context {
                uar.free(page);
            }
            of != context
        });
        self.contexts.remove(&context);
    }

    pub(crate) fn remove_mr(&mut self, mr: Handle) {
        if let Some(mr) = self.mrs.remove(&mr) {
            self.mr_by_key.remove(&mr.key);
        }
    }

    pub(crate) fn remove_cq(&mut self, cq: Handle) {
        if let Some(gone) = self.cqs.remove(&cq) {
            self.uar.remove_armer(gone.page, cq);
            self.runs.remove(&cq);
            self.policy.waiting.retain(|waiting| waiting.cq != cq);
        }
    }

    pub(crate) fn remove_qp(&mut self, qp: Handle) {
        if let Some(gone) = self.qps.remove(&qp) {
            self.qp_by_number.remove(&gone.number);
            self.uar.remove_sender(gone.page, qp);
            self.ready.remove(&qp);
            self.policy.waiting.retain(|waiting| waiting.qpn != gone.number);
        }
    }

    /// Sends an asynchronous event about `element`; returns `false` if `context` has no event
    /// channel.
    fn event(&mut self, context: ContextId, element: u64, kind: u32) -> bool {
        let events = self.contexts.get(&context).and_then(|context| context.events);
        let Some(channel) = events.and_then(|fd| self.channels.get_mut(&fd)) else { return false };
        channel.send(&channel::async_event(element, kind));
        self.counters.async_events += 1;
        true
    }

    /// Sends an event to all contexts of `device`; `port` is 0 unless it concerns a port.
    pub(crate) fn device_event(&mut self, device: usize, port: u64, kind: u32) {
        let open: Vec<_> = self
            .contexts
            .iter()
            .filter(|(_, open)| open.device == device)
            .map(|(&id, _)| id)
            .collect();
        for context in open {
            self.event(context, port, kind);
        }
    }

    pub(crate) fn qp_event(&mut self, qp: Handle, kind: u32) {
        // CQEs written before the event are visible to a program that reads the event.
        self.write_runs();
        let Some((context, element)) = self.qps.get(&qp).map(|qp| (qp.context, qp.user_handle))
        else {
            return;
        };
        if self.event(context, element, kind) {
            self.qps.get_mut(&qp).expect("looked up above").async_events += 1;
        }
    }

    pub(crate) fn srq_event(&mut self, srq: Handle, kind: u32) {
        let Some((context, element)) =
            self.srqs.get(&srq).map(|srq| (srq.context, srq.user_handle))
        else {
            return;
        };
        if self.event(context, element, kind) {
            self.srqs.get_mut(&srq).expect("looked up above").async_events += 1;
        }
    }

    pub(crate) fn cq_event(&mut self, cq: Handle, kind: u32) {
        let Some((context, element)) = self.cqs.get(&cq).map(|cq| (cq.context, cq.user_handle))
        else {
            return;
        };
        if self.event(context, element, kind) {
            self.cqs.get_mut(&cq).expect("looked up above").async_events += 1;
        }
    }

    pub(crate) fn remove_unread_events(
        &mut self,
        context: ContextId,
        element: u64,
        kinds: &[u32],
    ) -> u32 {
        let events = self.contexts.get(&context).and_then(|context| context.events);
        let Some(channel) = events.and_then(|fd| self.channels.get_mut(&fd)) else { return 0 };
        channel.remove_unread(|record| {
            channel::element_of(record)
                .is_some_and(|(of, kind)| of == element && kinds.contains(&kind))
        })
    }

    pub(crate) fn fail_qp(&mut self, handle: Handle) {
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        if qp.kind == Kind::Dct || qp.state == state::ERR || qp.state == state::RESET {
            return;
        }
        qp.state = state::ERR;
        qp.attempt = Default::default();
        qp.draining = false;
        let has_srq = qp.srq.is_some();
        self.flush(handle);
        if has_srq {
            self.qp_event(handle, event::LAST_WQE_REACHED);
        }
    }

    /// Records that a queue pair in SQD has nothing in flight.
    pub(crate) fn drained(&mut self, handle: Handle) {
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        qp.draining = false;
        if std::mem::take(&mut qp.notify_drained) {
            self.qp_event(handle, event::SQ_DRAINED);
        }
    }

    /// Records a message for a queue pair. The first one in RTR raises COMM_EST.
    pub(crate) fn establish(&mut self, handle: Handle) {
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        let first = !std::mem::replace(&mut qp.established, true);
        if first && qp.state == state::RTR && matches!(qp.kind, Kind::Rc | Kind::Uc) {
            self.qp_event(handle, event::COMM_EST);
        }
    }

    pub(crate) fn lose_device(&mut self, device: usize) {
        self.lost[device] = true;
        let qps: Vec<_> =
            self.qps.iter().filter(|(_, qp)| qp.device == device).map(|(&qp, _)| qp).collect();
        for qp in qps {
            self.fail_qp(qp);
        }
        self.device_event(device, 0, event::DEVICE_FATAL);
    }

    /// Returns the device with address `lid` or `gid`, if its port is up.
    pub(crate) fn device_at(&self, lid: u16, gid: Option<&[u8; 16]>) -> Option<usize> {
        let found = port::find(self.options.link, self.options.devices, lid, gid)?;
        (self.port_up[found] && !self.lost[found]).then_some(found)
    }
}
