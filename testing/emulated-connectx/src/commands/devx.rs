//! Firmware commands that libmlx5 sends by DEVX: general capabilities, and the reset of a stream of
//! a DC initiator.

use crate::abi::{EINVAL, EPROTONOSUPPORT, devx, state};
use crate::lint::Problem;
use crate::objects::{Handle, Kind, Streams};
use crate::requester::read_control;
use crate::state::State;
use crate::uverbs::{Reply, Request};

/// A command with big-endian fields.
struct Command(Vec<u8>);

impl Command {
    fn half(&self, at: usize) -> Option<u16> {
        self.0.get(at..)?.first_chunk().copied().map(u16::from_be_bytes)
    }

    fn word(&self, at: usize) -> Option<u32> {
        self.0.get(at..)?.first_chunk().copied().map(u32::from_be_bytes)
    }
}

impl State {
    pub(crate) fn devx_command(&mut self, request: &mut Request<'_>) -> Reply {
        let command = Command(request.bytes(devx::OTHER_IN).ok_or(EINVAL)?);
        let asked = (command.half(devx::OPCODE), command.half(devx::OPCODE_MODIFIER));
        // Without streams, as on a device without DEVX.
        if asked != (Some(devx::QUERY_HCA_CAP), Some(devx::GENERAL_CURRENT))
            || self.options.dci_streams.is_none()
        {
            return Err(EPROTONOSUPPORT);
        }
        let (byte, bit) = devx::QPC_EXTENSION;
        let mut answer = vec![0; request.capacity(devx::OTHER_OUT)];
        *answer.get_mut(devx::CAPABILITIES + byte).ok_or(EINVAL)? = bit;
        request.put_bytes(devx::OTHER_OUT, &answer);
        Ok(())
    }

    /// Executes RTS2RTS_QP with a stream to reset; it cannot change anything else.
    pub(crate) fn devx_modify(&mut self, request: &mut Request<'_>) -> Reply {
        let handle = request.handle(devx::MODIFY_HANDLE)?;
        let command = Command(request.bytes(devx::MODIFY_IN).ok_or(EINVAL)?);
        let fields = (
            command.half(devx::OPCODE),
            command.word(devx::NUMBER),
            command.word(devx::MASK),
            command.half(devx::STREAM),
        );
        let (Some(devx::RTS2RTS_QP), Some(number), Some(mask), Some(stream)) = fields else {
            return Err(EPROTONOSUPPORT);
        };
        let qp = self.qps.get(&handle).ok_or(EINVAL)?;
        if number != devx::QPC_EXT | qp.number || mask != devx::DCI_STREAM_CHANNEL_ID {
            return Err(EINVAL);
        }
        let status = match (qp.kind, &qp.streams) {
            (Kind::Dci, Some(streams)) if u32::from(stream) < streams.count() => {
                if qp.state == state::RTS { 0 } else { devx::BAD_STATE }
            }
            _ => devx::BAD_PARAMETER,
        };
        let mut answer = vec![0; request.capacity(devx::MODIFY_OUT)];
        *answer.first_mut().ok_or(EINVAL)? = status;
        request.put_bytes(devx::MODIFY_OUT, &answer);
        if status != 0 {
            // The kernel's error for a command that the firmware refused.
            return Err(libc::EREMOTEIO);
        }
        self.reset_stream(handle, stream);
        Ok(())
    }

    fn reset_stream(&mut self, handle: Handle, stream: u16) {
        let Some(qp) = self.qps.get_mut(&handle) else { return };
        let number = qp.number;
        if let Some(sq) = qp.sq.filter(|_| qp.has_failed(stream)) {
            let (mut at, mut left) = (sq.index, sq.posted());
            while left > 0 && u32::from(left) <= sq.entries {
                let control = read_control(&sq, at);
                if control.stream == stream {
                    let detail =
                        format!("stream {stream} was reset before WQE {at:#x} was flushed");
                    self.lint.note(number, Problem::WrongStream, detail);
                    break;
                }
                let blocks = control.blocks().min(left);
                (at, left) = (at.wrapping_add(blocks), left - blocks);
            }
        }
        if let Some(Streams { failed, .. }) = &mut qp.streams {
            failed.remove(&stream);
        }
    }
}
