//! How does the model keep its KV cache in kvtide? One sequence of a store on any device.

use anyhow::{Context, Result, ensure};
use kvtide::backend::{DeviceBuffer, DeviceMemory};
use kvtide::{Append, Backend, Dtype, Geometry, Query, Rows, Sequence, View};

use crate::attention::{Attention, Footprint, Heads};
use crate::plain::Format;
use crate::store::Store;

/// The KV cache in pages, and attention over them.
pub(crate) struct Paged {
    store: Store,
    sequence: Sequence,
    heads: Heads,
    /// Device memory for what one call hands over: queries, keys, values, output.
    memory: [DeviceMemory; 4],
}

/// The pages of a model with these heads.
pub(crate) fn geometry(heads: Heads, format: Format, page_size: usize) -> Result<Geometry> {
    let count = |n: usize| u32::try_from(n).context("the model is too large");
    let geometry = Geometry::new(count(heads.layers)?, count(heads.query)?, count(heads.kv)?, count(heads.dim)?);
    Ok(geometry.page_size(count(page_size)?).format(format.pages()))
}

impl Paged {
    /// An empty cache in a store for these heads.
    pub(crate) fn new(mut store: Store, heads: Heads) -> Result<Self> {
        let sequence = store.begin();
        let empty = || store.device().alloc("tensor", 4);
        let memory = [empty()?, empty()?, empty()?, empty()?];
        Ok(Self { store, sequence, heads, memory })
    }

    /// Memory `which` with at least `bytes` bytes.
    fn room(&mut self, which: usize, bytes: usize) -> Result<DeviceMemory> {
        if self.memory[which].bytes() < bytes as u64 {
            self.memory[which] = self.store.device().alloc("tensor", bytes as u64)?;
        }
        Ok(self.memory[which].clone())
    }

    /// A dense tensor of the host in device memory `which`.
    fn tensor(&mut self, which: usize, data: &[f32], heads: usize) -> Result<View<DeviceMemory>> {
        let memory = self.room(which, size_of_val(data))?;
        self.store.upload(&memory, bytemuck::cast_slice(data))?;
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
        self.store.append(layer, Append::new(&self.sequence, rows as u32, k, v))?;
        self.store.attend(layer, &Query::new(&[Rows::tail(&self.sequence, rows as u32)], q, view))?;
        self.store.download(&out, bytemuck::cast_slice_mut(&mut answer))?;
        Ok(answer)
    }

    fn footprint(&mut self) -> Result<Footprint> {
        let (pages, bytes) = self.store.held();
        let swap = self.store.counters()?;
        let caps = self.store.device().caps();
        Ok(Footprint {
            backend: caps.backend.into(),
            adapter: caps.adapter.clone(),
            pages: Some(pages as usize),
            kv_bytes: bytes as usize,
            swap,
        })
    }
}
