//! Sizes, offsets and constants beside those of the headers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use super::*;

/// Names and values of an enumeration.
pub(super) type Constants = &'static [(&'static str, i64)];

/// A structure or union, with the offsets of its fields.
pub(super) struct Layout {
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) fields: &'static [(&'static str, usize)],
}

const LAYOUTS: [&[Layout]; 6] =
    [verbs::DEVICES, verbs::OBJECTS, verbs::QUEUE_PAIRS, verbs::WORK, cm::CM, mlx5::MLX5];

const CONSTANTS: [&[Constants]; 5] = [
    verbs::ENUMERATIONS,
    verbs::FLAGS,
    cm::CM_ENUMERATIONS,
    mlx5::MLX5_ENUMERATIONS,
    mlx5::MLX5_FLAGS,
];

fn layouts() -> impl Iterator<Item = &'static Layout> {
    LAYOUTS.into_iter().flatten().filter(|layout| !NAMELESS.contains(&layout.name))
}

fn constants() -> impl Iterator<Item = &'static (&'static str, i64)> {
    let all = CONSTANTS.into_iter().flatten().copied().flatten();
    all.filter(|(name, _)| is_compared("", name))
}

/// Unions whose fields are fields of a structure in C, and what C declares in several places.
const NAMELESS: [&str; 4] =
    ["imm_data_or_rkey", "bind_mw_or_tso", "rdma_sockaddr", "mlx5dv_obj_other"];

/// Structures and unions without a name in C, by where they are.
const UNNAMED: [(&str, &str, &str); 18] = [
    ("ibv_odp_transport_caps", "struct ibv_odp_caps", "per_transport_caps"),
    ("ibv_gid_global", "union ibv_gid", "global"),
    ("ibv_async_event_element", "struct ibv_async_event", "element"),
    ("rdma_t", "struct ibv_send_wr", "wr.rdma"),
    ("atomic_t", "struct ibv_send_wr", "wr.atomic"),
    ("ud_t", "struct ibv_send_wr", "wr.ud"),
    ("wr_t", "struct ibv_send_wr", "wr"),
    ("bind_mw_t", "struct ibv_send_wr", "bind_mw"),
    ("tso_t", "struct ibv_send_wr", "tso"),
    ("rdma_link_addr", "struct rdma_addr", "addr"),
    ("rdma_event_param", "struct rdma_cm_event", "param"),
    ("mlx5dv_queue", "struct mlx5dv_qp", "sq"),
    ("mlx5dv_register", "struct mlx5dv_qp", "bf"),
    ("mlx5dv_obj_qp", "struct mlx5dv_obj", "qp"),
    ("mlx5dv_obj_cq", "struct mlx5dv_obj", "cq"),
    ("mlx5dv_obj_srq", "struct mlx5dv_obj", "srq"),
    ("mlx5dv_obj_ah", "struct mlx5dv_obj", "ah"),
    ("ibv_gid", "union ibv_gid", ""),
];

/// Fields whose names differ in C.
const RENAMED: [(&str, &str, &str); 23] = [
    ("ibv_device", "ops", "_ops"),
    ("ibv_context_ops", "compat_query_device", "_compat_query_device"),
    ("ibv_context_ops", "compat_query_port", "_compat_query_port"),
    ("ibv_context_ops", "compat_pd_and_mr", "_compat_alloc_pd"),
    ("ibv_context_ops", "compat_create_cq", "_compat_create_cq"),
    ("ibv_context_ops", "compat_cq_and_srq", "_compat_cq_event"),
    ("ibv_context_ops", "compat_qp", "_compat_create_qp"),
    ("ibv_context_ops", "compat_others", "_compat_create_ah"),
    ("verbs_context", "from_advise_mr", "advise_mr"),
    ("verbs_context", "from_post_srq_ops", "post_srq_ops"),
    ("verbs_context", "private", "priv"),
    ("verbs_context", "from_destroy_flow", "ibv_destroy_flow"),
    ("verbs_context", "from_get_srq_num", "get_srq_num"),
    ("verbs_context", "placeholder", "_ABI_placeholder3"),
    ("ibv_mw", "type_", "type"),
    ("ibv_cq_ex", "base", "context"),
    ("ibv_send_wr", "imm_data_invalidated_rkey_union", "imm_data"),
    ("ibv_send_wr", "remote_srqn", "qp_type.xrc.remote_srqn"),
    ("ibv_send_wr", "bind_mw_tso_union", "bind_mw"),
    ("ibv_wc", "imm_data_invalidated_rkey_union", "imm_data"),
    ("rdma_addr", "src_addr_union", "src_addr"),
    ("rdma_addr", "dst_addr_union", "dst_addr"),
    ("mlx5_wqe_av", "dc_key", "key.dc_key"),
];

