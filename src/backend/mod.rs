//! What a device must do for kvtide: memory, streams, events and six operations.
//!
//! A backend implements [`Backend`]; nothing above the trait knows which one it is. The rules that every backend keeps:
//!
//! - **Order.** Work on one stream happens in the order of the calls. [`record`](Backend::record) marks a point,
//!   [`wait`](Backend::wait) makes another stream wait for it. Nothing else orders two streams.
//! - **Return at once.** Every call enqueues, but for [`download`](Backend::download),
//!   [`synchronize`](Backend::synchronize), [`finish`](Backend::finish) and those that reach host memory without a stream.
//!   Slices passed in may be changed as soon as the call returns.
//! - **Lifetime.** A buffer handle dropped while queued work uses it stays alive until that work is done.
//! - **Alignment.** Byte offsets and sizes of memory operations are multiples of 4.
//! - **Numbers.** Page writes and moves are exact to the bit; `attend` and `merge` keep contracts C1 and C2 of
//!   `ARCHITECTURE.md`.

mod channels;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod host;
pub mod ops;
mod ops_predict;
mod ops_step;
pub mod params;
mod view;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use device::{Device, DeviceEvent, DeviceHost, DeviceMemory, DeviceStream};
pub(crate) use host::host_range;
pub use host::{HostMemory, HostUse, Swap};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use host::{by_host, sides};
use ops::{Append, Attend, Fold, Merge, Project, Score, StepMemory, Transfer};

use crate::record::Record;
use crate::{Dtype, Geometry, PageFormat, Result};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Names one opened device, so that a buffer given to another is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    /// A number that no other device of this process has.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A handle to device memory; clones name the same memory.
pub trait DeviceBuffer: Clone + fmt::Debug + Send + Sync + 'static {
    /// Its size.
    fn bytes(&self) -> u64;
    /// The device that it lives on.
    fn device(&self) -> DeviceId;
    /// Whether the two handles name the same memory; appends from the same memory share a launch.
    fn same_memory(&self, other: &Self) -> bool;
}

/// The operations of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Write tokens into pages.
    Append,
    /// Copy, gather and scatter records.
    Transfer,
    /// Attend query rows over pages.
    Attend,
    /// Fold states into outputs.
    Merge,
    /// Project stored keys on a basis.
    Project,
    /// Score pages for queries.
    Score,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 6] = [
        Operation::Append,
        Operation::Transfer,
        Operation::Attend,
        Operation::Merge,
        Operation::Project,
        Operation::Score,
    ];

    /// The formats that a backend may have the operation in: `merge` and `score` work on tensors, whose types are native.
    pub const fn formats(self) -> &'static [PageFormat] {
        match self {
            Operation::Merge | Operation::Score => &PageFormat::NATIVE,
            _ => &PageFormat::ALL,
        }
    }

    /// Lower-case name, the same in Rust, WGSL and CUDA.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::Append => "append",
            Operation::Transfer => "transfer",
            Operation::Attend => "attend",
            Operation::Merge => "merge",
            Operation::Project => "project",
            Operation::Score => "score",
        }
    }
}

