//! The libraries, and the functions found in them.

use std::ffi::{CStr, c_int};
use std::mem;
use std::ptr;
use std::sync::OnceLock;

use rdma_provider::VerbError;
use rdma_provider::locks::Section;

/// A function once looked up; `None` if there is none.
pub(crate) type Cache<F> = OnceLock<Option<F>>;

/// A C library of rdma-core.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Library {
    Ibverbs,
    Rdmacm,
    Mlx5,
}

impl Library {
    const fn file(self) -> &'static str {
        match self {
            Self::Ibverbs => "libibverbs.so.1",
            Self::Rdmacm => "librdmacm.so.1",
            Self::Mlx5 => "libmlx5.so.1",
        }
    }

    /// Returns whether the library has a function.
    pub(crate) fn has(self, name: &CStr) -> bool {
        // SAFETY: S3: the function is not called.
        self.open().is_some_and(|it| unsafe { find::<unsafe extern "C" fn()>(it, name) }.is_some())
    }

    /// Returns a function; `None` if the library is missing, or its version has none.
    ///
    /// # Safety
    ///
    /// `F` is the type of the function.
    #[inline]
    pub(crate) unsafe fn cached<F: Copy>(self, cache: &Cache<F>, name: &CStr) -> Option<F> {
        match cache.get() {
            Some(found) => *found,
            // SAFETY: S3: the caller's promise.
            None => unsafe { self.look_up(cache, name) },
        }
    }

    /// # Safety
    ///
    /// See [`cached`](Self::cached).
    #[cold]
    unsafe fn look_up<F: Copy>(self, cache: &Cache<F>, name: &CStr) -> Option<F> {
        // `get_or_init` holds a lock meanwhile, so log events wait until it is released.
        let _section = Section::begin();
        // A library that cannot be opened now, for lack of descriptors for example, may be later.
        let library = self.open()?;
        // SAFETY: S3: the caller's promise.
        *cache.get_or_init(|| unsafe { find(library, name) })
    }

    fn open(self) -> Option<libloading::Library> {
        // SAFETY: S3: the initialisers of rdma-core's libraries have no conditions.
        let library = unsafe { libloading::Library::new(self.file()) };
        let log = |error: &libloading::Error| {
            let library = self.file();
            rdma_provider::debug!(%error, library, "failed to open a library");
        };
        library.inspect_err(log).ok()
    }
}

/// Returns a function of a library, which stays open: a cache holds the function for ever.
///
/// # Safety
///
/// See [`Library::cached`].
unsafe fn find<F: Copy>(library: libloading::Library, name: &CStr) -> Option<F> {
    // SAFETY: S3: the caller's promise.
    let function = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    let function = function
        .inspect_err(|error| {
            rdma_provider::debug!(%error, ?name, "failed to find a function of a library");
        })
        .ok()
        .map(|function| *function);
    mem::forget(library);
    function
}

/// Returns a name that ends with NUL.
pub(super) const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with NUL"),
    }
}

/// What a function returns that does not exist.
pub(crate) trait Missing {
    fn missing() -> Self;
}

impl Missing for c_int {
    fn missing() -> Self {
        VerbError::EOPNOTSUPP
    }
}

/// A count.
impl Missing for isize {
    fn missing() -> Self {
        -(VerbError::EOPNOTSUPP as Self)
    }
}

impl<T> Missing for *mut T {
    fn missing() -> Self {
        set_errno(VerbError::EOPNOTSUPP);
        ptr::null_mut()
    }
}

impl<T> Missing for *const T {
    fn missing() -> Self {
        <*mut T>::missing()
    }
}

impl Missing for () {
    fn missing() {}
}

/// Sets `errno(3)`.
pub(super) fn set_errno(errno: c_int) {
    // SAFETY: S3: the address of a number of this thread.
    unsafe {
        #[cfg(target_os = "linux")]
        libc::__errno_location().write(errno);
        #[cfg(not(target_os = "linux"))]
        libc::__error().write(errno);
    }
}
