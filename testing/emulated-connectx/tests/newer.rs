//! Requests that only versions of libibverbs after rdma-core 44 send, built by hand.

mod common;

use std::ffi::c_ulong;

use common::*;

/// `struct ib_uverbs_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// `struct ib_uverbs_ioctl_hdr` and its attributes.
#[repr(C)]
struct Request {
    length: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved1: u64,
    driver: u32,
    reserved2: u32,
    list: [Attribute; 8],
}

/// Sends a request of `object` and `method` to `context`; returns the errno.
fn send(
    context: &Context,
    object: u16,
    method: u16,
    list: &mut [Attribute; 8],
    used: usize,
) -> i32 {
    const VERBS_IOCTL: c_ulong = 0xc018_1b01;
    let length = (24 + 16 * used) as u16;
    let attributes = used as u16;
    let list_now = *list;
    let mut request = Request {
        length,
        object,
        method,
        attributes,
        reserved1: 0,
        driver: 0,
        reserved2: 0,
        list: list_now,
    };
    // SAFETY: a request of the kernel's interface, on the device's descriptor.
    let result = unsafe { libc::ioctl((*context.0).cmd_fd, VERBS_IOCTL, &raw mut request) };
    *list = request.list;
    match result {
        0 => 0,
        _ => std::io::Error::last_os_error().raw_os_error().unwrap(),
    }
}

#[test]
fn memory_is_registered_by_the_method_of_rdma_core_59() {
    const MR: u16 = 7;
    const REG_MR: u16 = 5;
    const DESTROY: u16 = 1;
    let device = start(|_| {});
    let pair = Pair::new(RC);
    let words = vec![0_u64; 512];
    let address = words.as_ptr() as u64;
    let (mut lkey, mut rkey) = (0_u32, 0_u32);
    let inside = |id, len, data| Attribute { id, len, flags: 1, reserved: 0, data };
    // SAFETY: a live protection domain.
    let pd = unsafe { (*pair.pd.0).handle };
    let mut list = [
        inside(0, 0, 0),
        inside(1, 0, pd.into()),
        inside(3, 8, address),
        inside(4, 8, address),
        inside(5, 8, 4096),
        inside(6, 4, ALL.into()),
        inside(9, 4, (&raw mut lkey) as u64),
        inside(10, 4, (&raw mut rkey) as u64),
    ];
    assert_eq!(send(&pair.context, MR, REG_MR, &mut list, 8), 0);
    assert_ne!((lkey, rkey), (0, 0));
    let write = Work::write(1, vec![pair.source.sge(0, 64)], &pair.target, 0);
    pair.a.post(write.at(address + 8, rkey));
    pair.a.queues.send.ok(1);
    // SAFETY: within the vector.
    assert_eq!(unsafe { words.as_ptr().add(1).read_volatile() }, pair.source.word(0));
    let mut gone = [inside(0, 0, list[0].data); 8];
    assert_eq!(send(&pair.context, MR, DESTROY, &mut gone, 1), 0);
    assert_eq!(send(&pair.context, MR, DESTROY, &mut gone, 1), libc::EINVAL);
    // Unknown methods give the error on which libraries do without.
    assert_eq!(send(&pair.context, 0x1fff, 0x1000, &mut gone, 1), libc::EPROTONOSUPPORT);
    device.assert_clean();
}
