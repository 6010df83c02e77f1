//! The choice between the direct data path and libmlx5, on an emulated ConnectX.
//!
//! libmlx5 and the choice read the environment of the process. So each test runs this program again
//! with other settings, for the one test `device_without_settings_posts_directly_and_logs_nothing`,
//! which then prints what it finds instead of checking it.

#![cfg(all(
    feature = "mlx5",
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
#![allow(unsafe_code, reason = "calls libibverbs")]

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use emulated_connectx::{EmulatedConnectX, Options, this_program};
use rdma_ibverbs::contract::{Context as _, CqInit, Pd as _, QpInit};
use rdma_ibverbs::ffi::*;
use rdma_ibverbs::types::{DataPath, DirectConfig, QpCaps, SrqCaps, Transport};
use rdma_ibverbs::{Context, VerbError};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const POST: &str = "TOKIO_RDMA_POST";
/// Selects what a process prints; see [`Scene`].
const SCENE: &str = "TOKIO_RDMA_SCENE";
const COMPRESSION: &str = "TOKIO_RDMA_CQE_COMPRESSION";
const FELL_BACK: &str =
    "direct data path unavailable; posting through libibverbs device=\"mlx5_0\"";
const NO_MLX5: &str = "direct data path (needs an mlx5 device and libmlx5)";
const NO_MLX5_REASON: &str =
    "direct data path (needs an mlx5 device and libmlx5): Operation not supported (os error 95)";

/// The device that a process opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scene {
    /// The emulated device as it is.
    ConnectX,
    /// The emulated device, which compresses completion queue entries on request.
    Compressing,
    /// A device of another driver.
    OtherDriver,
    /// The emulated device without free doorbell registers.
    NoRegisters,
}

/// The result of opening the device.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    path: Result<DataPath, VerbError>,
    /// The text of the error, if any.
    error: String,
    /// Events of levels up to INFO.
    log: Vec<String>,
}

fn open(scene: Scene) -> Found {
    let mut options = Options::default();
    options.compressed_session = if scene == Scene::Compressing { 33 } else { 0 };
    EmulatedConnectX::start(options).unwrap();
    let journal = Journal::default();
    let lines = journal.0.clone();
    let held = (scene == Scene::NoRegisters).then(|| take_registers("mlx5_0"));
    let name = if scene == Scene::OtherDriver { use_other_driver() } else { "mlx5_0" };
    let opened = tracing::subscriber::with_default(journal, || Context::open(name));
    let opened = opened.map(|context| context.unwrap());
    if let (Ok(context), Scene::ConnectX | Scene::Compressing) = (&opened, scene) {
        create_queues(context);
    }
    drop(held);
    let log = lines.lock().unwrap().clone();
    let error = opened.as_ref().map_or_else(VerbError::to_string, |_| String::new());
    Found { path: opened.map(|context| context.attr().data_path), error, log }
}

/// Creates a queue of each kind, as a program would.
fn create_queues(context: &Context) {
    let (pd, cq) = (context.create_pd().unwrap(), context.create_cq(&CqInit::new(100)).unwrap());
    let srq = pd.create_srq(SrqCaps { max_wr: 10, max_sge: 2 }).unwrap();
    let caps = QpCaps {
        max_send_wr: 10,
        max_recv_wr: 0,
        max_send_sge: 2,
        max_recv_sge: 0,
        max_inline: 64,
    };
    let init = QpInit {
        transport: Transport::Rc,
        send_cq: &cq,
        recv_cq: &cq,
        srq: Some(&srq),
        caps,
        direct: DirectConfig::DEFAULT,
    };
    let qp = pd.create_qp(&init).unwrap();
    drop(qp);
}

/// Makes libibverbs find SoftRoCE's driver, which matches devices by name, and returns the name.
fn use_other_driver() -> &'static str {
    const NAME: &str = "rxe_0";
    let kept = File::open("/sys/class/infiniband_verbs/abi_version").unwrap();
    // The emulated files are elsewhere.
    let kept = fs::read_link(format!("/proc/self/fd/{}", kept.as_raw_fd())).unwrap();
    let class = kept.parent().and_then(Path::parent).unwrap();
    let device = class.join("infiniband").join(NAME);
    fs::rename(class.join("infiniband/mlx5_0"), &device).unwrap();
    fs::write(device.join("device/modalias"), "platform:none\n").unwrap();
    let verbs = class.join("infiniband_verbs/uverbs0");
    fs::write(verbs.join("ibdev"), format!("{NAME}\n")).unwrap();
    fs::write(verbs.join("abi_version"), "2\n").unwrap();
    NAME
}

