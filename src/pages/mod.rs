//! The life of a page: frames and their counts, growth, page tables, and what a write needs before it happens.
//!
//! Everything here is bookkeeping on the host; no pointer and no device is seen.

pub(crate) mod frames;
pub(crate) mod growth;
pub(crate) mod layer;
pub(crate) mod tables;
