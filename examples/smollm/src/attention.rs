//! What does the model ask of its attention? The trait, and a wrapper that times it.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::counters::Counters;

/// How a model's attention heads are laid out, the same in every layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) layers: usize,
    pub(crate) query: usize,
    pub(crate) kv: usize,
    pub(crate) dim: usize,
}

/// Where the keys and values of a run ended up, for the final table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Footprint {
    pub(crate) backend: String,
    pub(crate) adapter: String,
    /// `None` where the cache is not paged.
    pub(crate) pages: Option<usize>,
    pub(crate) kv_bytes: usize,
    /// `None` where all pages stay on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) swap: Option<Counters>,
}

/// A KV cache together with causal attention over it.
///
/// Arrays are `f32`, row-major, after RoPE: `q` is `[rows, query heads, dim]`, `k` and `v` are
/// `[rows, kv heads, dim]`.
pub(crate) trait Attention {
    /// Appends `rows` tokens, the first of them at `position`, to `layer`, then lets each of their
    /// queries see everything in that layer up to and including its own token.
    ///
    /// Returns `[rows, query heads * dim]`.
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>>;

    /// What the cache occupies now.
    fn footprint(&mut self) -> Result<Footprint>;
}

/// Passes everything on and adds up the time spent in [`Attention::attend`].
pub(crate) struct Timed {
    inner: Box<dyn Attention>,
    pub(crate) spent: Duration,
}

impl Timed {
    pub(crate) fn new(inner: Box<dyn Attention>) -> Self {
        Self { inner, spent: Duration::ZERO }
    }
}

impl Attention for Timed {
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>> {
        let start = Instant::now();
        let output = self.inner.attend(layer, position, rows, q, k, v);
        self.spent += start.elapsed();
        output
    }

    fn footprint(&mut self) -> Result<Footprint> {
        self.inner.footprint()
    }
}
