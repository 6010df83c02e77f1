//! Interposed libc functions, by which libibverbs and libmlx5 reach the kernel.
//!
//! They are linked into the test's executable, where the dynamic linker finds them before libc's.
//!
//! Calls that do not concern the device go straight to the kernel. That path neither allocates nor
//! locks: the allocator, the standard library and signal handlers call it.

// Only the linker refers to the functions.
#![allow(unreachable_pub)]
// Compilers newer than rust-toolchain.toml compare the functions with libc's declarations. A
// variadic function cannot be defined; on the supported machines `mode` is passed in a register.
#![allow(unknown_lints, reason = "the next lints are newer")]
#![allow(invalid_runtime_symbol_definitions, suspicious_runtime_symbol_definitions)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi;
use crate::state;

/// Descriptors from this number on are not served.
const DESCRIPTORS: usize = 4096;
/// The kind of each descriptor: 0 if not the device's, `CHANNEL`, or `context << 1 | 1`.
static KIND: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
const CHANNEL: u32 = 2;
/// The former `KIND` of closed descriptors, whose objects the engine destroys.
static CLOSED: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
static CLOSINGS: AtomicU32 = AtomicU32::new(0);
/// Replacement of `/sys`, set when the device starts.
static SYSFS: OnceLock<CString> = OnceLock::new();

pub(crate) fn activate(sysfs: CString) {
    SYSFS.get_or_init(|| sysfs);
}

/// Returns the functions that the dynamic linker does not resolve to this module.
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
        // SAFETY: a NUL-terminated name.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.cast_const()
    };
    ours.iter()
        .filter(|(name, own)| found(name) != *own)
        .map(|(name, _)| name.to_str().unwrap_or("?"))
        .collect()
}

pub(crate) fn mark_channel(fd: c_int) {
    KIND[fd as usize].store(CHANNEL, Ordering::Release);
}

pub(crate) fn serves(fd: c_int) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd < DESCRIPTORS)
}

/// Returns the descriptors closed since the last call: `None` for a channel, else the context.
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
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

type PathBuffer = [u8; 512];

enum Path<'a> {
    File(&'a CStr),
    /// The character device with this index.
    Device(usize),
}

/// Returns the emulated target of `path`; `None` if it is not the device's.
///
/// # Safety
///
/// `path` is null or NUL-terminated.
unsafe fn resolve<'a>(path: *const c_char, buffer: &'a mut PathBuffer) -> Option<Path<'a>> {
    let sysfs = SYSFS.get()?;
    if path.is_null() {
        return None;
    }
    // SAFETY: NUL-terminated (caller).
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
    if len >= buffer.len() {
        return None;
    }
    buffer[..root.len()].copy_from_slice(root);
    buffer[root.len()..len].copy_from_slice(below);
    buffer[len] = 0;
    CStr::from_bytes_with_nul(&buffer[..=len]).ok().map(Path::File)
}

/// Implements `openat(2)`.
///
/// # Safety
///
/// See `openat(2)`.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: all arguments are the caller's, or `path` is a valid string.
    let open = |path: *const c_char| unsafe {
        libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int
    };
    let mut buffer = [0; 512];
    // SAFETY: null or NUL-terminated (caller).
    match unsafe { resolve(path, &mut buffer) } {
        None => open(path),
        Some(Path::File(file)) => open(file.as_ptr()),
        Some(Path::Device(number)) => {
            let Some(context) = state::open_context(number) else { return fail(libc::ENOENT) };
            // `/dev/null` has the device number that the sysfs tree names.
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

/// Interposes `open(2)`. Reads `mode` even if the caller passed none: it is in a register on the
/// supported machines.
///
/// # Safety
///
/// See `open(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

/// Interposes `open(2)`.
///
/// # Safety
///
/// See `open(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

/// Interposes `openat(2)`.
///
/// # Safety
///
/// See `openat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { open_at(directory, path, flags, mode) }
}

/// Interposes `openat(2)`.
///
/// # Safety
///
/// See `openat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { open_at(directory, path, flags, mode) }
}

/// Interposes `opendir(3)`, since libc's does not call the interposed `open`.
///
/// # Safety
///
/// See `opendir(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut libc::DIR {
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the caller's contract; the descriptor belongs to this function until `fdopendir`
    // succeeds.
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

/// Implements `stat(2)`.
///
/// # Safety
///
/// See `stat(2)`.
unsafe fn stat_at(path: *const c_char, into: *mut c_void) -> c_int {
    let mut buffer = [0; 512];
    // SAFETY: null or NUL-terminated (caller).
    let path = match unsafe { resolve(path, &mut buffer) } {
        None => path,
        Some(Path::File(file)) => file.as_ptr(),
        Some(Path::Device(_)) => c"/dev/null".as_ptr(),
    };
    // SAFETY: a valid path, and space for libc's structure, which is the kernel's on the supported
    // machines.
    unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, path, into, 0) as c_int }
}

/// Interposes `stat(2)`.
///
/// # Safety
///
/// See `stat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, into: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { stat_at(path, into) }
}

/// Interposes `stat(2)`.
///
/// # Safety
///
/// See `stat(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, into: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { stat_at(path, into) }
}

/// Interposes `socket(2)`. Refused the RDMA netlink socket, libibverbs lists devices by sysfs and
/// finds only the emulated ones.
#[unsafe(no_mangle)]
pub extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    const NETLINK_RDMA: c_int = 20;
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA && SYSFS.get().is_some() {
        return fail(libc::EPROTONOSUPPORT);
    }
    // SAFETY: integers only.
    unsafe { libc::syscall(libc::SYS_socket, domain, kind, protocol) as c_int }
}

/// Interposes `close(2)`.
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

/// Interposes `ioctl(2)`.
///
/// # Safety
///
/// See `ioctl(2)`. On the device's descriptor, `argument` is a request of
/// `rdma/rdma_user_ioctl_cmds.h`.
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
    // SAFETY: the caller's contract.
    unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) as c_int }
}

/// Interposes `mmap(2)`, which maps UAR pages of the device's descriptor.
///
/// # Safety
///
/// See `mmap(2)`.
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
    // SAFETY: the caller's contract.
    unsafe {
        libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) as *mut c_void
    }
}

/// Interposes `mmap(2)`.
///
/// # Safety
///
/// See `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    unsafe { mmap(address, len, protection, flags, fd, offset) }
}