/// Structures of which only a part is declared here, or which have grown.
const PARTS: [&str; 8] = [
    "mlx5dv_obj",
    "ibv_cq_ex",
    "ibv_device_attr_ex",
    "ibv_port_attr",
    "ibv_qp_ex",
    "mlx5dv_context",
    "mlx5dv_qp_ex",
    "verbs_context",
];

/// Fields that rdma-core has since a version after Debian 12's. Compared only with the headers
/// that [`INCLUDE`] names.
const NEWER: [(&str, &str); 5] = [
    ("ibv_port_attr", "active_speed_ex"),
    ("mlx5dv_context", "max_dc_rd_atom"),
    ("mlx5dv_context", "max_dc_init_rd_atom"),
    ("mlx5dv_obj", "devx"),
    ("", "MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM"),
];

/// Names the directory of newer headers.
const INCLUDE: &str = "RDMA_CORE_INCLUDE";

fn is_compared(structure: &str, name: &str) -> bool {
    env::var_os(INCLUDE).is_some() || !NEWER.contains(&(structure, name))
}

/// Returns the program that prints what the headers say: a name and a number in each line.
fn program() -> String {
    let mut text = "#define _GNU_SOURCE\n#include <stddef.h>\n#include <stdio.h>\n\
                    #include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n\
                    #include <infiniband/mlx5dv.h>\nint main(void) {\n"
        .to_owned();
    let mut print = |name: &str, value: String| {
        writeln!(text, "printf(\"{name} %lld\\n\", (long long)({value}));").unwrap();
    };
    for layout in layouts() {
        let name = layout.name;
        let unnamed = UNNAMED.iter().find(|(ours, ..)| *ours == name);
        let object = match unnamed {
            Some((_, outer, "")) => format!("(*({outer} *)0)"),
            Some((_, outer, field)) => format!("(({outer} *)0)->{field}"),
            None => format!("(*(struct {name} *)0)"),
        };
        print(name, format!("sizeof({object})"));
        for (field, _) in layout.fields {
            if !is_compared(name, field) {
                continue;
            }
            let renamed = RENAMED.iter().find(|(outer, ours, _)| (*outer, *ours) == (name, field));
            let theirs = match (renamed, *field) {
                (Some((_, _, theirs)), _) => theirs,
                (None, "in_") => "in",
                (None, field) => field,
            };
            let offset = format!("(char *)&{object}.{theirs} - (char *)&{object}");
            print(&format!("{name}.{field}"), offset);
        }
    }
    for (name, _) in constants() {
        print(name, (*name).to_owned());
    }
    text + "}\n"
}

#[test]
#[ignore = "needs a C compiler and the headers of rdma-core"]
fn declarations_equal_the_headers() {
    let directory =
        PathBuf::from(env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| env::temp_dir().into()));
    let (source, binary) = (directory.join("rdma-abi.c"), directory.join("rdma-abi"));
    fs::write(&source, program()).unwrap();
    let mut compiler = Command::new("cc");
    if let Some(headers) = env::var_os(INCLUDE) {
        compiler.arg("-I").arg(headers);
    }
    assert!(compiler.arg(&source).arg("-o").arg(&binary).status().unwrap().success());
    let output = Command::new(&binary).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let theirs: BTreeMap<&str, i64> = text
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    let (mut compared, mut wrong) = (0, Vec::new());
    let mut compare = |name: &str, ours: i64| {
        compared += 1;
        if theirs[name] != ours {
            wrong.push(format!("{name}: {ours}, in C {}", theirs[name]));
        }
    };
    for layout in layouts() {
        let name = layout.name;
        let (ours, size) = (layout.size as i64, theirs[name]);
        // Fields are found from the end.
        let shift = if name == "verbs_context" { size - ours } else { 0 };
        if PARTS.contains(&name) {
            let grown = layout.fields.iter().any(|(field, _)| NEWER.contains(&(name, field)));
            assert!(size >= ours || grown, "{name} has {size} bytes in C, and {ours} here");
        } else {
            compare(name, ours);
        }
        for (field, offset) in layout.fields {
            if is_compared(name, field) {
                compare(&format!("{name}.{field}"), *offset as i64 + shift);
            }
        }
    }
    for (name, value) in constants() {
        compare(name, *value);
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    assert!(compared > 600, "only {compared} compared");
}
