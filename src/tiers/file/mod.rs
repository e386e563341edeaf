//! One preallocated file of page records: written and read in runs, checked on the way back, refused when it is not ours.
//!
//! A [`StoreFile`] knows slots, generations and bytes, nothing of sequences. Its I/O is asynchronous: a call hands over
//! runs of adjacent pages with their buffers and gets a [`Batch`]; buffers come back with one result a page. Every record
//! has a checksum over its bytes, its slot and its generation, kept in memory and written at close: what comes back is
//! what was written, or a [`PageFault`](crate::PageFault) says why not.
//!
//! ```
//! use kvtide::tiers::file::{AlignedBuffer, FileOptions, Identity, Run, StoreFile};
//! # let folder = std::env::temp_dir().join(format!("kvtide-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! # let path = folder.join("pages");
//! let identity = Identity { geometry: kvtide::Geometry::new(2, 8, 8, 64), fingerprint: 42 };
//! let file = StoreFile::create(&path, &FileOptions::default(), identity, 16)?;
//! let mut buffer = AlignedBuffer::new(2 * file.stride());
//! buffer.fill(1);
//! let done = file.write(vec![Run { first: 3, generations: vec![1, 1], buffer: buffer.into() }])?.wait();
//! assert_eq!(done[0].results, [Ok(()), Ok(())]);
//! file.close(b"where my pages are")?;
//!
//! let (file, blob) = StoreFile::open(&path, &FileOptions::default(), identity)?;
//! let buffer = AlignedBuffer::new(file.stride()).into();
//! let mut done = file.read(vec![Run { first: 4, generations: vec![1], buffer }])?.wait();
//! assert_eq!((&done[0].results[..], &blob[..]), (&[Ok(())][..], &b"where my pages are"[..]));
//! assert_eq!(done[0].buffer.bytes()[0], 1);
//! # drop(file);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<(), kvtide::Error>(())
//! ```

mod buffer;
mod directory;
mod disk;
mod engine;
#[cfg(any(test, feature = "conformance"))]
#[doc(hidden)]
pub mod faults;
mod format;
mod life;
mod options;
mod progress;
mod queue;
mod run;
mod stats;
#[cfg(test)]
mod tests;
mod threads;
mod transfer;
#[cfg(target_os = "linux")]
mod uring;

pub use crate::aligned::AlignedBuffer;
pub use buffer::RunBuffer;
pub use format::Identity;
pub use life::StoreFile;
pub use options::{DirectChoice, Engine, EngineChoice, FileOptions, Mode};
pub use run::{Batch, Run, RunDone};
pub use stats::FileStats;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What engines and callers share.
struct Shared {
    layout: format::Layout,
    directory: directory::Directory,
    counters: stats::Counters,
}

/// The lock, whatever became of its last holder: nothing here panics half way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
