//! Commands for completion queues and shared receive queues.

use super::{CORE_IN, CORE_OUT};
use crate::abi::{
    CreateCq, CreateCqResponse, CreateSrq, CreateSrqResponse, DestroyCqResponse, EBUSY, EINVAL,
    EOPNOTSUPP, ModifySrq, QuerySrq, QuerySrqResponse, UHW_IN, UHW_OUT, event,
};
use crate::channel;
use crate::lint::Problem;
use crate::memory::Buffer;
use crate::objects::{Cq, Srq};
use crate::port::{COMPLETION_VECTORS, COMPRESSED_HASH, MAX_SRQ_WR};
use crate::state::State;
use crate::uverbs::{Reply, Request};

impl State {
    pub(crate) fn create_cq(&mut self, request: &mut Request<'_>) -> Reply {
        ids! { HANDLE = 0, CQE = 1, USER_HANDLE = 2, CHANNEL = 3, VECTOR = 4, ANSWER = 6 }
        let asked: CreateCq = request.get(UHW_IN).ok_or(EINVAL)?;
        // libmlx5 asks for one entry fewer than its buffer holds.
        let entries = request.get::<u32>(CQE).and_then(|cqe| cqe.checked_add(1)).ok_or(EINVAL)?;
        let size = asked.cqe_size;
        let vector: u32 = request.get(VECTOR).unwrap_or(0);
        if !entries.is_power_of_two()
            || entries > 1 << 22
            || !matches!(size, 64 | 128)
            || vector >= COMPLETION_VECTORS
        {
            return Err(EINVAL);
        }
        let max_session = if asked.comp_en != 0 { self.max_session(asked.comp_format)? } else { 0 };
        let channel = request.number(CHANNEL).map(|fd| fd as i32);
        if channel.is_some_and(|fd| !self.channels.contains_key(&fd))
            || asked.buf_addr == 0
            || !asked.db_addr.is_multiple_of(8)
        {
            return Err(EINVAL);
        }
        // SAFETY: libmlx5 keeps buffer and records mapped until the queue is destroyed.
        let (ring, records) = unsafe {
            (
                Buffer::new(asked.buf_addr, u64::from(entries) * u64::from(size)),
                Buffer::new(asked.db_addr, 8),
            )
        };
        let number = self.number();
        let page = u32::from(asked.uar_page);
        let cq = Cq {
            context: request.context,
            number,
            user_handle: request.number(USER_HANDLE).unwrap_or(0),
            ring,
            records,
            entries,
            entry_size: size,
            page,
            channel,
            produced: 0,
            solicited: 0,
            armed: None,
            last_arm: None,
            completion_events: 0,
            async_events: 0,
            overrun: false,
            max_session,
            run: Vec::new(),
            checked: 0,
        };
        if let Some(entry) = cq.unmarked() {
            self.lint.note(
                number,
                Problem::UnmarkedCompletions,
                format!("entry {entry} of {entries}"),
            );
        }
        let handle = self.handle();
        self.counters.queue_bytes += cq.ring.len();
        self.uar.add_armer(page, handle);
        self.cqs.insert(handle, cq);
        request.set_handle(HANDLE, handle.into());
        request.put(ANSWER, &(entries - 1));
        request.put(UHW_OUT, &CreateCqResponse { cqn: number, reserved: 0 });
        Ok(())
    }

    /// Returns the maximum session of a queue that the program creates with compression. The format
    /// concerns receives; requests have one.
    fn max_session(&self, format: u8) -> Result<u32, i32> {
        match self.options.compressed_session {
            0 | 1 => Err(EOPNOTSUPP),
            session if u32::from(format) == COMPRESSED_HASH => Ok(session),
            _ if format == 4 => Err(EOPNOTSUPP),
            _ => Err(EINVAL),
        }
    }

    pub(crate) fn destroy_cq(&mut self, request: &mut Request<'_>) -> Reply {
        const ANSWER: u16 = 1;
        let handle = request.handle(0)?;
        let cq = self.cqs.get(&handle).cloned().ok_or(EINVAL)?;
        if self.qps.values().any(|qp| qp.send_cq == handle || qp.recv_cq == handle) {
            return Err(EBUSY);
        }
        // libibverbs waits for acknowledgement of the events that the program has read, so unread
        // ones are removed and not counted.
        let unread = match cq.channel.and_then(|fd| self.channels.get_mut(&fd)) {
            Some(channel) => {
                let record = channel::completion_event(cq.user_handle);
                channel.remove_unread(|of| of == record)
            }
            None => 0,
        };
        let unseen = self.remove_unread_events(cq.context, cq.user_handle, &[event::CQ_ERR]);
        self.remove_cq(handle);
        let answer = DestroyCqResponse {
            completion_events: cq.completion_events - unread,
            async_events: cq.async_events - unseen,
        };
        request.put(ANSWER, &answer);
        Ok(())
    }

