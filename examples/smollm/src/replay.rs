//! Does the cache give the right answers without the model? Recorded queries, keys and values through two attentions.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::bf16;
use safetensors::SafeTensors;

use crate::attention::{Attention, Heads};

/// A file that `--record` wrote.
pub(crate) struct Recording {
    pub(crate) heads: Heads,
    pub(crate) tokens: usize,
    /// For each layer: its number in the model, Q (zero where it was not recorded), K and V.
    layers: Vec<(usize, [Vec<f32>; 3])>,
    positions: Vec<usize>,
}

/// How far the outputs of one layer are apart, relative to their size.
pub(crate) struct LayerError {
    pub(crate) layer: usize,
    pub(crate) relative_l2: f64,
}

impl Recording {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("{}", path.display()))?;
        let positions = file.tensor("positions")?.data().chunks_exact(4);
        let positions = positions.map(|p| p.iter().rev().fold(0, |n, &byte| n << 8 | usize::from(byte)));
        let positions: Vec<usize> = positions.collect();
        ensure!(!positions.is_empty(), "the file holds no positions");
        let names = file.names().into_iter();
        let numbers: BTreeSet<usize> =
            names.filter_map(|name| name.strip_prefix("layer")?.split('.').next()?.parse().ok()).collect();
        let first = numbers.first().context("the file holds no layer")?;
        let (k, q) = (file.tensor(&format!("layer{first}.k"))?, file.tensor(&format!("layer{first}.q"))?);
        let (&[tokens, kv, dim], &[_, query, _]) = (k.shape(), q.shape()) else { bail!("the tensors have other axes") };
        ensure!(positions.iter().all(|&position| position < tokens), "a position is past the last token");
        let read = |name: String| -> Result<Vec<f32>> {
            let data = file.tensor(&name)?.data().chunks_exact(2);
            Ok(data.map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect())
        };
        let mut layers = Vec::new();
        for number in numbers {
            let [recorded, k, v] = ["q", "k", "v"].map(|name| read(format!("layer{number}.{name}")));
            let (recorded, width) = (recorded?, query * dim);
            ensure!(recorded.len() == positions.len() * width, "layer {number} has another number of queries");
            let mut q = vec![0.0; tokens * width];
            for (row, &position) in recorded.chunks_exact(width).zip(&positions) {
                q[position * width..][..width].copy_from_slice(row);
            }
            layers.push((number, [q, k?, v?]));
        }
        let heads = Heads { layers: layers.len(), query, kv, dim };
        Ok(Self { heads, tokens, layers, positions })
    }

    /// Runs every recorded layer through both attentions, in chunks, and compares the recorded rows.
    pub(crate) fn compare(
        &self,
        chunk: usize,
        attention: &mut dyn Attention,
        reference: &mut dyn Attention,
    ) -> Result<Vec<LayerError>> {
        let (width, kv_width) = (self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim);
        let mut errors = Vec::new();
        for (at, (layer, [q, k, v])) in self.layers.iter().enumerate() {
            let (mut got, mut expected) = (Vec::new(), Vec::new());
            for position in (0..self.tokens).step_by(chunk) {
                let rows = chunk.min(self.tokens - position);
                let q = &q[position * width..][..rows * width];
                let [k, v] = [k, v].map(|x| &x[position * kv_width..][..rows * kv_width]);
                got.extend(attention.attend(at, position, rows, q, k, v)?);
                expected.extend(reference.attend(at, position, rows, q, k, v)?);
            }
            let (mut difference, mut size) = (0.0, 0.0);
            for position in &self.positions {
                let rows = [&got, &expected].map(|x| &x[position * width..][..width]);
                for (got, expected) in rows[0].iter().zip(rows[1]) {
                    difference += f64::from(got - expected).powi(2);
                    size += f64::from(*expected).powi(2);
                }
            }
            errors.push(LayerError { layer: *layer, relative_l2: (difference / size).sqrt() });
        }
        Ok(errors)
    }
}
