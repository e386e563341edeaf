//! What attention is asked and answered: splits, states, and the order in which they fold.
//!
//! The context of a query row is cut at multiples of [`SPLIT`] tokens. Each split gives one *state* a query head:
//! `m`, the largest score × log2 e; `l`, the sum of 2^(score − m); `o`, the sum of 2^(score − m) × value. States fold
//! left to right, in token order. Both depend on the sequence alone, never on the batch, the pages' places or who
//! computed what: that is contract C1.
//!
//! Splitting the context is flash-decoding (Dao et al., 2023); the mergeable state is the online softmax of Milakov and
//! Gimelshein, 2018.

mod plan;
#[cfg(any(feature = "conformance", test))]
pub mod reference;

pub use plan::{Batch, Visible, plan};

/// Tokens a split. Every page size divides it.
pub const SPLIT: u32 = 256;

/// Words of a state for values of `v_dim` elements: `o`, `m`, `l` and two words of padding.
pub const fn state_words(v_dim: u32) -> u32 {
    v_dim + 4
}
