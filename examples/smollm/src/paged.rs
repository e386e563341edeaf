//! How does the model keep its KV cache in kvtide? One sequence of a `PagedStore` on any device.

use anyhow::{Context, Result, ensure};
use kvtide::backend::{DeviceBuffer, DeviceMemory};
use kvtide::{Append, Backend, Device, Dtype, Geometry, PagedStore, Query, Rows, Sequence, StoreConfig, View};

use crate::attention::{Attention, Footprint, Heads};
use crate::plain::Format;

/// The KV cache in pages, and attention over them.
pub(crate) struct Paged {
    device: Device,
    store: PagedStore<Device>,
    sequence: Sequence,
    heads: Heads,
    /// Device memory for what one call hands over: queries, keys, values, output.
    memory: [DeviceMemory; 4],
}

impl Paged {
    /// Opens `backend` (`auto`, `cpu`, `wgpu` or `cuda`) and an empty cache on it; nothing is allocated for pages yet.
    pub(crate) fn open(backend: &str, heads: Heads, format: Format, page_size: usize) -> Result<Self> {
        let device = Device::open(backend)?;
        let count = |n: usize| u32::try_from(n).context("the model is too large");
        let geometry = Geometry::new(count(heads.layers)?, count(heads.query)?, count(heads.kv)?, count(heads.dim)?)
            .page_size(count(page_size)?)
            .format(format.pages());
        let config = StoreConfig { step_pages: heads.layers as u64 * 8, ..StoreConfig::default() };
        let mut store = PagedStore::with_config(device.clone(), geometry, config)?;
        let sequence = store.begin();
        let empty = || device.alloc("tensor", 4);
        let memory = [empty()?, empty()?, empty()?, empty()?];
        Ok(Self { device, store, sequence, heads, memory })
    }

    /// Memory `which` with at least `bytes` bytes.
    fn room(&mut self, which: usize, bytes: usize) -> Result<DeviceMemory> {
        if self.memory[which].bytes() < bytes as u64 {
            self.memory[which] = self.device.alloc("tensor", bytes as u64)?;
        }
        Ok(self.memory[which].clone())
    }

    /// A dense tensor of the host in device memory `which`.
    fn tensor(&mut self, which: usize, data: &[f32], heads: usize) -> Result<View<DeviceMemory>> {
        let memory = self.room(which, size_of_val(data))?;
        self.store.upload(&memory, 0, bytemuck::cast_slice(data))?;
        Ok(View::dense(memory, Dtype::F32, heads as u32, self.heads.dim as u32))
    }
}

impl Attention for Paged {
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>> {
        let held = self.store.len(&self.sequence, layer)?;
        ensure!(held == position as u64, "layer {layer} holds {held} tokens, but the next is {position}");
        let (q, k, v) = (
            self.tensor(0, q, self.heads.query)?,
            self.tensor(1, k, self.heads.kv)?,
            self.tensor(2, v, self.heads.kv)?,
        );
        let mut answer = vec![0.0f32; rows * self.heads.query * self.heads.dim];
        let out = self.room(3, size_of_val(&answer[..]))?;
        let view = View::dense(out.clone(), Dtype::F32, self.heads.query as u32, self.heads.dim as u32);
        self.store.append(layer, &[Append::new(&self.sequence, rows as u32, k, v)])?;
        self.store.attend(layer, &Query::new(&[Rows::tail(&self.sequence, rows as u32)], q, view))?;
        self.store.download(&out, 0, bytemuck::cast_slice_mut(&mut answer))?;
        Ok(answer)
    }

    fn footprint(&mut self) -> Footprint {
        let stats = self.store.stats();
        let caps = self.device.caps();
        Footprint {
            backend: caps.backend.into(),
            adapter: caps.adapter.clone(),
            pages: Some(stats.held_pages as usize),
            kv_bytes: stats.held_bytes as usize,
        }
    }
}
