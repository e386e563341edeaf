//! Does `attend` with `merge` compute softmax attention? Shapes, lengths, types and row patterns against float64.

use super::Cases;
use super::ask::{Ask, See};
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::Placement;
use super::scene::{Scene, random_kv};
use super::values::natural;
use crate::attention::SPLIT;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};

/// Query heads, KV heads, key and value elements, tokens a page: every head_dim, group and page size at least once.
const SHAPES: [(u32, u32, u32, u32, u32); 24] = [
    (1, 1, 16, 16, 8),
    (3, 1, 64, 64, 16),
    (8, 2, 80, 80, 64),
    (8, 8, 96, 96, 16),
    (14, 2, 128, 128, 16),
    (8, 1, 192, 192, 8),
    (4, 1, 256, 256, 64),
    (4, 2, 192, 128, 16),
    (16, 1, 40, 40, 32),
    (9, 3, 64, 64, 256),
    (71, 1, 64, 64, 16),
    (64, 1, 128, 128, 64),
    (64, 4, 64, 64, 8),
    (24, 4, 72, 72, 16),
    (40, 8, 32, 32, 16),
    (5, 5, 112, 112, 8),
    (6, 1, 136, 136, 16),
    (2, 1, 16, 256, 16),
    (2, 2, 256, 16, 128),
    (33, 1, 24, 40, 32),
    (10, 2, 128, 64, 256),
    (7, 1, 64, 128, 16),
    (128, 8, 16, 16, 16),
    (32, 8, 128, 128, 256),
];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let turn = format.code() as usize;
    for (at, shape) in SHAPES.into_iter().enumerate() {
        let (q_heads, kv_heads, k_dim, v_dim, page) = shape;
        let geometry = Geometry::new(1, q_heads, kv_heads, k_dim).value_dim(v_dim).page_size(page).format(format);
        let (q, out) = (Dtype::ALL[(at + turn) % 3], Dtype::ALL[(at / 3 + turn) % 3]);
        let name = format!(
            "{q_heads}/{kv_heads} heads of {k_dim} and {v_dim}, pages of {page}, {} → {}",
            q.name(),
            out.name()
        );
        let seen = u64::from(4 * page + 60 + 12 * 54);
        let weight = seen * u64::from(q_heads) * u64::from(k_dim + v_dim);
        list.add(Operation::Attend, format, weight, name, move |b| shapes(b, geometry, q, out));
    }
    for (q_heads, kv_heads, dim, page) in [(4, 1, 128, 16), (14, 2, 128, 8), (20, 1, 64, 32), (3, 3, 64, 16)] {
        let geometry = Geometry::new(1, q_heads, kv_heads, dim).page_size(page).format(format);
        let name =
            format!("{q_heads}/{kv_heads} heads of {dim}, pages of {page}, queries of their type, long and short");
        let weight = 2500 * u64::from(q_heads * dim);
        list.add(Operation::Attend, format, weight, name, move |b| matched(b, geometry));
    }
    for (at, q) in Dtype::ALL.into_iter().enumerate() {
        for (turn, out) in Dtype::ALL.into_iter().enumerate() {
            for (layout, out_layout) in [(at + turn, turn), (at + turn + 2, turn + 1)] {
                let (layout, out_layout) = (Layout::INPUTS[layout % 5], Layout::OUTPUTS[out_layout % 3]);
                let name = format!("{} queries {layout:?} → {} outputs {out_layout:?}", q.name(), out.name());
                list.add(Operation::Attend, format, 100_000, name, move |b| {
                    layouts(b, format, (q, layout), (out, out_layout))
                });
            }
        }
    }
    for (len, dim, heads) in [(4113, 64, 2), (4113, 16, 3), (20_000, 16, 1), (131_072, 16, 2)] {
        let name = format!("{len} tokens, {heads} heads of {dim}");
        let weight = u64::from(len * 2 * dim * heads);
        list.add(Operation::Attend, format, weight, name, move |b| long(b, format, len, dim, heads));
    }
    list.add(Operation::Attend, format, 900_000, "lengths around every split boundary", move |b| splits(b, format));
    list.add(Operation::Attend, format, 1_500_000, "windows that start anywhere", move |b| windows(b, format));
    list.add(Operation::Attend, format, 2_000_000, "causal chunks of several sequences", move |b| chunks(b, format));
    list.add(Operation::Attend, format, 2_000_000, "a chunk with a sliding window", move |b| sliding(b, format));
    // The shape of a grid has nothing to do with the format.
    if format == PageFormat::Bf16 {
        list.add(Operation::Attend, format, 5_000_000, "70,000 rows", move |b| many(b, format));
    }
}

/// Decode rows of ragged lengths (an empty sequence, and lengths around the page), and a causal chunk.
fn shapes<B: Backend>(backend: &B, geometry: Geometry, q: Dtype, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let page = geometry.page_tokens();
    let lens = [1, page - 1, 0, page, page + 1, 60];
    let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 21);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    let decode = Ask { out, ..Ask::random(&geometry, q, Ask::decode(&lens), 22) };
    scene.compare(&mut bench, &decode, &mut check)?;
    let chunk = (0..12).map(|at| See { sequence: 5, start: 0, end: 49 + at }).collect();
    let chunk = Ask { out, ..Ask::random(&geometry, q, chunk, 23) };
    scene.compare(&mut bench, &chunk, &mut check)?;
    check.done()
}

