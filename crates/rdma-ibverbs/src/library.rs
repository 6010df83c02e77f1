//! Functions of the C libraries that the binding lacks.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem;
use std::sync::OnceLock;

use rdma_provider::locks::Section;

/// A C library, which the binding opens when the program starts.
#[derive(Debug, Clone, Copy)]
pub(super) enum Library {
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

    /// Returns function `name`, which is looked up once; `None` if the library or its version has
    /// none.
    ///
    /// # Safety
    ///
    /// `F` is the type of the function.
    pub(super) unsafe fn cached<F: Copy>(
        self,
        cache: &OnceLock<Option<F>>,
        name: &CStr,
    ) -> Option<F> {
        // The initialisation locks the cache.
        let _section = Section::begin();
        // SAFETY: S3: the caller's promise.
        *cache.get_or_init(|| unsafe { self.function(name) })
    }

    /// # Safety
    ///
    /// See [`cached`](Self::cached).
    unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        // SAFETY: S3: the binding has opened the library already, so no initialiser runs.
        let library = unsafe { libloading::Library::new(self.file()) };
        let library = library
            .inspect_err(|error| {
                let library = self.file();
                rdma_provider::debug!(%error, library, "failed to open a library");
            })
            .ok()?;
        // SAFETY: S3: the caller's promise.
        let function = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
        let function = function
            .inspect_err(|error| {
                rdma_provider::debug!(%error, ?name, "failed to find a function of a library");
            })
            .ok()
            .map(|function| *function);
        // The function must stay.
        mem::forget(library);
        function
    }
}
