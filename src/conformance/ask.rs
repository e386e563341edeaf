//! What is attention asked, and what does it answer? Query rows, how they are asked, and the bits that come back.

use super::bench::{Bench, Layout, Output};
use super::check::Check;
use super::values::Tensor;
use crate::attention::Grain;
use crate::backend::Backend;
use crate::{Dtype, Geometry, Result};

/// What one query row sees of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct See {
    pub(super) sequence: usize,
    pub(super) start: u32,
    pub(super) end: u32,
}

/// A question: query rows and how they are asked.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) q: Tensor,
    pub(super) q_layout: Layout,
    pub(super) rows: Vec<See>,
    pub(super) scale: f32,
    pub(super) out: Dtype,
    pub(super) out_layout: Layout,
    /// States a batch may hold.
    pub(super) max_states: u32,
    /// What a state covers.
    pub(super) grain: Grain,
    /// Splits or sections a tile may hold, where fewer than all.
    pub(super) tile_splits: Option<u32>,
    /// Whether tiles have as many rows as the backend's work items for chunks of prompts, where it has such.
    pub(super) chunks: bool,
}

impl Ask {
    /// These rows, asked in one batch with an f32 answer.
    pub(super) fn new(geometry: &Geometry, q: Tensor, rows: Vec<See>) -> Self {
        let scale = 1.0 / (geometry.k_dim() as f32).sqrt();
        let (q_layout, out_layout) = (Layout::Dense, Layout::Dense);
        Ask {
            q,
            q_layout,
            rows,
            scale,
            out: Dtype::F32,
            out_layout,
            max_states: 1 << 20,
            grain: Grain::Split,
            tile_splits: None,
            chunks: false,
        }
    }

    /// Random queries for these rows.
    pub(super) fn random(geometry: &Geometry, q: Dtype, rows: Vec<See>, seed: u64) -> Self {
        let shape = [rows.len() as u32, geometry.q_heads(), geometry.k_dim()];
        Ask::new(geometry, Tensor::normal(q, shape, seed), rows)
    }

    /// One row for each sequence that sees all of it.
    pub(super) fn decode(lens: &[u32]) -> Vec<See> {
        lens.iter().enumerate().map(|(sequence, &end)| See { sequence, start: 0, end }).collect()
    }

    /// The question's rows at these places only.
    pub(super) fn pick(&self, rows: &[usize]) -> Self {
        let mut ask = self.clone();
        ask.rows = rows.iter().map(|&at| self.rows[at]).collect();
        let bits = rows.iter().flat_map(|&at| self.q.slice(at, 1).bits).collect();
        ask.q = Tensor { bits, shape: [rows.len(), self.q.shape[1], self.q.shape[2]], ..ask.q };
        ask
    }
}

/// The bits of outputs `[row, q_head, v_dim]` and log-sum-exps `[row, q_head]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) dtype: Dtype,
    pub(super) out: Vec<u32>,
    pub(super) lse: Vec<u32>,
    /// Whether memory between the outputs kept its bits.
    pub(super) tidy: bool,
}

impl Answer {
    pub(super) fn read<B: Backend>(bench: &mut Bench<'_, B>, out: &Output<B>, lse: &Output<B>) -> Result<Self> {
        let ((bits, out_tidy), (lse_bits, lse_tidy)) = (out.read(bench)?, lse.read(bench)?);
        Ok(Answer { dtype: out.view.dtype, out: bits, lse: lse_bits, tidy: out_tidy && lse_tidy })
    }

    /// Holds the answer against float64.
    pub(super) fn compare(&self, check: &mut Check, out: &[f64], lse: &[f64], v_dim: u32) {
        check.output(&self.out, self.dtype, out, v_dim as usize);
        check.lse(&self.lse, lse);
        check.holds("memory between the outputs is untouched", self.tidy);
    }

    /// The part of one row.
    pub(super) fn row(&self, row: usize, rows: usize) -> (&[u32], &[u32]) {
        let (out, lse) = (self.out.len() / rows, self.lse.len() / rows);
        (&self.out[row * out..(row + 1) * out], &self.lse[row * lse..(row + 1) * lse])
    }
}
