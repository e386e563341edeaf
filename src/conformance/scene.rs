//! What does attention run over? Sequences in shuffled pages on the device, and the same on the host for float64.

use super::ask::{Answer, Ask, See};
use super::bench::{Bench, Layout};
use super::check::Check;
use super::pages::{Pages, Piece, Placement, Tokens};
use super::values::Tensor;
use crate::attention::reference::{self, Context, Heads};
use crate::attention::{Batch, Visible, plan, state_words};
use crate::backend::ops::{Attend, Merge, View};
use crate::backend::params::Tile;
use crate::backend::{Backend, DeviceBuffer};
use crate::{Dtype, Geometry, Result};
use std::f64::consts::{LN_2, LOG2_E};

/// Sequences in pages, on the device and on the host.
#[derive(Debug)]
pub(super) struct Scene<B: Backend> {
    pub(super) geometry: Geometry,
    pub(super) pages: Pages<B>,
    /// The page tables of all sequences; every table ends in an entry that names no frame.
    pub(super) tables: B::Buffer,
    /// Where each sequence's table starts, in words.
    pub(super) table_at: Vec<u32>,
    /// What each sequence holds once stored: calibrated keys less their mean, which tells no two of them apart.
    pub(super) contexts: Vec<Context>,
}

impl<B: Backend> Scene<B> {
    /// Sequences of these lengths, whose tokens follow each other in `k` and `v`.
    pub(super) fn new(
        bench: &mut Bench<'_, B>,
        geometry: Geometry,
        lens: &[u32],
        (k, v): (Tensor, Tensor),
        placement: Placement,
    ) -> Result<Self> {
        let frames: u64 = lens.iter().map(|&len| geometry.pages_for(len.into())).sum();
        // Spare frames stay poisoned between the used ones.
        let mut pages = Pages::new(bench, geometry, frames as u32 + 2 + frames as u32 / 4, placement)?;
        let frames: Vec<Vec<u32>> = lens.iter().map(|&len| pages.table(len)).collect();
        let tokens = Tokens::new(bench, k, v, [Layout::Dense; 2])?;
        let (mut from, mut pieces) = (0, Vec::new());
        for (table, &len) in frames.iter().zip(lens) {
            pieces.push(Piece { table, at: 0, from, tokens: len });
            from += len;
        }
        pages.append(bench, &tokens, &pieces)?;
        Self::over(bench, pages, &frames, lens, &tokens)
    }

    /// Sequences that were written into `pages` already: `frames` are their tables.
    pub(super) fn over(
        bench: &mut Bench<'_, B>,
        pages: Pages<B>,
        frames: &[Vec<u32>],
        lens: &[u32],
        tokens: &Tokens<B>,
    ) -> Result<Self> {
        let geometry = *pages.record.geometry();
        let (mut table, mut table_at) = (Vec::new(), Vec::new());
        for frames in frames {
            table_at.push(table.len() as u32);
            table.extend(frames.iter().copied().chain([u32::MAX]));
        }
        let format = geometry.page_format();
        let (k, v) = (tokens.k.centred(format, |head| pages.key_channels(head)), tokens.v.stored(format, |_| None));
        let (mut contexts, mut from) = (Vec::new(), 0);
        for &len in lens {
            let cut = |all: &[f32], dim: u32| {
                let row = (geometry.kv_heads() * dim) as usize;
                all[from * row..(from + len as usize) * row].to_vec()
            };
            contexts.push(Context { k: cut(&k, geometry.k_dim()), v: cut(&v, geometry.v_dim()) });
            from += len as usize;
        }
        let tables = bench.words("page tables", &table)?;
        Ok(Scene { geometry, pages, tables, table_at, contexts })
    }

    /// What the backend answers.
    pub(super) fn ask(&self, bench: &mut Bench<'_, B>, ask: &Ask) -> Result<Answer> {
        let q = bench.tensor(&ask.q, ask.q_layout)?;
        self.ask_view(bench, ask, &q)
    }

    /// What the backend answers to queries that are on the device already.
    pub(super) fn ask_view(&self, bench: &mut Bench<'_, B>, ask: &Ask, q: &View<B::Buffer>) -> Result<Answer> {
        let geometry = &self.geometry;
        let [rows, heads, dim] = [ask.rows.len(), geometry.q_heads() as usize, geometry.v_dim() as usize];
        let out = bench.output(ask.out, [rows, heads, dim], ask.out_layout)?;
        let lse = bench.output(Dtype::F32, [rows, heads, 1], ask.out_layout)?;
        let batches = self.plan(bench.backend, ask);
        let states = batches.iter().map(|batch| batch.states).max().unwrap_or(0) as usize;
        let words = states * heads * state_words(geometry.v_dim()) as usize;
        let states = bench.filled("states", words, f32::NAN.to_bits())?;
        for batch in &batches {
            // What an earlier batch left must not matter.
            bench.backend.fill(&mut bench.stream, &states, 0, states.bytes() / 4 * 4, f32::NAN.to_bits())?;
            let first = batch.first_row as u64;
            self.attend(bench, batch, &q.clone().from_row(first), ask.scale, &states)?;
            let merge = Merge {
                states: &states,
                grain: batch.grain,
                rows: &batch.merge,
                q_heads: geometry.q_heads(),
                v_dim: geometry.v_dim(),
                out: &out.view.clone().from_row(first),
                lse: Some(&lse.view.clone().from_row(first)),
            };
            bench.backend.merge(&mut bench.stream, &merge)?;
        }
        Answer::read(bench, &out, &lse)
    }

