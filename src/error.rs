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
    /// K or V held elements that are infinite or not a number, and the store refuses them.
    #[error("K and V hold {count} non-finite elements, which this store refuses")]
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
    /// A wait did not end in time.
    #[error("{backend}: no answer within {seconds} seconds")]
    Timeout {
        /// The backend's name.
        backend: &'static str,
        /// How long it was waited.
        seconds: u64,
    },
}

/// A result with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
