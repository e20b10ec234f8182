//! Linux swap to set ourselves against: a zram device or a file, with a header that names us.

use crate::sys::{self, PAGE_BYTES};
use crate::undo::{Step, Undo};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
const HEADER_AT: usize = 1024;
const LABEL_AT: usize = HEADER_AT + 28;
/// Marks swap areas as ours, so that none but ours is ever switched off.
const LABEL: &[u8; 16] = b"farfield-bench\0\0";

/// What stands between us and a baseline, and what would help.
#[derive(Debug)]
pub(crate) struct Unavailable {
    pub(crate) why: String,
    pub(crate) remedy: String,
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.why, self.remedy)
    }
}

impl std::error::Error for Unavailable {}

/// An `Unavailable` as an error.
pub(crate) fn unavailable(why: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    Unavailable { why: why.into(), remedy: remedy.into() }.into()
}

/// Names of active swap areas in the text of `/proc/swaps`.
fn areas(text: &str) -> Vec<&str> {
    text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect()
}

/// Refuses if somebody swaps already: the kernel would choose between their area and ours, and they would swap to ours.
pub(crate) fn ensure_none_active() -> Result<()> {
    let text = fs::read_to_string("/proc/swaps").context("cannot read /proc/swaps")?;
    match areas(&text)[..] {
        [] => Ok(()),
        ref active => Err(unavailable(
            format!("swap is already active on {}", active.join(", ")),
            "run swapoff on it for the time of the benchmark",
        )),
    }
}

/// The first page of a swap area of `bytes`.
fn header(bytes: u64) -> Result<[u8; PAGE_BYTES]> {
    let pages = bytes / PAGE_BYTES as u64;
    ensure!(pages > 10, "a swap area needs more than ten pages");
    let last_page = u32::try_from(pages - 1).context("swap area too large")?;
    let mut page = [0; PAGE_BYTES];
    page[HEADER_AT..HEADER_AT + 4].copy_from_slice(&1u32.to_ne_bytes());
    page[HEADER_AT + 4..HEADER_AT + 8].copy_from_slice(&last_page.to_ne_bytes());
    page[LABEL_AT..LABEL_AT + 16].copy_from_slice(LABEL);
    page[PAGE_BYTES - 10..].copy_from_slice(SIGNATURE);
    Ok(page)
}

fn is_ours(path: &Path) -> io::Result<bool> {
    let mut page = [0; PAGE_BYTES];
    match File::open(path)?.read_exact(&mut page) {
        Ok(()) => Ok(page[PAGE_BYTES - 10..] == SIGNATURE[..] && page[LABEL_AT..LABEL_AT + 16] == LABEL[..]),
        // Shorter than a page: a device without a size, a file never filled.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Stops swapping to `path` if we started it.
pub(crate) fn off_if_ours(path: &Path) -> io::Result<()> {
    if !is_ours(path)? {
        return Ok(());
    }
    let active = fs::read_to_string("/proc/swaps")?;
    if !areas(&active).iter().any(|area| Path::new(area) == path) {
        return Ok(());
    }
    sys::swap_off(path)
}

fn zram_folder(id: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{id}"))
}

/// Gives the memory of a zram device back. The kernel refuses while somebody has it open.
pub(crate) fn zram_reset(id: u32) -> io::Result<()> {
    fs::write(zram_folder(id).join("reset"), "1")
}

/// Takes a zram device away.
pub(crate) fn zram_remove(id: u32) -> io::Result<()> {
    if !zram_folder(id).exists() {
        return Ok(());
    }
    fs::write("/sys/class/zram-control/hot_remove", id.to_string())
}

/// A zram device of our own. It ends with the [`Undo`] that it was noted in.
pub(crate) struct ZramDevice(u32);

impl ZramDevice {
    /// Sets up a free device for so many bytes.
    pub(crate) fn new(bytes: u64, undo: &mut Undo<'_>) -> Result<ZramDevice> {
        let id = zram_acquire(undo)?;
        undo.note(Step::Zram(id))?;
        fs::write(zram_folder(id).join("disksize"), bytes.to_string())
            .with_context(|| format!("zram{id} refuses a size of {bytes} bytes"))?;
        Ok(ZramDevice(id))
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.0))
    }

    /// Bytes of memory that its store takes now.
    pub(crate) fn stored_bytes(&self) -> Option<u64> {
        self.memory(2)
    }

    /// Returns a field of the memory statistics.
    fn memory(&self, field: usize) -> Option<u64> {
        let text = fs::read_to_string(zram_folder(self.0).join("mm_stat")).ok()?;
        text.split_whitespace().nth(field)?.parse().ok()
    }
}

/// An active swap area. It ends with the [`Undo`] that it was noted in.
pub(crate) struct Area {
    /// `zram lzo-rle` or `file ext4`.
    pub(crate) kind: String,
    zram: Option<ZramDevice>,
}

impl Area {
    /// Swaps to a free zram device.
    pub(crate) fn zram(bytes: u64, undo: &mut Undo<'_>) -> Result<Area> {
        ensure_none_active()?;
        let device = ZramDevice::new(bytes, undo)?;
        let algorithms = fs::read_to_string(zram_folder(device.0).join("comp_algorithm")).unwrap_or_default();
        start(&device.path(), bytes, undo)?;
        Ok(Area { kind: format!("zram {}", chosen(&algorithms)), zram: Some(device) })
    }