    /// The batches of a question, as this device's query tile and the question's own wishes cut them.
    pub(super) fn plan(&self, backend: &B, ask: &Ask) -> Vec<Batch> {
        let visible = |see: &See| Visible { table: self.table_at[see.sequence], start: see.start, end: see.end };
        let rows: Vec<_> = ask.rows.iter().map(visible).collect();
        let chunks = (backend.caps().prefill)(&self.pages.record, ask.q.dtype).filter(|_| ask.chunks);
        let tile = match chunks {
            Some(vectors) => (vectors / self.geometry.group()).max(1),
            None => backend.caps().rows_per_tile(&self.geometry),
        };
        let mut batches = plan(&rows, tile, ask.max_states, ask.grain);
        if let Some(splits) = ask.tile_splits {
            batches.iter_mut().for_each(|batch| batch.tiles = cut(&batch.tiles, splits));
        }
        batches
    }

    /// Attends one batch into `states`.
    pub(super) fn attend(
        &self,
        bench: &mut Bench<'_, B>,
        batch: &Batch,
        q: &View<B::Buffer>,
        scale: f32,
        states: &B::Buffer,
    ) -> Result<()> {
        bench.backend.attend(&mut bench.stream, &self.args(batch, q, scale, states))
    }

    /// The arguments of an attend over this scene.
    pub(super) fn args<'a>(
        &'a self,
        batch: &'a Batch,
        q: &'a View<B::Buffer>,
        scale: f32,
        states: &'a B::Buffer,
    ) -> Attend<'a, B::Buffer> {
        let (record, arena, channels) = (self.pages.record, self.pages.arena(), self.pages.channels());
        let (grain, rows, tiles) = (batch.grain, &batch.rows, &batch.tiles);
        Attend { record, arena, tables: &self.tables, q, channels, scale, grain, rows, tiles, states }
    }

    /// What the scores of a row's heads over these pages lack, because keys are stored less their mean: query · mean, as
    /// states say it.
    pub(super) fn lacking(&self, ask: &Ask, row: usize) -> Vec<f64> {
        let (dim, group) = (self.geometry.k_dim() as usize, self.geometry.group());
        let q = ask.q.slice(row, 1).values();
        let heads = q.chunks_exact(dim).zip(0..);
        let of = |(q, head): (&[f32], u32)| {
            let mean = self.pages.key_channels(head / group).map_or(&[][..], |(mean, _)| mean);
            let product: f64 = q.iter().zip(mean).map(|(q, mean)| f64::from(*q) * f64::from(*mean)).sum();
            product * f64::from(ask.scale) * LOG2_E
        };
        heads.map(of).collect()
    }

    /// What float64 answers: output and log-sum-exp.
    pub(super) fn reference(&self, ask: &Ask) -> (Vec<f64>, Vec<f64>) {
        let heads = Heads::from(&self.geometry);
        let q = ask.q.values();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (row, (see, q)) in ask.rows.iter().zip(q.chunks_exact(heads.q_heads * heads.k_dim)).enumerate() {
            let visible = see.start as usize..(see.end as usize).max(see.start as usize);
            let (o, l) = reference::attend(q, &self.contexts[see.sequence], heads, visible, ask.scale);
            out.extend(o);
            lse.extend(l.into_iter().zip(self.lacking(ask, row)).map(|(l, lacking)| l + lacking * LN_2));
        }
        (out, lse)
    }

    /// Asks, and holds the answer against float64.
    pub(super) fn compare(&self, bench: &mut Bench<'_, B>, ask: &Ask, check: &mut Check) -> Result<Answer> {
        let answer = self.ask(bench, ask)?;
        let (out, lse) = self.reference(ask);
        answer.compare(check, &out, &lse, self.geometry.v_dim());
        Ok(answer)
    }
}

/// The same work in tiles of at most `splits` splits.
fn cut(tiles: &[Tile], splits: u32) -> Vec<Tile> {
    let (mut pieces, mut item) = (Vec::new(), 0);
    for tile in tiles {
        for first in (0..tile.splits).step_by(splits as usize) {
            let here = splits.min(tile.splits - first);
            pieces.push(Tile { split: tile.split + first, splits: here, item, ..*tile });
            item += here;
        }
    }
    pieces
}

/// Random K and V for `tokens` tokens.
pub(super) fn random_kv(geometry: &Geometry, dtype: Dtype, tokens: u32, seed: u64) -> (Tensor, Tensor) {
    let tensor = |dim, seed| Tensor::normal(dtype, [tokens, geometry.kv_heads(), dim], seed);
    (tensor(geometry.k_dim(), seed), tensor(geometry.v_dim(), seed ^ 0xa5a5))
}
