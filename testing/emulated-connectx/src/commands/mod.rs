//! Execution of verbs commands.

macro_rules! ids {
    ($($name:ident = $id:expr),* $(,)?) => { $(const $name: u16 = $id;)* };
}

mod device;
mod memory;
mod queue;
mod queue_pair;
mod transition;

use crate::abi::{self, EOPNOTSUPP, command};
use crate::state::State;
use crate::uverbs::{Reply, Request};

/// Attributes of `INVOKE_WRITE`.
const CORE_IN: u16 = 0;
const CORE_OUT: u16 = 1;
const COMMAND: u16 = 2;

impl State {
    pub(crate) fn command(&mut self, request: &mut Request<'_>) -> Reply {
        const QUERY_DEVICE_EX: u32 = command::EXTENDED | command::QUERY_DEVICE;
        const MODIFY_QP_EX: u32 = command::EXTENDED | command::MODIFY_QP;
        let code: u32 = request.get(COMMAND).ok_or(abi::EINVAL)?;
        match code {
            // libibverbs probes with this incomplete command whether `INVOKE_WRITE` works.
            command::QUERY_DEVICE if !request.has(CORE_IN) => Err(abi::ENOSPC),
            command::QUERY_DEVICE => self.query_device(request),
            QUERY_DEVICE_EX => self.query_device_ex(request),
            command::ALLOC_PD => self.alloc_pd(request),
            command::DEALLOC_PD => self.destroy_pd(handle(request)?),
            command::REG_MR => self.register_command(request),
            command::DEREG_MR => self.destroy_mr(handle(request)?),
            command::ALLOC_MW => self.alloc_mw(request),
            command::DEALLOC_MW => self.destroy_mw(handle(request)?),
            command::CREATE_AH => self.create_ah(request),
            command::DESTROY_AH => self.destroy_ah(handle(request)?),
            command::CREATE_COMP_CHANNEL => self.create_channel(request),
            command::MODIFY_SRQ => self.modify_srq(request),
            command::QUERY_SRQ => self.query_srq(request),
            command::MODIFY_QP => self.modify_qp_command(request, false),
            MODIFY_QP_EX => self.modify_qp_command(request, true),
            command::QUERY_QP => self.query_qp(request),
            _ => Err(EOPNOTSUPP),
        }
    }
}

fn handle(request: &Request<'_>) -> Result<u32, i32> {
    request.get(CORE_IN).ok_or(abi::EINVAL)
}
