//! `attend` and `merge`: states of splits, and their fold.

use super::channels::HeadChannels;
use super::memory::{CpuBuffer, encode, frame, load_bits, value_of};
use crate::Dtype;
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::{Attend, Fold, Merge};
use crate::backend::params::Tile;
use std::f32::consts::{LN_2, LOG2_E};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Work items are (tile, split or section, KV head); threads take the next one until none is left.
pub(super) fn attend(args: &Attend<'_, CpuBuffer>) {
    let kv_heads = args.record.geometry().kv_heads();
    let mut items = Vec::new();
    for tile in args.tiles {
        for part in tile.split..tile.split + tile.splits {
            items.extend((0..kv_heads).map(|head| (*tile, part, head)));
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut scratch = Scratch::default();
        while let Some(&(tile, part, head)) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            scratch.item(args, &tile, part, head);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len() / 4);
    if threads < 2 {
        return work();
    }
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
}

/// One thread's K and V of a split, and one query's scores.
#[derive(Default)]
struct Scratch {
    /// Elements, or codes as numbers.
    k: Vec<f32>,
    v: Vec<f32>,
    /// What each row of K and of V is multiplied by: 1 in native formats.
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
    channels: Option<HeadChannels>,
    q: Vec<f32>,
    p: Vec<f32>,
    o: Vec<f32>,
}

/// What a state says beside its output: see [`Attend::states`].
#[derive(Clone, Copy)]
struct Tail {
    m: f32,
    l: f32,
    c: f32,
}

impl Scratch {
    fn item(&mut self, args: &Attend<'_, CpuBuffer>, tile: &Tile, part: u32, kv_head: u32) {
        for split in part * args.grain.splits()..(part + 1) * args.grain.splits() {
            self.split(args, tile, split, kv_head);
        }
    }

    /// Attends a split and adds its states to those of the splits before it that belong to the same states.
    fn split(&mut self, args: &Attend<'_, CpuBuffer>, tile: &Tile, split: u32, kv_head: u32) {
        let geometry = args.record.geometry();
        let rows = &args.rows[tile.row as usize..(tile.row + tile.rows) as usize];
        let first = split * SPLIT;
        let seen = |start: u32, end: u32| (start.max(first), end.min(first + SPLIT));
        let states = States { buffer: args.states, q_heads: geometry.q_heads(), v_dim: geometry.v_dim() };
        let live = rows.iter().map(|row| seen(row.start, row.end)).filter(|(start, end)| start < end);
        let Some((start, end)) = live.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else { return };
        self.channels = args.channels.map(|channels| HeadChannels::read(&channels, geometry, kv_head));
        self.decode(args, tile.table, kv_head, start, end);
        for (at, row) in rows.iter().enumerate() {
            let (from, to) = seen(row.start, row.end);
            if from >= to {
                continue;
            }
            let each = args.grain.splits();
            let state = row.state + split / each - row.split;
            let earlier = (row.start / SPLIT).max(split / each * each) < split;
            for head in kv_head * geometry.group()..(kv_head + 1) * geometry.group() {
                let tail = self.query(args, (tile.row + at as u32, head), (from - start, to - start));
                let mine = Total { tail, o: std::mem::take(&mut self.o) };
                if earlier {
                    let mut total = states.get(state, head);
                    total.add(&mine);
                    states.put(state, head, &total);
                } else {
                    states.put(state, head, &mine);
                }
                self.o = mine.o;
            }
        }
    }

    /// Decodes K and V of tokens `start..end` of one KV head.
    fn decode(&mut self, args: &Attend<'_, CpuBuffer>, table: u32, head: u32, start: u32, end: u32) {
        let (record, geometry) = (&args.record, args.record.geometry());
        let (k_dim, v_dim) = (geometry.k_dim() as usize, geometry.v_dim() as usize);
        self.k.resize((end - start) as usize * k_dim, 0.0);
        self.v.resize((end - start) as usize * v_dim, 0.0);
        self.k_scale.clear();
        self.v_scale.clear();
        let rows = self.k.chunks_exact_mut(k_dim).zip(self.v.chunks_exact_mut(v_dim));
        for ((k, v), token) in rows.zip(start..) {
            let (page, slot) = (token / geometry.page_tokens(), token % geometry.page_tokens());
            let (slab, base) = frame(&args.arena, args.tables.get(u64::from(table + page)), record);
            slab.read_stored(base + record.key(head, slot), record.format(), k);
            slab.read_stored(base + record.value(head, slot), record.format(), v);
            let scale = |at: u64| if record.format().is_quantized() { slab.float(base + at) } else { 1.0 };
            self.k_scale.push(scale(record.key_scale(head, slot)));
            self.v_scale.push(scale(record.value_scale(head, slot)));
        }
    }

    /// The state of one query vector over decoded tokens `from..to`: `o` stays in `self.o`, the rest is returned.
    fn query(&mut self, args: &Attend<'_, CpuBuffer>, (row, head): (u32, u32), (from, to): (u32, u32)) -> Tail {
        let geometry = args.record.geometry();
        let (k_dim, v_dim) = (geometry.k_dim() as usize, geometry.v_dim() as usize);
        let [row_stride, head_stride, element] = args.q.strides;
        let first = u64::from(row) * row_stride + u64::from(head) * head_stride;
        self.q.clear();
        let q = (0..k_dim as u64).map(|d| value_of(load_bits(args.q, first + d * element), args.q.dtype));
        self.q.extend(q);
        let scale = args.scale * LOG2_E;
        let mut c = 0.0;
        if let Some(channels) = &self.channels {
            c = dot(&self.q, &channels.mean) * scale;
            self.q.iter_mut().zip(&channels.scale).for_each(|(q, scale)| *q *= scale);
        }
        let tokens = from as usize..to as usize;
        let keys = self.k[tokens.start * k_dim..tokens.end * k_dim].chunks_exact(k_dim);
        self.p.clear();
        self.p.extend(keys.zip(&self.k_scale[tokens.clone()]).map(|(key, row)| dot(&self.q, key) * row * scale));
        let m = self.p.iter().copied().fold(f32::MIN, f32::max);
        self.o.clear();
        self.o.resize(v_dim, 0.0);
        let mut l = 0.0;
        let values = self.v[tokens.start * v_dim..tokens.end * v_dim].chunks_exact(v_dim);
        for ((score, value), row) in self.p.iter().zip(values).zip(&self.v_scale[tokens]) {
            let p = (score - m).exp2();
            l += p;
            let weight = p * row;
            self.o.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
        }
        Tail { m, l, c }
    }
}

/// Dot product in eight f32 lanes, folded in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

pub(super) fn merge(args: &Merge<'_, CpuBuffer>) {
    let sources = States { buffer: args.states, q_heads: args.q_heads, v_dim: args.v_dim };
    for (row, states) in args.rows.iter().enumerate() {
        for head in 0..args.q_heads {
            let mut total = Total::nothing(args.v_dim);
            let (first, end) = (states.state, states.state + states.states);
            let mut at = first;
            while at < end {
                let section = args.section() - (states.before + at - first) % args.section();
                let next = end.min(at + section);
                total.add(&sources.fold(at..next, head));
                at = next;
            }
            // NaN, from a NaN that the row saw, is not "nothing was visible".
            let lse = if total.tail.l != 0.0 {
                (total.tail.m + total.tail.l.log2() + total.tail.c) * LN_2
            } else {
                f32::NEG_INFINITY
            };
            if total.tail.l != 0.0 {
                total.o.iter_mut().for_each(|o| *o /= total.tail.l);
            }
            write(args, row as u64, head.into(), &total.o, lse);
        }
    }
}

pub(super) fn fold(args: &Fold<'_, CpuBuffer>) {
    let states = States { buffer: args.states, q_heads: args.q_heads, v_dim: args.v_dim };
    for row in args.rows {
        for head in 0..args.q_heads {
            states.put(row.to, head, &states.fold(row.state..row.state + row.states, head));
        }
    }
}

/// The states of a call.
struct States<'a> {
    buffer: &'a CpuBuffer,
    q_heads: u32,
    v_dim: u32,
}