/// What an opened device is and can do.
#[derive(Debug, Clone)]
pub struct Caps {
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// The adapter's name as its driver gives it.
    pub adapter: String,
    /// The device's identity.
    pub device: DeviceId,
    /// Slabs that one arena may have.
    pub max_slabs: u32,
    /// Bytes of the largest slab (and of the largest buffer that an operation binds).
    pub max_slab_bytes: u64,
    /// What limits the bytes of one layer's key calibration ([`Channels`](ops::Channels)): name and value.
    pub max_channels: (&'static str, u64),
    /// Bytes of the device's memory, where the API tells.
    pub memory_bytes: Option<u64>,
    /// Query vectors (row × head) that one work item of `attend` takes.
    pub query_tile: u32,
    /// Sections × KV heads × query tiles from which on `attend` keeps the device busy with a work item for each: see
    /// [`Grain`](crate::attention::Grain).
    pub at_once: u64,
    /// Query vectors of a work item that shares what it reads of the pages between all of them, for pages and queries like
    /// these; `None` where the backend has nothing faster for chunks of a prompt than for single rows. Only such items may
    /// give the states of whole rows.
    pub prefill: fn(&Record, Dtype) -> Option<u32>,
    /// Whether page moves on one stream run beside kernels on another.
    pub overlap: bool,
    /// Formats that each operation handles.
    pub formats: fn(Operation) -> &'static [PageFormat],
    /// Limits worth showing, by the name that the adapter's API gives them.
    pub limits: Vec<(&'static str, u64)>,
}

impl Caps {
    /// Query rows that one work item of `attend` takes.
    pub fn rows_per_tile(&self, geometry: &Geometry) -> u32 {
        (self.query_tile / geometry.group()).max(1)
    }

    /// Whether the device has this operation for pages of this format.
    pub fn supports(&self, operation: Operation, format: PageFormat) -> bool {
        (self.formats)(operation).contains(&format)
    }
}

/// A device that keeps pages and computes on them. See the [module's rules](self).
pub trait Backend: Clone + fmt::Debug + Send + Sync + 'static {
    /// Device memory.
    type Buffer: DeviceBuffer;
    /// A queue of work.
    type Stream: fmt::Debug + Send;
    /// A point in a stream.
    type Event: Clone + fmt::Debug + Send + Sync;
    /// Host memory that pages swap to.
    type Host: HostMemory;

    /// What this device is.
    fn caps(&self) -> &Caps;

    /// Allocates device memory with unspecified contents.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), or [`Error::Limit`](crate::Error::Limit) past the largest
    /// buffer of the adapter.
    fn alloc(&self, label: &str, bytes: u64) -> Result<Self::Buffer>;

    /// A new stream.
    fn stream(&self) -> Result<Self::Stream>;

    /// Copies host bytes into `dst` at `offset`.
    fn upload(&self, stream: &mut Self::Stream, dst: &Self::Buffer, offset: u64, data: &[u8]) -> Result<()>;

    /// Copies device bytes into host memory and waits for them.
    fn download(&self, stream: &mut Self::Stream, src: &Self::Buffer, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Copies `bytes` from `src` to `dst` (each a buffer and a byte offset). The two are different buffers.
    fn copy(
        &self,
        stream: &mut Self::Stream,
        src: (&Self::Buffer, u64),
        dst: (&Self::Buffer, u64),
        bytes: u64,
    ) -> Result<()>;

    /// Sets every 32-bit word of a byte range to `word`.
    fn fill(&self, stream: &mut Self::Stream, dst: &Self::Buffer, offset: u64, bytes: u64, word: u32) -> Result<()>;

    /// Adds the sum, modulo 2³², of the first `bytes` bytes of `src` (a multiple of 16) as 32-bit words to the first word of
    /// `total`, another buffer. A kernel that reads and does nothing else: what others cost is compared with it.
    fn sum(&self, stream: &mut Self::Stream, src: &Self::Buffer, bytes: u64, total: &Self::Buffer) -> Result<()>;

    /// Marks the work enqueued so far.
    fn record(&self, stream: &mut Self::Stream) -> Result<Self::Event>;

    /// Makes later work of `stream` wait for `event`.
    fn wait(&self, stream: &mut Self::Stream, event: &Self::Event) -> Result<()>;

    /// Whether the work before `event` has finished.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until the work before `event` has finished, and reports what failed. An event whose work was not yet handed to
    /// the device does not exist: [`record`](Self::record) hands it over.
    fn finish(&self, event: &Self::Event) -> Result<()>;

    /// Begins to compile what decode over pages of this layout in so many slabs needs, where compiling takes long; returns at
    /// once.
    fn prepare(&self, record: &Record, slabs: usize) {
        let _ = (record, slabs);
    }

    /// Asks that later events of this stream tell [`elapsed`](Self::elapsed), where the device could and does not unasked.
    fn time(&self, stream: &mut Self::Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Device time from one finished event to another; `None` where the device does not tell.
    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<Option<Duration>>;

    /// Allocates host memory with unspecified contents.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) that says host memory and the size.
    fn alloc_host(&self, label: &str, bytes: u64, usage: HostUse) -> Result<Self::Host>;

    /// Copies host memory of the kind [`HostUse::Shared`] into `out`. Device work that writes the range must have
    /// [finished](Self::finish).
    fn read_host(&self, host: &Self::Host, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Copies `data` into host memory of the kind [`HostUse::Shared`]. Device work that reads or writes the range must have
    /// [finished](Self::finish).
    fn write_host(&self, host: &Self::Host, offset: u64, data: &[u8]) -> Result<()>;

    /// Copies records from frames to host memory.
    fn swap_out(&self, stream: &mut Self::Stream, args: &Swap<'_, Self::Buffer, Self::Host>) -> Result<()>;

    /// Copies records from host memory to frames.
    fn swap_in(&self, stream: &mut Self::Stream, args: &Swap<'_, Self::Buffer, Self::Host>) -> Result<()>;

    /// Hands everything enqueued to the device without waiting, so that work of others that is submitted later (to the
    /// same queue or stream) sees it.
    fn flush(&self, stream: &mut Self::Stream) -> Result<()>;

    /// Waits until everything enqueued has finished, and reports what failed.
    fn synchronize(&self, stream: &mut Self::Stream) -> Result<()>;

    /// Writes tokens into pages.
    fn append(&self, stream: &mut Self::Stream, args: &Append<'_, Self::Buffer>) -> Result<()>;

    /// Copies, gathers or scatters whole records.
    fn transfer(&self, stream: &mut Self::Stream, args: &Transfer<'_, Self::Buffer>) -> Result<()>;

    /// Attends query rows over pages into states.
    fn attend(&self, stream: &mut Self::Stream, args: &Attend<'_, Self::Buffer>) -> Result<()>;

    /// Folds states into outputs.
    fn merge(&self, stream: &mut Self::Stream, args: &Merge<'_, Self::Buffer>) -> Result<()>;

    /// [`append`](Self::append) of a decode step's tokens, in a launch that may be captured and replayed: a backend with such
    /// launches reads where each token goes from `at` instead of `args.runs`, which say the same at the time of the call.
    fn append_step(
        &self,
        stream: &mut Self::Stream,
        args: &Append<'_, Self::Buffer>,
        at: &StepMemory<'_, Self::Buffer>,
    ) -> Result<()> {
        let _ = at;
        self.append(stream, args)
    }

    /// [`attend`](Self::attend) of a decode step, in a launch that may be captured and replayed: tiles and rows are read from
    /// `at`.
    fn attend_step(
        &self,
        stream: &mut Self::Stream,
        args: &Attend<'_, Self::Buffer>,
        at: &StepMemory<'_, Self::Buffer>,
    ) -> Result<()> {
        let _ = at;
        self.attend(stream, args)
    }

    /// [`merge`](Self::merge) of a decode step, in a launch that may be captured and replayed: rows are read from `at`.
    fn merge_step(
        &self,
        stream: &mut Self::Stream,
        args: &Merge<'_, Self::Buffer>,
        at: &StepMemory<'_, Self::Buffer>,
    ) -> Result<()> {
        let _ = at;
        self.merge(stream, args)
    }

    /// Folds states into states.
    fn fold(&self, stream: &mut Self::Stream, args: &Fold<'_, Self::Buffer>) -> Result<()>;

    /// Projects stored keys on a basis.
    fn project(&self, stream: &mut Self::Stream, args: &Project<'_, Self::Buffer>) -> Result<()>;

    /// Scores pages for queries.
    fn score(&self, stream: &mut Self::Stream, args: &Score<'_, Self::Buffer>) -> Result<()>;
}
