//! Pages full of noise, in shuffled frames, and the tables of the sequences in them.

use super::cast::Cast;
use super::timer::Timer;
use super::{natural, noise, tensor};
use anyhow::Context;
use kvtide::attention::{Batch, Visible, plan_chunks, state_words};
use kvtide::backend::ops::{Append, Arena, Attend, Channels, Merge};
use kvtide::backend::params::AppendRun;
use kvtide::backend::{DeviceMemory, DeviceStream};
use kvtide::record::Record;
use kvtide::{Backend, Device, Geometry, PageFormat, StoreConfig, View};

/// Does something with the pages of every shape in every format.
pub(super) fn each_scene<'d>(
    timer: &mut Timer<'d>,
    casts: &[Cast],
    formats: &[PageFormat],
    mut each: impl FnMut(&mut Timer<'d>, &Cast, &Scene) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for cast in casts {
        for &format in formats {
            let scene = Scene::new(timer.device, &mut timer.stream, cast, format);
            scene
                .and_then(|scene| each(timer, cast, &scene))
                .with_context(|| format!("{cast} in {}", format.name()))?;
        }
    }
    Ok(())
}

/// One of a scene's pages: whose it is, where, and how many tokens it holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page {
    pub(super) sequence: u32,
    pub(super) frame: u32,
    pub(super) tokens: u32,
}

/// An arena of one layer whose frames are all in use.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) record: Record,
    slabs: Vec<DeviceMemory>,
    shift: u32,
    channels: Option<DeviceMemory>,
    tables: DeviceMemory,
    /// The frames of each sequence.
    pub(super) frames: Vec<Vec<u32>>,
    tokens: u32,
    counter: DeviceMemory,
}

impl Scene {
    /// Fills the pages through `append`, from the same noise for every run of sixteen pages.
    pub(super) fn new(
        device: &Device,
        stream: &mut DeviceStream,
        cast: &Cast,
        format: PageFormat,
    ) -> anyhow::Result<Self> {
        let geometry = cast.geometry(1, format)?;
        let record = Record::new(geometry);
        let pages = geometry.pages_for(cast.tokens.into()) as u32;
        let total = u64::from(pages) * u64::from(cast.sequences);
        let (slabs, shift, all) = scattered(device, total, record.frame_stride())?;
        let frames: Vec<Vec<u32>> = all.chunks(pages as usize).map(<[u32]>::to_vec).collect();
        let mut words: Vec<u32> = Vec::new();
        frames.iter().for_each(|frames| words.extend(frames));
        let tables = upload(device, stream, bytemuck::cast_slice(&words))?;
        let counter = upload(device, stream, &[0; 16])?;
        let channels = match geometry.page_format().is_quantized() {
            true => Some(upload(device, stream, bytemuck::cast_slice(&identity(&geometry)))?),
            false => None,
        };
        let scene = Scene { record, slabs, shift, channels, tables, frames, tokens: cast.tokens, counter };
        scene.fill(device, stream)?;
        device.synchronize(stream)?;
        Ok(scene)
    }

    fn fill(&self, device: &Device, stream: &mut DeviceStream) -> anyhow::Result<()> {
        let geometry = self.record.geometry();
        let page = geometry.page_tokens();
        let (rows, heads) = (u64::from(page) * 16, [geometry.kv_heads(), geometry.k_dim()]);
        let dtype = natural(self.record.format());
        let [k, v] = [1, 2].map(|seed| tensor(device, dtype, rows, heads, seed));
        let (k, v) = (k?, v?);
        let step = page * geometry.kv_heads() * geometry.k_dim();
        for frames in self.frames.iter().flat_map(|frames| frames.chunks(4096)) {
            let run = |(frame, at): (&u32, u32)| {
                let offset = at % 16 * step;
                AppendRun {
                    k_offset: offset,
                    v_offset: offset,
                    frame: *frame,
                    slot: 0,
                    tokens: page,
                    page: 0,
                    reserved: [0; 2],
                }
            };
            let runs: Vec<AppendRun> = frames.iter().zip(0..).map(run).collect();
            device.append(stream, &self.append(&k, &v, &runs))?;
        }
        Ok(())
    }

