//! Queries, keys and values of a real model: SmolLM2-135M over English prose, or another file's (`KVTIDE_DUMP`).
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses a part")]

use anyhow::{Context, Result, bail};
use half::bf16;
use kvtide::Geometry;
use safetensors::SafeTensors;

const FIXTURE: &[u8] = include_bytes!("../data/smollm2-fixture.safetensors");
/// The model's rotary base; a pair is two elements side by side.
const ROPE_BASE: f64 = 1e5;

/// One layer. K and V are `[token, kv_head, dim]`, Q `[row, q_head, dim]`; all are bf16 numbers.
#[derive(Clone)]
pub struct Layer {
    pub number: u32,
    /// One layer of these heads.
    pub geometry: Geometry,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q: Vec<f32>,
    /// Tokens that each row sees.
    pub sees: Vec<usize>,
}

pub fn layers() -> Result<Vec<Layer>> {
    let Some(path) = std::env::var_os("KVTIDE_DUMP") else { return read(FIXTURE) };
    read(&std::fs::read(&path).with_context(|| format!("KVTIDE_DUMP {}", path.display()))?)
}

fn read(bytes: &[u8]) -> Result<Vec<Layer>> {
    let file = SafeTensors::deserialize(bytes)?;
    let positions = file.tensor("positions")?;
    let sees = positions.data().as_chunks::<4>().0.iter().map(|&four| u32::from_le_bytes(four) as usize + 1);
    let sees: Vec<usize> = sees.collect();
    let mut names: Vec<&str> = file.names().into_iter().filter_map(|name| name.strip_suffix(".k")).collect();
    names.sort_unstable();
    let layer = |name: &str| {
        let tensor = |part| -> Result<Vec<f32>> {
            let tensor = file.tensor(&format!("{name}.{part}"))?;
            Ok(tensor.data().as_chunks::<2>().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32()).collect())
        };
        let (k, q) = (file.tensor(&format!("{name}.k"))?, file.tensor(&format!("{name}.q"))?);
        let (&[_, kv, dim], &[_, heads, _]) = (k.shape(), q.shape()) else { bail!("{name}: other axes") };
        let geometry = Geometry::new(1, heads as u32, kv as u32, dim as u32);
        let number = name.trim_start_matches("layer").parse()?;
        Ok(Layer { number, geometry, k: tensor("k")?, v: tensor("v")?, q: tensor("q")?, sees: sees.clone() })
    };
    names.into_iter().map(layer).collect()
}

impl Layer {
    pub fn tokens(&self) -> usize {
        self.k.len() / self.row()
    }

    fn row(&self) -> usize {
        (self.geometry.kv_heads() * self.geometry.k_dim()) as usize
    }

    /// The same with large constants in the six slowest rotary pairs of a head's keys, as a model with key biases has them.
    /// RoPE turns a sum like its parts, so that turned constants are added to turned keys.
    #[must_use]
    pub fn biased(&self, head: usize) -> Layer {
        let (dim, mut layer, row) = (self.geometry.k_dim() as usize, self.clone(), self.row());
        for (token, keys) in layer.k.chunks_exact_mut(row).enumerate() {
            for (at, constant) in [145.0, -135.0, 129.0, 122.0, -118.0, 92.0f64].into_iter().enumerate() {
                let pair = dim / 2 - 6 + at;
                let (sin, cos) = (token as f64 * ROPE_BASE.powf(-2.0 * pair as f64 / dim as f64)).sin_cos();
                let pair = &mut keys[head * dim + 2 * pair..][..2];
                for (x, part) in pair.iter_mut().zip([cos, sin]) {
                    *x = bf16::from_f64(f64::from(*x) + constant * part).to_f32();
                }
            }
        }
        layer
    }

    /// Every other token, from the first or the second on, and the rows that see one of them.
    #[must_use]
    pub fn half(&self, first: usize) -> Layer {
        let (row, q_row) = (self.row(), (self.geometry.q_heads() * self.geometry.k_dim()) as usize);
        let half = |x: &[f32]| x.chunks_exact(row).skip(first).step_by(2).flatten().copied().collect();
        let rows = self.q.chunks_exact(q_row).zip(&self.sees).map(|(q, sees)| (q, (sees + 1 - first) / 2));
        let (q, sees): (Vec<&[f32]>, _) = rows.filter(|(_, sees)| *sees > 0).unzip();
        Layer { k: half(&self.k), v: half(&self.v), q: q.concat(), sees, ..*self }
    }
}
