//! A resident store and one that swaps, given the same calls.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses a part")]

use anyhow::{Context, Result};
use kvtide::backend::cpu::{CpuBackend, CpuBuffer};
use kvtide::swap::{HighSpeedSwap, SwapConfig};
use kvtide::tiers::Tier;
use kvtide::{Append, Backend, Dtype, Geometry, PageFormat, PagedStore, Query, Rows, Sequence, View};

pub const LAYERS: u32 = 2;
pub const PAGE: u32 = 16;

pub fn model() -> Geometry {
    Geometry::new(LAYERS, 4, 2, 16).page_size(PAGE).format(PageFormat::F32)
}

/// Frames of one split and a little: everything else must travel.
pub fn config(frames: u64) -> SwapConfig {
    let device_budget = frames * kvtide::record::Record::new(model()).frame_stride();
    SwapConfig { device_budget, tile_pages: 16, ..SwapConfig::default() }
}

/// Values that depend on sequence, layer, token and element.
pub fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

pub fn tensor(device: &CpuBackend, seed: u64, rows: u32, heads: u32) -> Result<View<CpuBuffer>> {
    let data = values(seed, (rows * heads * 16) as usize);
    Ok(View::dense(device.buffer_from(bytemuck::cast_slice(&data))?, Dtype::F32, heads, 16))
}

/// The same calls to a resident store and to one that swaps.
pub struct Twins {
    pub device: CpuBackend,
    pub resident: PagedStore<CpuBackend>,
    pub swapped: HighSpeedSwap<CpuBackend>,
}

impl Twins {
    pub fn new(frames: u64, tier: impl Tier<CpuBackend> + 'static) -> Result<Self> {
        let device = CpuBackend::new();
        let resident = PagedStore::new(device.clone(), model())?;
        let swapped = HighSpeedSwap::builder(device.clone(), model()).config(config(frames)).tier(tier).build()?;
        Ok(Twins { device, resident, swapped })
    }

    pub fn begin(&mut self) -> (Sequence, Sequence) {
        (self.resident.begin(), self.swapped.begin())
    }

    pub fn append(&mut self, pair: &(Sequence, Sequence), tokens: u32, seed: u64) -> Result<()> {
        for layer in 0..LAYERS as usize {
            let seed = seed * 1000 + layer as u64 * 10;
            let (k, v) = (tensor(&self.device, seed + 1, tokens, 2)?, tensor(&self.device, seed + 2, tokens, 2)?);
            self.resident.append(layer, &[Append::new(&pair.0, tokens, k.clone(), v.clone())])?;
            self.swapped.append(layer, &[Append::new(&pair.1, tokens, k, v)])?;
        }
        Ok(())
    }

    pub fn attend_swapped(&mut self, seq: &Sequence, layer: usize, rows: u32, seed: u64) -> kvtide::Result<Vec<u32>> {
        let q = tensor(&self.device, seed, rows, 4).expect("a query");
        let out = View::dense(self.device.alloc("out", u64::from(rows) * 256)?, Dtype::F32, 4, 16);
        self.swapped.attend(layer, &Query::new(&[Rows::tail(seq, rows)], q, out.clone()))?;
        let mut bits = vec![0u32; rows as usize * 64];
        self.swapped.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
        Ok(bits)
    }

    pub fn attend_resident(&mut self, seq: &Sequence, layer: usize, rows: u32, seed: u64) -> Result<Vec<u32>> {
        let q = tensor(&self.device, seed, rows, 4)?;
        let out = View::dense(self.device.alloc("out", u64::from(rows) * 256)?, Dtype::F32, 4, 16);
        self.resident.attend(layer, &Query::new(&[Rows::tail(seq, rows)], q, out.clone()))?;
        let mut bits = vec![0u32; rows as usize * 64];
        self.resident.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
        Ok(bits)
    }

    pub fn compare(&mut self, pair: &(Sequence, Sequence), rows: u32, seed: u64) -> Result<()> {
        for layer in 0..LAYERS as usize {
            let want = self.attend_resident(&pair.0, layer, rows, seed)?;
            let got = self.attend_swapped(&pair.1, layer, rows, seed).context("swapped")?;
            anyhow::ensure!(got == want, "layer {layer}, {rows} rows: the bits differ");
        }
        Ok(())
    }
}