    pub(super) fn arena(&self) -> Arena<'_, DeviceMemory> {
        Arena { slabs: &self.slabs, slab_shift: self.shift }
    }

    /// The pages, a sequence after the other.
    pub(super) fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        let page = self.record.geometry().page_tokens();
        let of = move |(frames, sequence): (&'_ Vec<u32>, u32)| {
            let places = frames.clone().into_iter().zip((0..self.tokens).step_by(page as usize));
            places.map(move |(frame, at)| Page { sequence, frame, tokens: page.min(self.tokens - at) })
        };
        self.frames.iter().zip(0..).flat_map(of)
    }

    pub(super) fn channels(&self) -> Option<Channels<'_, DeviceMemory>> {
        self.channels.as_ref().map(|buffer| Channels { buffer, offset: 0 })
    }

    /// The arguments of an append of these runs.
    pub(super) fn append<'a>(
        &'a self,
        k: &'a View<DeviceMemory>,
        v: &'a View<DeviceMemory>,
        runs: &'a [AppendRun],
    ) -> Append<'a, DeviceMemory> {
        let (record, arena, channels, non_finite) = (self.record, self.arena(), self.channels(), &self.counter);
        Append { record, arena, k, v, channels, runs, onto: None, non_finite, write: true }
    }

    /// Bytes that attention over all sequences reads: K and V once, codes with their scales.
    pub(super) fn bytes(&self) -> u64 {
        let tokens = self.frames.len() as u64 * u64::from(self.tokens);
        self.record.bytes() / u64::from(self.record.geometry().page_tokens()) * tokens
    }

    /// Query rows, `rows` of each sequence: the last tokens of it. States have the memory that a store gives them.
    pub(super) fn ask(&self, device: &Device, rows: u32) -> anyhow::Result<Ask> {
        let geometry = self.record.geometry();
        let pages = geometry.pages_for(self.tokens.into()) as u32;
        let visible: Vec<Visible> = (0..self.frames.len() as u32)
            .flat_map(|seq| (1..=rows).map(move |row| (seq, row)))
            .map(|(seq, row)| Visible { table: seq * pages, start: 0, end: self.tokens - rows + row })
            .collect();
        let (dtype, q_heads, v_dim) = (natural(self.record.format()), geometry.q_heads(), geometry.v_dim());
        let state_bytes = u64::from(geometry.q_heads()) * u64::from(state_words(geometry.v_dim())) * 4;
        let most = (StoreConfig::default().state_bytes / state_bytes).max(1) as u32;
        let batches = plan_chunks(&visible, &self.record, dtype, device.caps(), most);
        let states = batches.iter().map(|batch| u64::from(batch.states)).max().unwrap_or(0) * state_bytes;
        let count = visible.len() as u64;
        let q = tensor(device, dtype, count, [q_heads, geometry.k_dim()], 3)?;
        let bytes = count * u64::from(q_heads) * u64::from(v_dim) * dtype.bytes();
        let out = View::dense(device.alloc("bench output", bytes)?, dtype, q_heads, v_dim);
        let states = device.alloc("bench states", states.max(16))?;
        Ok(Ask { batches, q, out, states })
    }

    /// Attends and merges.
    pub(super) fn attend(&self, device: &Device, stream: &mut DeviceStream, ask: &Ask) -> kvtide::Result<()> {
        let geometry = self.record.geometry();
        for batch in &ask.batches {
            let first = batch.first_row as u64;
            let attend = Attend {
                record: self.record,
                arena: self.arena(),
                tables: &self.tables,
                q: &ask.q.clone().from_row(first),
                channels: self.channels(),
                scale: 1.0 / (geometry.k_dim() as f32).sqrt(),
                grain: batch.grain,
                rows: &batch.rows,
                tiles: &batch.tiles,
                states: &ask.states,
            };
            device.attend(stream, &attend)?;
            let merge = Merge {
                states: &ask.states,
                grain: batch.grain,
                rows: &batch.merge,
                q_heads: geometry.q_heads(),
                v_dim: geometry.v_dim(),
                out: &ask.out.clone().from_row(first),
                lse: None,
            };
            device.merge(stream, &merge)?;
        }
        Ok(())
    }
}

/// Queries, where their answers go, and the plan.
#[derive(Debug)]
pub(super) struct Ask {
    batches: Vec<Batch>,
    q: View<DeviceMemory>,
    out: View<DeviceMemory>,
    states: DeviceMemory,
}

impl Ask {
    /// Pairs of `attend` and `merge` that answer it.
    pub(super) fn calls(&self) -> usize {
        self.batches.len()
    }
}

/// Memory for `count` records, the number of index bits, and the records' numbers in an order without a pattern.
pub(super) fn scattered(
    device: &Device,
    count: u64,
    stride: u64,
) -> kvtide::Result<(Vec<DeviceMemory>, u32, Vec<u32>)> {
    let per_slab = (device.caps().max_slab_bytes / stride).min(count);
    let shift = per_slab.next_power_of_two().trailing_zeros();
    let mut slabs = Vec::new();
    let mut numbers: Vec<u32> = Vec::new();
    while (numbers.len() as u64) < count {
        let here = per_slab.min(count - numbers.len() as u64);
        let slab = slabs.len() as u32;
        slabs.push(device.alloc("bench slab", here * stride)?);
        numbers.extend((0..here as u32).map(|index| slab << shift | index));
    }
    shuffle(&mut numbers);
    Ok((slabs, shift, numbers))
}

/// Means 0, scales 1, inverses 1 for every head.
fn identity(geometry: &Geometry) -> Vec<f32> {
    let dim = geometry.k_dim() as usize;
    let head = [vec![0.0; dim], vec![1.0; 2 * dim]].concat();
    head.repeat(geometry.kv_heads() as usize)
}

pub(super) fn upload(device: &Device, stream: &mut DeviceStream, bytes: &[u8]) -> anyhow::Result<DeviceMemory> {
    let buffer = device.alloc("bench", bytes.len().max(16) as u64)?;
    device.upload(stream, &buffer, 0, bytes)?;
    Ok(buffer)
}

/// An order without a pattern.
pub(super) fn shuffle<T>(items: &mut [T]) {
    let mut next = noise(5);
    for at in (1..items.len()).rev() {
        items.swap(at, (next() % (at as u64 + 1)) as usize);
    }
}
