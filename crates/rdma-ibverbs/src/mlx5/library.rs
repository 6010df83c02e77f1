//! Functions of libmlx5 that the binding lacks.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem;
use std::sync::OnceLock;

use rdma_provider::locks::Section;

/// Returns [`function`] `name`, which is looked up once.
///
/// # Safety
///
/// `F` is the type of the function.
pub(super) unsafe fn cached<F: Copy>(cache: &OnceLock<Option<F>>, name: &CStr) -> Option<F> {
    // The initialisation locks the cache.
    let _section = Section::begin();
    // SAFETY: S3: the caller's promise.
    *cache.get_or_init(|| unsafe { function(name) })
}

/// Returns function `name` of libmlx5; `None` if the library or its version has none.
///
/// # Safety
///
/// `F` is the type of the function.
pub(super) unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: S3: the binding has opened the library already, so no initialiser runs.
    let library = unsafe { libloading::Library::new("libmlx5.so.1") };
    let library = library
        .inspect_err(|error| rdma_provider::debug!(%error, "failed to open libmlx5"))
        .ok()?;
    // SAFETY: S3: the caller's promise.
    let function = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    let function = function
        .inspect_err(
            |error| rdma_provider::debug!(%error, ?name, "failed to find a function of libmlx5"),
        )
        .ok()
        .map(|function| *function);
    // The function must stay.
    mem::forget(library);
    function
}
