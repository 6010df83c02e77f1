//! The calls of libc that are taken over, linked into the test's executable: the dynamic linker finds them there before
//! those of libc, so libibverbs and libmlx5 call these.
//!
//! All but the device's own paths and descriptors goes to the kernel as it is. That way is free of allocation and locks:
//! these are called by the allocator's and the standard library's own code, and from signal handlers.

// The linker sees them, and no one else.
#![allow(unreachable_pub)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi;
use crate::state;

/// Descriptors above are not served.
const DESCRIPTORS: usize = 4096;
/// What a descriptor is: 0, none of ours; `CHANNEL`; or the context it commands, times two, and one.
static KIND: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
const CHANNEL: u32 = 2;
/// Descriptors of ours that were closed: the engine sees to what hangs on them.
static CLOSED: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
static CLOSINGS: AtomicU32 = AtomicU32::new(0);
/// Stands for `/sys`; there once the device has been started.
static SYSFS: OnceLock<CString> = OnceLock::new();

/// From here on the device is to be found.
pub(crate) fn activate(sysfs: CString) {
    SYSFS.get_or_init(|| sysfs);
}

/// The calls that the dynamic linker does not find here, so that the libraries would call those of libc.
pub(crate) fn missing() -> Vec<&'static str> {
    let ours: [(&CStr, *const c_void); 8] = [
        (c"open", open as *const c_void),
        (c"openat", openat as *const c_void),
        (c"opendir", opendir as *const c_void),
        (c"stat", stat as *const c_void),
        (c"socket", socket as *const c_void),
        (c"close", close as *const c_void),
        (c"ioctl", ioctl as *const c_void),
        (c"mmap", mmap as *const c_void),
    ];
    let found = |name: &CStr| {
        // SAFETY: a name that ends in a zero.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.cast_const()
    };
    ours.iter()
        .filter(|(name, own)| found(name) != *own)
        .map(|(name, _)| name.to_str().unwrap_or("?"))
        .collect()
}

/// Names `fd` as the completion or event channel it is.
pub(crate) fn is_channel(fd: c_int) {
    KIND[fd as usize].store(CHANNEL, Ordering::Release);
}

/// The largest descriptor served, and one.
pub(crate) fn serves(fd: c_int) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd < DESCRIPTORS)
}

/// Descriptors that were closed since the last call, with what they were: `None` a channel, or the context.
pub(crate) fn closed() -> Vec<(c_int, Option<u32>)> {
    if CLOSINGS.swap(0, Ordering::Acquire) == 0 {
        return Vec::new();
    }
    let were =
        CLOSED.iter().enumerate().map(|(fd, was)| (fd as c_int, was.swap(0, Ordering::Acquire)));
    were.filter(|&(_, was)| was != 0)
        .map(|(fd, was)| (fd, (was != CHANNEL).then_some(was >> 1)))
        .collect()
}

fn kind(fd: c_int) -> u32 {
    usize::try_from(fd)
        .ok()
        .and_then(|fd| KIND.get(fd))
        .map_or(0, |kind| kind.load(Ordering::Acquire))
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: of this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Room for a path below `SYSFS`.
type Room = [u8; 512];

enum Path<'a> {
    /// Not of ours, or a file of the tree.
    File(&'a CStr),
    /// The character device of the device of this number.
    Device(usize),
}

/// Where `path` really is.
///
/// # Safety
///
/// `path` is null or a string that ends in a zero.
unsafe fn resolve<'a>(path: *const c_char, room: &'a mut Room) -> Option<Path<'a>> {
    let sysfs = SYSFS.get()?;
    if path.is_null() {
        return None;
    }
    // SAFETY: a string (caller).
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if let Some(number) = path.strip_prefix(b"/dev/infiniband/uverbs") {
        return match number {
            [digit @ b'0'..=b'9'] => Some(Path::Device(usize::from(digit - b'0'))),
            _ => None,
        };
    }
    let below =
        path.strip_prefix(b"/sys").filter(|below| below.starts_with(b"/class/infiniband"))?;
    let root = sysfs.as_bytes();
    let len = root.len() + below.len();
    if len >= room.len() {
        return None;
    }
    room[..root.len()].copy_from_slice(root);
    room[root.len()..len].copy_from_slice(below);
    room[len] = 0;
    CStr::from_bytes_with_nul(&room[..=len]).ok().map(Path::File)
}