    pub(crate) fn create_srq(&mut self, request: &mut Request<'_>) -> Reply {
        ids! { HANDLE = 0, PD = 1, USER_HANDLE = 4, MAX_WR = 5, MAX_SGE = 6, LIMIT = 7, KIND = 9 }
        ids! { ANSWER_WR = 11, ANSWER_SGE = 12, ANSWER_NUMBER = 13 }
        let asked: CreateSrq = request.get(UHW_IN).ok_or(EINVAL)?;
        if request.get::<u32>(KIND).unwrap_or(0) != 0 {
            return Err(EOPNOTSUPP);
        }
        let number = |id| request.get::<u32>(id);
        let (max_wr, max_sge) = (number(MAX_WR).ok_or(EINVAL)?, number(MAX_SGE).ok_or(EINVAL)?);
        let limit = number(LIMIT).unwrap_or(0);
        let pd = request.handle(PD)?;
        let own = self.pds.get(&pd).is_some_and(|pd| pd.context == request.context);
        if !own
            || max_wr == 0
            || max_wr > MAX_SRQ_WR
            || max_sge > 31
            || !asked.db_addr.is_multiple_of(8)
        {
            return Err(EINVAL);
        }
        // The command lacks the WQE size: both sides derive it from `max_sge`.
        let shift = (16 * (1 + max_sge.max(1))).next_power_of_two().max(32).trailing_zeros();
        // libmlx5's buffer holds one WQE more than can be posted.
        let entries = u64::from((max_wr + 1).next_power_of_two());
        // SAFETY: libmlx5 keeps buffer and record mapped until the queue is destroyed.
        let (ring, records) = unsafe {
            (Buffer::new(asked.buf_addr, entries << shift), Buffer::new(asked.db_addr, 4))
        };
        let srqn = self.number();
        let srq = Srq {
            context: request.context,
            pd,
            user_handle: request.number(USER_HANDLE).unwrap_or(0),
            ring,
            records,
            shift,
            max_wr,
            max_sge,
            head: 0,
            used: 0,
            limit,
            async_events: 0,
        };
        let handle = self.handle();
        self.counters.queue_bytes += srq.ring.len();
        self.srqs.insert(handle, srq);
        request.set_handle(HANDLE, handle.into());
        request.put(ANSWER_WR, &max_wr);
        request.put(ANSWER_SGE, &max_sge);
        request.put(ANSWER_NUMBER, &srqn);
        request.put(UHW_OUT, &CreateSrqResponse { srqn, reserved: 0 });
        Ok(())
    }

    pub(crate) fn destroy_srq(&mut self, request: &mut Request<'_>) -> Reply {
        const ANSWER: u16 = 1;
        let handle = request.handle(0)?;
        let srq = self.srqs.get(&handle).cloned().ok_or(EINVAL)?;
        if self.qps.values().any(|qp| qp.srq == Some(handle)) {
            return Err(EBUSY);
        }
        let unseen =
            self.remove_unread_events(srq.context, srq.user_handle, &[event::SRQ_LIMIT_REACHED]);
        self.srqs.remove(&handle);
        request.put(ANSWER, &(srq.async_events - unseen));
        Ok(())
    }

    pub(crate) fn modify_srq(&mut self, request: &mut Request<'_>) -> Reply {
        const MAX_WR: u32 = 1;
        const LIMIT: u32 = 2;
        let asked: ModifySrq = request.get(CORE_IN).ok_or(EINVAL)?;
        let srq = self.srqs.get_mut(&asked.handle).ok_or(EINVAL)?;
        // mlx5 devices cannot enlarge shared receive queues either.
        if asked.mask & MAX_WR != 0 || asked.mask & LIMIT != 0 && asked.limit >= srq.max_wr {
            return Err(EINVAL);
        }
        if asked.mask & LIMIT != 0 {
            srq.limit = asked.limit;
            // The number of receives may be below the new limit already.
            self.watch_limit(asked.handle);
        }
        Ok(())
    }

    pub(crate) fn query_srq(&mut self, request: &mut Request<'_>) -> Reply {
        let asked: QuerySrq = request.get(CORE_IN).ok_or(EINVAL)?;
        let srq = self.srqs.get(&asked.handle).ok_or(EINVAL)?;
        let answer = QuerySrqResponse {
            max_wr: srq.max_wr,
            max_sge: srq.max_sge,
            limit: srq.limit,
            reserved: 0,
        };
        request.put(CORE_OUT, &answer);
        Ok(())
    }
}
