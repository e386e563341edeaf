//! Does it matter whether `attend` gives the states of splits or of sections? It must not, to the bit (contract C1).

use super::Cases;
use super::ask::{Ask, See};
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::pages::Placement;
use super::prefixes::{States, sources};
use super::scene::{Scene, random_kv};
use super::values::{Tensor, encode, natural};
use crate::attention::{Grain, SECTION, SPLIT};
use crate::backend::params::{FoldRow, MergeRow};
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};

pub(super) fn merge_cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let out = natural(format);
    for dim in [16, 72, 128] {
        let name = format!("C1: states of {dim} elements fold by sections, those of splits or folded ones");
        list.add(Operation::Merge, format, 400_000, name, move |b| folds(b, out, dim));
    }
}

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name: &str, run: fn(&B, PageFormat) -> Verdict| {
        list.add(Operation::Attend, format, weight, format!("C1: {name}"), move |b| run(b, format));
    };
    add(2_900_000, "states of splits or of sections", attends);
    add(1_000_000, "sections of which a row sees nothing that counts", blanks);
}

/// Tokens of a section.
const TOKENS: u32 = SECTION * SPLIT;

/// Every run of states, wherever in a section it starts: merged as splits, and as sections folded before.
fn folds<B: Backend>(backend: &B, out: Dtype, dim: usize) -> Verdict {
    let mut check = Check::default();
    let (heads, count) = (2, 37);
    let mut all = sources(count, heads, dim as u64);
    let folded = count as u32;
    all.extend(sources(4 * count, heads, 1));
    let mut states = States::new(backend, &all, heads, dim)?;
    let (mut splits, mut sections, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for before in 0..SECTION {
        for (first, many) in [(0, 1), (1, 4), (2, 7), (0, 16), (3, 17), (0, 33), (0, 37)] {
            splits.push(MergeRow { state: first, states: many, before });
            let to = folded + rows.len() as u32;
            let mut at = 0;
            while at < many {
                let here = (SECTION - (before + at) % SECTION).min(many - at);
                rows.push(FoldRow { state: first + at, states: here, to: folded + rows.len() as u32, reserved: 0 });
                at += here;
            }
            sections.push(MergeRow { state: to, states: folded + rows.len() as u32 - to, before: 0 });
        }
    }
    // The targets follow the sources; there are as many as fit.
    check.holds("targets fit", rows.len() <= 4 * count);
    states.fold(&rows)?;
    let want = states.merge_as(Grain::Split, &splits, out)?;
    let got = states.merge_as(Grain::Section, &sections, out)?;
    check.bits("output", &got.out, &want.out);
    check.bits("log-sum-exp", &got.lse, &want.lse);
    check.done()
}

/// What matrix units are made for and what they are not, groups of more than a tile's vectors among them.
fn geometries(format: PageFormat) -> [Geometry; 3] {
    [
        Geometry::new(1, 4, 2, 32).value_dim(48).page_size(64).format(format),
        Geometry::new(1, 5, 1, 64).page_size(8).format(format),
        Geometry::new(1, 11, 1, 128).format(format),
    ]
}

fn attends<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let lens = [1, SPLIT, TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS + SPLIT + 3];
    for geometry in geometries(format) {
        let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 71);
        let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
        let see = |start, end| See { sequence: 5, start, end };
        let windows = [(1, 2 * TOKENS), (SPLIT, TOKENS), (3 * SPLIT + 9, TOKENS + 1), (TOKENS - 1, TOKENS + 1)];
        let windows = windows.into_iter().chain([(TOKENS, TOKENS + 5), (TOKENS + 2 * SPLIT, lens[5]), (7, 7)]);
        let windows: Vec<See> = windows.map(|(start, end)| see(start, end)).collect();
        let chunk: Vec<See> = (0..9).map(|at| see(0, TOKENS - 4 + at)).collect();
        let chunk_of_windows: Vec<See> = (0..9).map(|at| see(SPLIT - 3 + at, TOKENS + SPLIT - 4 + at)).collect();
        for (rows, seed) in [Ask::decode(&lens), windows, chunk, chunk_of_windows].into_iter().zip(72..) {
            let ask = Ask::random(&geometry, natural(format), rows, seed);
            let want = scene.compare(&mut bench, &ask, &mut check)?;
            let sections = Ask { grain: Grain::Section, ..ask };
            for (max_states, tile_splits) in [(1 << 20, None), (2, None), (1 << 20, Some(1)), (1 << 20, Some(2))] {
                let got = scene.ask(&mut bench, &Ask { max_states, tile_splits, ..sections.clone() })?;
                check.bits("output", &got.out, &want.out);
                check.bits("log-sum-exp", &got.lse, &want.lse);
                check.holds("memory between the outputs is untouched", got.tidy);
            }
        }
    }
    check.done()
}

/// Splits whose scores are all far below the others', or minus infinity, at the start, in the middle and at the end.
fn blanks<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    // An infinite key makes a scale infinite.
    let lowest = if format.is_quantized() { -1e4 } else { f32::NEG_INFINITY };
    for geometry in geometries(format) {
        let tokens = 2 * TOKENS + 40;
        let (mut k, v) = random_kv(&geometry, Dtype::Bf16, tokens, 81);
        let row = k.shape[1] * k.shape[2];
        for split in [0, 2, 3, 4, 5, 6, 7] {
            for token in (split * SPLIT)..(split + 1) * SPLIT {
                let value = if split % 2 == 0 { lowest } else { -300.0 };
                for (d, bits) in k.bits[token as usize * row..][..row].iter_mut().enumerate() {
                    *bits = encode(if d % k.shape[2] == 0 { value } else { 0.0 }, Dtype::Bf16);
                }
            }
        }
        let scene = Scene::new(&mut bench, geometry, &[tokens], (k, v), Placement::SHUFFLED)?;
        let rows = [(0, tokens), (0, SPLIT), (2 * SPLIT, TOKENS), (TOKENS, 2 * TOKENS), (0, TOKENS + 3)];
        let rows: Vec<See> = rows.into_iter().map(|(start, end)| See { sequence: 0, start, end }).collect();
        let (count, heads, dim) = (rows.len() as u32, geometry.q_heads(), geometry.k_dim());
        let one = |at: u32| if at.is_multiple_of(dim) { 1.0 } else { 0.0 };
        let bits = (0..count * heads * dim).map(|at| encode(one(at), natural(format))).collect();
        let shape = [count as usize, heads as usize, dim as usize];
        let ask = Ask::new(&geometry, Tensor { bits, shape, dtype: natural(format) }, rows);
        let want = scene.ask(&mut bench, &ask)?;
        let got = scene.ask(&mut bench, &Ask { grain: Grain::Section, ..ask })?;
        check.bits("output", &got.out, &want.out);
        check.bits("log-sum-exp", &got.lse, &want.lse);
    }
    check.done()
}