/// Takes all doorbell registers except those that an open device needs for itself.
fn take_registers(name: &str) -> impl Drop {
    let (first, second) = (RawContext::open(name), RawContext::open(name));
    let mut attr = ibv_td_init_attr { comp_mask: 0 };
    let mut taken = 0;
    // SAFETY: the context is open. The domains go with the process.
    while !unsafe { ibv_alloc_td(first.0, &raw mut attr) }.is_null() {
        taken += 1;
        assert!(taken < 100_000, "the emulated device has fewer registers");
    }
    assert!(taken > 0);
    drop(second);
    first
}

struct RawContext(*mut ibv_context);

impl RawContext {
    fn open(name: &str) -> Self {
        // SAFETY: the list is alive until it is freed, and has a device.
        unsafe {
            let mut count = 0;
            let list = ibv_get_device_list(&raw mut count);
            assert_eq!(count, 1, "no device but {name}");
            let context = ibv_open_device(*list);
            ibv_free_device_list(list);
            assert!(!context.is_null(), "{}", std::io::Error::last_os_error());
            Self(context)
        }
    }
}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: opened by this object.
        assert_eq!(unsafe { ibv_close_device(self.0) }, 0);
    }
}

/// Keeps events up to INFO.
#[derive(Debug, Default)]
struct Journal(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let name = if field.name() == "message" { "" } else { field.name() };
        let equals = if name.is_empty() { "" } else { "=" };
        write!(self.0, " {name}{equals}{value:?}").unwrap();
    }
}

