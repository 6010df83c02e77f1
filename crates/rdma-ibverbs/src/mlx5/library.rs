//! Functions of libmlx5 that the binding lacks.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem;

/// Returns function `name` of libmlx5; `None` if the library or its version has none.
///
/// # Safety
///
/// `F` is the type of the function.
pub(super) unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: S3: the binding has opened the library already, so no initialiser runs.
    let library = unsafe { libloading::Library::new("libmlx5.so.1") };
    let library =
        library.inspect_err(|error| tracing::debug!(%error, "failed to open libmlx5")).ok()?;
    // SAFETY: S3: the caller's promise.
    let function = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    let function = function
        .inspect_err(|error| tracing::debug!(%error, ?name, "failed to find a function of libmlx5"))
        .ok()
        .map(|function| *function);
    // The function must stay.
    mem::forget(library);
    function
}
