//! The emulated `/sys/class/infiniband` and `/sys/class/infiniband_verbs`: a real tree in the
//! temporary directory, to which paths are redirected.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::control::Link;
use crate::port::{FIRMWARE, Port};

/// Root of the tree, and its file that stays locked while the process lives.
static ROOT: OnceLock<(PathBuf, File)> = OnceLock::new();

const NAME: &str = "emulated-connectx-";
/// The name of a tree whose file may not be locked yet.
const UNLOCKED: &str = "new-emulated-connectx-";
const LOCK: &str = "lock";

/// Creates the tree once. A normal exit removes it.
pub(crate) fn build(ports: &[Port]) -> io::Result<CString> {
    let path = |root: &Path| Ok(CString::new(root.as_os_str().as_bytes())?);
    if let Some((root, _)) = ROOT.get() {
        return path(root);
    }
    // The time distinguishes processes with the same id, earlier or in another PID namespace.
    let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
    let own = format!("{}-{}", std::process::id(), age.as_nanos());
    let root = std::env::temp_dir().join(format!("{NAME}{own}"));
    let named = path(&root);
    remove_old(&std::env::temp_dir())?;
    // Locked before it has the name by which other processes find it.
    let unlocked = std::env::temp_dir().join(format!("{UNLOCKED}{own}"));
    fs::create_dir(&unlocked)?;
    let lock = File::create(unlocked.join(LOCK))?;
    if !try_lock(&lock) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("directory {} is locked by another process", unlocked.display()),
        ));
    }
    fs::rename(&unlocked, &root)?;
    put(&root, "class/infiniband_verbs/abi_version", "6")?;
    for port in ports {
        device(&root, port)?;
    }
    if ROOT.set((root, lock)).is_ok() {
        // SAFETY: `remove` may be called at exit.
        unsafe { libc::atexit(remove) };
    }
    named
}

/// Locks `file`; returns `false` if another process has it locked.
fn try_lock(file: &File) -> bool {
    // SAFETY: an open descriptor.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Removes the trees of killed processes, whose files are no longer locked.
fn remove_old(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)?.flatten() {
        let named = entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME));
        // Fails for another user's tree or one removed meanwhile.
        if named && File::open(entry.path().join(LOCK)).is_ok_and(|lock| try_lock(&lock)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

extern "C" fn remove() {
    if let Some((root, _)) = ROOT.get() {
        // An exit handler cannot report errors.
        let _ = fs::remove_dir_all(root);
    }
}

fn device(root: &Path, port: &Port) -> io::Result<()> {
    let name = port.name();
    let verbs = format!("class/infiniband_verbs/uverbs{}", port.device);
    // `/dev/null`, to which the device's path is redirected.
    put(root, &format!("{verbs}/dev"), "1:3")?;
    put(root, &format!("{verbs}/ibdev"), &name)?;
    put(root, &format!("{verbs}/abi_version"), "1")?;
    let device = format!("class/infiniband/{name}");
    let [major, minor, patch] = FIRMWARE;
    let guid: Vec<_> = port
        .guid()
        .to_be_bytes()
        .chunks(2)
        .map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]))
        .collect();
    put(root, &format!("{device}/node_type"), "1: CA")?;
    put(root, &format!("{device}/node_guid"), &guid.join(":"))?;
    put(root, &format!("{device}/sys_image_guid"), &guid.join(":"))?;
    put(root, &format!("{device}/board_id"), "EMULATED00001")?;
    put(root, &format!("{device}/hca_type"), "MT4123")?;
    put(root, &format!("{device}/fw_ver"), &format!("{major}.{minor}.{patch:04}"))?;
    // libibverbs selects libmlx5 by this alias of a ConnectX-6.
    let alias = "pci:v000015B3d0000101Bsv000015B3sd00000001bc02sc07i00";
    put(root, &format!("{device}/device/modalias"), alias)?;
    let ports = format!("{device}/ports/1");
    put(root, &format!("{ports}/pkeys/0"), "0xffff")?;
    let layer = if port.link == Link::InfiniBand { "InfiniBand" } else { "Ethernet" };
    put(root, &format!("{ports}/link_layer"), layer)?;
    put(root, &format!("{ports}/lid"), &format!("{:#x}", port.lid()))?;
    put(root, &format!("{ports}/state"), "4: ACTIVE")?;
    put(root, &format!("{ports}/counters/port_xmit_wait"), "0")?;
    put(root, &format!("{ports}/counters/symbol_error"), "N/A (no PMA)")?;
    put(root, &format!("{ports}/hw_counters/out_of_sequence"), "7")?;
    put(root, &format!("{ports}/hw_counters/lifespan"), "10")?;
    for (index, (gid, kind)) in port.gids().into_iter().enumerate() {
        let parts: Vec<_> =
            gid.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
        put(root, &format!("{ports}/gids/{index}"), &parts.join(":"))?;
        let kind = if kind == 2 { "RoCE v2" } else { "IB/RoCE v1" };
        put(root, &format!("{ports}/gid_attrs/types/{index}"), kind)?;
    }
    Ok(())
}

fn put(root: &Path, file: &str, text: &str) -> io::Result<()> {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap_or(root))?;
    fs::write(path, format!("{text}\n"))
}
