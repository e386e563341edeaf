//! What attention is asked and answered: splits, states, and the order in which they fold.
//!
//! The context of a query row is cut at multiples of [`SPLIT`] tokens. Each split gives one *state* a query head:
//! `m`, the largest score × log2 e; `l`, the sum of 2^(score − m); `o`, the sum of 2^(score − m) × value. The states of
//! the [`SECTION`] splits of a section fold left to right, in token order, and so do those of the sections. Splits and
//! sections depend on the sequence alone, never on the batch, the pages' places or who computed what: that is contract
//! C1. Whether `attend` gives the states of splits, of whole sections or of all that a row sees ([`Grain`]) changes no bit
//! of the answer.
//!
//! Splitting the context is flash-decoding (Dao et al., 2023); the mergeable state is the online softmax of Milakov and
//! Gimelshein, 2018.

mod plan;
#[cfg(any(feature = "conformance", test))]
pub mod reference;

pub use plan::{Batch, Visible, plan, plan_chunks, plan_for};

/// Tokens a split. Every page size divides it.
pub const SPLIT: u32 = 256;

/// Splits of a section.
pub const SECTION: u32 = 4;

/// What one state of a call covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grain {
    /// A split: as many work items as there can be, for calls that would not fill the device otherwise.
    Split,
    /// A section: a quarter of the states.
    Section,
    /// All that a row sees, for chunks of prompts: `attend` folds the sections too. Backends that can say so by
    /// [`Caps::prefill`](crate::backend::Caps::prefill).
    Whole,
}

impl Grain {
    /// Those of every backend.
    pub const ALL: [Grain; 2] = [Grain::Split, Grain::Section];

    /// Splits that a state covers.
    pub const fn splits(self) -> u32 {
        match self {
            Grain::Split => 1,
            Grain::Section => SECTION,
            Grain::Whole => 1 << 22,
        }
    }

    /// States of a section: those that [`merge`](crate::Backend::merge) folds first.
    pub const fn states_of_a_section(self) -> u32 {
        match self {
            Grain::Split => SECTION,
            Grain::Section | Grain::Whole => 1,
        }
    }

    /// Tokens that a state covers.
    pub const fn tokens(self) -> u32 {
        self.splits() * SPLIT
    }

    /// The states of a row that sees tokens `start..end`.
    pub const fn states(self, start: u32, end: u32) -> u32 {
        if end > start { end.div_ceil(self.tokens()) - start / self.tokens() } else { 0 }
    }
}

/// Words of a state for values of `v_dim` elements: `o`, `m`, `l` and two words of padding.
pub const fn state_words(v_dim: u32) -> u32 {
    v_dim + 4
}
