//! How does SmolLM2 turn tokens into logits? A Llama decoder whose attention is the caller's.

use std::io::{Read, Seek};

use anyhow::{Context, Error, Result, ensure};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};

use crate::attention::{Attention, Heads};

/// The weights, dequantised to `f32` when loaded.
///
/// Products with the file's Q4_1 weights as they are were no faster for one token and ten times
/// slower for a prompt.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) licence: String,
    pub(crate) heads: Heads,
    pub(crate) rope_base: f32,
    pub(crate) context_length: usize,
    epsilon: f64,
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: Tensor,
    head: Tensor,
}

struct Block {
    attention_norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    mlp_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Model {
    /// Reads the weights that `content` lists from `file`.
    pub(crate) fn load(content: &Content, file: &mut (impl Read + Seek)) -> Result<Self> {
        let architecture = metadata(content, "general.architecture")?.to_string()?;
        ensure!(architecture == "llama", "this example runs the llama architecture, the file holds {architecture}");
        let number =
            |key: &str| -> Result<usize> { Ok(metadata(content, &format!("llama.{key}"))?.to_u32()? as usize) };
        let real = |key: &str| -> Result<f32> { Ok(metadata(content, &format!("llama.{key}"))?.to_f32()?) };

        let (query, kv) = (number("attention.head_count")?, number("attention.head_count_kv")?);
        ensure!(query > 0 && kv > 0 && query % kv == 0, "{query} query heads cannot share {kv} key and value heads");
        let dim = number("embedding_length")? / query;
        let heads = Heads { layers: number("block_count")?, query, kv, dim };
        ensure!(number("rope.dimension_count")? == dim, "only RoPE over the whole head is supported");

        let device = Device::Cpu;
        let mut tensor = |name: &str| -> Result<Tensor> {
            let quantised = content.tensor(file, &format!("{name}.weight"), &device)?;
            Ok(quantised.dequantize(&device)?)
        };
        let embedding = tensor("token_embd")?;
        let head =
            if content.tensor_infos.contains_key("output.weight") { tensor("output")? } else { embedding.clone() };
        let blocks = (0..heads.layers)
            .map(|layer| {
                let mut tensor = |name: &str| tensor(&format!("blk.{layer}.{name}"));
                Ok(Block {
                    attention_norm: tensor("attn_norm")?,
                    query: tensor("attn_q")?,
                    key: tensor("attn_k")?,
                    value: tensor("attn_v")?,
                    output: tensor("attn_output")?,
                    mlp_norm: tensor("ffn_norm")?,
                    gate: tensor("ffn_gate")?,
                    up: tensor("ffn_up")?,
                    down: tensor("ffn_down")?,
                })
            })
            .collect::<Result<_>>()?;
        let text = |key: &str| Ok::<_, Error>(metadata(content, key)?.to_string()?.clone());
        Ok(Self {
            name: text("general.name")?,
            licence: text("general.license")?,
            heads,
            rope_base: real("rope.freq_base")?,
            context_length: number("context_length")?,
            epsilon: real("attention.layer_norm_rms_epsilon")?.into(),
            embedding,
            blocks,
            norm: tensor("output_norm")?,
            head,
        })
    }

    /// Runs `tokens`, the first of which stands at `position`; returns the logits after the last.
    pub(crate) fn forward(&self, tokens: &[u32], position: usize, attention: &mut dyn Attention) -> Result<Vec<f32>> {
        ensure!(!tokens.is_empty(), "no tokens to run");
        let hidden = self.hidden(tokens, position, attention)?;
        let last = hidden.narrow(0, tokens.len() - 1, 1)?;
        Ok(self.logits(&last)?.flatten_all()?.to_vec1()?)
    }

    /// Runs `tokens` through every block: `[tokens, width]`, not yet normalised.
    pub(crate) fn hidden(&self, tokens: &[u32], position: usize, attention: &mut dyn Attention) -> Result<Tensor> {
        let rows = tokens.len();
        let rotation = Rotation::new(position, rows, self.heads.dim, self.rope_base);
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let normed = self.rms_norm(&x, &block.attention_norm)?;
            let mut q = flat(&linear(&normed, &block.query)?)?;
            let mut k = flat(&linear(&normed, &block.key)?)?;
            let v = flat(&linear(&normed, &block.value)?)?;
            rotation.apply(&mut q);
            rotation.apply(&mut k);
            let attended = attention.attend(layer, position, rows, &q, &k, &v)?;
            let attended = Tensor::from_vec(attended, (rows, self.heads.query * self.heads.dim), x.device())?;
            x = (x + linear(&attended, &block.output)?)?;

            let normed = self.rms_norm(&x, &block.mlp_norm)?;
            let gate = linear(&normed, &block.gate)?.silu()?;
            let gated = (gate * linear(&normed, &block.up)?)?;
            x = (x + linear(&gated, &block.down)?)?;
        }
        Ok(x)
    }

    /// `[rows, width]` to `[rows, vocabulary]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(&self.rms_norm(hidden, &self.norm)?, &self.head)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(1)?;
        let normed = x.broadcast_div(&(mean + self.epsilon)?.sqrt()?)?;
        Ok(normed.broadcast_mul(weight)?)
    }
}

/// The angles of RoPE for a run of rows, shared by all layers.
struct Rotation {
    half: usize,
    /// `(cos, sin)` as `[rows, dim / 2]`.
    angles: Vec<(f32, f32)>,
}

impl Rotation {
    fn new(position: usize, rows: usize, dim: usize, base: f32) -> Self {
        let frequency = |pair| f64::from(base).powf(-2.0 * pair as f64 / dim as f64);
        let frequencies: Vec<f64> = (0..dim / 2).map(frequency).collect();
        let angles = (position..position + rows)
            .flat_map(|position| frequencies.iter().map(move |f| position as f64 * f))
            .map(|angle| (angle.cos() as f32, angle.sin() as f32))
            .collect();
        Self { half: dim / 2, angles }
    }

    /// Turns `x`, `[rows, heads, dim]`. GGUF's llama files keep the two halves of a pair side by side.
    fn apply(&self, x: &mut [f32]) {
        let rows = self.angles.len() / self.half;
        let width = x.len() / rows;
        for (row, angles) in x.chunks_exact_mut(width).zip(self.angles.chunks_exact(self.half)) {
            for head in row.chunks_exact_mut(2 * self.half) {
                for (pair, &(cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            }
        }
    }
}

/// `x` times the transpose of `weight`, which is `[outputs, inputs]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.matmul(&weight.t()?)?)
}

fn flat(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.flatten_all()?.to_vec1()?)
}

/// The value of `key`, or an error that names it.
pub(crate) fn metadata<'a>(content: &'a Content, key: &str) -> Result<&'a Value> {
    let value = content.metadata.get(key);
    value.with_context(|| format!("the GGUF file has no `{key}`"))
}
