//! Requests of the kernel's ioctl interface: parsing and dispatch.

use std::ptr;

use crate::abi::{self, Attribute, EPROTONOSUPPORT, Header, Plain, device, object};
use crate::objects::ContextId;
use crate::state::{self, State};

/// Success, or an `errno(3)` value.
pub(crate) type Reply = Result<(), i32>;

/// Attributes of up to this many bytes are stored inline.
const INSIDE: usize = 8;
const VALID_OUTPUT: u16 = 2;

/// A request: attributes to read, and space for the response.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) context: ContextId,
    object: u16,
    method: u16,
    attributes: &'a mut [Attribute],
}

/// Executes the request at `header`.
///
/// # Safety
///
/// The header is followed by its attributes, as `rdma/rdma_user_ioctl_cmds.h` describes. Their
/// pointers are valid for reads and writes.
pub(crate) unsafe fn serve(context: ContextId, header: *mut Header) -> Reply {
    // SAFETY: a header (caller).
    let (header, first) = unsafe { (header.read(), header.add(1).cast::<Attribute>()) };
    // SAFETY: so many attributes follow (caller), which nothing else uses during the call.
    let attributes =
        unsafe { std::slice::from_raw_parts_mut(first, usize::from(header.attributes)) };
    let mut request = Request { context, object: header.object, method: header.method, attributes };
    let mut state = state::lock_started();
    state.reap();
    // No CQE of a queue pair follows its reset or destruction.
    state.write_runs();
    let reply = state.serve(&mut request);
    state.write_runs();
    reply
}

impl Request<'_> {
    fn find(&self, id: u16) -> Option<&Attribute> {
        self.attributes.iter().find(|attribute| attribute.id == id)
    }

    pub(crate) fn has(&self, id: u16) -> bool {
        self.find(id).is_some()
    }

    /// Returns a number or handle, which is stored inline.
    pub(crate) fn number(&self, id: u16) -> Option<u64> {
        self.find(id).map(|attribute| attribute.data)
    }

    pub(crate) fn handle(&self, id: u16) -> Result<u32, i32> {
        self.number(id).map(|number| number as u32).ok_or(abi::EINVAL)
    }

    /// Returns a structure. Bytes that the program did not pass are zero; excess bytes are ignored.
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

    /// Writes a response to attribute `id`, if the program asks for it. Excess space is zeroed.
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
        let capacity = usize::from(attribute.len);
        let now = bytes.len().min(capacity);
        let into: *mut u8 = ptr::with_exposed_provenance_mut(attribute.data as usize);
        // SAFETY: the attribute has `capacity` bytes there (`serve`).
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), into, now);
            ptr::write_bytes(into.add(now), 0, capacity - now);
        }
        attribute.flags |= VALID_OUTPUT;
    }

    pub(crate) fn capacity(&self, id: u16) -> usize {
        self.find(id).map_or(0, |attribute| usize::from(attribute.len))
    }

    pub(crate) fn set_handle(&mut self, id: u16, handle: u64) {
        if let Some(attribute) = self.attributes.iter_mut().find(|attribute| attribute.id == id) {
            attribute.data = handle;
        }
    }
}

const CREATE: u16 = 0;
const DESTROY: u16 = 1;
/// The destroy method of objects without a create method.
const ONLY_DESTROY: u16 = 0;
/// `UVERBS_METHOD_REG_MR`, which `ibv_reg_mr_ex` calls (rdma-core 59).
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
            (object::MW, ONLY_DESTROY) => self.destroy_mw(request.handle(0)?),
            (object::CQ, CREATE) => self.create_cq(request),
            (object::CQ, DESTROY) => self.destroy_cq(request),
            (object::SRQ, CREATE) => self.create_srq(request),
            (object::SRQ, DESTROY) => self.destroy_srq(request),
            (object::QP, CREATE) => self.create_qp(request),
            (object::QP, DESTROY) => self.destroy_qp(request),
            (object::UAR, abi::DRIVER) => self.allocate_uar(request),
            (object::UAR, UAR_DESTROY) => self.destroy_uar(request.handle(abi::DRIVER)?),
            // On this error, the libraries do without the method or report it.
            _ => Err(EPROTONOSUPPORT),
        }
    }
}

/// `MLX5_IB_METHOD_UAR_OBJ_DESTROY`.
const UAR_DESTROY: u16 = abi::DRIVER + 1;