impl Subscriber for Journal {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Opens the device in a process with other settings, and returns what it prints.
#[track_caller]
fn found_with<V: AsRef<OsStr> + std::fmt::Debug>(scene: Scene, settings: &[(&str, V)]) -> String {
    let mut command = this_program();
    command.args(["--exact", "device_without_settings_posts_directly_and_logs_nothing"]);
    command.arg("--nocapture").env_remove(POST).env_remove(COMPRESSION);
    command
        .env(SCENE, format!("{scene:?}"))
        .envs(settings.iter().map(|(name, value)| (name, value)));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{}; repeat with {settings:?}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = text.lines().filter_map(|line| line.split_once("found: "));
    lines.map(|(_, found)| found.to_owned()).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn check(scene: Scene, settings: &[(&str, &str)], expected: &Found) {
    let found = found_with(scene, settings);
    assert_eq!(found, format!("{expected:?}"), "{scene:?}, {settings:?}");
}

/// Checks that `settings` rule the direct path out: by default libibverbs posts, and a line says
/// why if the device is an adapter; `TOKIO_RDMA_POST=direct` fails.
#[track_caller]
fn check_impossible(scene: Scene, settings: &[(&str, &str)], reason: &str, error: VerbError) {
    assert_eq!(error.to_string(), reason);
    let line = format!("INFO {FELL_BACK} reason={reason}");
    let log = if reason == NO_MLX5_REASON { Vec::new() } else { vec![line] };
    let text = found_with(scene, settings);
    let expected = Found { path: Ok(DataPath::Extended), error: String::new(), log };
    assert_eq!(without_probes(&text), format!("{expected:?}"));
    let mut forced = settings.to_vec();
    forced.push((POST, "direct"));
    let expected = Found { path: Err(error), error: reason.to_owned(), log: Vec::new() };
    assert_eq!(without_probes(&found_with(scene, &forced)), format!("{expected:?}"));
}

/// Removes the warning of the probe for inline data, which another driver refuses.
fn without_probes(found: &str) -> String {
    let Some(from) = found.find("\"WARN failed to find the maximum inline length") else {
        return found.to_owned();
    };
    let to = from + found[from..].find("reporting 0").unwrap();
    let to = to + found[to..].find('"').unwrap() + 1;
    let rest = found[to..].strip_prefix(", ").unwrap_or(&found[to..]);
    format!("{}{rest}", &found[..from])
}

fn on(path: DataPath) -> Found {
    Found { path: Ok(path), error: String::new(), log: Vec::new() }
}

fn unsupported(what: &'static str) -> VerbError {
    VerbError::new(what, VerbError::EOPNOTSUPP)
}

#[test]
fn device_without_settings_posts_directly_and_logs_nothing() {
    let scene = match std::env::var(SCENE).as_deref() {
        Ok("Compressing") => Scene::Compressing,
        Ok("OtherDriver") => Scene::OtherDriver,
        Ok("NoRegisters") => Scene::NoRegisters,
        _ => Scene::ConnectX,
    };
    let found = open(scene);
    if std::env::var_os(SCENE).is_some() {
        println!("\nfound: {found:?}");
    } else if std::env::var_os(POST).is_none() {
        assert_eq!(found, on(DataPath::Direct));
    }
}

#[test]
fn each_data_path_can_be_selected() {
    for (value, path) in
        [("direct", DataPath::Direct), ("extended", DataPath::Extended), ("chain", DataPath::Chain)]
    {
        check(Scene::ConnectX, &[(POST, value)], &on(path));
    }
}

#[test]
fn unknown_value_is_refused_with_the_allowed_ones() {
    let verb = "TOKIO_RDMA_POST (must be direct, extended or chain)";
    let error = VerbError::new(verb, VerbError::EINVAL);
    assert_eq!(error.to_string(), format!("{verb}: Invalid argument (os error 22)"));
    let expected = Found { path: Err(error), error: error.to_string(), log: Vec::new() };
    for value in ["", "Direct", "mlx5", "direct "] {
        check(Scene::ConnectX, &[(POST, value)], &expected);
    }
    let not_unicode = OsStr::from_bytes(b"direct\xff");
    assert_eq!(
        found_with(Scene::ConnectX, &[(POST, not_unicode)]),
        format!("{expected:?}"),
        "a value that is not Unicode"
    );
}

#[test]
fn compression_is_requested_by_1_and_unavailable_on_some_adapters() {
    let direct = on(DataPath::Direct);
    let line = "WARN adapter or libmlx5 does not compress completion queue entries; \
                ignoring TOKIO_RDMA_CQE_COMPRESSION=1 device=\"mlx5_0\"";
    let ignored = Found { log: vec![line.to_owned()], ..on(DataPath::Direct) };
    check(Scene::Compressing, &[(COMPRESSION, "0")], &direct);
    check(Scene::Compressing, &[(COMPRESSION, "1")], &direct);
    check(Scene::ConnectX, &[(COMPRESSION, "0")], &direct);
    check(Scene::ConnectX, &[(COMPRESSION, "1")], &ignored);
    check(Scene::ConnectX, &[(COMPRESSION, "1"), (POST, "direct")], &ignored);
    check(Scene::Compressing, &[(COMPRESSION, "1"), ("MLX5_CQE_SIZE", "64")], &direct);
}

#[test]
fn unknown_value_of_compression_is_refused_on_the_direct_path_only() {
    let verb = "TOKIO_RDMA_CQE_COMPRESSION (must be 0 or 1)";
    let error = VerbError::new(verb, VerbError::EINVAL);
    assert_eq!(error.to_string(), format!("{verb}: Invalid argument (os error 22)"));
    let expected = Found { path: Err(error), error: error.to_string(), log: Vec::new() };
    for scene in [Scene::ConnectX, Scene::Compressing] {
        check(scene, &[(COMPRESSION, "2")], &expected);
        check(scene, &[(COMPRESSION, "2"), (POST, "direct")], &expected);
        check(scene, &[(COMPRESSION, "2"), (POST, "extended")], &on(DataPath::Extended));
        check(scene, &[(COMPRESSION, "2"), (POST, "chain")], &on(DataPath::Chain));
        let not_unicode = OsStr::from_bytes(b"1\xff");
        let found = found_with(scene, &[(COMPRESSION, not_unicode)]);
        assert_eq!(found, format!("{expected:?}"), "a value that is not Unicode");
    }
    let found = found_with(Scene::OtherDriver, &[(COMPRESSION, "2")]);
    assert_eq!(without_probes(&found), format!("{:?}", on(DataPath::Extended)));
}

// An adapter that expects checksums would refuse the entries of the direct path, which have none.
#[test]
fn signatures_rule_the_direct_path_out() {
    // libmlx5 adds them whatever the value is.
    for value in ["1", "0"] {
        check_impossible(
            Scene::ConnectX,
            &[("MLX5_QP_SIGNATURE", value)],
            "direct data path (needs MLX5_QP_SIGNATURE to be unset): \
             Operation not supported (os error 95)",
            unsupported("direct data path (needs MLX5_QP_SIGNATURE to be unset)"),
        );
    }
    check_impossible(
        Scene::ConnectX,
        &[("MLX5_SRQ_SIGNATURE", "1")],
        "direct data path (needs MLX5_SRQ_SIGNATURE to be unset): \
         Operation not supported (os error 95)",
        unsupported("direct data path (needs MLX5_SRQ_SIGNATURE to be unset)"),
    );
}

#[test]
fn device_of_another_driver_is_posted_to_by_libibverbs() {
    check_impossible(Scene::OtherDriver, &[], NO_MLX5_REASON, unsupported(NO_MLX5));
}

#[test]
fn device_without_free_registers_is_posted_to_by_libibverbs() {
    check_impossible(
        Scene::NoRegisters,
        &[],
        "ibv_alloc_td: Cannot allocate memory (os error 12)",
        VerbError::new("ibv_alloc_td", VerbError::ENOMEM),
    );
}

#[test]
fn libmlx5_without_a_function_rules_the_direct_path_out() {
    let other = OtherLibrary::new("renamed", &renamed());
    let file = other.0.join("libmlx5.so.1");
    check_impossible(
        Scene::ConnectX,
        &[("LD_PRELOAD", file.to_str().unwrap())],
        "direct data path (needs mlx5dv_init_obj of libmlx5): \
         Operation not supported (os error 95)",
        unsupported("direct data path (needs mlx5dv_init_obj of libmlx5)"),
    );
}

/// Returns libmlx5 with another name for `mlx5dv_init_obj`.
fn renamed() -> Vec<u8> {
    // The dynamic linker computes 33 * hash + byte, so names with these ends have equal hashes, and
    // the library itself finds its function under the new name.
    let (before, after) = (b"\0mlx5dv_init_obj\0", b"\0mlx5dv_init_ocI\0");
    let mut bytes = fs::read(loaded_libmlx5()).unwrap();
    let mut places = (0..bytes.len() - before.len()).filter(|&at| bytes[at..].starts_with(before));
    let at = places.next().expect("libmlx5 has the function");
    assert_eq!(places.next(), None);
    bytes[at..][..after.len()].copy_from_slice(after);
    bytes
}

/// A directory with another libmlx5.
struct OtherLibrary(PathBuf);

impl OtherLibrary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let name = format!("rdma-ibverbs-selection-{name}-{}", std::process::id());
        let made = Self(std::env::temp_dir().join(name));
        fs::create_dir(&made.0).unwrap();
        fs::write(made.0.join("libmlx5.so.1"), bytes).unwrap();
        made
    }
}