/// Decode rows, a causal chunk across splits and windows, with queries that need no conversion and an exact answer in f32.
fn matched<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let q = natural(geometry.page_format());
    let lens = [3, SPLIT + 5, 2 * SPLIT + 17, 0, 61];
    let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 51);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    scene.compare(&mut bench, &Ask::random(&geometry, q, Ask::decode(&lens), 52), &mut check)?;
    let mut rows: Vec<See> = (0..9).map(|at| See { sequence: 1, start: 0, end: SPLIT - 3 + at }).collect();
    rows.extend((0..7).map(|at| See { sequence: 2, start: SPLIT - 30 + 9 * at, end: 2 * SPLIT + 2 * at }));
    scene.compare(&mut bench, &Ask::random(&geometry, q, rows, 53), &mut check)?;
    check.done()
}

fn layouts<B: Backend>(backend: &B, format: PageFormat, q: (Dtype, Layout), out: (Dtype, Layout)) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 6, 2, 64).value_dim(32).format(format);
    let lens = [5, 0, 33];
    let kv = random_kv(&geometry, Dtype::F32, 38, 24);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    let mut rows = Ask::decode(&lens);
    rows.extend((0..5).map(|at| See { sequence: 2, start: 3, end: 29 + at }));
    let mut ask = Ask { q_layout: q.1, out: out.0, out_layout: out.1, ..Ask::random(&geometry, q.0, rows, 25) };
    scene.compare(&mut bench, &ask, &mut check)?;
    // Cut into batches, views move on from row to row.
    ask.max_states = 2;
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

/// A7: lengths at which a row of scores no longer fits anywhere near a core.
fn long<B: Backend>(backend: &B, format: PageFormat, len: u32, dim: u32, heads: u32) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, heads, 1, dim).format(format);
    let kv = random_kv(&geometry, Dtype::Bf16, len, 26);
    let scene = Scene::new(&mut bench, geometry, &[len], kv, Placement::SHUFFLED)?;
    let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&[len]), 27);
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

fn splits<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for page in [8, 16, 64, 256] {
        let geometry = Geometry::new(1, 3, 1, 16).value_dim(24).page_size(page).format(format);
        let lens = [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 2 * SPLIT, 2 * SPLIT + 1, 3, 3 * SPLIT];
        let kv = random_kv(&geometry, Dtype::F16, lens.iter().sum(), 28);
        let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
        let ask = Ask::random(&geometry, Dtype::Bf16, Ask::decode(&lens), 29);
        scene.compare(&mut bench, &ask, &mut check)?;
    }
    check.done()
}

fn windows<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 2, 32).value_dim(16).format(format);
    let lens = [3 * SPLIT, 40];
    let kv = random_kv(&geometry, Dtype::F32, lens.iter().sum(), 30);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    let mut rows = Vec::new();
    for start in [1, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 3 * SPLIT - 1] {
        for end in [start + 1, start + 16, SPLIT, SPLIT + 1, 2 * SPLIT, 3 * SPLIT] {
            if start < end && end <= 3 * SPLIT {
                rows.push(See { sequence: 0, start, end });
            }
        }
        rows.push(See { sequence: 1, start: start % 39, end: 40 });
        rows.push(See { sequence: 1, start: 40, end: 40 });
    }
    let ask = Ask::random(&geometry, Dtype::F32, rows, 31);
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

fn chunks<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (q_heads, kv_heads, out) in [(4, 2, Dtype::F32), (9, 3, Dtype::Bf16), (16, 1, Dtype::F16)] {
        let geometry = Geometry::new(1, q_heads, kv_heads, 16).format(format);
        let lens = [300, 5, 64, SPLIT + 3];
        let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 32);
        let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
        let mut rows = Vec::new();
        // Prefill of all, a chunk across a split boundary, verification of a few draft tokens.
        for (sequence, count) in [(1, 5), (0, 70), (3, 6), (2, 64), (3, 1)] {
            let len = lens[sequence];
            rows.extend((1..=count).map(|at| See { sequence, start: 0, end: len - count + at }));
        }
        let ask = Ask { out, ..Ask::random(&geometry, Dtype::Bf16, rows, 33) };
        scene.compare(&mut bench, &ask, &mut check)?;
    }
    check.done()
}

/// B12: rows that share a tile, of which some see nothing of its first or last splits.
fn sliding<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 1, 24).value_dim(40).page_size(32).format(format);
    let len = 2 * SPLIT + 40;
    let kv = random_kv(&geometry, Dtype::F16, len, 34);
    let scene = Scene::new(&mut bench, geometry, &[len], kv, Placement::SHUFFLED)?;
    for window in [1, 7, 100, SPLIT, SPLIT + 1] {
        let slide = |end: u32| See { sequence: 0, start: end.saturating_sub(window), end };
        let rows = [SPLIT - 9, SPLIT - 1, 2 * SPLIT - 9, len - 20].into_iter().flat_map(|e| (e..e + 20).map(slide));
        let ask = Ask::random(&geometry, Dtype::F16, rows.collect(), 35);
        scene.compare(&mut bench, &ask, &mut check)?;
    }
    check.done()
}

/// B21: more tiles, and more rows to merge, than 65,535 groups of a grid.
fn many<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let lens: Vec<u32> = (0..70_000).map(|at| at % 4).collect();
    let kv = random_kv(&geometry, Dtype::F32, lens.iter().sum(), 36);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&lens), 37);
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}
