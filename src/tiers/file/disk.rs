//! The file under the engines: positioned I/O through the page cache or past it, and the seam where tests put faults.

use super::format::Layout;
use super::lock;
use crate::record::FILE_ALIGN;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One I/O of a run.
#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) write: bool,
    /// Where in the file.
    pub(super) offset: u64,
    /// Which bytes of the run's buffer.
    pub(super) range: Range<usize>,
}

/// What becomes of an I/O before it reaches the system.
#[derive(Debug)]
#[cfg_attr(not(any(test, feature = "conformance")), allow(dead_code, reason = "only faults give answers of their own"))]
pub(super) enum Verdict {
    /// The first `len` bytes are moved; the engine is told `report` instead of what came out, if that is given.
    Pass { len: usize, report: Option<usize> },
    /// Nothing is moved; the engine is told this.
    #[cfg_attr(not(any(test, feature = "conformance")), expect(dead_code, reason = "what injected faults answer"))]
    Answer(io::Result<usize>),
}

/// Sees every I/O of either engine before and after the system does.
pub(super) trait Hook: Send + Sync {
    /// Called once with the layout of the file.
    fn attach(&self, layout: Layout);
    /// Before the I/O.
    fn before(&self, op: &Op) -> Verdict;
    /// After a read of `bytes`.
    fn after_read(&self, op: &Op, bytes: &mut [u8]);
}

/// The open file.
pub(super) struct Disk {
    pub(super) plain: File,
    /// A second handle for I/O past the page cache.
    pub(super) direct: Option<File>,
    pub(super) hook: Option<Arc<dyn Hook>>,
    pub(super) meter: Meter,
}

impl Disk {
    /// The handle for an I/O of `len` bytes from `address` in memory: past the page cache where alignment allows it.
    pub(super) fn handle(&self, offset: u64, address: *const u8, len: usize) -> &File {
        let aligned = (offset | address as u64 | len as u64).is_multiple_of(FILE_ALIGN);
        self.direct.as_ref().filter(|_| aligned).unwrap_or(&self.plain)
    }

    /// What the hook says about an I/O.
    pub(super) fn verdict(&self, op: &Op) -> Verdict {
        let pass = Verdict::Pass { len: op.range.len(), report: None };
        self.hook.as_ref().map_or(pass, |hook| hook.before(op))
    }

    /// Lets the hook see what was read.
    pub(super) fn after(&self, op: &Op, buffer: &mut [u8], moved: usize) {
        if let Some(hook) = self.hook.as_ref().filter(|_| !op.write) {
            hook.after_read(op, &mut buffer[op.range.start..op.range.start + moved]);
        }
    }

    /// One I/O, to its end.
    pub(super) fn perform(&self, op: &Op, buffer: &mut [u8]) -> io::Result<usize> {
        let (len, report) = match self.verdict(op) {
            Verdict::Answer(answer) => return answer,
            Verdict::Pass { len, report } => (len, report),
        };
        let bytes = &mut buffer[op.range.start..op.range.start + len];
        let file = self.handle(op.offset, bytes.as_ptr(), len);
        self.meter.begin();
        let moved = if op.write { write_at(file, bytes, op.offset) } else { read_at(file, bytes, op.offset) };
        self.meter.end();
        let moved = moved?;
        self.after(op, buffer, moved);
        Ok(report.unwrap_or(moved))
    }
}

/// Reads at an offset: fewer bytes than asked for at the end of the file, or when the system likes it so.
pub(super) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, bytes, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, bytes, offset);
}

/// Writes at an offset.
pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::write_at(file, bytes, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_write(file, bytes, offset);
}

/// Opens the same file again, past the page cache; `Err` says why that cannot be.
#[cfg(target_os = "linux")]
pub(super) fn open_direct(plain: &File, path: &Path) -> Result<File, String> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).write(true).custom_flags(flag).open(path).map_err(|e| e.to_string())?;
    let inode = |file: &File| file.metadata().map(|m| (m.dev(), m.ino())).map_err(|e| e.to_string());
    if inode(plain)? == inode(&file)? { Ok(file) } else { Err("another file has taken its name".to_owned()) }
}

/// Opens the same file again, past the page cache; `Err` says why that cannot be.
#[cfg(not(target_os = "linux"))]
pub(super) fn open_direct(_: &File, _: &Path) -> Result<File, String> {
    Err("only on Linux".to_owned())
}

/// For how long at least one I/O has been in flight.
#[derive(Debug, Default)]
pub(super) struct Meter {
    state: Mutex<(u32, Option<Instant>, Duration)>,
}

impl Meter {
    /// An I/O goes out.
    pub(super) fn begin(&self) {
        let mut state = lock(&self.state);
        state.0 += 1;
        state.1.get_or_insert_with(Instant::now);
    }

    /// An I/O is back.
    pub(super) fn end(&self) {
        let mut state = lock(&self.state);
        state.0 -= 1;
        if state.0 == 0
            && let Some(since) = state.1.take()
        {
            state.2 += since.elapsed();
        }
    }

    /// The time up to now.
    pub(super) fn busy(&self) -> Duration {
        let state = lock(&self.state);
        state.2 + state.1.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
