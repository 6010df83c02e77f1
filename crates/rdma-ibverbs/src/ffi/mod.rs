//! The C interface of rdma-core: what this crate and its tests call of libibverbs, librdmacm and
//! libmlx5.
//!
//! Names, fields and values are those of `infiniband/verbs.h`, `rdma/rdma_cma.h` and
//! `infiniband/mlx5dv.h`; the manual pages of the functions describe them. `.ci/slow builds`
//! compares sizes, offsets and constants with the headers.
//!
//! The libraries are opened when a function is first called. A function that its library lacks, or
//! whose library cannot be opened, fails with EOPNOTSUPP.
//!
//! ```text
//! verbs ─┬▶ functions (dlsym)          cm, mlx5 ─▶ verbs
//! inline ┴▶ fields of ibv_context, ibv_qp_ex, ibv_cq_ex: what the headers define inline
//! ```

#![allow(unsafe_code)]
#![allow(missing_docs, missing_debug_implementations, reason = "documented by the manual pages")]
#![allow(non_camel_case_types, non_snake_case, reason = "the names of C")]

#[macro_use]
mod declare;

mod cm;
mod inline;
mod library;
mod mlx5;
#[cfg(test)]
mod tests;
mod verbs;

pub use cm::*;
pub use inline::*;
pub(crate) use library::Library;
pub use mlx5::*;
pub use verbs::*;
