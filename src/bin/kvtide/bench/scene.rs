//! Pages full of noise, in shuffled frames, and the tables of the sequences in them.

use super::{noise, tensor};
use anyhow::Context;
use kvtide::attention::{Batch, Visible, plan_for, state_words};
use kvtide::backend::ops::{Append, Arena, Attend, Channels, Merge};
use kvtide::backend::params::AppendRun;
use kvtide::backend::{DeviceMemory, DeviceStream};
use kvtide::record::Record;
use kvtide::{Backend, Device, Dtype, Geometry, PageFormat, View};
use std::str::FromStr;

/// Sequences of equal length and the heads over them, written `16x8192:32/8/128/16`: sequences × tokens, query heads, KV heads,
/// elements of a head, tokens a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cast {
    pub(super) sequences: u32,
    pub(super) tokens: u32,
    heads: [u32; 4],
}

impl FromStr for Cast {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let form = || format!("`{text}` is not of the form 16x8192:32/8/128/16");
        let (what, heads) = text.split_once(':').with_context(form)?;
        let (sequences, tokens) = what.split_once('x').with_context(form)?;
        let heads: Vec<u32> = heads.split('/').map(str::parse).collect::<Result<_, _>>().with_context(form)?;
        let heads = <[u32; 4]>::try_from(heads).ok().with_context(form)?;
        Ok(Cast { sequences: sequences.parse()?, tokens: tokens.parse()?, heads })
    }
}

impl std::fmt::Display for Cast {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [q, kv, dim, page] = self.heads;
        write!(f, "{}x{}:{q}/{kv}/{dim}/{page}", self.sequences, self.tokens)
    }
}

impl Cast {
    pub(super) fn geometry(&self, layers: u32, format: PageFormat) -> kvtide::Result<Geometry> {
        let [q, kv, dim, page] = self.heads;
        Geometry::new(layers, q, kv, dim).page_size(page).format(format).validate()
    }
}

/// An arena of one layer whose frames are all in use.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) record: Record,
    pub(super) slabs: Vec<DeviceMemory>,
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
        let per_slab = (device.caps().max_slab_bytes / record.frame_stride()).min(total);
        let shift = per_slab.next_power_of_two().trailing_zeros();
        let mut slabs = Vec::new();
        let mut all: Vec<u32> = Vec::new();
        while (all.len() as u64) < total {
            let here = per_slab.min(total - all.len() as u64);
            let slab = slabs.len() as u32;
            slabs.push(device.alloc("bench slab", here * record.frame_stride())?);
            all.extend((0..here as u32).map(|index| slab << shift | index));
        }
        shuffle(&mut all);
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
        let rows = u64::from(page) * 16;
        let [k, v] = [1, 2].map(|seed| tensor(device, rows, geometry.kv_heads(), geometry.k_dim(), seed));
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

    fn channels(&self) -> Option<Channels<'_, DeviceMemory>> {
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

    /// Query rows, `rows` of each sequence: the last tokens of it.
    pub(super) fn ask(&self, device: &Device, stream: &mut DeviceStream, rows: u32) -> anyhow::Result<Ask> {
        let geometry = self.record.geometry();
        let pages = geometry.pages_for(self.tokens.into()) as u32;
        let visible: Vec<Visible> = (0..self.frames.len() as u32)
            .flat_map(|seq| (1..=rows).map(move |row| (seq, row)))
            .map(|(seq, row)| Visible { table: seq * pages, start: 0, end: self.tokens - rows + row })
            .collect();
        let state_bytes = u64::from(geometry.q_heads()) * u64::from(state_words(geometry.v_dim())) * 4;
        let most = (device.caps().max_slab_bytes.min(1 << 30) / state_bytes) as u32;
        let batches = plan_for(&visible, geometry, device.caps(), most);
        let states = batches.iter().map(|batch| u64::from(batch.states)).max().unwrap_or(0) * state_bytes;
        let count = visible.len() as u64;
        let q = tensor(device, count, geometry.q_heads(), geometry.k_dim(), 3)?;
        let bytes = count * u64::from(geometry.q_heads()) * u64::from(geometry.v_dim()) * 2;
        let out = View::dense(device.alloc("bench output", bytes)?, Dtype::Bf16, geometry.q_heads(), geometry.v_dim());
        let states = device.alloc("bench states", states.max(16))?;
        device.synchronize(stream)?;
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

#[cfg(test)]
#[test]
fn shapes_are_read_and_written_alike() {
    let text = "16x8192:32/8/128/16";
    let cast: Cast = text.parse().unwrap();
    assert_eq!((cast.sequences, cast.tokens, cast.to_string()), (16, 8192, text.to_owned()));
    for wrong in ["", "16x8192", "16:32/8/128/16", "1x2:3/4/5", "1x2:3/4/5/6/7", "ax2:3/4/5/6"] {
        assert!(wrong.parse::<Cast>().is_err(), "{wrong}");
    }
}