/// # Safety
///
/// As `openat(2)`.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: `directory`, `path` and the rest are the caller's.
    let open = |path: *const c_char| unsafe {
        libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int
    };
    let mut room = [0; 512];
    // SAFETY: the caller's path, or null.
    match unsafe { resolve(path, &mut room) } {
        None => open(path),
        Some(Path::File(file)) => open(file.as_ptr()),
        Some(Path::Device(number)) => {
            let Some(context) = state::open_context(number) else { return fail(libc::ENOENT) };
            // Of the kind and number that the tree says.
            let fd = open(c"/dev/null".as_ptr());
            if fd >= 0 && !serves(fd) {
                // SAFETY: opened above.
                unsafe { libc::syscall(libc::SYS_close, fd) };
                return fail(libc::EMFILE);
            }
            if fd >= 0 {
                state::lock_started().reap();
                KIND[fd as usize].store(context << 1 | 1, Ordering::Release);
            }
            fd
        }
    }
}

/// `open(2)`. The mode is read whether there is one or not: it is passed in a register on the machines served.
///
/// # Safety
///
/// As `open(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

/// `open(2)`.
///
/// # Safety
///
/// As `open(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

/// `openat(2)`.
///
/// # Safety
///
/// As `openat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { open_at(directory, path, flags, mode) }
}

/// `openat(2)`.
///
/// # Safety
///
/// As `openat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { open_at(directory, path, flags, mode) }
}

/// `opendir(3)`: that of libc opens where no `open` of ours is called.
///
/// # Safety
///
/// As `opendir(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut libc::DIR {
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: as the caller promises; the descriptor is ours until `fdopendir` takes it.
    unsafe {
        let fd = open_at(libc::AT_FDCWD, path, flags, 0);
        if fd < 0 {
            return std::ptr::null_mut();
        }
        let directory = libc::fdopendir(fd);
        if directory.is_null() {
            let errno = *libc::__errno_location();
            libc::syscall(libc::SYS_close, fd);
            fail(errno);
        }
        directory
    }
}

/// # Safety
///
/// As `stat(2)`.
unsafe fn stat_at(path: *const c_char, into: *mut c_void) -> c_int {
    let mut room = [0; 512];
    // SAFETY: the caller's path, or null.
    let path = match unsafe { resolve(path, &mut room) } {
        None => path,
        Some(Path::File(file)) => file.as_ptr(),
        Some(Path::Device(_)) => c"/dev/null".as_ptr(),
    };
    // SAFETY: a path, and room for the structure of the kernel, which is that of libc on the machines served.
    unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, path, into, 0) as c_int }
}

/// `stat(2)`.
///
/// # Safety
///
/// As `stat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, into: *mut c_void) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { stat_at(path, into) }
}

/// `stat(2)`.
///
/// # Safety
///
/// As `stat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, into: *mut c_void) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { stat_at(path, into) }
}

/// `socket(2)`: without that of the kernel's RDMA stack, libibverbs lists devices by sysfs, and finds none but ours.
#[unsafe(no_mangle)]
pub extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    const NETLINK_RDMA: c_int = 20;
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA && SYSFS.get().is_some() {
        return fail(libc::EPROTONOSUPPORT);
    }
    // SAFETY: of numbers.
    unsafe { libc::syscall(libc::SYS_socket, domain, kind, protocol) as c_int }
}

/// `close(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    if kind(fd) != 0 {
        let at = fd as usize;
        CLOSED[at].store(KIND[at].swap(0, Ordering::AcqRel), Ordering::Release);
        CLOSINGS.fetch_add(1, Ordering::Release);
    }
    // SAFETY: the caller's descriptor.
    unsafe { libc::syscall(libc::SYS_close, fd) as c_int }
}

/// `ioctl(2)`.
///
/// # Safety
///
/// As `ioctl(2)`: on the device's descriptor, a request of `rdma/rdma_user_ioctl_cmds.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let kind = kind(fd);
    if kind & 1 == 1 && request == abi::VERBS_IOCTL {
        // SAFETY: a request of the kernel's interface (caller).
        return match unsafe { crate::uverbs::serve(kind >> 1, argument.cast()) } {
            Ok(()) => 0,
            Err(errno) => fail(errno),
        };
    }
    // SAFETY: as the caller promises.
    unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) as c_int }
}

/// `mmap(2)`: of the device's descriptor, a page of doorbell registers.
///
/// # Safety
///
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let (mut fd, mut offset) = (fd, offset);
    if kind(fd) & 1 == 1 {
        match crate::uar::mapping(offset, len) {
            Some((memory, at)) => (fd, offset) = (memory, at),
            None => {
                fail(libc::EINVAL);
                return libc::MAP_FAILED;
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe {
        libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) as *mut c_void
    }
}

/// `mmap(2)`.
///
/// # Safety
///
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { mmap(address, len, protection, flags, fd, offset) }
}
