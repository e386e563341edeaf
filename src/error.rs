//! What can go wrong: the one error type of the library.

/// Everything that a call of this library can refuse or fail with.
///
/// A call that returns an error has changed nothing, unless its documentation says otherwise.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A field of [`Geometry`](crate::Geometry) has a value that no page can have.
    #[error("geometry: {field} is {value}, but {rule}")]
    Geometry {
        /// The field's name.
        field: &'static str,
        /// The value given.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A field of a configuration has a value that makes no sense.
    #[error("config: {field} is {value}, but {rule}")]
    Config {
        /// The field's name.
        field: &'static str,
        /// The value given.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// The adapter cannot do what was asked: one of its limits is too small.
    #[error("{adapter}: {limit} is {have}, but {need} is needed for {purpose}")]
    Limit {
        /// The adapter's name.
        adapter: String,
        /// The limit's name, as the adapter's API spells it.
        limit: &'static str,
        /// What is needed.
        need: u64,
        /// What the adapter has.
        have: u64,
        /// What it is needed for.
        purpose: &'static str,
    },
    /// The store may not grow to the pages that the call needs.
    #[error("layer {layer} needs the pool to hold {required} pages, but its limit is {maximum}")]
    PageLimit {
        /// The layer whose write did not fit (the first one, in a step over several layers).
        layer: usize,
        /// Pages that the pool would have to hold.
        required: u64,
        /// The page limit of the store.
        maximum: u64,
    },
    /// The sequence belongs to another store.
    #[error("sequence {id} does not belong to this store")]
    UnknownSequence {
        /// The sequence's number.
        id: u64,
    },
    /// One call names the same sequence twice.
    #[error("sequence {id} is named twice in one call")]
    DuplicateSequence {
        /// The sequence's number.
        id: u64,
    },
    /// The layer does not exist in this geometry.
    #[error("layer {layer} does not exist: the geometry has {layers} layers")]
    UnknownLayer {
        /// The layer asked for.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// A token offset lies past the end of a sequence.
    #[error("offset {offset} is past the end of layer {layer}, which holds {len} tokens")]
    OffsetPastEnd {
        /// The layer.
        layer: usize,
        /// The offset asked for.
        offset: u64,
        /// Tokens that the layer holds.
        len: u64,
    },
    /// A sequence of a step was appended to, truncated or otherwise changed after the step advanced.
    #[error("sequence {sequence} was changed in layer {layer} after the step advanced: advance it first")]
    Behind {
        /// The sequence's number.
        sequence: u64,
        /// The layer.
        layer: usize,
    },
    /// An argument's shape disagrees with the geometry or with another argument.
    #[error("{what} is {got}, but {expected} is expected")]
    Shape {
        /// Which argument or axis.
        what: &'static str,
        /// What was given.
        got: u64,
        /// What is expected.
        expected: u64,
    },
    /// A view reaches outside its buffer.
    #[error("{what} reaches byte {end}, but its buffer holds {bytes} bytes")]
    OutOfBounds {
        /// Which view.
        what: &'static str,
        /// The byte after the last one that the view touches.
        end: u64,
        /// The buffer's size in bytes.
        bytes: u64,
    },
    /// A byte offset or length is not aligned as the operation needs it.
    #[error("{what} is {value}, which is not a multiple of {multiple}")]
    Misaligned {
        /// Which argument.
        what: &'static str,
        /// The value given.
        value: u64,
        /// What it must be a multiple of.
        multiple: u64,
    },
    /// An argument is too large for the index arithmetic of the kernels.
    #[error("{what} is {value}, but at most {maximum} can be addressed")]
    TooLarge {
        /// Which argument.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The largest value that can be addressed.
        maximum: u64,
    },
    /// The softmax scale is NaN, infinite, zero or negative.
    #[error("the softmax scale is {scale}, but it must be finite and positive")]
    Scale {
        /// The scale given.
        scale: f32,
    },
    /// A buffer, stream or event of one device was given to another.
    #[error("{what} belongs to another device")]
    WrongDevice {
        /// Which argument.
        what: &'static str,
    },
    /// K or V held elements that are infinite or not a number, and the store (or who collects statistics) refuses them.
    #[error("{count} elements of K and V are not finite, which is refused")]
    NonFinite {
        /// How many.
        count: u64,
    },
    /// The backend has no implementation of this operation for this format.
    #[error("{backend} has no {operation} for {format}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// The operation.
        operation: &'static str,
        /// The format or variant.
        format: String,
    },
    /// The backend cannot be used on this machine or in this build.
    #[error("{backend} is not available: {reason}")]
    Unavailable {
        /// The backend's name.
        backend: &'static str,
        /// Why: no driver, no adapter, built without kernels.
        reason: String,
    },
    /// The device ran out of memory.
    #[error("{backend}: no memory for {bytes} bytes ({purpose})")]
    OutOfMemory {
        /// The backend's name.
        backend: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// What for.
        purpose: String,
    },
    /// The device, its driver or its runtime reported a failure.
    #[error("{backend}: {message}")]
    Device {
        /// The backend's name.
        backend: &'static str,
        /// What the runtime said.
        message: String,
    },
    /// A page could not be written to its tier or read back. The page's tokens are where they were; nothing was attended.
    #[error("page {page} of sequence {sequence}, layer {layer}: {fault}")]
    Page {
        /// The sequence's number.
        sequence: u64,
        /// The layer.
        layer: usize,
        /// The page: tokens `page × page_size` and on.
        page: u64,
        /// What went wrong.
        fault: PageFault,
    },
    /// The tier has no room for more pages.
    #[error("{tier} is full: {required} more pages are needed, {free} of {capacity} are free")]
    TierFull {
        /// The tier's name.
        tier: String,
        /// Pages that had to be written.
        required: u64,
        /// Free pages.
        free: u64,
        /// Pages that the tier may hold.
        capacity: u64,
    },
    /// Too few frames of the device budget can be freed for what a call needs on the device at once.
    #[error("{required} frames are needed at once, but only {evictable} of {frames} can be freed ({pinned} pinned)")]
    NothingEvictable {
        /// Frames needed.
        required: u64,
        /// Frames that are free or could be freed.
        evictable: u64,
        /// Frames of the device budget.
        frames: u64,
        /// Frames that are pinned.
        pinned: u64,
    },
    /// A store file belongs to another geometry, format, model or version.
    #[error("{path}: its {what} is {found}, but {expected} is expected")]
    WrongFile {
        /// The file.
        path: String,
        /// Which part of its header.
        what: &'static str,
        /// What the header says.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// A store file is open elsewhere.
    #[error("{path} is in use by another store")]
    Locked {
        /// The file.
        path: String,
    },
    /// The operating system refused something that concerns a file as a whole.
    #[error("{path}: {operation}: {message}")]
    File {
        /// The file.
        path: String,
        /// What was tried.
        operation: &'static str,
        /// What the system said.
        message: String,
    },
    /// A wait did not end in time.
    #[error("{backend}: no answer within {seconds} seconds")]
    Timeout {
        /// The backend's name.
        backend: &'static str,
        /// How long it was waited.
        seconds: u64,
    },
}

/// Why one page could not be written to a tier or read back.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageFault {
    /// The operating system refused the transfer.
    #[error("{operation} of slot {slot} failed: {message}")]
    Io {
        /// `read` or `write`.
        operation: &'static str,
        /// The slot of the tier.
        slot: u32,
        /// What the system said.
        message: String,
        /// Its error number, where there is one.
        code: Option<i32>,
    },
    /// The storage is full (`ENOSPC`, or a quota of the file system).
    #[error("no space for slot {slot}: {message}")]
    NoSpace {
        /// The slot of the tier.
        slot: u32,
        /// What the system said.
        message: String,
    },
    /// The file ended early.
    #[error("short read of slot {slot}: {got} of {expected} bytes")]
    Short {
        /// The slot of the tier.
        slot: u32,
        /// Bytes read.
        got: u64,
        /// Bytes of the record.
        expected: u64,
    },
    /// The bytes are not those that were written: damaged, torn, or of another generation.
    #[error(
        "slot {slot} is corrupt: checksum {found:#018x}, but {expected:#018x} was written (generation {generation})"
    )]
    Corrupt {
        /// The slot of the tier.
        slot: u32,
        /// The generation that was asked for.
        generation: u64,
        /// Checksum of what was read.
        found: u64,
        /// Checksum of what was written.
        expected: u64,
    },
    /// The slot holds another generation than the page's: it was written anew since.
    #[error("slot {slot} holds generation {found}, but {expected} is expected")]
    Generation {
        /// The slot of the tier.
        slot: u32,
        /// The generation found.
        found: u64,
        /// The generation asked for.
        expected: u64,
    },
    /// The tier is gone: its threads have ended or it was closed.
    #[error("slot {slot}: the tier is closed")]
    Closed {
        /// The slot of the tier.
        slot: u32,
    },
}

/// A result with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