    /// Swaps to a file at `path`, made without holes.
    pub(crate) fn file(path: &Path, bytes: u64, undo: &mut Undo<'_>) -> Result<Area> {
        ensure_none_active()?;
        undo.note(Step::File(path.to_path_buf()))?;
        let mut file = File::create(path).with_context(|| format!("cannot make the swap file {}", path.display()))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        let zeros = vec![0; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(zeros.len() as u64);
            file.write_all(&zeros[..now as usize]).context("no room for the swap file")?;
            left -= now;
        }
        file.sync_all()?;
        drop(file);
        start(path, bytes, undo)?;
        Ok(Area { kind: format!("file {}", file_system(path)), zram: None })
    }

    /// Most bytes of memory that the compressed store took, for zram.
    pub(crate) fn store_peak_bytes(&self) -> Option<u64> {
        self.zram.as_ref()?.memory(4)
    }
}

fn start(path: &Path, bytes: u64, undo: &mut Undo<'_>) -> Result<()> {
    let mut file =
        OpenOptions::new().write(true).open(path).with_context(|| format!("cannot open {}", path.display()))?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&header(bytes)?)?;
    file.sync_all()?;
    drop(file);
    undo.note(Step::Swap(path.to_path_buf()))?;
    sys::swap_on(path).map_err(|error| {
        let remedy = match error.raw_os_error() {
            Some(libc::EPERM) => "run as root, outside of a container without CAP_SYS_ADMIN",
            Some(libc::EINVAL) => "the file system must support swap files (ext4, xfs; not tmpfs, overlayfs)",
            _ => "see dmesg for the kernel's reason",
        };
        unavailable(format!("the kernel refuses to swap there: {error}"), remedy)
    })
}

/// A zram device that nobody uses, added if need be.
fn zram_acquire(undo: &mut Undo<'_>) -> Result<u32> {
    for entry in fs::read_dir("/sys/block").context("cannot read /sys/block")? {
        let name = entry?.file_name();
        let Some(id) = name.to_str().and_then(|n| n.strip_prefix("zram")).and_then(|n| n.parse().ok()) else {
            continue;
        };
        let size = fs::read_to_string(zram_folder(id).join("disksize")).unwrap_or_default();
        if size.trim() == "0" {
            return Ok(id);
        }
    }
    let id = fs::read_to_string("/sys/class/zram-control/hot_add").map_err(|error| {
        let remedy = "load the module: modprobe zram; as root, on a kernel with CONFIG_ZRAM";
        unavailable(format!("no free zram device and none can be added: {error}"), remedy)
    })?;
    let id = id.trim().parse().context("zram-control gives no number")?;
    undo.note(Step::ZramAdded(id))?;
    Ok(id)
}

/// The word in brackets.
fn chosen(text: &str) -> &str {
    text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("unknown", |(name, _)| name)
}

/// Type of the file system that `path` lies in.
fn file_system(path: &Path) -> String {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some((words.next()?, words.next()?))
        })
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map_or("unknown".into(), |(_, kind)| kind.to_string())
}

/// Counters of all swap traffic since the machine started, in pages.
#[derive(Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub(crate) pages_in: u64,
    pub(crate) pages_out: u64,
}

impl Traffic {
    pub(crate) fn now() -> Traffic {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Traffic { pages_in: field("pswpin"), pages_out: field("pswpout") }
    }

    pub(crate) fn since(self, before: Traffic) -> Traffic {
        Traffic {
            pages_in: self.pages_in.saturating_sub(before.pages_in),
            pages_out: self.pages_out.saturating_sub(before.pages_out),
        }
    }
}

/// Checks what every swap baseline needs before anything is set up.
pub(crate) fn ensure_allowed() -> Result<()> {
    if !sys::is_root() {
        bail!(unavailable("only root may swap", "run the benchmark as root"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_areas_are_listed_without_the_heading() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/zram0  partition\t1048572\t\t0\t\t-2\n";
        assert_eq!(areas(text), ["/dev/zram0"]);
        assert!(areas("Filename\tType\tSize\tUsed\tPriority\n").is_empty());
    }

    #[test]
    fn header_is_what_the_kernel_expects() {
        let page = header(1 << 20).unwrap();
        assert_eq!(&page[4086..], b"SWAPSPACE2");
        assert_eq!(page[1024..1028], 1u32.to_ne_bytes());
        assert_eq!(page[1028..1032], 255u32.to_ne_bytes());
        assert!(header(4096).is_err());
    }

    #[test]
    fn only_areas_with_our_label_are_ours() {
        let path = std::env::temp_dir().join(format!("farfield-bench-label-{}", std::process::id()));
        fs::write(&path, header(1 << 20).unwrap()).unwrap();
        assert!(is_ours(&path).unwrap());
        let mut other = header(1 << 20).unwrap();
        other[LABEL_AT] = b'x';
        fs::write(&path, other).unwrap();
        assert!(!is_ours(&path).unwrap());
        off_if_ours(&path).unwrap(); // Leaves it alone.
        fs::write(&path, "short").unwrap();
        assert!(!is_ours(&path).unwrap());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn chosen_algorithm_is_the_one_in_brackets() {
        assert_eq!(chosen("lzo-rle [lz4] zstd"), "lz4");
        assert_eq!(chosen(""), "unknown");
    }
}
