//! Commands for queue pairs, DC initiators and DC targets.

use super::transition;
use super::{CORE_IN, CORE_OUT};
use crate::abi::{
    CreateQp, CreateQpResponse, EINVAL, EOPNOTSUPP, Mlx5ModifyQpResponse, ModifyQp,
    ModifyQpExResponse, Plain, QpCap, QueryQp, QueryQpResponse, UHW_IN, UHW_OUT, event, mask,
    qp_flag, state,
};
use crate::control::Link;
use crate::memory::Buffer;
use crate::objects::{Attempt, Attr, Handle, History, Kind, Qp, Ring};
use crate::port::{MAX_RECV_WR, MAX_SEND_WQEBB};
use crate::state::State;
use crate::uverbs::{Reply, Request};

/// `IB_UVERBS_QPT_*`.
const RC: u32 = 2;
const UC: u32 = 3;
const UD: u32 = 4;
const DRIVER: u32 = 0xff;
/// `IB_UVERBS_QP_CREATE_SQ_SIG_ALL`.
const SQ_SIG_ALL: u32 = 1 << 12;

impl State {
    pub(crate) fn create_qp(&mut self, request: &mut Request<'_>) -> Reply {
        ids! {
            HANDLE = 0, PD = 2, SRQ = 3, SEND_CQ = 4, RECV_CQ = 5, USER_HANDLE = 7, CAP = 8,
            KIND = 9, FLAGS = 10
        }
        ids! { ANSWER_CAP = 13, ANSWER_NUMBER = 14 }
        let asked: CreateQp = request.get(UHW_IN).ok_or(EINVAL)?;
        let kind = match request.get::<u32>(KIND).ok_or(EINVAL)? {
            RC => Kind::Rc,
            UC => Kind::Uc,
            UD => Kind::Ud,
            DRIVER if asked.flags & qp_flag::TYPE_DCI != 0 => Kind::Dci,
            DRIVER if asked.flags & qp_flag::TYPE_DCT != 0 => Kind::Dct,
            _ => return Err(EOPNOTSUPP),
        };
        let cap: QpCap = request.get(CAP).ok_or(EINVAL)?;
        let pd = request.handle(PD)?;
        let (send_cq, recv_cq) = (request.handle(SEND_CQ)?, request.handle(RECV_CQ)?);
        let srq = request.number(SRQ).map(|srq| srq as Handle);
        let context = request.context;
        let device = self.contexts.get(&context).ok_or(EINVAL)?.device;
        let own = self.pds.get(&pd).is_some_and(|pd| pd.context == context)
            && [send_cq, recv_cq]
                .iter()
                .all(|cq| self.cqs.get(cq).is_some_and(|cq| cq.context == context))
            && srq.is_none_or(|srq| self.srqs.get(&srq).is_some_and(|srq| srq.context == context));
        // A DC target receives from a shared receive queue only.
        if !own || kind == Kind::Dct && srq.is_none() {
            return Err(EINVAL);
        }
        let (sq, rq) = match kind {
            Kind::Dct => (None, None),
            _ => rings(&asked, srq.is_some())?,
        };
        // A DC target gets its number in the change to RTR.
        let number = if kind == Kind::Dct { 0 } else { self.number() };
        let page = if asked.flags & qp_flag::UAR_PAGE_INDEX != 0 { asked.bfreg_index } else { 0 };
        if kind != Kind::Dct && !self.uar.is_used(page) {
            return Err(EINVAL);
        }
        let signals = request.get::<u32>(FLAGS).unwrap_or(0) & SQ_SIG_ALL != 0;
        let scatter = match kind {
            Kind::Rc if self.options.scatter_to_cqe => {
                let size = |cq| if self.cqs[cq].entry_size == 128 { 64 } else { 32 };
                scatter(asked.flags, signals, [size(&send_cq), size(&recv_cq)])
            }
            _ => [0; 2],
        };
        let qp = Qp {
            context,
            device,
            kind,
            number,
            user_handle: request.number(USER_HANDLE).unwrap_or(0),
            uidx: asked.uidx,
            pd,
            send_cq,
            recv_cq,
            srq,
            page,
            sq,
            rq,
            dc_key: asked.access_key,
            cap,
            state: state::RESET,
            attr: Attr::new(),
            attempt: Attempt::default(),
            async_events: 0,
            established: false,
            notify_drained: false,
            draining: false,
            doorbell_missing_since: None,
            history: History::default(),
            scatter,
        };
        let handle = self.handle();
        if number != 0 {
            self.qp_by_number.insert(number, handle);
            self.uar.add_sender(page, handle);
        }
        let rings = [&qp.sq, &qp.rq].into_iter().flatten();
        self.counters.queue_bytes += rings.map(|ring| ring.memory.len()).sum::<u64>();
        self.qps.insert(handle, qp);
        request.set_handle(HANDLE, handle.into());
        request.put(ANSWER_CAP, &cap);
        request.put(ANSWER_NUMBER, &number);
        request.put(UHW_OUT, &CreateQpResponse::zeroed());
        Ok(())
    }

