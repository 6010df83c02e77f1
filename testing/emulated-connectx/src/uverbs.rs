//! Requests of the kernel's interface: their attributes, and who answers them.

use std::ptr;

use crate::abi::{self, Attribute, EPROTONOSUPPORT, Header, Plain, device, object};
use crate::objects::ContextId;
use crate::state::{self, State};

/// An answer, or a number of `errno(3)`.
pub(crate) type Reply = Result<(), i32>;

/// Attributes of up to so many bytes are in the attribute itself.
const INSIDE: usize = 8;
const VALID_OUTPUT: u16 = 2;

/// A request: attributes that are read, and places for the answer.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) context: ContextId,
    object: u16,
    method: u16,
    attributes: &'a mut [Attribute],
}

/// Answers the request at `header`.
///
/// # Safety
///
/// A header that its attributes follow, as `rdma/rdma_user_ioctl_cmds.h` says; what they point to is there to be read and
/// written.
pub(crate) unsafe fn serve(context: ContextId, header: *mut Header) -> Reply {
    // SAFETY: a header (caller).
    let (header, first) = unsafe { (header.read(), header.add(1).cast::<Attribute>()) };
    // SAFETY: so many follow it (caller), and no one else uses them meanwhile.
    let attributes =
        unsafe { std::slice::from_raw_parts_mut(first, usize::from(header.attributes)) };
    let mut request = Request { context, object: header.object, method: header.method, attributes };
    let mut state = state::lock_started();
    state.reap();
    state.serve(&mut request)
}

impl Request<'_> {
    fn find(&self, id: u16) -> Option<&Attribute> {
        self.attributes.iter().find(|attribute| attribute.id == id)
    }

    pub(crate) fn has(&self, id: u16) -> bool {
        self.find(id).is_some()
    }

    /// A number or handle: the attribute itself.
    pub(crate) fn number(&self, id: u16) -> Option<u64> {
        self.find(id).map(|attribute| attribute.data)
    }

    pub(crate) fn handle(&self, id: u16) -> Result<u32, i32> {
        self.number(id).map(|number| number as u32).ok_or(abi::EINVAL)
    }

    /// A structure; what the program's is shorter is zero, what it is longer is not looked at.
    pub(crate) fn get<T: Plain>(&self, id: u16) -> Option<T> {
        let attribute = self.find(id)?;
        let len = usize::from(attribute.len);
        let from: *const u8 = match len {
            0..=INSIDE => (&raw const attribute.data).cast(),
            _ => ptr::with_exposed_provenance(attribute.data as usize),
        };
        let mut value = T::zeroed();
        let take = len.min(size_of::<T>());
        // SAFETY: the attribute has `len` bytes there (`serve`), and any bytes are a `T`.
        unsafe { ptr::copy_nonoverlapping(from, (&raw mut value).cast(), take) };
        Some(value)
    }

    /// Answers in attribute `id`, if the program asks for it; what its place is longer becomes zero.
    pub(crate) fn put<T: Plain>(&mut self, id: u16, value: &T) {
        let len = size_of::<T>();
        // SAFETY: a plain structure is that many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(ptr::from_ref(value).cast::<u8>(), len) };
        self.put_bytes(id, bytes);
    }

    pub(crate) fn put_bytes(&mut self, id: u16, bytes: &[u8]) {
        let Some(attribute) = self.attributes.iter_mut().find(|attribute| attribute.id == id)
        else {
            return;
        };
        let room = usize::from(attribute.len);
        let now = bytes.len().min(room);
        let into: *mut u8 = ptr::with_exposed_provenance_mut(attribute.data as usize);
        // SAFETY: the attribute has `room` bytes there (`serve`).
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), into, now);
            ptr::write_bytes(into.add(now), 0, room - now);
        }
        attribute.flags |= VALID_OUTPUT;
    }

    /// Bytes that there is room for in attribute `id`.
    pub(crate) fn room(&self, id: u16) -> usize {
        self.find(id).map_or(0, |attribute| usize::from(attribute.len))
    }

    /// The handle or descriptor of what was made.
    pub(crate) fn made(&mut self, id: u16, handle: u64) {
        if let Some(attribute) = self.attributes.iter_mut().find(|attribute| attribute.id == id) {
            attribute.data = handle;
        }
    }
}

/// Methods of objects, but those of the device.
const CREATE: u16 = 0;
const DESTROY: u16 = 1;
/// Objects that are made otherwise have this alone.
const ONLY_DESTROY: u16 = 0;
/// `UVERBS_METHOD_REG_MR`, of `ibv_reg_mr_ex` (rdma-core 59).
const REG_MR: u16 = 5;

impl State {
    fn serve(&mut self, request: &mut Request<'_>) -> Reply {
        match (request.object, request.method) {
            (object::DEVICE, device::INVOKE_WRITE) => self.command(request),
            (object::DEVICE, device::GET_CONTEXT) => self.get_context(request),
            (object::DEVICE, device::QUERY_CONTEXT) => self.query_context(request),
            (object::DEVICE, device::QUERY_PORT) => self.query_port(request),
            (object::DEVICE, device::QUERY_GID_TABLE) => self.query_gid_table(request),
            (object::DEVICE, device::QUERY_GID_ENTRY) => self.query_gid_entry(request),
            (object::ASYNC_EVENT, CREATE) => self.open_events(request),
            (object::PD, ONLY_DESTROY) => self.destroy_pd(request.handle(0)?),
            (object::AH, ONLY_DESTROY) => self.destroy_ah(request.handle(0)?),
            (object::MR, DESTROY) => self.destroy_mr(request.handle(0)?),
            (object::MR, REG_MR) => self.register(request),
            (object::CQ, CREATE) => self.create_cq(request),
            (object::CQ, DESTROY) => self.destroy_cq(request),
            (object::SRQ, CREATE) => self.create_srq(request),
            (object::SRQ, DESTROY) => self.destroy_srq(request),
            (object::QP, CREATE) => self.create_qp(request),
            (object::QP, DESTROY) => self.destroy_qp(request),
            (object::UAR, abi::DRIVER) => self.allocate_uar(request),
            (object::UAR, UAR_DESTROY) => self.destroy_uar(request.handle(abi::DRIVER)?),
            // What is not there, the libraries do without, or say so.
            _ => Err(EPROTONOSUPPORT),
        }
    }
}

/// `MLX5_IB_METHOD_UAR_OBJ_DESTROY`.
const UAR_DESTROY: u16 = abi::DRIVER + 1;