/// A state in hand.
struct Total {
    tail: Tail,
    o: Vec<f32>,
}

impl Total {
    fn nothing(v_dim: u32) -> Self {
        Total { tail: Tail { m: f32::MIN, l: 0.0, c: 0.0 }, o: vec![0.0; v_dim as usize] }
    }

    /// The first state that saw something is taken as it is; the later ones are added to it.
    fn add(&mut self, other: &Total) {
        let (Tail { m, l, c }, mine) = (other.tail, &mut self.tail);
        if l == 0.0 {
            return;
        }
        if mine.l == 0.0 {
            *mine = Tail { m, l, c };
            self.o.copy_from_slice(&other.o);
            return;
        }
        let top = mine.m.max(m);
        let (keep, take) = ((mine.m - top).exp2(), (m - top).exp2());
        mine.l = mine.l * keep + l * take;
        mine.m = top;
        self.o.iter_mut().zip(&other.o).for_each(|(o, x)| *o = *o * keep + x * take);
    }
}

impl States<'_> {
    /// The first word of a state.
    fn base(&self, state: u32, head: u32) -> u64 {
        let number = u64::from(state) * u64::from(self.q_heads) + u64::from(head);
        number * u64::from(state_words(self.v_dim))
    }

    fn fold(&self, states: std::ops::Range<u32>, head: u32) -> Total {
        let mut total = Total::nothing(self.v_dim);
        states.for_each(|state| total.add(&self.get(state, head)));
        total
    }

    fn get(&self, state: u32, head: u32) -> Total {
        let (base, dim) = (self.base(state, head), u64::from(self.v_dim));
        let word = |at: u64| f32::from_bits(self.buffer.get(base + at));
        let tail = Tail { m: word(dim), l: word(dim + 1), c: word(dim + 2) };
        Total { tail, o: (0..dim).map(word).collect() }
    }

    fn put(&self, state: u32, head: u32, total: &Total) {
        let (base, dim) = (self.base(state, head), u64::from(self.v_dim));
        total.o.iter().zip(base..).for_each(|(x, at)| self.buffer.set(at, x.to_bits()));
        self.buffer.set(base + dim, total.tail.m.to_bits());
        self.buffer.set(base + dim + 1, total.tail.l.to_bits());
        self.buffer.set(base + dim + 2, total.tail.c.to_bits());
        self.buffer.set(base + dim + 3, 0);
    }
}

fn write(args: &Merge<'_, CpuBuffer>, row: u64, head: u64, o: &[f32], lse: f32) {
    let [row_stride, head_stride, _] = args.out.strides;
    let base = args.out.offset + (row * row_stride + head * head_stride) * args.out.dtype.bytes();
    match args.out.dtype {
        Dtype::F32 => o.iter().zip(base / 4..).for_each(|(x, at)| args.out.buffer.set(at, x.to_bits())),
        dtype => o.chunks_exact(2).zip(base / 4..).for_each(|(pair, at)| {
            args.out.buffer.set(at, encode(pair[0], dtype) | encode(pair[1], dtype) << 16);
        }),
    }
    if let Some(view) = args.lse {
        let at = view.offset / 4 + row * view.strides[0] + head * view.strides[1];
        view.buffer.set(at, lse.to_bits());
    }
}