    pub(crate) fn destroy_qp(&mut self, request: &mut Request<'_>) -> Reply {
        const ANSWER: u16 = 1;
        let handle = request.handle(0)?;
        let (context, element, events) = self
            .qps
            .get(&handle)
            .map(|qp| (qp.context, qp.user_handle, qp.async_events))
            .ok_or(EINVAL)?;
        let kinds = [
            event::QP_FATAL,
            event::QP_REQ_ERR,
            event::QP_ACCESS_ERR,
            event::COMM_EST,
            event::SQ_DRAINED,
            event::LAST_WQE_REACHED,
        ];
        let unseen = self.remove_unread_events(context, element, &kinds);
        self.remove_qp(handle);
        request.put(ANSWER, &(events - unseen));
        Ok(())
    }

    /// Executes MODIFY_QP. The `extended` command has a response, from which libmlx5 takes the
    /// number of a DC target.
    pub(crate) fn modify_qp_command(&mut self, request: &mut Request<'_>, extended: bool) -> Reply {
        let asked: ModifyQp = request.get(CORE_IN).ok_or(EINVAL)?;
        self.modify_qp(&asked)?;
        if extended {
            let number = self
                .qps
                .get(&asked.handle)
                .filter(|qp| qp.kind == Kind::Dct)
                .map_or(0, |qp| qp.number);
            let length = size_of::<ModifyQpExResponse>() as u32;
            request.put(CORE_OUT, &ModifyQpExResponse { comp_mask: 0, response_length: length });
            let length = size_of::<Mlx5ModifyQpResponse>() as u32;
            let answer = Mlx5ModifyQpResponse {
                response_length: length,
                dctn: number,
                ece_options: 0,
                reserved: 0,
            };
            request.put(UHW_OUT, &answer);
        }
        Ok(())
    }

    fn modify_qp(&mut self, asked: &ModifyQp) -> Reply {
        let handle = asked.handle;
        let qp = self.qps.get(&handle).ok_or(EINVAL)?;
        let given = asked.mask;
        let from = qp.state;
        if given & mask::CUR_STATE != 0 && asked.cur_state != from {
            return Err(EINVAL);
        }
        let to = if given & mask::STATE != 0 { asked.state } else { from };
        transition::check(qp.kind, from, to, given)?;
        self.check_values(qp.device, asked)?;
        let (kind, numbered) = (qp.kind, qp.number != 0);
        let number = if kind == Kind::Dct && to == state::RTR && !numbered {
            Some(self.number())
        } else {
            None
        };
        if from == state::RTS && to == state::SQD {
            // WQEs announced by a doorbell are in flight and still execute.
            self.collect();
            self.run_send_queue(handle, usize::MAX, true);
        }
        if to == state::RESET {
            // Doorbells for WQEs of before the reset are not wrong.
            self.collect();
        }
        let qp = self.qps.get_mut(&handle).expect("looked up above");
        qp.attr.take(asked);
        if let Some(number) = number {
            qp.number = number;
            self.qp_by_number.insert(number, handle);
        }
        match to {
            state::ERR => self.fail_qp(handle),
            state::RESET => {
                qp.state = to;
                qp.attr = Attr::new();
                qp.reset();
                let number = qp.number;
                self.ready.remove(&handle);
                self.policy.waiting.retain(|waiting| waiting.qpn != number);
            }
            state::SQD if from == state::RTS => {
                qp.state = to;
                qp.notify_drained =
                    given & mask::EN_SQD_ASYNC_NOTIFY != 0 && asked.en_sqd_async_notify != 0;
                qp.draining = qp.attempt != Attempt::default();
                if !qp.draining {
                    self.drained(handle);
                }
            }
            state::RTS if from == state::SQD => {
                qp.state = to;
                // WQEs posted in SQD have had their doorbells.
                self.ready.insert(handle);
            }
            _ => qp.state = to,
        }
        Ok(())
    }

    fn check_values(&self, device: usize, asked: &ModifyQp) -> Reply {
        let given = |flag| asked.mask & flag != 0;
        let port = self.port(device);
        let wrong = given(mask::PORT) && asked.port != 1
            || given(mask::PKEY_INDEX) && asked.pkey_index != 0
            || given(mask::PATH_MTU) && !(1..=5).contains(&asked.path_mtu)
            || given(mask::MAX_QP_RD_ATOMIC) && asked.max_rd_atomic > 16
            || given(mask::MAX_DEST_RD_ATOMIC) && asked.max_dest_rd_atomic > 16
            || given(mask::RETRY_CNT) && asked.retry_cnt > 7
            || given(mask::RNR_RETRY) && asked.rnr_retry > 7
            || given(mask::TIMEOUT) && asked.timeout > 31
            || given(mask::MIN_RNR_TIMER) && asked.min_rnr_timer > 31
            || given(mask::ALT_PATH);
        let dest = &asked.dest;
        let routed = dest.is_global != 0;
        let badly_routed =
            given(mask::AV) && (dest.port != 1 || !routed && self.options.link == Link::Roce);
        if wrong || badly_routed {
            return Err(EINVAL);
        }
        if given(mask::AV) && routed { port.check_gid(dest.sgid_index) } else { Ok(()) }
    }

