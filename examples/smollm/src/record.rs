//! Where do real keys, values and queries for tests come from? From a prompt, in a safetensors file.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Result, ensure};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};

use crate::attention::{Attention, Footprint};
use crate::generate::prefill;
use crate::model::Model;

/// How many of the recorded tokens have their queries kept.
const POSITIONS: usize = 32;

/// Runs `prompt` and writes what reaches the attention of `layers` to `file`:
///
/// - `positions`: `u32`, spread evenly over the prompt from its first token to its last;
/// - `layer{L}.q`: `bf16`, `[positions, query heads, dim]`;
/// - `layer{L}.k` and `layer{L}.v`: `bf16`, `[tokens, kv heads, dim]`.
pub(crate) fn record(
    model: &Model,
    prompt: &[u32],
    layers: &[usize],
    chunk: usize,
    attention: Box<dyn Attention>,
    file: &Path,
) -> Result<()> {
    let (heads, tokens) = (model.heads, prompt.len());
    ensure!(tokens >= POSITIONS, "{tokens} tokens are too few to record");
    for &layer in layers {
        ensure!(layer < heads.layers, "the model has no layer {layer}");
    }
    let mut recorder =
        Recorder { inner: attention, layers: layers.iter().map(|&layer| (layer, Rows::default())).collect() };
    prefill(model, prompt, chunk, &mut recorder)?;

    let positions: Vec<usize> = (0..POSITIONS).map(|i| i * (tokens - 1) / (POSITIONS - 1)).collect();
    let bytes = positions.iter().flat_map(|&p| (p as u32).to_le_bytes()).collect();
    let mut arrays = vec![("positions".to_string(), Dtype::U32, vec![POSITIONS], bytes)];
    for (layer, rows) in &recorder.layers {
        let width = heads.query * heads.dim;
        let queries = positions.iter().flat_map(|p| &rows.q[p * width..][..width]);
        let mut add = |name: &str, rows: usize, heads_here: usize, bytes: Vec<u8>| {
            let shape = vec![rows, heads_here, heads.dim];
            arrays.push((format!("layer{layer}.{name}"), Dtype::BF16, shape, bytes));
        };
        add("q", POSITIONS, heads.query, bf16_bytes(queries));
        add("k", tokens, heads.kv, bf16_bytes(&rows.k));
        add("v", tokens, heads.kv, bf16_bytes(&rows.v));
    }

    let views =
        arrays.iter().map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)));
    let metadata = HashMap::from([
        ("model".to_string(), model.name.clone()),
        ("model_licence".to_string(), model.licence.clone()),
        ("rope_base".to_string(), model.rope_base.to_string()),
        ("rope_pairs".to_string(), "neighbours (2i, 2i + 1)".to_string()),
    ]);
    let views = views.collect::<Result<Vec<_>>>()?;
    Ok(safetensors::serialize_to_file(views, Some(metadata), file)?)
}

fn bf16_bytes<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> Vec<u8> {
    let numbers = numbers.into_iter();
    numbers.flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

/// What one layer was given so far.
#[derive(Default)]
struct Rows {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Passes everything on and keeps the rows of some layers.
struct Recorder {
    inner: Box<dyn Attention>,
    layers: BTreeMap<usize, Rows>,
}

impl Attention for Recorder {
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>> {
        if let Some(kept) = self.layers.get_mut(&layer) {
            kept.q.extend(q);
            kept.k.extend(k);
            kept.v.extend(v);
        }
        self.inner.attend(layer, position, rows, q, k, v)
    }

    fn footprint(&mut self) -> Result<Footprint> {
        self.inner.footprint()
    }
}
