//! The C interface of rdma-core: what this crate and its tests call of libibverbs, librdmacm and
//! libmlx5.
//!
//! Names, fields and values are those of `infiniband/verbs.h`, `rdma/rdma_cma.h` and
//! `infiniband/mlx5dv.h`, except of types that have no name in C. The manual pages of the functions
//! describe them. `.ci/slow builds` compares sizes, offsets and constants with the headers.
//!
//! A library is opened when one of its functions is first called. If the library or the function is
//! missing, then a call that returns an integer returns EOPNOTSUPP itself, not -1; one that returns
//! a count, its negative; one that returns a pointer, null with EOPNOTSUPP in `errno`; others do
//! nothing. A library that could not be opened is tried again by the next call.
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