    pub(crate) fn query_qp(&mut self, request: &mut Request<'_>) -> Reply {
        let asked: QueryQp = request.get(CORE_IN).ok_or(EINVAL)?;
        let qp = self.qps.get(&asked.handle).ok_or(EINVAL)?;
        let attr = &qp.attr;
        let answer = QueryQpResponse {
            dest: attr.dest,
            cap: qp.cap,
            qkey: attr.qkey,
            rq_psn: attr.rq_psn,
            sq_psn: attr.sq_psn,
            dest_qpn: attr.dest_qpn,
            access: attr.access,
            pkey_index: attr.pkey_index,
            state: qp.state,
            cur_state: qp.state,
            path_mtu: attr.path_mtu,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            port: attr.port,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            sq_draining: u8::from(qp.draining),
            ..QueryQpResponse::zeroed()
        };
        request.put(CORE_OUT, &answer);
        Ok(())
    }
}

/// Returns the longest data in CQEs, `sizes` if enabled. The kernel enables it for requests only if
/// all of them have a CQE, or by a flag of its own.
fn scatter(flags: u32, signals: bool, [sent, received]: [usize; 2]) -> [usize; 2] {
    if flags & qp_flag::SCATTER_CQE == 0 {
        return [0; 2];
    }
    let requests = signals || flags & qp_flag::ALLOW_SCATTER_CQE != 0;
    [if requests { sent } else { 0 }, received]
}

/// Returns the send and the receive queue in libmlx5's buffer. The receive queue comes first; each
/// has its own doorbell record.
fn rings(asked: &CreateQp, shared: bool) -> Result<(Option<Ring>, Option<Ring>), i32> {
    /// Binary logarithm of the 64-byte blocks of send WQEs.
    const BLOCK: u32 = 6;
    let (requests, receives, shift) = (asked.sq_wqe_count, asked.rq_wqe_count, asked.rq_wqe_shift);
    let counted = |count: u32, most| count == 0 || count.is_power_of_two() && count <= most;
    if !counted(requests, MAX_SEND_WQEBB)
        || !counted(receives, MAX_RECV_WR)
        || receives != 0 && !(4..=9).contains(&shift)
        || !asked.db_addr.is_multiple_of(8)
    {
        return Err(EINVAL);
    }
    let first = u64::from(receives) << shift;
    // SAFETY: libmlx5 keeps buffer and records mapped until the queue pair is destroyed.
    let (memory, records) = unsafe {
        (
            Buffer::new(asked.buf_addr, first + (u64::from(requests) << BLOCK)),
            Buffer::new(asked.db_addr, 8),
        )
    };
    let ring = |entries: u32, shift: u32, from, record| {
        let memory = memory.part(from, u64::from(entries) << shift)?;
        let record = records.part(record, 4)?;
        (entries != 0).then_some(Ring { memory, record, entries, shift, index: 0 })
    };
    let rq = if shared { None } else { ring(receives, shift, 0, 0) };
    Ok((ring(requests, BLOCK, first, 4), rq))
}

impl Attr {
    fn new() -> Self {
        Self {
            dest: Plain::zeroed(),
            dest_qpn: 0,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            access: 0,
            pkey_index: 0,
            path_mtu: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
        }
    }

    fn take(&mut self, asked: &ModifyQp) {
        fn set<T: Copy>(given: bool, field: &mut T, value: T) {
            if given {
                *field = value;
            }
        }
        let given = |flag| asked.mask & flag != 0;
        set(given(mask::AV), &mut self.dest, asked.dest);
        set(given(mask::DEST_QPN), &mut self.dest_qpn, asked.dest_qpn);
        set(given(mask::QKEY), &mut self.qkey, asked.qkey);
        set(given(mask::RQ_PSN), &mut self.rq_psn, asked.rq_psn);
        set(given(mask::SQ_PSN), &mut self.sq_psn, asked.sq_psn);
        set(given(mask::ACCESS_FLAGS), &mut self.access, asked.access);
        set(given(mask::PKEY_INDEX), &mut self.pkey_index, asked.pkey_index);
        set(given(mask::PATH_MTU), &mut self.path_mtu, asked.path_mtu);
        set(given(mask::MAX_QP_RD_ATOMIC), &mut self.max_rd_atomic, asked.max_rd_atomic);
        set(
            given(mask::MAX_DEST_RD_ATOMIC),
            &mut self.max_dest_rd_atomic,
            asked.max_dest_rd_atomic,
        );
        set(given(mask::MIN_RNR_TIMER), &mut self.min_rnr_timer, asked.min_rnr_timer);
        set(given(mask::PORT), &mut self.port, asked.port);
        set(given(mask::TIMEOUT), &mut self.timeout, asked.timeout);
        set(given(mask::RETRY_CNT), &mut self.retry_cnt, asked.retry_cnt);
        set(given(mask::RNR_RETRY), &mut self.rnr_retry, asked.rnr_retry);
    }
}