impl Drop for OtherLibrary {
    fn drop(&mut self) {
        let _removed = fs::remove_dir_all(&self.0);
    }
}

/// Returns the file of libmlx5 that the dynamic linker loads.
fn loaded_libmlx5() -> PathBuf {
    EmulatedConnectX::start(Options::default()).unwrap();
    let _context = RawContext::open("mlx5_0");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    files.find(|file| file.contains("/libmlx5")).expect("the device needs libmlx5").into()
}

#[test]
fn other_settings_of_libmlx5_leave_the_direct_path_possible() {
    for (name, value) in [
        // The direct path has locks of its own.
        ("MLX5_SINGLE_THREADED", "1"),
        ("MLX5_CQE_SIZE", "64"),
        ("MLX5_CQE_SIZE", "128"),
        ("MLX5_SHUT_UP_BF", "1"),
        ("MLX5_SHUT_UP_BF", "0"),
        ("MLX5_POST_SEND_PREFER_BF", "0"),
        ("MLX5_SCATTER_TO_CQE", "0"),
        ("MLX5_STALL_CQ_POLL", "1"),
    ] {
        check(Scene::ConnectX, &[(name, value)], &on(DataPath::Direct));
        check(Scene::ConnectX, &[(name, value), (POST, "direct")], &on(DataPath::Direct));
    }
}
